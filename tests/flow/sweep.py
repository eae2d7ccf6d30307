"""The small run that every sweep disturbs, and the oracle that judges what became of it.

In:    a folder; a fault
Out:   how the run ended; every way in which the dataset is not exactly its input
Keeps: the oracle outside: it reads the input with `json`, the log with `json`, the shards with
       pyarrow, and asks nothing of penstock but `verify --full`
Never: skips for lack of a tool
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from .calls import Call, Fault
from .disk import State, digest, read_state

NO_FAULT: Final = Fault()
BAD_LINES: Final = (5, 23)
LETTERS: Final = "letters"
"""A tokenizer whose tokens are the bytes of the text; only job.py knows it."""
TESTS: Final = Path(__file__).resolve().parent.parent


def tool(name: str) -> str:
    """Path of a program that the sweeps need."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    assert found, f"{name} is not installed: scripts/tools installs it"
    return found


def write_input(path: Path) -> None:
    """40 lines, two of them bad, the last one without a newline."""
    lines = [
        b'{"text": broken %d' % k
        if k in BAD_LINES
        else json.dumps({"text": f"document {k} " + "é" * (k * 7 % 50)}).encode()
        for k in range(40)
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")


@dataclass(slots=True)
class Ended:
    """How a run ended."""

    code: int | None
    """Exit code; None when a signal ended it."""
    signal: int | None
    output: str

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"
        return f"{how}, the end of its output:\n" + "\n".join(self.output.splitlines()[-6:])


class Running:
    """A run that may be paused."""

    def __init__(self, warm: "Warm", pid: int, output: Path) -> None:
        self._warm = warm
        self.pid = pid
        self._output = output

    def wait(self) -> Ended | None:
        """How it ended, or None if it stopped."""
        answer = self._warm.ask({"do": "wait", "pid": self.pid})
        if answer.get("stopped"):
            return None
        return Ended(answer.get("exit"), answer.get("signal"), self._output.read_text())

    def resume(self) -> None:
        self._warm.ask({"do": "signal", "pid": self.pid, "signal": int(signal.SIGCONT)})


class Warm:
    """The process that forks runs: see job.py."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._started = 0
        paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
        self._errors = (scratch / "warm.stderr").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flow.job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
        )
        self._answer()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the warm process ended: " + (self.scratch / "warm.stderr").read_text()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(
        self,
        commands: Sequence[Sequence[str]],
        *,
        folder: Path,
        input: Path,
        fault: Fault = NO_FAULT,
        seed: int | None = 1,
        mutant: str = "",
        calls: Path | None = None,
        promises: Path | None = None,
        model: dict[str, Any] | None = None,
        intruder: dict[str, Any] | None = None,
        wait_for_tracer: bool = False,
        environment: dict[str, str] | None = None,
    ) -> Running:
        """Begin a run; at most two are alive at once in these tests."""
        self._started += 1
        output = self.scratch / f"output-{self._started % 16}"
        request = {
            "do": "start",
            "commands": [list(command) for command in commands],
            "folder": str(folder),
            "input": str(input),
            "fault": asdict(fault),
            "seed": seed,
            "mutant": mutant,
            "calls": calls and str(calls),
            "promises": promises and str(promises),
            "model": model,
            "intruder": intruder,
            "wait_for_tracer": wait_for_tracer,
            "environment": environment or {},
            "output": str(output),
        }
        return Running(self, int(self.ask(request)["pid"]), output)

    def run(self, commands: Sequence[Sequence[str]], **options: Any) -> Ended:
        """A run to its end."""
        ended = self.start(commands, **options).wait()
        assert ended is not None, "it stopped, and nobody asked it to"
        return ended

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._errors.close()


def shard_command(input: Path, dataset: Path) -> list[str]:
    """The small run."""
    return [
        *("shard", "--input", str(input), "--parquet_dir", str(dataset), "--complete"),
        *("--rows_per_file", "11", "--val_fraction", "0.2", "--max_rejects", "0.2"),
        *("--threads", "1", "--bytes_per_file", "1MB", "--max_line_bytes", "1MB"),
        *("--tokenizer", LETTERS, "--tokens"),
    ]


def verify_command(dataset: Path) -> list[str]:
    return ["verify", "--full", str(dataset)]


@dataclass(slots=True)
class Small:
    """The small run, undisturbed, and what to compare with it."""

    warm: Warm
    scratch: Path
    input: Path
    calls: list[Call] = field(default_factory=list)
    hashes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """split and sha256 of every file of an undisturbed run"""
    judged: dict[str, list[str]] = field(default_factory=dict)
    """Faults found after a restart, by the state it started from."""
    restarts: int = 0
    """How many states were new, and restarted from."""

    @classmethod
    def prepare(cls, warm: Warm, scratch: Path) -> "Small":
        small = cls(warm, scratch, scratch / "input.jsonl")
        write_input(small.input)
        folder = small.folder("undisturbed")
        listed = scratch / "calls.json"
        ended = small.shard(folder, calls=listed)
        assert ended.code == 0, str(ended)
        small.calls = [Call(*row) for row in json.loads(listed.read_text())]
        small.hashes = file_hashes(folder / "data")
        assert not small.faults(folder, exact_hashes=False)
        splits = Counter(split for split, _ in small.hashes)
        assert splits["train"] >= 3, splits
        assert splits["val"] == 1, splits
        assert splits["rejects"] == 2, splits
        assert splits["tokens"] == splits["train"] + 1, splits
        assert len(small.calls) > 400, len(small.calls)
        shutil.rmtree(folder)
        return small

    def folder(self, name: str) -> Path:
        """An empty folder for one point; its dataset will be `data` below it."""
        folder = self.scratch / name
        folder.mkdir()
        return folder

    def start(self, folder: Path, *, with_verify: bool = False, **options: Any) -> Running:
        dataset = folder / "data"
        commands = [shard_command(self.input, dataset)]
        if with_verify:
            commands.append(verify_command(dataset))
        return self.warm.start(commands, folder=folder, input=self.input, **options)

    def shard(self, folder: Path, **options: Any) -> Ended:
        ended = self.start(folder, **options).wait()
        assert ended is not None, "it stopped, and nobody asked it to"
        return ended

    def restart_faults(
        self, folder: Path, *, mutant: str = "", seed: int = 2, every: bool = False
    ) -> list[str]:
        """What is wrong after the same command was given again; the folder is used up.

        Equal states have equal futures: each is judged once, unless `every` asks for all.
        """
        key = f"{mutant} {seed} {digest(read_state(folder))}"
        if every or key not in self.judged:
            self.restarts += 1
            ended = self.shard(folder, with_verify=True, seed=seed, mutant=mutant)
            found = [] if ended.code == 0 else [f"the restart failed: {ended}"]
            self.judged[key] = found + self.faults(folder)
        shutil.rmtree(folder)
        return self.judged[key]

    def faults(self, folder: Path, *, exact_hashes: bool = True) -> list[str]:
        """Every way in which the dataset is not exactly the input."""
        try:
            return list(self._faults(folder / "data", exact_hashes=exact_hashes))
        except (OSError, ValueError, KeyError) as error:
            return [f"the dataset cannot be read: {error!r}"]

    def _faults(self, dataset: Path, *, exact_hashes: bool) -> Iterator[str]:
        good, bad = expected(self.input)
        found: Counter[tuple[str, int, int, str]] = Counter()
        refused: Counter[tuple[int, int]] = Counter()
        texts: dict[str, list[list[int]]] = {}
        tokens: dict[str, list[list[int]]] = {}
        records = read_records(dataset)
        for file in live_files(records):
            stem = re.split(r"[.-]", file["name"])[0]
            path = dataset / file["name"]
            if not path.exists():
                yield f"{file['name']} is in the log and not there"
            elif file["split"] == "rejects":
                for line in path.read_text().splitlines():
                    row = json.loads(line)
                    refused[row["start"], row["end"]] += 1
            elif file["split"] == "tokens":
                tokens[stem] = pa.ipc.open_file(path.read_bytes()).read_all()["tokens"].to_pylist()
            else:
                table = pq.read_table(path, memory_map=False, use_threads=False)
                columns = [table[name].to_pylist() for name in ("source", "start", "end", "text")]
                found.update(zip(*columns, strict=True))
                texts[stem] = [list(text.encode()) for text in columns[3]]
        if tokens != texts:
            yield f"the tokens of {sorted(tokens)} are not those of {sorted(texts)}"
        yield from _differences("document", good, found)
        yield from _differences("refused line", bad, refused)
        if not records or records[-1]["ops"][-1]["type"] != "seal":
            yield "not sealed"
        if not (dataset / "_COMPLETE").exists():
            yield "_COMPLETE is missing"
        if exact_hashes and file_hashes(dataset) != self.hashes:
            yield "the files are not bit for bit those of an undisturbed run"


def expected(input: Path) -> tuple[Counter[tuple[str, int, int, str]], Counter[tuple[int, int]]]:
    """Documents, and lines to be refused, by an independent reading of the input."""
    good: Counter[tuple[str, int, int, str]] = Counter()
    bad: Counter[tuple[int, int]] = Counter()
    at = 0
    for line in input.read_bytes().splitlines(keepends=True):
        try:
            good[str(input), at, at + len(line), json.loads(line)["text"]] += 1
        except ValueError:
            bad[at, at + len(line)] += 1
        at += len(line)
    return good, bad


def read_records(dataset: Path) -> list[dict[str, Any]]:
    """The records of the log, in order."""
    records: list[dict[str, Any]] = []
    while (path := dataset / "_log" / f"{len(records):020d}.json").exists():
        records.append(json.loads(path.read_bytes()))
    return records


def live_files(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the records add and do not retire."""
    files: list[dict[str, Any]] = []
    for record in records:
        for op in record["ops"]:
            if op["type"] == "add":
                files.append(op)
            elif op["type"] == "retire":
                files = [file for file in files if file["name"] != op["name"]]
    return files


def file_hashes(dataset: Path) -> Counter[tuple[str, str]]:
    """Split and sha256, of what is on the disk, of every file that the log names."""
    return Counter(
        (file["split"], hashlib.sha256((dataset / file["name"]).read_bytes()).hexdigest())
        for file in live_files(read_records(dataset))
        if (dataset / file["name"]).exists()
    )


def litter(dataset: Path) -> list[str]:
    """Temporary files that nobody will ever look at again."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), dataset)
        for folder, _, names in os.walk(dataset)
        for name in names
        if name.startswith(".tmp-")
    )


def spread(points: int, keep: int) -> list[int]:
    """About `keep` of the points 1..points, evenly, with both ends.

    >>> spread(10, 4)
    [1, 4, 7, 10]
    """
    keep = min(keep, points)
    if keep <= 1:
        return [1][:points]
    return sorted({1 + round(k * (points - 1) / (keep - 1)) for k in range(keep)})


CHANGING: Final = frozenset({"create", "write", "mkdir", "link", "unlink", "rename"})
"""Calls after which a killed process leaves something else than before them."""


def each_state(calls: Sequence[Call]) -> list[int]:
    """Points at which a kill leaves every state that it can leave, without those between which it
    leaves the same: the first, the last, and those right after a change. Of the writes to one
    temporary file, which nothing reads, after the first and the last.

    >>> rows = [("mkdir", "d"), ("stat", "d"), ("create", "d/.tmp-1"), ("write", "d/.tmp-1"),
    ...         ("write", "d/.tmp-1"), ("write", "d/.tmp-1"), ("fsync", "d/.tmp-1"), ("close", "d")]
    >>> each_state([Call(name, path, "") for name, path in rows])
    [1, 2, 4, 5, 7, 8]
    """
    points = {1, len(calls)}
    for n, call in enumerate(calls[:-1]):
        around = calls[max(n - 1, 0)], calls[n + 1]
        amid = call.name == "write" and "/.tmp-" in call.path and {call} == {*around}
        if call.name in CHANGING and not amid:
            points.add(n + 2)
    return sorted(points)


def each_kind(calls: Sequence[Call]) -> list[int]:
    """The first and the last call of each kind: what is done, to what, on whose behalf.

    >>> rows = [("open", "a1"), ("open", "a2"), ("open", "a3"), ("read", "a3"), ("open", "b")]
    >>> each_kind([Call(name, path, "f<g") for name, path in rows])
    [1, 3, 4, 5]
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    for n, call in enumerate(calls, 1):
        path = re.sub(r"\.tmp-.*|\d+", "#", call.path)
        found.setdefault((call.name, path, call.caller), []).append(n)
    return sorted({n for places in found.values() for n in (places[0], places[-1])})


def in_strides(calls: Sequence[Call]) -> list[int]:
    """All points in an order that is soon everywhere: first not amid a file, then amid files."""
    between = [n for n, call in enumerate(calls, 1) if call.name != "write"]
    within = [n for n, call in enumerate(calls, 1) if call.name == "write"]
    return [n for points in (between, within) for k in range(13) for n in points[k::13]]


def likely_points(small: "Small", bug: str) -> list[int]:
    """All points of a run with a planted bug; first those right after a name has come or gone."""
    folder = small.folder("likely")
    listed = small.scratch / "planted.json"
    small.shard(folder, mutant=bug, calls=listed)
    shutil.rmtree(folder)
    calls = [Call(*row) for row in json.loads(listed.read_text())]
    naming = {
        n
        for n, call in enumerate(calls, 1)
        if call.name in ("rename", "link")
        or (call.name in ("unlink", "create") and ".tmp-" not in call.path)
    }
    near = {n for at in naming for n in (at, at + 1, at + 5)}
    return sorted(in_strides(calls), key=lambda n: n not in near)


def undisturbed(small: "Small", bug: str) -> list[str]:
    """What is wrong with a run that has a planted bug and meets no fault."""
    folder = small.folder(f"undisturbed-{bug}".replace(" ", "-"))
    ended = small.shard(folder, mutant=bug, with_verify=True)
    found = [] if ended.code == 0 else [str(ended)]
    found += small.faults(folder)
    shutil.rmtree(folder)
    return found


def tell(bad: Sequence[str], points: int, what: str) -> str:
    """The message of a sweep that failed, short enough to be read."""
    return f"{what}: {len(bad)} bad of {points} points\n" + "\n".join(bad[:10])


def state_of(encoded: dict[str, str | None]) -> State:
    """A state as job.py writes it."""
    return {name: None if data is None else bytes.fromhex(data) for name, data in encoded.items()}


def _differences(what: str, want: Counter[Any], have: Counter[Any]) -> Iterator[str]:
    for lost in (want - have).elements():
        yield f"lost {what}: {lost}"
    for extra in (have - want).elements():
        yield f"doubled or foreign {what}: {extra}"
