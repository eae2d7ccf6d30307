"""The documents of a piece between two steps, and the rows that they become.

In:    what was read of a piece
Out:   the documents that are left, a reject for each of the others, the rows of a shard
Keeps: what each document was when it was read: it is counted and proven by that
"""

import contextlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.arrays import (
    Bytes,
    Int32s,
    Int64s,
    UInt64s,
    bytes_of,
    end_to_end,
    offsets_of,
    values_of,
)
from penstock.chat.render import Samples
from penstock.errors import BadConfig, BadDocument
from penstock.ingest.decode import raw_offsets
from penstock.ingest.formats import OWN_INPUTS, Read
from penstock.kernels import PAD, Kernel, byte_buffer
from penstock.prepare.chunk import Chunks, level_names
from penstock.prepare.dedup import Signatures
from penstock.prepare.filters import FilterConfig
from penstock.prepare.secrets import KINDS, PII, SECRETS, Found, find, redact
from penstock.prepare.wire import Prepared, numbers, reject_line, repeated, strings
from penstock.records import DECODINGS, LANGUAGES, Documents, Refusal

_SAMPLE_BYTES = 200
_MAX_TEXT_BYTES: Final = (1 << 31) - (1 << 20)
"""Of a piece: Arrow's offsets are 32 bits."""
ROW_BYTES: Final = 64
"""What a row of a plain dataset counts beside its text: offsets, ranges, doc_id."""
_UTF8 = DECODINGS.index("utf-8")
_PROCESSED = DECODINGS.index("processed")

_hash_rows = Kernel(
    "penstock.prepare.chunk_kernel", "hash_rows", "void(uint8[::1], int64[::1], uint64[::1])"
)
_copy_rows = Kernel(
    "penstock.prepare.chunk_kernel",
    "copy_rows",
    "void(uint8[::1], int64[::1], int64[::1], uint8[::1], int64[::1])",
)


class Fault(Protocol):
    """What is wrong with a document: a reason that is counted, the field, what is told of it."""

    @property
    def reason(self) -> str: ...
    @property
    def field(self) -> str: ...
    @property
    def why(self) -> str: ...


class Work:
    """The documents of one piece between two steps."""

    def __init__(self, read: Read, name: str) -> None:
        self._read = read
        self._name = name
        self.documents = read.documents
        count = len(read.documents)
        self._start, self._end = read.documents.start, read.documents.end
        self._alive = np.arange(count)
        self._codes = np.zeros(count, np.int32)
        self._reasons: list[str] = []
        self._rejects: dict[int, bytes] = {}
        self._redacted = np.zeros(0, np.int64)
        self._damaged: Counter[str] = Counter()
        self._features: list[pa.RecordBatch] = []
        places = read.documents.places
        if places is not None and places.source is None:
            self._hashes = places.doc_id  # the parser has hashed the texts
        else:
            self._hashes = hash_texts(read.documents)
        self._is_changed = False
        self._content = contents(read, self._hashes)
        self.signatures: Signatures | None = None

    def sources(self) -> pa.StringArray:
        """The file, member, line or row that each document is."""
        documents = self.documents
        if documents.sources is not None:
            return strings(documents.sources)
        if (places := documents.places) is not None:
            own = repeated(self._name, len(documents))
            if places.source is None:
                return own
            nothing = numbers(np.zeros(len(documents), np.int32))
            is_own = pc.equal(pc.binary_length(places.source), nothing)
            return pc.if_else(is_own, own, places.source)
        return strings(
            [
                f"{self._name}#{start}-{end}"
                for start, end in zip(documents.start.tolist(), documents.end.tolist(), strict=True)
            ]
        )

    def as_batch(self) -> pa.RecordBatch:
        """The documents as columns text, source and language, for a processor."""
        documents = self.documents
        languages = strings(LANGUAGES).take(numbers(documents.language))
        columns = [texts_of(documents), self.sources(), languages]
        return pa.RecordBatch.from_arrays(columns, names=["text", "source", "language"])

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Say of a document that cannot be tokenised where it is."""
        try:
            yield
        except BadDocument as error:
            error.where = self._name
            if error.row >= 0:
                error.where = str(self.sources()[error.row])
                if self.documents.places is not None:
                    start, end = self.documents.start[error.row], self.documents.end[error.row]
                    error.where += f", bytes {start} to {end}"
            raise

    def refuse(self, faults: Mapping[int, Fault], skipped: Collection[str]) -> None:
        """Let go of documents that turned out to be none; what is `skipped` is no damage."""
        reasons = list(dict.fromkeys(fault.reason for fault in faults.values()))
        codes = np.zeros(len(self.documents), np.int32)
        for k, fault in faults.items():
            codes[k] = reasons.index(fault.reason) + 1
            self._damaged[fault.reason] += fault.reason not in skipped
        self.drop(codes, reasons, faults)

    def drop(
        self, codes: Int32s, reasons: Sequence[str], told: Mapping[int, Fault] | None = None
    ) -> None:
        """Let go of the documents whose code is not 0, for reasons[code - 1]."""
        if not codes.any():
            return
        documents, sources = self.documents, self.sources()
        for k in np.flatnonzero(codes).tolist():
            reason = reasons[codes[k] - 1]
            if reason not in self._reasons:
                self._reasons.append(reason)
            number = int(self._alive[k])
            self._codes[number] = self._reasons.index(reason) + 1
            first = int(documents.at[k])
            head = documents.data[first : min(first + _SAMPLE_BYTES, int(documents.at[k + 1]))]
            fault = None if told is None else told[k]
            self._rejects[number] = reject_line(
                self._name, int(documents.start[k]), int(documents.end[k]), reason,
                sources[k].as_py(), head.tobytes().decode("utf-8", "ignore"),
                field="" if fault is None else fault.field, why="" if fault is None else fault.why,
            )  # fmt: skip
        kept = np.flatnonzero(codes == 0)
        self._alive = self._alive[kept]
        self.documents = take_documents(documents, kept)

    def redact_again(self, step: FilterConfig) -> None:
        """Overwrite what a step does in documents of which it is known that they stay."""
        wanted = {"secrets": step.secrets == "redact", "pii": step.pii == "redact"}
        if any(wanted.values()):
            self.redact(find(self.documents, **wanted), step)

    def redact(self, found: Found, step: FilterConfig) -> None:
        """Overwrite the secrets and personal data that were found.

        Also where they are rejected: what a document goes for is not shown in its sample.
        """
        kinds = [KINDS.index(name) for name in SECRETS if step.secrets != "keep"]
        kinds += [KINDS.index(name) for name in PII if step.pii != "keep"]
        wanted = np.isin(found.kind, kinds)
        if wanted.any():
            if not self.documents.data.flags.writeable:
                self.documents = replace(self.documents, data=self.documents.data.copy())
            spans = Found(found.start[wanted], found.end[wanted], found.kind[wanted])
            redact(self.documents, spans)
            self._is_changed = True
            self._redacted = self._alive[spans.per_document(self.documents) > 0]

    def drop_known(self, lines: Sequence[bytes]) -> None:
        """Let go of the documents that these rejects are of."""
        places = {int(start): k for k, start in enumerate(self.documents.start.tolist())}
        codes = np.zeros(len(self.documents), np.int32)
        known: dict[int, bytes] = {}
        for line in lines:
            about = json.loads(line)
            k = places.get(about["start"])
            if k is None:
                continue  # it was refused when it was read, and is again
            if about["reason"] not in self._reasons:
                self._reasons.append(about["reason"])
            codes[k] = self._reasons.index(about["reason"]) + 1
            known[k] = line
        self.drop(codes, list(self._reasons))
        self._rejects |= known

    def replace(self, texts: pa.Array, name: str) -> None:
        """New texts for all documents; a null lets go of one."""
        documents = self.documents
        self._is_changed = True
        gone = texts.is_null()
        data, at = bytes_of(texts.fill_null("").cast(pa.large_string()))
        if len(data) > _MAX_TEXT_BYTES:
            raise BadConfig(
                f"processor {name} made {len(data):,} bytes of {int(documents.at[-1]):,}",
                where=self._name,
                why=f"a piece may become {_MAX_TEXT_BYTES:,} bytes",
                do="let it make less, or give it less at a time with smaller inputs",
            )
        sizes_differ = len(data) != len(documents.data) - PAD
        changed = np.ones(len(documents), bool)
        if not sizes_differ and (at == documents.at).all():
            marks = data != documents.data[: len(data)]
            changed = np.add.reduceat(marks, at[:-1]) > 0 if len(data) else changed[:0]
        decoding = documents.decoding.copy()
        decoding[changed] = _PROCESSED
        self.documents = Documents(
            data=padded(data), at=at, start=documents.start, end=documents.end,
            sources=documents.sources, language=documents.language, decoding=decoding,
            places=documents.places,
        )  # fmt: skip
        empty = np.diff(at) == 0
        lost = values_of(gone.cast(pa.uint8()), np.uint8)
        self.drop(np.where((lost != 0) | empty, 1, 0).astype(np.int32), (name,))

    def note_features(self, measured: Any, verdicts: Any) -> None:
        """Keep what was measured, with what came of it."""
        documents = self.documents
        names = list(measured.columns)
        columns = [
            numbers(documents.start), numbers(documents.end),
            strings(["", *verdicts.reasons]).take(numbers(verdicts.codes)),
            *(numbers(np.ascontiguousarray(column)) for column in measured.columns.values()),
        ]  # fmt: skip
        self._features.append(
            pa.RecordBatch.from_arrays(columns, names=["start", "end", "reason", *names])
        )

    def ids(self) -> UInt64s:
        """The doc_id of each document that is left."""
        ids = hash_texts(self.documents) if self._is_changed else self._hashes[self._alive]
        if (places := self.documents.places) is not None:
            ids[places.told] = places.doc_id[places.told]
        return ids

    def finish(self, rows: pa.RecordBatch, document: Int64s | None, ids: UInt64s) -> Prepared:
        """What became of the piece; `document` is that of each row, where they are not the rows."""
        read, count = self._read, len(self._codes)
        event_rows = np.zeros(count, np.int64)
        doc_id = np.zeros(count, np.uint64)
        doc_id[self._alive] = ids
        if document is None:
            event_rows[self._alive] = 1
        else:
            event_rows[self._alive] = np.bincount(document, minlength=len(self.documents))
        start, end, codes = self._start, self._end, self._codes
        rejects = self._rejects
        if read.refusals:
            for refusal in read.refusals:
                if refusal.reason not in self._reasons:
                    self._reasons.append(refusal.reason)
            new = np.array([refusal.start for refusal in read.refusals], np.int64)
            order = np.argsort(np.concatenate([start, new]), kind="stable")
            blanks = np.zeros(len(new), np.int64)
            start = np.concatenate([start, new])[order]
            end = np.concatenate([end, [refusal.end for refusal in read.refusals]])[order]
            event_rows = np.concatenate([event_rows, blanks])[order]
            doc_id = np.concatenate([doc_id, blanks.astype(np.uint64)])[order]
            self._content = self._content[order]
            extra = [self._reasons.index(refusal.reason) + 1 for refusal in read.refusals]
            codes = np.concatenate([codes, np.array(extra, np.int32)])[order]
            lines = {
                count + k: reject_line(
                    self._name, r.start, r.end, r.reason, r.source, r.sample, at=r.at
                )
                for k, r in enumerate(read.refusals)
            }
            rejects = {**rejects, **lines}
            ranked = [rejects[k] for k in order.tolist() if k in rejects]
        else:
            ranked = [rejects[k] for k in sorted(rejects)]
        event_bytes, sources = np.zeros(len(event_rows), np.int64), None
        if len(rows):
            rows_at = offsets_of(event_rows)
            event_bytes = np.diff(offsets_of(values_of(rows.column("size"), np.int32))[rows_at])
            if self.signatures is not None:
                firsts = np.minimum(rows_at[:-1][codes == 0], len(rows) - 1)
                sources = rows.column("source").take(numbers(firsts))
        return Prepared(
            rows=rows,
            start=start,
            end=end.astype(np.int64),
            event_rows=event_rows,
            event_bytes=event_bytes,
            doc_id=doc_id,
            reason=codes.astype(np.int32),
            reasons=self._reasons,
            content=self._content,
            rejects=ranked,
            signatures=b"" if self.signatures is None else self.signatures,
            sources=sources,
            features=self._features[-1] if self._features else None,
            blank_at=np.array(read.blank_at, np.int64),
            refused=dict(Counter(refusal.reason for refusal in read.refusals) + self._damaged),
            redacted=int(np.isin(self._alive, self._redacted).sum()),
            rest=read.rest,
        )

    def rows(self, chunks: Chunks | None, ids: UInt64s, *, is_plain: bool) -> pa.RecordBatch:
        """The rows of what is left, as a shard has them.

        Beside those columns there is `size`, what a row counts of a shard's `bytes_per_file`.
        """
        documents, places, sources = self.documents, self.documents.places, self.sources()
        count = len(documents)
        if chunks is None:
            total, starts = count, documents.at[:-1]
            part, parts = np.zeros(count, np.int32), np.ones(count, np.int32)
            if places is not None:
                first, last, part, parts = places.start, places.end, places.part, places.parts
            else:
                first, last = self._places(np.arange(count), starts, documents.at[1:])
        else:
            total, starts, document = len(chunks.document), chunks.start, chunks.document
            part, parts, ids = chunks.part, chunks.parts, ids[document]
            sources = sources.take(numbers(document))
            first, last = self._places(document, starts, chunks.end)
            if places is not None:
                part = np.where(parts == 1, places.part[document], part)
                parts = np.where(parts == 1, places.parts[document], parts)
        offsets = np.append(starts, documents.at[-1:] if count else [0]).astype(np.int32)
        size = np.diff(offsets)
        if is_plain and places is not None:
            size += ROW_BYTES
            if places.source is not None:
                size += values_of(pc.binary_length(places.source), np.int32)
        columns = {
            "text": pa.StringArray.from_buffers(
                total, pa.py_buffer(offsets), pa.py_buffer(documents.data)
            ),
            "n_tokens": pa.nulls(total, pa.int32()),
            "source": sources,
            "start": numbers(first),
            "end": numbers(last),
            "part": numbers(part),
            "parts": numbers(parts),
            "doc_id": numbers(ids),
            "size": numbers(size),
        }
        if is_plain:
            return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        language, decoding = documents.language, documents.decoding
        if chunks is not None:
            language, decoding = language[document], decoding[document]
        none = np.zeros(total + 1, np.int32)
        columns |= {
            "language": strings(LANGUAGES).take(numbers(language)),
            "decoding": strings(DECODINGS).take(numbers(decoding)),
            "line": numbers(np.ones(total, np.int32)),
            "level": level_names(np.zeros(total, np.uint8)),
            "scope": repeated("", total),
            "symbols": pa.ListArray.from_buffers(
                pa.list_(pa.string()), total, [None, pa.py_buffer(none)], children=[strings([])]
            ),
        }
        if chunks is not None:
            columns |= {
                "line": numbers(chunks.line),
                "level": level_names(chunks.level),
                "scope": chunks.scope,
                "symbols": chunks.symbols,
            }
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def sample_rows(self, samples: Samples, ids: UInt64s) -> pa.RecordBatch:
        """The rows of conversations: their messages as JSON, and what was made of them."""
        document, places = samples.document, self.documents.places
        assert places is not None, "conversations are lines"
        data, at = end_to_end([one.as_json() for one in samples.conversations], slack=PAD)
        offsets, sources = at.astype(np.int32), self.sources().take(numbers(document))
        columns = {
            "text": pa.StringArray.from_buffers(
                len(document), pa.py_buffer(offsets), pa.py_buffer(data)
            ),
            "n_tokens": samples.tokens.value_lengths(),
            "source": sources,
            "start": numbers(places.start[document]),
            "end": numbers(places.end[document]),
            "part": numbers(samples.part),
            "parts": numbers(samples.parts),
            "doc_id": numbers(ids[document]),
            "size": numbers(np.diff(offsets) + np.int32(ROW_BYTES)),
            "n_loss": numbers(samples.trained.astype(np.int32)),
            "left_out": numbers(samples.left_out),
            "turns": samples.turns,
            "tokens": samples.tokens,
            "loss_spans": samples.loss_spans,
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _places(self, document: Int64s, starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
        """Where chunks stand in their file: bytes of the file itself, however it was decoded.

        Text of a line stands in it with escapes, so each chunk of a line has the whole line's
        range; where a line says which bytes of a file its text is, each has its own.
        """
        documents = self.documents
        first, last = starts - documents.at[document], ends - documents.at[document]
        if (places := documents.places) is not None:
            exact = places.end - places.start == np.diff(documents.at)
            exact = (exact & (documents.decoding == _UTF8))[document]
            begin = places.start[document]
            return (
                np.where(exact, begin + first, begin),
                np.where(exact, begin + last, places.end[document]),
            )
        coded = (documents.decoding != _UTF8) & (documents.decoding != _PROCESSED)
        for k in np.flatnonzero(coded).tolist():
            rows = np.flatnonzero(document == k)
            text, decoding = documents.text(k), int(documents.decoding[k])
            first[rows] = raw_offsets(text, decoding, first[rows])
            last[rows] = raw_offsets(text, decoding, last[rows])
        return first, last


def hash_texts(documents: Documents) -> UInt64s:
    """XXH64 of each text."""
    hashes = np.empty(len(documents), np.uint64)
    _hash_rows(documents.data, documents.at, hashes)
    return hashes


def contents(read: Read, hashes: UInt64s) -> UInt64s:
    """A hash of what was read as each document, then as each refusal, and where.

    They are added up, modulo 2^64: the sum proves an input up to any document, however it was cut
    into pieces and shards, and a run that goes on adds to it.
    """
    documents = read.documents
    found = _mixed(hashes, documents.start, documents.end)
    places = documents.places
    named = None
    if documents.sources is not None:
        names = [source.encode("utf-8", "surrogateescape") for source in documents.sources]
        data, at = end_to_end(names, slack=PAD)
        named = replace(documents, data=data, at=at)
    elif places is not None and places.source is not None:
        data, at = bytes_of(places.source.cast(pa.large_string()))
        named = replace(documents, data=padded(data), at=at)
    if named is not None:
        # "" is the input itself: it must add nothing, or the sum would depend on the piece
        found += np.where(np.diff(named.at) > 0, hash_texts(named), np.uint64(0))
    if places is not None:
        own = places.told
        found[own] = _mixed(found[own], places.start[own], places.end[own])
    told = [f"{_as_read(r)} {r.at} {r.source} {r.sample}" for r in read.refusals]
    refused = [xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) for text in told]
    starts = np.array([refusal.start for refusal in read.refusals], np.int64)
    ends = np.array([refusal.end for refusal in read.refusals], np.int64)
    return np.concatenate([found, _mixed(np.array(refused, np.uint64), starts, ends)])


def _as_read(refusal: Refusal) -> str:
    """The reason of a refusal as sums have it: archives had none of their own at first, and a
    dataset of that time is of the same text."""
    if refusal.reason not in OWN_INPUTS:
        return refusal.reason
    return "binary" if refusal.sample else "document_too_long"


def _mixed(hashes: UInt64s, start: Int64s, end: Int64s) -> UInt64s:
    """Hashes that differ for the same text elsewhere, as those of splitmix64 do."""
    found: UInt64s = hashes ^ (start.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found += end.astype(np.uint64)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    return found


def take_documents(documents: Documents, rows: Int64s) -> Documents:
    """Some of the documents, in a buffer of their own."""
    at = offsets_of(documents.at[rows + 1] - documents.at[rows])
    data = byte_buffer(int(at[-1]))
    _copy_rows(documents.data, documents.at, rows, data, at)
    sources = documents.sources
    return Documents(
        data=data,
        at=at,
        start=documents.start[rows],
        end=documents.end[rows],
        sources=None if sources is None else [sources[k] for k in rows.tolist()],
        language=documents.language[rows] if len(documents.language) else documents.language,
        decoding=documents.decoding[rows],
        places=None if documents.places is None else documents.places.take(rows),
    )


def texts_of(documents: Documents) -> pa.StringArray:
    """The texts as a column, without a copy."""
    at = documents.at.astype(np.int32)
    return pa.StringArray.from_buffers(
        len(documents), pa.py_buffer(at), pa.py_buffer(documents.data)
    )


def padded(data: Bytes) -> Bytes:
    larger = byte_buffer(len(data))
    larger[: len(data)] = data
    return larger
