"""The shards of a dataset as a source for the plan, and their tokens for the fetch.

In:    a dataset's log, in a directory or a bucket; its shards
Out:   row and token counts; the tokens of whole shards, verified, as the memory of a token file
Keeps: a file's bytes are those that the log names, or an error names it
Never: lists a directory; makes a Python object for a document

Where a shard has a token file, nothing else is read for its tokens: in a directory the file is
mapped, from a bucket it comes through the cache. Shards without one become such a file in the
cache: their text is tokenised, or a column of an earlier penstock is copied. The cache is the one
that was named, or that of this host; of all processes that need a file one brings or makes it.
"""

import abc
import contextlib
import hashlib
import io
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.arrays import Int32s, Int64s, UInt64s, offsets_of
from penstock.cache.disk import Cache
from penstock.errors import BadConfig, BadDocument, ProducerStalled, ShardMismatch
from penstock.store.bucket import BucketStore
from penstock.store.local import LocalStore
from penstock.store.log import (
    INPUT_STALL_S,
    STALL_S,
    Log,
    LogState,
    chunk_length,
    describe_generation,
    generations,
    merged_files,
    split_generation,
)
from penstock.store.record import Add
from penstock.stream.source import Ranged
from penstock.supply.verified import MappedFile, hash_once
from penstock.tokenize.token_file import Tokens, read_token_file, write_token_file
from penstock.tokenize.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_READ_BYTES: Final = 1 << 20
"""Parquet is read in steps of so much. A whole row group of lists at once takes 365 MB for 20 MB of
numbers (levels, and 32 bits for each), in such steps 83 MB, and 0.11 s in place of 0.18."""
_AROUND_BYTES: Final = 64 << 10
"""What a token file has before its offsets and after its document ids: its schema, its footer."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard as its dataset names it; a foreign one has no hash."""

    name: str
    rows: int
    bytes: int
    sha256: str | None
    tokens: int | None
    token_file: "ShardFile | None" = None
    """The file that holds the tokens of its rows."""
    xxh3: str = ""
    """A checksum that is computed faster, where the log has one."""


class Recipe(Protocol):
    """How raw files become a dataset, where they are not documents as they stand."""

    @property
    def about(self) -> str:
        """All that decides what it becomes."""

    def make(self, paths: Sequence[str], folder: str) -> None:
        """Make the dataset, or go on with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """What is taken of a source, and how its documents become tokens."""

    tokenizer: Tokenizer | None = None
    name: str = ""
    shards: str = "all"
    banned: Sequence[int] = ()
    split: str = "train"
    extra_tokens: int = 0
    text_field: str = "text"
    streaming: bool = True
    cache: Cache | None = None
    """Where token files are kept that were fetched or made, and shards of buckets, for later passes
    and other ranks."""
    marks: str = ""
    """The folder of `join_run`, where the ranks of a host say which files they have hashed."""
    wait_s: float = 0.0
    """How long a path is waited for at which there is nothing."""
    stall_s: float = STALL_S
    """Silence of whoever makes the dataset that is an error."""
    input_stall_s: float = INPUT_STALL_S
    """The same of what he reads, while he is alive."""
    patience_s: float | None = None
    """How long a bucket that does not answer is asked again; by default 60 s."""
    recipe: Recipe | None = None
    """What becomes of raw files."""
    seq_len: int | None = None
    """Tokens of the rows that are to be made, if chunks of another length are to be refused."""


class ShardSource(abc.ABC):
    """Shards in an order that only grows. Subclasses know where they come from."""

    unit = "dataset"

    def __init__(self, url: str, config: SourceConfig) -> None:
        self.url = url
        self.name = config.name or url
        self.config = config
        self.ranged = Ranged(config.shards)
        self.has_tokens = False
        """Whether the shards hold tokens of the loader's own tokenizer."""
        self.has_counts = False
        """Whether they say how many such tokens each document has."""
        self.others: dict[str, str] = {}
        """Other generations, where this one was chosen among several: addresses, and words."""
        self.made_with = ""
        """The fingerprint of the tokenizer whose tokens the shards hold, if they hold some."""
        self._banned = np.array(sorted(set(config.banned)), np.uint64)
        self._files: list[ShardFile] = []
        self._lengths: dict[int, Int32s] = {}
        self._kept: dict[int, Tokens] = {}

    @property
    @abc.abstractmethod
    def is_sealed(self) -> bool:
        """Whether it is known that no shard will come any more."""

    @abc.abstractmethod
    def _refresh(self) -> None:
        """Look for shards that have come."""

    @abc.abstractmethod
    def _wait(self) -> None:
        """Wait for a sign of life, and look for shards."""

    @abc.abstractmethod
    def _open(self, name: str) -> Any:
        """A shard as a seekable file of Arrow's."""

    @abc.abstractmethod
    def _read(self, name: str) -> bytes:
        """All bytes of a shard."""

    @abc.abstractmethod
    def identity(self) -> dict[str, str | int]:
        """What a state is bound to."""

    @abc.abstractmethod
    def check_identity(self, seen: dict[str, str | int]) -> str:
        """What is wrong if `seen` is not this source at an earlier time; empty if it is."""

    def describe(self) -> str:
        """What its documents went through before they became shards."""
        return ""

    @property
    def chat(self) -> dict[str, Any] | None:
        """How conversations were rendered, where its rows are some."""
        return None

    def turn_to(self, seen: Mapping[str, str | int]) -> None:  # noqa: B027
        """Be what `seen`, an identity, is of, where the default was something newer."""

    def check_end(self) -> None:  # noqa: B027
        """Raise if what was read to its end has not ended there."""

    def reopen(self) -> None:  # noqa: B027
        """Make anew what does not outlive a fork: clients of buckets have threads."""

    @property
    def grows(self) -> bool:
        """Whether its data is still being made."""
        return not self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether it is known that nothing more will come of what was chosen."""
        size = self.ranged.size
        if self.is_sealed:
            return True
        if size is None:
            return False
        last = self.ranged.number(size - 1)
        return last is not None and last < len(self._files)

    def has_shard(self, shard: int) -> bool | None:
        number = self.ranged.number(shard)
        if number is None:
            return False
        if number < len(self._files):
            return True
        if not self.is_sealed:
            self._refresh()
        if number < len(self._files):
            return True
        if not self.is_sealed:
            return None
        if self.ranged.size is not None:
            raise BadConfig(
                f"the shard range {self.ranged.text} goes beyond the {self.unit}",
                where=self.url,
                why=f"it ended with {len(self._files)} shards, 0 to {len(self._files) - 1}",
                do="choose a range inside it",
            )
        return False

    def wait_shard(self, shard: int) -> bool:
        while (there := self.has_shard(shard)) is None:
            self._wait()
        return there

    @property
    def num_shards(self) -> int:
        """Shards known so far."""
        return len(self._files) if self.ranged.size is None else self.ranged.size

    @property
    def num_known(self) -> int:
        """How many of the chosen shards are there, counted from the first without a gap."""
        return self.ranged.known(len(self._files))

    def num_tokens(self) -> int:
        """Tokens of the chosen shards that are known so far, if the log counts them."""
        total = 0
        for k in range(self.num_shards):
            number = self.ranged.number(k)
            if number is not None and number < len(self._files):
                file = self._files[number]
                total += (file.tokens or 0) + file.rows * self.config.extra_tokens
        return total

    def file(self, shard: int) -> ShardFile:
        """What the log says of a shard."""
        number = self.ranged.number(shard)
        assert number is not None
        return self._files[number]

    def rows(self, shard: int) -> int:
        return self.file(shard).rows

    def stored_bytes(self, shard: int) -> int:
        file = self.file(shard)
        return (self._token_file(file) or file).bytes

    def volume(self, shard: int) -> int:
        """How much a shard holds, as its log says: tokens, or bytes where nobody counted them."""
        file = self.file(shard)
        return file.bytes if file.tokens is None else file.tokens

    def lengths(self, shard: int) -> Int32s:
        # threads that decode write here too, and forget
        if (found := self._lengths.get(shard)) is None:
            found = self._lengths[shard] = self._read_lengths(shard)
        return found

    def forget(self, shard: int) -> None:
        """The shard has left the pool."""
        self._lengths.pop(shard, None)
        self._kept.pop(shard, None)

    def plan(self, shards: set[int]) -> None:
        """What will be asked for, or is held: the cache keeps it, if it has it."""
        plan = getattr(self.config.cache, "plan", None)
        if plan is not None:
            files = [self.file(shard) for shard in shards]
            keys = [key for file in files for key in self._keys_of(file)]
            plan(f"{self.name} {self.url} {id(self)}", keys)

    def _keys_of(self, file: ShardFile) -> list[str]:
        """What a cache may have of a shard."""
        stored = self._token_file(file)
        key = _key_of(stored) if stored is not None else self._cache_key(file)
        return [found for found in (key, _shard_key(file) if file.sha256 else "") if found]

    def forget_but(self, shards: set[int]) -> None:
        """All others have left the pool, some of them without ever being decoded."""
        for shard in [shard for shard in list(self._lengths) if shard not in shards]:
            self.forget(shard)

    @property
    def is_remote(self) -> bool:
        """Whether its shards are not on this host."""
        return False

    def _token_file(self, file: ShardFile) -> ShardFile | None:
        """The file that holds the tokens that are to be read."""
        return file.token_file if self.has_tokens else None

    def _read_lengths(self, shard: int) -> Int32s:
        file = self.file(shard)
        made = self._cached(file)
        if made is None and self.has_counts:
            counts = self._read_counts(file)
            if counts is not None:
                return self._allowed(file, counts)
        if made is None:
            # not in the caller's own thread: Ctrl-C in the middle of tokenising must reach it
            with ThreadPoolExecutor(1) as thread:
                made = thread.submit(self._found, file).result()
        self._kept[shard] = made  # whoever asks for lengths will ask for the tokens too
        return self._allowed(file, np.diff(made.at))

    def _read_counts(self, file: ShardFile) -> Int64s | None:
        """How many tokens the rows of a shard have, if it says so. Of a shard in a bucket they are
        kept: who comes late needs no more of it than the tokens that others have made."""
        cache = self.config.cache
        if cache is None or not self._shares(file):
            return self._count_column(file)

        def make() -> bytes:
            found = self._count_column(file)
            return b"" if found is None else found.tobytes()

        held = cache.fetch(f"counts 1 {file.sha256}", make)
        return np.frombuffer(held, np.int64) if len(held) == 8 * file.rows else None

    def _doc_ids(self, file: ShardFile) -> UInt64s:
        """The documents of a shard's rows, kept like their counts."""

        def read() -> UInt64s:
            ids: UInt64s = self._read_columns(file, ["doc_id"]).column(0).to_numpy()
            return ids

        cache = self.config.cache
        if cache is None or not self._shares(file):
            return read()
        held = cache.fetch(f"ids 1 {file.sha256}", lambda: read().astype(np.uint64).tobytes())
        return np.frombuffer(held, np.uint64) if len(held) == 8 * file.rows else read()

    def _count_column(self, file: ShardFile) -> Int64s | None:
        counts = self._read_columns(file, ["n_tokens"]).column(0)
        self._check_rows(file, len(counts))
        if counts.null_count or not pa.types.is_integer(counts.type):
            return None
        found: Int64s = counts.to_numpy().astype(np.int64)
        return found

    def _allowed(
        self,
        file: ShardFile,
        counts: npt.NDArray[Any],
        doc_id: UInt64s | None = None,
    ) -> Int32s:
        """Lengths with the tokens around documents, below zero for what is banned."""
        most = np.iinfo(np.int32).max - self.config.extra_tokens
        wrong = np.flatnonzero((counts < 0) | (counts > most))
        if len(wrong):
            raise self._wrong_count(file, int(wrong[0]), f"n_tokens is {counts[wrong[0]]:,}")
        lengths: Int32s = counts.astype(np.int32) + np.int32(self.config.extra_tokens)
        if len(self._banned):
            if doc_id is None:
                doc_id = self._doc_ids(file)
            banned = np.isin(doc_id, self._banned)
            lengths[banned] = -1 - lengths[banned]
        return lengths

    def _read_columns(self, file: ShardFile, columns: Sequence[str]) -> pa.Table:
        """Some columns, without reading the rest of the shard; not verified."""
        with self._readable(file), self._opened(file) as opened:
            return self._checked(pq.ParquetFile(opened), file, columns).read(list(columns))

    def _opened(self, file: ShardFile) -> Any:
        """A shard as a seekable file of Arrow's; one of a bucket is brought once for all processes
        that share a directory, since clients of buckets read all of it anyway."""
        cache = self.config.cache
        if cache is not None and self._shares(file):
            return pa.BufferReader(cache.fetch(_shard_key(file), lambda: self._verified(file)))
        return self._open(file.name)

    def _shares(self, file: ShardFile) -> bool:
        """Whether a shard as it is stands in the cache, beside what is made of it."""
        return self.is_remote and file.sha256 is not None and hasattr(self.config.cache, "map")

    @contextlib.contextmanager
    def _readable(self, file: ShardFile) -> Iterator[None]:
        """Errors of a shard that is read in part."""
        try:
            yield
        except FileNotFoundError:
            raise self._gone(file) from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            self._verified(file)  # says so, if these are not the bytes that were written
            raise self._unreadable(file, error) from None

    def decode(self, shard: int) -> Tokens:
        """All tokens of a shard, whose bytes were verified in this run."""
        if (kept := self._kept.pop(shard, None)) is not None:
            return kept
        file = self.file(shard)
        tokens = self._found(file)
        doc_id = tokens.doc_id if self._token_file(file) else None
        self._check_planned(shard, self._allowed(file, np.diff(tokens.at), doc_id))
        return tokens

    def _check_planned(self, shard: int, lengths: Int32s) -> None:
        """Refuse other lengths than those that the plan was made with: they came from bytes that
        nobody had hashed then."""
        planned = self._lengths.setdefault(shard, lengths)
        wrong = np.flatnonzero(planned != lengths)
        if len(wrong):
            row = int(wrong[0])
            told = f"{planned[row]:,} were planned, {lengths[row]:,} are there"
            raise self._wrong_count(self.file(shard), row, told)

    def _found(self, file: ShardFile) -> Tokens:
        """The tokens of a shard; of the ranks that share a cache directory one makes them."""
        if (cache := self.config.cache) is not None and (key := self._cache_key(file)):
            held = cache.fetch(key, lambda: self._made_last(file))
            if (found := self._held_tokens(file, held)) is not None:
                return found
        with self._about_tokens(file):
            return self._tokens_in(pa.py_buffer(self._made(file)), file)

    def _made_last(self, file: ShardFile) -> bytes:
        """What is made of a shard, which nobody needs any more then."""
        if len(self._banned) and self._shares(file):
            self._doc_ids(file)
        made = self._made(file)
        if self._shares(file):
            getattr(self.config.cache, "drop", lambda _: None)(_shard_key(file))
        return made

    def _tokens_in(self, data: pa.Buffer, file: ShardFile, **options: Any) -> Tokens:
        made_with = self.made_with if self.has_tokens else self._fingerprint
        tokenizer = self.config.tokenizer
        # ids are below it; batches hold them in 32 bits with a sign
        most = 1 << 31 if tokenizer is None else min(1 << 31, tokenizer.vocab_size)
        return read_token_file(
            data, rows=file.rows, vocab_size=most, tokenizer=made_with, **options
        )

    @contextlib.contextmanager
    def _about_tokens(self, file: ShardFile) -> Iterator[None]:
        """Errors of a token file, or of what became one."""
        try:
            yield
        except FileNotFoundError:
            raise self._gone(file) from None
        except MemoryError:
            raise
        except (pa.ArrowException, OSError) as error:
            self._verified(file)  # says so, if these are not the bytes that were written
            raise ShardMismatch(
                f"{os.path.basename(file.name)} does not hold the tokens that it should",
                where=f'source "{self.name}", {self.place(file)}',
                why=str(error).splitlines()[0][:200],
                do=f"make the dataset again; penstock verify --full {self.url} says more",
            ) from None

    @property
    def _fingerprint(self) -> str:
        return self.config.tokenizer.fingerprint if self.config.tokenizer else ""

    def _cache_key(self, file: ShardFile) -> str:
        """Under which key a cache keeps the tokens that are made of a shard; none for one that
        cannot be known again."""
        about = "" if self.has_tokens else f"{self._fingerprint} {self.config.text_field}"
        return f"{_key_of(file)} {about}" if file.sha256 is not None else ""

    def _cached(self, file: ShardFile) -> Tokens | None:
        """The tokens as they were made before, mapped where the cache can do that."""
        if (cache := self.config.cache) is None or not (key := self._cache_key(file)):
            return None
        held = getattr(cache, "map", cache.get)(key)
        return None if held is None else self._held_tokens(file, held)

    def _held_tokens(
        self, file: ShardFile, held: bytes | memoryview, **options: Any
    ) -> Tokens | None:
        """The tokens of a cached value; None if it holds anything else."""
        mapped = _is_mapped(held)
        try:
            found = self._tokens_in(pa.py_buffer(held), file, mapped=mapped, **options)
        except (pa.ArrowException, OSError):
            return None
        return replace(found, file=MappedFile(held)) if mapped else found

    def _made(self, file: ShardFile) -> bytes:
        """The token file of a shard that has none, made of its verified bytes."""
        data = self._brought_before(file) or self._verified(file)
        try:
            # plain reads by this thread: several shards are read at once anyway, and with
            # Arrow's own threads and buffers each takes half as long again
            opened = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
            stored = self.has_tokens and "tokens" in opened.schema_arrow.names
            column = "tokens" if stored else self.config.text_field
            columns = [column, "n_tokens"] if self._counts(opened) else [column]
            table = _read_in_steps(self._checked(opened, file, [column]), columns)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._unreadable(file, error) from None
        self._check_rows(file, table.num_rows)
        tokens = table.column(column)
        if not stored:
            if self.config.tokenizer is None:
                raise BadConfig(
                    f"the {self.unit} holds text and no tokens",
                    where=self.place(file),
                    do="give the loader a tokenizer, or shard again with --tokenizer and --tokens",
                )
            try:
                tokens = self.config.tokenizer.encode_column(
                    as_text(tokens, column, self.place(file))
                )
            except BadDocument as error:
                error.where = f"{self.place(file)}, row {error.row:,}"
                raise
        made = io.BytesIO()
        try:
            ids = _as_ids(tokens)
            # bans ask the shard itself for its document ids, if it has some
            nobody = pa.array(np.zeros(len(ids), np.uint64))
            made_with = self.made_with if stored else self._fingerprint
            write_token_file(made, ids, nobody, made_with, str(ids.type.value_type))
        except pa.ArrowException as error:
            raise self._unreadable(file, error) from None
        if len(columns) > 1 and table.column("n_tokens").null_count == 0:
            counts = table.column("n_tokens").to_numpy()
            wrong = np.flatnonzero(np.diff(ids.offsets.to_numpy()) != counts)
            if len(wrong):
                raise self._wrong_count(file, int(wrong[0]), "its tokens are more or fewer")
        return made.getvalue()

    def _wrong_count(self, file: ShardFile, row: int, why: str) -> ShardMismatch:
        stored = self._token_file(file)
        told = "its n_tokens says" if stored is None else "were planned with"
        return ShardMismatch(
            f"row {row:,} of {(stored or file).name} has not as many tokens as {told}",
            where=f'source "{self.name}", {self.place(stored or file)}',
            why=why,
            do="make the dataset again with this version of penstock",
        )

    def _counts(self, opened: pq.ParquetFile) -> bool:
        """Whether the shard says how many tokens its rows have."""
        names = opened.schema_arrow.names
        return (
            self.has_counts
            and "n_tokens" in names
            and pa.types.is_integer(opened.schema_arrow.field("n_tokens").type)
        )

    def read_table(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Columns of a shard, all of them if none are named, after its bytes were verified."""
        return self.read_parquet(shard, columns)

    def stored_tokens(self, shard: int) -> Tokens | None:
        """The tokens of a shard, if it has a file of them."""
        return None

    def content_key(self, shard: int) -> str:
        """What decides the bytes of a shard."""
        file = self.file(shard)
        return file.sha256 or f"{os.path.abspath(file.name)} {file.bytes}"

    def read_parquet(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The same of its parquet file alone, which lacks tokens that have a file of their own."""
        file, cache, data = self.file(shard), self.config.cache, None
        if cache is not None and self.is_remote and file.sha256 is not None:
            data = cache.fetch(_shard_key(file), lambda: self._verified(file))
        try:
            opened = pq.ParquetFile(pa.BufferReader(data or self._verified(file)))
            names = opened.schema_arrow.names if columns is None else list(columns)
            table = _read_in_steps(self._checked(opened, file, names), names)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._unreadable(file, error) from None
        self._check_rows(file, table.num_rows)
        return table

    def check_footer(self, shard: int) -> None:
        """Refuse a shard that by its own footer has not as many rows as the log says."""
        file = self.file(shard)
        with self._readable(file), self._opened(file) as opened:
            self._check_rows(file, pq.ParquetFile(opened).metadata.num_rows)

    def _check_rows(self, file: ShardFile, rows: int) -> None:
        if rows != file.rows:
            raise ShardMismatch(
                f"{file.name} has {rows:,} rows, the log says {file.rows:,}",
                where=self.url,
                do=f"penstock verify --full {self.url}",
            )

    def provenance(
        self, shard: int, columns: Sequence[str] | None = None, *, rows: list[int] | None = None
    ) -> pa.Table:
        """Where the rows of a shard come from: its columns but for text and tokens.

        Of some `rows` only, their row groups alone are read.
        """
        file = self.file(shard)
        with self._readable(file), self._opened(file) as opened:
            parquet = pq.ParquetFile(opened)
            if columns is None:
                names = parquet.schema_arrow.names
                columns = [name for name in names if name not in (self.config.text_field, "tokens")]
            parquet = self._checked(parquet, file, columns)
            if rows is None:
                return parquet.read(list(columns))
            about = parquet.metadata
            ends = np.cumsum([about.row_group(k).num_rows for k in range(about.num_row_groups)])
            parts = []
            group_of = np.searchsorted(ends, rows, side="right")
            for group in dict.fromkeys(group_of.tolist()):
                first = int(ends[group]) - about.row_group(group).num_rows
                within = [
                    row - first for row, one in zip(rows, group_of, strict=True) if one == group
                ]
                table = parquet.read_row_group(group, list(columns), use_threads=False)
                parts.append(_without_views(table).take(within))
            return pa.concat_tables(parts)

    def ids_of(self, shard: int, rows: list[int]) -> list[npt.NDArray[Any]]:
        """The tokens of some rows of a shard, which nobody has verified: to explain them."""
        file, name = self.file(shard), self.config.text_field
        tokenizer = self.config.tokenizer
        if tokenizer is None or self.has_tokens:
            tokens = self._seen_tokens(file)
            return [tokens.values[tokens.at[row] : tokens.at[row + 1]] for row in rows]
        column = self.provenance(shard, [name], rows=rows).column(0)
        texts = as_text(column, name, self.place(file))
        return [tokenizer.encode(text) for text in texts.to_pylist()]

    def _seen_tokens(self, file: ShardFile) -> Tokens:
        return self._found(file)

    def _checked(
        self, opened: pq.ParquetFile, file: ShardFile, columns: Sequence[str]
    ) -> pq.ParquetFile:
        names = opened.schema_arrow.names
        if missing := [name for name in columns if name not in names]:
            raise ShardMismatch(
                f"{file.name} has no column {missing[0]!r}",
                where=self.url,
                why=f"its columns are {', '.join(names)}",
                do="all shards of a dataset have the columns of its first: make it again",
            )
        return opened

    def _brought_before(self, file: ShardFile) -> memoryview | None:
        """The verified bytes of a shard that was brought to plan with it."""
        maps = getattr(self.config.cache, "map", None)
        found: memoryview | None = None
        if maps is not None and self._shares(file):
            found = maps(_shard_key(file))
        return found

    def _verified(self, file: ShardFile) -> bytes:
        """The bytes of a shard; read a second time if they are wrong at first."""
        found = ""
        for _ in range(2):
            try:
                data = self._read(file.name)
            except FileNotFoundError:
                raise self._gone(file) from None
            if file.sha256 is None:
                return data
            digest = hashlib.sha256(data).hexdigest()
            if digest == file.sha256:
                return data
            found = f"{len(data):,} bytes, sha256 {digest[:12]}…"
        raise self._changed(file, found, "; it was read twice")

    def _changed(
        self, file: ShardFile, found: str, how: str = "", *, expected: str = ""
    ) -> ShardMismatch:
        return ShardMismatch(
            f"{file.name} is not what was written",
            where=f'source "{self.name}", {self.url}/{file.name}',
            why=f"{found}; the log says {file.bytes:,} bytes, "
            f"{(expected or file.sha256 or '')[:12]}…",
            do=f"restore the shard from a copy, or make the dataset again{how}",
        )

    def place(self, file: ShardFile) -> str:
        """Where a shard is, for messages."""
        return f"{self.url}/{file.name}"

    def place_of(self, shard: int, row: int) -> tuple[str, int]:
        """The file in which a row of a shard is now, and which of its rows it is."""
        return self.file(shard).name, row

    def _gone(self, file: ShardFile) -> ShardMismatch:
        return ShardMismatch(
            f"{file.name} is missing",
            where=f'source "{self.name}", {self.url}/{file.name}',
            why="the log says that it belongs to the dataset",
            do="restore it from a copy, or make the dataset again",
        )

    def _unreadable(self, file: ShardFile, error: Exception) -> ShardMismatch:
        return ShardMismatch(
            f"{os.path.basename(file.name)} is not a parquet file that can be read",
            where=f'source "{self.name}", {self.place(file)}',
            why=str(error).splitlines()[0][:200],
            do="restore it from a copy, or make the dataset again",
        )


def _shard_file(state: LogState, file: Add) -> ShardFile:
    """A shard as a log names it, with the file of its tokens."""
    found, stored, tokens = state.tokens_of(file), None, file.tokens
    if found is not None:
        tokens = found.tokens
        stored = ShardFile(
            found.name, found.rows, found.bytes, found.sha256, tokens, None, found.xxh3
        )
    return ShardFile(file.name, file.rows, file.bytes, file.sha256, tokens, stored)


def _key_of(file: ShardFile) -> str:
    """Under which key a cache keeps what was made of a file, in this format."""
    return f"tokens 1 {file.sha256}"


def _shard_key(file: ShardFile) -> str:
    """Under which key a cache keeps a shard as it is."""
    return f"shard 1 {file.sha256}"


def _is_mapped(held: bytes | memoryview) -> bool:
    """Whether what a cache gave is a file's memory."""
    return isinstance(held, memoryview) and isinstance(held.obj, mmap.mmap | pa.Buffer)


def _read_in_steps(opened: pq.ParquetFile, names: list[str]) -> pa.Table:
    about = opened.metadata
    size = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
    step = max(1, about.num_rows * _READ_BYTES // max(size, 1))
    batches = list(opened.iter_batches(step, columns=names, use_threads=False))
    schema = batches[0].schema if batches else opened.schema_arrow
    return pa.Table.from_batches(batches, schema=schema).select(names)


def _as_ids(column: pa.ChunkedArray) -> pa.LargeListArray:
    """A column of lists of whole numbers as one array of ids of 16 or 32 bits.

    Raises ArrowInvalid for what is no list of ids.
    """
    types, kind = pa.types, column.type
    if not (types.is_list(kind) or types.is_large_list(kind)) or not types.is_integer(
        kind.value_type
    ):
        raise pa.ArrowInvalid(f"tokens are of {kind}, and not lists of whole numbers")
    narrow = kind.value_type == pa.uint16()
    # refuses what does not fit
    wide = column.cast(pa.large_list(pa.uint16() if narrow else pa.uint32()))
    ids = wide.combine_chunks()
    if ids.null_count or ids.flatten().null_count:
        raise pa.ArrowInvalid("there is a null among the tokens")
    return ids


def _fits(state: LogState, config: SourceConfig) -> bool:
    """Whether rows can be made of a generation as they are asked for."""
    made_with = state.opened.tokenizer if state.opened else None
    tokenizer, length = config.tokenizer, chunk_length(state)
    is_own = not made_with or tokenizer is None or made_with == tokenizer.fingerprint
    return is_own and (config.seq_len is None or length in (None, config.seq_len))


def as_text(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    """A column of any type that can hold text as one of strings.

    >>> as_text(pa.chunked_array([["a", None, "a"]]).dictionary_encode(), "text", "").to_pylist()
    ['a', '', 'a']
    """
    kind, types = column.type, pa.types
    try:
        if types.is_dictionary(kind):
            column = column.cast(kind.value_type)
        if not types.is_string(column.type) and not types.is_large_string(column.type):
            if not _is_texty(column.type):
                raise ShardMismatch(
                    f"column {name!r} is of {kind}, which is no text",
                    where=where,
                    do="name the column of the text with text_field, or write it as strings",
                )
            wide = types.is_large_binary(column.type)
            column = column.cast(pa.large_string() if wide else pa.string())
    except pa.ArrowException as error:
        raise ShardMismatch(
            f"column {name!r} of {kind} cannot be read as text",
            where=where,
            why=str(error).splitlines()[0][:200],
            do="write the column as strings of UTF-8",
        ) from None
    return pc.fill_null(column, "")


def _without_views(table: pa.Table) -> pa.Table:
    """The table with strings for views of strings: Arrow takes no rows of those."""
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    fields = [field.with_type(plain.get(field.type, field.type)) for field in table.schema]
    return table.cast(pa.schema(fields))


def _is_texty(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_null(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


_TELLING: Final = (
    "preset", "mode", "name", "max_tokens", "secrets", "pii", "chat_template", "max_length",
)  # fmt: skip
"""The settings of steps that say most; the log has all of them."""


class OverShards:
    """The shards of a source, whose rows somebody decodes in another way."""

    def __init__(self, shards: ShardSource) -> None:
        self.shards = shards
        self.name = shards.name

    @property
    def url(self) -> str:
        return self.shards.url

    def has_shard(self, shard: int) -> bool | None:
        return self.shards.has_shard(shard)

    def wait_shard(self, shard: int) -> bool:
        return self.shards.wait_shard(shard)

    def stored_bytes(self, shard: int) -> int:
        return self.shards.stored_bytes(shard)

    def volume(self, shard: int) -> int:
        return self.shards.volume(shard)

    @property
    def is_closed(self) -> bool:
        return self.shards.is_closed

    @property
    def num_known(self) -> int:
        return self.shards.num_known

    def reopen(self) -> None:
        self.shards.reopen()

    def plan(self, shards: set[int]) -> None:
        self.shards.plan(shards)

    def identity(self) -> dict[str, str | int]:
        return self.shards.identity()

    def check_identity(self, seen: dict[str, str | int]) -> str:
        return self.shards.check_identity(seen)


class LogSource(ShardSource):
    """The files that a dataset's log names as its shards."""

    poll_s = 0.5
    """How often the log is asked for more, at most, while nothing comes."""

    def __init__(self, url: str, config: SourceConfig) -> None:
        super().__init__(url, config)
        self.log = Log.open(url, patience_s=config.patience_s)
        self._seen: set[str] = set()
        """Hashes of token files whose ids were looked at."""
        self._list_files()
        opened = self.log.state.opened
        about = opened.config if opened else {}
        # earlier versions told the tokenizer among the settings only
        made_with = (opened.tokenizer if opened else None) or about.get("tokenizer") or ""
        self.made_with = made_with if about.get("token_type") != "" else ""
        self.has_counts = bool(made_with) and config.text_field == "text"
        self.has_tokens = self.has_counts and bool(self.made_with)
        if made_with and config.tokenizer and made_with != config.tokenizer.fingerprint:
            raise BadConfig(
                "the tokenizer is not the one that the dataset was made with",
                where=url,
                why=f"its fingerprint is {config.tokenizer.fingerprint[:12]}…, "
                f"the dataset's {made_with[:12]}…",
                do="give the tokenizer of the dataset (penstock run keeps one that it replaces, as "
                "tokenizer.old-1), or shard the inputs again with this one",
            )

    @staticmethod
    def is_first(url: str) -> bool:
        """Whether an address names the first generation, which is the dataset itself."""
        return split_generation(url)[1] == 1

    @classmethod
    def newest(cls, url: str, config: SourceConfig) -> Self:
        """The dataset at `url`; of several generations the newest that fits.

        One that is sealed is preferred: what is still being made beside it is for who names it.
        One in which nothing was kept is passed over.
        """
        meant, all_of_them = generations(url, patience_s=config.patience_s)
        if len(all_of_them) == 1 or split_generation(url)[1] is not None:
            return cls(meant if len(all_of_them) > 1 else url, config)
        logs = [Log.open(one, patience_s=config.patience_s) for one in reversed(all_of_them)]
        filled = [log for log in logs if not log.state.is_empty] or logs
        fitting = [log for log in filled if _fits(log.state, config)] or filled
        log = next((log for log in fitting if log.state.sealed), fitting[0])
        source = cls(log.store.url, config)
        source.others = {
            other.store.url: describe_generation(other.state) for other in logs if other is not log
        }
        told = "; ".join(f"{one}: {about}" for one, about in source.others.items())
        opened = describe_generation(log.state)
        _log.warning("%s: opened of %d generations (%s); %s", source.url, len(logs), opened, told)
        return source

    def turn_to(self, seen: Mapping[str, str | int]) -> None:
        for url in self.others if seen.get("dataset") != self.log.state.dataset else ():
            if Log.open(url).state.dataset == seen.get("dataset"):
                turned = type(self)(url, self.config)
                turned.others = {**self.others, self.url: ""}
                self.__dict__.update(turned.__dict__)
                return

    def reopen(self) -> None:
        self.log = Log.open(self.url, patience_s=self.config.patience_s)
        self._list_files()

    def __getstate__(self) -> dict[str, Any]:
        """A source can be sent to another process, which opens the log for itself."""
        kept = {name: value for name, value in self.__dict__.items() if name != "log"}
        return {**kept, "_kept": {}}  # mapped memory stays here

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reopen()

    @property
    def is_sealed(self) -> bool:
        return self.log.state.sealed is not None

    @property
    def is_remote(self) -> bool:
        return not isinstance(self.log.store, LocalStore)

    def _known(self) -> list[Add]:
        """The shards, by the log as it was read last."""
        return self.log.state.split(self.config.split)

    def _list_files(self) -> None:
        known = self._known()
        for before, now in zip(self._files, known, strict=False):
            if before.name != now.name:
                raise ShardMismatch(
                    f"{before.name} was taken out of the dataset",
                    where=self.url,
                    why="a plan counts on what it has seen",
                    do="start the training anew on this dataset",
                )
        self._files += [_shard_file(self.log.state, file) for file in known[len(self._files) :]]

    def _refresh(self) -> None:
        self.log.refresh()
        self._list_files()

    def _wait(self) -> None:
        config = self.config
        self.log.wait(
            stall_s=config.stall_s, input_stall_s=config.input_stall_s, poll_s=self.poll_s
        )
        self._list_files()

    def _open(self, name: str) -> Any:
        return self.log.store.open(name)

    def _read(self, name: str) -> bytes:
        return self.log.store.read(name)

    # Token files.

    def _read_lengths(self, shard: int) -> Int32s:
        file = self.file(shard)
        if (stored := self._token_file(file)) is None:
            return super()._read_lengths(shard)
        with self._about_tokens(stored), self._mapped(stored) as mapped:
            if mapped is None:
                return self._allowed(file, *self._glimpse(file, stored))
            found = self._tokens_in(mapped[0], file, mapped=True, looks_at_ids=False)
            return self._allowed(file, np.diff(found.at), found.doc_id)

    def _found(self, file: ShardFile) -> Tokens:
        stored = self._token_file(file)
        return super()._found(file) if stored is None else self._stored(file, stored)

    def _seen_tokens(self, file: ShardFile) -> Tokens:
        if (stored := self._token_file(file)) is not None:
            with self._about_tokens(stored), self._mapped(stored) as mapped:
                if mapped is not None:
                    return self._tokens_in(mapped[0], file, mapped=True, looks_at_ids=False)
        return super()._seen_tokens(file)

    def read_table(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        file = self.file(shard)
        if file.token_file is None or (columns is not None and "tokens" not in columns):
            return self.read_parquet(shard, columns)
        found = self._stored(file, file.token_file)
        # copies: nobody asks the file again before an example is taken out of the table
        at, values = (pa.array(part.copy()) for part in (found.at, found.values))
        tokens = pa.LargeListArray.from_arrays(at, values)
        named = None if columns is None else [name for name in columns if name != "tokens"]
        if named == []:
            return pa.table({"tokens": tokens})
        table = self.read_parquet(shard, named).append_column("tokens", tokens)
        return table if columns is None else table.select(list(columns))

    def stored_tokens(self, shard: int) -> Tokens | None:
        file = self.file(shard)
        return None if file.token_file is None else self._stored(file, file.token_file)

    def _stored(self, file: ShardFile, stored: ShardFile) -> Tokens:
        """The tokens of a shard from its token file, hashed by the first who needs it."""
        expected = stored.xxh3 or stored.sha256 or ""
        with self._about_tokens(stored), self._mapped(stored) as mapped:
            if mapped is None:
                return self._brought(file, stored)
            data, descriptor = mapped
            if sys.platform == "linux":  # macOS has no such call
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            watched = MappedFile(data, f"{self.log.store.url}/{stored.name}", descriptor)
            found = hash_once(data, descriptor, expected, self.config.marks)
            if found != expected:
                kind = "xxh3" if stored.xxh3 else "sha256"
                found = f"{data.size:,} bytes, {kind} {found[:12]}…"
                raise self._changed(stored, found, expected=expected)
            new = expected not in self._seen
            tokens = self._tokens_in(data, file, mapped=True, looks_at_ids=new)
        self._seen.add(expected)
        return replace(tokens, file=watched)

    @contextlib.contextmanager
    def _mapped(self, stored: ShardFile) -> Iterator[tuple[pa.Buffer, int] | None]:
        """The memory of a file and its descriptor; None for one that is not on this host."""
        store = self.log.store
        if not isinstance(store, LocalStore):
            yield None
            return
        descriptor = store.open_file(stored.name)
        try:
            # Arrow's map outlives its file: Python's would hold a descriptor for each shard
            with pa.memory_map(f"/dev/fd/{descriptor}") as file:
                data = file.read_buffer()
            yield data, descriptor
        finally:
            os.close(descriptor)

    def _brought(self, file: ShardFile, stored: ShardFile, **options: Any) -> Tokens:
        """The tokens of a file that is in a bucket, through the cache if there is one."""
        if (cache := self.config.cache) is not None:
            held = cache.fetch(_key_of(stored), lambda: self._verified(stored))
            if (found := self._held_tokens(file, held, **options)) is not None:
                return found
        return self._tokens_in(pa.py_buffer(self._verified(stored)), file, **options)

    def _glimpse(self, file: ShardFile, stored: ShardFile) -> tuple[Int64s, UInt64s | None]:
        """How many tokens the rows of a file in a bucket have, and their document ids; the file is
        read in part, by one of the processes that share a directory."""
        maps, found = getattr(self.config.cache, "map", None), None
        if maps is not None and (held := maps(_key_of(stored))) is not None:
            found = self._held_tokens(file, held, looks_at_ids=False)
        if found is None and 2 * self._end_bytes(stored) >= stored.bytes:
            found = self._brought(file, stored, looks_at_ids=False)
        if found is not None:
            return np.diff(found.at), found.doc_id
        if (cache := self.config.cache) is not None and maps is not None:
            ends = cache.fetch(f"rows 1 {stored.sha256}", lambda: self._ends(file, stored))
        else:
            ends = self._ends(file, stored)
        if len(ends) != 16 * stored.rows:
            ends = self._ends(file, stored)
        counts = np.frombuffer(ends, np.int64, stored.rows)
        return counts, np.frombuffer(ends, np.uint64, stored.rows, 8 * stored.rows)

    @staticmethod
    def _end_bytes(stored: ShardFile) -> int:
        """The offsets at the head of a file and the document ids at its tail take at most so much
        each."""
        return 8 * (stored.rows + 1) + _AROUND_BYTES

    def _ends(self, file: ShardFile, stored: ShardFile) -> bytes:
        """The token counts of all rows of a file in a bucket, then their document ids."""
        part, store = self._end_bytes(stored), self.log.store
        last, found = stored.bytes - part, None
        if isinstance(store, BucketStore):
            # what is not touched takes no memory: the ids stay where they are
            memory = mmap.mmap(-1, stored.bytes)
            for start in (0, last):
                memory[start : start + part] = store.read_range(stored.name, start, start + part)
            data = pa.py_buffer(memory)
            with contextlib.suppress(pa.ArrowInvalid):
                found = self._tokens_in(data, file, mapped=True, looks_at_ids=False)
                offsets, ids = (
                    view.__array_interface__["data"][0] - data.address
                    for view in (found.at, found.doc_id)
                    if view is not None
                )
                if offsets + found.at.nbytes > part or ids < last:
                    found = None
        if found is None:
            found = self._brought(file, stored, looks_at_ids=False)
        assert found.doc_id is not None, "token files have document ids"
        return np.diff(found.at).astype(np.int64).tobytes() + found.doc_id.tobytes()

    @property
    def chunk_length(self) -> int | None:
        """How many tokens its chunks may have, if it was cut into chunks."""
        return chunk_length(self.log.state)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of preparation, as the log has them."""
        opened = self.log.state.opened
        prepare = (opened.config.get("prepare") if opened else None) or {}
        return list(prepare.get("steps") or [])

    @property
    def chat(self) -> dict[str, Any] | None:
        for step in self.steps:
            if step.get("step") == "conversations":
                return {name: value for name, value in step.items() if name != "step"}
        return None

    def describe(self) -> str:
        told = []
        for step in self.steps:
            values = [
                f"{key} {str(step[key])[:40]}"
                for key in _TELLING
                if step.get(key) not in (None, "")
            ]
            told.append(f"{step.get('step')}" + (f" ({', '.join(values)})" if values else ""))
        return "; ".join(told) or "read as it was"

    def identity(self) -> dict[str, str | int]:
        state = self.log.state
        return {
            "dataset": state.dataset,
            "record": state.n,
            "head": state.head,
            "shards": self.ranged.text,
            "split": self.config.split,
        }

    def _await_record(self, record: int) -> None:
        """Wait for what a state has seen: a mirror may lag behind the dataset that it was made of.

        Shards are listed with what the log says of them: a seal that was seen ends the looking.
        """
        if record > self.log.state.n:
            self._refresh()
        waits = self.config.streaming
        if waits and record > self.log.state.n and not self.is_sealed:
            _log.warning(
                "%s: waiting for record %d, which the state has seen; the log is at %d",
                self.url, record, self.log.state.n,
            )  # fmt: skip
        while waits and record > self.log.state.n and not self.is_sealed:
            try:
                self.log.wait(stall_s=self.config.stall_s)
                self._list_files()
            except ProducerStalled as error:
                raise ProducerStalled(
                    f"the state has seen record {record}, the log ends at {self.log.state.n}, and "
                    f"nothing has come for {self.config.stall_s:g} s",
                    where=error.where,
                    why="it is a mirror that is no longer filled, or not the dataset it was",
                    do="start its push or pull again, then this; or give the address at which the "
                    "state was made",
                ) from None

    def check_identity(self, seen: dict[str, str | int]) -> str:
        self.turn_to(seen)
        mine = self.identity()
        for key, label in (
            ("dataset", "dataset id"),
            ("shards", "shard_ranges"),
            ("split", "split"),
        ):
            if seen.get(key) != mine[key]:
                return f"{label}: the state has {seen.get(key)}, this source {mine[key]}"
        record = seen["record"]
        assert isinstance(record, int)
        self._await_record(record)
        if record > self.log.state.n:
            return f"log: the state saw record {record}, this log ends at {self.log.state.n}"
        if self.log.record(record).sha256 != seen["head"]:
            return f"log: record {record} is not the one that the state saw"
        return ""


class DatasetSource(LogSource):
    """A live or sealed dataset: its log says which shards there are.

    The validation split grows by small parts, which the seal merges into one file. The plan goes on
    counting in parts, so that a run that began before the seal, or resumes behind it, gets the rows
    of a run on the finished dataset. The rows of a part that was merged are read where they are.
    """

    def __init__(self, url: str, config: SourceConfig) -> None:
        self._begin()
        super().__init__(url, config)
        self._await_merged()

    def _begin(self) -> None:
        self._whole: LogSource | None = None
        """The file that parts were merged into, as a source of that one shard."""
        self._first: dict[str, int] = {}
        """By the name of a part that was merged: the row of the whole that is its first."""
        self._held: Tokens | None = None
        """The tokens of the whole."""
        self._table: tuple[tuple[str, ...] | None, pa.Table] | None = None
        """Columns of the whole, those that were asked for last: the next part wants them too."""
        self._lock = threading.Lock()

    def _await_merged(self) -> None:
        """Wait for the validation shard where a mirror does not have the parts that it is made of.

        They are merged by the seal; a push that begins after it finds them no more.
        """
        if self.config.split != "val" or self.is_sealed:
            return
        merged = merged_files(self.log.store, self.log.state.dataset)
        while any(file.name in merged for file in self.log.state.split("val")):
            self.log.wait(stall_s=self.config.stall_s)
        self._list_files()

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_whole", "_first", "_held", "_table", "_lock")
        return {name: one for name, one in super().__getstate__().items() if name not in left_out}

    def reopen(self) -> None:
        self._begin()
        super().reopen()

    def _known(self) -> list[Add]:
        self._note_merged(self.log.state)
        return [part for file in super()._known() for part in self.log.state.parts_of(file)]

    def _note_merged(self, state: LogState) -> None:
        """Learn what was merged, if anything was."""
        files = state.split(self.config.split)
        with self._lock:
            if self._first or len(files) != 1 or (parts := state.parts_of(files[0])) == files:
                return
            self._whole = LogSource(self.url, replace(self.config, shards="all", name=self.name))
            firsts = offsets_of([part.rows for part in parts]).tolist()
            self._first = dict(zip((part.name for part in parts), firsts, strict=False))

    def _rows_of(
        self, shard: int, own: Callable[[int], _T], merged: Callable[[LogSource, int, int], _T]
    ) -> _T:
        """What a shard's `own` file has, or the rows of the whole that it was `merged` into."""
        file = self.file(shard)
        if file.name not in self._first:
            try:
                return own(shard)
            except ShardMismatch:
                if self.config.split != "val":
                    raise
                # the seal may have come since the log was read, which is another thread's
                self._note_merged(Log.open(self.url, patience_s=self.config.patience_s).state)
                if file.name not in self._first:
                    raise
        assert self._whole is not None
        first = self._first[file.name]
        return merged(self._whole, first, first + file.rows)

    def _read_lengths(self, shard: int) -> Int32s:
        return self._rows_of(
            shard, super()._read_lengths, lambda whole, first, last: whole.lengths(0)[first:last]
        )

    def decode(self, shard: int) -> Tokens:
        def merged(whole: LogSource, first: int, last: int) -> Tokens:
            lengths = whole.lengths(0)[first:last]
            self._check_planned(shard, lengths)
            return self._held_tokens_of(whole).part(first, last)

        return self._rows_of(shard, super().decode, merged)

    def _held_tokens_of(self, whole: LogSource) -> Tokens:
        with self._lock:
            held = self._held
            if held is None or (held.file is not None and not held.file.is_unchanged()):
                held = self._held = whole.decode(0)
            return held

    def read_table(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        return self._rows_of(
            shard,
            lambda own: super(DatasetSource, self).read_table(own, columns),
            lambda whole, first, last: whole.read_table(0, columns).slice(first, last - first),
        )

    def read_parquet(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        return self._rows_of(
            shard,
            lambda own: super(DatasetSource, self).read_parquet(own, columns),
            lambda whole, first, last: self._held_table(whole, columns)[first:last],
        )

    def _held_table(self, whole: LogSource, columns: Sequence[str] | None) -> pa.Table:
        names = None if columns is None else tuple(columns)
        with self._lock:
            if self._table is None or self._table[0] != names:
                self._table = names, whole.read_parquet(0, columns)
            return self._table[1]

    def stored_tokens(self, shard: int) -> Tokens | None:
        def merged(whole: LogSource, first: int, last: int) -> Tokens | None:
            found = whole.stored_tokens(0)
            return None if found is None else found.part(first, last)

        return self._rows_of(shard, super().stored_tokens, merged)

    def check_footer(self, shard: int) -> None:
        self._rows_of(shard, super().check_footer, lambda whole, *_: whole.check_footer(0))

    def provenance(
        self, shard: int, columns: Sequence[str] | None = None, *, rows: list[int] | None = None
    ) -> pa.Table:
        def merged(whole: LogSource, first: int, last: int) -> pa.Table:
            if rows is None:
                return whole.provenance(0, columns).slice(first, last - first)
            return whole.provenance(0, columns, rows=[first + row for row in rows])

        return self._rows_of(
            shard,
            lambda own: super(DatasetSource, self).provenance(own, columns, rows=rows),
            merged,
        )

    def ids_of(self, shard: int, rows: list[int]) -> list[npt.NDArray[Any]]:
        return self._rows_of(
            shard,
            lambda own: super(DatasetSource, self).ids_of(own, rows),
            lambda whole, first, _: whole.ids_of(0, [first + row for row in rows]),
        )

    def place_of(self, shard: int, row: int) -> tuple[str, int]:
        name = self.file(shard).name
        if self._whole is None or name not in self._first:
            return name, row
        return self._whole.file(0).name, self._first[name] + row

    def plan(self, shards: set[int]) -> None:
        own = {shard for shard in shards if self.file(shard).name not in self._first}
        super().plan(own)
        if self._whole is not None:
            self._whole.plan({0} if len(own) < len(shards) else set())
