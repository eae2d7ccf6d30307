"""The trainers of others, stopped and resumed: they train our batches in our order, each once.

What a trainer calls step n is the n-th batch of the loader, in the first life of the job and in
every later one; all steps come. make faults kills the jobs; make check stops them by an exception.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    FollowConfig,
    PlanConfig,
    PretrainDataLoader,
    ShardConfig,
    Tokenizer,
    TorchBatch,
    TorchDataset,
    TrainConfig,
    shard_jsonl,
    train_tokenizer,
)  # fmt: skip
from penstock.errors import BadConfig, StateMismatch

from . import job

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainers")
    lines = folder / "lines.jsonl"
    lines.write_text(
        "".join(f'{{"text": "int f{k}() {{ return {k * k}; }}"}}\n' for k in range(900))
    )
    train_tokenizer([lines], folder / "tok", TrainConfig(vocab_size=job.VOCABULARY))
    shard_jsonl(
        [lines], folder / "data", ShardConfig(rows_per_file=200), tokenizer=str(folder / "tok"),
        tokens=True, follow=FollowConfig(complete=True),
    )  # fmt: skip
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    for name in ("data", "tok"):
        (tmp_path / name).symlink_to(made / name)
    return tmp_path


def in_order(folder: Path, epochs: int = job.EPOCHS) -> list[list[str]]:
    """The batches of each epoch, by the loader itself."""
    with job.open_loader(folder) as loader:
        return [
            [job.fingerprint(batch.input_ids.tobytes()) for batch in loader] for _ in range(epochs)
        ]


def check_seen(folder: Path) -> None:
    expected = [one for epoch in in_order(folder) for one in epoch]
    seen = [line.split() for line in (folder / "seen").read_text().splitlines()]
    assert [(step, one) for step, one in seen if expected[int(step)] != one] == []
    assert {int(step) for step, _ in seen} == set(range(len(expected)))


def stops(folder: Path) -> list[int]:
    """Between two saves, in both epochs, at the border between them, and never."""
    each = len(in_order(folder, 1)[0])
    assert each > 12
    return [5, each, each + 7, 10**9]


def stop() -> None:
    raise job.Stopped


@pytest.mark.parametrize("name", job.JOBS)
def test_stopped_and_resumed(name: str, folder: Path) -> None:
    for stop_at in stops(folder):
        try:
            job.run(name, folder, stop_at, stop)
        except job.Stopped:
            assert stop_at < 10**9
    check_seen(folder)


@pytest.mark.parametrize("name", job.JOBS)
def test_saved_after_the_last_batch_of_an_epoch(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = len(in_order(folder, 1)[0])
    monkeypatch.setattr(job, "SAVE_EVERY", each)
    for stop_at in (each, each + 3, 10**9):
        try:
            job.run(name, folder, stop_at, stop)
        except job.Stopped:
            assert stop_at < 10**9
    check_seen(folder)


@pytest.mark.faults
@pytest.mark.parametrize("name", job.JOBS)
def test_killed_and_resumed(name: str, folder: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}"}
    for stop_at in stops(folder):
        command = [sys.executable, "-m", "trainers.job", name, str(folder), str(stop_at)]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
        killed = done.returncode == -signal.SIGKILL
        assert killed == (stop_at < 10**9), done.stderr.decode()
    check_seen(folder)


def run_ranks(name: str, folder: Path, *stops: int) -> None:
    """Two ranks, killed before each of these steps, and then run to the end; what they trained is
    compared with what an undisturbed loader gives to one process."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}"}
    command = [sys.executable, "-m", "trainers.ranks", name, str(folder)]
    command += [str(stop_at) for stop_at in (*stops, 10**9)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()
    expected = [one for epoch in in_order(folder) for one in epoch]
    trained: set[tuple[int, str]] = set()
    for rank in range(2):
        lines = (folder / f"seen.{rank}").read_text().splitlines()
        for step, one in (line.split() for line in lines):
            trained.add((2 * int(step) + rank, one))
    # no batch is lost, none stands at two places, and what is trained again is the same
    assert sorted(trained) == list(enumerate(expected))


@pytest.mark.parametrize("name", [pytest.param("registered", marks=pytest.mark.faults), "trainer"])
def test_two_ranks_killed_and_resumed(name: str, folder: Path) -> None:
    run_ranks(name, folder, 5)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["registered", "trainer"])
def test_two_ranks_killed_anywhere_and_resumed(name: str, folder: Path) -> None:
    """Between two saves, at one, at the border of the epochs, in the second, and twice."""
    each = len(in_order(folder, 1)[0]) // 2
    run_ranks(name, folder, 2, 6, each, each + 2, each + 2)


def seen_by(loader: "object") -> list[str]:
    return [job.fingerprint(batch["input_ids"].numpy().tobytes()) for batch in loader]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("workers", "persist"), [(0, False), (2, False), (2, True)])
def test_every_pass_is_the_next_epoch(workers: int, persist: bool, folder: Path) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        TorchDataset(job.open_loader(folder)), batch_size=None, num_workers=workers,
        persistent_workers=persist,
    )  # fmt: skip
    assert [seen_by(loader) for _ in range(3)] == in_order(folder, 3)


def test_workers_that_are_spawned(folder: Path) -> None:
    from torch.utils.data import DataLoader

    dataset = TorchDataset(job.open_loader(folder))
    first = in_order(folder, 1)[0]
    next(iter(dataset))
    state = dataset.state_dict()
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert seen_by(loader) == first[1:]
    # from outside of the workers the state is that of the batches that were taken
    resumed = TorchDataset(job.open_loader(folder))
    resumed.load_state_dict(dataset.state_dict(step=4))
    assert seen_by(resumed) == first[4:]
    resumed.load_state_dict(state)
    assert seen_by(resumed) == first[1:]


def test_epochs_by_number(folder: Path) -> None:
    epochs = in_order(folder, 3)
    dataset = TorchDataset(job.open_loader(folder))
    for epoch in (2, 0, 1, 1):
        dataset.set_epoch(epoch)
        assert seen_by(dataset) == epochs[epoch]
    assert seen_by(dataset) == epochs[2]
    with pytest.raises(BadConfig, match="epoch is -1"):
        dataset.set_epoch(-1)


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_state_of_any_batch_of_two_epochs(workers: int, folder: Path) -> None:
    """Also of those at which some worker has not handed out anything in its pass."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def opened() -> Any:
        dataset = TorchDataset(job.open_loader(folder))
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    first, second = in_order(folder, 2)
    loader, states = opened(), []
    for _ in range(2):
        for _batch in loader:
            states.append(loader.state_dict())
    each = len(first)
    for taken in (1, each - 1, each + 1, each + 2, each + 5):
        resumed = opened()
        resumed.load_state_dict(states[taken - 1])
        assert seen_by(resumed) == (first + second)[taken : each if taken < each else None]


def test_epochs_by_number_in_workers(folder: Path) -> None:
    from torch.utils.data import DataLoader

    epochs = in_order(folder, 3)
    dataset = TorchDataset(job.open_loader(folder))
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    for epoch in (2, 0, 1, 1):
        dataset.set_epoch(epoch)
        assert seen_by(loader) == epochs[epoch]
    assert seen_by(loader) == epochs[2]


def test_an_epoch_that_is_broken_off_in_workers_and_begun_again_by_number(folder: Path) -> None:
    """Near its end workers have read to the end: by itself the next iteration might be the next
    epoch."""
    from torch.utils.data import DataLoader

    epochs = in_order(folder, 2)
    dataset = TorchDataset(job.open_loader(folder))
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    for epoch in range(2):
        for left in (1, 3):
            dataset.set_epoch(epoch)
            batches = iter(loader)
            begun = seen_by(next(batches) for _ in range(len(epochs[epoch]) - left))
            time.sleep(0.2)  # all that is left is read
            del batches
            assert begun == epochs[epoch][:-left]
        dataset.set_epoch(epoch)
        assert seen_by(loader) == epochs[epoch]


def test_the_state_of_what_workers_gave_in_any_epoch(folder: Path) -> None:
    from torch.utils.data import DataLoader

    first, second = in_order(folder, 2)
    dataset = TorchDataset(job.open_loader(folder))
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    for _ in range(2):
        seen_by(loader)
    for taken in (len(first) + 6, len(first) + 5):
        resumed = TorchDataset(job.open_loader(folder))
        resumed.load_state_dict(dataset.state_dict(step=taken))
        assert seen_by(resumed) == second[taken - len(first) :]


def test_what_is_left_of_an_epoch_in_workers(folder: Path) -> None:
    from torch.utils.data import DataLoader

    (first,) = in_order(folder, 1)
    found = job.open_loader(folder)
    batches = iter(found)
    for _ in range(len(first) - 1):
        next(batches)
    loader = DataLoader(TorchDataset(found), batch_size=None, num_workers=2)
    assert seen_by(loader) == first[-1:]


@pytest.mark.parametrize("at_end", ["stop", "next_epoch"])
def test_a_state_at_the_end_of_an_epoch(at_end: str, folder: Path) -> None:
    first, second = in_order(folder, 2)
    dataset = TorchDataset(job.open_loader(folder))
    batches = iter(dataset)
    for _ in first:
        next(batches)
    state = dataset.state_dict()
    resumed = TorchDataset(job.open_loader(folder), at_end=at_end)
    resumed.load_state_dict(state)
    assert seen_by(resumed) == ([] if at_end == "stop" else second)
    with pytest.raises(BadConfig, match="at_end is 'go on'"):
        TorchDataset(job.open_loader(folder), at_end="go on")


def test_who_counts_batches_gets_the_next_epoch_too(folder: Path) -> None:
    epochs = in_order(folder, 2)
    dataset = TorchDataset(job.open_loader(folder))
    for epoch in epochs:
        batches = iter(dataset)
        assert seen_by(next(batches) for _ in range(len(dataset))) == epoch


def test_a_state_is_that_of_what_was_trained(folder: Path) -> None:
    first = in_order(folder, 1)[0]
    loader = job.open_loader(folder)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    for step in (0, 3, 6, 7):
        again = job.open_loader(folder)
        again.load_state_dict(loader.state_dict(step))
        assert [job.fingerprint(batch.input_ids.tobytes()) for batch in again] == first[step:]
    for step in (8, 100):
        with pytest.raises(BadConfig, match=f"after {step} batches"):
            loader.state_dict(step)


def test_token_files_need_no_engine_of_the_tokenizer(folder: Path) -> None:
    """It takes half a second and more to make one, and as much in every worker."""
    tokenizer = Tokenizer.load(folder / "tok", ready=False)
    with PretrainDataLoader(str(folder / "data"), tokenizer, job.TOKENS, batch_size=2) as loader:
        next(iter(loader))
        again = pickle.loads(pickle.dumps(loader))
        next(iter(again))
    assert not tokenizer._engines
    assert not again.tokenizer._engines
    assert again.tokenizer.encode("int f").tolist() == tokenizer.encode("int f").tolist()


def test_growing_data_has_no_length(folder: Path) -> None:
    dataset = TorchDataset(job.open_loader(folder))
    assert len(dataset) == len(in_order(folder, 1)[0])
    endless = PretrainDataLoader(
        str(folder / "data"), str(folder / "tok"), chunk_size=job.TOKENS, epochs=None
    )
    with pytest.raises(TypeError, match="never ends"):
        len(TorchDataset(endless))


def test_a_state_without_a_step_is_refused_once_workers_have_read(folder: Path) -> None:
    from torch.utils.data import DataLoader

    dataset = TorchDataset(job.open_loader(folder))
    assert dataset.state_dict()["step"] == 0
    for n, _ in enumerate(DataLoader(dataset, batch_size=None, num_workers=1), 1):
        if n == 3:
            with pytest.raises(BadConfig, match=r"state_dict\(step=n\)"):
                dataset.state_dict()
            assert dataset.state_dict(step=n)["step"] == n
            break
    dataset.load_state_dict(dataset.state_dict(step=2))
    assert dataset.state_dict()["step"] == 2


def test_states_of_workers_are_theirs_alone(folder: Path) -> None:
    dataset = TorchDataset(job.open_loader(folder))
    own = dataset.state_dict()
    with pytest.raises(StateMismatch, match="one worker of several"):
        dataset.load_state_dict({"loader": own, "worker": 0, "workers": 2, "base": 0})
    with pytest.raises(StateMismatch, match="not a state"):
        dataset.load_state_dict({"workers": 2})


def test_a_state_loaded_beside_workers_that_persist_is_refused(folder: Path) -> None:
    from torch.utils.data import DataLoader

    dataset = TorchDataset(job.open_loader(folder))
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    seen_by(loader)
    dataset.load_state_dict(dataset.state_dict(step=2))
    with pytest.raises(BadConfig, match="workers of an earlier pass"):
        seen_by(loader)


def test_lightning_resumes_exactly_where_it_fetches_ahead(folder: Path) -> None:
    """Without a length it fetches one batch ahead; the callback of docs/trainers.md goes by what
    was trained."""
    import lightning

    loader = PretrainDataLoader(
        str(folder / "data"), str(folder / "tok"), chunk_size=job.TOKENS, batch_size=job.ROWS,
        seed=5, plan=PlanConfig(epochs=None),
    )  # fmt: skip
    trained: list[str] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = job.Model()

        def training_step(self, batch: TorchBatch) -> Any:
            trained.append(job.fingerprint(batch["input_ids"].numpy().tobytes()))
            return self.model(**batch)["loss"]

        def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
            checkpoint["penstock"] = loader.state_dict(step=len(trained))

        def configure_optimizers(self) -> Any:
            import torch

            return torch.optim.SGD(self.parameters(), lr=0.01)

    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False,
               "enable_model_summary": False, "enable_checkpointing": False}  # fmt: skip
    trainer = lightning.Trainer(max_steps=6, **options)
    trainer.fit(Module(), TorchDataset(loader))
    assert loader.step == 7, "it fetches ahead"
    trainer.save_checkpoint(folder / "saved.ckpt", weights_only=False)
    import torch

    state = torch.load(folder / "saved.ckpt", weights_only=False)["penstock"]
    loader.load_state_dict(state)
    rest = [job.fingerprint(next(loader.get_iterator()).input_ids.tobytes()) for _ in range(4)]
    assert trained + rest == in_order(folder, 1)[0][:10]
