"""Accidents of loaders: batches that failed, settings, states, threads, forks, mirrors that lag."""

import functools
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import BadConfig, PenstockError, ProducerStalled, StateMismatch, StoreFailed
from penstock.ingest.lines import mark_done
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.writer import ShardConfig
from penstock.stream.plan import PlanConfig
from penstock.supply import engine, pretrain
from penstock.supply.batch import TrainingBatch
from penstock.supply.pretrain import PretrainDataLoader
from penstock.supply.settings import with_checksum
from penstock.supply.sources.open import await_first
from penstock.tokenize.tokenizer import Tokenizer
from penstock.tokenize.train import TrainConfig, train_tokenizer
from penstock.work.events import Events

from .datasets import GrowingDataset
from .nested import nested


def numbers(count: int, size: int = 30, first: int = 1) -> list[list[int]]:
    """Documents of `size` tokens, no two alike."""
    return [[first + k] * size for k in range(count)]


def made(folder: Path, shards: int = 3, rows: int = 100, *, seal: bool = True) -> str:
    dataset = GrowingDataset(folder)
    for shard in range(shards):
        dataset.add(numbers(rows, first=1 + shard * rows))
    if seal:
        dataset.seal()
    return dataset.url


def loader(path: Any, tokenizer: Any = None, **options: Any) -> PretrainDataLoader:
    return PretrainDataLoader(
        path, tokenizer, **nested(**{"chunk_size": 64, "batch_size": 4, **options})
    )


def read_until(error: type[Exception], step: Callable[[], Any], most: int = 10_000) -> str:
    """Call `step` until it raises; what it said then."""
    for _ in range(most):
        try:
            step()
        except error as raised:
            return str(raised)
    raise AssertionError(f"no {error.__name__} in {most} steps")


def rows_of(found: PretrainDataLoader) -> np.ndarray[Any, Any]:
    return np.concatenate([batch.input_ids for batch in found])


# Tokens of the dataset


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, and two tokenizers."""
    folder = tmp_path_factory.mktemp("texts")
    for name, text in (("a", "int f{k}(int x) {{ return x * {k}; }}"), ("b", "the cat {k} sat")):
        lines = [json.dumps({"text": text.format(k=k)}) + "\n" for k in range(500)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        train_tokenizer([folder / f"{name}.jsonl"], folder / name, TrainConfig(vocab_size=300))
    return folder


@pytest.mark.parametrize("tokens", [True, False])
def test_a_dataset_knows_its_tokenizer(tmp_path: Path, texts: Path, tokens: bool) -> None:
    mine = Tokenizer.load(texts / "a")
    shard_jsonl(
        [texts / "a.jsonl"], tmp_path / "data", ShardConfig(rows_per_file=100),
        FollowConfig(complete=True), tokenizer=mine, tokens=tokens,
    )  # fmt: skip
    shard_jsonl(
        [texts / "a.jsonl"], tmp_path / "text", ShardConfig(rows_per_file=100),
        FollowConfig(complete=True),
    )  # fmt: skip
    found = loader(str(tmp_path / "data"), texts / "a")
    assert found.sources[0].has_tokens is tokens
    assert found.get_num_batches() > 0
    expected = rows_of(loader(str(tmp_path / "text"), texts / "a"))
    assert np.array_equal(rows_of(found), expected)
    with pytest.raises(BadConfig, match="is not the one that the dataset was made with"):
        loader(str(tmp_path / "data"), texts / "b")
    if tokens:
        alone = loader(str(tmp_path / "data"))  # ids need no tokenizer
        assert len(rows_of(alone)) > 0


@pytest.mark.parametrize("has_log", [False, True])
def test_columns_of_one_shard_do_not_share_a_cache(
    tmp_path: Path, texts: Path, has_log: bool
) -> None:
    """Only what a log knows by its hash is kept in a cache."""
    if has_log:
        lines = json.dumps({"text": "int f", "source": "return x", "start": 0, "end": 5}) + "\n"
        (tmp_path / "in.jsonl").write_text(50 * lines)
        config = ShardConfig(val_fraction=0)
        complete = FollowConfig(complete=True)
        shard_jsonl([tmp_path / "in.jsonl"], tmp_path / "d", config, complete)
    else:
        (tmp_path / "d").mkdir()
        table = pa.table({"text": ["int f"] * 50, "source": ["return x"] * 50})
        pq.write_table(table, tmp_path / "d" / "s_0.parquet")
        (tmp_path / "d" / "_COMPLETE").touch()
    found = {
        (field, cache): rows_of(
            loader(str(tmp_path / "d"), texts / "a", text_field=field,
                   cache_dir=str(tmp_path / "cache") if cache else None)
        ).tolist()
        for cache in (False, True) for field in ("text", "source")
    }  # fmt: skip
    assert found["text", True] == found["text", False] != found["source", False]
    assert found["source", True] == found["source", False]


# A batch that failed


@pytest.mark.parametrize("what", ["nothing", "weights", "skip", "ledger"])
def test_nothing_is_lost_after_a_batch_that_failed(tmp_path: Path, what: str) -> None:
    paths = [made(tmp_path / "a"), made(tmp_path / "b")]
    options: dict[str, Any] = {"weights": [1, 1]}
    expected = rows_of(loader(paths, batch_size=1, **options))
    found = loader(paths, **options)
    got = [found.get_batch(4).input_ids for _ in range(7)]
    before = [(line.trained, line.padded) for line in found.ledger()]
    real = found._engine.window.fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found._engine.window, "fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            found.get_batch(30)
    assert found._engine.window.fill == real
    if what == "weights":
        found.change_weights([1, 1])
    elif what == "skip":
        found.skip(5)
        expected = np.delete(expected, slice(28, 48), axis=0)
    elif what == "ledger":
        assert [(line.trained, line.padded) for line in found.ledger()] == before
    got += [batch.input_ids for batch in found]
    assert np.array_equal(np.concatenate(got)[: len(expected)], expected)


def stand(found: PretrainDataLoader) -> dict[str, Any]:
    """The state, without what is read ahead and may be read again."""
    used = [(line.trained, line.context, line.padded) for line in found.ledger()]
    return {**found.state_dict(), "ledger": used, "sum": ""}


@pytest.mark.parametrize("last", ["drop", "pad"])
def test_a_batch_that_was_interrupted_when_it_was_made_is_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """The ledger is told after the rows are taken: whoever listens may stop the trainer there."""
    path = made(tmp_path / "a", shards=1, rows=50)
    expected = list(loader(path, last=last))
    events = Events("train")
    monkeypatch.setattr(pretrain, "TELL_S", -1.0)  # at every batch
    found = loader(path, last=last, events=events)
    events.listen(interrupt)
    for batch in [*expected, None]:
        before = stand(found)
        with pytest.raises(KeyboardInterrupt):
            found.get_batch(4)
        assert stand(found) == before
        with pytest.raises(BadConfig, match="does not know where it stood"):
            found.state_dict(found.step + 1)
        events._listeners.clear()
        if batch is None:
            with pytest.raises(StopIteration):
                found.get_batch(4)
        else:
            assert np.array_equal(found.get_batch(4).input_ids, batch.input_ids)
        events.listen(interrupt)
    undisturbed = loader(path, last=last)
    assert len(list(undisturbed)) == len(expected)
    assert found.ledger() == undisturbed.ledger()
    assert found.step == undisturbed.step


def test_a_skip_that_failed_has_skipped_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path / "a")
    expected = rows_of(loader(path))
    monkeypatch.setattr(engine, "BLOCK_ROWS", 8)
    found = loader(path)
    got = [found.get_batch(4).input_ids]
    before, real = stand(found), found._engine.plan.take
    calls = iter(range(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            found._engine.plan, "take",
            lambda *rows: interrupt() if next(calls) == 3 else real(*rows),
        )  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            found.skip(15)
    assert stand(found) == before
    got += [batch.input_ids for batch in found]
    assert np.array_equal(np.concatenate(got), expected)


def test_a_failure_on_the_way_back_from_a_failure_takes_nothing(tmp_path: Path) -> None:
    """The rows of a block are planned again: their shards may still be out of reach."""
    path = made(tmp_path / "a")
    expected = rows_of(loader(path))
    found = loader(path)
    got = [found.get_batch(4).input_ids for _ in range(7)]
    before = stand(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found._engine.window, "fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            found.get_batch(5)
        patch.setattr(found._engine.plan, "take", out_of_reach)
        for use in (
            found.ledger,
            found.explain_next,
            lambda: found.skip(1),
            lambda: found.get_batch(4),
            lambda: found.change_weights([1]),
        ):
            with pytest.raises(StoreFailed):
                use()
        assert found.state_dict()["ledger"] == []  # out of reach for it too
    assert stand(found) == before
    got += [batch.input_ids for batch in found]
    assert np.array_equal(np.concatenate(got), expected)


def out_of_reach(*_: Any) -> None:
    raise StoreFailed("the store does not answer")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# Settings


def test_settings_of_a_plan_are_heeded(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    plan = PlanConfig(seed=5, epochs=3, pack="pad")
    found = loader(path, plan=plan)
    assert (found.config.seed, found.config.epochs, found.config.pack) == (5, 3, "pad")
    assert PretrainDataLoader(path, chunk_size=64, plan=plan, seed=5).config.seed == 5
    with pytest.raises(BadConfig, match="seed is 3, and plan says seed=5"):
        PretrainDataLoader(path, chunk_size=64, plan=plan, seed=3)
    with pytest.raises(BadConfig, match="chunk_size is 64, and plan says seq_len=99"):
        loader(path, plan=PlanConfig(seq_len=99))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": None}, "seed is None"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"epochs": 2.5}, "epochs is 2.5"),
        ({"source_epochs": {"a": 0}}, "source_epochs of 'a' is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"chunk_size": "64"}, "chunk_size is '64'"),
        ({"ban": [-1]}, "a doc_id in ban is -1"),
        ({"ban": 7}, "ban is 7"),
        ({"ban": [1 << 64]}, "a doc_id in ban is 18446744073709551616"),
        ({"max_memory_gb": float("nan")}, "max_memory_gb is nan"),
        ({"weight_schedule": {"3": [1.0]}}, "a step of weight_schedule is '3'"),
        ({"weights": [1e308, 1e308]}, "1 weights|2 weights|add up"),
        ({"shard_ranges": "0-9"}, "goes beyond the dataset"),
    ],
)
def test_strange_values_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = made(tmp_path / "a")
    with pytest.raises(BadConfig, match=said):
        loader({"a": path}, **options)
    with pytest.raises(BadConfig, match="ramp is 'false'"):
        PlanConfig(ramp="false")  # type: ignore[arg-type]


def test_numbers_of_any_type_make_a_state_of_plain_ones(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    strange = loader(path, chunk_size=np.int64(64), seed=np.int64(3), ban=[np.uint64(1)])
    plain = loader(path, chunk_size=64, seed=3, ban=[1])
    plain.load_state_dict(json.loads(json.dumps(strange.state_dict())))
    assert np.array_equal(rows_of(plain), rows_of(strange))


def test_use_after_close_and_of_no_rows(tmp_path: Path) -> None:
    found = loader(made(tmp_path / "a"))
    for count in (0, -1):
        with pytest.raises(BadConfig, match=f"batch_size is {count}"):
            found.get_batch(count)
    found.close()
    with pytest.raises(BadConfig, match="the loader is closed"):
        next(iter(found))


def test_small_weights_make_pools_of_the_same_size(tmp_path: Path) -> None:
    paths = [made(tmp_path / "a"), made(tmp_path / "b")]
    sizes = [
        [pool._pool_size for pool in loader(paths, weights=weights)._engine.plan.pools]
        for weights in ([1e-9, 1e-9], [1.0, 1.0])
    ]
    assert sizes[0] == sizes[1] == [1_000_000, 1_000_000]
    with pytest.raises(BadConfig, match="add up to more"):
        loader(paths, weights=[1e308, 1e308])


# States


def test_a_state_with_a_document_that_is_not_there(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    found = loader(path)
    next(iter(found))
    state = found.state_dict()
    far, beyond, other, long = (
        [0, 0, 0, 10**9, 0, 30], [0, 0, 99, 0, 0, 30], [7, 0, 0, 0, 0, 3], [0, 0, 0, 0, 9, 99]
    )  # fmt: skip
    for piece in (far, beyond, other, long):
        wrong = {**state, "plan": {**state["plan"], "pieces": [piece]}}
        with pytest.raises(StateMismatch, match="its checksum does not fit"):
            loader(path).load_state_dict(wrong)
        with pytest.raises(StateMismatch, match="names a document that is not there"):
            loader(path).load_state_dict(
                with_checksum({k: v for k, v in wrong.items() if k != "sum"})
            )
    nonsense: list[Any] = [{}, {"format": 1}, None, [], "state"]
    for wrong in nonsense:
        with pytest.raises(StateMismatch):
            loader(path).load_state_dict(wrong)


def test_a_state_can_be_saved_when_a_shard_is_gone(tmp_path: Path) -> None:
    path = made(tmp_path / "a", shards=6)
    found = loader(path, plan=PlanConfig(pool_size=60, refill_threshold=30))
    first = [found.get_batch(4).input_ids for _ in range(3)]
    lost = tmp_path / "a" / "shard_00005.tokens.arrow"
    kept = lost.read_bytes()
    lost.unlink()
    said = read_until(PenstockError, lambda: first.append(found.get_batch(4).input_ids))
    assert "shard_00005" in said
    state = found.state_dict()
    lost.write_bytes(kept)
    again = loader(path, plan=PlanConfig(pool_size=60, refill_threshold=30))
    again.load_state_dict(state)
    rest = rows_of(again)
    expected = rows_of(loader(path, plan=PlanConfig(pool_size=60, refill_threshold=30)))
    assert np.array_equal(np.concatenate([*first, rest]), expected)


def test_shards_before_a_released_state_are_not_needed(tmp_path: Path) -> None:
    path = made(tmp_path / "a", shards=12)
    plan = PlanConfig(pool_size=100, refill_threshold=0)
    expected = rows_of(loader(path, plan=plan))
    found = loader(path, plan=plan)
    passed = 0
    for step in range(30):
        found.get_batch(4)
        state = found.state_dict()
        found.release(state)
        position = json.loads((tmp_path / "a" / "_position" / "trainer.json").read_text())["shard"]
        assert position >= passed
        for shard in range(passed, position):
            (tmp_path / "a" / f"shard_{shard:05d}.parquet").unlink()
        passed = position
        again = loader(path, plan=plan)
        again.load_state_dict(state)
        assert np.array_equal(rows_of(again), expected[4 * (step + 1) :])
    assert passed > 0
    twice = loader(made(tmp_path / "b", shards=12), plan=plan, epochs=2)
    twice.skip(25)
    twice.release(twice.state_dict())
    assert json.loads((tmp_path / "b" / "_position" / "trainer.json").read_text()) == {"shard": 0}


def test_a_reader_with_a_name_holds_shards_from_its_opening(tmp_path: Path) -> None:
    path = made(tmp_path / "a", shards=12)
    positions = tmp_path / "a" / "_position"
    loader(path)
    loader(path, rank=1, world_size=2, batch_size=2, reader="other")
    assert not positions.exists()
    plan = PlanConfig(pool_size=100, refill_threshold=0)
    found = loader(path, plan=plan, reader="eval")
    assert json.loads((positions / "eval.json").read_text()) == {"shard": 0}
    for _ in range(30):
        found.get_batch(4)
    found.release(found.state_dict())
    at = json.loads((positions / "eval.json").read_text())["shard"]
    assert at > 0
    loader(path, plan=plan, reader="eval")
    assert json.loads((positions / "eval.json").read_text()) == {"shard": at}
    with pytest.raises(BadConfig, match="reader is 'a/b'"):
        loader(path, reader="a/b")


def test_runs_with_directories_of_their_own_are_readers_of_their_own(tmp_path: Path) -> None:
    path = made(tmp_path / "a", shards=3)
    for name in ("one", "two", "one"):
        found = loader(path, run_dir=str(tmp_path / name))
        found.release(found.state_dict())
    written = sorted(file.name for file in (tmp_path / "a" / "_position").iterdir())
    assert len(written) == 2
    assert all(re.fullmatch(r"trainer-[0-9a-f]{8}\.json", name) for name in written)


# Threads and processes


def test_threads_share_the_stream(tmp_path: Path) -> None:
    path = made(tmp_path / "a", shards=6)
    expected = Counter(row.tobytes() for row in rows_of(loader(path)))
    found = loader(path)
    got: list[list[bytes]] = [[] for _ in range(4)]

    def read(mine: list[bytes], batches: Iterator[TrainingBatch]) -> None:
        for batch in batches:
            mine += [row.tobytes() for row in batch.input_ids]

    threads = [threading.Thread(target=read, args=(mine, iter(found))) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(row for mine in got for row in mine) == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_loader_goes_on_after_a_fork(tmp_path: Path) -> None:
    path = made(tmp_path / "a", shards=6)
    expected = rows_of(loader(path))
    found = loader(path)
    iterator = iter(found)
    first = [next(iterator).input_ids.copy() for _ in range(3)]
    answer, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rest = np.concatenate([batch.input_ids for batch in iterator])
            same = np.array_equal(np.concatenate([*first, rest]), expected)
            os.write(told, b"same" if same else b"other")
        finally:
            os._exit(0)
    deadline = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    os.close(told)
    assert os.read(answer, 10) == b"same"
    os.close(answer)
    rest = np.concatenate([batch.input_ids for batch in iterator])
    assert np.array_equal(np.concatenate([*first, rest]), expected)


# Behind, and without an end


def test_all_behind_waits_and_says_so(tmp_path: Path) -> None:
    paths = [made(tmp_path / name, shards=1, seal=False) for name in "ab"]
    for weights in ([1, 1], [1, 0]):
        found = loader(
            paths, weights=weights, plan=PlanConfig(behind="reweight"), stall_s=1,
            run_dir=str(tmp_path / f"run{weights[1]}"),
        )  # fmt: skip
        began = time.monotonic()
        with pytest.raises(ProducerStalled):
            rows_of(found)
        assert time.monotonic() - began < 20
        assert len(list((tmp_path / f"run{weights[1]}" / "_behind").iterdir())) < 20


def draw_one(found: PretrainDataLoader, seen: Counter[int]) -> None:
    seen.update(found.get_batch(1).input_ids[:, 0].tolist())


def test_a_shard_is_repeated_no_more_than_allowed(tmp_path: Path) -> None:
    dataset = GrowingDataset(tmp_path / "a")
    for shard in range(3):
        dataset.add(numbers(40, first=1 + 40 * shard))
        found = loader(
            dataset.url, plan=PlanConfig(behind="repeat", repeat_cap=2, pack="pad"), stall_s=0.5
        )
        seen: Counter[int] = Counter()
        read_until(ProducerStalled, functools.partial(draw_one, found, seen))
        assert max(seen.values()) <= 3
    growing = GrowingDataset(tmp_path / "b")
    growing.add(numbers(40))
    found = loader(
        growing.url, plan=PlanConfig(behind="repeat", repeat_cap=2, pack="pad"), stall_s=0.5
    )
    seen = Counter()

    def step() -> None:
        if found.step in (60, 100):
            growing.add(numbers(40, first=1 + 40 * len(growing.shards)))
        draw_one(found, seen)

    read_until(ProducerStalled, step)
    assert max(seen.values()) <= 3


def test_a_run_dir_is_of_one_run(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    plan = PlanConfig(behind="repeat")
    run_dir = str(tmp_path / "run")
    expected = rows_of(loader(path, plan=plan, run_dir=run_dir))
    assert np.array_equal(rows_of(loader(path, plan=plan, run_dir=run_dir)), expected)
    with pytest.raises(BadConfig, match="the answers of another run"):
        loader(path, plan=plan, run_dir=run_dir, seed=9)


def test_nothing_to_train_on_and_no_end(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    with pytest.raises(BadConfig, match="can be trained on"):
        next(iter(loader(path, chunk_size=2, epochs=None, plan=PlanConfig(long="drop"))))
    empty = GrowingDataset(tmp_path / "empty")
    empty.add([[], []])
    empty.seal()
    with pytest.raises(BadConfig, match="can be trained on"):
        next(iter(loader(empty.url, epochs=None)))


# The ledger


def test_the_ledger_is_among_the_events(tmp_path: Path) -> None:
    found = loader(made(tmp_path / "a"), run_dir=str(tmp_path / "run"))
    batches = len(list(found))
    events = [
        json.loads(line) for line in (tmp_path / "run" / "_events.jsonl").read_text().splitlines()
    ]
    assert [event["kind"] for event in events] == ["ledger", "ledger"]
    assert [event["step"] for event in events] == [1, batches]
    (line,) = events[-1]["sources"]
    assert line["read"] == line["trained"] + line["context"] == 300 * 30
    assert line["trained"] + line["context"] + line["padded"] == batches * 4 * 64


def test_padding_is_counted_by_source(tmp_path: Path) -> None:
    paths = [made(tmp_path / name) for name in "ab"]
    found = loader(paths, weights=[1, 1], pack="pad")
    padded = [0, 0]
    for batch in found:
        for row, source in batch.segments[:, :2].tolist():
            padded[source] += 64 - int(batch.fills[row])
        lines = found.ledger()
        places = sum(line.trained + line.context + line.padded for line in lines)
        assert places == found.step * 4 * 64
    lines = found.ledger()
    assert lines[1].padded == padded[1]
    assert lines[0].padded >= padded[0]


# A mirror that lags.


def test_resume_on_a_mirror_that_lags_waits_for_what_the_state_has_seen(tmp_path: Path) -> None:
    """It has a beginning of the log, and the rest is on its way."""
    whole = made(tmp_path / "whole", shards=6)
    first = loader(whole, seed=5)
    for _ in range(60):
        next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    expected = rows_of(first)
    mirror = tmp_path / "mirror" / "whole"
    records = sorted((tmp_path / "whole" / "_log").iterdir())

    def copy(count: int) -> None:
        (mirror / "_log").mkdir(parents=True, exist_ok=True)
        for shard in (tmp_path / "whole").glob("shard_*"):
            shutil.copyfile(shard, mirror / shard.name)
        for record in records[:count]:
            target = mirror / "_log" / record.name
            if not target.exists():
                shutil.copyfile(record, target.with_suffix(".new"))
                target.with_suffix(".new").rename(target)

    copy(3)
    late = loader(str(mirror), seed=5, stall_s=20)
    timers = [threading.Timer(0.3 * k, copy, args=(3 + k,)) for k in range(1, len(records) - 2)]
    for timer in timers:
        timer.start()
    late.load_state_dict(state)
    for timer in timers:
        timer.join()
    assert np.array_equal(rows_of(late), expected)


def test_resume_on_a_mirror_that_nobody_fills_says_so(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", shards=4)
    first = loader(whole)
    next(iter(first))
    state = first.state_dict()
    shutil.copytree(whole, tmp_path / "mirror" / "whole")
    for record in sorted((tmp_path / "mirror" / "whole" / "_log").iterdir())[3:]:
        record.unlink()
    late = loader(str(tmp_path / "mirror" / "whole"), stall_s=0.3)
    with pytest.raises(ProducerStalled) as caught:
        late.load_state_dict(state)
    assert caught.value.what == (
        "the state has seen record 5, the log ends at 2, and nothing has come for 0.3 s"
    )
    assert caught.value.do.startswith("start its push or pull again")


# A sharder that lives, and whose input does not grow.


def test_a_directory_that_is_made_between_two_looks_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, is_dir = tmp_path / "live", os.path.isdir

    def made_after_the_first_look(where: str) -> bool:
        found = is_dir(where)
        path.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr("os.path.isdir", made_after_the_first_look)
    with pytest.raises(ProducerStalled, match="nothing has come to"):
        await_first(str(path), wait_s=0.2, stall_s=0.2)


def test_the_writer_of_an_input_that_died_is_named_and_the_run_goes_on_when_it_is_back(
    tmp_path: Path, texts: Path
) -> None:
    tokenizer = Tokenizer.load(texts / "a")
    lines = [json.dumps({"text": f"document {k} " * 5}) + "\n" for k in range(120)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(lines[:70]))

    def shard() -> None:
        shard_jsonl(
            [source], tmp_path / "live", ShardConfig(rows_per_file=30, val_fraction=0),
            FollowConfig(beat_s=0.2, threads=1), tokenizer=tokenizer, tokens=True,
        )  # fmt: skip

    sharder = threading.Thread(target=shard)
    sharder.start()
    try:
        found = loader(
            str(tmp_path / "live"), tokenizer, stall_s=2.0, wait_s=60.0, plan=PlanConfig(ramp=True)
        )
        told = read_until(ProducerStalled, functools.partial(found.get_batch, 4))
        assert re.match(rf"the input of the dataset has not grown for \d+ s: {source}\n", told)
        assert "start the writer of the input again" in told
        with source.open("a") as file:
            file.write("".join(lines[70:]))
        mark_done(source)
        live = rows_of(found)
    finally:
        mark_done(source)
        sharder.join(30)
    assert len(live) > 0
    whole = rows_of(loader(str(tmp_path / "live"), tokenizer, plan=PlanConfig(ramp=True)))
    assert np.array_equal(live, whole[-len(live) :])
