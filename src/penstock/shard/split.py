"""Choose which source documents are set aside for validation.

In:    doc_id (a hash of the source document), the dataset's seed and fraction
Out:   train or val; depends on nothing else, so every part of a file is on the same side
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.kernels import Kernel

_mark_val = Kernel(
    "penstock.shard.columns_kernel",
    "mark_val",
    "void(uint64[::1], uint64, uint64, uint8[::1])",
)


@dataclass(frozen=True, slots=True)
class Split:
    """The rule as two words, for kernels: val is where splitmix64(doc_id ^ salt) < threshold."""

    salt: int
    threshold: int

    @classmethod
    def of(cls, seed: int, val_fraction: float) -> "Split":
        return cls(
            salt=int.from_bytes(hashlib.sha256(b"val %d" % seed).digest()[:8], "little"),
            threshold=min(int(val_fraction * 2.0**64), 2**64 - 1),
        )

    def is_val(self, doc_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of these documents are for validation."""
        mask = np.empty(len(doc_ids), np.uint8)
        _mark_val(doc_ids, self.salt, self.threshold, mask)
        return mask.view(np.bool_)
