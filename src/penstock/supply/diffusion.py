"""Masked diffusion: which tokens of a batch are hidden, and what each is worth in the loss.

In:    rows of token ids, a seed, the number of the batch, which of its rows these are
Out:   the rows with tokens replaced by the mask token, the hidden ones as labels, their weights
Keeps: the noise of a row is a function of (seed, number of the batch, row in the batch): the same
       after a resume, on any number of ranks, from a queue or from a loader
Never: hides padding, asks an RNG that remembers

The loss is the sum of weight times cross entropy over all labels, divided by the tokens of the
batch: an upper bound of the negative log-likelihood, in nats a token. Labels stand where their
tokens stand; nothing is shifted.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.arrays import Floats, Int64s
from penstock.errors import BadConfig
from penstock.options import check_numbers, number, refuse_unknown, whole
from penstock.supply.batch import RowBatch, replaceable
from penstock.tokenize.tokenizer import Tokenizer

Float32s = npt.NDArray[np.float32]
NOISES: Final = ("llada", "linear", "cosine")
_MASKS: Final = ("<|mask|>", "<|mdm_mask|>", "[MASK]", "<mask>")
"""What tokenizers call the mask token."""
_TINY: Final = 1e-6
"""What dLLM adds to a chance before it divides by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """How tokens are hidden, and what guessing them is worth."""

    mask_token_id: int = -1
    """The token that stands for hidden ones. A loader takes its tokenizer's, if it is -1."""
    noise: str = "llada"
    """How the chance to be hidden follows from a row's time t, uniform from 0 to 1, and what a
    hidden token is worth. `llada`: (1 - eps) t + eps, and 1 over that. `linear` and `cosine` are
    those of dLLM: t, and the cosine of what is left of a quarter turn."""
    eps: float = 1e-3
    """The least chance, or for `linear` and `cosine` the least time."""
    mask_probability: float | None = None
    """One chance for all rows, with the weight 1, instead of a time for each."""
    ignore_index: int = -100
    """The label of tokens that are not hidden."""
    stages: Sequence[Mapping[str, Any]] = ()
    """Other times from some batch on: `{"first_batch": 0, "low": 0.0, "high": 0.5}`."""

    def __post_init__(self) -> None:
        check_numbers(self)
        whole("mask_token_id", self.mask_token_id, -1, 1 << 31)
        whole("ignore_index", self.ignore_index, -(1 << 31), 1 << 31)
        if self.noise not in NOISES:
            raise BadConfig(f"noise is {self.noise!r}", do=f"choose from {', '.join(NOISES)}")
        if not 0 < number("eps", self.eps) < 1:
            raise BadConfig(f"eps is {self.eps}", do="choose a share, such as 0.001")
        given = self.mask_probability
        if given is not None and not 0 < number("mask_probability", given) <= 1:
            raise BadConfig(f"mask_probability is {given}", do="choose a share, up to 1")
        if not isinstance(self.stages, Sequence) or isinstance(self.stages, str):
            raise BadConfig(f"stages is {self.stages!r}", do="list stages")
        before = -1
        for stage in self.stages:
            before = _check_stage(stage, before)

    def times(self, batch: int) -> tuple[float, float]:
        """Between which times the rows of a batch are.

        >>> stages = [{"first_batch": 10, "low": 0.0, "high": 0.5}, {"first_batch": 20}]
        >>> [DiffusionConfig(stages=stages).times(n) for n in (0, 10, 20)]
        [(0.0, 1.0), (0.0, 0.5), (0.0, 1.0)]
        """
        found: Mapping[str, Any] = {}
        for stage in self.stages:
            if stage["first_batch"] <= batch:
                found = stage
        return float(found.get("low", 0.0)), float(found.get("high", 1.0))

    def chances(self, t: Floats) -> tuple[Floats, Floats]:
        """The chance to be hidden and the weight of a hidden token, at each time.

        >>> [round(float(one[0]), 6) for one in DiffusionConfig().chances(np.array([0.5]))]
        [0.5005, 1.998002]
        """
        if self.mask_probability is not None:
            return np.full(t.shape, self.mask_probability), np.ones(t.shape)
        if self.noise == "llada":
            chance = (1 - self.eps) * t + self.eps
            return chance, 1 / chance
        if self.noise == "linear":
            return t, 1 / (t + _TINY)
        left = math.pi / 2 * (1 - t)
        chance = np.cos(left)
        return chance, math.pi / 2 * np.sin(left) / (chance + _TINY)


def _check_stage(stage: Any, before: int) -> int:
    """A stage's first batch, if it and its times can be."""
    if not isinstance(stage, Mapping) or "first_batch" not in stage:
        raise BadConfig(
            f"a stage is {stage!r}", do='write {"first_batch": 0, "low": 0.0, "high": 1.0}'
        )
    refuse_unknown(stage, ("first_batch", "low", "high"), "a stage")
    first = whole("first_batch of a stage", stage["first_batch"], 0)
    low = number("low of a stage", stage.get("low", 0.0))
    high = number("high of a stage", stage.get("high", 1.0))
    if not 0 <= low < high <= 1:
        raise BadConfig(f"a stage goes from {low} to {high}", do="choose 0 <= low < high <= 1")
    if first <= before:
        raise BadConfig(
            f"a stage begins with batch {first}, one before it with {before}",
            do="put them in order",
        )
    return first


@dataclass(frozen=True, slots=True)
class Corrupted:
    """Rows with tokens hidden."""

    input_ids: npt.NDArray[Any]
    labels: Int64s
    """The hidden tokens where they stood, `ignore_index` elsewhere."""
    weights: Float32s
    """What each label is worth in the loss; 0 where there is none."""
    t: Floats
    """The time of each row."""


def corrupt(
    ids: npt.NDArray[Any],
    config: DiffusionConfig,
    *,
    seed: int,
    batch: int,
    first_row: int = 0,
    fills: npt.NDArray[Any] | None = None,
    within: npt.NDArray[np.bool_] | None = None,
) -> Corrupted:
    """Hide tokens of rows `first_row` … of a batch; of each row only the first `fills`, and only
    those that are `within` what is trained.

    >>> ids = np.arange(8).reshape(2, 4)
    >>> corrupt(ids, DiffusionConfig(mask_token_id=99), seed=1, batch=0).input_ids.tolist()
    [[0, 1, 99, 99], [99, 99, 99, 99]]
    """
    whole("seed", seed, 0, (1 << 64) - 1)
    whole("batch", batch, 0, (1 << 64) - 1)
    whole("first_row", first_row, 0, 1 << 31)
    if not isinstance(ids, np.ndarray) or ids.ndim != 2 or ids.dtype.kind not in "iu":
        about = f"{ids.dtype} of {ids.ndim}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise BadConfig(
            f"ids are {about}" + " dimensions" * isinstance(ids, np.ndarray),
            do="give rows of token ids: an array of whole numbers of 2 dimensions",
        )
    most = np.iinfo(ids.dtype).max
    if not 0 <= config.mask_token_id <= most:
        raise BadConfig(
            f"mask_token_id is {config.mask_token_id}",
            why=f"hidden tokens need one of 0 to {most:,} to stand for them",
            do="DiffusionConfig(mask_token_id=…); one beyond the vocabulary will do, if the model "
            "has a row for it" + ("" if config.mask_token_id < 0 else ", and ids of a wider type"),
        )
    rows, tokens = ids.shape
    low, high = config.times(batch)
    t = low + (high - low) * _uniform(seed, batch, 1, first_row, rows)
    if config.noise != "llada":  # whose least chance is the same
        t = config.eps + (1 - config.eps) * t
    chance, weight = config.chances(t)
    drawn = _uniform(seed, batch, 0, first_row * tokens, rows * tokens).reshape(rows, tokens)
    hidden = drawn < chance[:, None]
    if fills is not None:
        hidden &= np.arange(tokens) < fills[:, None]
    if within is not None:
        hidden &= within
    return Corrupted(
        np.where(hidden, np.asarray(config.mask_token_id, ids.dtype), ids),
        np.where(hidden, ids, config.ignore_index).astype(np.int64),
        np.where(hidden, weight[:, None], 0).astype(np.float32),
        t,
    )


def _uniform(seed: int, batch: int, stream: int, first: int, count: int) -> Floats:
    """Numbers `first` … of a stream of a batch, each from 0 to 1.

    Philox gives four at a time for each value of its counter, so any of them can be reached.
    """
    skip = first % 4
    key = np.array([seed, batch], np.uint64)
    counter = np.array([first // 4, 0, 0, stream], np.uint64)
    drawn = np.random.Philox(key=key, counter=counter).random_raw(skip + count)
    found: Floats = (drawn[skip:] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


class DiffusionBatch(RowBatch):
    """A batch of which tokens are hidden: `input_ids` holds mask tokens, `labels` what they hide,
    each where it stands, and `loss_weights` what each label is worth."""

    _tensors = (*RowBatch._tensors, "loss_weights")

    @replaceable
    def __init__(self, clean: RowBatch, noise: Corrupted) -> None:
        about = dict(clean.metadata)
        if clean._trained is None:  # nobody knows here how many tokens other ranks hide
            about.pop("num_loss_tokens", None)
        super().__init__(
            noise.input_ids, clean._segments, clean.fills, packed=clean.packed, metadata=about,
            base=clean._base, blocks=clean._blocks,
        )  # fmt: skip
        self.clean_ids = clean.input_ids
        """The tokens before any was hidden."""
        self.labels = noise.labels
        self.loss_mask = noise.weights > 0
        self.loss_weights = noise.weights
        """What each label is worth: the loss is the sum of weight times cross entropy, divided by
        the tokens of the batch, `num_tokens`; of conversations, which hide nothing but what is
        trained, by `num_loss_tokens`."""
        self.times = noise.t
        """The time of each row."""


class Noise:
    """What a loader does to its batches when it is told `objective="diffusion"`."""

    def __init__(
        self, objective: "str | DiffusionConfig", tokenizer: Tokenizer | None, seed: int
    ) -> None:
        config = objective if isinstance(objective, DiffusionConfig) else DiffusionConfig()
        if config.mask_token_id < 0:
            known = {} if tokenizer is None else tokenizer.special_tokens
            found = next((known[name] for name in _MASKS if name in known), None)
            if found is None:
                raise BadConfig(
                    "the tokenizer has no mask token" if tokenizer else "there is no tokenizer",
                    why="hidden tokens need one to stand for them",
                    do="give its number: objective=DiffusionConfig(mask_token_id=…); one beyond "
                    "the vocabulary will do, if the model has a row for it",
                )
            config = dataclasses.replace(config, mask_token_id=found)
        self.config, self._seed = config, seed

    def settings(self) -> dict[str, Any]:
        """All that decides the noise beside the seed, as JSON."""
        stages = [dict(stage) for stage in self.config.stages]
        return {**dataclasses.asdict(self.config), "stages": stages}

    def __call__(self, batch: RowBatch, first_row: int) -> DiffusionBatch:
        """The batch with tokens hidden; its rows are those from `first_row` on of all ranks'."""
        step = batch.metadata["step"]
        noise = corrupt(
            batch.input_ids, self.config, seed=self._seed, batch=step, first_row=first_row,
            fills=batch.fills, within=batch._trained,
        )  # fmt: skip
        return DiffusionBatch(batch, noise)
