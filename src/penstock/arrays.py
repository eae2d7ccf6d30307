"""Arrays as all stages name and make them: aliases, offsets, Arrow's columns where they lie.

In:    sizes, columns of Arrow
Out:   arrays of NumPy over the same memory
Never: copies a value
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
