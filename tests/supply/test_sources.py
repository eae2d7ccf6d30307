"""What a loader can read: parquet directories, globs, raw files; what it explains and bans."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import (
    ChunkConfig,
    FollowConfig,
    PlanConfig,
    PretrainDataLoader,
    RunConfig,
    ShardConfig,
    Tokenizer,
    TrainConfig,
    prepare_dataset,
    shard_jsonl,
    train_tokenizer,
)
from penstock.errors import (
    BadConfig,
    InputMissing,
    NoDataset,
    ProducerStalled,
    ShardMismatch,
    StateMismatch,
)
from penstock.supply.agree import Agreement
from penstock.supply.run_file import add_ban, read_bans, read_run

from .datasets import GrowingDataset, made_dataset, made_documents
from .nested import nested

SMALL = PlanConfig(pool_size=40, refill_threshold=30, buffer_pieces=4)
TEXTS = [f"int f{k}(int x) {{ return x * {k}; }}\n" * (1 + k % 5) for k in range(120)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("".join(TEXTS))
    train_tokenizer(
        [folder / "text.txt"],
        folder / "made",
        TrainConfig(vocab_size=300, special_tokens=("<|bos|>",)),
    )
    return Tokenizer.load(folder / "made")


def load(path: Any, tokenizer: Tokenizer | None, **options: Any) -> PretrainDataLoader:
    options.setdefault("plan", SMALL)
    return PretrainDataLoader(path, tokenizer, **nested(chunk_size=64, batch_size=4, **options))


def write_parquet(path: Path, texts: list[str], column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: texts}), path)


def texts_of(found: PretrainDataLoader) -> list[str]:
    """The documents that a loader gave, put together from their pieces, sorted."""
    pieces: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    assert found.tokenizer is not None
    bos = found.tokenizer.special_tokens["<|bos|>"]
    with found:
        for batch in found:
            at = np.concatenate([[0], np.cumsum(batch.segments[:, 6])])
            rows = [row[:fill] for row, fill in zip(batch.input_ids, batch.fills, strict=True)]
            flat = np.concatenate(rows).tolist()
            for k, (_, source, passed, shard, row, first, _) in enumerate(batch.segments.tolist()):
                key = source, passed, shard, row
                pieces.setdefault(key, []).append((first, flat[at[k] : at[k + 1]]))
    texts = []
    for parts in pieces.values():
        ids = [number for _, part in sorted(parts) for number in part]
        assert ids[0] == bos
        texts.append(found.tokenizer.decode(ids[1:]))
    return sorted(texts)


def test_a_directory_of_parquet_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for k in range(3):
        write_parquet(tmp_path / "d" / f"shard_{k:05d}.parquet", TEXTS[40 * k : 40 * (k + 1)])
    write_parquet(tmp_path / "d" / "val_shard.parquet", ["not trained"])
    (tmp_path / "d" / "_COMPLETE").touch()
    assert texts_of(load(str(tmp_path / "d"), tokenizer)) == sorted(TEXTS)
    assert texts_of(load(str(tmp_path / "d/*_0000[01].parquet"), tokenizer)) == sorted(TEXTS[:80])
    one = str(tmp_path / "d/shard_00002.parquet")
    assert texts_of(load(one, tokenizer)) == sorted(TEXTS[80:])
    assert texts_of(load(str(tmp_path / "d"), tokenizer, shard_ranges="1")) == sorted(TEXTS[40:80])
    assert texts_of(load(str(tmp_path / "d"), tokenizer, split="val")) == ["not trained"]


def test_a_directory_that_still_grows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    done = tmp_path / "done"
    for k in range(4):
        write_parquet(done / f"shard_{k:05d}.parquet", TEXTS[30 * k : 30 * (k + 1)])
    (done / "_COMPLETE").touch()
    whole = [batch.input_ids.tobytes() for batch in load(str(done), tokenizer, ramp=True)]
    live = tmp_path / "live"
    live.mkdir()

    def write() -> None:
        for k in (1, 0, 3, 2):  # they may arrive in any order
            data = (done / f"shard_{k:05d}.parquet").read_bytes()
            path = live / f"shard_{k:05d}.parquet"
            path.write_bytes(data[: len(data) // 2])  # seen half-way
            time.sleep(0.05)
            path.write_bytes(data)
        (live / "_COMPLETE").touch()

    writer = threading.Thread(target=write)
    writer.start()
    found = [batch.input_ids.tobytes() for batch in load(str(live), tokenizer, ramp=True)]
    writer.join()
    assert found == whole


def test_a_directory_is_known_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for k in range(2):
        write_parquet(tmp_path / "d" / f"shard_{k:05d}.parquet", TEXTS[30 * k : 30 * (k + 1)])
    first = load(str(tmp_path / "d"), tokenizer, streaming=False)
    next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    rest = [batch.input_ids.tobytes() for batch in first]
    again = load(str(tmp_path / "d"), tokenizer, streaming=False)
    again.load_state_dict(state)
    assert [batch.input_ids.tobytes() for batch in again] == rest
    write_parquet(tmp_path / "d" / "shard_00000.parquet", TEXTS[:7])
    with pytest.raises(StateMismatch, match="are not those that the state saw"):
        load(str(tmp_path / "d"), tokenizer, streaming=False).load_state_dict(state)


def test_what_a_directory_must_be(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoDataset, match="nothing to train on"):
        load(str(tmp_path / "empty"), tokenizer, streaming=False)
    with pytest.raises(ProducerStalled, match="nothing has come to"):
        load(str(tmp_path / "empty"), tokenizer, stall_s=0.1)
    write_parquet(tmp_path / "named" / "a.parquet", TEXTS[:3])
    with pytest.raises(BadConfig, match="has no number"):
        load(str(tmp_path / "named"), tokenizer)
    assert texts_of(load(str(tmp_path / "named"), tokenizer, streaming=False)) == TEXTS[:3]
    with pytest.raises(BadConfig, match="holds text and no tokens"):
        next(iter(load(str(tmp_path / "named"), None, streaming=False)))
    write_parquet(tmp_path / "other" / "a.parquet", TEXTS[:3], "content")
    with pytest.raises(ShardMismatch, match="has no column 'text'"):
        load(str(tmp_path / "other"), tokenizer, streaming=False)
    other = load(str(tmp_path / "other"), tokenizer, streaming=False, text_field="content")
    assert texts_of(other) == TEXTS[:3]
    (tmp_path / "named" / "b.parquet").write_bytes(b"PAR1 not parquet PAR1")
    with pytest.raises(ShardMismatch, match="not a parquet file"):
        load(str(tmp_path / "named"), tokenizer, streaming=False)
    with pytest.raises(InputMissing, match="there is nothing at"):
        load(str(tmp_path / "no" / "where"), tokenizer)
    with pytest.raises(InputMissing, match="there is nothing at"):
        load(str(tmp_path / "nowhere"), tokenizer, streaming=False)
    with pytest.raises(ProducerStalled, match="nothing has come to"):
        load(str(tmp_path / "nowhere"), tokenizer, wait_s=0.1)
    with pytest.raises(InputMissing, match="there is nothing at"):
        load(str(tmp_path / "nowhere.parquet"), tokenizer)


def test_files_that_come_before_those_in_use_are_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    for k in (0, 1):
        write_parquet(tmp_path / "d" / f"shard_{k:05d}.parquet", TEXTS[30 * k : 30 * (k + 1)])
    found = load(str(tmp_path / "d"), tokenizer)
    next(iter(found))
    write_parquet(tmp_path / "d" / "early_00000.parquet", TEXTS[60:90])
    with pytest.raises(ShardMismatch, match="are not those seen before"):
        list(found)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_raw_files_become_a_dataset(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    raw = tmp_path / f"raw.{kind}"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    raw.write_text("\n".join(lines) + "\n" if kind == "jsonl" else "".join(TEXTS))
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache")}
    found = texts_of(load(str(raw), tokenizer, **options))
    validation = texts_of(load(str(raw), tokenizer, split="val", **options))
    assert sorted(found + validation) == (sorted(TEXTS) if kind == "jsonl" else ["".join(TEXTS)])


def test_a_dataset_of_text_is_tokenised_on_the_fly(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    config, follow = ShardConfig(rows_per_file=30, val_fraction=0.0), FollowConfig(complete=True)
    shard_jsonl([tmp_path / "a.jsonl"], tmp_path / "text", config, follow)
    shard_jsonl(
        [tmp_path / "a.jsonl"], tmp_path / "ids", config, follow, tokenizer=tokenizer, tokens=True
    )
    plain = [batch.input_ids.tobytes() for batch in load(str(tmp_path / "text"), tokenizer)]
    stored = [batch.input_ids.tobytes() for batch in load(str(tmp_path / "ids"), tokenizer)]
    assert plain == stored
    other = Tokenizer.load(tokenizer)
    made_dataset(tmp_path / "else")
    with pytest.raises(BadConfig, match="is not the one that the dataset was made with"):
        load(str(tmp_path / "else"), other)


@pytest.mark.parametrize("tokens", [True, False], ids=["stored", "counted"])
def test_every_token_is_explained(tmp_path: Path, tokens: bool) -> None:
    raw = tmp_path / "src"
    raw.mkdir()
    for k in range(6):
        (raw / f"file{k}.cpp").write_text("".join(TEXTS[20 * k : 20 * (k + 1)]))
    (tmp_path / "tok").mkdir()
    folder = tmp_path / "tok"
    (folder / "text.txt").write_text("".join(TEXTS))
    train_tokenizer(
        [folder / "text.txt"],
        folder / "made",
        TrainConfig(vocab_size=300, special_tokens=("<|bos|>",)),
    )
    prepare_dataset(
        [raw],
        tmp_path / "d",
        [ChunkConfig(max_tokens=64)],
        ShardConfig(rows_per_file=20, val_fraction=0.0),
        tokenizer=folder / "made",
        tokens=tokens,
    )
    made, cut = Tokenizer.load(folder / "made"), 0
    bos = made.special_tokens["<|bos|>"]
    for pack in ("bestfit", "concat"):
        found = load(str(tmp_path / "d"), made, pack=pack)
        with found:
            for batch in found:
                spans = found.explain(batch)
                cut += sum(span.tokens[1] - 1 < span.document["n_tokens"] for span in spans)
                assert sum(span.last - span.first for span in spans) == batch.fills.sum()
                for span in spans:
                    ids = batch.input_ids[span.row, span.first : span.last]
                    text = made.decode_bytes([number for number in ids.tolist() if number != bos])
                    assert span.file_bytes is not None
                    a, b = span.file_bytes
                    data = (raw / Path(span.document["source"]).name).read_bytes()
                    assert data[a:b] == text
                    assert "chunk (max_tokens 64" in span.kept
                    assert str(span.document["doc_id"]) in str(span)
    assert cut > 3


def test_what_is_cut_from_lines_is_not_taken_for_a_file(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The bytes of a line are not those of its text, and nothing but the text tells them."""
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = ShardConfig(rows_per_file=20, val_fraction=0.0)
    steps = [ChunkConfig(max_tokens=64)]
    prepare_dataset([lines], tmp_path / "d", steps, config, tokenizer=tokenizer)
    with load(str(tmp_path / "d"), tokenizer) as found:
        for span in found.explain(next(found.get_iterator())):
            assert span.file_bytes is None
            assert span.text_bytes is not None
            data = lines.read_bytes()[span.document["start"] : span.document["end"]]
            assert span.text_bytes[1] <= len(json.loads(data)["text"].encode()) < len(data)


@pytest.mark.parametrize("tokens", [True, False], ids=["stored", "counted"])
def test_explain_reads_what_it_explains_and_no_more(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    """It took 12 s for a batch of 12 shards, whose texts it tokenised, and takes 0.1 s."""
    raw = tmp_path / "src"
    raw.mkdir()
    for k in range(40):
        (raw / f"file{k:02d}.cpp").write_text("".join(TEXTS[3 * k : 3 * (k + 1)]))
    monkeypatch.setattr("penstock.produce.columns.ROW_GROUP_BYTES", 200)
    config = ShardConfig(rows_per_file=20, val_fraction=0.0)
    prepare_dataset(
        [raw], tmp_path / "d", [ChunkConfig(max_tokens=64)], config, RunConfig(workers=1),
        tokenizer=tokenizer, tokens=tokens,
    )  # fmt: skip
    run = tmp_path / "run.toml"
    run.write_text(f'[loader]\npath = "{tmp_path / "d"}"\nchunk_size = 64\nbatch_size = 2\n')
    options = {**read_run(run), "tokenizer": tokenizer}
    with PretrainDataLoader(**options) as loader:
        expected = [loader.explain(batch) for batch in loader]
    assert len(expected) > 5
    groups: list[int] = []
    read = pq.ParquetFile.read_row_group

    def read_row_group(self: Any, group: int, *arguments: Any, **named: Any) -> Any:
        groups.append(group)
        return read(self, group, *arguments, **named)

    def decode(*_: object) -> None:
        raise AssertionError("a whole shard is decoded")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    monkeypatch.setattr("penstock.supply.sources.dataset.ShardSource.decode", decode)
    with PretrainDataLoader(**options) as loader:
        for step in (0, 3, 5):
            loader.reset()
            loader.skip(step)
            groups.clear()
            spans = loader.explain_next()
            assert spans == expected[step]
            assert 0 < len(groups) <= (1 if tokens else 2) * len(spans)
        loader.skip(10**6)
        assert loader.explain_next() is None


@pytest.mark.parametrize("bos", ["<|bos|>", None])
def test_a_document_that_is_cut_between_rows_is_traced_to_its_bytes(
    tmp_path: Path, tokenizer: Tokenizer, bos: str | None
) -> None:
    for k in range(2):
        write_parquet(tmp_path / "d" / f"shard_{k:05d}.parquet", TEXTS[40 * k : 40 * (k + 1)])
    (tmp_path / "d" / "_COMPLETE").touch()
    special, cut = tokenizer.special_tokens["<|bos|>"], 0
    found = load(str(tmp_path / "d"), tokenizer, pack="concat", bos=bos, eos=None)
    with found:
        for batch in found:
            for span in found.explain(batch):
                ids = batch.input_ids[span.row, span.first : span.last].tolist()
                text = TEXTS[40 * int(span.shard[6:11]) + span.shard_row].encode()
                assert span.text_bytes is not None
                a, b = span.text_bytes
                assert text[a:b] == tokenizer.decode_bytes([k for k in ids if k != special])
                cut += span.tokens[0] > 0
    assert cut > 10


def test_explain_from_the_command_line(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d")
    run = tmp_path / "run.toml"
    run.write_text(
        f'[loader]\npath = "{tmp_path / "d"}"\nchunk_size = 64\nbatch_size = 4\n'
        "[loader.plan]\npool_size = 90\nrefill_threshold = 60\n"
    )
    options = read_run(run)
    with PretrainDataLoader(**options) as loader:
        batches = list(loader)
        expected = [json.loads(json.dumps(str(span))) for span in loader.explain(batches[5])]
    command = [sys.executable, "-m", "penstock.cli", "explain", "--config", str(run)]
    told = subprocess.run(
        [*command, "--batch", "5"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert told == [*expected, "ramp: no, a full pool from the start"]
    beyond = subprocess.run([*command, "--batch", "99999"], capture_output=True, text=True)
    assert beyond.returncode == 1
    assert "there is no batch 99999" in beyond.stderr
    banned = subprocess.run([*command, "--ban", "7"], capture_output=True, text=True, check=True)
    assert "document 7 is banned" in banned.stdout
    assert add_ban(run, 7) == tmp_path / "run.ban"
    assert read_bans(tmp_path / "run.ban") == [7]
    with PretrainDataLoader(**read_run(run)) as loader:
        assert not any((batch.input_ids == 7).any() for batch in loader)
        assert loader.ledger()[0].skipped_documents == 1


def test_a_run_file_is_strict(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    for text, words in (
        ("[other]\n", "has no table"),
        ("[loader]\npaths = 1\n", "'paths' is not an option of the loader"),
        ("[loader.plan]\npool = 1\n", "'pool' is not an option of the plan"),
        ("loader", "is not TOML"),
    ):
        run.write_text(text)
        with pytest.raises(BadConfig) as caught:
            read_run(run)
        assert words in str(caught.value)
    with pytest.raises(BadConfig, match="there is no"):
        read_run(tmp_path / "none.toml")
    (tmp_path / "run.ban").write_text("12\nabc\n")
    with pytest.raises(BadConfig, match="is not a doc_id"):
        read_bans(tmp_path / "run.ban")


def behind_loader(
    folder: Path, behind: str, rank: int, world: int, run_dir: Path | None, **options: Any
) -> PretrainDataLoader:
    plan = PlanConfig(
        pool_size=12, refill_threshold=8, behind=behind, buffer_pieces=3, rest_samples=5,
        repeat_cap=50,
    )  # fmt: skip
    return PretrainDataLoader(
        {"a": str(folder / "a"), "b": str(folder / "b")},
        **nested(
            chunk_size=64,
            global_batch_size=4,
            weights={"a": 1.0, "b": 1.0},
            plan=plan,
            rank=rank,
            world_size=world,
            run_dir=None if run_dir is None else str(run_dir),
            **options,
        ),
    )


@pytest.mark.parametrize("behind", ["repeat", "reweight"])
def test_ranks_agree_on_a_source_that_is_behind(tmp_path: Path, behind: str) -> None:
    random = np.random.default_rng(3)
    fast, slow = GrowingDataset(tmp_path / "a"), GrowingDataset(tmp_path / "b")
    for k in range(8):
        fast.add(made_documents(random, 12, first=12 * k))
    fast.seal()
    slow.add(made_documents(random, 12, first=1000))
    run_dir = tmp_path / "run"
    ranks = [behind_loader(tmp_path, behind, r, 2, run_dir) for r in range(2)]
    first = ranks[0].get_iterator()
    ahead = [next(first) for _ in range(12)]  # rank 0 meets the gap
    state = json.loads(json.dumps(ranks[0].state_dict()))
    for k in range(1, 5):
        slow.add(made_documents(random, 12, first=1000 + 12 * k))
    slow.seal()
    second = ranks[1].get_iterator()
    later = [next(second) for _ in range(12)]  # rank 1 sees all shards, and does as rank 0 did
    together = [
        np.concatenate([a.input_ids, b.input_ids]) for a, b in zip(ahead, later, strict=True)
    ]
    rest = [batch.input_ids for batch in first]
    other = [batch.input_ids for batch in second]
    whole = together + [np.concatenate(pair) for pair in zip(rest, other, strict=True)]
    again = behind_loader(tmp_path, behind, 0, 1, run_dir)
    replayed = [batch.input_ids for batch in again]
    assert len(replayed) == len(whole)
    assert all((a == b).all() for a, b in zip(replayed, whole, strict=True))
    resumed = behind_loader(tmp_path, behind, 0, 2, run_dir)
    resumed.load_state_dict(state)
    assert [batch.input_ids.tobytes() for batch in resumed] == [ids.tobytes() for ids in rest]
    seen = np.bincount(np.concatenate(whole).reshape(-1))
    sizes = {d[0]: len(d) for shard in slow.shards + fast.shards for d in shard}
    for document, size in sizes.items():
        if document:  # 0 is also padding
            assert seen[document] >= size
            assert seen[document] % size == 0
            assert seen[document] == size or (behind == "repeat" and document >= 1000)
    if behind == "repeat":
        assert any(seen[k] > sizes[k] for k in range(1000, 1012))


def test_one_process_remembers_its_own_decisions(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    fast, slow = GrowingDataset(tmp_path / "a"), GrowingDataset(tmp_path / "b")
    for k in range(8):
        fast.add(made_documents(random, 12, first=12 * k))
    fast.seal()
    slow.add(made_documents(random, 12, first=1000))
    found = behind_loader(tmp_path, "reweight", 0, 1, None)
    iterator = iter(found)
    for _ in range(9):
        next(iterator)
    state = json.loads(json.dumps(found.state_dict()))
    slow.add(made_documents(random, 12, first=2000))
    slow.seal()
    rest = [batch.input_ids.tobytes() for batch in iterator]
    again = behind_loader(tmp_path, "reweight", 0, 1, None)
    again.load_state_dict(state)
    assert [batch.input_ids.tobytes() for batch in again] == rest


def test_ranks_need_a_place_to_agree() -> None:
    with pytest.raises(BadConfig, match="behind is 'repeat' on 2 ranks"):
        Agreement("repeat", None, 2)
