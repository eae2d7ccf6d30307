"""What the page says of a batch is what the loader hands out."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock import (
    ConversationDataLoader,
    PlanConfig,
    PretrainDataLoader,
    RolloutDataLoader,
    RolloutWriter,
    WatchConfig,
    shard_conversations,
)
from penstock.errors import BadConfig
from penstock.produce.dataset import FollowConfig
from penstock.produce.writer import ShardConfig
from penstock.supply.pretrain import RowLoader
from penstock.supply.run_file import open_run, read_run
from penstock.supply.settings import LoaderRun
from penstock.watch import explorer as module
from penstock.watch.explorer import Explorer, RolloutExplorer
from penstock.watch.workplace import Watch
from rollout.made import groups
from supply.datasets import GrowingDataset, made_dataset, made_documents
from watch.made import make_shop

Json = module.Json


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return make_shop(tmp_path_factory.mktemp("explorer") / "shop", tokenizer_folder)


def of_run(shop: Path) -> Explorer:
    path = shop / "run.toml"
    return Explorer("run.toml", "run", lambda: open_run(path), config=str(path))


def of_dataset(
    folder: Path, *, batch_size: int = 4, seq_len: int = 64, stall_s: float = 0.0
) -> Callable[[], RowLoader]:
    def made() -> RowLoader:
        return PretrainDataLoader(
            str(folder), None, seq_len, batch_size=batch_size,
            run=LoaderRun(rank=0, world_size=1, stall_s=stall_s), plan=PlanConfig(ramp=True),
        )  # fmt: skip

    return made


def test_rows_are_those_of_the_loader(shop: Path) -> None:
    shown = of_run(shop)
    with PretrainDataLoader(**read_run(shop / "run.toml")) as loader:
        batches = list(loader)
    assert len(batches) > 20
    for n in (0, 17, 3, len(batches) - 1):
        batch = batches[n]
        about = shown.batch(n)
        assert about["fills"] == batch.fills[: len(about["fills"])].tolist()
        for r in range(len(batch.input_ids)):
            row = shown.row(n, r)
            fill = int(batch.fills[r])
            assert row["fill"] == fill
            assert row["ids"] == batch.input_ids[r, :fill].tolist()
            assert row["trained"] == batch.loss_mask[r, :fill].astype(int).tolist()
            assert [span["last"] - span["first"] for span in row["spans"]] == [
                piece[1] for piece in about["rows"][r]
            ]
    assert loader.tokenizer is not None
    row = shown.row(17, 1)
    assert "".join(row["pieces"]) == loader.tokenizer.decode(row["ids"])


def test_bytes_of_tokens_are_bytes_of_the_file(shop: Path) -> None:
    shown = of_run(shop)
    seen = 0
    for n in range(6):
        for r in range(4):
            row = shown.row(n, r)
            for span in row["spans"]:
                if not span["file_bytes"]:
                    continue
                at = span["file_bytes"][0]
                data = Path(span["file"]).read_bytes()
                for k in range(span["first"], span["last"]):
                    size = row["sizes"][k]
                    if size:
                        assert data[at : at + size] == row["pieces"][k].encode()
                        seen += 1
                    at += size
    assert seen > 500


def test_a_jump_is_where_steps_lead(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLACE_S", 0.0)  # a place is remembered after every stride
    monkeypatch.setattr(module, "STRIDE", 3)
    monkeypatch.setattr(module, "MOST_PLACES", 4)
    steps, jumps = of_run(shop), of_run(shop)
    one_by_one = [steps.batch(n) for n in range(30)]
    for n in (29, 0, 14, 13, 28, 1):
        assert jumps.batch(n) == one_by_one[n]


def test_a_long_way_is_left_and_gone_on_with(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIDE", 3)
    expected = of_run(shop).batch(29)
    monkeypatch.setattr(module, "GO_S", 0.0)
    shown, reached = of_run(shop), []
    for _ in range(9):
        with pytest.raises(BadConfig, match="still planning batch 29: at") as error:
            shown.batch(29)
        assert error.value.do == "ask again: it goes on from there"
        reached.append(shown._cursor().loader.step)
    assert reached == list(range(3, 30, 3))
    assert shown.batch(29) == expected
    assert shown.stretch(0, 20)["count"] == 20
    assert shown.where(0, 10**6, 0, at=25)["next"] == 25


def test_a_batch_that_is_not_there_yet_comes_with_its_shards(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    growing = GrowingDataset(tmp_path / "live")
    growing.add(made_documents(random, 60))
    shown = Explorer("live", "live", of_dataset(tmp_path / "live"))
    first = shown.batch(0)
    with pytest.raises(BadConfig, match="batch 40 is not there yet") as error:
        shown.batch(40)
    assert "ends with batch" in error.value.why
    assert "no batch" in _not_yet(tmp_path / "empty")
    assert shown.head()["final"] is False
    for k in range(20):
        growing.add(made_documents(random, 60, first=60 * (k + 1)))
    assert shown.batch(0) == first
    later = shown.batch(40)
    growing.seal()
    assert shown.batch(40) == later
    with pytest.raises(BadConfig, match="there is no batch 100,000") as error:
        shown.batch(100_000)
    assert "the run ends with batch" in error.value.why
    with PretrainDataLoader(
        str(tmp_path / "live"), None, 64, batch_size=4, plan=PlanConfig(ramp=True)
    ) as loader:
        assert len(list(loader)) == shown._cursor().loader.step


def _not_yet(folder: Path) -> str:
    growing = GrowingDataset(folder)
    growing.add([[1]])
    with pytest.raises(BadConfig, match="batch 0 is not there yet") as error:
        Explorer("e", "e", of_dataset(folder)).batch(0)
    return error.value.why


def test_the_number_of_batches_is_counted_beside(tmp_path: Path) -> None:
    made_dataset(tmp_path / "data")
    shown = Explorer("data", "data", of_dataset(tmp_path / "data"))
    estimated = shown.head()
    assert shown._counting is not None
    shown._counting.join()
    counted = shown.head()
    assert (counted["exact"], counted["final"]) == (True, True)
    assert estimated["batches"] <= counted["batches"] <= estimated["batches"] + 3
    shown.batch(counted["batches"] - 1)
    with pytest.raises(BadConfig, match="there is no batch"):
        shown.batch(counted["batches"])


def test_a_document_is_found_and_its_batch(shop: Path) -> None:
    shown = of_run(shop)
    found = shown.search("NEEDLE-in-the-river")
    assert found["next"] is None
    (hit,) = found["hits"]
    assert (hit["why"], hit["name"]) == ("text", "prose")
    assert "needle-in-the-river" in hit["excerpt"]
    assert hit["ban"] == f"penstock explain --config {shop / 'run.toml'} --ban {hit['doc_id']}"
    (by_id,) = shown.search(hit["doc_id"])["hits"]
    assert {**by_id, "why": "", "excerpt": ""} == {**hit, "why": "", "excerpt": ""}
    by_name = shown.search("part_007.CPP")["hits"]
    assert by_name
    assert {one["why"] for one in by_name} == {"file"}
    assert shown.search("nowhere at all")["hits"] == []
    where = shown.where(hit["source"], hit["shard_number"], hit["shard_row"])
    row = shown.row(where["batch"], where["row"])
    assert hit["doc_id"] in {span["doc_id"] for span in row["spans"]}
    later = shown.where(hit["source"], hit["shard_number"], hit["shard_row"], where["batch"] + 1)
    assert later["batch"] is None or later["batch"] > where["batch"]  # the second epoch
    assert shown.where(0, 0, 10**6)["next"] is None


def test_a_search_goes_on_where_it_stopped(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = of_run(shop)
    whole = [hit["doc_id"] for hit in shown.search("chapter 1")["hits"]]
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    parts: list[str] = []
    at: int | None = 0
    turns = 0
    while at is not None:
        found = shown.search("chapter 1", at)
        parts += [hit["doc_id"] for hit in found["hits"]]
        at, turns = found["next"], turns + 1
    assert parts == whole
    assert turns > 3


def test_a_stretch_counts_what_its_batches_have(shop: Path) -> None:
    shown = of_run(shop)
    found = shown.stretch(2, 10)
    batches = [shown.batch(n) for n in range(2, 12)]
    assert found["count"] == 10
    assert sum(found["curve"]["tokens"]) == sum(batch["tokens"] for batch in batches)
    assert found["documents"] == sum(batch["documents"] for batch in batches)
    fill = sum(batch["tokens"] for batch in batches) / (10 * 4 * 256)
    assert np.mean(found["curve"]["fill"]) == pytest.approx(fill, abs=1e-4)
    assert found["weights"][0][1] == [0.75, 0.25]
    pieces = [piece for batch in batches for row in batch["rows"] for piece in row]
    begun = [source for source, _, _, _, begin in pieces if begin == 0]
    assert found["curve"]["samples"] == [begun.count(0), begun.count(1)]
    assert sum(one["count"] for one in found["lengths"]) == found["documents"]
    xs, sources, ys = found["points"]
    assert set(xs) == set(range(2, 12))
    assert set(sources) == {0, 1}
    assert 0 <= min(ys) <= max(ys) <= 1
    read = sum(line["read"] for line in found["ledger"])
    assert read > 0
    by_files = shown.stretch(2, 10, by="files")
    assert by_files["by"] == "files"
    assert by_files["points"][0] == xs
    assert by_files["points"][2] != ys


def test_a_stretch_is_no_longer_than_memory_allows(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 20)
    shown = of_run(shop)
    assert shown.stretch(0, 1000)["count"] == 5
    (hit,) = shown.search("needle-in-the-river")["hits"]
    place = hit["source"], hit["shard_number"], hit["shard_row"]
    found = shown.where(*place)
    monkeypatch.undo()
    assert of_run(shop).where(*place) == found


def test_an_order_in_blocks_is_seen(tmp_path: Path) -> None:
    """A pool of one shard after the other makes a diagonal, a large one a cloud."""
    made_dataset(tmp_path / "data", shards=20, rows=50)

    def spread(pool: int) -> float:
        loader = PretrainDataLoader(
            str(tmp_path / "data"), None, 64, batch_size=4,
            plan=PlanConfig(ramp=False, pool_size=pool, refill_threshold=0, buffer_pieces=4),
            run=LoaderRun(rank=0, world_size=1),
        )  # fmt: skip
        found = Explorer("d", "d", lambda: loader).stretch(0, 1000)
        xs, _, ys = map(np.array, found["points"])
        parts = np.array_split(ys[np.argsort(xs, kind="stable")], 10)
        return float(np.mean([np.quantile(p, 0.75) - np.quantile(p, 0.25) for p in parts]))

    assert spread(50) < 0.1
    assert spread(10**6) > 0.4


def test_conversations_have_roles_and_trained_spans(chat_folder: Path, tmp_path: Path) -> None:
    turns = [
        {"messages": [{"role": "user", "content": f"{n} + {n}?"},
                      {"role": "assistant", "content": f"It is {2 * n}."}]}
        for n in range(60)
    ]  # fmt: skip
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in turns))
    shard_conversations(
        [path], tmp_path / "chats", None, ShardConfig(val_fraction=0.0),
        FollowConfig(complete=True), tokenizer=chat_folder,
    )  # fmt: skip

    def made() -> RowLoader:
        return ConversationDataLoader(str(tmp_path / "chats"), chat_folder, 2048, batch_size=2)

    shown = Explorer("chats", "chats", made)
    batch = next(iter(made()))
    row = shown.row(0, 0)
    fill = row["fill"]
    assert row["ids"] == batch.input_ids[0, :fill].tolist()
    assert row["trained"] == batch.loss_mask[0, :fill].astype(int).tolist()
    assert {"user", "assistant"} <= {*row["roles"]}
    trained = [role for role, mark in zip(row["roles"], row["trained"], strict=True) if mark]
    assert {*trained} == {"assistant"}
    assert row["special"]
    of_folder = Watch(str(tmp_path), WatchConfig(tokenizer=str(chat_folder), batch_size=2))
    of_folder.overview()
    assert of_folder.explorer("chats").row(0, 0) == row
    unknown = Watch(str(tmp_path), WatchConfig())
    unknown.overview()
    with pytest.raises(BadConfig, match="the tokenizer of the conversations is not known"):
        unknown.explorer("chats").row(0, 0)


def test_rollouts_have_rewards_and_advantages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RolloutWriter(str(tmp_path / "r")) as writer:
        writer.write_many(groups(12))

    def made() -> RolloutDataLoader:
        run = LoaderRun(rank=0, world_size=1, stall_s=0.0)
        return RolloutDataLoader(str(tmp_path / "r"), batch_size=8, run=run)

    shown = RolloutExplorer("r", "r", made)
    loader = made()
    batches = [loader.get_batch(8) for _ in range(4)]
    for n in (3, 0, 2):
        about, batch = shown.batch(n), batches[n]
        assert about["rewards"] == pytest.approx(batch.rewards.tolist(), abs=1e-6)
        assert about["sources"] == list(dict.fromkeys(batch.group_ids))
        for r in (0, len(batch.fills) - 1):
            row, fill = shown.row(n, r), int(batch.fills[r])
            assert row["ids"] == batch.input_ids[r, :fill].tolist()
            assert row["trained"] == batch.loss_mask[r, :fill].astype(int).tolist()
            assert batch.advantages is not None
            assert row["advantages"] == pytest.approx(batch.advantages[r, :fill].tolist(), abs=1e-6)
            assert row["spans"][0]["file"] == batch.rollout_ids[r]
    assert shown.head()["is_rollouts"] is True
    monkeypatch.setattr(module, "GO_S", 0.0)
    monkeypatch.setattr(module, "MOST_PLACES", 2)
    slow = RolloutExplorer("r", "r", made)
    for at in (1, 2, 3):
        with pytest.raises(BadConfig, match=f"still planning batch 3: at {at}"):
            slow.batch(3)
        assert len(slow._places) <= 2
    assert slow.batch(3) == shown.batch(3)
    monkeypatch.setattr(module, "GO_S", 60.0)
    with pytest.raises(BadConfig, match="batch 100 is not there yet"):
        shown.batch(100)
    with pytest.raises(BadConfig, match="rollouts have no mixture"):
        shown.stretch(0, 1)
    with pytest.raises(BadConfig, match="rollouts cannot be searched"):
        shown.where(0, 0, 0)
    (about_one,) = [
        one for one in Watch(str(tmp_path), WatchConfig()).overview()["runs"] if one["key"] == "r"
    ]
    assert about_one["about"] == "rollouts, 8 a batch"


def test_a_run_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[loader]\npath = 'nothing'\n")
    shown = Explorer("run.toml", "run", lambda: open_run(tmp_path / "run.toml"))
    for _ in range(2):
        with pytest.raises(Exception, match="there is nothing at"):
            shown.head()


def test_looking_leaves_no_trace(shop: Path) -> None:
    def seen() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in shop.rglob("*"))

    before = seen()
    shown = of_run(shop)
    shown.head()
    shown.row(12, 1)
    shown.stretch(0, 20)
    shown.search("needle")
    assert seen() == before
