"""The UTF-8 kernel against `bytes.decode("utf-8", "replace")`, wherever a buffer may end."""

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.kernels import PAD
from penstock.tokenize.corpus import clean_utf8
from penstock.tokenize.count_layout import INVALID, WRITTEN

MARK: Final = "\ufffd".encode()

# Where the rules of UTF-8 change: the ends of every range that a byte can have to lie in.
EDGES: Final = bytes.fromhex("00417f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5f7f8feff")

broken = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=4),
        st.lists(st.sampled_from(EDGES), min_size=1, max_size=4).map(bytes),
        st.characters(codec="utf-8").map(str.encode),
        st.integers(1, 40).map(lambda n: b"x" * n),
    ),
    max_size=12,
).map(b"".join)


def clean(data: bytes, cuts: Sequence[int] = (), slack: int = 0x80) -> tuple[bytes, int]:
    """What the kernel makes of `data`, read up to each of `cuts` and then to the end; and the
    number of parts that were not UTF-8."""
    src = np.frombuffer(data + bytes([slack]) * PAD, np.uint8)
    dst = np.full(3 * len(data) + PAD, 0xEE, np.uint8)
    state = np.zeros(8, np.int64)
    at = written = 0
    for stop in (*sorted(cuts), len(data)):
        is_last = stop == len(data)
        taken = clean_utf8(src, at, stop, is_last, dst, written, state)
        assert taken == stop if is_last else stop - 3 <= taken <= stop
        assert taken >= at
        at, written = taken, int(state[WRITTEN])
        if is_last:
            break
    return dst[:written].tobytes(), int(state[INVALID])


def expected(data: bytes) -> tuple[bytes, int]:
    text = data.decode("utf-8", "replace").encode()
    return text, text.count(MARK) - data.count(MARK)


def test_every_sequence_of_one_and_two_bytes() -> None:
    for size in (0, 1, 2):
        for sequence in itertools.product(range(256), repeat=size):
            data = bytes(sequence)
            assert clean(data) == expected(data), data


def test_every_pair_of_bytes_cut_between_them() -> None:
    for first in range(0xC0, 0x100):
        for second in range(0x100):
            data = bytes((first, second))
            assert clean(data, [1]) == expected(data), data


def test_every_sequence_of_three_edges_cut_everywhere() -> None:
    for sequence in itertools.product(EDGES[2:], EDGES, EDGES):
        data = bytes(sequence)
        assert clean(data, [1, 2]) == expected(data), data


def test_every_sequence_of_four_edges_in_one_text() -> None:
    data = b"a".join(map(bytes, itertools.product(EDGES[2:], EDGES, EDGES, EDGES)))
    assert clean(data) == expected(data)


def test_every_code_point_stays() -> None:
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)])).encode()
    assert clean(text) == (text, 0)


def test_surrogates_written_as_utf8_are_three_parts_each() -> None:
    for point in range(0xD800, 0xE000):
        data = chr(point).encode("utf-8", "surrogatepass")
        assert clean(data) == (3 * MARK, 3)


def test_a_replacement_character_that_was_there_is_not_counted() -> None:
    assert clean(MARK + b"\xff" + MARK) == (3 * MARK, 1)


def test_at_every_place_of_a_block() -> None:
    for shift in range(70):
        for middle in (b"\xff", b"\xe2\x82\xac", b"\xe2\x82", b"\xf0\x9f\x98\x80", b"\xf0\x9f\x98"):
            for tail in (b"", b"z", b"z" * 40):
                data = b"a" * shift + middle + tail
                assert clean(data) == expected(data), data


def test_cut_at_every_place_and_continued() -> None:
    data = "aé€😀\ufffd".encode() + b"\xff\xe2\x82\xf0\x9f\x98A\xed\xa0\x80" + b"b" * 40 + b"\xc3"
    for cut in range(len(data) + 1):
        assert clean(data, [cut]) == expected(data), cut
    for pair in itertools.combinations(range(len(data) + 1), 2):
        assert clean(data, pair) == expected(data), pair
    assert clean(data, range(len(data))) == expected(data)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes(data: bytes) -> None:
    assert clean(data) == expected(data)


@settings(max_examples=500, deadline=None)
@given(broken, st.lists(st.integers(0, 200), max_size=8), st.sampled_from([0, 0x41, 0x80, 0xBF]))
@example(b"\xe2\x82", [2], 0xAC)
@example(b"\xf0\x9f\x98", [1, 2, 3], 0x80)
def test_broken_text_in_buffers(data: bytes, cuts: list[int], slack: int) -> None:
    cuts = [cut for cut in cuts if cut <= len(data)]
    assert clean(data, cuts, slack) == expected(data)


@settings(max_examples=200, deadline=None)
@given(broken)
def test_nothing_is_left_unless_it_could_go_on(data: bytes) -> None:
    # what the kernel leaves without `is_last` is the beginning of a character, and no more
    src = np.frombuffer(data + bytes(PAD), np.uint8)
    dst, state = np.empty(3 * len(data) + PAD, np.uint8), np.zeros(8, np.int64)
    taken = clean_utf8(src, 0, len(data), False, dst, 0, state)
    left = data[taken:]
    whole = dst[: int(state[WRITTEN])].tobytes()
    assert whole == data[:taken].decode("utf-8", "replace").encode()
    if left:
        assert left.decode("utf-8", "replace") == "\ufffd"
        assert any(
            len((left + more).decode("utf-8", "ignore")) == 1
            for more in (b"\x80", b"\xa0", b"\x90\x80", b"\xa0\x80", b"\x80\x80", b"\x90\x80\x80",
                         b"\x80\x80\x80")
        )  # fmt: skip
