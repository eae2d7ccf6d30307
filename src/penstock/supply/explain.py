"""Say what was in a batch: for every range of tokens its document, its file and bytes, and why.

In:    a batch, the sources that it came from
Out:   `Span` after span
Never: reads text; a document's tokens are decoded only to count their bytes
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from penstock.ingest.files import COMPRESSED
from penstock.supply.batch import TrainingBatch
from penstock.supply.shards import ShardSource
from penstock.supply.texts import as_text
from penstock.tokenize.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A range of tokens of one row that comes from one document."""

    row: int
    first: int
    last: int
    """Places in the row, the last not included."""
    source: str
    epoch: int
    """Which pass over the source; below 0 for shards that were repeated because none was new."""
    shard: str
    shard_row: int
    document: dict[str, Any]
    """The columns of the shard but for text and tokens: doc_id, source, start, end, part …"""
    tokens: tuple[int, int]
    """Which of the document's tokens, those put around it included."""
    text_bytes: tuple[int, int] | None
    """Which bytes of the document's text."""
    file_bytes: tuple[int, int] | None
    """Which bytes of the file, where the text is the file's own bytes: None for what was
    decompressed or taken out of an archive, a line or a row."""
    kept: str
    """The steps that the document passed."""

    @property
    def trained(self) -> int:
        """Tokens of the range whose labels count: all but the first, which has no context."""
        return self.last - self.first - 1

    def __str__(self) -> str:
        where = self.document.get("source", self.shard)
        if self.file_bytes:
            places = f"bytes {self.file_bytes[0]}-{self.file_bytes[1]}"
        elif "start" in self.document:
            places = f"bytes {self.document['start']}-{self.document.get('end')}{_within(where)}"
        else:
            places = "bytes not known"
        return (
            f"row {self.row} [{self.first}:{self.last}]  {where} {places}  "
            f"doc_id {self.document.get('doc_id')}  tokens {self.tokens[0]}-{self.tokens[1]}, "
            f"{self.trained} trained  "
            f"{self.shard} row {self.shard_row}  kept: {self.kept}"
        )


def _within(source: str) -> str:
    """What the places of a document are places of, if it is not the file itself.

    >>> _within("a.cpp"), _within("a.cpp.gz"), _within("a.zip#b.cpp")
    ('', ' decompressed', ' of the document')
    """
    if "#" in source:
        return " of the document"
    return " decompressed" if os.path.splitext(source)[1] in COMPRESSED else ""


def explain_batch(
    batch: TrainingBatch, sources: Sequence[ShardSource], tokenizer: Tokenizer | None, *, lead: int
) -> list[Span]:
    """Where every token of a batch comes from; `lead` tokens stand before each document."""
    spans: list[Span] = []
    tables: dict[tuple[int, int], list[dict[str, Any]]] = {}
    keys = batch.segments[:, (1, 3)].tolist()
    for source, shard in {(a, b) for a, b in keys}:
        tables[source, shard] = _documents(sources[source], shard, batch, source)
    row, at = -1, 0
    for line, source, passed, shard, document, begin, count in batch.segments.tolist():
        row, at = (row, at) if line == row else (line, 0)
        origin = sources[source]
        told = tables[source, shard][document]
        text_bytes = _text_bytes(origin, shard, document, tokenizer, begin - lead, count)
        start, end = told.get("start"), told.get("end")
        whole = told["_bytes"]
        file_bytes = None
        is_own = start is not None and end is not None and not _within(told.get("source") or "")
        if text_bytes and is_own and whole == end - start:
            file_bytes = start + text_bytes[0], start + text_bytes[1]
        spans.append(
            Span(
                row=line, first=at, last=at + count, source=origin.name, epoch=passed,
                shard=os.path.basename(origin.file(shard).name), shard_row=document,
                document={name: value for name, value in told.items() if name != "_bytes"},
                tokens=(begin, begin + count), text_bytes=text_bytes, file_bytes=file_bytes,
                kept=origin.describe(),
            )
        )  # fmt: skip
        at += count
    return spans


def _documents(
    origin: ShardSource, shard: int, batch: TrainingBatch, source: int
) -> list[dict[str, Any]]:
    """The columns of the rows that a batch uses, by their number; others are empty."""
    table, name = origin.provenance(shard), origin.config.text_field
    text = as_text(
        origin.provenance(shard, [name]).column(0), name, origin.place(origin.file(shard))
    )
    sizes = pc.binary_length(text).to_numpy()
    mine = (batch.segments[:, 1] == source) & (batch.segments[:, 3] == shard)
    rows = np.unique(batch.segments[mine, 4])
    found: list[dict[str, Any]] = [{} for _ in sizes]
    # a table of no columns has no rows either
    told = table.take(rows).to_pylist() if table.num_columns else [{} for _ in rows]
    for row, values in zip(rows.tolist(), told, strict=True):
        found[row] = {**values, "_bytes": int(sizes[row])}
    return found


def _text_bytes(
    origin: ShardSource, shard: int, document: int, tokenizer: Tokenizer | None, begin: int,
    count: int,
) -> tuple[int, int] | None:  # fmt: skip
    if tokenizer is None or not tokenizer.is_lossless:
        return None
    decoded = origin.decoded_once(shard)
    ids = decoded.values[decoded.at[document] : decoded.at[document + 1]]
    ends = np.concatenate([[0], np.cumsum(tokenizer.token_bytes(ids))])
    first, last = max(begin, 0), min(max(begin + count, 0), len(ids))
    return int(ends[min(first, len(ids))]), int(ends[last])
