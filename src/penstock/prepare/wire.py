"""What a worker is asked for and what a piece has become, and how both travel.

In:    a piece to be prepared; a piece after all steps
Out:   buffers, and the same from them
Keeps: columns where they lie: nothing is copied on the way in
Never: sends rows that are kept elsewhere: they are told by what was made of each document
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import astuple

from penstock.arrays import Int32s, Int64s, UInt64s, end_to_end, offsets_of, values_of
from penstock.ingest.formats import Piece, Rest
from penstock.prepare.dedup import Signatures


@dataclass(frozen=True, slots=True)
class Request:
    """A piece to be prepared."""

    piece: Piece
    gone: list[bytes] | None = None
    """The rejects of the piece, where they are known beforehand."""
    keep: str = ""
    """Where its rows are to stay: a file, or what the pool says; "" if they are to come back."""


class Kept(Protocol):
    """The rows of a piece that stayed where they were made."""

    def read(self) -> pa.RecordBatch:
        """All of them, here."""


Rows: TypeAlias = pa.RecordBatch | Kept
"""The rows of a piece, wherever they are."""


@dataclass(slots=True)
class Prepared:
    """A piece after all steps.

    An event is a document or a refusal, in the order of the input; rows are those of the documents
    that stay, in the same order.
    """

    rows: Rows | None
    """None where whoever asked knows where they are kept."""
    start: Int64s
    end: Int64s
    event_rows: Int64s
    """Rows of each event."""
    event_bytes: Int64s
    """What those rows count of a shard's `bytes_per_file`."""
    doc_id: UInt64s
    reason: Int32s
    """Why an event has no rows: reasons[code - 1]; 0 for those that stay."""
    reasons: list[str]
    content: UInt64s
    """What each event was when it was read: see `task.contents`."""
    rejects: list[bytes]
    """A line of JSON for each event that goes."""
    signatures: Signatures | bytes
    """Of the documents that stay, for dedup: as bytes from another process, empty without it."""
    sources: pa.StringArray | None
    """Those of the documents that stay, where there are signatures: for rejects."""
    features: pa.RecordBatch | None
    """What was measured of every document, in order, and what came of it."""
    blank_at: Int64s
    """Where what is blank stands: between the events, in the units of the input."""
    refused: dict[str, int] = field(default_factory=dict)
    """Events that are not documents at all, by reason."""
    redacted: int = 0
    """Documents that stay, before dedup, with secrets or personal data overwritten."""
    rest: Rest | None = None
    """What is left of the piece, if it became more than it was planned for."""
    whole_lines: str = ""
    """A document that is a file of JSON lines as it stands, if there is one."""
    by_lines: list[str] = field(default_factory=list)
    """Languages in it that are cut without their grammars."""


def strings(texts: Sequence[str]) -> pa.StringArray:
    """A column of these; `pa.array` would import pandas first."""
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    data, at = end_to_end(encoded)
    return pa.StringArray.from_buffers(
        len(encoded), pa.py_buffer(at.astype(np.int32)), pa.py_buffer(data)
    )


def repeated(text: str, count: int) -> pa.StringArray:
    """A column of one text; given a `str`, `pa.repeat` would import pandas first."""
    return pa.repeat(strings([text])[0], count)


_ARROW: Final = {
    "int32": pa.int32(), "int64": pa.int64(), "uint64": pa.uint64(), "float32": pa.float32(),
    "float64": pa.float64(), "uint8": pa.uint8(),
}  # fmt: skip


def numbers(values: npt.NDArray[Any]) -> pa.Array:
    """A column of these, where they are."""
    kind = _ARROW[values.dtype.name]
    return pa.Array.from_buffers(
        kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )


def pack_request(request: Request) -> tuple[bytes, bytes]:
    """A request as two buffers, for a worker elsewhere: the data of the piece apart."""
    header = request.piece.header() + b"\n" + request.keep.encode()
    if request.gone is not None:
        header += b"\n" + b"".join(request.gone)
    return header, request.piece.data


def unpack_request(header: bytes, data: bytes) -> Request:
    """What `pack_request` packed."""
    about, _, more = header.partition(b"\n")
    keep, known, lines = more.partition(b"\n")
    gone = lines.splitlines(keepends=True) if known else None
    return Request(Piece.attach(about, data), gone, keep.decode())


def reject_line(
    name: str, start: int, end: int, reason: str, source: str, sample: str, at: int | None = None,
    **more: str,
) -> bytes:  # fmt: skip
    """What the rejects say of a document; `more` is told where it is not empty."""
    about = {"input": name, "start": start, "end": end, "reason": reason,
             "at": start if at is None else at, "sample": sample}  # fmt: skip
    if source:
        about["source"] = source
    about |= {key: text for key, text in more.items() if text}
    return json.dumps(about, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def signature_bytes(prepared: Prepared) -> bytes:
    """The signatures as they are stored and sent."""
    found = prepared.signatures
    return found if isinstance(found, bytes) else found.to_bytes()


def pack(prepared: Prepared) -> list[Any]:
    """As buffers, to be sent end to end: how long each is, then each."""
    events = pa.RecordBatch.from_arrays(
        [
            numbers(prepared.start), numbers(prepared.end), numbers(prepared.event_rows),
            numbers(prepared.doc_id), numbers(prepared.reason), numbers(prepared.content),
            numbers(prepared.event_bytes),
        ],
        names=["start", "end", "rows", "doc_id", "reason", "content", "bytes"],
    )  # fmt: skip
    rows = prepared.rows
    parts: list[Any] = [rows_stream(rows) if isinstance(rows, pa.RecordBatch) else b""]
    parts.append(rows_stream(events))
    parts.append(rows_stream(prepared.features) if prepared.features is not None else b"")
    parts.append(signature_bytes(prepared))
    about = {
        "reasons": prepared.reasons,
        "refused": prepared.refused,
        "redacted": prepared.redacted,
        "rejects": [len(line) for line in prepared.rejects],
        "rest": None if prepared.rest is None else astuple(prepared.rest),
        "by_lines": prepared.by_lines,
        "whole_lines": prepared.whole_lines,
    }
    parts += [json.dumps(about).encode(), b"".join(prepared.rejects), prepared.blank_at.tobytes()]
    told = b""
    if prepared.sources is not None:
        told = rows_stream(pa.RecordBatch.from_arrays([prepared.sources], names=["source"]))
    parts.append(told)
    # Arrow reads aligned buffers in place
    head = np.array([memoryview(part).nbytes for part in parts], np.int64).tobytes()
    aligned: list[Any] = [head, bytes(-len(head) % 64)]
    for part in parts:
        aligned += [part, bytes(-memoryview(part).nbytes % 64)]
    return aligned


def unpack(payload: Any) -> Prepared:
    """What `pack` packed; its columns lie in `payload`."""
    view = memoryview(payload)
    sizes = np.frombuffer(view[:64], np.int64).tolist()
    at, parts = 64, []
    for size in sizes:
        parts.append(view[at : at + size])
        at += size + -size % 64
    about = json.loads(bytes(parts[4]))
    events = read_rows(parts[1])
    columns: dict[str, Any] = {
        name: values_of(events.column(name), kind)
        for name, kind in (("start", np.int64), ("end", np.int64), ("rows", np.int64),
                           ("doc_id", np.uint64), ("reason", np.int32), ("content", np.uint64),
                           ("bytes", np.int64))
    }  # fmt: skip
    ends = offsets_of(about["rejects"]).tolist()
    lines = bytes(parts[5])
    return Prepared(
        rows=read_rows(parts[0]) if len(parts[0]) else None,
        start=columns["start"],
        end=columns["end"],
        event_rows=columns["rows"],
        event_bytes=columns["bytes"],
        doc_id=columns["doc_id"],
        reason=columns["reason"],
        reasons=about["reasons"],
        content=columns["content"],
        rejects=[lines[a:b] for a, b in itertools.pairwise(ends)],
        signatures=bytes(parts[3]),
        sources=read_rows(parts[7]).column(0) if len(parts[7]) else None,
        features=read_rows(parts[2]) if len(parts[2]) else None,
        blank_at=np.frombuffer(parts[6], np.int64),
        refused=about["refused"],
        redacted=about["redacted"],
        rest=None if about["rest"] is None else Rest(*about["rest"]),
        by_lines=about["by_lines"],
        whole_lines=about["whole_lines"],
    )


def rows_stream(batch: pa.RecordBatch) -> Any:
    """Rows as a stream of Arrow's."""
    sink = pa.BufferOutputStream()
    write_stream(sink, batch)
    return sink.getvalue()


def write_stream(sink: Any, batch: pa.RecordBatch) -> None:
    """The same, into a file."""
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def read_rows(data: Any) -> pa.RecordBatch:
    """What `rows_stream` made, where it lies."""
    return pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
