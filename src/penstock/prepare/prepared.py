"""What a piece has become, and how it travels from a worker to the committer.

In:    a piece after all steps
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

from penstock.ingest.formats import Rest
from penstock.records import Int64s


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
    doc_id: npt.NDArray[np.uint64]
    reason: npt.NDArray[np.int32]
    """Why an event has no rows: reasons[code - 1]; 0 for those that stay."""
    reasons: list[str]
    content: npt.NDArray[np.uint64]
    """What each event was when it was read: see `task.contents`."""
    rejects: list[bytes]
    """A line of JSON for each event that goes."""
    signatures: bytes
    """Of the documents that stay, for dedup; empty without it."""
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
    at = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(text) for text in encoded], out=at[1:])
    return pa.StringArray.from_buffers(
        len(encoded), pa.py_buffer(at), pa.py_buffer(b"".join(encoded))
    )


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
    parts.append(prepared.signatures)
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
        name: np.frombuffer(events.column(name).buffers()[1], kind)[: len(events)]
        for name, kind in (("start", np.int64), ("end", np.int64), ("rows", np.int64),
                           ("doc_id", np.uint64), ("reason", np.int32), ("content", np.uint64))
    }  # fmt: skip
    ends = np.cumsum([0, *about["rejects"]]).tolist()
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
