"""Run penstock commands in forks of one warm process, each with its fault.

In:    requests, one JSON line each, on standard input
Out:   answers, one JSON line each, on standard output
Keeps: 0.05 s for a run instead of 3 s: the imports and the kernels are there before the fork
Never: runs inside pytest; starts more than it is asked to

    start: fork a run           wait: until it ends or stops           signal: to one of ours
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NoReturn

import pyarrow.parquet as pq

import penstock.cli
import penstock.kernels
from penstock.produce import writer as write
from penstock.queue import provider
from penstock.store import local, log
from penstock.store.local import LocalStore
from penstock.store.store import Stored
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work import pool

from . import calls, disk, mutants
from .sweep import LETTERS


class Letters:
    """A tokenizer of bytes, without threads: it may be loaded before a fork."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def know_letters() -> None:
    """Let `--tokenizer letters` mean that one: loading another takes longer than a whole run."""
    real, letters = Tokenizer.load, Tokenizer.load(Letters())

    def load(source: Any, **options: Any) -> Tokenizer:
        return letters if source == LETTERS else real(source, **options)

    setattr(Tokenizer, "load", load)  # noqa: B010


def serve() -> None:
    """Answer until standard input ends."""
    warm_up()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        match request["do"]:
            case "start":
                answer: dict[str, Any] = {"pid": start(request)}
            case "wait":
                answer = wait(request["pid"])
            case "signal":
                os.kill(request["pid"], request["signal"])
                answer = {}
        print(json.dumps(answer), flush=True)


def warm_up() -> None:
    """Load what every run needs, by running the commands themselves once."""
    sys.dont_write_bytecode = True  # no calls beside those of penstock
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        lines, dataset = Path(folder) / "lines.jsonl", Path(folder) / "dataset"
        lines.write_text('{"text": "warm"}\n{"text": "up"}\n')
        shard = ["shard", "--input", str(lines), "--parquet_dir", str(dataset), "--complete"]
        know_letters()
        shard += ["--tokenizer", LETTERS, "--tokens"]
        assert command([*shard, "--val_fraction", "0.5", "--threads", "1"]) == 0
        assert command(["verify", "--full", str(dataset)]) == 0
    # what `chunk` loads; it encodes nothing here: threads of a tokenizer do not survive a fork
    names = ("penstock.produce.producer", "penstock.queue.claims", "penstock.cli.queue")
    for name in (*names, "awkward", "gigatoken", "tokenizers"):
        importlib.import_module(name)
    for kernel in penstock.kernels.known:
        kernel.prepare()


def start(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        run(request)
    return pid


def wait(pid: int) -> dict[str, Any]:
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return {"stopped": True}
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return {"exit": os.WEXITSTATUS(status)}


def run(request: dict[str, Any]) -> NoReturn:
    """Be the child: apply what was asked for, run the commands, leave."""
    code = 99
    try:
        calls.die_with_parent()
        os.environ.update(request["environment"])
        null = os.open(os.devnull, os.O_RDONLY)
        out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        watch = calls.Watch(request["folder"], request["input"], calls.Fault(**request["fault"]))
        promise = _keep_promises(request, watch)
        if request["seed"] is not None:
            make_names_repeatable(request["seed"])
        if request["wait_for_tracer"]:
            be_traced()
        else:
            watch.install()
        mutant = request["mutant"]
        watch.skip_fsync = mutants.fsync_to_skip(mutant)
        if mutant in mutants.BUGS:
            mutants.BUGS[mutant]()
        if request["intruder"]:
            watch.before_link = _intruder(request["intruder"])
        code = 0
        for argv in request["commands"]:
            code = command(argv)
            if code:
                break
        if code == 0 and promise is not None:
            watch.paused = True
            promise.all_of(request["folder"])
            watch.paused = False
            watch.point("end", request["folder"])
        if request["calls"]:
            rows = [[call.name, call.path, call.caller] for call in watch.calls]
            Path(request["calls"]).write_text(json.dumps(rows))
    except BaseException:
        traceback.print_exc()
        code = 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command(argv: list[str]) -> int:
    """Exit code of one command, as the shell would see it."""
    sys.argv = ["penstock", *argv]
    try:
        penstock.cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class _Inline(concurrent.futures.Executor):
    """Does at once, in the caller's thread, what a pool would do beside it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def submit(self, fn: Any, /, *args: Any, **options: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


def be_traced() -> None:
    """Stop until a tracer is there; then make every call in one thread, so that it can count."""
    one_thread = functools.partial(pq.ParquetFile, pre_buffer=False)
    setattr(pq, "ParquetFile", one_thread)  # noqa: B010
    for module in (write, pool, provider):  # mypy: they are not ours to set
        setattr(module, "ThreadPoolExecutor", _Inline)  # noqa: B010
    calls.let_anyone_trace()
    os.kill(os.getpid(), signal.SIGSTOP)


def make_names_repeatable(seed: int) -> None:
    """The same ids and times for the same seed, so that equal states have equal bytes; and calls in
    the same order."""
    for module in (pool, provider):
        setattr(module, "ThreadPoolExecutor", _Inline)  # noqa: B010
    chance = random.Random(seed)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls(2026, 1, 1, tzinfo=UTC)

    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128))
    secrets.token_hex = lambda nbytes=None: f"{chance.getrandbits(64):016x}"
    log.datetime = Clock  # type: ignore[attr-defined]


class _Promises:
    """Note each thing that penstock calls durable, where a power loss does not reach."""

    def __init__(self, note: Callable[[str, str], None], forget: Callable[[str], None]) -> None:
        self.note = note
        self.forget = forget

    def all_of(self, folder: str) -> None:
        """A command that ended well promises every object there is."""
        for name, data in disk.read_state(folder).items():
            if data is not None and ".tmp-" not in name:
                self.note(os.path.join(folder, name), hashlib.sha256(data).hexdigest())

    def install(self) -> None:
        real_create, real_put, real_remove = LocalStore.create, LocalStore.put, LocalStore.remove
        real_make = local._make_folder
        promises = self

        def create(self: LocalStore, name: str, data: bytes) -> None:
            real_create(self, name, data)
            promises.note(str(self.root / name), hashlib.sha256(data).hexdigest())

        def put(self: LocalStore, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
            stored = real_put(self, name, write)
            promises.note(str(self.root / stored.name), stored.sha256)
            return stored

        def remove(self: LocalStore, name: str) -> None:
            promises.forget(str(self.root / name))
            real_remove(self, name)

        def make(folder: Path) -> None:
            real_make(folder)
            promises.note(str(folder), "folder")

        LocalStore.create = create  # type: ignore[method-assign]
        LocalStore.put = put  # type: ignore[method-assign]
        LocalStore.remove = remove  # type: ignore[method-assign]
        local._make_folder = make


def _keep_promises(request: dict[str, Any], watch: calls.Watch) -> _Promises | None:
    if request["promises"]:  # a real power loss: the notes lie outside what loses power
        notes = os.open(request["promises"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        write = os.write

        def note(path: str, sha256: str) -> None:
            write(notes, (json.dumps([path, sha256]) + "\n").encode())

        promises = _Promises(note, lambda path: note(path, ""))
    elif request["model"]:
        promises = _model(request["model"], watch)
    else:
        return None
    promises.install()
    return promises


def _model(model: dict[str, Any], watch: calls.Watch) -> _Promises:
    """Follow the run on a `Disk`; at each call keep what a power loss there could leave."""
    out, earlier = Path(model["states"]), model["earlier"]
    if earlier:
        watch.disk = disk.Disk.load(Path(earlier).read_bytes())
    else:
        watch.disk = disk.Disk(watch.folder)
    seen: set[tuple[str, tuple[str, ...]]] = set()

    def before_call(number: int, call: calls.Call) -> None:
        if model["keep_at"] == number:
            (out / "disk").write_bytes(watch.disk.save())
        if model["keep_at"] or (call.name == "write" and number != watch.fault.at):
            return  # the model drops what was not synced: a write changes nothing in it
        for policy in disk.POLICIES:
            state = watch.disk.after_power_loss(policy)
            broken = watch.disk.broken_promises(state)
            key = (disk.digest(state), tuple(broken))
            if key in seen:
                continue
            seen.add(key)
            kept = {"point": number, "call": str(call), "policy": policy, "broken": broken}
            encoded = {k: None if v is None else v.hex() for k, v in state.items()}
            name = f"{number:05d}-{policy}.json"
            (out / name).write_text(json.dumps({**kept, "state": encoded}))

    watch.before_call = before_call
    return _Promises(
        lambda path, sha256: watch.disk.promise(path, sha256),
        lambda path: watch.disk.promised.pop(path, None),
    )


def _intruder(what: dict[str, Any]) -> Callable[[str, str], None]:
    """An older writer links its own copy of an object just before this one would."""

    waiting = [what["name"]]

    def before_link(source: str, target: str) -> None:
        if os.path.basename(target) not in waiting:
            return
        waiting.clear()
        data = Path(source).read_bytes() if what["same"] else b"other bytes"
        copy = os.path.join(os.path.dirname(target), ".tmp-0-00")
        descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, data)
        os.close(descriptor)
        os.link(copy, target)
        os.unlink(copy)

    return before_link


if __name__ == "__main__":
    calls.die_with_parent()
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve()
