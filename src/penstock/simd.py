"""Byte primitives for compiled kernels: vector compare, unaligned loads, block copies, XXH64.

In:    uint8 arrays and positions in them
Out:   masks, words, copied bytes, hashes
Keeps: no reads past `i + 32`, no writes past `o + 32`: callers leave `kernels.PAD` bytes of slack
Never: allocates, takes the GIL, checks bounds

numba has no byte vectors of its own; LLVM has. Scanning a JSON string 32 bytes at a time
instead of one reaches 3 GB/s instead of 0.6 on the text of C++ headers (one Zen core).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit as _njit
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

njit = _njit(_nrt=False, error_model="numpy", forceinline=True)
"""How every kernel function is compiled: without numba's memory management, which could only be
reached through symbols that a process without numba does not have; and into its caller: an array
is seven arguments, and passing them about took more than half of a tokenizer's scan."""

njit_call = _njit(_nrt=False, error_model="numpy")
"""For what is rarely reached and large: into its caller it took the registers of the loop around
it, and a scan for secrets ran at 480 MB/s instead of 1,270."""

_WIDTH = 32
_BYTES = types.Array(types.uint8, 1, "C")
_VECTOR = ir.VectorType(ir.IntType(8), _WIDTH)


def _data(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    pointer = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(pointer, [index])


def _splat(byte: int) -> ir.Constant:
    return ir.Constant(_VECTOR, [byte] * _WIDTH)


def _load32(builder: Any, pointer: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
    loaded.align = 1
    return loaded


def _mask(builder: Any, lanes: Any) -> Any:
    return builder.zext(builder.bitcast(lanes, ir.IntType(_WIDTH)), ir.IntType(64))


@intrinsic
def copy_until_special(typingctx: Any, src: Any, i: Any, dst: Any, o: Any) -> Any:
    """Copy 32 bytes src[i:] to dst[o:]; bit k is set where src[i+k] ends a plain JSON run.

    Special are the quote, the backslash, control characters and everything beyond ASCII.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _data(context, builder, signature.args[0], args[0], args[1])
        target = _data(context, builder, signature.args[2], args[2], args[3])
        lanes = _load32(builder, source)
        store = builder.store(lanes, builder.bitcast(target, _VECTOR.as_pointer()))
        store.align = 1
        special = builder.icmp_unsigned("==", lanes, _splat(0x22))
        special = builder.or_(special, builder.icmp_unsigned("==", lanes, _splat(0x5C)))
        # signed below 0x20: the control characters and every byte from 0x80 on, in one compare
        special = builder.or_(special, builder.icmp_signed("<", lanes, _splat(0x20)))
        return _mask(builder, special)

    return types.uint64(src, types.intp, dst, types.intp), generate


@intrinsic
def copy_until_high(typingctx: Any, src: Any, i: Any, dst: Any, o: Any) -> Any:
    """Copy 32 bytes src[i:] to dst[o:]; bit k is set where src[i+k] is beyond ASCII."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _data(context, builder, signature.args[0], args[0], args[1])
        target = _data(context, builder, signature.args[2], args[2], args[3])
        lanes = _load32(builder, source)
        store = builder.store(lanes, builder.bitcast(target, _VECTOR.as_pointer()))
        store.align = 1
        return _mask(builder, builder.icmp_signed("<", lanes, _splat(0)))

    return types.uint64(src, types.intp, dst, types.intp), generate


@intrinsic
def high_mask(typingctx: Any, src: Any, i: Any) -> Any:
    """Bit k is set where src[i+k] is beyond ASCII, for 32 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load32(builder, _data(context, builder, signature.args[0], args[0], args[1]))
        return _mask(builder, builder.icmp_signed("<", lanes, _splat(0)))

    return types.uint64(src, types.intp), generate


@intrinsic
def not_letters_mask(typingctx: Any, src: Any, i: Any) -> Any:
    """Bit k is set where src[i+k] is not an ASCII letter, for 32 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load32(builder, _data(context, builder, signature.args[0], args[0], args[1]))
        small = builder.or_(lanes, _splat(0x20))
        place = builder.sub(small, _splat(0x61))
        return _mask(builder, builder.icmp_unsigned(">", place, _splat(25)))

    return types.uint64(src, types.intp), generate


@intrinsic
def equal_mask(typingctx: Any, src: Any, i: Any, byte: Any) -> Any:
    """Bit k is set where src[i+k] == byte, for 32 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load32(builder, _data(context, builder, signature.args[0], args[0], args[1]))
        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), args[2], ir.IntType(32)(0))
        all_lanes = builder.shuffle_vector(
            one,
            ir.Constant(_VECTOR, ir.Undefined),
            ir.Constant(ir.VectorType(ir.IntType(32), _WIDTH), None),
        )
        return _mask(builder, builder.icmp_unsigned("==", lanes, all_lanes))

    return types.uint64(src, types.intp, types.uint8), generate


@intrinsic
def first_bit(typingctx: Any, mask: Any) -> Any:
    """The number of the lowest bit set in a mask that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


@intrinsic
def peek(typingctx: Any, array: Any, i: Any) -> Any:
    """array[i] for an index that is not negative: numba's own would ask, at every byte."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_data(context, builder, signature.args[0], args[0], args[1]))

    return array.dtype(array, types.intp), generate


@intrinsic
def prefetch(typingctx: Any, array: Any, i: Any) -> Any:
    """Ask for the cache line of array[i], which will be read soon; i may be anywhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _data(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(place, ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def load64(typingctx: Any, src: Any, i: Any) -> Any:
    """The eight bytes src[i:i+8] as a little-endian word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _data(context, builder, signature.args[0], args[0], args[1])
        loaded = builder.load(builder.bitcast(pointer, ir.IntType(64).as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(src, types.intp), generate


@intrinsic
def copy_bytes(typingctx: Any, src: Any, i: Any, dst: Any, o: Any, count: Any) -> Any:
    """Copy src[i:i+count] to dst[o:o+count]; the two do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _data(context, builder, signature.args[0], args[0], args[1])
        target = _data(context, builder, signature.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, target, source, args[4], 1)
        return context.get_dummy_value()

    return types.void(src, types.intp, dst, types.intp, types.intp), generate


_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


@njit
def _rotate(x: Any, r: Any) -> Any:
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


@njit
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * _P2, 31) * _P1


@njit
def xxh64(data: Any, start: Any, stop: Any, seed: Any) -> Any:
    """XXH64 of data[start:stop], as the xxhash library gives it."""
    seed = np.uint64(seed)
    i = start
    if stop - start >= 32:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while i + 32 <= stop:
            a = _round(a, load64(data, i))
            b = _round(b, load64(data, i + 8))
            c = _round(c, load64(data, i + 16))
            d = _round(d, load64(data, i + 24))
            i += 32
        h = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        h = (h ^ _round(np.uint64(0), a)) * _P1 + _P4
        h = (h ^ _round(np.uint64(0), b)) * _P1 + _P4
        h = (h ^ _round(np.uint64(0), c)) * _P1 + _P4
        h = (h ^ _round(np.uint64(0), d)) * _P1 + _P4
    else:
        h = seed + _P5
    h += np.uint64(stop - start)
    while i + 8 <= stop:
        h = _rotate(h ^ _round(np.uint64(0), load64(data, i)), 27) * _P1 + _P4
        i += 8
    if i + 4 <= stop:
        word = load64(data, i) & np.uint64(0xFFFFFFFF)
        h = _rotate(h ^ (word * _P1), 23) * _P2 + _P3
        i += 4
    while i < stop:
        h = _rotate(h ^ (np.uint64(data[i]) * _P5), 11) * _P1
        i += 1
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


@njit
def splitmix64(x: Any) -> Any:
    """One step of splitmix64: a bijection of 64-bit words that leaves no pattern behind."""
    x = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit
def last_index(data: Any, start: Any, stop: Any, byte: Any) -> Any:
    """Where `byte` stands last in data[start:stop], or -1."""
    i = stop - 1
    while i >= start:
        if data[i] == byte:
            return i
        i -= 1
    return -1


@njit
def next_index(data: Any, start: Any, stop: Any, byte: Any) -> Any:
    """Where `byte` stands first in data[start:stop], or `stop`; needs PAD bytes after it."""
    i = start
    while i < stop:
        mask = equal_mask(data, i, np.uint8(byte))
        if mask != 0:
            found = i + first_bit(mask)
            return found if found < stop else stop
        i += 32
    return stop
