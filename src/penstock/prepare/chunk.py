"""Cut documents into chunks under a budget of tokens, where it breaks least.

In:    documents, a tokenizer, a budget
Out:   chunks that tile each document, with their tokens, level, scope and symbols
Keeps: no chunk over the budget, counted exactly; no function that fits the budget cut
Never: makes a Python object for a document or a chunk; drops a byte

Each document is encoded once. A cut between a newline and what follows leaves the tokens on both
sides as they were (the patterns are cut there anyway); chunks with other cuts are encoded again,
and where one turns out too large its document is cut anew with as many tokens less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays import Bytes, Int32s, Int64s, UInt32s, end_to_end, offsets_of
from penstock.errors import BadConfig, BadDocument
from penstock.kernels import Kernel
from penstock.options import check_numbers
from penstock.prepare import chunk_layout as layout
from penstock.prepare.chunk_layout import Candidates, Described, Limits, Rows, Tokens
from penstock.prepare.outline.outline import KIND_NAMES, LEVEL_NAMES, Outline
from penstock.prepare.outline.readers import outline_documents
from penstock.records import Documents
from penstock.tokenize.tokenizer import Tokenizer

LEAST_TOKENS: Final = 16
_ROUNDS: Final = 12
_AGAIN_BYTES: Final = 16 << 20
_CLOSE_TOKENS: Final = 16
"""A function whose count is this near to the budget is counted alone."""

_find_close_calls = Kernel(
    "penstock.prepare.chunk_kernel",
    "find_close_calls",
    "int64(int64[::1], int64[::1], Outline, Tokens, Limits, int64, int32[::1], uint8[::1])",
    *(Outline, Tokens, Limits),
)
_plan_chunks = Kernel(
    "penstock.prepare.chunk_kernel",
    "plan_chunks",
    "int64(uint8[::1], int64[::1], int64[::1], int64, int64[::1], Outline, int32[::1], Tokens,"
    " Limits, Candidates, Rows, int64[::1])",
    *(Outline, Tokens, Limits, Candidates, Rows),
)
_count_lines = Kernel(
    "penstock.prepare.chunk_kernel",
    "count_lines",
    "void(uint8[::1], int64[::1], int64[::1], int32[::1], int32[::1])",
)
_describe_chunks = Kernel(
    "penstock.prepare.chunk_kernel",
    "describe_chunks",
    "void(uint8[::1], int64, Rows, Outline, uint8[::1], int64[::1], int64[::1], Described)",
    *(Rows, Outline, Described),
)
_gather = {
    (pool, kind): Kernel(
        "penstock.prepare.chunk_kernel",
        "gather_tokens",
        f"void({pool}[::1], int64, int64[::1], int64[::1], int64[::1], {kind}[::1], int32[::1])",
    )
    for pool, kind in (("uint32", "uint16"), ("uint32", "uint32"), ("uint16", "uint16"))
}

# how text may be cut without changing tokens, by pattern; see chunk_kernel.is_safe
_FAMILIES: Final = {
    "gpt2": layout.SINGLE_NEWLINE,
    "cl100k": layout.NEWLINES,
    "o200k": layout.NOT_SLASH,
    "qwen2": layout.NEWLINES,
    "nanochat": layout.NEWLINES,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkConfig:
    """How documents become chunks."""

    max_tokens: int = 16_384
    """Tokens of a chunk, special ones included. The trainer's --max_seq_len."""

    reserve_tokens: int = 1
    """Tokens of a chunk that are left for special ones, which the trainer puts around it."""

    language: str = "auto"
    """Language of all documents; "auto" goes by name and content."""

    least_fill: float = 0.9
    """A cut may come earlier than it must for the sake of one that breaks less, but only by what
    is left of this share of the budget."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        if self.reserve_tokens < 0:
            raise BadConfig(f"--reserve_tokens is {self.reserve_tokens}", do="choose 0 or more")
        if not self.reserve_tokens + LEAST_TOKENS <= self.max_tokens <= 1 << 24:
            raise BadConfig(
                f"--max_tokens is {self.max_tokens}",
                do=f"choose from {self.reserve_tokens + LEAST_TOKENS} to {1 << 24:,}",
            )
        if not 0 < self.least_fill <= 1:
            raise BadConfig(f"--least_fill is {self.least_fill}", do="choose from 0 to 1")


@dataclass(slots=True)
class Chunks:
    """Chunks of some documents, in order: chunk k is data[start[k]:end[k]] of `document[k]`."""

    document: Int64s
    start: Int64s
    end: Int64s
    level: Bytes
    """How much the cut at its start breaks; 0 for a document's first."""
    part: Int32s
    parts: Int32s
    line: Int32s
    tokens: pa.ListArray
    scope: pa.StringArray
    symbols: pa.ListArray

    def __len__(self) -> int:
        return len(self.start)


class Chunker:
    """Cuts documents. One for each process: the tokenizer is loaded once."""

    def __init__(
        self, tokenizer: Tokenizer, config: ChunkConfig, by_lines: Sequence[str] = ()
    ) -> None:
        """Languages `by_lines` are cut without their grammars, which are not installed."""
        self.tokenizer = tokenizer
        self._by_lines = by_lines
        self.config = config
        self._budget = config.max_tokens - config.reserve_tokens
        self._family = (
            _FAMILIES.get(tokenizer.pattern_name, layout.ANY)
            if tokenizer.is_lossless
            else layout.ANY
        )

    def chunk(self, documents: Documents) -> Chunks:
        """All chunks of all documents, in order."""
        data, at = documents.data, documents.at
        outline = outline_documents(documents, self._by_lines)
        ids, ends = self.tokenizer.encode_rows(data[at[0] : at[-1]], at - at[0])
        plan = _Plan(self, data, at, outline, ids, ends)
        plan.run()
        return self._describe(data, outline, plan)

    def _describe(self, data: Bytes, outline: Outline, plan: "_Plan") -> Chunks:
        rows = plan.rows
        count = len(rows.start)
        changes = np.flatnonzero(np.diff(rows.document, prepend=-1))
        sizes = np.diff(np.append(changes, count))
        part = (np.arange(count) - np.repeat(changes, sizes)).astype(np.int32)
        parts = np.repeat(sizes, sizes).astype(np.int32)
        line = np.empty(count, np.int32)
        _count_lines(data, rows.start, rows.end, part, line)
        scope, symbols = _scopes(data, outline, rows)
        return Chunks(
            document=rows.document,
            start=rows.start,
            end=rows.end,
            level=rows.level,
            part=part,
            parts=parts,
            line=line,
            tokens=self._tokens(plan),
            scope=scope,
            symbols=symbols,
        )

    def _tokens(self, plan: "_Plan") -> pa.ListArray:
        kind = np.dtype(self.tokenizer.dtype).name
        first, last = plan.rows.first, plan.rows.last
        offsets = offsets_of(last - first).astype(np.int32)
        total = int(offsets[-1])
        values = np.empty(total, kind)
        again = first >= plan.base
        for pool, start, of in ((plan.ids, 0, ~again), (plan.again(), plan.base, again)):
            _gather[pool.dtype.name, kind](
                pool, start, np.flatnonzero(of), first, last, values, offsets
            )
        inner = pa.uint16() if kind == "uint16" else pa.uint32()
        content = pa.Array.from_buffers(inner, total, [None, pa.py_buffer(values)])
        return pa.ListArray.from_buffers(
            pa.list_(inner), len(first), [None, pa.py_buffer(offsets)], children=[content]
        )


class _Plan:
    """The cuts of one batch, on their way to being right."""

    def __init__(
        self,
        chunker: Chunker,
        data: Bytes,
        at: Int64s,
        outline: Outline,
        ids: UInt32s,
        ends: Int64s,
    ) -> None:
        self._tokenizer = chunker.tokenizer
        self._config = chunker.config
        self._family = chunker._family
        self._budget = chunker._budget
        self._limits = Limits(self._budget, round(1024 * self._config.least_fill), self._family)
        self._data, self._at, self._outline = data, at, outline
        self._ends = ends
        self.ids = ids
        self.base = len(ids)
        """Tokens from this number on were counted again."""
        self._again: list[npt.NDArray[Any]] = []
        self._again_size = 0
        counts = np.diff(ends)
        large = np.flatnonzero(counts > self._budget)
        self._large = large
        self._slack = np.zeros(len(counts), np.int64)
        most = int(counts[large].max()) if len(large) else 0
        self._tokens = Tokens(ids[:0], np.zeros(0, np.int32), ends, np.empty(most + 1, np.int32))
        self._node_tokens = np.full(len(outline.node_kind), -1, np.int32)
        cuts = np.diff(outline.cut_first)[large]
        nodes = np.diff(outline.node_first)[large]
        room = int((cuts + 2 * nodes).max()) + 2 if len(large) else 2
        self._candidates = Candidates(
            np.empty(room, np.int64), np.empty(room, np.uint8), np.empty(room, np.int32)
        )
        self.rows = _empty_rows(0)

    def run(self) -> None:
        """Cut everything; count what must be counted again; fix what came out too large."""
        if len(self._large):
            ids, lengths = self._token_lengths()
            self._tokens = self._tokens._replace(ids=ids, lengths=lengths)
            self._count_functions()
        rows = self._cut(np.arange(len(self._at) - 1))
        for attempt in range(_ROUNDS):
            over = self._count_again(rows)
            if not len(over):
                break
            # what was too large is cut anew, with the excess taken from its budget
            documents, where = np.unique(rows.document[over], return_inverse=True)
            excess = np.zeros(len(documents), np.int64)
            np.maximum.at(excess, where, (rows.last - rows.first)[over] - self._budget)
            self._slack[documents] += excess << attempt
            kept = ~np.isin(rows.document, documents)
            rows = _joined(_taken(rows, kept), self._cut(documents))
            rows = _taken(rows, np.lexsort((rows.start, rows.document)))
        else:
            raise AssertionError("chunks that cannot be made small enough")
        self.rows = rows
        # what is not needed any more may be a fifth of a GB each, for one document of 200 MB
        nothing = np.zeros(0, np.int32)
        self._tokens = Tokens(np.zeros(0, np.uint32), nothing, self._ends, nothing)
        if not (rows.first < self.base).any():
            self.ids = np.zeros(0, np.uint32)

    def _token_lengths(self) -> tuple[UInt32s, Int32s]:
        """The kind of each token, and the bytes of each kind.

        For tokenizers that do not say, as if all tokens of a document were alike.
        """
        if self._tokenizer.is_lossless:
            known = self._tokenizer.token_bytes(np.arange(self._tokenizer.vocab_size))
            return self.ids, known.astype(np.int32)
        lengths = np.zeros(len(self.ids), np.int32)
        for k in self._large.tolist():
            first, last = int(self._ends[k]), int(self._ends[k + 1])
            places = np.linspace(0, int(self._at[k + 1] - self._at[k]), last - first + 1)
            lengths[first:last] = np.diff(places.astype(np.int64))
        return np.arange(len(self.ids), dtype=np.uint32), lengths

    def _count_functions(self) -> None:
        """Tokens of each function of the large documents; exactly, where that may decide."""
        outline = self._outline
        close = np.zeros(len(outline.node_kind), np.uint8)
        margin = _CLOSE_TOKENS if self._family else 1 << 30
        found = _find_close_calls(
            self._at, self._large, outline, self._tokens, self._limits, margin, self._node_tokens,
            close,
        )  # fmt: skip
        if found:
            nodes = np.flatnonzero(close)
            _, ends = self._encode(outline.node_start[nodes], outline.node_end[nodes])
            self._node_tokens[nodes] = np.diff(ends)

    def _cut(self, documents: Int64s) -> Rows:
        counts = np.diff(self._ends)[documents]
        room = len(documents) + int(3 * counts.sum() // self._budget) + 16
        state = np.zeros(layout.STATE, np.int64)
        done = 0
        rows = _empty_rows(room)
        while True:
            done = _plan_chunks(
                self._data, self._at, documents, done, self._slack, self._outline,
                self._node_tokens, self._tokens, self._limits, self._candidates, rows, state,
            )  # fmt: skip
            if done == len(documents):
                return _taken(rows, slice(int(state[layout.CHUNKS])))
            rows = _joined(rows, _empty_rows(len(rows.start)))
            state[layout.FULL] = 0

    def _count_again(self, rows: Rows) -> Int64s:
        """Encode the chunks whose tokens are not those of their document; which are too large."""
        unsure = np.flatnonzero(rows.exact == 0)
        if not len(unsure):
            return unsure
        sizes = np.cumsum(rows.end[unsure] - rows.start[unsure])
        over = []
        # some at a time, and in the narrow type: of a document of 200 MB in one line all are unsure
        for part in np.split(unsure, np.flatnonzero(np.diff(sizes // _AGAIN_BYTES)) + 1):
            ids, ends = self._encode(rows.start[part], rows.end[part])
            base = self.base + self._again_size
            self._again.append(ids.astype(self._tokenizer.dtype))
            self._again_size += len(ids)
            rows.first[part] = base + ends[:-1]
            rows.last[part] = base + ends[1:]
            large = np.diff(ends) > self._budget
            rows.exact[part[~large]] = 1
            over.append(part[large])
        return np.concatenate(over)

    def again(self) -> npt.NDArray[Any]:
        """The tokens that were counted again, numbered on from `ids`."""
        return np.concatenate([*self._again, np.zeros(0, self._tokenizer.dtype)])

    def _encode(self, starts: Int64s, stops: Int64s) -> tuple[UInt32s, Int64s]:
        """The tokens of these ranges, each by itself."""
        at = offsets_of(stops - starts)
        pieces = [self._data[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        try:
            return self._tokenizer.encode_rows(np.concatenate(pieces), at)
        except BadDocument as error:
            error.row = int(np.searchsorted(self._at, starts[error.row], side="right")) - 1
            raise


def _empty_rows(room: int) -> Rows:
    kinds = {"level": np.uint8, "exact": np.uint8}
    return Rows._make(np.empty(room, kinds.get(name, np.int64)) for name in Rows._fields)


def _taken(rows: Rows, which: Any) -> Rows:
    return Rows._make(column[which] for column in rows)


def _joined(first: Rows, then: Rows) -> Rows:
    pairs: Any = zip(first, then, strict=True)
    return Rows._make(map(np.concatenate, pairs))


_WORDS = [f"{name} " for name in KIND_NAMES]
_WORDS[layout.SEPARATOR :] = [" / ", "::", "(anonymous)"]
_WORD_BYTES, _WORD_AT = end_to_end([word.encode() for word in _WORDS])


def _scopes(data: Bytes, outline: Outline, rows: Rows) -> tuple[pa.StringArray, pa.ListArray]:
    """Where each chunk begins, in words, and which names begin in it."""
    count = len(rows.start)
    path, nothing = np.zeros(layout.MAX_SCOPE, np.int64), np.zeros(0, np.uint8)
    at = [np.zeros(size, np.int32) for size in (count + 1, 1, count + 1)]
    out = Described(nothing, at[0], nothing, at[1], at[2])
    for writes in (0, 1):
        _describe_chunks(data, writes, rows, outline, _WORD_BYTES, _WORD_AT, path, out)
        if not writes:
            out = out._replace(
                scope=np.empty(int(path[layout.SCOPE_BYTES]), np.uint8),
                symbols=np.empty(int(path[layout.SYMBOL_BYTES]), np.uint8),
                symbol_at=np.zeros(int(path[layout.SYMBOLS]) + 1, np.int32),
            )
    names = _strings(out.symbol_at, out.symbols)
    listed = pa.ListArray.from_buffers(
        pa.list_(pa.string()), count, [None, pa.py_buffer(out.symbol_first)], children=[names]
    )
    return _strings(out.scope_at, out.scope), listed


def _strings(at: Int32s, data: Bytes) -> pa.StringArray:
    return pa.StringArray.from_buffers(len(at) - 1, pa.py_buffer(at), pa.py_buffer(data))


def level_names(levels: Bytes) -> pa.Array:
    """The levels in words."""
    data, at = end_to_end([name.encode() for name in LEVEL_NAMES])
    table = _strings(at.astype(np.int32), data)
    return table.take(pa.Array.from_buffers(pa.uint8(), len(levels), [None, pa.py_buffer(levels)]))
