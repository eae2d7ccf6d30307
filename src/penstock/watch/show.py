"""Describe a dataset to a person, or to a program as JSON.

In:    a log
Out:   shards, rows, inputs, rejects by reason, sealed or live, a few rows
"""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import PenstockError
from penstock.store.log import Log
from penstock.store.record import Add
from penstock.work.values import printable_name

_SAMPLE_CHARACTERS = 200


def describe(log: Log, *, sample_rows: int = 3) -> dict[str, Any]:
    """What the log says, with a few rows of the first shard."""
    state = log.state
    train, val = state.split("train"), state.split("val")
    rejects: dict[str, int] = {}
    for known in state.inputs.values():
        for reason, count in known.dropped.items():
            rejects[reason] = rejects.get(reason, 0) + count
    return {
        "dataset": log.store.url,
        "id": state.dataset,
        "sealed": state.sealed is not None,
        "records": state.n + 1,
        "last_record": state.time,
        "epoch": state.epoch,
        "config": state.opened.config if state.opened else {},
        "train": _totals(train),
        "val": _totals(val),
        "inputs": {
            name: {
                "bytes_read": known.to,
                "read": known.read,
                "kept": known.kept,
                "dropped": known.dropped,
                "blank": known.blank,
                "ended": known.end,
            }
            for name, known in state.inputs.items()
        },
        "rejects": rejects,
        "shards": [
            {"name": f.name, "rows": f.rows, "bytes": f.bytes, "tokens": f.tokens} for f in train
        ],
        "sample": _sample(log, train or val, sample_rows),
    }


def render(about: dict[str, Any]) -> str:
    """The same, to be read."""
    train, val = about["train"], about["val"]
    state = "sealed" if about["sealed"] else f"live, last record {about['last_record']}"
    lines = [
        f"{printable_name(about['dataset'])}: {printable_name(state)}",
        f"  train   {_line(train)}",
        f"  val     {_line(val)}",
    ]
    for name, known in about["inputs"].items():
        how = f"ended ({printable_name(known['ended'])})" if known["ended"] else "still open"
        lines.append(
            f"  input   {printable_name(name)}: read to {known['bytes_read']:,}, "
            f"{known['read']:,} read = {known['kept']:,} kept + "
            f"{sum(known['dropped'].values()):,} refused, {how}"
        )
    for reason, count in sorted(about["rejects"].items(), key=lambda item: -item[1]):
        lines.append(f"  refused {count:,} {printable_name(reason)}")
    for shard in about["shards"][:5]:
        name = printable_name(shard["name"])
        lines.append(f"  shard   {name}: {shard['rows']:,} rows, {shard['bytes']:,} bytes")
    if len(about["shards"]) > 5:
        lines.append(f"          and {len(about['shards']) - 5:,} more")
    for row in about["sample"]:
        where = f"{row['source']!r} [{row['start']:,}:{row['end']:,}]"
        lines.append(f"  row     {where}: {row['text']!r}")
    return "\n".join(lines)


def _totals(files: list[Add]) -> dict[str, int | None]:
    tokens = [file.tokens for file in files]
    known = [count for count in tokens if count is not None]
    return {
        "files": len(files),
        "rows": sum(file.rows for file in files),
        "bytes": sum(file.bytes for file in files),
        "tokens": sum(known) if files and len(known) == len(tokens) else None,
    }


def _line(totals: dict[str, int | None]) -> str:
    tokens = "not counted" if totals["tokens"] is None else f"{totals['tokens']:,}"
    return (
        f"{totals['files']:,} files, {totals['rows']:,} rows, {totals['bytes']:,} bytes, "
        f"tokens {tokens}"
    )


def _sample(log: Log, files: list[Add], rows: int) -> list[dict[str, Any]]:
    if not files or rows <= 0:
        return []
    try:
        with log.store.open(files[0].name) as opened:
            size = min(rows, 1 << 20)
            batches = pq.ParquetFile(opened).iter_batches(batch_size=size, use_threads=False)
            batch = next(batches, None)
    except (OSError, pa.ArrowException, PenstockError):  # `verify` tells of it; here: no sample
        return []
    found: list[dict[str, Any]] = batch.to_pylist() if batch is not None else []
    for row in found:
        if len(row["text"]) > _SAMPLE_CHARACTERS:
            row["text"] = row["text"][:_SAMPLE_CHARACTERS] + "…"
    return found
