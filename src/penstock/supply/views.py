"""A batch as the trainers of others take it: each with its own idea of labels and padding.

In:    a batch: ids, labels where their tokens stand (-100 is not trained), where documents begin
Out:   dicts of tensors for TRL and verl, pairs for nanochat, arrays without padding
Keeps: documents of packed rows apart: no view has a mask of ones over several of them, and the
       first token of a document is never a target
Never: imports torch unless asked for tensors

    trl        labels unshifted, -100        packed: one row of all documents, position_ids
    verl       loss_mask unshifted           one document a row, padded on the right
    nanochat   targets shifted, -1           rows as they are, one token shorter
"""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int32s, Int64s
from penstock.errors import BadConfig

if TYPE_CHECKING:
    import torch

_IGNORE: Final = -100
NANOCHAT_IGNORE: Final = -1


class Views:
    """What every batch can be seen as."""

    if TYPE_CHECKING:
        input_ids: Any
        labels: Any
        loss_mask: Any
        position_ids: Any
        cu_seqlens: Any
        attention_mask: Any
        fills: Int32s
        packed: bool
        metadata: Any

    @property
    def num_loss_tokens(self) -> int:
        """Tokens of the batch that are trained, over all ranks: what a sum of losses is divided
        by."""
        told = self.metadata.get("num_loss_tokens")
        if told is None:
            raise BadConfig(
                "this batch does not say how many tokens all ranks train",
                why="no loader made it, its objective hides tokens at random, or its plan has "
                "lanes, and a rank knows its own alone",
                do="add up loss_mask over the ranks",
            )
        return int(told)

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch without padding, over all ranks."""
        told = self.metadata.get("num_tokens")
        if told is None:
            raise BadConfig(
                "this batch does not say how many tokens all ranks have",
                why="no loader made it, or its plan has lanes, and a rank knows its own alone",
                do="add up fills over the ranks",
            )
        return int(told)

    def shifted(self, ignore: int = _IGNORE) -> tuple[Int64s, Int64s]:
        """Inputs, and the target of each: the next token, or `ignore`; a token shorter than rows.

        >>> from penstock.supply.batch import RowBatch
        >>> ids = np.array([[5, 6, 7, 0]], np.int32)
        >>> segments = np.array([[0, 0, 0, 0, 0, 0, 3]], np.int32)
        >>> batch = RowBatch(ids, segments, np.array([3], np.int32), packed=True, metadata={})
        >>> [part.tolist() for part in batch.shifted()]
        [[[5, 6, 7]], [[6, 7, -100]]]
        """
        targets = self.labels[:, 1:]
        if ignore != _IGNORE:
            targets = np.where(targets == _IGNORE, np.int64(ignore), targets)
        return self.input_ids[:, :-1].astype(np.int64), np.ascontiguousarray(targets, np.int64)

    def varlen(self) -> dict[str, Any]:
        """All documents end to end without padding, for attention that is told where they begin."""
        keep = np.arange(self.input_ids.shape[1]) < self.fills[:, None]
        starts = self.position_ids[keep] == 0
        count = int(keep.sum())
        ends = np.append(np.flatnonzero(starts), count).astype(np.int32)
        return {
            "input_ids": self.input_ids[keep].astype(np.int64),
            "labels": self.labels[keep],
            "position_ids": self.position_ids[keep].astype(np.int64),
            "cu_seqlens": ends,
            "max_seqlen": int(np.diff(ends).max()) if count else 0,
        }

    def to_trl(self) -> dict[str, Any]:
        """As the collator of TRL's SFTTrainer gives it: packed rows without padding in one row,
        kept apart by position_ids and cu_seq_lens; padded rows with their attention_mask."""
        if not self.packed:
            assert self.attention_mask is not None
            return _tensors(
                {"input_ids": self.input_ids, "labels": self.labels,
                 "attention_mask": self.attention_mask}
            )  # fmt: skip
        flat = self.varlen()
        ends, longest = flat["cu_seqlens"], flat["max_seqlen"]
        found: dict[str, Any] = _tensors(
            {name: flat[name][None] for name in ("input_ids", "labels", "position_ids")}
        )
        number = np.repeat(np.arange(len(ends) - 1, dtype=np.int32), np.diff(ends))
        found["cu_seq_lens_q"] = found["cu_seq_lens_k"] = _tensors({"": ends}, np.int32)[""]
        found["max_length_q"] = found["max_length_k"] = longest
        found["seq_idx"] = _tensors({"": number[None]}, np.int32)[""]
        return found

    def to_verl(self, pad: int = 0) -> dict[str, "torch.Tensor"]:
        """As verl's MultiTurnSFTDataset gives it, collated: a document a row, loss_mask where the
        tokens stand."""
        flat = self.varlen()
        ends = flat["cu_seqlens"].tolist()
        lengths = np.diff(ends)
        within = np.arange(max(1, flat["max_seqlen"])) < lengths[:, None]
        ids = np.full(within.shape, pad, np.int64)
        mask, places = np.zeros(within.shape, np.int64), np.zeros(within.shape, np.int64)
        ids[within] = flat["input_ids"]
        mask[within] = flat["labels"] != _IGNORE
        places[within] = flat["position_ids"]
        return _tensors(
            {"input_ids": ids, "attention_mask": within.astype(np.int64), "position_ids": places,
             "loss_mask": mask}
        )  # fmt: skip

    def to_nanochat(self) -> tuple["torch.Tensor", "torch.Tensor"]:
        """As nanochat's loaders give it: inputs and targets, where -1 is not trained."""
        inputs, targets = self.shifted(NANOCHAT_IGNORE)
        found = _tensors({"inputs": inputs, "targets": targets})
        return found["inputs"], found["targets"]


def require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise BadConfig(
            "torch is not installed", do='pip install "penstock[torch]", or use the arrays'
        ) from None


def _tensors(
    arrays: dict[str, npt.NDArray[Any]], kind: npt.DTypeLike = np.int64
) -> dict[str, "torch.Tensor"]:
    """Tensors of 64 bits, which is what models take ids as, unless they are of another kind."""
    require_torch()
    import torch

    return {
        name: torch.from_numpy(np.ascontiguousarray(array, kind)) for name, array in arrays.items()
    }
