"""The shards of a dataset as a source for the plan, and their tokens for the fetch.

In:    a dataset's log, in a directory or a bucket; its shards
Out:   row and token counts; decoded tokens of whole shards, verified
Keeps: a shard's bytes are those that the log names, or an error names the shard
Never: lists a directory; makes a Python object for a document
"""

import abc
import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import BadConfig, BadDocument, ProducerStalled, ShardMismatch
from penstock.store.cache import Cache
from penstock.store.log import INPUT_STALL_S, STALL_S, Log, merged_files
from penstock.stream.source import Int32s, Ranged
from penstock.supply.decoded import (
    Decoded,
    from_pages,
    highest_id,
    joined,
    numbers,
    packed,
    read_slowly,
    unpacked,
)
from penstock.supply.texts import as_text
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.values import number

Int64s = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard as its dataset names it; a foreign one has no hash."""

    name: str
    rows: int
    bytes: int
    sha256: str | None
    tokens: int | None


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
    """Where decoded shards are kept, for later passes, later runs and the other ranks."""
    stall_s: float = STALL_S
    """Silence of whoever makes the dataset that is an error."""
    input_stall_s: float = INPUT_STALL_S
    """The same of what he reads, while he is alive."""
    patience_s: float | None = None
    """How long a bucket that does not answer is asked again; by default 60 s."""


def waiting_limits(stall_s: float | None, patience_s: float | None) -> dict[str, Any]:
    """What a user chose for `SourceConfig`; a `stall_s` counts for a producer and for its input."""
    found = {}
    for name, given in (("stall_s", stall_s), ("patience_s", patience_s)):
        if given is not None:
            found[name] = number(name, given)
            if found[name] < 0:
                raise BadConfig(f"{name} is {given}", do="choose 0 or more seconds")
    if "stall_s" in found:
        found["input_stall_s"] = found["stall_s"]
    return found


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
        self.made_with = ""
        """The fingerprint of the tokenizer whose tokens the shards hold, if they hold some."""
        self._banned = np.array(sorted(set(config.banned)), np.uint64)
        self._files: list[ShardFile] = []
        self._lengths: dict[int, Int32s] = {}
        self._kept: dict[int, Decoded] = {}
        self._last_decoded: tuple[int, Decoded] | None = None

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

    def check_end(self) -> None:  # noqa: B027
        """Raise if what was read to its end has not ended there."""

    def reopen(self) -> None:  # noqa: B027
        """Make anew what does not outlive a fork: clients of buckets have threads."""

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
        if self.ranged.size is None:
            return len(self._files)
        k = 0
        while (number := self.ranged.number(k)) is not None and number < len(self._files):
            k += 1
        return k

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
        return self.file(shard).bytes

    def lengths(self, shard: int) -> Int32s:
        # threads that decode write here too, and forget
        if (found := self._lengths.get(shard)) is None:
            found = self._lengths[shard] = self._read_lengths(shard)
        return found

    def forget(self, shard: int) -> None:
        """The shard has left the pool."""
        self._lengths.pop(shard, None)
        self._kept.pop(shard, None)

    def forget_but(self, shards: set[int]) -> None:
        """All others have left the pool, some of them without ever being decoded."""
        for shard in [shard for shard in list(self._lengths) if shard not in shards]:
            self.forget(shard)

    def _read_lengths(self, shard: int) -> Int32s:
        file = self.file(shard)
        decoded = self._cached(file)
        if decoded is None and self.has_counts:
            counts = self._read_columns(file, ["n_tokens"]).column(0)
            self._check_rows(file, len(counts))
            if counts.null_count == 0 and pa.types.is_integer(counts.type):
                return self._allowed(file, numbers(counts))
        if decoded is None:
            # not in the caller's own thread: Ctrl-C in the middle of tokenising must reach it
            with ThreadPoolExecutor(1) as thread:
                decoded = thread.submit(self._found, shard).result()
        self._kept[shard] = decoded  # whoever asks for lengths will ask for the tokens too
        return self._allowed(file, np.diff(decoded.at))

    def _allowed(self, file: ShardFile, counts: npt.NDArray[Any]) -> Int32s:
        """Lengths with the tokens around documents, below zero for what is banned."""
        most = np.iinfo(np.int32).max - self.config.extra_tokens
        wrong = np.flatnonzero((counts < 0) | (counts > most))
        if len(wrong):
            raise self._wrong_count(file, int(wrong[0]), f"n_tokens is {counts[wrong[0]]:,}")
        lengths: Int32s = counts.astype(np.int32) + np.int32(self.config.extra_tokens)
        if len(self._banned):
            doc_ids = numbers(self._read_columns(file, ["doc_id"]).column(0))
            banned = np.isin(doc_ids, self._banned)
            lengths[banned] = -1 - lengths[banned]
        return lengths

    def _read_columns(self, file: ShardFile, columns: Sequence[str]) -> pa.Table:
        """Some columns, without reading the rest of the shard; not verified."""
        with self._readable(file), self._open(file.name) as opened:
            return self._checked(pq.ParquetFile(opened), file, columns).read(list(columns))

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

    def decode(self, shard: int) -> Decoded:
        """All tokens of a shard: as they were decoded before, or from its verified bytes."""
        if (kept := self._kept.pop(shard, None)) is not None:
            return kept
        decoded, file = self._found(shard), self.file(shard)
        lengths = self._allowed(file, np.diff(decoded.at))
        planned = self._lengths.setdefault(shard, lengths)
        # what was planned with came from a column that nobody had hashed then
        wrong = np.flatnonzero(planned != lengths)
        if len(wrong):
            row = int(wrong[0])
            told = f"{planned[row]:,} were planned, {lengths[row]:,} are there"
            raise self._wrong_count(file, row, told)
        return decoded

    def _found(self, shard: int) -> Decoded:
        """The tokens of a shard; of the ranks that share a cache directory one decodes it."""
        file, cache = self.file(shard), self.config.cache
        if cache is None or file.sha256 is None:
            return self._decode(file)
        held = cache.fetch(self._cache_key(file), lambda: packed(self._decode(file)))
        return self._unpacked(file, held) or self._decode(file)

    def _unpacked(self, file: ShardFile, held: bytes | memoryview) -> Decoded | None:
        return unpacked(memoryview(held), file.rows, self._vocab_size)

    @property
    def _vocab_size(self) -> int:
        """Ids are below it; batches hold them in 32 bits with a sign."""
        tokenizer = self.config.tokenizer
        return 1 << 31 if tokenizer is None else min(1 << 31, tokenizer.vocab_size)

    def _cache_key(self, file: ShardFile) -> str:
        tokenizer = self.config.tokenizer
        about = ""
        if not self.has_tokens and tokenizer is not None:
            about = f"{tokenizer.fingerprint} {self.config.text_field}"
        return f"decoded 1 {file.sha256} {about}"

    def _cached(self, file: ShardFile) -> Decoded | None:
        """The tokens as they were decoded before, mapped where the cache can do that."""
        if (cache := self.config.cache) is None or file.sha256 is None:
            return None
        held = getattr(cache, "map", cache.get)(self._cache_key(file))
        return None if held is None else self._unpacked(file, held)

    def _decode(self, file: ShardFile) -> Decoded:
        """The tokens of a shard whose bytes were found to be those of the log."""
        data = self._verified(file)
        try:
            # plain reads by this thread: several shards are decoded at once anyway, and with
            # Arrow's own threads and buffers each takes half as long again
            opened = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
            stored = self.has_tokens and "tokens" in opened.schema_arrow.names
            if stored and (found := from_pages(data, opened)) is not None:
                return self._checked_tokens(file, found)
            column = "tokens" if stored else self.config.text_field
            columns = [column, "n_tokens"] if self._counts(opened) else [column]
            table = self._checked(opened, file, [column]).read(columns, use_threads=False)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._unreadable(file, error) from None
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
        try:
            decoded = self._checked_tokens(file, joined(tokens))
        except pa.ArrowException as error:
            raise self._unreadable(file, error) from None
        if len(columns) > 1 and table.column("n_tokens").null_count == 0:
            wrong = np.flatnonzero(np.diff(decoded.at) != numbers(table.column("n_tokens")))
            if len(wrong):
                raise self._wrong_count(file, int(wrong[0]), "its tokens are more or fewer")
        return decoded

    def _wrong_count(self, file: ShardFile, row: int, why: str) -> ShardMismatch:
        return ShardMismatch(
            f"row {row:,} of {file.name} has not as many tokens as its n_tokens says",
            where=f'source "{self.name}", {self.place(file)}',
            why=why,
            do="make the dataset again with this version of penstock",
        )

    def _checked_tokens(self, file: ShardFile, decoded: Decoded) -> Decoded:
        self._check_rows(file, len(decoded.at) - 1)
        if (highest := highest_id(decoded.values)) >= self._vocab_size:
            raise ShardMismatch(
                f"{file.name} has a token of number {highest:,}",
                where=f'source "{self.name}", {self.place(file)}',
                why=f"the vocabulary ends at {self._vocab_size - 1:,}",
                do="make the dataset again with the tokenizer that it is read with",
            )
        return decoded

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
        file, cache, data = self.file(shard), self.config.cache, None
        if cache is not None and file.sha256 is not None:
            data = cache.fetch(f"shard 1 {file.sha256}", lambda: self._verified(file))
        try:
            opened = pq.ParquetFile(pa.BufferReader(data or self._verified(file)))
            names = opened.schema_arrow.names if columns is None else list(columns)
            table = read_slowly(self._checked(opened, file, names), names)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._unreadable(file, error) from None
        self._check_rows(file, table.num_rows)
        return table

    def check_footer(self, shard: int) -> None:
        """Refuse a shard that by its own footer has not as many rows as the log says."""
        file = self.file(shard)
        with self._readable(file), self._open(file.name) as opened:
            self._check_rows(file, pq.ParquetFile(opened).metadata.num_rows)

    def _check_rows(self, file: ShardFile, rows: int) -> None:
        if rows != file.rows:
            raise ShardMismatch(
                f"{file.name} has {rows:,} rows, the log says {file.rows:,}",
                where=self.url,
                do=f"penstock verify --full {self.url}",
            )

    def decoded_once(self, shard: int) -> Decoded:
        """The tokens of a shard, remembered for the next question about the same one."""
        if self._last_decoded is None or self._last_decoded[0] != shard:
            self._last_decoded = shard, self.decode(shard)
        return self._last_decoded[1]

    def provenance(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Where the rows of a shard come from: its columns but for text and tokens."""
        file = self.file(shard)
        if columns is None:
            with self._open(file.name) as opened:
                names = pq.ParquetFile(opened).schema_arrow.names
            columns = [name for name in names if name not in (self.config.text_field, "tokens")]
        return self._read_columns(file, columns)

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

    def _verified(self, file: ShardFile) -> bytes:
        """The bytes of a shard; read a second time if they are wrong at first."""
        found, named = "", file.sha256 or ""
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
        raise ShardMismatch(
            f"{file.name} is not what was written",
            where=f'source "{self.name}", {self.url}/{file.name}',
            why=f"{found}; the log says {file.bytes:,} bytes, {named[:12]}…",
            do="restore the shard from a copy, or make the dataset again; it was read twice",
        )

    def place(self, file: ShardFile) -> str:
        """Where a shard is, for messages."""
        return f"{self.url}/{file.name}"

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


_TELLING: Final = ("preset", "mode", "name", "max_tokens", "secrets", "pii")
"""The settings of steps that say most; the log has all of them."""


class DatasetSource(ShardSource):
    """A live or sealed dataset: its log says which shards there are."""

    def __init__(self, url: str, config: SourceConfig) -> None:
        super().__init__(url, config)
        self.log = Log.open(url, patience_s=config.patience_s)
        self._await_merged()
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
                do="give the tokenizer of the dataset, or shard the inputs again with this one",
            )

    def reopen(self) -> None:
        self.log = Log.open(self.url, patience_s=self.config.patience_s)
        self._list_files()

    def __getstate__(self) -> dict[str, Any]:
        """A source can be sent to another process, which opens the log for itself."""
        return {name: value for name, value in self.__dict__.items() if name != "log"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reopen()

    @property
    def is_sealed(self) -> bool:
        return self.log.state.sealed is not None

    def _await_merged(self) -> None:
        """Wait for the validation shard where a mirror does not have the parts that it is made of.

        They are merged by the seal; a push that begins after it finds them no more.
        """
        if self.config.split != "val" or self.is_sealed:
            return
        merged = merged_files(self.log.store, self.log.state.dataset)
        while any(file.name in merged for file in self.log.state.split("val")):
            self.log.wait(stall_s=self.config.stall_s)

    def _list_files(self) -> None:
        known = self.log.state.split(self.config.split)
        for before, now in zip(self._files, known, strict=False):
            if before.name != now.name:
                raise ShardMismatch(
                    f"{before.name} was taken out of the dataset",
                    where=self.url,
                    why="a plan counts on what it has seen",
                    do="start the training anew on this dataset",
                )
        self._files += [
            ShardFile(file.name, file.rows, file.bytes, file.sha256, file.tokens)
            for file in known[len(self._files) :]
        ]

    def _refresh(self) -> None:
        self.log.refresh()
        self._list_files()

    def _wait(self) -> None:
        config = self.config
        self.log.wait(stall_s=config.stall_s, input_stall_s=config.input_stall_s)
        self._list_files()

    def _open(self, name: str) -> Any:
        return self.log.store.open(name)

    def _read(self, name: str) -> bytes:
        return self.log.store.read(name)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of preparation, as the log has them."""
        opened = self.log.state.opened
        prepare = (opened.config.get("prepare") if opened else None) or {}
        return list(prepare.get("steps") or [])

    def describe(self) -> str:
        told = []
        for step in self.steps:
            values = [f"{key} {step[key]}" for key in _TELLING if step.get(key) not in (None, "")]
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
