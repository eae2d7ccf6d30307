"""Plant bugs, one at a time, and see whether the tests beside them notice.

In:    tests/mutants.toml: a text of src that occurs once, what replaces it, which tests to run
Out:   a table of killed and survived by folder; exit code 1 if fewer than 95% are killed, or if
       one that nobody has explained survives
Never: touches the working tree: each bug is planted in a copy of src and tests

    .venv/bin/python scripts/mutants.py                      all of them, two at a time
    .venv/bin/python scripts/mutants.py --only stream        those whose file or name has "stream"
    .venv/bin/python scripts/mutants.py --random 20 --seed 3 --only supply/window.py
                                                             made by rule, not from the list

The tests must pass without a bug first: a file of tests that fails anyway kills nothing. That run
also says how long each file takes: the quickest goes first, and a hang is a kill.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = Path("src/penstock")
LIST: Final = ROOT / "tests" / "mutants.toml"
LEAST_KILLED: Final = 0.95
_COPIED: Final = ("src", "tests")
_PYTEST: Final = (
    *("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"),
    *("-p", "no:doctest", "-o", "addopts=--import-mode=importlib"),
    *("-m", "not faults and not services", "-p", "no_shrinking", "--hypothesis-seed=0"),
)
_NO_SHRINKING: Final = """\
from hypothesis import Phase, settings

settings.register_profile("no_shrinking", phases=[Phase.explicit, Phase.generate])
settings.load_profile("no_shrinking")
"""
"""That a property fails is enough: the smallest case takes up to a minute to find."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A bug: `old`, which occurs once in `file`, becomes `new`."""

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    survives: str = ""
    """Why no test can or need notice it; empty for nearly all."""

    @property
    def folder(self) -> str:
        return self.file.partition("/")[0]

    def planted(self, text: str) -> str:
        """The module with the bug in it."""
        found = text.count(self.old)
        if found != 1:
            raise SystemExit(f"{self.file}: {found} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


def read_list(path: Path = LIST) -> list[Mutant]:
    """The mutants of a file: `beside` names the tests of each module, in `mutant` are the bugs."""
    data = tomllib.loads(path.read_text())
    return [
        Mutant(
            **{name: value for name, value in entry.items() if name != "tests"},
            tests=tuple(entry.get("tests") or data["beside"][entry["file"]]),
        )
        for entry in data["mutant"]
    ]


# Bugs made by rule

_SWAPPED: Final[dict[type[ast.AST], type[ast.cmpop] | type[ast.operator]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a slip could have made of an expression."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [_SWAPPED[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        yield ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        yield ast.Call(ast.Name(_CALLS[node.func.id]), node.args, node.keywords)


def made_by_rule(file: str, tests: tuple[str, ...]) -> list[Mutant]:
    """Every slip of one expression in the functions of a module."""
    text = (ROOT / SOURCE / file).read_text()
    lines = text.splitlines(keepends=True)
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in (part for statement in function.body for part in ast.walk(statement)):
            for changed in _changes(node):
                assert isinstance(node, ast.expr)
                if node.lineno != node.end_lineno:
                    continue
                # offsets of the parser are in bytes
                line = lines[node.lineno - 1].encode()
                new = b"".join(
                    (line[: node.col_offset], b"(", ast.unparse(changed).encode(), b")",
                     line[node.end_col_offset :])
                ).decode()  # fmt: skip
                before, after = lines[: node.lineno - 1], lines[node.lineno :]
                found.append(
                    Mutant(
                        file=file,
                        old=text,
                        new="".join((*before, new, *after)),
                        breaks=f"line {node.lineno}: {ast.unparse(node)} -> {ast.unparse(changed)}",
                        tests=tests,
                    )
                )
    return found


# Running


_running: set[int] = set()
"""Processes that run tests, each the first of a group of its own."""
_ended = threading.Event()


def _end(number: int, frame: FrameType | None) -> None:
    """Ctrl-C and SIGTERM end the tests too: they are in groups that a terminal does not reach."""
    signal.signal(number, signal.SIG_IGN)
    _ended.set()
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    raise SystemExit("ended")


class Copy:
    """A copy of the tree in which one bug after the other is planted."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "tree"
        self._scratch = folder / "tmp"
        self._plugins = folder / "plugins"
        for made in (self._root, self._plugins):
            made.mkdir()
        (self._plugins / "no_shrinking.py").write_text(_NO_SHRINKING)
        for path in ROOT.iterdir():
            if path.name in _COPIED:
                # with compiled modules and kernels: only what is changed is compiled again
                shutil.copytree(path, self._root / path.name, symlinks=True)
            elif path.name not in (".git", ".hypothesis"):
                (self._root / path.name).symlink_to(path)

    def run(self, tests: Sequence[str], time_limit_s: float) -> str:
        """How the tests ended: passed, or the first that did not pass, or how they hung."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self._root / 'src'}:{self._plugins}",
            "TMPDIR": str(self._scratch),
        }
        output = self._scratch / "output"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, *_PYTEST, f"--basetemp={self._scratch / 'pytest'}", *tests],
                cwd=self._root, env=environment, start_new_session=True, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        _running.add(process.pid)
        deadline = time.monotonic() + time_limit_s
        try:
            # one that has failed may not end: a thread of the test still waits for something
            while process.poll() is None and not _first_failure(output):
                if time.monotonic() > deadline:
                    return f"hung: not over after {time_limit_s:.0f} s"
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
            process.wait()
            _running.discard(process.pid)
        if _ended.is_set():
            raise SystemExit("ended")
        failed = _first_failure(output)
        if failed or process.returncode == 0:
            return failed
        text = output.read_text(errors="replace")
        if process.returncode in (4, 5):  # of pytest: a wrong call, nothing collected
            raise SystemExit(f"pytest has nothing to run in {', '.join(tests)}:\n{text}")
        return f"ended with {process.returncode}: {text[-300:]}"

    def plant(self, mutant: Mutant) -> None:
        path = self._root / SOURCE / mutant.file
        self._write(path, mutant.planted(path.read_text()))

    def restore(self, mutant: Mutant) -> None:
        self._write(self._root / SOURCE / mutant.file, (ROOT / SOURCE / mutant.file).read_text())

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # Python goes by seconds and size: two bugs could be alike


def _first_failure(output: Path) -> str:
    """The line with which pytest names what failed; it is among its last ones."""
    lines = output.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), "")


@dataclass(frozen=True, slots=True)
class Result:
    mutant: Mutant
    killed_by: str
    took_s: float


def measure(copies: "queue.Queue[Copy]", tests: set[str], jobs: int) -> dict[str, float]:
    """Seconds that each file of tests takes without a bug; an error if one fails."""

    def one(test: str) -> tuple[str, float]:
        copy, began = copies.get(), time.monotonic()
        try:
            # once more: beside other work a test that looks at the clock may fail
            if failed := copy.run([test], 900) and copy.run([test], 900):
                raise SystemExit(f"{test} fails without any bug: {failed}")
            return test, time.monotonic() - began
        finally:
            copies.put(copy)

    threads = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        return dict(threads.map(one, sorted(tests)))
    finally:
        threads.shutdown(cancel_futures=True)


def attack(mutant: Mutant, copies: "queue.Queue[Copy]", seconds: dict[str, float]) -> Result:
    """Plant a bug, run the tests beside it."""
    tests = sorted(mutant.tests, key=lambda test: seconds.get(test, 0.0))
    # four times what they take, and two minutes for kernels that are compiled anew
    limit_s = 120 + 4 * sum(seconds.get(test, 60.0) for test in tests)
    copy, began = copies.get(), time.monotonic()
    try:
        copy.plant(mutant)
        killed_by = copy.run(tests, limit_s)
    finally:
        copy.restore(mutant)
        copies.put(copy)
    result = Result(mutant, killed_by, time.monotonic() - began)
    what = "killed  " if killed_by else "SURVIVED"
    print(f"{what} {result.took_s:4.0f} s  {mutant.file}: {mutant.breaks}", flush=True)
    if killed_by:
        print(f"                 {killed_by.splitlines()[0][:160]}", flush=True)
    return result


def report(results: list[Result]) -> bool:
    """Print the table; whether it is good enough."""
    print("\n| folder | planted | killed | survived | killed of planted |\n|---|---|---|---|---|")
    folders = sorted({result.mutant.folder for result in results})
    for folder in [*folders, ""]:
        chosen = [r for r in results if folder in ("", r.mutant.folder)]
        killed = sum(bool(r.killed_by) for r in chosen)
        name, share = folder or "all", killed / len(chosen)
        print(f"| {name} | {len(chosen)} | {killed} | {len(chosen) - killed} | {share:.0%} |")
    survivors = [result.mutant for result in results if not result.killed_by]
    if survivors:
        print("\nSurvivors:")
    for mutant in survivors:
        print(f"- {mutant.file}: {mutant.breaks}")
        print(f"  {mutant.survives or 'NOT EXPLAINED: write a test, or say in the list why not'}")
    for result in results:
        if result.killed_by and result.mutant.survives:
            print(f"- {result.mutant.file}: {result.mutant.breaks}\n  is killed by now")
    killed = sum(bool(result.killed_by) for result in results)
    return killed >= LEAST_KILLED * len(results) and all(m.survives for m in survivors)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant bugs, and see whether tests notice.")
    parser.add_argument("--only", nargs="+", default=[""], help="whose file or line says this")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--random", type=int, metavar="N", help="N bugs made by rule instead")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a bug")
    options = parser.parse_args()
    mutants = read_list()
    if options.random is not None:
        beside = tomllib.loads(LIST.read_text())["beside"]
        mutants = [
            mutant
            for file, tests in sorted(beside.items())
            if any(word in file for word in options.only)
            for mutant in made_by_rule(file, tuple(tests))
        ]
        mutants = random.Random(options.seed).sample(mutants, min(options.random, len(mutants)))
    else:
        mutants = [
            m for m in mutants if any(word in f"{m.file}: {m.breaks}" for word in options.only)
        ]
    if not mutants:
        raise SystemExit(f"there is no mutant of {', '.join(options.only)}")
    began = time.monotonic()
    for deadly in (signal.SIGINT, signal.SIGTERM):
        signal.signal(deadly, _end)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        Path(folder).chmod(0o755)  # some tests read the copy as another user
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(options.jobs):
            (Path(folder) / str(number)).mkdir()
            copies.put(Copy(Path(folder) / str(number)))
        tests = {test for mutant in mutants for test in mutant.tests}
        seconds = {} if options.trust else measure(copies, tests, options.jobs)
        if seconds:
            print(f"{len(tests)} files of tests pass without a bug", flush=True)
        threads = concurrent.futures.ThreadPoolExecutor(options.jobs)
        try:
            results = list(threads.map(lambda mutant: attack(mutant, copies, seconds), mutants))
        finally:
            threads.shutdown(cancel_futures=True)
    good = report(results)
    print(f"\n{len(results)} bugs in {(time.monotonic() - began) / 60:.0f} min")
    sys.exit(not good)


if __name__ == "__main__":
    main()
