"""Batches that a trainer holds stay as they were, in whatever form it holds them."""

import gc
import importlib.util
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import freeze_heap
from penstock import PretrainDataLoader
from penstock.supply import pretrain as loader_module

from .datasets import made_documents
from .memory_source import MemorySource

ROWS, TOKENS = 4, 32


def _in_a_cycle(array: Any) -> Any:
    ring: list[Any] = [array]
    ring.append(ring)
    return ring


# how a trainer may hold a batch, and the tokens of its first row in that form
FORMS: Final[dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "batch": (lambda batch: batch, lambda kept: kept.input_ids[0]),
    "array": (lambda batch: batch.input_ids, lambda kept: kept[0]),
    "row": (lambda batch: batch.input_ids[0], lambda kept: kept),
    "view of a view": (lambda batch: batch.input_ids[::2][:1].reshape(-1), lambda kept: kept),
    "other type": (lambda batch: batch.input_ids.view(np.uint8), lambda kept: kept.view("i4")[0]),
    "transposed": (lambda batch: batch.input_ids.T, lambda kept: kept[:, 0]),
    "broadcast": (lambda batch: np.broadcast_to(batch.input_ids[0], (2, TOKENS)), lambda a: a[1]),
    "strided": (
        lambda batch: np.lib.stride_tricks.sliding_window_view(batch.input_ids[0], TOKENS),
        lambda kept: kept[0],
    ),
    "cycle": (lambda batch: _in_a_cycle(batch.input_ids), lambda kept: kept[0][0]),
    "memoryview": (lambda batch: memoryview(batch.input_ids), lambda kept: np.asarray(kept)[0]),
    "memoryview of one row": (lambda batch: memoryview(batch.input_ids)[:1], lambda m: m.tolist()),
    "iterator": (lambda batch: iter(batch.input_ids), lambda kept: next(kept)),
    "flat": (lambda batch: batch.input_ids.flat, lambda kept: kept[:TOKENS]),
    "pickled": (
        lambda batch: pickle.dumps(batch.input_ids, protocol=5),
        lambda kept: pickle.loads(kept)[0],
    ),
    "pickle's buffer": (
        lambda batch: pickle.PickleBuffer(batch.input_ids),
        lambda kept: np.frombuffer(kept.raw(), np.int32)[:TOKENS],
    ),
    "dlpack": (lambda batch: np.from_dlpack(batch.input_ids), lambda kept: kept[0]),
    "arrow": (lambda batch: pa.py_buffer(batch.input_ids), lambda kept: np.frombuffer(kept, "i4")),
    "ctypes": (
        lambda batch: np.ctypeslib.as_ctypes(batch.input_ids),
        lambda kept: np.ctypeslib.as_array(kept)[0],
    ),
    "subclass": (lambda batch: batch.input_ids.view(np.ma.MaskedArray), lambda kept: kept[0]),
}
if importlib.util.find_spec("torch"):
    FORMS["tensor"] = (lambda batch: _torch().from_numpy(batch.input_ids), lambda kept: kept[0])
    FORMS["part of a tensor"] = (
        lambda batch: _torch().from_numpy(batch.input_ids).reshape(-1)[:TOKENS].detach(),
        lambda kept: kept,
    )
    FORMS["tensor by dlpack"] = (
        lambda batch: _torch().from_dlpack(batch.input_ids),
        lambda kept: kept[0],
    )
    FORMS["torch batch"] = (lambda batch: batch.to("cpu"), lambda kept: kept.input_ids[0])


def _torch() -> Any:
    import torch

    return torch


def same(form: str, kept: Any, true: Any) -> bool:
    found = np.asarray(FORMS[form][1](kept)).reshape(-1)[:TOKENS]
    return bool((found == true).all())


RNG: Final = np.random.default_rng(1)
SHARDS: Final = [made_documents(RNG, 60, 40, first=100 * k) for k in range(5)]


@pytest.fixture(autouse=True, scope="module")
def young_heap() -> None:
    """What tests before have left is not walked again by each `gc.collect()`."""
    if "tensor" in FORMS:
        _torch()
    freeze_heap()


@pytest.fixture(autouse=True, scope="module", params=[1, 2], ids=["alone", "pairs"])
def batches_filled_together(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory is lent for all batches that are filled together."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loader_module, "STACK_ROWS", request.param * ROWS)
        yield


def open_loader() -> PretrainDataLoader:
    source = MemorySource("made", SHARDS, None, [1])
    return PretrainDataLoader({"made": source}, chunk_size=TOKENS, batch_size=ROWS, epochs=None)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_held_is_not_overwritten(form: str) -> None:
    """All that was handed out is held in one form, and nothing else of it."""
    with open_loader() as loader:
        iterator = iter(loader)
        held = []
        for _ in range(12):
            batch = next(iterator)
            true = batch.input_ids[0].copy()
            held.append((FORMS[form][0](batch), true))
            del batch
    del iterator, loader
    gc.collect()
    assert all(same(form, kept, true) for kept, true in held)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), share=st.sampled_from([0.1, 0.5, 0.9]))
def test_some_are_held_and_others_are_not(seed: int, share: float) -> None:
    """Held in any form, dropped at any moment, here or in another thread."""
    rng = random.Random(seed)
    loader: PretrainDataLoader | None = open_loader()
    iterator: Any = iter(loader)  # type: ignore[arg-type]
    held: list[tuple[str, Any, Any]] = []
    for _ in range(60):
        batch = next(iterator)
        true = batch.input_ids[0].copy()
        if rng.random() < share:
            form = rng.choice(list(FORMS))
            held.append((form, FORMS[form][0](batch), true))
        del batch
        while held and rng.random() < 0.4:
            dropped = [held.pop(rng.randrange(len(held)))]
            if rng.random() < 0.2:
                thread = threading.Thread(target=dropped.clear)
                thread.start()
                thread.join()
    if rng.random() < 0.5:
        loader.close()  # type: ignore[union-attr]
    del iterator
    loader = None
    gc.collect()
    for form, kept, true in held:
        assert same(form, kept, true), form


def test_an_array_that_comes_back_from_its_end_is_whole() -> None:
    """The collector calls __del__ of what nobody reaches; it may be reached again after that."""
    saved: list[Any] = []

    class Keeper:
        def __init__(self, array: Any) -> None:
            self.array, self.ring = array, self

        def __del__(self) -> None:
            saved.append(self.array)

    with open_loader() as loader:
        iterator = iter(loader)
        true = []
        for _ in range(6):
            batch = next(iterator)
            true.append(batch.input_ids.copy())
            Keeper(batch.input_ids)
            del batch
            gc.collect()
        for _ in range(6):
            next(iterator)
    assert all((kept == array).all() for kept, array in zip(saved, true, strict=True))


def test_memory_that_nobody_holds_is_used_again() -> None:
    """Pages that are new to the process come at half the speed of filling them."""
    with open_loader() as loader:
        seen = {batch.input_ids.ctypes.data for batch, _ in zip(loader, range(60), strict=False)}
    assert len(seen) <= 6  # three stacks of two batches


def test_threads_that_drop_batches_while_others_are_filled() -> None:
    wrong = []
    with open_loader() as loader:

        def train() -> None:
            for _ in range(150):
                batch = loader.get_batch(ROWS)
                kept, true = batch.input_ids[1:], batch.input_ids[1:].copy()
                del batch
                for _ in range(3):
                    if not (kept == true).all():
                        wrong.append(true)

        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
