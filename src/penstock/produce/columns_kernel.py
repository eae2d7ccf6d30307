"""The kernels of `columns` and `split`: gather rows, shuffle, choose the split."""

from typing import Any

import numpy as np

from penstock.simd import copy_bytes, njit, splitmix64


@njit
def copy_rows(data: Any, at: Any, rows: Any, out: Any, offsets: Any) -> None:
    for k in range(len(rows)):
        row = rows[k]
        copy_bytes(data, at[row], out, offsets[k], at[row + 1] - at[row])


@njit
def shuffle(order: Any, seed: Any, stream: Any) -> None:
    """Fisher and Yates, with splitmix64 for dice: nothing that a library upgrade could change."""
    state = splitmix64(np.uint64(seed) ^ splitmix64(np.uint64(stream)))
    for k in range(len(order) - 1, 0, -1):
        state = splitmix64(state)
        # the high half of a 32-bit draw times k + 1: off from uniform by less than 1e-5 at 50,000
        pick = np.int64(((state >> np.uint64(32)) * np.uint64(k + 1)) >> np.uint64(32))
        order[k], order[pick] = order[pick], order[k]


@njit
def mark_val(doc_ids: Any, salt: Any, threshold: Any, mask: Any) -> None:
    for k in range(len(doc_ids)):
        mask[k] = splitmix64(doc_ids[k] ^ salt) < threshold
