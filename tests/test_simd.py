"""The byte primitives against Python and the xxhash library."""

import random
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels import PAD
from penstock.simd import (
    copy_until_high,
    last_index,
    next_index,
    njit,
    not_letters_mask,
    peek,
    splitmix64,
    xxh64,
)

WORD: Final = 2**64 - 1


def padded(data: bytes, slack: int) -> npt.NDArray[np.uint8]:
    """`data` with PAD bytes of `slack` after it, as a kernel is given it."""
    return np.frombuffer(data + bytes([slack]) * PAD, np.uint8).copy()


def test_xxh64_is_that_of_the_library_at_every_length() -> None:
    dice = random.Random(7)
    for length in range(201):
        for seed in (0, WORD, dice.getrandbits(64)):
            start = dice.randrange(70)
            data = dice.randbytes(start + length)
            found = xxh64(padded(data, dice.randrange(256)), start, start + length, np.uint64(seed))
            assert int(found) == xxhash.xxh64_intdigest(data[start:], seed=seed), (length, seed)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=5000), st.integers(0, WORD), st.data())
def test_xxh64_of_any_range(data: bytes, seed: int, more: st.DataObject) -> None:
    start = more.draw(st.integers(0, len(data)))
    stop = more.draw(st.integers(start, len(data)))
    found = xxh64(padded(data, 0xFF), start, stop, np.uint64(seed))
    assert int(found) == xxhash.xxh64_intdigest(data[start:stop], seed=seed)


def slow_splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, WORD))
def test_splitmix64_is_that_of_plain_python(x: int) -> None:
    assert int(splitmix64(np.uint64(x))) == slow_splitmix64(x)


def test_splitmix64_golden() -> None:
    # the first output of the published generator from state 0
    assert int(splitmix64(np.uint64(0))) == 0xE220A8397B1DCDAF


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(b"\n\x00a\x8a\xff"), max_size=150), st.data())
def test_next_and_last_index_are_find_and_rfind(letters: list[int], more: st.DataObject) -> None:
    data = bytes(letters)
    start = more.draw(st.integers(0, len(data)))
    stop = more.draw(st.integers(start, len(data)))
    byte = more.draw(st.sampled_from(b"\n\x00a\x8a\xff"))
    array = padded(data, byte)  # the slack is full of what is looked for
    first = data.find(bytes([byte]), start, stop)
    assert next_index(array, start, stop, byte) == (first if first >= 0 else stop)
    assert last_index(array, start, stop, byte) == data.rfind(bytes([byte]), start, stop)


def test_next_index_at_every_distance() -> None:
    for distance in range(130):
        array = padded(b"." * distance + b"\n", ord("."))
        assert next_index(array, 0, distance + 1, 0x0A) == distance
        assert next_index(array, 0, distance, 0x0A) == distance
        assert last_index(array, 0, distance + 1, 0x0A) == distance
        assert last_index(array, 0, distance, 0x0A) == -1


# Intrinsics exist in compiled code only.


@njit
def copied(src: Any, i: Any, dst: Any, o: Any) -> Any:
    return copy_until_high(src, i, dst, o)


@njit
def letters_missing(src: Any, i: Any) -> Any:
    return not_letters_mask(src, i)


@njit
def peeked(array: Any, i: Any) -> Any:
    return peek(array, i)


def bits(flags: list[bool]) -> int:
    return sum(1 << k for k, flag in enumerate(flags) if flag)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=32, max_size=80), st.integers(0, 40), st.data())
def test_copy_until_high_copies_and_says_what_is_beyond_ascii(
    data: bytes, o: int, more: st.DataObject
) -> None:
    i = more.draw(st.integers(0, len(data) - 32))
    target = np.full(o + 32 + 8, 0xEE, np.uint8)
    mask = copied(np.frombuffer(data, np.uint8).copy(), i, target, o)
    assert int(mask) == bits([byte >= 0x80 for byte in data[i : i + 32]])
    assert target.tobytes() == b"\xee" * o + data[i : i + 32] + b"\xee" * 8


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=32, max_size=80), st.data())
def test_not_letters_mask_is_that_of_plain_python(data: bytes, more: st.DataObject) -> None:
    i = more.draw(st.integers(0, len(data) - 32))
    mask = letters_missing(np.frombuffer(data, np.uint8).copy(), i)
    assert int(mask) == bits([not bytes([byte]).isalpha() for byte in data[i : i + 32]])


def test_the_masks_of_every_byte_in_every_lane() -> None:
    target = np.zeros(32, np.uint8)
    for byte in range(256):
        for lane in range(32):
            low = np.full(32, 0x61, np.uint8)
            low[lane] = byte
            is_letter = bytes([byte]).isalpha()
            assert int(letters_missing(low, 0)) == (0 if is_letter else 1 << lane)
            assert int(copied(low, 0, target, 0)) == (1 << lane if byte >= 0x80 else 0)
            high = np.full(32, 0xE1, np.uint8)
            high[lane] = byte
            rest = 0xFFFFFFFF & ~(1 << lane)
            assert int(letters_missing(high, 0)) == rest | (0 if is_letter else 1 << lane)
            assert int(copied(high, 0, target, 0)) == rest | (1 << lane if byte >= 0x80 else 0)
            assert target.tobytes() == high.tobytes()


def test_peek_is_what_stands_there() -> None:
    for dtype in (np.uint8, np.int64, np.uint64):
        info = np.iinfo(dtype)
        array = np.array([info.min, 1, info.max, 7, info.max - 1], dtype)
        for i in range(len(array)):
            assert int(peeked(array, i)) == int(array[i])
