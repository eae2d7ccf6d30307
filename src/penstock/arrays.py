"""Arrays as all stages name and make them: aliases, offsets, Arrow's columns where they lie,
memory for batches.

In:    sizes, columns of Arrow
Out:   arrays of NumPy over the same memory
Never: copies a value, gives out memory of which somebody still holds a part
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
_LINE: Final = 64
"""Bytes of a cache line."""
_MOST_ROOMS: Final = 3


def offsets_of(sizes: Sequence[int] | npt.NDArray[Any]) -> Int64s:
    """Where each begins if all lie end to end, and where the last one ends.

    >>> offsets_of([2, 0, 3]).tolist(), offsets_of([]).tolist()
    ([0, 2, 2, 5], [0])
    """
    at = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=at[1:])
    return at


def end_to_end(texts: Sequence[bytes], slack: int = 0) -> tuple[Bytes, Int64s]:
    """Texts in one buffer with `slack` bytes after them, and where each begins.

    >>> data, at = end_to_end([b"ab", b"", b"c"], slack=1)
    >>> data.tobytes(), at.tolist()
    (b'abc\\x00', [0, 2, 2, 3])
    """
    data = np.frombuffer(b"".join([*texts, bytes(slack)]), np.uint8)
    return data, offsets_of([len(text) for text in texts])


def values_of(column: "pa.Array", kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """The numbers of a column without nulls.

    >>> import pyarrow as pa
    >>> values_of(pa.array([1, 2, 3], pa.int32()).slice(1), np.int32).tolist()
    [2, 3]
    """
    values = column.buffers()[1]
    if values is None:
        return np.zeros(0, kind)
    return np.frombuffer(values, kind)[column.offset : column.offset + len(column)]


def bytes_of(column: "pa.Array") -> tuple[Bytes, Int64s]:
    """The bytes of a column of large strings without nulls, and where each begins in them.

    >>> import pyarrow as pa
    >>> data, at = bytes_of(pa.array(["a", "bc", "d"], pa.large_string()).slice(1))
    >>> data.tobytes(), at.tolist()
    (b'bcd', [0, 2, 3])
    """
    _, offsets, values = column.buffers()
    if offsets is None or values is None or not len(column):
        return np.zeros(0, np.uint8), np.zeros(len(column) + 1, np.int64)
    at = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(values, np.uint8)[int(at[0]) : int(at[-1])], at - at[0]


class Rooms:
    """Memory for batches: that of earlier ones which nobody holds any longer, if there is some.

    What is new to the process comes page by page: a consumer of a queue took 3.4 ms of CPU for a
    batch of 4 MB, and 0.8 to 1.2 ms with memory that was used before. At most three pieces are
    kept.

    >>> rooms = Rooms()
    >>> rooms.lend(8).view(np.int32).shape
    (2,)
    """

    def __init__(self) -> None:
        self._rooms: list[_Room] = []

    def lend(self, size: int) -> Bytes:
        """So many bytes, from a cache line on, that nobody else has."""
        room = next((one for one in self._rooms if one.is_free and len(one.memory) >= size), None)
        if room is None:
            memory = np.empty(max(size, 1) + _LINE, np.uint8)
            first = -memory.__array_interface__["data"][0] % _LINE
            room = _Room(memory[first : first + max(size, 1)])
            self._rooms = [*self._rooms[1 - _MOST_ROOMS :], room]
        return room.lend()[:size]


class _Room:
    """Memory that is lent to batches, one array at a time, and comes back when that array dies.

    Whatever a trainer keeps of a batch keeps the array: a view has it as its `base`, since the
    array's own base is no array to look through; tensors, DLPack and memoryviews hold a view.
    NumPy's arrays are no part of the cyclic collector, so the reference dies with the array and
    not before. Reference counts would not say it: they differ from one Python to the next.
    """

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self._lent: Callable[[], Bytes | None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether nobody holds anything of it."""
        return self._lent() is None

    def lend(self) -> Bytes:
        """All of it, as an array that nobody else has."""
        lent = np.frombuffer(self.memory.data, np.uint8)
        self._lent = weakref.ref(lent)
        return lent
