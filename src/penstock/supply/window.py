"""Hold the decoded shards of the window: brought by threads, within a number of bytes.

In:    sources that decode shards; which shards the plan has in its pools
Out:   decoded shards
Keeps: at most `max_bytes` of them; a shard is decoded once while it is in the window; caches know
       what is held and what comes
Never: decides what comes next; fails for a shard that nobody has asked for yet, nor with an error
       of a time when nobody had
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from penstock.errors import MemoryLimit

AHEAD: Final = 0.9
"""Shards of the next refill are fetched ahead up to this part of the memory."""

Key = tuple[int, int]
"""A source's number and a shard's."""


class Measured(Protocol):
    """Something that says how much memory it takes."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Measured)
T_co = TypeVar("T_co", covariant=True)


class Decodes(Protocol[T_co]):
    """What a window needs of a source."""

    @property
    def name(self) -> str: ...

    def decode(self, shard: int) -> T_co:
        """All of a shard."""

    def stored_bytes(self, shard: int) -> int:
        """What it takes where it is stored."""

    def forget(self, shard: int) -> None:
        """The shard is no longer needed."""


@runtime_checkable
class Plans(Protocol):
    """A source that wants to know what will be asked for."""

    def plan(self, shards: set[int]) -> None:
        """These are held or come next, and no others."""


class Window(Generic[T]):
    """The decoded shards that rows are made of."""

    content = "tokens"
    """What is held, in words."""

    def __init__(
        self,
        sources: Sequence[Decodes[T]],
        *,
        max_bytes: int | Callable[[], int],
        threads: int = 2,
        turn: float = 0,
    ) -> None:
        """`max_bytes` may change. `turn`, from 0 to 1, is where in a list of shards this window
        begins: ranks of a host that begin at different shards share the work of fetching, hashing
        and tokenising them."""
        self._sources = sources
        self._turn = turn
        self._max_bytes = max_bytes if callable(max_bytes) else lambda: max_bytes
        self._told: set[Key] = set()
        """What sources were told that is held or comes."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="penstock-fetch")
        self._coming: dict[Key, Future[T]] = {}
        self._held: dict[Key, T] = {}
        self._lock = threading.Lock()
        self._decoded_bytes = 0
        self._growth = 0.0
        """Decoded bytes for each stored one, the most that was seen."""
        self.waited_s = 0.0
        """Seconds in which somebody waited for a shard."""
        self.peak_bytes = 0
        """The most that was held at once."""

    @property
    def held_bytes(self) -> int:
        """What is decoded now takes so much."""
        return self._decoded_bytes

    @property
    def held(self) -> int:
        """Shards that are there."""
        return len(self._held)

    def has_room(self, shards: int) -> bool:
        """Whether so many more will fit, if they are like those that are there."""
        if not self._held or self._coming:
            return False
        expected = self.held_bytes * (1 + shards / len(self._held))
        return expected <= AHEAD * self._max_bytes()

    def prefetch(self, keys: Iterable[Key], *, now: bool = False) -> None:
        """Begin to decode shards that will be needed, or are needed `now`: before all others."""
        wanted = [key for key in keys if key not in self._held]
        first = int(self._turn * len(wanted))
        wanted = wanted[first:] + wanted[:first]
        if now:  # those that have not begun stand behind them
            put_off = [key for key, future in self._coming.items() if future.cancel()]
            for key in put_off:
                del self._coming[key]
            wanted = [*dict.fromkeys([*wanted, *put_off])]
        self._tell({*self._held, *self._coming, *wanted})
        for key in wanted:
            if key not in self._coming:
                self._coming[key] = self._threads.submit(self._admit, key)

    def _tell(self, keys: set[Key]) -> None:
        """Say what is held or comes, if that has changed."""
        if keys == self._told:
            return
        for number, source in enumerate(self._sources):
            mine, before = (
                {shard for one, shard in some if one == number} for some in (keys, self._told)
            )
            if mine != before and isinstance(source, Plans):
                source.plan(mine)
        self._told = keys

    def keep(self, keys: set[Key]) -> None:
        """Let go of all shards but these."""
        for key in [key for key in self._held if key not in keys]:
            self._drop(key)
        for key in [key for key in self._coming if key not in keys]:
            future = self._coming.pop(key)
            if not future.cancel():
                future.add_done_callback(self._uncount)
        self._tell({*self._held, *self._coming})

    def _drop(self, key: Key) -> None:
        """Let go of a shard that is there."""
        self._released(key)
        decoded = self._held.pop(key)
        with self._lock:
            self._decoded_bytes -= decoded.nbytes
        self._sources[key[0]].forget(key[1])

    def bring(self, key: Key) -> T:
        """A shard, waited for if it is not there yet."""
        found = self._held.get(key)
        if found is None:
            came_ahead, began = key in self._coming, time.perf_counter()
            self.prefetch([key])
            try:
                found = self._coming.pop(key).result()
            except MemoryLimit:
                # it came ahead of its time, beside others: now that it is needed, it comes alone
                wait(self._coming.values())
                found = self._decode(key)
            except Exception:
                # nobody needed it then, and what was wrong may be right by now
                if not came_ahead:
                    raise
                found = self._threads.submit(self._decode, key).result()
            self.waited_s += time.perf_counter() - began
            self._held[key] = found
            self._placed(key, found)
        return found

    def _placed(self, key: Key, decoded: T) -> None:
        """A shard has come."""

    def _released(self, key: Key) -> None:
        """A shard is about to go."""

    def _admit(self, key: Key) -> T:
        """Decode a shard ahead of its time, if it will probably fit."""
        expected = int(self._growth * self._sources[key[0]].stored_bytes(key[1]))
        if why := self._exceeded(self._decoded_bytes + expected):
            raise self._refused(key, why)
        return self._decode(key)

    def _decode(self, key: Key) -> T:
        source, shard = key
        try:
            decoded = self._sources[source].decode(shard)
        except MemoryError as error:
            raise self._refused(key, f"there is no memory for one more ({error})") from None
        with self._lock:
            self._decoded_bytes += decoded.nbytes
            held = self._decoded_bytes
            self.peak_bytes = max(self.peak_bytes, held)
            stored = max(1, self._sources[source].stored_bytes(shard))
            self._growth = max(self._growth, decoded.nbytes / stored)
        if why := self._exceeded(held):
            with self._lock:
                self._decoded_bytes -= decoded.nbytes
            raise self._refused(key, why)
        return decoded

    def _exceeded(self, held_bytes: int) -> str:
        """What is wrong with holding so much; empty if nothing is. Asked by threads."""
        if held_bytes <= (most := self._max_bytes()):
            return ""
        return (
            f"the {self.content} of the window take {held_bytes / 1e9:.2f} GB, "
            f"{most / 1e9:.2f} GB are allowed"
        )

    def _refused(self, key: Key, why: str) -> MemoryLimit:
        return MemoryLimit(
            why,
            where=f'source "{self._sources[key[0]].name}", shard {key[1]}, '
            f"{len(self._held)} shards held",
            do="the state can be saved and resumed; give more max_memory_gb, which the ranks of a "
            "host share, or a smaller pool_size",
        )

    def _uncount(self, future: "Future[T]") -> None:
        if not future.cancelled() and future.exception() is None:
            with self._lock:
                self._decoded_bytes -= future.result().nbytes

    def close(self) -> None:
        """Let go of everything."""
        self.keep(set())
        self._threads.shutdown(wait=True, cancel_futures=True)
