"""Masked diffusion: the answers of LLaDA and dLLM; noise that depends on seed and batch alone."""

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import DiffusionConfig, DocumentConfig, PlanConfig, PretrainDataLoader, corrupt
from penstock.errors import BadConfig, StateMismatch
from penstock.supply.diffusion import DiffusionBatch
from penstock.supply.run_file import read_run

from .datasets import GrowingDataset, made_dataset, made_documents
from .nested import nested

MASK = 60_000
NOISE = DiffusionConfig(mask_token_id=MASK)
PLAN = PlanConfig(pool_size=50, refill_threshold=30, buffer_pieces=8)


@pytest.mark.parametrize(
    ("noise", "chance", "weight"),
    [
        ("llada", 0.5005, 1.998002),
        ("linear", 0.5, 1 / (0.5 + 1e-6)),
        ("cosine", 0.707107, 1.570794),
    ],
)
def test_the_answers_of_others_at_half_time(noise: str, chance: float, weight: float) -> None:
    config = DiffusionConfig(noise=noise, eps=0.001)
    found = [float(one[0]) for one in config.chances(np.array([0.5]))]
    assert found == pytest.approx([chance, weight], abs=5e-7)


@pytest.mark.parametrize("noise", ["llada", "linear", "cosine"])
def test_weights_make_every_time_count_alike(noise: str) -> None:
    """Chance times weight is the slope of the chance: over all times it is one for each token."""
    t = np.linspace(0.01, 1, 200_001)
    chance, weight = DiffusionConfig(noise=noise).chances(t)
    assert np.trapezoid(chance * weight, t) == pytest.approx(chance[-1] - chance[0], abs=0.02)


def test_as_many_tokens_are_hidden_as_the_chance_says() -> None:
    ids = np.zeros((4000, 100), np.int64)
    found = corrupt(ids, NOISE, seed=5, batch=9)
    chance, weight = NOISE.chances(found.t)
    shares = (found.labels != -100).mean(axis=1)
    assert abs(shares - chance).max() < 6 * 0.5 / math.sqrt(100)
    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert np.histogram(found.t, 10, (0, 1))[0] == pytest.approx(400, abs=100)
    # each place counts once in the mean, whatever its row's time
    assert found.weights.mean() == pytest.approx(1, abs=0.05)
    assert np.array_equal(found.weights > 0, found.labels != -100)
    assert found.weights.max() <= np.float32(weight.max())


def test_one_chance_for_all() -> None:
    config = DiffusionConfig(mask_token_id=7, mask_probability=0.15, ignore_index=-1)
    ids = np.arange(40_000).reshape(400, 100) + 100
    found = corrupt(ids, config, seed=1, batch=2)
    hidden = found.labels != -1
    assert hidden.mean() == pytest.approx(0.15, abs=0.01)
    assert np.array_equal(found.labels[hidden], ids[hidden])
    assert np.array_equal(found.input_ids, np.where(hidden, 7, ids))
    assert set(np.unique(found.weights)) == {0.0, 1.0}


@given(
    seed=st.integers(0, 2**64 - 1), batch=st.integers(0, 2**40), rows=st.integers(1, 9),
    tokens=st.integers(1, 11), cut=st.integers(0, 9),
)  # fmt: skip
def test_the_noise_of_a_row_is_of_seed_batch_and_row(
    seed: int, batch: int, rows: int, tokens: int, cut: int
) -> None:
    ids = np.arange(rows * tokens, dtype=np.int32).reshape(rows, tokens)
    whole = corrupt(ids, NOISE, seed=seed, batch=batch)
    cut = min(cut, rows)
    for part in (slice(0, cut), slice(cut, rows)):
        found = corrupt(ids[part], NOISE, seed=seed, batch=batch, first_row=part.start)
        for name in ("input_ids", "labels", "weights", "t"):
            assert np.array_equal(getattr(found, name), getattr(whole, name)[part])
    assert whole.input_ids.dtype == ids.dtype


def test_seed_and_batch_and_row_matter() -> None:
    ids = np.arange(64).reshape(2, 32)
    seen = {
        corrupt(ids, NOISE, seed=seed, batch=batch, first_row=row).input_ids.tobytes()
        for seed in range(4)
        for batch in range(4)
        for row in (0, 2, 4)
    }
    assert len(seen) == 48


def test_padding_is_never_hidden() -> None:
    ids, fills = np.ones((50, 20), np.int64), np.arange(50) % 21
    found = corrupt(ids, DiffusionConfig(mask_probability=1.0, mask_token_id=9), seed=0, batch=0,
                    fills=fills)  # fmt: skip
    assert np.array_equal((found.input_ids == 9).sum(axis=1), fills)
    assert np.array_equal((found.weights > 0).sum(axis=1), fills)


def test_stages_change_the_times_from_a_batch_on() -> None:
    stages = [{"first_batch": 0, "low": 0.0, "high": 0.2}, {"first_batch": 5, "low": 0.7}]
    config = DiffusionConfig(mask_token_id=9, stages=stages)
    ids = np.ones((500, 4), np.int64)
    for batch, low, high in ((0, 0, 0.2), (4, 0, 0.2), (5, 0.7, 1), (99, 0.7, 1)):
        t = corrupt(ids, config, seed=0, batch=batch).t
        assert low <= t.min() < low + 0.02
        assert high - 0.02 < t.max() <= high
    late = DiffusionConfig(mask_token_id=9, noise="linear", eps=0.1)
    assert corrupt(ids, late, seed=0, batch=0).t.min() >= 0.1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"noise": "lada"}, "noise is 'lada'"),
        ({"eps": 0}, "eps is 0"),
        ({"eps": "small"}, "eps is 'small'"),
        ({"mask_probability": 0}, "mask_probability is 0"),
        ({"mask_token_id": -2}, "mask_token_id is -2"),
        ({"ignore_index": 0.5}, "ignore_index is 0.5"),
        ({"stages": "all"}, "stages is 'all'"),
        ({"stages": [3]}, "a stage is 3"),
        ({"stages": [{"first_batch": 0, "lo": 1}]}, "'lo' is not an option of a stage"),
        ({"stages": [{"first_batch": -1}]}, "first_batch of a stage is -1"),
        ({"stages": [{"first_batch": 0, "low": 0.5, "high": 0.5}]}, "goes from 0.5 to 0.5"),
        ({"stages": [{"first_batch": 3}, {"first_batch": 3}]}, "begins with batch 3, one before"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        DiffusionConfig(**given)


@pytest.mark.parametrize(
    ("ids", "place", "told"),
    [
        (np.zeros(4, np.int64), {}, "ids are int64 of 1 dimensions"),
        (np.zeros((1, 4)), {}, "ids are float64 of 2 dimensions"),
        ([[1, 2]], {}, "ids are list"),
        (np.zeros((1, 4), int), {"batch": -1}, "batch is -1"),
        (np.zeros((1, 4), int), {"batch": 1.5}, "batch is 1.5"),  # it was batch 1 in silence
        (np.zeros((1, 4), int), {"first_row": -1}, "first_row is -1"),
    ],
)
def test_what_is_no_row_and_no_batch_is_refused(ids: Any, place: dict[str, Any], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        corrupt(ids, DiffusionConfig(mask_token_id=9), seed=1, **{"batch": 0, **place})


@pytest.mark.parametrize(
    ("config", "seed", "told"),
    [
        (DiffusionConfig(), 0, "mask_token_id is -1"),
        (DiffusionConfig(mask_token_id=70_000), 0, "mask_token_id is 70000\n.*0 to 65,535"),
        (NOISE, -1, "seed is -1"),
        (NOISE, 1 << 64, "seed is 18446744073709551616"),
    ],
)
def test_rows_cannot_be_hidden_by_what_they_cannot_hold(
    config: DiffusionConfig, seed: int, told: str
) -> None:
    with pytest.raises(BadConfig, match=told):
        corrupt(np.ones((2, 3), np.uint16), config, seed=seed, batch=0)


# On a loader


def opened(path: Any, **options: Any) -> PretrainDataLoader:
    given = {"objective": NOISE, "batch_size": 4, "chunk_size": 48, "plan": PLAN, "seed": 11}
    return PretrainDataLoader(path, **nested(**{**given, **options}))


def told(batch: Any) -> tuple[bytes, ...]:
    assert isinstance(batch, DiffusionBatch)
    arrays = (batch.input_ids, batch.labels, batch.loss_weights, batch.clean_ids)
    return tuple(np.ascontiguousarray(array).tobytes() for array in arrays)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made_dataset(tmp_path_factory.mktemp("diffusion") / "dataset").url


def test_batches_are_those_of_the_loader_with_tokens_hidden(dataset: str) -> None:
    plain = opened(dataset, objective="next_token")
    for number, (clean, batch) in enumerate(zip(plain, opened(dataset), strict=True)):
        assert isinstance(batch, DiffusionBatch)
        assert np.array_equal(batch.clean_ids, clean.input_ids)
        noise = corrupt(clean.input_ids, NOISE, seed=11, batch=number, fills=clean.fills)
        assert np.array_equal(batch.input_ids, noise.input_ids)
        assert np.array_equal(batch.labels, noise.labels)
        assert np.array_equal(batch.loss_mask, batch.input_ids == MASK)
        assert np.array_equal(batch.loss_mask, batch.labels != -100)
        assert np.array_equal(batch.position_ids, clean.position_ids)
        assert np.array_equal(batch.segments, clean.segments)
        assert np.array_equal(batch.times, noise.t)
        assert not batch.loss_mask[np.arange(48) >= batch.fills[:, None]].any()
    assert number > 20


def test_a_resume_on_other_ranks_gives_the_same_noise(dataset: str) -> None:
    whole = list(opened(dataset, batch_size=4))
    loader = opened(dataset, batch_size=4)
    for _ in range(5):
        next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    parts = []
    for rank in range(2):
        half = opened(dataset, batch_size=2, rank=rank, world_size=2)
        half.load_state_dict(state)
        parts.append(list(half))
    rest = whole[5:]
    assert len(parts[0]) == len(parts[1]) == len(rest)
    for batch, one, two in zip(rest, *parts, strict=True):
        assert isinstance(batch, DiffusionBatch)
        both = [np.concatenate([getattr(part, name) for part in (one, two)])
                for name in ("input_ids", "labels", "loss_weights")]  # fmt: skip
        assert np.array_equal(both[0], batch.input_ids)
        assert np.array_equal(both[1], batch.labels)
        assert np.array_equal(both[2], batch.loss_weights)


def test_a_live_dataset_gives_what_the_finished_one_gives(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    shards = [made_documents(random, 40, first=40 * k) for k in range(5)]
    growing = GrowingDataset(tmp_path / "live")

    def grow() -> None:
        for shard in shards:
            time.sleep(0.02)
            growing.add(shard)
        growing.seal()

    thread = threading.Thread(target=grow)
    thread.start()
    plan = PlanConfig(pool_size=50, refill_threshold=30, buffer_pieces=8, ramp=False)
    live = [told(batch) for batch in opened(growing.url, plan=plan)]
    thread.join()
    assert live == [told(batch) for batch in opened(growing.url, plan=plan)]


def test_states_know_the_noise(dataset: str) -> None:
    state, plain = opened(dataset).state_dict(), opened(dataset, objective="next_token")
    with pytest.raises(StateMismatch, match="objective"):
        plain.load_state_dict(state)
    with pytest.raises(StateMismatch, match="objective"):
        opened(dataset).load_state_dict(plain.state_dict())
    other = DiffusionConfig(mask_token_id=MASK, noise="cosine")
    with pytest.raises(StateMismatch, match=r"objective\.noise: the state has 'llada'"):
        opened(dataset, objective=other).load_state_dict(state)
    opened(dataset, objective=DiffusionConfig(mask_token_id=MASK)).load_state_dict(state)


def test_the_mask_token_is_the_tokenizers_or_given(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="there is no tokenizer"):
        opened(dataset, objective="diffusion")
    with pytest.raises(BadConfig, match="objective is 'difusion'"):
        DocumentConfig(objective="difusion")
    (tmp_path / "run.toml").write_text(
        '[loader]\npath = "data"\n\n[loader.documents]\nobjective = "diffusion"\n'
    )
    assert read_run(tmp_path / "run.toml")["documents"].objective == "diffusion"


class Letters:
    """A tokenizer with a mask token, or without one."""

    vocab_size = 256

    def __init__(self, masks: bool) -> None:
        self.special_tokens = {"[MASK]": 255} if masks else {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_a_tokenizer_with_a_mask_token() -> None:
    from penstock.supply.diffusion import Noise

    tokenizer: Any = Letters(True)
    assert Noise("diffusion", tokenizer, 0).config.mask_token_id == 255
    assert Noise(DiffusionConfig(mask_token_id=3), tokenizer, 0).config.mask_token_id == 3
    with pytest.raises(BadConfig, match="the tokenizer has no mask token"):
        Noise("diffusion", Letters(False), 0)  # type: ignore[arg-type]


@pytest.mark.torch
def test_tensors(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = next(iter(opened(dataset)))
    assert isinstance(batch, DiffusionBatch)
    tensors = batch.to("cpu")
    assert np.array_equal(tensors.loss_weights.numpy(), batch.loss_weights)
    assert np.array_equal(tensors.labels.numpy(), batch.labels)
    assert np.array_equal(tensors.input_ids.numpy(), batch.input_ids)
