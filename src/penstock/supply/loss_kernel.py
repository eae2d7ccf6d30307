"""The kernels of `fetch` for conversations: which tokens are trained, and how many of a batch."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from penstock.simd import njit
from penstock.stream.plan_layout import SEGMENT
from penstock.supply.fetch_kernel import load_i64


@intrinsic
def load_i32(typingctx: Any, address: Any, index: Any) -> Any:
    """Item `index` of an array of int32 that begins at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.load(builder.gep(pointer, [args[1]]))

    return types.int32(types.uint64, types.int64), generate


@njit
def mark_trained(
    segments: Any, slots: Any, spans: Any, spans_at: Any, row: Any, seq_len: Any, out: Any
) -> None:
    """Put 1 where a token of a segment is trained; `out` holds zeros, its line 0 is row `row`.

    The first token of a segment never is: in its row nothing stands before it that could foretell
    it, whatever the spans say.
    `slots` says for each segment which entry of `spans` and `spans_at` (addresses) is its shard's.
    """
    at = np.int64(0)
    for k in range(len(slots)):
        base = k * SEGMENT
        line = (np.int64(segments[base]) - row) * seq_len
        if k == 0 or segments[base] != segments[base - SEGMENT]:
            at = line
        slot = slots[k]
        document = np.int64(segments[base + 4])
        begin = np.int64(segments[base + 5])
        count = np.int64(segments[base + 6])
        i = load_i64(spans_at[slot], document)
        end = load_i64(spans_at[slot], document + 1)
        while i < end:
            first = max(np.int64(load_i32(spans[slot], i)) - begin, np.int64(1))
            last = min(np.int64(load_i32(spans[slot], i + 1)) - begin, count)
            for j in range(at + first, at + last):
                out[j] = 1
            i += 2
        at += count


@njit
def count_trained(
    segments: Any, slots: Any, spans: Any, spans_at: Any, unit: Any, sources: Any, out: Any
) -> None:
    """Add up the trained tokens of every `unit` rows, which are a batch over all ranks, and those
    that are not though a token stands before them: `out` holds both for each source, by batch."""
    for k in range(len(slots)):
        base = k * SEGMENT
        slot = slots[k]
        document = np.int64(segments[base + 4])
        begin = np.int64(segments[base + 5])
        count = np.int64(segments[base + 6])
        i = load_i64(spans_at[slot], document)
        end = load_i64(spans_at[slot], document + 1)
        trained = np.int64(0)
        while i < end:
            first = max(np.int64(load_i32(spans[slot], i)) - begin, np.int64(1))
            last = min(np.int64(load_i32(spans[slot], i + 1)) - begin, count)
            trained += max(last - first, np.int64(0))
            i += 2
        at = 2 * (np.int64(segments[base]) // unit * sources + np.int64(segments[base + 1]))
        out[at] += trained
        out[at + 1] += count - 1 - trained
