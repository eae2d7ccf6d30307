"""What a worker is asked for and what a piece has become, and how both travel.

In:    a piece to be prepared; a piece after all steps
Out:   buffers, and the same from them
Keeps: columns where they lie: nothing is copied on the way in
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

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


@dataclass(slots=True)
class Prepared:
    """A piece after all steps.

    An event is a document or a refusal, in the order of the input; rows are those of the documents
    that stay, in the same order.
    """

    rows: pa.RecordBatch
    start: Int64s
    end: Int64s
    event_rows: Int64s
    """Rows of each event."""
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
    header = request.piece.header()
    if request.gone is not None:
        header += b"\n" + b"".join(request.gone)
    return header, request.piece.data


def unpack_request(header: bytes, data: bytes) -> Request:
    """What `pack_request` packed."""
    about, known, lines = header.partition(b"\n")
    gone = lines.splitlines(keepends=True) if known else None
    return Request(Piece.attach(about, data), gone)


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
        ],
        names=["start", "end", "rows", "doc_id", "reason", "content"],
    )  # fmt: skip
    parts: list[Any] = [_stream(prepared.rows), _stream(events)]
    parts.append(_stream(prepared.features) if prepared.features is not None else b"")
    parts.append(signature_bytes(prepared))
    about = {
        "reasons": prepared.reasons,
        "refused": prepared.refused,
        "redacted": prepared.redacted,
        "rejects": [len(line) for line in prepared.rejects],
        "rest": None if prepared.rest is None else astuple(prepared.rest),
    }
    parts += [json.dumps(about).encode(), b"".join(prepared.rejects), prepared.blank_at.tobytes()]
    # Arrow reads aligned buffers in place
    head = np.array([memoryview(part).nbytes for part in parts], np.int64).tobytes()
    aligned: list[Any] = [head, bytes(-len(head) % 64)]
    for part in parts:
        aligned += [part, bytes(-memoryview(part).nbytes % 64)]
    return aligned


def unpack(payload: Any) -> Prepared:
    """What `pack` packed; its columns lie in `payload`."""
    view = memoryview(payload)
    sizes = np.frombuffer(view[:56], np.int64).tolist()
    at, parts = 64, []
    for size in sizes:
        parts.append(view[at : at + size])
        at += size + -size % 64
    about = json.loads(bytes(parts[4]))
    events = pa.ipc.open_stream(pa.py_buffer(parts[1])).read_next_batch()
    columns: dict[str, Any] = {
        name: values_of(events.column(name), kind)
        for name, kind in (("start", np.int64), ("end", np.int64), ("rows", np.int64),
                           ("doc_id", np.uint64), ("reason", np.int32), ("content", np.uint64))
    }  # fmt: skip
    ends = offsets_of(about["rejects"]).tolist()
    lines = bytes(parts[5])
    features = None
    if len(parts[2]):
        features = pa.ipc.open_stream(pa.py_buffer(parts[2])).read_next_batch()
    return Prepared(
        rows=pa.ipc.open_stream(pa.py_buffer(parts[0])).read_next_batch(),
        start=columns["start"],
        end=columns["end"],
        event_rows=columns["rows"],
        doc_id=columns["doc_id"],
        reason=columns["reason"],
        reasons=about["reasons"],
        content=columns["content"],
        rejects=[lines[a:b] for a, b in itertools.pairwise(ends)],
        signatures=bytes(parts[3]),
        features=features,
        blank_at=np.frombuffer(parts[6], np.int64),
        refused=about["refused"],
        redacted=about["redacted"],
        rest=None if about["rest"] is None else Rest(*about["rest"]),
    )


def _stream(batch: pa.RecordBatch) -> Any:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
