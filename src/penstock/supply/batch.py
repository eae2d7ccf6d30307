"""What the trainer gets: rows of token ids, and all that follows from where documents begin.

In:    ids of some rows, the plan's segments of them
Out:   `TrainingBatch`: NumPy arrays, torch tensors on request
Keeps: what is not asked for is not computed; arrays are the batch's own; as a mapping a batch
       holds what a model takes, and nothing else
Never: imports torch unless asked for tensors

Labels stand where their tokens stand (models shift them); -100 is not trained.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bools, Int32s, Int64s
from penstock.kernels import Kernel
from penstock.stream.plan import Rows
from penstock.stream.plan_layout import SEGMENT
from penstock.supply.views import Views, require_torch

if TYPE_CHECKING:
    import torch

IGNORE: Final = -100
"""The label of what is not trained."""


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


@dataclass(repr=False, eq=False)
class TrainingBatch(Views, Mapping[str, Any]):
    """Rows of tokens with their labels. As a mapping it holds what a model takes: `model(**batch)`.

    >>> batch = TrainingBatch(np.array([[5, 6, 0]]), attention_mask=np.array([[1, 1, 0]]))
    >>> batch["labels"].tolist(), sorted(batch)
    ([[-100, 6, -100]], ['attention_mask', 'input_ids', 'labels'])
    """

    input_ids: Any
    """Token ids, rows by tokens."""
    attention_mask: Any = None
    """1 for tokens, 0 for padding; None where there is no padding, or where rows are packed."""
    labels: Any = None
    """Targets, each where its token stands; -100 is not trained. By default the tokens themselves,
    but for the first of each row and padding."""
    loss_mask: Any = None
    """Which labels are trained: by default those that are not -100."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What else is to be known; of our loaders `step`, `first_row`, `rows`: where in the stream
    this is."""

    packed = False
    """Whether a row holds several documents."""
    _tensors: ClassVar[tuple[str, ...]] = ("loss_mask", "position_ids", "cu_seqlens")
    """What becomes tensors beside what a model takes."""
    _others: ClassVar[tuple[str, ...]] = ("metadata", "packed", "max_seqlen")
    """What goes along as it is."""

    def __post_init__(self) -> None:
        if self.labels is None:
            trained = self._held & (self.position_ids > 0)
            self.labels = np.where(trained, self.input_ids, IGNORE).astype(np.int64)
        if self.loss_mask is None:
            self.loss_mask = self.labels != IGNORE

    def __repr__(self) -> str:
        rows, tokens = self.input_ids.shape
        return f"{type(self).__name__}({rows} x {tokens}, step {self.metadata.get('step')})"

    # A mapping of what a model takes

    def __iter__(self) -> Iterator[str]:
        yield "input_ids"
        yield "labels"
        if self.packed:
            yield "position_ids"
        if self.attention_mask is not None:
            yield "attention_mask"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name == one for one in self)

    def __getitem__(self, name: str) -> Any:
        found = None if name.startswith("_") else getattr(self, name, None)
        if found is None:
            raise KeyError(name)
        return found

    # What follows from the fields

    @functools.cached_property
    def fills(self) -> Int32s:  # type: ignore[override]  # one that can be set
        """Tokens of each row; the rest is padding."""
        found: Int32s = self._held.sum(axis=1).astype(np.int32)
        return found

    @property
    def _held(self) -> Bools:
        """Which places hold tokens."""
        if self.attention_mask is None:
            return np.ones(self.input_ids.shape, np.bool_)
        found: Bools = np.asarray(self.attention_mask) != 0
        return found

    @functools.cached_property
    def position_ids(self) -> Int32s:
        """Places of tokens in their documents."""
        return _count_positions(self._held)

    @functools.cached_property
    def cu_seqlens(self) -> Int32s:
        """Where documents and padding begin and end in the rows laid end to end, for attention
        that takes such offsets."""
        return self._find_seqlens()

    def _find_seqlens(self) -> Int32s:
        rows, tokens = self.input_ids.shape
        if self.packed:
            starts = np.flatnonzero(np.asarray(self.position_ids).reshape(-1) == 0)
        else:
            held = self._held
            changes = np.diff(held, axis=1, prepend=~held[:, :1])
            starts = np.flatnonzero(changes.reshape(-1))
        return np.append(starts, rows * tokens).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """The longest document of `cu_seqlens`."""
        return int(np.diff(self.cu_seqlens).max()) if self.input_ids.size else 0

    def to(self, device: Any = "cpu") -> "TorchBatch":
        """The batch as torch tensors: on the CPU the same memory, on a GPU without blocking."""
        require_torch()
        import torch

        def tensor(name: str) -> "torch.Tensor | None":
            array = getattr(self, name)
            return None if array is None else torch.from_numpy(np.ascontiguousarray(array))

        made = TorchBatch({name: tensor(name) for name in self})
        more = [name for name in self._tensors if name not in made]
        made.__dict__.update({name: tensor(name) for name in more})
        made.__dict__.update({name: getattr(self, name) for name in self._others})
        return made if torch.device(device).type == "cpu" else made.pin_memory().to(device)


def _count_positions(held: npt.NDArray[np.bool_]) -> Int32s:
    found: Int32s = np.maximum(held.cumsum(axis=1) - 1, 0).astype(np.int32)
    return found


_in_jax: set[type] = set()
"""Kinds of batches that JAX knows."""


def register_with_jax() -> None:
    """Make every `TrainingBatch` a pytree of JAX's: what `dict(batch)` holds are its leaves.

    Call it once, before batches go through jit or tree functions; `dict(batch)` needs no call.
    Metadata stays behind: it differs from batch to batch, and each would be compiled anew.
    """
    import jax

    def flatten(batch: TrainingBatch) -> tuple[list[Any], tuple[tuple[str, ...], bool]]:
        return [batch[name] for name in batch], (tuple(batch), batch.packed)

    def unflatten_as(
        kind: type[TrainingBatch], about: tuple[tuple[str, ...], bool], leaves: Sequence[Any]
    ) -> TrainingBatch:
        made = object.__new__(kind)  # leaves may be anything, so nothing is computed
        given = {"attention_mask": None, **dict(zip(about[0], leaves, strict=True))}
        made.__dict__.update(given, packed=about[1], metadata={}, _planned=False)
        if hasattr(made.labels, "dtype"):
            made.loss_mask = made.labels != IGNORE
        return made

    kinds = [TrainingBatch]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind not in _in_jax:
            # trees of different kinds do not match, so what comes of a batch is of its own kind
            unflatten = functools.partial(unflatten_as, kind)
            jax.tree_util.register_pytree_node(kind, flatten, unflatten)
            _in_jax.add(kind)


class TorchBatch(dict[str, Any]):
    """A batch as torch tensors: a dict of what a model takes; the rest are attributes.

    `batch["input_ids"]` and `batch.input_ids` are the same.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name == "attention_mask":
            return None
        raise AttributeError(
            f"this batch has no {name!r}; it has {', '.join([*self, *vars(self)])}"
        )

    def to(self, device: Any, *, non_blocking: bool = True) -> "TorchBatch":
        """The same on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "TorchBatch":
        """The same in memory from which a GPU copies; where there is none, as it is."""
        import torch

        if not torch.cuda.is_available():
            return self
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, made: "Callable[[torch.Tensor], torch.Tensor]") -> "TorchBatch":
        import torch

        def one(value: Any) -> Any:
            return made(value) if isinstance(value, torch.Tensor) else value

        found = type(self)({name: one(value) for name, value in self.items()})
        found.__dict__.update({name: one(value) for name, value in self.__dict__.items()})
        return found


class _Origin:
    """The batch that `dataclasses.replace` makes another one of."""

    def __init__(self, batch: "RowBatch") -> None:
        self.batch = batch

    def __deepcopy__(self, memo: Any) -> "_Origin":
        return self


Init = TypeVar("Init", bound="Callable[..., None]")


def replaceable(init: Init) -> Init:
    """Let `__init__` also make what `dataclasses.replace` asks for: another batch, of which only
    some fields differ."""

    @functools.wraps(init)
    def made(self: "RowBatch", *given: Any, origin: _Origin | None = None, **named: Any) -> None:
        if origin is None:
            init(self, *given, **named)
            return
        self.__dict__.update(origin.batch.__dict__)
        for name, value in named.items():
            setattr(self, name, value)

    return made  # type: ignore[return-value]


class RowBatch(TrainingBatch):
    """Rows of a plan; what is not asked for is not computed."""

    @property
    def _origin(self) -> _Origin:
        return _Origin(self)

    origin: Any = _origin
    """What `dataclasses.replace` takes along beside the fields."""
    _others: ClassVar[tuple[str, ...]] = (*TrainingBatch._others, "segments")
    _planned: ClassVar[bool] = True
    """Whether its plan is known: what JAX makes of a batch has none."""

    @replaceable
    def __init__(
        self, input_ids: Int32s, segments: Int32s, fills: Int32s, *, packed: bool,
        metadata: dict[str, Any], base: int = 0, trained: Bools | None = None,
        blocks: bool = False,
    ) -> None:  # fmt: skip
        """`segments` count rows from `base` on. Where not all tokens are, `trained` says which.
        With `blocks` packed rows have an attention mask of blocks."""
        self._trained = trained
        self.input_ids = input_ids
        self.metadata = metadata
        self.packed = packed
        self._segments = segments
        self._base = base
        self._blocks = blocks
        self.fills = fills

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
        if self._trained is not None:
            # neither padding nor what begins a document is among them: 8 us for 16,384 tokens,
            # 80 if these are looked for first
            found = np.full((rows, seq_len), IGNORE, np.int64)
            np.copyto(found, self.input_ids, where=self._trained)
            return found
        found = np.empty((rows, seq_len), np.int64)
        ids = np.ascontiguousarray(self.input_ids).reshape(-1)
        _targets(ids, self.fills, seq_len, self._starts, IGNORE, found.reshape(-1))
        return found

    @functools.cached_property
    def loss_mask(self) -> Bools:
        """Which labels are trained."""
        if self._trained is not None:
            return self._trained
        found: Bools = self.labels != IGNORE
        return found

    @functools.cached_property
    def position_ids(self) -> Int32s:
        """Places of tokens in their documents."""
        if not self._planned:
            return _count_positions(self._held)
        found = np.empty(self.input_ids.shape, np.int32)
        _positions(self._starts, found.size, found.reshape(-1))
        return found

    @functools.cached_property
    def cu_seqlens(self) -> Int32s:
        """Where documents begin and end in the rows laid end to end, for attention that is told."""
        if not self._planned:
            return self._find_seqlens()
        return np.append(self._starts, self.input_ids.size).astype(np.int32)

    @functools.cached_property
    def attention_mask(self) -> npt.NDArray[Any] | None:
        """1 for tokens, 0 for padding. Packed rows have none, since a mask of ones would join their
        documents; with `DocumentConfig(attention_mask="block")`, rows by 1 by tokens by tokens:
        whether a token (third) sees another (fourth), of its own document and not behind it."""
        if not self.packed:
            return (np.arange(self.input_ids.shape[1]) < self.fills[:, None]).astype(np.int64)
        if not self._blocks:
            return None
        begins = np.arange(self.input_ids.shape[1]) - self.position_ids
        found: npt.NDArray[Any] = np.tril(begins[:, :, None] == begins[:, None, :])[:, None]
        return found


dataclass(init=False, repr=False, eq=False)(RowBatch)


class Stack:
    """Batches that were filled together, to be handed out one after the other."""

    def __init__(
        self, ids: Int32s, rows: Rows, first: int, count: int, each: int, *, packed: bool,
        trained: Bools | None = None, about: Sequence[dict[str, Any]] = (),
        masked: Int64s | None = None, blocks: bool = False,
    ) -> None:  # fmt: skip
        """`ids` and `rows` are this rank's: `each` rows of every `count`, from row `first` on.

        `trained` says which tokens are, `masked` how many of each source are not, over all ranks,
        by batch, and `about` what else is told of each batch.
        """
        self.count = count
        self._masked = masked
        self._trained, self._about, self._blocks = trained, about, blocks
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

    @property
    def masked(self) -> Int64s | None:
        """Tokens of each source that are taken out of the loss, of the batch handed out last."""
        found: Int64s | None = None
        if self._masked is not None:
            found = self._masked[self._at - 1]
        return found

    def pop(self, step: int) -> RowBatch:
        """The next batch."""
        k, each = self._at, self._each
        self._at += 1
        a, b = k * each, (k + 1) * each
        return RowBatch(
            self._ids[a:b],
            self._rows.segments[self._places[k] : self._places[k + 1]],
            self._rows.fills[a:b],
            packed=self._packed,
            metadata={
                "step": step, "first_row": self._first + k * self.count, "rows": self.count,
                **(self._about[k] if self._about else {}),
            },
            base=a, trained=None if self._trained is None else self._trained[a:b],
            blocks=self._blocks,
        )  # fmt: skip
