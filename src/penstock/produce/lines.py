"""Write chunks as JSON lines, for `penstock shard` or anyone else who follows a growing file.

In:    batches of prepared rows, in order
Out:   OUTPUT, a line for each: text, source, start, end, part, parts, doc_id; at the end
       OUTPUT.done; for whoever makes a dataset of them: how they were cut, and who makes it
Keeps: OUTPUT.progress, replaced after each batch is durable: how far the inputs were read and how
       long OUTPUT was then; a restart writes on from that length, the same bytes
Never: shortens OUTPUT: who follows it has perhaps read further than the last progress
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from penstock.disk import open_own, read_own, replacing
from penstock.errors import BadConfig, BadInput, Fenced, InputReplaced
from penstock.ingest.lines import DONE_SUFFIX, mark_done
from penstock.ingest.open import COMPRESSED, look_at, missing
from penstock.options import MOST, differences
from penstock.produce.writer import (
    Batch,
    Gatherer,
    ShardConfig,
    as_begun,
    input_difference,
    is_shuffled,
)
from penstock.store.log import InputState, Log, LogState
from penstock.store.record import Progress, Record, sum_ops
from penstock.store.store import open_store
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events

_POLL_S: Final = 0.1
_COLUMNS = ("text", "source", "start", "end", "part", "parts", "doc_id")


class _Kept(msgspec.Struct):
    """What OUTPUT.progress holds."""

    config: dict[str, Any]
    inputs: list[str]
    bytes: dict[str, int]
    """How long each of the files is."""
    progress: list[Progress]
    """What was read of each input, summed up."""
    sealed: bool = False
    columns: tuple[str, ...] = _COLUMNS[:-1]
    """What each line has; those of the first version had no doc_id."""
    tokenizer_path: str = ""
    """Where the tokenizer was that counted, if it came from a file."""


class LinesWriter:
    """Takes batches in order and appends them; the place of `ShardWriter` in a run."""

    dataset = None
    """It makes no shards."""

    def __init__(
        self, output: Path, config: ShardConfig, inputs: Sequence[str], tokenizer_path: str = ""
    ) -> None:
        if any(step["step"] == "batch_dedup" for step in config.prepare.get("steps", [])):
            raise BadConfig(
                "batch dedup does not write lines",
                do="leave --output out, or choose --dedup near",
            )
        self.url = str(output)
        self.rejects_url = f"{output}.rejects.jsonl"
        self.inputs = list(inputs)
        self.state = LogState()
        self._path = output
        self._progress = _progress_of(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        self._lock_path = output.with_name(output.name + ".progress.lock")
        self._lock = self._take_lock()
        plain = json.loads(json.dumps(asdict(config)))
        self._files: dict[str, IO[bytes]] = {}
        try:
            self._kept = self._begin(plain)
            self._kept.tokenizer_path = tokenizer_path
        except BaseException:
            self.close()
            raise

    @property
    def sealed(self) -> bool:
        """Whether all was written before."""
        return self._kept.sealed

    def begin(self, gather: Gatherer | None = None) -> None:
        """Let those who follow the lines see that they begin, and how they are cut."""
        self._open("")

    def read_about(self, folder: str) -> Iterator[tuple[str, bytes]]:
        """What earlier batches left beside the lines, by folder; each with its name."""
        path = self._beside(folder)
        data = read_own(path)[: self._kept.bytes.get(folder, 0)] if path.exists() else b""
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            yield f"{path}, byte {at:,}", data[at + 8 : at + 8 + size]
            at += 8 + size

    def submit(self, batch: Batch) -> None:
        """Append a batch, durably."""
        encoder = msgspec.json.Encoder()
        for rows in batch.rows.in_turn():
            columns = [rows.column(name).to_pylist() for name in _COLUMNS]
            for line in zip(*columns, strict=True):
                self._append("", encoder.encode(dict(zip(_COLUMNS, line, strict=True))) + b"\n")
        for reject in batch.rejects:
            self._append("rejects.jsonl", reject)
        for about in batch.about:
            data = about.as_bytes()
            self._append(about.folder, len(data).to_bytes(8, "little") + data)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        for op in batch.progress:
            self._advance(op)
        self._save()

    def commit(self, ahead: int = MOST, held_bytes: int = MOST) -> Iterator[Record]:
        """All that was submitted is written."""
        return iter(())

    def beat(self, name: str = "", silent_s: float = 0.0) -> Iterator[Record]:
        """The file itself shows that it grows."""
        return iter(())

    def keep_stopped(self, rejects: Sequence[bytes]) -> None:
        """OUTPUT.rejects.jsonl holds those of the batches before."""

    def seal(self) -> Iterator[Record]:
        """Say that the lines are complete."""
        self._open("")
        mark_done(self._path)
        self._kept.sealed = True  # last: who finds it so does not look for the marker
        self._save()
        return iter(())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._lock_path)  # while it is held: see _take_lock
        os.close(self._lock)

    def _take_lock(self) -> int:
        """One producer at a time; the lock ends with its process."""
        while True:
            lock = self._opened(self._lock_path, 0o644, single=False)  # nothing is written
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise Fenced(
                    f"another process is writing {self._path.name}",
                    where=self.url,
                    do="wait for it, or name another --output",
                ) from None
            # who held it may have removed it after we opened it: then it keeps nobody out
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(self._lock_path)):
                    return lock
            os.close(lock)

    def _begin(self, config: dict[str, Any]) -> _Kept:
        if not self._progress.exists():
            if self._path.exists() and self._path.stat().st_size:
                raise BadConfig(
                    f"{self._path.name} is there, and no {self._progress.name} beside it",
                    where=self.url,
                    why="another program wrote it",
                    do="name another --output, or remove the file",
                )
            return _Kept(config, self.inputs, {}, [], columns=_COLUMNS)
        kept = msgspec.json.decode(read_own(self._progress), type=_Kept)
        differing = differences(as_begun(kept.config), config)
        if kept.columns != _COLUMNS and not kept.sealed:
            differing.append("an earlier penstock began it, whose lines have other fields")
        is_fixed = is_shuffled(config) and not kept.sealed
        begun = {op.input for op in kept.progress}
        names = [name for name in kept.inputs if is_fixed or name in begun]
        differing += input_difference(names, self.inputs, is_fixed=is_fixed)
        if differing:
            raise BadConfig(
                f"{self._path.name} was begun with other options or inputs",
                where=self.url,
                why="; ".join(differing),
                do="give the same, or name another --output; one that holds no line yet may be "
                "removed, with its .progress, if nobody follows it",
            )
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < kept.bytes.get("", 0):
            raise InputReplaced(
                f"{self._path.name} is shorter than it was",
                where=self.url,
                why=f"it has {size:,} bytes, and {kept.bytes['']:,} were written",
                do="bring it back, or remove it and its .progress and begin anew",
            )
        for op in kept.progress:
            self._apply(op)
        return kept

    def _apply(self, op: Progress) -> None:
        state = InputState()
        state.to, state.read, state.kept, state.blank = op.to, op.read, op.kept, op.blank
        state.rows, state.dropped = op.rows or 0, op.dropped
        state.proof, state.end = op.proof, op.end
        self.state.inputs[op.input] = state

    def _advance(self, op: Progress) -> None:
        earlier = [known for known in self._kept.progress if known.input == op.input]
        (total,) = sum_ops([*earlier, op])
        assert isinstance(total, Progress)
        self._kept.progress = [p for p in self._kept.progress if p.input != op.input] + [total]
        self._apply(total)

    def _append(self, name: str, data: bytes) -> None:
        self._open(name).write(data)
        self._kept.bytes[name] = self._kept.bytes.get(name, 0) + len(data)

    def _open(self, name: str) -> IO[bytes]:
        if name not in self._files:
            path = self._beside(name)
            if not self._progress.exists():
                self._save()  # else a kill right now leaves lines that nobody says are ours
            file = os.fdopen(self._opened(path), "r+b", buffering=1 << 20)
            file.seek(self._kept.bytes.get(name, 0))
            self._files[name] = file
            if name == "":
                path.with_name(path.name + DONE_SUFFIX).unlink(missing_ok=True)
        return self._files[name]

    def _opened(self, path: Path, mode: int = 0o666, *, single: bool = True) -> int:
        try:
            return open_own(path, mode, single=single)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EINVAL):
                raise
            raise BadConfig(
                f"{path.name} cannot be written",
                where=str(path),
                why=str(error.strerror),
                do="name another --output, or remove what stands there; a hard link is undone by "
                "cp FILE COPY && mv COPY FILE",
            ) from None

    def _beside(self, name: str) -> Path:
        suffix = "." + name.lstrip("_") if name else ""
        return self._path.with_name(self._path.name + suffix)

    def _save(self) -> None:
        with replacing(self._progress, sync=True) as file:
            file.write(msgspec.json.encode(self._kept))
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@dataclass(frozen=True, slots=True)
class LinesPlan:
    """How lines were cut, for whoever makes a dataset of them."""

    prepare: dict[str, Any]
    """The steps, as the log of that dataset has them: loaders compare how long chunks may be."""
    tokenizer: str
    """The fingerprint of the tokenizer that counted, if one did."""
    tokenizer_path: str
    token_type: str
    """uint16 or uint32 where the dataset is to have token files."""

    def applied(
        self, config: ShardConfig, tokenizer: Any, tokens: bool
    ) -> tuple[ShardConfig, Any, bool]:
        """The config, the tokenizer and whether to store tokens, as the writer of the lines has
        them; what is given must not contradict that."""
        config = replace(config, prepare=self.prepare, text_field="text")
        if not self.tokenizer:
            return config, tokenizer, tokens
        found = ""
        try:
            loaded = Tokenizer.load(self.tokenizer_path if tokenizer is None else tokenizer)
            found = loaded.fingerprint
        except BadInput:
            if tokenizer is not None:
                raise
        if found == self.tokenizer:
            return config, loaded, tokens or bool(self.token_type)
        lines = self.prepare["lines"]
        raise BadConfig(
            f"the tokenizer that counted the tokens of {lines} is not there"
            if tokenizer is None
            else f"{lines} was cut with another tokenizer",
            where=self.tokenizer_path,
            why=f"its fingerprint is {self.tokenizer[:12]}…"
            + (f", that of the one here {found[:12]}…" if found else ""),
            do="name it with --tokenizer",
        )


def plan_of_lines(output: Path, parquet_dir: str | os.PathLike[str]) -> LinesPlan | None:
    """What `LinesWriter` noted of these lines; None for those of others.

    And None where an earlier penstock began the dataset, and did not note it in the log.
    """
    try:
        kept = msgspec.json.decode(read_own(_progress_of(output)), type=_Kept)
    except (OSError, msgspec.MsgspecError):  # none, or the file of another program
        return None
    state = look_at_log(parquet_dir).state
    opened = state.opened if state.inputs or state.files else None
    if opened is not None and not opened.config.get("prepare"):
        return None
    config = {**asdict(ShardConfig()), **kept.config}
    return LinesPlan(
        prepare={"steps": config["prepare"].get("steps", []), "lines": output.name},
        tokenizer=config["tokenizer"],
        tokenizer_path=kept.tokenizer_path,
        token_type=config["token_type"],
    )


@contextlib.contextmanager
def claimed(output: Path, url: str) -> Iterator[bool]:
    """Whether we are to make the dataset at `url` of these lines: one process at a time does.

    `chunk` at its end and a `shard` beside it may both want to. The lock ends with its process;
    who writes is decided by the log, this only spares one of them being fenced.
    """
    wanted = (url if "://" in url else os.path.realpath(url)).encode()
    try:
        lock = open_own(output.with_name(output.name + ".sharded"), 0o644)
    except OSError:  # a folder of others
        yield True
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held_for = os.pread(lock, 1 << 16, 0)
            yield held_for not in (b"", wanted)  # of the same lines, another dataset
            return
        os.ftruncate(lock, 0)
        os.pwrite(lock, wanted, 0)
        yield True
    finally:
        os.close(lock)


class Waiting:
    """Passes the time, and hears signals, where there is nothing to do yet."""

    def __init__(self, events: Events) -> None:
        self.stopped_by: int | None = None
        self._events = events
        self._told = False

    def for_file(self, path: Path, wait_s: float) -> bool:
        """Wait for a file that may grow; whether it is there. Who reads it says if it is not."""
        began = time.monotonic()
        while look_at(path) is None:
            waited_s = time.monotonic() - began
            if waited_s >= wait_s or path.suffix in COMPRESSED or self.stopped_by is not None:
                return False
            if waited_s >= 1:
                near = missing(path).do
                told = f"; {near}" if "mean" in near else ""
                self._tell(f"{path} is not there yet: waiting for it{told}")
            time.sleep(_POLL_S)
        return True

    def for_seal(self, log: Log) -> None:
        """Wait a moment for the seal of another process, and look."""
        self._tell(f"{log.store.url} is made by another process: waiting for its seal")
        time.sleep(_POLL_S)
        log.refresh()

    def _tell(self, message: str) -> None:
        if not self._told:
            self._told = True
            self._events.emit("wait", message=message)


def look_at_log(parquet_dir: str | os.PathLike[str]) -> Log:
    """The log of a dataset as it is now; it need not have begun."""
    log = Log(open_store(parquet_dir))
    log.refresh()
    return log


def refuse_other_lines(parquet_dir: str | os.PathLike[str], output: Path) -> None:
    """Refuse a dataset that is not made of these lines, before hours of work and not after."""
    log = look_at_log(parquet_dir)
    begun = list(log.state.inputs)
    if begun and [os.path.realpath(name) for name in begun] != [os.path.realpath(output)]:
        raise BadConfig(
            f"{log.store.url} is not made of {output.name}",
            where=log.store.url,
            why="; ".join(input_difference(begun, [str(output)])),
            do="name another --parquet_dir",
        )


def _progress_of(output: Path) -> Path:
    return output.with_name(output.name + ".progress")
