"""The byte primitives against Python and the xxhash library."""

import random
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels import PAD
from penstock.simd import last_index, next_index, splitmix64, xxh64

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
