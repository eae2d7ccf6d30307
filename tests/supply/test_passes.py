"""What is said to a dataset reaches its workers: a loaded state is for one pass, and for all of it.

Workers are copies of the dataset, made for each pass or kept from one to the next.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from penstock import StreamingMixedShardDataset
from penstock.errors import BadConfig
from penstock.supply import example_run

from .test_mixed import dataset, made_folder

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

BATCH = 4


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return made_folder(tmp_path / "a")


def row(state: dict[str, Any]) -> int:
    """The example at which a state stands."""
    found: int = state["plan"]["row"] + state["skip"]
    return found


def made(folder: str, **options: Any) -> StreamingMixedShardDataset:
    return dataset(folder, batch_size=BATCH, **options)


def loader(found: StreamingMixedShardDataset, workers: int = 2, **options: Any) -> Any:
    return DataLoader(found, batch_size=BATCH, num_workers=workers, **options)


def read(batches: Any, count: int | None = None) -> list[int]:
    """The examples of so many batches, of all if no number is given."""
    given: Iterator[Any] = iter(batches)
    taken = given if count is None else (next(given) for _ in range(count))
    return [n for batch in taken for n in batch["id"].tolist()]


@pytest.fixture
def whole(folder: str) -> list[int]:
    return read(loader(made(folder), 0))


def test_workers_that_stay_take_up_a_loaded_state(folder: str, whole: list[int]) -> None:
    found = made(folder)
    batches = loader(found, persistent_workers=True)
    assert read(batches) == whole
    state = json.loads(json.dumps(made(folder).state_dict(batches=20)))
    for _ in range(2):
        found.load_state_dict(state)
        assert read(batches) == whole[20 * BATCH :]
        assert read(batches) == whole  # a state is for one pass
    found.set_epoch(1)
    other = read(batches)
    assert sorted(other) == sorted(whole) != other
    found.load_state_dict(state)
    assert found.epoch == 0
    assert read(batches) == whole[20 * BATCH :]


def test_workers_that_stay_take_up_the_seed_of_a_state(folder: str, whole: list[int]) -> None:
    found = made(folder, random_seed=None)
    batches = loader(found, persistent_workers=True)
    assert read(batches) != whole
    found.load_state_dict(made(folder).state_dict(batches=20))
    assert read(batches) == whole[20 * BATCH :]
    assert read(batches) == whole


def test_a_state_that_is_too_large_for_workers_that_stay(
    folder: str, whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_run, "STATE_BYTES", 100)
    found = made(folder)
    batches = loader(found, persistent_workers=True)
    read(batches)
    found.load_state_dict(made(folder).state_dict(batches=20))
    with pytest.raises(BadConfig, match="make a new DataLoader after load_state_dict"):
        read(batches)
    assert read(loader(made_with(found, batches=20))) == whole[20 * BATCH :]


def made_with(found: StreamingMixedShardDataset, batches: int) -> StreamingMixedShardDataset:
    found.load_state_dict(made(found.sources[0].shards.url).state_dict(batches=batches))
    return found


def test_a_state_of_many_sources_has_room(tmp_path: Path) -> None:
    folders = [made_folder(tmp_path / f"a{k}", 2, 4, first=8 * k) for k in range(40)]
    state = dataset(folders, batch_size=BATCH).state_dict(batches=3)
    assert len(json.dumps(state)) < example_run.STATE_BYTES / 4


def test_with_workers_a_state_needs_the_batches(folder: str, whole: list[int]) -> None:
    found = made(folder)
    batches = iter(loader(found))
    begun = read(batches, 20)
    with pytest.raises(BadConfig, match=r"ask for state_dict\(batches=n\)") as caught:
        found.state_dict()
    assert "workers read the dataset" in caught.value.what
    again = made(folder)
    again.load_state_dict(found.state_dict(batches=20))
    assert begun + read(loader(again)) == whole
    found.set_epoch(1)  # of the next pass nothing was read yet
    assert row(found.state_dict()) == 0
    del batches  # in a cycle with `caught` it would wait 5 s for each worker when it is collected


def test_states_given_to_workers_themselves_are_not_known_here(folder: str) -> None:
    found = made(folder)
    state = found.state_dict(batches=20)

    def load(worker: int) -> None:
        dataset_of(worker).load_state_dict({**state, "share": {**state["share"], "workers": 1}})

    batches = iter(loader(found, worker_init_fn=load))
    next(batches)
    for asked in ({}, {"batches": 1}):
        with pytest.raises(BadConfig, match="StatefulDataLoader"):
            found.state_dict(**asked)


def dataset_of(worker: int) -> StreamingMixedShardDataset:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert info.id == worker
    assert isinstance(info.dataset, StreamingMixedShardDataset)
    return info.dataset


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_counted_from_the_pass_that_is_read(
    folder: str, whole: list[int], workers: int
) -> None:
    """Not from a state that an earlier pass began with, whoever read that one."""
    found = made(folder)
    found.load_state_dict(made(folder).state_dict(batches=20))
    first = iter(loader(found, workers))
    assert read(first, 2) == whole[20 * BATCH : 22 * BATCH]
    assert row(found.state_dict(batches=2)) == 22 * BATCH
    read(first)
    for n in (2, 0, 2):
        second = iter(loader(found, n))
        assert read(second, 3) == whole[: 3 * BATCH]
        assert row(found.state_dict(batches=3)) == 3 * BATCH


@pytest.mark.parametrize("persistent", [False, True])
def test_the_same_torch_seed_for_every_pass(
    folder: str, whole: list[int], persistent: bool
) -> None:
    found = made(folder)
    batches = loader(found, persistent_workers=persistent)
    found.load_state_dict(made(folder).state_dict(batches=20))
    for expected in (whole[20 * BATCH :], whole, whole):
        torch.manual_seed(0)
        assert read(batches) == expected
