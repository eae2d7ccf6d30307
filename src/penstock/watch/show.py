"""Describe a dataset to a person, or to a program as JSON.

In:    a log
Out:   shards, rows, inputs, rejects by reason, sealed or live, a few rows
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.chat.audit import coloured
from penstock.errors import BadConfig, PenstockError
from penstock.options import printable_name
from penstock.store.log import Log, LogState, chunk_length, describe_generation
from penstock.store.record import Add
from penstock.tokenize.token_file import read_token_file
from penstock.tokenize.tokenizer import Tokenizer

_SAMPLE_CHARACTERS = 200


def describe(
    log: Log, *, sample_rows: int = 3, others: Sequence[str] = (), tokenizer: Any = None,
    colours: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What the log says, with a few rows of the first shard, and what its `others` are: the
    other generations, by their addresses.

    With a `tokenizer`, rows that are conversations have `shown`: their tokens as text, with what is
    trained in colour, or between « and ».
    """
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
        "chunk_tokens": chunk_length(state),
        "config": state.opened.config if state.opened else {},
        "train": _totals(state, train),
        "val": _totals(state, val),
        "token_files": _totals(state, state.split("tokens")),
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
            {"name": f.name, "rows": f.rows, "bytes": f.bytes, "tokens": _tokens(state, f)}
            for f in train
        ],
        "sample": _with_targets(
            log, train or val, _sample(log, train or val, sample_rows), tokenizer, colours
        ),
        "others": {url: _other(url) for url in others},
    }


def render(about: dict[str, Any]) -> str:
    """The same, to be read."""
    train, val = about["train"], about["val"]
    state = "sealed" if about["sealed"] else f"live, last record {about['last_record']}"
    if about["chunk_tokens"] is not None:
        state += f", chunks of {about['chunk_tokens']:,} tokens"
    lines = [
        f"{printable_name(about['dataset'])}: {printable_name(state)}",
        f"  train   {_line(train)}",
        f"  val     {_line(val)}",
    ]
    for url, told in about["others"].items():
        lines.append(f"  beside  {printable_name(url)}: {printable_name(told)}")
    if (tokens := about["token_files"])["files"]:
        lines.append(f"  tokens  {tokens['files']:,} files, {tokens['bytes']:,} bytes")
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
        if "n_loss" in row:
            where += (
                f" line {row['line']:,}, {row['n_loss']:,} of {row['n_tokens']:,} tokens trained"
            )
        lines.append(f"  row     {where}: {row['text']!r}")
    return "\n".join(lines)


def _other(url: str) -> str:
    try:
        return describe_generation(Log.open(url).state)
    except PenstockError as error:
        return f"not readable, {error.what}"


def _tokens(state: LogState, file: Add) -> int | None:
    """How many a file holds, or its own token file: text may be that of another tokenizer."""
    beside = state.tokens_of(file) if file.split != "tokens" else None
    return file.tokens if beside is None else beside.tokens


def _totals(state: LogState, files: list[Add]) -> dict[str, int | None]:
    tokens = [_tokens(state, file) for file in files]
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


def _with_targets(
    log: Log, files: list[Add], rows: list[dict[str, Any]], tokenizer: Any, colours: bool
) -> list[dict[str, Any]]:
    """The rows of conversations with their tokens as text."""
    if tokenizer is None or not rows or "turns" not in rows[0]:
        return rows
    loaded, beside = Tokenizer.load(tokenizer), log.state.tokens_of(files[0])
    if beside is None:
        return rows
    try:
        tokens = read_token_file(
            pa.py_buffer(log.store.read(beside.name)), rows=beside.rows,
            vocab_size=loaded.vocab_size, tokenizer=loaded.fingerprint,
        )  # fmt: skip
    except pa.ArrowInvalid as error:
        raise BadConfig(
            "the tokens of the dataset cannot be shown",
            where=f"{log.store.url}/{beside.name}",
            why=str(error),
            do="give the tokenizer that the dataset was made with",
        ) from None
    for k, row in enumerate(rows):
        spans = tokens.spans
        if spans is not None:
            row["shown"] = coloured(
                loaded, tokens.values[tokens.at[k] : tokens.at[k + 1]].tolist(),
                spans.values[spans.at[k] : spans.at[k + 1]].tolist(), row["turns"], colours=colours,
            )  # fmt: skip
    return rows
