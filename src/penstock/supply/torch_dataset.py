"""The batches of a loader as a torch dataset, for DataLoaders and trainers of others.

In:    a loader
Out:   batches of tensors, one after the other, for torch.utils.data.DataLoader with batch_size=None
Keeps: the loader's batches in its order, whatever the number of workers; each iteration is the next
       epoch; states of workers are each worker's own
Never: reads a batch for nobody: a worker passes over those of the others in the plan

    workers of a pass: batch n of the pass is made by worker n modulo their number
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.errors import BadConfig, PenstockError, StateMismatch
from penstock.supply.batch import TorchBatch, TrainingBatch
from penstock.supply.engine import KEPT_MARKS
from penstock.supply.mixture import MixedDataLoader
from penstock.supply.pretrain import DataLoader, RowLoader

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise BadConfig(
        "torch is not installed, and TorchDataset is a dataset of torch's",
        do='pip install "penstock[torch]", or iterate the loader itself',
    ) from None

_PASS, _ROUND, _NEXT, _ASKED, _LOADS, _FIRST = range(6)
_WORKERS: Final = 4096
_AS_IT_STANDS: Final = -1
AT_ENDS: Final = ("stop", "next_epoch")
Skipping = RowLoader | MixedDataLoader
"""Loaders that pass over batches in their plan."""


class TorchDataset(IterableDataset[TorchBatch]):
    """The batches of a loader, as tensors: docs/trainers.md.

    Give it to `torch.utils.data.DataLoader(…, batch_size=None)`, with any number of workers, or to
    torchdata's StatefulDataLoader. `Trainer`, Lightning and Accelerate take it too.
    """

    def __init__(self, loader: DataLoader, *, at_end: str = "stop") -> None:
        """`at_end`: what the first iteration gives after a state was loaded that was taken right
        after the last batch of an epoch. `stop`: nothing, it ends that epoch, as loops over
        StatefulDataLoader want. `next_epoch`: the next one, as Lightning wants."""
        super().__init__()
        if at_end not in AT_ENDS:
            raise BadConfig(f"at_end is {at_end!r}", do=f"choose from {', '.join(AT_ENDS)}")
        self.loader, self._at_end = loader, at_end
        self._shared = torch.zeros(_FIRST + _WORKERS, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        """What workers tell each other: which pass this is, by the seed that torch gives it; its
        round; that of the next; the one that was asked for, plus one; then of each worker, the
        round that it has finished, plus one."""
        self._shared[_NEXT] = _AS_IT_STANDS
        self._loads = 0
        self._epoch: int | None = None
        """The epoch that was asked for, where no state says it."""
        self._base = 0
        """The first step of the pass: batches are dealt out from there on."""
        self._share: tuple[int, int] | None = None
        """This worker, and how many there are, once the pass has begun."""

    @staticmethod
    def collate(batches: list[TorchBatch]) -> TorchBatch:
        """For trainers that collate: the one batch of a list, as it is."""
        (batch,) = batches
        return batch

    def __len__(self) -> int:
        """Batches of an iteration; a TypeError where nobody can know it yet."""
        known = self.loader.get_num_batches()
        if not getattr(known, "final", True):
            raise TypeError("the data still grows, or never ends: its batches cannot be counted")
        return int(known)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its first batch on. Where a state was loaded, the
        state says what comes, and this is not heard: frameworks count from their own start."""
        if epoch < 0:
            raise BadConfig(f"epoch is {epoch}", do="choose 0 or more")
        if not self._loads:
            self._epoch = epoch
            self._shared[_ASKED] = epoch + 1

    def __iter__(self) -> Iterator[TorchBatch]:
        info = get_worker_info()
        if info is None:
            return self._of_process()
        try:
            # now, not with the first batch: a state may be asked for before that
            return self._of_worker(*self._began(info.id, info.num_workers, info.seed - info.id))
        except PenstockError as error:
            return _raising(error)

    def _of_process(self) -> Iterator[TorchBatch]:
        loader, epoch, self._epoch = self.loader, self._epoch, None
        if epoch is not None and isinstance(loader, Skipping):
            loader.go_to_epoch(epoch)
        any_came = False
        for batch in loader:
            any_came = True
            yield batch.to()
        if not any_came and self._at_end == "next_epoch" and self._loads:
            for batch in loader:
                yield batch.to()

    def _began(self, worker: int, workers: int, told: int) -> tuple[Skipping, int, int]:
        """Go to where a worker begins."""
        loader = self.loader
        if not isinstance(loader, Skipping) or not loader.can_skip:
            raise BadConfig(
                f"{type(loader).__name__} does not work in workers of a DataLoader",
                why="its batches depend on what the trainer says meanwhile",
                do="give the DataLoader num_workers=0",
            )
        if workers > _WORKERS:
            raise BadConfig(f"num_workers is {workers}", do=f"choose up to {_WORKERS}")
        if int(self._shared[_LOADS]) != self._loads:
            raise BadConfig(
                "a state was loaded while workers of an earlier pass were there",
                do="make a new DataLoader after load_state_dict, or one without persistent_workers",
            )
        if self._share is None or loader.is_over:  # not where this worker's own state stands
            self._begin(loader, worker, told)
            self._base = loader.step
        self._share = worker, workers
        return loader, worker, workers

    def _of_worker(self, loader: Skipping, worker: int, workers: int) -> Iterator[TorchBatch]:
        batches: Iterator[TrainingBatch] = loader.get_iterator(together=workers == 1, goes_on=True)
        while True:
            loader.skip((worker - (loader.step - self._base)) % workers, bring=True)
            batch = next(batches, None)
            if batch is None:
                break
            yield batch.to()
        self._shared[_FIRST + worker] = loader.epoch + 1
        self._shared[_NEXT], self._shared[_ASKED] = loader.epoch + 1, 0

    def _begin(self, loader: Skipping, worker: int, told: int) -> None:
        """Go to the first batch of the pass: the same for all workers, whenever they start."""
        shared = self._shared
        is_new = int(shared[_PASS]) != told or (
            0 < int(shared[_FIRST + worker]) == int(shared[_ROUND]) + 1
        )
        asked = int(shared[_ASKED]) - 1
        if is_new:
            shared[_ROUND], shared[_PASS] = asked if asked >= 0 else int(shared[_NEXT]), told
        epoch = int(shared[_ROUND])
        if epoch == _AS_IT_STANDS:
            shared[_ROUND] = loader.epoch + loader.is_over
        elif asked >= 0 or epoch != loader.epoch + loader.is_over:
            loader.go_to_epoch(epoch)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where the loader stands. `step`: after so many batches, whatever was fetched ahead; with
        workers that is the only way to ask from outside of them."""
        loader = self.loader
        if get_worker_info() is not None:
            worker, workers = self._share or (0, 0)
            state = loader.state_dict()
            return {"loader": state, "worker": worker, "workers": workers, "base": self._base}
        if step is None and int(self._shared[_PASS]):
            raise BadConfig(
                "workers have read batches, and it is not known here how many were trained",
                why="the loader of this process stands where they began",
                do="give the number of batches since the run began: state_dict(step=n)",
            )
        if step is not None and isinstance(loader, Skipping):
            self._follow(loader, step)
        return loader.state_dict() if step is None else loader.state_dict(step)

    @staticmethod
    def _follow(loader: Skipping, step: int) -> None:
        """Go where a trainer is whose batches were read by workers."""
        while loader.step < step:
            before = loader.step
            loader.skip(max(1, step - before - KEPT_MARKS))
            if loader.step == before:  # the end of an epoch
                loader.begin_epoch()
                loader.skip(1)
                if loader.step == before:
                    return

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken: one of this dataset, of its loader, or of its worker."""
        info = get_worker_info()
        told = state.get("loader") if "workers" in state else state
        if not isinstance(told, Mapping):
            raise StateMismatch(
                "this is not a state of a TorchDataset or its loader",
                do="give load_state_dict what state_dict gave",
            )
        self.loader.load_state_dict(told)
        self._epoch = None
        if info is None:
            if told is not state:
                raise StateMismatch(
                    "this is the state of one worker of several",
                    do="let the StatefulDataLoader that made it load it, with as many workers",
                )
            self._loads += 1
            self._shared[_LOADS], self._shared[_NEXT] = self._loads, _AS_IT_STANDS
            self._shared[_PASS] = 0
            self._shared[_ASKED] = 0
            return
        if told is state:
            return  # the pass begins there, for all workers
        if state["workers"] not in (0, info.num_workers):
            raise StateMismatch(
                f"the state is of {state['workers']} workers, and there are {info.num_workers}",
                do="resume with as many workers as the state was made with",
            )
        if state["workers"]:
            self._share, self._base = (info.id, info.num_workers), state["base"]
        if self.loader.step and isinstance(self.loader, Skipping) and self.loader.is_over:
            self._shared[_NEXT] = self.loader.epoch + 1


def _raising(error: PenstockError) -> Iterator[TorchBatch]:
    """Fails at the first batch: a worker that persists and fails before that just exits."""
    raise error
    yield
