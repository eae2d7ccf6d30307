"""Prove that a dataset is what its log says.

In:    a dataset
Out:   every fault found, each with its place; none means proven
Keeps: one row group in memory; of a dataset in a bucket also one token file
Never: changes anything, stops at the first fault

quick: the chain of records, the tiling of each input, read = kept + dropped, sizes of all files.
full:  also every sha256, every row count, every row on the side of the split where it belongs
       (so that no source document is on both), token files row by row beside their shards, the
       folds, the rejects.
"""

import hashlib
import os
import re
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from penstock.arrays import values_of
from penstock.errors import BadConfig, LogDamaged, NoDataset, PenstockError
from penstock.produce.columns import ValRule, has_chat_columns, schema_for
from penstock.store.local import LocalStore
from penstock.store.log import COMPLETE, Log, LogState, merged_files, only_split
from penstock.store.record import HASH, Add, decode_keys, encode, record_name
from penstock.store.store import Store, open_store
from penstock.tokenize.token_file import read_token_file
from penstock.work.events import Events

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as the log says."""

    what: str
    where: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found."""

    state: LogState
    faults: list[Fault]
    files_checked: int
    coming: list[str] = field(default_factory=list)
    """Files that a mirror does not have yet, and will have in others: its source has merged them
    before they were copied, and the record that says so follows."""
    left_out: list[str] = field(default_factory=list)
    """Files that a mirror does not have, since it was filled with `pull --only`."""


def verify(
    dataset: str | os.PathLike[str] | Store,
    *,
    full: bool = False,
    expect: str | None = None,
    events: Events | None = None,
) -> Verdict:
    """Check the dataset at a path or an address; the faults come in log order.

    `expect` is the sha256 of a record that was seen before, or its number, a colon and the sha256.
    """
    wanted = None if expect is None else _expected(expect)
    events = events or Events("verify")
    store = open_store(dataset) if isinstance(dataset, str | os.PathLike) else dataset
    faults: list[Fault] = []
    log = Log(store)
    try:
        log.refresh(folds=False)
    except LogDamaged as error:
        faults.append(Fault(error.what, error.where, error.why))
    state = log.state
    if state.n < 0 and not faults:
        raise NoDataset(f"there is no dataset at {store.url}", where=store.url, why="it has no log")
    files = list(state.files.values())
    total = sum(file.bytes for file in files)
    done = 0
    found: list[tuple[str, Fault]] = []
    for number, file in enumerate(files, 1):
        found += [(file.name, fault) for fault in _check_file(store, file, state, full=full)]
        done += file.bytes
        events.emit("progress", at=done, size=total, files=number, faults=len(found))
    if found and not faults and state.sealed is None:
        log.refresh(folds=False)  # a seal in the meantime may have retired what we missed
    found = [(name, fault) for name, fault in found if name in state.files]
    absent = [name for name, fault in found if fault.what == f"{name} is missing"]
    only = only_split(store, state.dataset) if absent else None
    left_out = [name for name in absent if only and state.files[name].split != only]
    merged = merged_files(store, state.dataset) if absent and state.sealed is None else set()
    coming = [name for name in absent if name in merged and name not in left_out]
    expected = {*left_out, *coming}
    faults += [fault for name, fault in found if name not in expected]
    faults.extend(_check_pairs(log))
    faults.extend(_check_keys(log))
    faults.extend(_check_end(log))
    if wanted is not None:
        faults.extend(_check_expected(log, *wanted))
    if full and not faults:
        faults.extend(_check_folds(store, state))
    return Verdict(state, faults, len(files), coming, left_out)


def _expected(text: str) -> tuple[int | None, str]:
    """The number, if it is there, and the sha256 of a record that was seen before."""
    number, colon, sha256 = text.rpartition(":")
    if not HASH.fullmatch(sha256) or (colon and not re.fullmatch("[0-9]{1,20}", number)):
        raise BadConfig(
            f"--expect is {text!r}",
            why="it is the sha256 of a record, or its number, a colon and the sha256",
            do="give the head that an earlier penstock verify printed for this dataset",
        )
    return (int(number) if colon else None), sha256


def _check_expected(log: Log, number: int | None, sha256: str) -> list[Fault]:
    """A record that was seen before is still there: then all before it are, by the chain.

    What a log has lost at its end it cannot show by itself: it looks like a live one.
    """
    state, url = log.state, log.store.url
    if number is not None and number <= state.n:
        found = log.record(number).sha256
        if found == sha256:
            return []
        return [
            Fault(
                f"record {number} is not the expected one",
                f"{url}/{record_name(number)}",
                f"sha256 {found[:12]}…, expected {sha256[:12]}…: it was rolled back and written "
                "on, or is another dataset",
            )
        ]
    # newest first: what was seen last is near the end
    if number is None and any(log.record(n).sha256 == sha256 for n in range(state.n, -1, -1)):
        return []
    return [
        Fault(
            "the log does not have the expected record" + ("" if number is None else f" {number}"),
            url,
            f"it ends at record {state.n}: the newest records were removed, or this is another "
            "dataset, or a mirror that is behind",
        )
    ]


def _check_file(store: Store, file: Add, state: LogState, *, full: bool) -> list[Fault]:
    where = f"{store.url}/{file.name}"
    try:
        size = store.size(file.name)
        if size is None:
            return [Fault(f"{file.name} is missing", where, "the log says it is there")]
        if size != file.bytes:
            return [
                Fault(
                    f"{file.name} has the wrong size",
                    where,
                    f"{size:,}, the log says {file.bytes:,}",
                )
            ]
        return _read_file(store, file, state, where) if full else []
    except (PenstockError, FileNotFoundError) as error:
        return [Fault(f"{file.name} cannot be read", where, str(error))]


def _read_file(store: Store, file: Add, state: LogState, where: str) -> list[Fault]:
    with store.open(file.name) as opened:
        digest, checksum = hashlib.sha256(), xxhash.xxh3_128()
        lines = 0
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
            if file.xxh3:
                checksum.update(block)
            lines += block.count(b"\n")
        if digest.hexdigest() != file.sha256:
            return [
                Fault(
                    f"{file.name} is not what was written",
                    where,
                    f"sha256 {digest.hexdigest()[:12]}…, the log says {file.sha256[:12]}…",
                )
            ]
        if file.xxh3 and checksum.hexdigest() != file.xxh3:
            return [
                Fault(
                    f"{file.name} has another checksum than the log says",
                    where,
                    f"xxh3 {checksum.hexdigest()[:12]}…, the log says {file.xxh3[:12]}…",
                )
            ]
        if file.split == "rejects":
            return _same_count(file, lines, where)
        if file.split == "about":
            return []
        opened.seek(0)
        try:
            if file.split == "tokens":
                return _check_tokens(store, opened, file, state, where)
            return _check_rows(pq.ParquetFile(opened), file, state, where)
        except pa.ArrowException as error:
            kind = "a token file" if file.split == "tokens" else "readable parquet"
            return [Fault(f"{file.name} is not {kind}", where, str(error))]


def _check_pairs(log: Log) -> list[Fault]:
    """Either no shard has a token file, or all have one."""
    state = log.state
    if not state.split("tokens"):
        return []
    return [
        Fault(f"{file.name} has no token file", f"{log.store.url}/{file.name}", "others have")
        for file in [*state.split("train"), *state.split("val")]
        if state.tokens_of(file) is None
    ]


def _check_keys(log: Log) -> list[Fault]:
    """Where rows have ids: every row has one, and none is there twice."""
    state, url = log.state, log.store.url
    files = [file for file in state.split("train") if file.keys]
    faults, found = [], []
    for file in files:
        try:
            keys = decode_keys(file.keys)
        except ValueError:
            keys = np.zeros(0, np.uint64)
        if len(keys) != 2 * file.rows:
            why = f"the log has {len(keys) // 2:,} of its {file.rows:,} rows"
            faults.append(Fault(f"{file.name} has not a key for each row", url, why))
            keys = np.zeros(2 * file.rows, np.uint64)
        found.append(keys[::2])
    if faults or not files:
        return faults
    ids = np.concatenate(found)
    order = np.argsort(ids, kind="stable")
    twice = order[1:][np.diff(ids[order]) == 0]
    if len(twice):
        at = int(twice.min())
        ends = np.cumsum([file.rows for file in files])
        name = files[int(np.searchsorted(ends, at, side="right"))].name
        faults.append(Fault(f"{len(twice):,} rows are there twice", f"{url}/{name}", "by their id"))
    return faults


def _check_tokens(
    store: Store, opened: IO[bytes], file: Add, state: LogState, where: str
) -> list[Fault]:
    """A token file is what it should be by itself, and row by row what its shard says."""
    config = state.opened.config if state.opened else {}
    data = _mapped(store, file.name) or opened.read_buffer()  # type: ignore[attr-defined]
    made_with = str(config.get("tokenizer", ""))
    found = read_token_file(data, rows=file.rows, vocab_size=1 << 32, tokenizer=made_with)
    faults = []
    if len(found.values) != file.tokens:
        why = f"the log says {file.tokens:,}"
        faults.append(Fault(f"{file.name} has {len(found.values):,} tokens", where, why))
    if file.rows and found.values.dtype.name != config.get("token_type"):
        why = f"the log says {config.get('token_type')}"
        faults.append(Fault(f"{file.name} has tokens of {found.values.dtype}", where, why))
    shard = state.shard_of(file)
    if faults or shard is None or store.size(shard.name) is None:
        return faults  # what is wrong with the shard is told where it is looked at
    columns: list[str] = ["doc_id"]
    own: list[Any] = [found.doc_id]
    if "text_of" not in config:
        columns, own = [*columns, "n_tokens"], [*own, np.diff(found.at)]
    if has_chat_columns(config.get("prepare") or {}):
        if found.spans is None:
            return [Fault(f"{file.name} has no loss_spans", where, "its rows are conversations")]
        columns, own = [*columns, "n_loss"], [*own, found.spans.counts()]
    first = 0
    with store.open(shard.name) as beside:
        parquet = pq.ParquetFile(beside)
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=columns, use_threads=False)
            last = first + table.num_rows
            for name, mine in zip(columns, own, strict=True):
                kind = "uint64" if name == "doc_id" else "int64"
                # a chunked array's to_numpy would import pandas first
                told = table[name].cast(kind).combine_chunks()
                if told.null_count or not np.array_equal(values_of(told, kind), mine[first:last]):
                    why = f"{name}, rows {first:,} to {last:,}"
                    return [Fault(f"{file.name} is not of the rows of {shard.name}", where, why)]
            first = last
    return []


def _mapped(store: Store, name: str) -> pa.Buffer | None:
    """A file of this machine, whatever its size, without memory of our own."""
    if not isinstance(store, LocalStore):
        return None
    descriptor = store.open_file(name)
    try:
        with pa.memory_map(f"/dev/fd/{descriptor}") as file:
            return file.read_buffer()
    finally:
        os.close(descriptor)


def _check_rows(parquet: pq.ParquetFile, file: Add, state: LogState, where: str) -> list[Fault]:
    config = state.opened.config if state.opened else {}
    if config.get("kind") == "rollouts":
        for group in range(parquet.num_row_groups):
            parquet.read_row_group(group, use_threads=False).validate(full=True)
        return _same_count(file, parquet.metadata.num_rows, where)
    kinds = [str(config.get("token_type", ""))]
    if state.tokens_of(file) is not None:
        # text that was tokenised again may be that of an earlier penstock, with a column of tokens
        kinds = ["", "uint16", "uint32"] if "text_of" in config else [""]
    try:
        prepare = config.get("prepare") or {}
        schemas = [schema_for(prepare, kind) for kind in kinds]
    except KeyError:
        return [Fault("the log does not say what tokens are", where, str(config))]
    schema = next((one for one in schemas if parquet.schema_arrow.equals(one)), None)
    if schema is None:
        return [Fault(f"{file.name} has other columns", where, str(parquet.schema_arrow))]
    try:
        split = ValRule.of(int(config["seed"]), float(config["val_fraction"]))
    except (KeyError, TypeError, ValueError):
        return [Fault("the log does not say how the split was made", where, str(config))]
    rows = wrong = tokens = 0
    for group in range(parquet.num_row_groups):
        table = parquet.read_row_group(group, use_threads=False)
        table.validate(full=True)
        for chunk in table["doc_id"].chunks:
            ids = np.frombuffer(chunk.buffers()[1], np.uint64)[chunk.offset :][: len(chunk)]
            wrong += int(np.count_nonzero(split.is_val(ids) != (file.split == "val")))
        rows += table.num_rows
        tokens += pc.sum(table["n_tokens"]).as_py() or 0
        if "tokens" in schema.names and not table["n_tokens"].equals(
            pc.list_value_length(table["tokens"])
        ):
            return [Fault(f"{file.name} counts its tokens wrong", where, f"row group {group}")]
    faults = _same_count(file, rows, where)
    if file.tokens is not None and tokens != file.tokens:
        faults.append(
            Fault(f"{file.name} has {tokens:,} tokens", where, f"the log says {file.tokens:,}")
        )
    if wrong:
        faults.append(
            Fault(f"{wrong:,} rows of {file.name} belong to the other split", where, "by doc_id")
        )
    return faults


def _same_count(file: Add, rows: int, where: str) -> list[Fault]:
    if rows == file.rows:
        return []
    return [Fault(f"{file.name} has {rows:,} rows", where, f"the log says {file.rows:,}")]


def _check_end(log: Log) -> list[Fault]:
    """A sealed dataset has its marker, and the marker holds the seal."""
    if log.state.sealed is None:
        return _check_gap(log)
    where = f"{log.store.url}/{COMPLETE}"
    do = "run its producer again: it puts the marker right"
    try:
        if log.store.read(COMPLETE) != encode(log.record(log.state.n)):
            return [Fault(f"{COMPLETE} does not hold the seal", where, do)]
    except FileNotFoundError:
        return [Fault(f"sealed, but {COMPLETE} is missing", where, do)]
    except PenstockError as error:
        return [Fault(f"{COMPLETE} cannot be read", where, str(error))]
    return []


def _check_gap(log: Log) -> list[Fault]:
    """Records are numbered without gaps: one that is gone cuts off all that stand after it."""
    try:
        log.check_end(lists=True)
    except LogDamaged as error:
        return [Fault(error.what, error.where, error.why)]
    return []


def _check_folds(store: Store, state: LogState) -> list[Fault]:
    """What the folds add up to is what the records add up to."""
    folded = Log(store)
    folded.refresh()
    faults = [
        Fault(f"{name} is damaged", f"{store.url}/{name}", "reading the records instead works")
        for name in folded.damaged_folds
    ]
    if folded.state.files != state.files or folded.state.head != state.head:
        faults.append(Fault("the folds do not add up to the records", f"{store.url}/_fold"))
    return faults
