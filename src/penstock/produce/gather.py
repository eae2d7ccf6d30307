"""Keep rows where they were made, and make shards of them there: what workers do for a dataset.

In:    a piece, and where its rows are to stay; or which rows make up a shard, and its names
Out:   what became of the piece, without its rows; or what was stored of the shard
Keeps: rows in files without names, in memory as far as there is room and on disk beyond that, or
       with Ray in its object store; nothing of them is left once the committer ends, however it
       ends; the bytes of a shard a function of its rows, its number and the options alone
Never: commits: an object whose record never came is adopted or cleared by the next writer

    piece ─▶ worker (prepare, keep rows) ─▶ committer: what stays, in which shard ─▶
    parts ─▶ worker (gather, split, shuffle, encode, hash, store) ─▶ committer: the record
"""

import contextlib
import functools
import hashlib
import io
import os
import resource
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from penstock.arrays import Int64s, values_of
from penstock.disk import name_of_unnamed, open_unnamed, unnamed
from penstock.errors import PenstockError, StoreFailed
from penstock.prepare.task import PrepareTask
from penstock.prepare.task import open_task as open_prepare
from penstock.prepare.task import pack as pack_prepared
from penstock.prepare.task import pack_request as pack_piece
from penstock.prepare.task import unpack as unpack_prepared
from penstock.prepare.task import unpack_request as unpack_piece
from penstock.prepare.wire import Kept, Prepared, Request, read_rows, rows_stream, write_stream
from penstock.produce.columns import (
    Part,
    ValRule,
    Written,
    batches_of,
    schema_for,
    shuffled,
    write_rows,
)
from penstock.store.record import Split, token_name
from penstock.store.store import Store, Stored, local_path, open_store
from penstock.tokenize.token_file import write_token_pieces
from penstock.work.pool import Remote
from penstock.work.run import RunConfig, open_pool

SMALL_BYTES: Final = 64 << 10
"""Pieces of less text come back with their rows: a file of its own costs more, and lines that come
one at a time would take one each."""
REMOTE: Final = "remote"
"""As a place to keep rows: what the pool has for it."""
_WRITE_BYTES: Final = 256 << 10
"""For one call: see `store.local.WRITE_BYTES`."""
_MOST_FILES: Final = 1 << 16
_GATHERED: Final = b"GATHERED".ljust(64)


# Rows that stay where they were made


class KeptFile:
    """The rows of a piece in a file without a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self) -> pa.RecordBatch:
        try:
            descriptor = open_unnamed(self.name, write=False)
            try:
                with pa.memory_map(f"/dev/fd/{descriptor}") as file:
                    return read_rows(file.read_buffer())
            finally:
                os.close(descriptor)
        except (OSError, pa.ArrowInvalid) as error:
            raise _lost("could not read the rows of a piece again", error) from error


def _lost(what: str, error: Exception) -> StoreFailed:
    """Rows that are not where they were kept, or cannot be kept."""
    return StoreFailed(
        what,
        why=str(error),
        do="see that there are memory and disk space, and run the same command again: nothing "
        "committed is lost",
    )


@dataclass(frozen=True, slots=True)
class KeptThere:
    """The rows of a piece with a pool that keeps them itself."""

    remote: Remote

    def read(self) -> pa.RecordBatch:
        return read_rows(self.remote.fetch())


class Shelf:
    """Files for rows, in memory up to `max_bytes`, then in a folder.

    A file is used again once nobody holds what was kept in it: pages that are new to the system
    cost half of what it costs to fill them.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, max_bytes: int) -> None:
        self._folder = tempfile.gettempdir() if folder is None else folder
        self._max_bytes = max_bytes
        self._sizes: dict[int, int] = {}
        """Of the files in memory: what they hold, or are about to."""
        self._spare: list[int] = []
        self._open = 0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                soft = most
        self._most_files = (most if soft == resource.RLIM_INFINITY else soft) // 2

    def new(self, text_bytes: int) -> KeptFile | None:
        """A file for the rows of so much text; None if they had better come back."""
        if text_bytes < SMALL_BYTES or not hasattr(os, "memfd_create"):
            return None
        expected, in_memory = 2 * text_bytes, True
        descriptor = self._take_spare(expected)
        if descriptor is None:
            if self._open >= self._most_files:
                return None
            in_memory = sum(list(self._sizes.values())) + expected <= self._max_bytes
            try:
                descriptor = unnamed(None if in_memory else self._folder)
            except OSError:  # no more files, no room: rows come back as those of small pieces do
                return None
            self._open += 1
        if in_memory:
            self._sizes[descriptor] = max(expected, self._sizes.get(descriptor, 0))
        kept = KeptFile(name_of_unnamed(descriptor))
        # No lock: the end of the last one who holds it may come in any thread, within anything.
        weakref.finalize(kept, self._release, descriptor).atexit = False
        return kept

    def _take_spare(self, expected: int) -> int | None:
        """A file that nobody holds, if it may grow to so much."""
        try:
            descriptor = self._spare.pop()
        except IndexError:
            return None
        grown = max(0, expected - self._sizes.get(descriptor, 0))
        if sum(list(self._sizes.values())) + grown <= self._max_bytes:
            return descriptor
        self._close(descriptor)
        return None

    def filled(self, kept: KeptFile) -> None:
        """Rows are in it: note what they take."""
        descriptor = int(kept.name.rpartition("/")[2])
        if descriptor in self._sizes:
            self._sizes[descriptor] = os.fstat(descriptor).st_size

    def close(self) -> None:
        """Let go of what is not used; the rest goes with those who hold it."""
        self._max_bytes = 0
        while self._spare:
            self._close(self._spare.pop())

    def _release(self, descriptor: int) -> None:
        # on disk, and beyond what is allowed, it goes
        size = self._sizes.get(descriptor)
        if size is None or sum(list(self._sizes.values())) > self._max_bytes:
            self._close(descriptor)
        else:
            self._spare.append(descriptor)

    def _close(self, descriptor: int) -> None:
        self._sizes.pop(descriptor, None)
        self._open -= 1
        os.close(descriptor)


class _Sliced(io.RawIOBase):
    """A file that is written in small calls, from its beginning."""

    def __init__(self, name: str) -> None:
        self._descriptor = open_unnamed(name)
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            view = view[os.write(self._descriptor, view[:_WRITE_BYTES]) :]
        self._at += size
        return size

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


# Shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What decides the bytes of a shard beside its rows."""

    prepare: dict[str, Any]
    """How documents were read, filtered and cut."""
    tokenizer: str
    token_type: str
    seed: int
    val_fraction: float
    beside_row: int
    """Bytes that a row counts of a row group beside its `size`."""


@dataclass(slots=True)
class Gather:
    """The rows of a shard, and the names of its files: "" for what it has none of."""

    number: int
    """Of the training shard: its shuffle depends on it."""
    train: str
    val: str
    parts: list[Part]
    is_handed_over: bool = False
    """Whether its files are to come back in any case."""


@dataclass(frozen=True, slots=True)
class Filed:
    """A file of a shard."""

    split: Split
    stored: Stored
    rows: int
    tokens: int | None = None
    xxh3: str = ""


@dataclass(slots=True)
class Gathered:
    """What was stored of a shard; or its files, where a worker cannot store them."""

    files: list[Filed]
    data: Remote | None = None
    """The files end to end: their names are still to be given."""

    def contents(self) -> list[memoryview]:
        """Each of the files, if they are not stored."""
        assert self.data is not None
        view, found = memoryview(self.data.fetch()).cast("B"), []
        for file in self.files:
            found.append(view[: file.stored.size])
            view = view[file.stored.size :]
        return found


Put = Callable[[str, Callable[[IO[bytes]], None]], Stored]
"""Stores what is written under a name: see `Store.put`."""


def store_shard(shard: Gather, layout: Layout, put: Put) -> list[Filed]:
    """Gather the rows of a shard, split and shuffle them, store its files."""
    files: list[Filed] = []
    batches = batches_of(shard.parts)
    ids = [values_of(batch.column("doc_id"), np.uint64) for batch in batches]
    is_val = ValRule.of(layout.seed, layout.val_fraction).is_val(np.concatenate(ids))
    train, val = np.flatnonzero(~is_val), np.flatnonzero(is_val)
    schema = schema_for(layout.prepare)

    def put_rows(split: Split, name: str, rows: Int64s) -> None:
        written = Written()

        def write(file: IO[bytes]) -> None:
            nonlocal written
            written = write_rows(file, batches, rows, schema, layout.beside_row)

        if not name:
            return
        files.append(Filed(split, put(name, write), len(rows), written.tokens))
        if (pieces := written.pieces) is not None:
            made_with, kind = layout.tokenizer, layout.token_type
            stored = put(
                token_name(name), lambda file: write_token_pieces(file, pieces, made_with, kind)
            )
            files.append(Filed("tokens", stored, len(rows), pieces.count, pieces.xxh3))

    put_rows("train", shard.train, train[shuffled(len(train), layout.seed, shard.number)])
    put_rows("val", shard.val, val)
    return files


class _Files:
    """The files of a shard in memory, for whoever can store them."""

    def __init__(self) -> None:
        self.data = io.BytesIO()

    def put(self, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
        first = self.data.tell()
        file = _From(self.data, first)
        write(file)  # type: ignore[arg-type]  # RawIOBase is what pyarrow and json need of IO
        return Stored(name, "", self.data.tell() - first)


class _From(io.RawIOBase):
    """A file that begins somewhere in another."""

    def __init__(self, file: io.BytesIO, first: int) -> None:
        self._file, self._first = file, first

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell() - self._first


# The task, and how its requests and answers travel


Answer = tuple[Prepared | Gathered, Any]
"""What is sent, and what a pool that keeps things itself is to keep."""


def open_task(setup: dict[str, Any]) -> "ShardTask":
    """For `work.pool`: the task from its setup, which is JSON."""
    setup = dict(setup)
    about = setup.pop("dataset")
    prepare = open_prepare(setup)
    store: Store = open_store(about["url"])
    store.epoch, store.tag = about["epoch"], about["tag"]
    is_here = is_reached(about["url"], about["proof"])
    return ShardTask(prepare, Layout(**about["layout"]), store if is_here else None)


def dataset_setup(layout: Layout, store: Store, *, record: str = "") -> dict[str, Any]:
    """What a task is told of the dataset. With the name of a `record` it may be on a machine that
    does not have this directory: then it hands over what it makes."""
    about: dict[str, Any] = {
        "layout": asdict(layout), "url": store.url, "epoch": store.epoch, "tag": store.tag,
        "proof": None,
    }  # fmt: skip
    if record:
        about["url"] = os.path.abspath(local_path(store.url))
        about["proof"] = [record, hashlib.sha256(store.read(record)).hexdigest()]
    return {"dataset": about}


def is_reached(url: str, proof: Sequence[str] | None) -> bool:
    """Whether a process has the dataset, and not another directory of that path.

    The writer's own first record, which no other dataset has, is there, and is this user's. A copy
    may have it too: so the writer looks for what is stored before it commits it.
    """
    if proof is None:
        return True
    record, sha256 = proof
    path = os.path.join(url, record)
    try:
        is_own = os.stat(path).st_uid == os.geteuid() and os.access(url, os.W_OK)
        return is_own and hashlib.sha256(open_store(url).read(record)).hexdigest() == sha256
    except (OSError, PenstockError):
        return False


class ShardTask:
    """Prepares pieces and keeps their rows; makes shards of them."""

    def __init__(self, prepare: PrepareTask, layout: Layout, store: Store | None) -> None:
        self._prepare = prepare
        self._layout = layout
        self._store = store

    def __call__(self, request: Request | Gather) -> Answer:
        if isinstance(request, Gather):
            return self._gather(request)
        found = self._prepare(request)
        rows = found.rows
        if not request.keep or not isinstance(rows, pa.RecordBatch) or not len(rows):
            return found, None
        if request.keep == REMOTE:
            found.rows = None
            return found, np.frombuffer(rows_stream(rows), np.uint8)
        # a disk that is full, say: then the rows come back
        with contextlib.suppress(OSError), contextlib.closing(_Sliced(request.keep)) as file:
            write_stream(pa.PythonFile(file, "w"), rows)
            found.rows = None
        return found, None

    def _gather(self, shard: Gather) -> Answer:
        if self._store is not None and not shard.is_handed_over:
            return Gathered(store_shard(shard, self._layout, self._store.put)), None
        held = _Files()
        files = store_shard(shard, self._layout, held.put)
        return Gathered(files), np.frombuffer(held.data.getbuffer(), np.uint8)


class _Sent(msgspec.Struct, array_like=True):
    """A shard on its way to a worker."""

    number: int
    train: str
    val: str
    is_handed_over: bool
    pieces: list[str | int]
    """Where rows are: a file, the bytes of a stream that comes along, or -1 for what the pool
    has."""
    parts: list[tuple[int, int, int, int, bytes | None, bytes | None]]
    """Input, piece, first and last row; picks and lines as they are in memory."""


_MARK: Final = b"shard "


def pack_request(request: Request | Gather) -> tuple[bytes, bytes]:
    """A request as two buffers."""
    if isinstance(request, Request):
        return pack_piece(request)
    pieces: list[str | int] = []
    numbers: dict[int, int] = {}
    data: list[Any] = []
    parts = []
    for part in request.parts:
        rows = part.rows
        if id(rows) not in numbers:
            numbers[id(rows)] = len(pieces)
            if isinstance(rows, KeptFile):
                pieces.append(rows.name)
            elif isinstance(rows, KeptThere):
                pieces.append(-1)
            else:
                assert isinstance(rows, pa.RecordBatch)
                data.append(rows_stream(rows))
                pieces.append(memoryview(data[-1]).nbytes)
        picks, lines = (
            None if held is None else held.tobytes() for held in (part.picks, part.lines)
        )
        parts.append((part.number, numbers[id(rows)], part.first, part.last, picks, lines))
    names = request.train, request.val
    sent = _Sent(request.number, *names, request.is_handed_over, pieces, parts)
    told = _MARK + (request.train or request.val).encode() + b"\n"  # for people first
    return told + msgspec.msgpack.encode(sent), b"".join(bytes(part) for part in data)


def references(request: Request | Gather) -> list[Any]:
    """What a request needs of what a pool keeps itself, in the order of its pieces."""
    if isinstance(request, Request):
        return []
    found = {id(part.rows): part.rows for part in request.parts}
    return [rows.remote.reference for rows in found.values() if isinstance(rows, KeptThere)]


def unpack_request(header: bytes, data: bytes, *kept: Any) -> Request | Gather:
    """What `pack_request` packed; `kept` is what `references` named."""
    if not header.startswith(_MARK):
        return unpack_piece(header, data)
    sent = msgspec.msgpack.decode(header.partition(b"\n")[2], type=_Sent)
    view, there, rows = memoryview(data), iter(kept), list[pa.RecordBatch | Kept]()
    for piece in sent.pieces:
        if isinstance(piece, str):
            rows.append(KeptFile(piece))
        elif piece < 0:
            rows.append(read_rows(next(there)))
        else:
            rows.append(read_rows(view[:piece]))
            view = view[piece:]
    parts = [
        Part(number, rows[piece], first, last, _numbers(picks), _numbers(lines))
        for number, piece, first, last, picks, lines in sent.parts
    ]
    return Gather(sent.number, sent.train, sent.val, parts, sent.is_handed_over)


def _numbers(data: bytes | None) -> Int64s | None:
    return None if data is None else np.frombuffer(data, np.int64)


def pack(answer: Answer) -> Sequence[Any]:
    """What is sent of an answer, as buffers."""
    found = answer[0]
    if isinstance(found, Prepared):
        return pack_prepared(found)
    return [_GATHERED, msgspec.json.encode(found.files)]


def pack_kept(answer: Answer) -> Any:
    """What a pool that keeps things itself is to keep of it; None for nothing."""
    return answer[1]


def unpack(payload: Any) -> Prepared | Gathered:
    """What `pack` packed."""
    view = memoryview(payload)
    if view[: len(_GATHERED)] != _GATHERED:
        return unpack_prepared(payload)
    return Gathered(msgspec.json.decode(view[len(_GATHERED) :], type=list[Filed]))


def attach(found: Prepared | Gathered, remote: Remote) -> None:
    """Tell an answer where the pool keeps what came with it."""
    if isinstance(found, Gathered):
        found.data = remote if found.files and not found.files[0].stored.sha256 else None
    elif found.rows is None:
        found.rows = KeptThere(remote)


# The workers of a run, as the committing process sees them


def _hold(kept: Kept, future: "Future[Any]") -> None:
    """Whoever has this as a callback holds the file until the future is done."""


class Workers:
    """Prepares pieces somewhere; keeps their rows there, and makes shards of them there, if it is
    told of a dataset and that is not in this process."""

    def __init__(self, setup: dict[str, Any], run: RunConfig, dataset: "Dataset | None") -> None:
        self._shelf: Shelf | None = None
        self.makes_shards = dataset is not None and not run.is_here
        self._is_far = run.engine == "ray"
        self.ahead, self.held_bytes = 1, 1 << 62
        """Shards that may be on their way, and their text, while another is filled."""
        if dataset is None or run.is_here:
            self._pool = open_pool(open_prepare, setup, run)
        else:
            is_local = "://" not in dataset.store.url
            record = dataset.record if self._is_far and is_local else ""
            told = dataset_setup(dataset.layout, dataset.store, record=record)
            self._pool = open_pool(open_task, {**setup, **told}, run)
            self.ahead = self._pool.width
            if not self._is_far:  # Ray looks after the memory of its nodes
                # who encodes a shard holds its ids and a part of its text
                most = run.max_memory_bytes // (3 * dataset.bytes_per_file)
                self.ahead = max(1, min(self.ahead, most))
                self.held_bytes = (self.ahead + 1) * dataset.bytes_per_file
                self._shelf = Shelf(
                    dataset.store.url if is_local else None, run.max_memory_bytes // 4
                )
        self.width = self._pool.width

    def prepare(self, request: Request, text_bytes: int) -> "tuple[Future[Prepared], Kept | None]":
        """Have a piece prepared; and the file that its rows stay in, if there is one."""
        kept, keep = None, ""
        if self._shelf is not None:
            kept = self._shelf.new(text_bytes)
            keep = "" if kept is None else kept.name
        elif self.makes_shards and text_bytes >= SMALL_BYTES:
            keep = REMOTE
        future = self._pool.submit(replace(request, keep=keep))
        if kept is not None:
            # its number must not be another file's before a worker is done with it
            future.add_done_callback(functools.partial(_hold, kept))
        return future, kept

    def attach(self, found: Prepared, kept: Kept | None) -> None:
        """Tell what a piece became where its rows are."""
        if found.rows is None and isinstance(kept, KeptFile) and self._shelf is not None:
            found.rows = kept
            self._shelf.filled(kept)

    def gather(self, shard: Gather) -> "Future[Gathered]":
        """Have a shard made."""
        return self._pool.submit(shard)

    def close(self) -> None:
        self._pool.close()
        if self._shelf is not None:
            self._shelf.close()


@dataclass(frozen=True, slots=True)
class Dataset:
    """What workers make shards for."""

    layout: Layout
    store: Store
    bytes_per_file: int
    record: str
    """The name of the record with which its writer began."""
