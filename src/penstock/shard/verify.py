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
import re
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import BadConfig, LogDamaged, NoDataset, PenstockError
from penstock.shard.columns import schema_of
from penstock.shard.split import Split
from penstock.store.backends import Store
from penstock.store.log import COMPLETE, Log, LogState, merged_files
from penstock.store.record import HASH, Add, encode, record_name
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


def verify(
    store: Store, *, full: bool = False, expect: str | None = None, events: Events | None = None
) -> Verdict:
    """Check the dataset in `store`; the faults come in log order.

    `expect` is the sha256 of a record that was seen before, or its number, a colon and the sha256.
    """
    wanted = None if expect is None else _expected(expect)
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
    merged = merged_files(store, state.dataset) if found and state.sealed is None else set()
    coming = [name for name, _ in found if name in merged and store.size(name) is None]
    faults += [fault for name, fault in found if name in state.files and name not in coming]
    faults.extend(_check_end(log))
    if wanted is not None:
        faults.extend(_check_expected(log, *wanted))
    if full and not faults:
        faults.extend(_check_folds(store, state))
    return Verdict(state, faults, len(files), coming)


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
