"""The window of decoded shards: within its memory to the byte; what failed ahead of its time is
tried anew when it is needed."""

import threading
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import MemoryLimit, StoreBusy
from penstock.supply.window import Window


@dataclass
class Value:
    nbytes: int = 8


@dataclass
class Source:
    """Decodes anything, unless it is away."""

    name: str = "source"
    away: bool = False
    asked: Counter[int] = field(default_factory=Counter)
    failed: threading.Event = field(default_factory=threading.Event)

    def decode(self, shard: int) -> Value:
        self.asked[shard] += 1
        if self.away:
            self.failed.set()
            raise StoreBusy("the store is away")
        return Value()

    def stored_bytes(self, shard: int) -> int:
        return 8

    def forget(self, shard: int) -> None:
        pass


@dataclass
class Sized(Source):
    """Its shards take these bytes."""

    sizes: list[int] = field(default_factory=list)

    def decode(self, shard: int) -> Value:
        return Value(self.sizes[shard])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=12), st.integers(1, 120), st.booleans())
@example([40, 60, 1, 100, 101], 100, True)
@example([40, 61], 100, False)
def test_a_shard_is_held_if_it_fits_the_memory_and_refused_if_not(
    sizes: list[int], max_bytes: int, ahead: bool
) -> None:
    window = Window([Sized(sizes=sizes)], max_bytes=max_bytes)
    held = 0
    try:
        for shard, size in enumerate(sizes):
            if ahead:
                window.prefetch([(0, shard)])
            if held + size <= max_bytes:
                assert window.bring((0, shard)).nbytes == size
                held += size
            else:
                with pytest.raises(MemoryLimit, match="the tokens of the window take"):
                    window.bring((0, shard))
            assert window.held_bytes == held <= max_bytes
            if shard % 4 == 3:
                window.keep(set())
                held = 0
    finally:
        window.close()


def test_an_error_of_reading_ahead_is_not_raised_after_its_cause_is_gone() -> None:
    source = Source(away=True)
    window = Window([source], max_bytes=1000)
    try:
        window.prefetch([(0, 3)])
        assert source.failed.wait(10)
        source.away = False
        assert isinstance(window.bring((0, 3)), Value)
        assert source.asked == {3: 2}
        assert window.held_bytes == 8
    finally:
        window.close()


def test_an_error_that_lasts_is_raised_when_the_shard_is_needed() -> None:
    source = Source(away=True)
    window = Window([source], max_bytes=1000)
    try:
        window.prefetch([(0, 3)])
        assert source.failed.wait(10)
        with pytest.raises(StoreBusy, match="the store is away"):
            window.bring((0, 3))
        assert source.asked == {3: 2}
        with pytest.raises(StoreBusy):  # nobody had asked ahead: once is enough
            window.bring((0, 4))
        assert source.asked[4] == 1
        source.away = False
        for shard in (3, 4):
            assert isinstance(window.bring((0, shard)), Value)
    finally:
        window.close()


@dataclass
class Slow(Source):
    """Tells the order in which it is asked; the first waits until it is told to go on."""

    order: list[int] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    def decode(self, shard: int) -> Value:
        self.order.append(shard)
        assert self.go.wait(10)
        return Value()


def test_what_is_needed_now_comes_before_what_is_read_ahead() -> None:
    source = Slow()
    window = Window([source], max_bytes=1000, threads=1)
    try:
        window.prefetch([(0, shard) for shard in range(5)])
        window.prefetch([(0, 4), (0, 7)], now=True)
        source.go.set()
        for shard in (0, 1, 2, 3, 4, 7):
            window.bring((0, shard))
        assert source.order in ([0, 4, 7, 1, 2, 3], [4, 7, 0, 1, 2, 3])  # had 0 begun by then?
    finally:
        window.close()


def test_ranks_begin_at_different_shards() -> None:
    for turn, expected in ((0, [0, 1, 2, 3]), (0.5, [2, 3, 0, 1]), (0.99, [3, 0, 1, 2])):
        source = Slow()
        source.go.set()
        window = Window([source], max_bytes=1000, threads=1, turn=turn)
        try:
            window.prefetch([(0, shard) for shard in range(4)])
            for shard in range(4):
                window.bring((0, shard))
            assert source.order == expected
        finally:
            window.close()
