"""Choose which source documents are set aside for validation.

In:    doc_id (a hash of the source document), the dataset's seed and fraction
Out:   train or val; depends on nothing else, so every part of a file is on the same side
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from penstock.simd import splitmix64


@dataclass(frozen=True, slots=True)
class Split:
    """The rule as two words, for kernels: val is where splitmix64(doc_id ^ salt) < threshold."""

    salt: int
    threshold: int

    @classmethod
    def of(cls, seed: int, val_fraction: float) -> "Split":
        return cls(
            salt=int(splitmix64(np.uint64(seed))),
            threshold=min(int(val_fraction * 2.0**64), 2**64 - 1),
        )

    def is_val(self, doc_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of these documents are for validation."""
        mask: npt.NDArray[np.bool_] = _is_val(
            doc_ids, np.uint64(self.salt), np.uint64(self.threshold)
        )
        return mask


@njit(nogil=True, cache=True)
def _is_val(doc_ids: Any, salt: Any, threshold: Any) -> Any:
    mask = np.empty(len(doc_ids), np.bool_)
    for k in range(len(doc_ids)):
        mask[k] = splitmix64(doc_ids[k] ^ salt) < threshold
    return mask
