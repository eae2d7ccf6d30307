"""The kernels of `fetch` and `batch`: copy the tokens of segments into rows, and what follows."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from penstock.simd import njit
from penstock.stream.plan_layout import SEGMENT

_LANES = 16
_AHEAD_BYTES = 1024
"""Of the next document, while one is copied: 1,500 M tokens a second in place of 1,170 (documents
of 900 tokens on average from 78 mapped shards). 512 to 4,096 bytes are alike."""


@intrinsic
def load_i64(typingctx: Any, address: Any, index: Any) -> Any:
    """Item `index` of an array of int64 that begins at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load(builder.gep(pointer, [args[1]]))

    return types.int64(types.uint64, types.int64), generate


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Have the processor bring the cache line of an address; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        name = "llvm.prefetch.p0i8"
        found = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        pointer = builder.inttoptr(args[0], byte)
        builder.call(found, [pointer, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


def _widen(width: int, lanes: int) -> Any:
    """An intrinsic that takes `lanes` unsigned integers of `width` bits to int32s."""
    narrow, wide = ir.IntType(width), ir.IntType(32)
    if lanes > 1:
        narrow, wide = ir.VectorType(narrow, lanes), ir.VectorType(wide, lanes)

    @intrinsic
    def widen(typingctx: Any, address: Any, index: Any, out: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            first = builder.inttoptr(args[0], ir.IntType(width).as_pointer())
            source = builder.bitcast(builder.gep(first, [args[1]]), narrow.as_pointer())
            loaded = builder.load(source)
            loaded.align = width // 8
            array = context.make_array(signature.args[2])(context, builder, value=args[2])
            target = builder.bitcast(builder.gep(array.data, [args[3]]), wide.as_pointer())
            value = loaded if width == 32 else builder.zext(loaded, wide)
            builder.store(value, target).align = 4
            return context.get_dummy_value()

        line = types.Array(types.int32, 1, "C")
        return types.void(types.uint64, types.int64, line, types.int64), generate

    return widen


widen_16, widen_one_16 = _widen(16, _LANES), _widen(16, 1)
widen_32, widen_one_32 = _widen(32, _LANES), _widen(32, 1)


@njit
def fill_rows(
    segments: Any, slots: Any, held: Any, around: Any, row: Any, seq_len: Any, out: Any
) -> Any:
    """Tokens of segments into out, whose line 0 is the segments' row `row`.

    `slots` says for each segment which entry of `held` is its shard. Answers -1, or the segment
    whose document is shorter than the plan believed.
    """
    values, offsets, wide = held
    bos, eos, pad = around
    lead = 0
    if bos >= 0:
        lead = 1
    at = np.int64(0)
    for k in range(len(slots)):
        base = k * SEGMENT
        line = (np.int64(segments[base]) - row) * seq_len
        if k == 0 or segments[base] != segments[base - SEGMENT]:
            # what is left of the row before is padding
            while at < line:
                out[at] = pad
                at += np.int64(1)
        if k + 1 < len(slots):
            # documents lie anywhere: the next one's first lines come while this one is copied
            next_slot, next_base = slots[k + 1], base + SEGMENT
            ahead = load_i64(offsets[next_slot], np.int64(segments[next_base + 4])) + np.int64(
                segments[next_base + 5]
            )
            width = np.int64(4) if wide[next_slot] else np.int64(2)
            where = np.uint64(values[next_slot]) + np.uint64(ahead * width)
            wanted = np.int64(segments[next_base + 6]) * width
            i = np.int64(0)
            while i < wanted and i < _AHEAD_BYTES:
                prefetch(where + np.uint64(i))
                i += 64
        slot = slots[k]
        document = np.int64(segments[base + 4])
        start = load_i64(offsets[slot], document)
        size = load_i64(offsets[slot], document + 1) - start
        begin = np.int64(segments[base + 5])
        count = np.int64(segments[base + 6])
        stop = begin + count
        if stop > size + lead + (1 if eos >= 0 else 0):
            return k
        if lead and begin == 0:
            out[at] = bos
            at += np.int64(1)
            begin = np.int64(1)
        body = min(stop, size + lead)
        source = np.uint64(values[slot])
        shift = start - lead
        n = body - begin
        if n > 0:
            # sixteen at a time by hand: LLVM does not see that source and target do not overlap
            from_ = shift + begin
            i = np.int64(0)
            if n >= _LANES:
                # the first and the last sixteen overlap their neighbours, so that those between
                # them are stored to whole cache lines
                skip = _LANES - at % _LANES
                end = n - _LANES
                if wide[slot]:
                    widen_32(source, from_, out, at)
                    i = skip
                    while i < end:
                        widen_32(source, from_ + i, out, at + i)
                        i += _LANES
                    widen_32(source, from_ + end, out, at + end)
                else:
                    widen_16(source, from_, out, at)
                    i = skip
                    while i < end:
                        widen_16(source, from_ + i, out, at + i)
                        i += _LANES
                    widen_16(source, from_ + end, out, at + end)
            else:
                while i < n:
                    if wide[slot]:
                        widen_one_32(source, from_ + i, out, at + i)
                    else:
                        widen_one_16(source, from_ + i, out, at + i)
                    i += 1
            at += n
        if stop > size + lead:
            out[at] = eos
            at += np.int64(1)
    while at < len(out):
        out[at] = pad
        at += np.int64(1)
    return -1


@njit
def boundaries(
    segments: Any, first: Any, last: Any, row: Any, rows: Any, seq_len: Any, out: Any
) -> Any:
    """Where each document begins in the rows laid end to end, and the padding after them.

    Answers how many there are; a run of padding is one.
    """
    found = 0
    at = np.int64(0)
    for k in range(first, last):
        base = k * SEGMENT
        line = (np.int64(segments[base]) - row) * seq_len
        if at < line and (k == first or segments[base] != segments[base - SEGMENT]):
            while at < line:
                out[found] = at
                found += 1
                at = min(line, (at // seq_len + 1) * seq_len)
        out[found] = at
        found += 1
        at += segments[base + 6]
    end = rows * seq_len
    while at < end:
        out[found] = at
        found += 1
        at = min(end, (at // seq_len + 1) * seq_len)
    return found


@njit
def positions(starts: Any, total: Any, out: Any) -> None:
    """0, 1, 2 … from each start on."""
    for k in range(len(starts)):
        end = total
        if k + 1 < len(starts):
            end = starts[k + 1]
        begin = starts[k]
        for i in range(end - begin):
            out[begin + i] = i


@njit
def targets(ids: Any, fills: Any, seq_len: Any, starts: Any, ignore: Any, out: Any) -> None:
    """The ids as targets: `ignore` for padding and for the first token of each document."""
    for row in range(len(fills)):
        line = row * seq_len
        for i in range(fills[row]):
            out[line + i] = ids[line + i]
        for i in range(fills[row], seq_len):
            out[line + i] = ignore
    for k in range(len(starts)):
        out[starts[k]] = ignore
