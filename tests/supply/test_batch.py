"""What a batch is to those who take it: a dataclass, a mapping, tensors, a pytree."""

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import DataLoader, DocumentConfig, PretrainDataLoader, TrainingBatch
from penstock.errors import BadConfig
from penstock.rollout.batch import RolloutBatch
from penstock.supply.batch import RowBatch
from penstock.supply.diffusion import Corrupted, DiffusionBatch

from .datasets import made_dataset


def packed(**options: Any) -> RowBatch:
    """A row of two documents and padding."""
    ids = np.array([[5, 6, 7, 8, 9, 0]], np.int32)
    segments = np.array([[0, 0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 1, 0, 2]], np.int32)
    fills = np.array([5], np.int32)
    return RowBatch(ids, segments, fills, packed=True, metadata={"step": 4}, **options)


def test_a_batch_of_the_five_documented_fields() -> None:
    names = ["input_ids", "attention_mask", "labels", "loss_mask", "metadata"]
    assert [field.name for field in dataclasses.fields(TrainingBatch)] == names
    ids, mask = np.array([[1, 2, 3], [4, 5, 0]]), np.array([[1, 1, 1], [1, 1, 0]])
    batch = TrainingBatch(ids, mask, ids, mask, {"rewards": [1.0]})
    assert batch.labels is ids
    assert batch.fills.tolist() == [3, 2]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert batch.max_seqlen == 3
    assert [part.tolist() for part in batch.shifted()] == [[[1, 2], [4, 5]], [[2, 3], [5, 0]]]
    assert dataclasses.replace(batch, metadata={}).metadata == {}


def test_labels_are_the_tokens_by_default() -> None:
    batch = TrainingBatch(np.array([[1, 2, 3], [4, 5, 0]]), np.array([[1, 1, 1], [1, 1, 0]]))
    assert batch.labels.tolist() == [[-100, 2, 3], [-100, 5, -100]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False, True, False]]


def test_padding_on_the_left() -> None:
    batch = TrainingBatch(np.array([[0, 5, 6, 7]]), attention_mask=np.array([[0, 1, 1, 1]]))
    assert batch.labels.tolist() == [[-100, -100, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 1, 4]


def test_a_mapping_of_what_a_model_takes() -> None:
    def model(**inputs: Any) -> dict[str, Any]:
        return inputs

    batch = packed()
    assert sorted(model(**batch)) == sorted(batch) == ["input_ids", "labels", "position_ids"]
    assert len(batch) == 3
    assert batch["loss_mask"].tolist() == [[False, True, True, False, True, False]]
    assert batch["metadata"] == {"step": 4}
    for missing in ("attention_mask", "_segments", "nonsense"):
        assert missing not in batch
        with pytest.raises(KeyError, match=missing):
            batch[missing]


def test_a_mask_of_blocks(tmp_path: Path) -> None:
    (mask,) = packed(blocks=True)["attention_mask"][:, 0].astype(int).tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    with pytest.raises(BadConfig, match="attention_mask is 'ones'"):
        DocumentConfig(attention_mask="ones")
    documents = DocumentConfig(attention_mask="block")
    made_dataset(tmp_path / "d", shards=1, rows=20)
    batch = next(iter(PretrainDataLoader(str(tmp_path / "d"), chunk_size=8, documents=documents)))
    assert batch["attention_mask"].shape == (16, 1, 8, 8)


@pytest.mark.torch
def test_tensors_are_a_dict_with_attributes() -> None:
    import torch

    batch = packed().to()
    assert type(dict(**batch)) is dict
    assert sorted(batch) == ["input_ids", "labels", "position_ids"]
    assert batch.input_ids is batch["input_ids"]
    assert batch.attention_mask is None
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert batch.metadata == {"step": 4}
    moved = batch.to("meta")
    assert {value.device.type for value in moved.values()} == {"meta"}
    assert moved.loss_mask.device.type == "meta"
    assert moved.metadata == {"step": 4}
    assert batch.pin_memory().input_ids.tolist() == batch.input_ids.tolist()
    # as frameworks copy mappings
    assert type(batch)({name: value + 1 for name, value in batch.items()}).input_ids[0, 0] == 6
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again.labels, batch.labels)
    assert again.metadata == {"step": 4}
    with pytest.raises(AttributeError, match="no 'nonsense'; it has input_ids, labels"):
        batch.nonsense  # noqa: B018


JAX = """
import jax, numpy as np
from penstock import TrainingBatch, register_with_jax

register_with_jax()
calls = []

@jax.jit
def total(batch):
    calls.append(1)
    return batch["labels"].sum() + batch.position_ids.sum()

for step in range(3):
    batch = TrainingBatch(np.array([[5, 6, 7]]), metadata={"step": step})
    assert int(total(batch)) == 6 + 7 - 100 + 3
assert len(calls) == 1, "metadata is no part of what is compiled"
assert sorted(jax.tree_util.tree_map(np.shape, batch)) == sorted(batch)

from penstock.supply.batch import RowBatch

segments = np.array([[0, 0, 0, 0, 0, 0, 3]], np.int32)
own = RowBatch(np.array([[5, 6, 7]], np.int32), segments, np.array([3], np.int32), packed=False,
               metadata={})
doubled = jax.tree_util.tree_map(lambda leaf: 2 * leaf, own)
assert type(doubled) is RowBatch
both = jax.tree_util.tree_map(lambda one, two: one + two, own, doubled)  # their trees match
assert both.input_ids.tolist() == [[15, 18, 21]]
assert jax.tree_util.tree_structure(both) == jax.tree_util.tree_structure(own)
assert both.position_ids.tolist() == own.position_ids.tolist() == [[0, 1, 2]]
assert both.cu_seqlens.tolist() == own.cu_seqlens.tolist() == [0, 3]
"""


@pytest.mark.torch
def test_a_pytree_of_jax() -> None:
    """In a process of its own: JAX has threads, and warns of every fork after it was imported."""
    subprocess.run([sys.executable, "-c", JAX], check=True, timeout=240)


def rows(packed: bool) -> RowBatch:
    segments = np.array([[4, 0, 0, 0, 0, 0, 2], [4, 0, 0, 0, 1, 0, 1]], np.int32)
    ids, fills = np.array([[5, 6, 7, 0]], np.int32), np.array([3], np.int32)
    return RowBatch(ids, segments, fills, packed=packed, metadata={"step": 3}, base=4)


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_of_a_loader_with_another_field(packed: bool) -> None:
    labels = np.array([[-100, -100, 7, -100]])
    found = dataclasses.replace(rows(packed), labels=labels)
    assert type(found) is RowBatch
    assert found["labels"] is labels
    assert dict(found).keys() == dict(rows(packed)).keys()
    for name in ("input_ids", "position_ids", "cu_seqlens", "segments", "fills", "loss_mask"):
        assert np.array_equal(getattr(found, name), getattr(rows(packed), name)), name
    assert found.metadata == {"step": 3}
    assert found.packed is packed
    told = dataclasses.replace(found, metadata={"step": 4}, loss_mask=labels == 7)
    assert told.metadata == {"step": 4}
    assert told.to().loss_mask.tolist() == [[False, False, True, False]]
    assert {"input_ids", "metadata"} < dataclasses.asdict(told).keys()


def test_batches_of_other_loaders_with_another_field() -> None:
    labels, weights = np.zeros((1, 4), np.int64), np.ones((1, 4), np.float32)
    noise = Corrupted(np.zeros((1, 4), np.int32), labels, weights, np.zeros(1))
    diffused = dataclasses.replace(DiffusionBatch(rows(False), noise), metadata={"step": 9})
    assert type(diffused) is DiffusionBatch
    assert diffused.metadata == {"step": 9}
    assert diffused.clean_ids.tolist() == [[5, 6, 7, 0]]
    ids = np.array([[5, 6]], np.int32)
    rollouts = RolloutBatch(ids, np.zeros((0, 7), np.int32), np.array([2], np.int32), packed=False,
                            metadata={})  # fmt: skip
    mask = np.array([[False, True]])
    found = dataclasses.replace(rollouts, loss_mask=mask)
    assert found.sampled is found.loss_mask is mask
    assert not rollouts.loss_mask.any()


class Custom(DataLoader):
    """The four documented methods."""

    def get_batch(self, batch_size: int) -> TrainingBatch:
        return TrainingBatch(np.ones((batch_size, 4), np.int64))

    def get_iterator(self) -> Iterator[TrainingBatch]:
        for _ in range(3):
            yield self.get_batch(2)

    def get_num_batches(self) -> int:
        return 3

    def reset(self) -> None:
        pass


@pytest.mark.torch
def test_a_custom_loader_has_four_methods() -> None:
    from penstock import TorchDataset

    with Custom() as loader:
        assert [batch.input_ids.shape for batch in loader] == [(2, 4)] * 3
        assert len(list(TorchDataset(loader))) == len(TorchDataset(loader)) == 3
        with pytest.raises(NotImplementedError, match="Custom has no state_dict"):
            loader.state_dict()
        assert isinstance(pickle.loads(pickle.dumps(loader)), Custom)


def test_a_loader_that_is_pickled_goes_on_where_it_was(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=2, rows=40)
    loader = PretrainDataLoader(str(tmp_path / "d"), chunk_size=16, batch_size=2)
    next(iter(loader))
    again = pickle.loads(pickle.dumps(loader))
    assert again.step == 1
    found = [[batch.input_ids.tobytes() for batch in one] for one in (loader, again)]
    assert found[0] == found[1]
    assert len(found[0]) > 2
