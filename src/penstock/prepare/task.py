"""What a worker does with a piece: read it, take it through the steps, hand over rows.

In:    a piece of an input
Out:   `Prepared`: the rows of its documents, what became of each, signatures for the committer
Keeps: the answer depends on the piece and the steps alone: not on the worker, nor on other pieces
Never: writes anything
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock import plugins
from penstock.ingest.formats import Read, ReadConfig, read_piece
from penstock.prepare.chunk import ChunkConfig, Chunker, Chunks
from penstock.prepare.conversations import Conversations
from penstock.prepare.decontaminate import Contaminants, contaminated, load_contaminants
from penstock.prepare.dedup import DedupConfig, signatures
from penstock.prepare.filters import FilterConfig, features, judge
from penstock.prepare.languages import detect
from penstock.prepare.rows import Work, texts_of
from penstock.prepare.steps import (
    BatchDedup,
    DataProcessor,
    Decontaminate,
    Process,
    Step,
    steps_from_json,
)
from penstock.prepare.wire import Prepared, Request, pack, pack_request, unpack, unpack_request
from penstock.tokenize.tokenizer import Tokenizer

_LINES: Final = r"(?i)\.(jsonl|ndjson)(\.(gz|zst|bz2|xz))?$"

__all__ = ["PrepareTask", "Step", "open_task", "pack", "pack_request", "unpack", "unpack_request"]


def open_task(setup: dict[str, Any]) -> "PrepareTask":
    """For `work.pool`: the task from its setup, which is JSON where it came from elsewhere."""
    setup = dict(setup)
    plugins.load(setup.pop("plugins"))
    if isinstance(setup["read"], dict):
        setup["read"] = ReadConfig.from_json(setup["read"])
        setup["steps"] = steps_from_json(setup["steps"])
    if isinstance(setup["tokenizer"], str | dict):
        setup["tokenizer"] = Tokenizer.load(setup["tokenizer"], parallel=False)
    return PrepareTask(**setup)


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
        is_plain: bool = False,
        by_lines: Sequence[str] = (),
    ) -> None:
        """`is_plain` leaves out the columns that say how a document was cut; `by_lines` are the
        languages that are cut without their grammars."""
        self._steps = steps
        self._keep_tokens, self._keep_rows, self._is_plain = keep_tokens, keep_rows, is_plain
        self._read = read
        self._inputs = inputs
        self._by_lines = frozenset(by_lines)
        self._tokenizer = tokenizer
        self._processors: dict[str, DataProcessor] = {}
        self._contaminants: dict[tuple[str, ...], Contaminants] = {}
        self._chunker: Chunker | None = None
        self.language = "auto"
        self._conversations = Conversations.among(steps, tokenizer)
        for step in steps:
            if isinstance(step, Process):
                self._processors[step.name] = step.load()
            elif isinstance(step, Decontaminate):
                files = [Path(name) for name in step.files]
                self._contaminants[step.files] = load_contaminants(files, field=step.text_field)
            elif isinstance(step, ChunkConfig):
                assert tokenizer is not None, "chunking counts tokens"
                self._chunker = Chunker(tokenizer, step, by_lines)
                self.language = step.language

    def __call__(self, request: Request) -> Prepared:
        piece = request.piece
        name = self._inputs[piece.input]
        return self.prepare(read_piece(piece, self._read, name), name, request.gone)

    def prepare(self, read: Read, name: str, gone: list[bytes] | None = None) -> Prepared:
        """All steps, on what was read; `gone` are the rejects, where they are known already."""
        work = Work(read, name)
        if not self._is_plain:
            work.documents.language = detect(work.documents, self.language)
        chunks: Chunks | None = None
        if gone is not None:
            work.drop_known(gone)
        for step in self._steps:
            if gone is not None and not isinstance(step, ChunkConfig):
                # who goes is known; what is overwritten in those that stay is found again
                if isinstance(step, FilterConfig):
                    work.redact_again(step)
                continue
            if isinstance(step, Process):
                new = step.answer(self._processors[step.name], work.as_batch())
                work.replace(new, step.name)
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
                work.signatures = signatures(work.documents, step)
            elif isinstance(step, BatchDedup):
                assert gone is not None, "batch dedup is decided in a pass before"
            elif self._conversations is not None:
                return self._rendered(work, self._conversations)
            elif self._chunker is not None:
                with work.located():
                    chunks = self._chunker.chunk(work.documents)
        tokens = None if chunks is None else chunks.tokens
        if tokens is None and self._tokenizer is not None:
            with work.located():
                tokens = self._tokenizer.encode_column(texts_of(work.documents)).combine_chunks()
        ids = work.ids()
        rows = work.rows(chunks, ids, is_plain=self._is_plain)
        if tokens is not None:
            rows = _with_tokens(rows, tokens, keep=self._keep_tokens)
        document = None if chunks is None else chunks.document
        made = work.finish(rows if self._keep_rows else rows.slice(0, 0), document, ids)
        if self._by_lines and "language" in rows.schema.names:
            met = self._by_lines.intersection(rows.column("language").unique().to_pylist())
            made.by_lines = sorted(met)
        if not self._is_plain:
            source = rows.column("source")
            whole = source.filter(pc.match_substring_regex(source, _LINES))
            made.whole_lines = whole[0].as_py() if len(whole) else ""
        return made

    def _rendered(self, work: Work, conversations: Conversations) -> Prepared:
        """Conversations as samples, and those that are none as rejects."""
        with work.located():
            samples = conversations.render(work.documents)
        work.refuse(samples.refused, conversations.skipped)
        gone = np.zeros(len(work.documents) + len(samples.refused), np.int64)
        gone[list(samples.refused)] = 1
        samples.document -= np.cumsum(gone)[samples.document]
        ids = work.ids()
        return work.finish(work.sample_rows(samples, ids), samples.document, ids)


def _with_tokens(rows: pa.RecordBatch, tokens: pa.ListArray, *, keep: bool) -> pa.RecordBatch:
    """Rows with the counts of their tokens, and the tokens too where they are kept."""
    rows = rows.set_column(rows.schema.names.index("n_tokens"), "n_tokens", tokens.value_lengths())
    return rows.append_column("tokens", tokens) if keep else rows
