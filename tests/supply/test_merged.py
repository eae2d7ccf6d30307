"""Validation while the data grows: its parts are merged by the seal, and the rows stay the same."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import penstock
from penstock import (
    DocumentConfig,
    FollowConfig,
    PlanConfig,
    PretrainDataLoader,
    ShardConfig,
    Tokenizer,
)
from penstock.errors import ShardMismatch
from penstock.produce.writer import ShardWriter
from penstock.supply.batch import RowBatch
from penstock.supply.sources.dataset import LogSource

from .test_sources import tokenizer

__all__ = ["tokenizer"]
TEXTS = [f"int f{n}(int x) {{ return x + {n * n}; }}" * (1 + n % 5) for n in range(600)]
KINDS = {"tokens": True, "counts": False, "text": None}
"""Whether shards hold tokens, or their counts; of text alone neither."""
Seal = Callable[[], None]


class Stopped(Exception):
    """The producer ends before its seal."""


def unsealed(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a dataset up to its seal."""

    def stop(_: ShardWriter) -> Iterator[Any]:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "seal", stop)
        with pytest.raises(Stopped):
            make()


@pytest.fixture(params=KINDS)
def growing(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, Seal]:
    """A dataset of many validation parts, and what seals it."""
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokens = KINDS[request.param]

    def make() -> None:
        penstock.shard_jsonl(
            [str(lines)],
            tmp_path / "data",
            ShardConfig(rows_per_file=30, val_fraction=0.4),
            FollowConfig(complete=True),
            tokenizer=None if tokens is None else tokenizer,
            tokens=bool(tokens),
        )

    unsealed(make, monkeypatch)
    assert len(list((tmp_path / "data/_val").glob("*.parquet"))) > 10
    return str(tmp_path / "data"), make


def load(path: str, tokenizer: Tokenizer, ban: Sequence[int] = ()) -> PretrainDataLoader:
    return PretrainDataLoader(
        path,
        tokenizer,
        chunk_size=32,
        global_batch_size=2,
        documents=DocumentConfig(split="val", ban=ban),
        plan=PlanConfig(pool_size=20, refill_threshold=5, ramp=False),
    )


def contents(batches: Iterable[RowBatch]) -> list[tuple[Any, Any]]:
    return [(batch.input_ids.tolist(), batch.labels.tolist()) for batch in batches]


def test_a_run_goes_on_through_the_seal(growing: tuple[str, Seal], tokenizer: Tokenizer) -> None:
    path, seal = growing
    with load(path, tokenizer) as live:
        batches = iter(live)
        found = [next(batches) for _ in range(3)]
        state = json.loads(json.dumps(live.state_dict()))
        told = [(span.document, span.text_bytes) for span in live.explain(found[1])]
        seal()
        assert not list(Path(path, "_val").glob("*.*"))
        found += batches
        spans = live.explain(found[1])
        assert [(span.document, span.text_bytes) for span in spans] == told
    with load(path, tokenizer) as finished:
        whole = list(finished)
        known = finished.explain(whole[1])
    assert contents(found) == contents(whole)
    merged = pq.read_table(Path(path, "val_shard.parquet"))
    for span in (*spans, *known):
        assert span.shard == "val_shard.parquet"
        row = merged.slice(span.shard_row, 1).to_pylist()[0]
        assert {name: row[name] for name in span.document} == span.document
    with load(path, tokenizer) as resumed:
        resumed.load_state_dict(state)
        assert contents(resumed) == contents(whole[3:])
    assert sum(line.documents for line in finished.ledger()) == merged.num_rows


def test_bans_hold_in_what_was_merged(growing: tuple[str, Seal], tokenizer: Tokenizer) -> None:
    path, seal = growing
    found = pq.read_table(Path(path, "_val/val_00010.parquet"), columns=["doc_id"])
    banned = found.column(0).to_pylist()[:3]
    with load(path, tokenizer, banned) as live:
        batches = iter(live)
        first = next(batches)
        seal()
        found = [first, *batches]
    with load(path, tokenizer, banned) as finished:
        assert contents(finished) == contents(found)
        ids = {span.document["doc_id"] for batch in found for span in finished.explain(batch)}
    assert ids
    assert not ids & set(banned)


def test_a_merged_file_that_is_damaged_is_named(
    growing: tuple[str, Seal], tokenizer: Tokenizer
) -> None:
    path, seal = growing
    with load(path, tokenizer) as live:
        batches = iter(live)
        next(batches)
        seal()
        for file in Path(path).glob("val_shard.*"):
            file.write_bytes(file.read_bytes()[:-9] + b"123456789")
        with pytest.raises(ShardMismatch, match=r"val_shard.*is not what was written"):
            list(batches)


def test_conversations_keep_their_masks(
    tmp_path: Path, chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "chats.jsonl"
    turns = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "n " * (n % 9)}]
        for n in range(1, 300)
    ]
    lines.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))

    def make() -> None:
        penstock.shard_conversations(
            [str(lines)],
            tmp_path / "data",
            penstock.ChatConfig(max_length=64),
            ShardConfig(rows_per_file=20, val_fraction=0.4),
            FollowConfig(complete=True, max_rejects=0.2),
            tokenizer=chat_tokenizer,
        )

    def open_loader() -> penstock.ConversationDataLoader:
        return penstock.ConversationDataLoader(
            str(tmp_path / "data"), chat_tokenizer, 64, batch_size=2,
            documents=DocumentConfig(split="val"),
            plan=PlanConfig(pool_size=9, refill_threshold=3, ramp=False),
        )  # fmt: skip

    unsealed(make, monkeypatch)
    with open_loader() as live:
        batches = iter(live)
        found = [next(batches), next(batches)]
        make()
        found += batches
    with open_loader() as finished:
        assert contents(finished) == contents(found)


@pytest.mark.torch
def test_examples_of_merged_parts_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is a range of the merged file, which is not read and hashed for each of them."""
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = ShardConfig(rows_per_file=30, val_fraction=0.4)

    def make() -> None:
        penstock.shard_jsonl([str(lines)], tmp_path / "data", config, FollowConfig(complete=True))

    def examples() -> list[dict[str, Any]]:
        found = penstock.StreamingMixedShardDataset(
            [str(tmp_path / "data")], ["all"], pool_size=20, refill_threshold=5, random_seed=1,
            documents=DocumentConfig(split="val"), plan=PlanConfig(ramp=False),
        )  # fmt: skip
        return list(itertools.islice(found, 200))

    unsealed(make, monkeypatch)
    live = examples()
    make()
    reads: list[str] = []
    verified = LogSource._verified

    def count(source: LogSource, file: Any) -> bytes:
        reads.append(file.name)
        return verified(source, file)

    monkeypatch.setattr(LogSource, "_verified", count)
    assert examples() == live
    assert reads == ["val_shard.parquet"]
