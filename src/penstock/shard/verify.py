"""Prove that a dataset is what its log says.

In:    a dataset
Out:   every fault found, each with its place; none means proven
Keeps: one row group in memory
Never: changes anything, stops at the first fault

quick: the chain of records, the tiling of each input, read = kept + dropped, sizes of all files.
full:  also every sha256, every row count, every row on the side of the split where it belongs
       (so that no source document is on both), the folds, the rejects.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import LogDamaged, NoDataset, PenstockError
from penstock.shard.columns import schema_of
from penstock.shard.split import Split
from penstock.store.backends import Store
from penstock.store.log import COMPLETE, Log, LogState
from penstock.store.record import Add, encode
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


def verify(store: Store, *, full: bool = False, events: Events | None = None) -> Verdict:
    """Check the dataset in `store`; the faults come in log order."""
    events = events or Events("verify")
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
    faults += [fault for name, fault in found if name in state.files]
    faults.extend(_check_end(log))
    if full and not faults:
        faults.extend(_check_folds(store, state))
    return Verdict(state, faults, len(files))


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
        digest = hashlib.sha256()
        lines = 0
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
            lines += block.count(b"\n")
        if digest.hexdigest() != file.sha256:
            return [
                Fault(
                    f"{file.name} is not what was written",
                    where,
                    f"sha256 {digest.hexdigest()[:12]}…, the log says {file.sha256[:12]}…",
                )
            ]
        if file.split == "rejects":
            return _same_count(file, lines, where)
        if file.split == "about":
            return []
        opened.seek(0)
        try:
            return _check_rows(pq.ParquetFile(opened), file, state, where)
        except pa.ArrowException as error:
            return [Fault(f"{file.name} is not readable parquet", where, str(error))]


def _check_rows(parquet: pq.ParquetFile, file: Add, state: LogState, where: str) -> list[Fault]:
    config = state.opened.config if state.opened else {}
    try:
        schema = schema_of(str(config.get("token_type", "")), chunks=bool(config.get("prepare")))
    except KeyError:
        return [Fault("the log does not say what tokens are", where, str(config))]
    if not parquet.schema_arrow.equals(schema):
        return [Fault(f"{file.name} has other columns", where, str(parquet.schema_arrow))]
    try:
        split = Split.of(int(config["seed"]), float(config["val_fraction"]))
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
