"""Write chunks as JSON lines, for `penstock shard` or anyone else who follows a growing file.

In:    batches of prepared rows, in order
Out:   OUTPUT, a line for each: text, source, start, end, part, parts, doc_id; at the end
       OUTPUT.done
Keeps: OUTPUT.progress, replaced after each batch is durable: how far the inputs were read and how
       long OUTPUT was then; a restart writes on from that length, the same bytes
Never: shortens OUTPUT: who follows it has perhaps read further than the last progress
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from penstock.disk import open_own, read_own, replacing
from penstock.errors import BadConfig, Fenced, InputReplaced
from penstock.ingest.files import DONE_SUFFIX, mark_done
from penstock.shard.follow import FollowConfig, Outcome, shard_jsonl
from penstock.shard.write import Batch, ShardConfig, differences, input_difference
from penstock.store.backends import open_store
from penstock.store.log import InputState, Log, LogState
from penstock.store.record import Progress, Record, sum_ops
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events

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


class LinesWriter:
    """Takes batches in order and appends them; the place of `ShardWriter` in a run."""

    def __init__(self, output: Path, config: ShardConfig, inputs: Sequence[str]) -> None:
        self.url = str(output)
        self.inputs = list(inputs)
        self.state = LogState()
        self._path = output
        self._progress = output.with_name(output.name + ".progress")
        output.parent.mkdir(parents=True, exist_ok=True)
        self._lock_path = output.with_name(output.name + ".progress.lock")
        self._lock = self._take_lock()
        plain = json.loads(json.dumps(asdict(config)))
        self._files: dict[str, IO[bytes]] = {}
        try:
            self._kept = self._begin(plain)
        except BaseException:
            self.close()
            raise

    @property
    def sealed(self) -> bool:
        """Whether all was written before."""
        return self._kept.sealed

    def read_about(self, folder: str) -> Iterator[tuple[str, bytes]]:
        """What earlier batches left beside the lines, by folder; each with its name."""
        path = self._beside(folder)
        data = read_own(path)[: self._kept.bytes.get(folder, 0)] if path.exists() else b""
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            yield f"{path}, byte {at:,}", data[at + 8 : at + 8 + size]
            at += 8 + size

    def submit(self, batch: Batch[Any]) -> None:
        """Append a batch, durably."""
        encoder = msgspec.json.Encoder()
        for rows in batch.columns.batches:
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

    def make_room(self, most: int) -> Iterator[Record]:
        """Nothing waits here."""
        return iter(())

    def commit_all(self) -> Iterator[Record]:
        """All that was submitted is written."""
        return iter(())

    def beat_if_silent(self) -> Iterator[Record]:
        """The file itself shows that it grows."""
        return iter(())

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
        differing = differences(kept.config, config)
        if kept.columns != _COLUMNS and not kept.sealed:
            differing.append("an earlier penstock began it, whose lines have other fields")
        begun = [op.input for op in kept.progress]
        if self.inputs[: len(begun)] != begun:
            differing.append(input_difference(begun, self.inputs))
        if differing:
            raise BadConfig(
                f"{self._path.name} was begun with other options or inputs",
                where=self.url,
                why="; ".join(differing),
                do="give the same, or name another --output",
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


def shard_lines(
    output: Path,
    parquet_dir: str | os.PathLike[str],
    config: ShardConfig,
    tokenizer: Tokenizer | None,
    tokens: bool,
    events: Events,
) -> Outcome:
    """Make the dataset of the lines, unless a `penstock shard` beside us is doing it."""
    ours = output.with_name(output.name + ".sharded")
    log = Log(open_store(parquet_dir, make=True))
    log.refresh()
    if log.state.n >= 0 and not ours.exists():
        events.emit("warn", message=f"{log.store.url} is made by another process: left to it")
        return Outcome(sealed=log.state.sealed is not None, state=log.state, url=log.store.url)
    os.close(open_own(ours))
    plain = replace(config, prepare={}, tokenizer="", token_type="", text_field="text")
    follow = FollowConfig(complete=True)
    return shard_jsonl(
        [output], parquet_dir, plain, follow, tokenizer=tokenizer, tokens=tokens, events=events
    )
