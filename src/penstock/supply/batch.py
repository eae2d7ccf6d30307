"""What the trainer gets: rows of token ids, and all that follows from where documents begin.

In:    ids of some rows, the plan's segments of them
Out:   `TrainingBatch`: NumPy arrays, torch tensors on request
Keeps: what is not asked for is not computed; arrays are the batch's own
Never: imports torch unless asked for tensors

Labels stand where their tokens stand (models shift them); -100 is not trained.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from penstock.errors import BadConfig
from penstock.kernels import Kernel
from penstock.stream.plan import Rows
from penstock.stream.plan_layout import SEGMENT
from penstock.supply.views import Views

if TYPE_CHECKING:
    import torch

IGNORE: Final = -100
"""The label of what is not trained."""

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_boundaries = Kernel(
    "penstock.supply.fetch_kernel",
    "boundaries",
    "int64(int32[::1], int64, int64, int64, int64, int64, int64[::1])",
)
_positions = Kernel(
    "penstock.supply.fetch_kernel", "positions", "void(int64[::1], int64, int32[::1])"
)
_targets = Kernel(
    "penstock.supply.fetch_kernel",
    "targets",
    "void(int32[::1], int32[::1], int64, int64[::1], int64, int64[::1])",
)


class TrainingBatch(Views):
    """Rows of tokens with their labels; packed ones say where documents begin."""

    def __init__(
        self, input_ids: Int32s, segments: Int32s, fills: Int32s, *, packed: bool,
        metadata: dict[str, Any], base: int = 0, trained: npt.NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        """`segments` count rows from `base` on. Where not all tokens are, `trained` says which."""
        self._trained = trained
        self.input_ids = input_ids
        """Token ids, rows by tokens."""
        self.metadata = metadata
        """`step`, `first_row`, `rows`: where in the stream this is."""
        self.packed = packed
        """Whether a row holds several documents."""
        self._segments = segments
        self._base = base
        self.fills = fills
        """Tokens of each row; the rest is padding."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __repr__(self) -> str:
        rows, tokens = self.input_ids.shape
        return f"TrainingBatch({rows} x {tokens}, step {self.metadata.get('step')})"

    @functools.cached_property
    def segments(self) -> Int32s:
        """The plan of these rows: row, source, pass, shard, row in the shard, first token,
        tokens."""
        found = self._segments.copy()
        found[:, 0] -= self._base
        return found

    @functools.cached_property
    def _starts(self) -> Int64s:
        """Where documents and padding begin in the rows laid end to end."""
        rows, seq_len = self.input_ids.shape
        found = np.zeros(len(self._segments) + rows, np.int64)
        flat = self._segments.reshape(-1)
        count = _boundaries(flat, 0, len(flat) // SEGMENT, self._base, rows, seq_len, found)
        return found[:count]

    @functools.cached_property
    def labels(self) -> Int64s:
        """Targets, each where its token stands: -100 for padding and for what begins a document."""
        rows, seq_len = self.input_ids.shape
        found = np.empty((rows, seq_len), np.int64)
        ids = np.ascontiguousarray(self.input_ids).reshape(-1)
        _targets(ids, self.fills, seq_len, self._starts, IGNORE, found.reshape(-1))
        if self._trained is not None:
            found[~self._trained] = IGNORE
        return found

    @functools.cached_property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """Which labels are trained."""
        if self._trained is not None:
            return self._trained
        found: npt.NDArray[np.bool_] = self.labels != IGNORE
        return found

    @functools.cached_property
    def position_ids(self) -> Int32s:
        """Places of tokens in their documents."""
        found = np.empty(self.input_ids.shape, np.int32)
        _positions(self._starts, found.size, found.reshape(-1))
        return found

    @functools.cached_property
    def cu_seqlens(self) -> Int32s:
        """Where documents begin and end in the rows laid end to end, for attention that is told."""
        return np.append(self._starts, self.input_ids.size).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """The longest document of `cu_seqlens`."""
        return int(np.diff(self.cu_seqlens).max()) if self.input_ids.size else 0

    @functools.cached_property
    def attention_mask(self) -> npt.NDArray[np.int64] | None:
        """1 for tokens, 0 for padding; None for packed rows, where position_ids and cu_seqlens
        keep documents apart and a mask of ones would join them."""
        if self.packed:
            return None
        return (np.arange(self.input_ids.shape[1]) < self.fills[:, None]).astype(np.int64)

    def to(self, device: Any = "cpu") -> "TorchBatch":
        """The batch as torch tensors: on the CPU the same memory, on a GPU without blocking."""
        return TorchBatch(self, device)


class Stack:
    """Batches that were filled together, to be handed out one after the other."""

    def __init__(
        self, ids: Int32s, rows: Rows, first: int, count: int, each: int, *, packed: bool,
        trained: npt.NDArray[np.bool_] | None = None, about: Sequence[dict[str, Any]] = (),
    ) -> None:  # fmt: skip
        """`ids` and `rows` are this rank's: `each` rows of every `count`, from row `first` on.

        `trained` says which tokens are, and `about` what else is told of each batch.
        """
        self.count = count
        self._trained, self._about = trained, about
        self._ids, self._rows, self._first, self._each, self._packed = (
            ids,
            rows,
            first,
            each,
            packed,
        )
        self._at = 0
        batches = len(rows.fills) // each
        ends = np.arange(batches + 1, dtype=np.int32) * np.int32(each)
        self._places: list[int] = np.searchsorted(rows.segments[:, 0], ends).tolist()

    @property
    def is_empty(self) -> bool:
        """Whether all were handed out."""
        return self._at == len(self._places) - 1

    def pop(self, step: int) -> TrainingBatch:
        """The next batch."""
        k, each = self._at, self._each
        self._at += 1
        a, b = k * each, (k + 1) * each
        return TrainingBatch(
            self._ids[a:b],
            self._rows.segments[self._places[k] : self._places[k + 1]],
            self._rows.fills[a:b],
            packed=self._packed,
            metadata={
                "step": step, "first_row": self._first + k * self.count, "rows": self.count,
                **(self._about[k] if self._about else {}),
            },
            base=a, trained=None if self._trained is None else self._trained[a:b],
        )  # fmt: skip


class TorchBatch:
    """A `TrainingBatch` as tensors on a device."""

    def __init__(self, batch: TrainingBatch, device: Any) -> None:
        try:
            import torch
        except ImportError:
            raise BadConfig(
                "torch is not installed", do='pip install "penstock[torch]", or use the arrays'
            ) from None
        target = torch.device(device)

        def move(array: Any) -> "torch.Tensor":
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            if target.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(target, non_blocking=True)

        self._moved = move
        self.input_ids = move(batch.input_ids)
        self.labels = move(batch.labels)
        self.loss_mask = move(batch.loss_mask)
        self.position_ids = move(batch.position_ids)
        self.cu_seqlens = move(batch.cu_seqlens)
        mask = batch.attention_mask
        self.attention_mask = None if mask is None else move(mask)
        self.max_seqlen = batch.max_seqlen
        self.metadata = batch.metadata
        self.segments = batch.segments
        self.packed = batch.packed
