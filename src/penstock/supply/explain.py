"""Say what was in a batch: for every range of tokens its document, its file and bytes, and why.

In:    the plan's segments of some rows, the sources that they came from
Out:   `Span` after span
Keeps: what it reads to the row groups and token files of the documents in question, side by side
Never: reads a whole shard; text only where there are no token files, to count its tokens' bytes
"""

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from penstock.arrays import Int32s, Int64s, offsets_of
from penstock.chat.audit import coloured, role_of_tokens
from penstock.ingest.inputs import kind_of
from penstock.ingest.open import COMPRESSED
from penstock.records import DECODINGS
from penstock.supply.sources.dataset import DatasetSource, ShardSource
from penstock.tokenize.tokenizer import Tokenizer

_THREADS: Final = 8


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
    roles: list[str] = dataclasses.field(default_factory=list)
    """Who says each token, where the document is a conversation."""
    loss_spans: list[int] | None = None
    """The trained ranges of a conversation: from, to, from, to …"""
    shown: str = ""
    """A conversation to be read, with what is trained in colour."""

    @property
    def trained(self) -> int:
        """Tokens of the range whose labels count: all but the first, which has no context; those
        of a conversation that are trained."""
        if self.loss_spans is not None:
            return sum(self.loss_spans[1::2]) - sum(self.loss_spans[::2])
        return self.last - self.first - 1

    def __str__(self) -> str:
        where = self.document.get("source", self.shard)
        if self.file_bytes:
            places = f"bytes {self.file_bytes[0]}-{self.file_bytes[1]}"
        elif "start" in self.document:
            places = f"bytes {self.document['start']}-{self.document.get('end')}{_within(where)}"
        else:
            places = "bytes not known"
        if "line" in self.document:
            places = f"line {self.document['line']:,}, {places}"
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


def explain_rows(
    segments: Int32s, sources: Sequence[ShardSource], tokenizer: Tokenizer | None, *, lead: int
) -> list[Span]:
    """Where every token of some rows comes from, by the plan's `segments` of them; `lead` tokens
    stand before each document."""
    wanted: dict[tuple[int, int], dict[int, list[tuple[int, int]]]] = {}
    for _, source, _, shard, document, begin, count in segments.tolist():
        parts = wanted.setdefault((source, shard), {}).setdefault(document, [])
        parts.append((begin - lead, begin - lead + count))

    def look(key: tuple[int, int]) -> dict[int, "_Document"]:
        source, shard = key
        return _documents(sources[source], shard, wanted[key], tokenizer)

    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(wanted, pool.map(look, wanted), strict=True))
    spans: list[Span] = []
    row, at = -1, 0
    for line, source, passed, shard, document, begin, count in segments.tolist():
        row, at = (row, at) if line == row else (line, 0)
        origin, told = sources[source], found[source, shard][document]
        name, at_row = origin.place_of(shard, document)
        text_bytes = told.bytes_of(begin - lead, begin - lead + count)
        spans.append(
            Span(
                row=line, first=at, last=at + count, source=origin.name, epoch=passed,
                shard=os.path.basename(name), shard_row=at_row,
                document=told.columns, tokens=(begin, begin + count), text_bytes=text_bytes,
                file_bytes=told.in_file(text_bytes), kept=origin.describe(),
                **_conversation(origin, shard, document, told.columns, tokenizer),
            )
        )  # fmt: skip
        at += count
    return spans


def _conversation(
    origin: ShardSource, shard: int, document: int, told: dict[str, Any],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:  # fmt: skip
    """What is known of a conversation beside its text."""
    decoded = origin.decode(shard) if origin.chat is not None else None
    if decoded is None or (spans := decoded.spans) is None:
        return {}
    ids = decoded.values[decoded.at[document] : decoded.at[document + 1]].tolist()
    trained = spans.values[spans.at[document] : spans.at[document + 1]].tolist()
    turns = told.get("turns") or []
    shown = "" if tokenizer is None else coloured(tokenizer, ids, trained, turns)
    return {"roles": role_of_tokens(turns, len(ids)), "loss_spans": trained, "shown": shown}


@dataclasses.dataclass(frozen=True, slots=True)
class _Document:
    """What is known of a row of a shard."""

    columns: dict[str, Any]
    ends: Int64s | None = None
    """Where each of its tokens ends in its text, a zero before them, where that was asked for."""
    size: int | None = None
    """Bytes of its text, where that is known."""

    def bytes_of(self, first: int, last: int) -> tuple[int, int] | None:
        """The bytes of its text that some of its tokens are."""
        if self.ends is None:
            return None if self.size is None else (0, self.size)
        most = len(self.ends) - 1
        return int(self.ends[min(max(first, 0), most)]), int(self.ends[min(max(last, 0), most)])

    def in_file(self, text_bytes: tuple[int, int] | None) -> tuple[int, int] | None:
        """The same bytes in its file, where the text is the file's own bytes."""
        start, end = self.columns.get("start"), self.columns.get("end")
        if text_bytes is None or start is None or end is None or self.size != end - start:
            return None
        if _within(self.columns.get("source") or ""):
            return None
        return start + text_bytes[0], start + text_bytes[1]

    def is_whole(self, parts: Sequence[tuple[int, int]]) -> bool:
        """Whether these tokens are all that a file's document has, and its text is not another."""
        tokens, decoding = self.columns.get("n_tokens"), self.columns.get("decoding")
        if tokens is None or decoding != DECODINGS[0]:
            return False
        return all(first <= 0 and last >= tokens for first, last in parts)


def _reads_files(origin: ShardSource) -> bool:
    """Whether documents were files: lines and rows have other bytes than their texts."""
    inputs = origin.log.state.inputs if isinstance(origin, DatasetSource) else ()
    return bool(inputs) and all(kind_of(name)[0] in ("files", "tar", "zip") for name in inputs)


def _documents(
    origin: ShardSource,
    shard: int,
    wanted: dict[int, list[tuple[int, int]]],
    tokenizer: Tokenizer | None,
) -> dict[int, _Document]:
    """The documents in some rows of a shard, and where those of their tokens end that are asked
    for."""
    rows = sorted(wanted)
    columns = origin.provenance(shard, rows=rows)
    # a table of no columns has no rows either
    told = columns.to_pylist() if columns.num_columns else [{} for _ in rows]
    found = {row: _Document(about) for row, about in zip(rows, told, strict=True)}
    if tokenizer is None or not tokenizer.is_lossless or origin.chat is not None:
        return found  # the text of a conversation is its messages, not what its tokens spell
    is_counted = not origin.has_tokens and origin.has_counts and _reads_files(origin)
    for row, one in found.items():
        # most documents stand whole in a row: then no text need be read, 20 ms for a row group
        if is_counted and one.is_whole(wanted[row]):
            size = one.columns["end"] - one.columns["start"]
            found[row] = dataclasses.replace(one, size=size)
    left = [row for row in rows if found[row].size is None]
    for row, ids in zip(left, origin.ids_of(shard, left) if left else [], strict=True):
        ends = offsets_of(tokenizer.token_bytes(ids))
        found[row] = dataclasses.replace(found[row], ends=ends, size=int(ends[-1]))
    return found
