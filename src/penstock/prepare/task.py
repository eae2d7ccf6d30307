"""What a worker does with a piece: read it, take it through the steps, hand over rows.

In:    a piece of an input
Out:   `Prepared`: the rows of its documents, what became of each, signatures for the committer
Keeps: the answer depends on the piece and the steps alone: not on the worker, nor on other pieces
Never: writes anything
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock import plugins
from penstock.errors import BadConfig, BadDocument
from penstock.ingest.decode import raw_offsets
from penstock.ingest.formats import Piece, Read, ReadConfig, read_piece
from penstock.kernels import PAD, Kernel, byte_buffer
from penstock.prepare.chunk import ChunkConfig, Chunker, Chunks, level_names
from penstock.prepare.decontaminate import Contaminants, contaminated, load_contaminants
from penstock.prepare.dedup import DedupConfig, signatures
from penstock.prepare.filters import FilterConfig, features, judge
from penstock.prepare.languages import detect
from penstock.prepare.prepared import Prepared, numbers, pack, strings, unpack
from penstock.prepare.secrets import KINDS, PII, SECRETS, Found, find, redact
from penstock.prepare.steps import (
    BatchDedup,
    DataProcessor,
    Decontaminate,
    Process,
    Step,
    steps_from_json,
)
from penstock.records import DECODINGS, LANGUAGES, Bytes, Documents, Int64s
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["TASK", "PrepareTask", "Prepared", "open_task", "pack", "unpack"]

TASK: Final = "penstock.prepare.task:open_task"
_SAMPLE_BYTES = 200
_MAX_TEXT_BYTES: Final = (1 << 31) - (1 << 20)
"""Of a piece: Arrow's offsets are 32 bits."""
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


def open_task(setup: dict[str, Any]) -> "PrepareTask":
    """For `work.pool`: the task from its setup."""
    plugins.load(setup["plugins"])
    tokenizer = setup["tokenizer"]
    if isinstance(tokenizer, str):
        tokenizer = Tokenizer.load(tokenizer, parallel=setup["parallel"])
    return PrepareTask(
        steps_from_json(setup["steps"]),
        ReadConfig.from_json(setup["read"]),
        setup["inputs"],
        tokenizer,
        keep_tokens=setup["tokens"],
        keep_rows=setup.get("rows", True),
    )


class PrepareTask:
    """Takes pieces through the steps."""

    def __init__(
        self,
        steps: Sequence[Step],
        read: ReadConfig,
        inputs: Sequence[str],
        tokenizer: Tokenizer | None,
        *,
        keep_tokens: bool = False,
        keep_rows: bool = True,
    ) -> None:
        self._steps = steps
        self._keep_tokens, self._keep_rows = keep_tokens, keep_rows
        self._read = read
        self._inputs = inputs
        self._processors: dict[str, DataProcessor] = {}
        self._contaminants: dict[tuple[str, ...], Contaminants] = {}
        self._chunker: Chunker | None = None
        self.language = "auto"
        for step in steps:
            if isinstance(step, Process):
                self._processors[step.name] = step.load()
            elif isinstance(step, Decontaminate):
                files = [Path(name) for name in step.files]
                items = load_contaminants(files, field=step.text_field)
                if items.too_short == len(items):
                    raise BadConfig(
                        "no item of the benchmark can be found in a document",
                        where=", ".join(step.files),
                        why=f"{len(items):,} items, none of 13 words and marks or more",
                        do="give items as JSON lines, or one to a line",
                    )
                self._contaminants[step.files] = items
            elif isinstance(step, ChunkConfig):
                assert tokenizer is not None, "chunking counts tokens"
                self._chunker = Chunker(tokenizer, step)
                self.language = step.language

    def __call__(self, header: bytes, data: bytes) -> Prepared:
        about, known, lines = header.partition(b"\n")
        piece = Piece.attach(about, data)
        name = self._inputs[piece.input]
        read = read_piece(piece, self._read, name)
        return self.prepare(read, name, lines.splitlines(keepends=True) if known else None)

    def prepare(self, read: Read, name: str, gone: list[bytes] | None = None) -> Prepared:
        """All steps, on what was read; `gone` are the rejects, where they are known already."""
        work = _Work(read, name)
        work.documents.language = detect(work.documents, self.language)
        chunks: Chunks | None = None
        if gone is not None:
            work.drop_known(gone)
        for step in self._steps:
            if gone is not None and isinstance(step, FilterConfig):
                # who goes is known; what is overwritten in those that stay is found again
                wanted = {"secrets": step.secrets == "redact", "pii": step.pii == "redact"}
                if any(wanted.values()):
                    work.redact(find(work.documents, **wanted), step)
                continue
            if gone is not None and not isinstance(step, ChunkConfig):
                continue
            if isinstance(step, Process):
                self._process(work, step)
            elif isinstance(step, FilterConfig):
                measured = features(work.documents, step)
                verdicts = judge(measured, step, work.documents)
                work.note_features(measured, verdicts)
                work.redact(measured.found, step)
                work.drop(verdicts.codes, verdicts.reasons)
            elif isinstance(step, Decontaminate):
                items = self._contaminants[step.files]
                found = contaminated(work.documents, items, DedupConfig())
                work.drop(found.flags.astype(np.int32), ("contaminated",))
            elif isinstance(step, DedupConfig):
                work.signatures = signatures(work.documents, step).to_bytes()
            elif isinstance(step, BatchDedup):
                assert gone is not None, "batch dedup is decided in a pass before"
            elif self._chunker is not None:
                try:
                    chunks = self._chunker.chunk(work.documents)
                except BadDocument as error:
                    error.where = work.place(error.row) if error.row >= 0 else name
                    raise
        prepared = work.finish(chunks, keep_tokens=self._keep_tokens)
        return prepared if self._keep_rows else replace(prepared, rows=prepared.rows.slice(0, 0))

    def _process(self, work: "_Work", step: Process) -> None:
        documents = work.documents
        batch = pa.RecordBatch.from_arrays(
            [
                texts_of(documents),
                strings(work.sources()),
                strings(LANGUAGES).take(_uint8(documents.language)),
            ],
            names=["text", "source", "language"],
        )
        new = self._processors[step.name].process(batch)
        if isinstance(new, pa.ChunkedArray):
            new = new.combine_chunks()
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_null)
        if not isinstance(new, pa.Array) or not any(is_kind(new.type) for is_kind in kinds):
            raise BadConfig(
                f"processor {step.name} did not answer with texts",
                why=f"it gave {getattr(new, 'type', type(new).__name__)}",
                do="return an Arrow array of strings, one for each row: null drops it",
            )
        if len(new) != len(documents):
            raise BadConfig(
                f"processor {step.name} did not answer for each document",
                why=f"it gave {len(new):,} texts for {len(documents):,} documents",
                do="return one text for each row: null drops it",
            )
        work.replace(new.cast(pa.large_string()), step.name)


class _Work:
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
        self._features: list[pa.RecordBatch] = []
        self._hashes = hash_texts(read.documents)
        self._is_changed = False
        self._content = contents(read, self._hashes)
        self.signatures = b""

    def sources(self) -> list[str]:
        documents = self.documents
        if documents.sources is not None:
            return [source or self._name for source in documents.sources]
        if documents.places is not None:
            return [self._name] * len(documents)
        return [
            f"{self._name}#{start}-{end}"
            for start, end in zip(documents.start.tolist(), documents.end.tolist(), strict=True)
        ]

    def place(self, row: int) -> str:
        """Where a document is, for messages."""
        documents = self.documents
        source = self.sources()[row]
        if documents.places is None:
            return source
        return f"{source}, bytes {documents.start[row]} to {documents.end[row]}"

    def drop(self, codes: npt.NDArray[np.int32], reasons: Sequence[str]) -> None:
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
            self._rejects[number] = reject_line(
                self._name, int(documents.start[k]), int(documents.end[k]), reason, sources[k],
                head.tobytes().decode("utf-8", "ignore"),
            )  # fmt: skip
        kept = np.flatnonzero(codes == 0)
        self._alive = self._alive[kept]
        self.documents = take_documents(documents, kept)

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
        data, at = text_buffers(texts.fill_null(""))
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
        lost = np.frombuffer(gone.cast(pa.uint8()).buffers()[1], np.uint8)[: len(documents)]
        self.drop(np.where((lost != 0) | empty, 1, 0).astype(np.int32), (name,))

    def note_features(self, measured: Any, verdicts: Any) -> None:
        """Keep what was measured, with what came of it."""
        documents = self.documents
        names = [str(name) for name in measured.names]
        columns = [
            numbers(documents.start), numbers(documents.end),
            strings(["", *verdicts.reasons]).take(numbers(verdicts.codes)),
            *(numbers(np.ascontiguousarray(measured[name])) for name in names),
        ]  # fmt: skip
        self._features.append(
            pa.RecordBatch.from_arrays(columns, names=["start", "end", "reason", *names])
        )

    def finish(self, chunks: Chunks | None, *, keep_tokens: bool) -> Prepared:
        read, count = self._read, len(self._codes)
        event_rows = np.zeros(count, np.int64)
        doc_id = np.zeros(count, np.uint64)
        ids = hash_texts(self.documents) if self._is_changed else self._hashes[self._alive]
        if (places := self.documents.places) is not None:
            ids[places.told] = places.doc_id[places.told]
        doc_id[self._alive] = ids
        rows = self._rows(chunks, ids, keep_tokens)
        if chunks is None:
            event_rows[self._alive] = 1
        else:
            event_rows[self._alive] = np.bincount(chunks.document, minlength=len(self.documents))
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
        return Prepared(
            rows=rows,
            start=start,
            end=end.astype(np.int64),
            event_rows=event_rows,
            doc_id=doc_id,
            reason=codes.astype(np.int32),
            reasons=self._reasons,
            content=self._content,
            rejects=ranked,
            signatures=self.signatures,
            features=self._features[-1] if self._features else None,
            blank_at=np.array(read.blank_at, np.int64),
            refused=dict(Counter(refusal.reason for refusal in read.refusals)),
            redacted=int(np.isin(self._alive, self._redacted).sum()),
            rest=read.rest,
        )

    def _rows(
        self, chunks: Chunks | None, ids: npt.NDArray[np.uint64], keep_tokens: bool
    ) -> pa.RecordBatch:
        """The rows of what is left, as a shard has them, and their tokens."""
        documents = self.documents
        count = len(documents)
        if chunks is None:
            document, starts, ends = np.arange(count), documents.at[:-1], documents.at[1:]
        else:
            document, starts, ends = chunks.document, chunks.start, chunks.end
        picks = numbers(document)
        first, last = self._places(document, starts, ends)
        offsets = np.append(starts, documents.at[-1:] if count else [0]).astype(np.int32)
        total = len(document)
        ones, zeros = np.ones(total, np.int32), np.zeros(total, np.int32)
        part, parts = (zeros, ones) if chunks is None else (chunks.part, chunks.parts)
        if documents.places is not None:
            part = np.where(parts == 1, documents.places.part[document], part)
            parts = np.where(parts == 1, documents.places.parts[document], parts)
        columns = {
            "text": pa.StringArray.from_buffers(
                total, pa.py_buffer(offsets), pa.py_buffer(documents.data)
            ),
            "n_tokens": pa.nulls(total, pa.int32()),
            "source": strings(self.sources()).take(picks),
            "start": numbers(first),
            "end": numbers(last),
            "part": numbers(part),
            "parts": numbers(parts),
            "doc_id": numbers(ids[document]),
            "language": strings(LANGUAGES).take(_uint8(documents.language[document])),
            "decoding": strings(DECODINGS).take(_uint8(documents.decoding[document])),
            "line": numbers(ones),
            "level": strings(["file"]).take(numbers(zeros)),
            "scope": strings([""]).take(numbers(zeros)),
            "symbols": pa.ListArray.from_buffers(
                pa.list_(pa.string()), total, [None, pa.py_buffer(np.zeros(total + 1, np.int32))],
                children=[strings([])],
            ),
        }  # fmt: skip
        if chunks is not None:
            columns |= {
                "n_tokens": chunks.tokens.value_lengths(),
                "line": numbers(chunks.line),
                "level": level_names(chunks.level),
                "scope": chunks.scope,
                "symbols": chunks.symbols,
            }
            if keep_tokens:
                columns["tokens"] = chunks.tokens
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


def request(piece: Piece, gone: list[bytes] | None = None) -> bytes:
    """A piece's header as the task takes it: with its rejects, where they are known."""
    return piece.header() + (b"" if gone is None else b"\n" + b"".join(gone))


def reject_line(
    name: str, start: int, end: int, reason: str, source: str, sample: str, at: int | None = None
) -> bytes:
    """What the rejects say of a document."""
    about = {"input": name, "start": start, "end": end, "reason": reason,
             "at": start if at is None else at, "sample": sample}  # fmt: skip
    if source:
        about["source"] = source
    return json.dumps(about, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def hash_texts(documents: Documents) -> npt.NDArray[np.uint64]:
    """XXH64 of each text."""
    hashes = np.empty(len(documents), np.uint64)
    _hash_rows(documents.data, documents.at, hashes)
    return hashes


def contents(read: Read, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash of what was read as each document, then as each refusal, and where.

    They are added up, modulo 2^64: the sum proves an input up to any document, however it was cut
    into pieces and shards, and a run that goes on adds to it.
    """
    documents = read.documents
    found = _mixed(hashes, documents.start, documents.end)
    if documents.sources is not None:
        encoded = [source.encode("utf-8", "surrogateescape") for source in documents.sources]
        named = replace(
            documents,
            data=np.frombuffer(b"".join([*encoded, bytes(PAD)]), np.uint8),
            at=np.cumsum([0, *map(len, encoded)]),
        )
        # "" is the input itself: it must add nothing, or the sum would depend on the piece
        found += np.where(np.diff(named.at) > 0, hash_texts(named), np.uint64(0))
    if (places := documents.places) is not None:
        own = places.told
        found[own] = _mixed(found[own], places.start[own], places.end[own])
    told = [f"{r.reason} {r.at} {r.source} {r.sample}" for r in read.refusals]
    refused = [xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) for text in told]
    starts = np.array([refusal.start for refusal in read.refusals], np.int64)
    ends = np.array([refusal.end for refusal in read.refusals], np.int64)
    return np.concatenate([found, _mixed(np.array(refused, np.uint64), starts, ends)])


def _mixed(hashes: npt.NDArray[np.uint64], start: Int64s, end: Int64s) -> npt.NDArray[np.uint64]:
    """Hashes that differ for the same text elsewhere, as those of splitmix64 do."""
    found: npt.NDArray[np.uint64] = hashes ^ (
        start.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    )
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found += end.astype(np.uint64)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    return found


def take_documents(documents: Documents, rows: Int64s) -> Documents:
    """Some of the documents, in a buffer of their own."""
    at = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(documents.at[rows + 1] - documents.at[rows], out=at[1:])
    data = byte_buffer(int(at[-1]))
    _copy_rows(documents.data, documents.at, rows, data, at)
    sources = documents.sources
    return Documents(
        data=data,
        at=at,
        start=documents.start[rows],
        end=documents.end[rows],
        sources=None if sources is None else [sources[k] for k in rows.tolist()],
        language=documents.language[rows],
        decoding=documents.decoding[rows],
        places=None if documents.places is None else documents.places.take(rows),
    )


def texts_of(documents: Documents) -> pa.StringArray:
    """The texts as a column, without a copy."""
    at = documents.at.astype(np.int32)
    return pa.StringArray.from_buffers(
        len(documents), pa.py_buffer(at), pa.py_buffer(documents.data)
    )


def text_buffers(texts: pa.Array) -> tuple[Bytes, Int64s]:
    """The bytes of a column of texts and where each begins."""
    texts = texts.cast(pa.large_string())
    _, offsets, values = texts.buffers()
    at = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(values, np.uint8) if values is not None else np.zeros(0, np.uint8)
    return data[int(at[0]) : int(at[-1])], at - at[0]


def padded(data: Bytes) -> Bytes:
    larger = byte_buffer(len(data))
    larger[: len(data)] = data
    return larger


def _uint8(values: Bytes) -> pa.Array:
    return numbers(np.ascontiguousarray(values))
