"""Shards with token counts and tokens: the tokenizer's own, proven by `verify`."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.errors import BadConfig
from penstock.shard.follow import FollowConfig, shard_jsonl
from penstock.shard.verify import verify
from penstock.shard.write import ShardConfig
from penstock.store.backends import open_store
from penstock.store.log import Log
from penstock.tokenize.tokenizer import Tokenizer
from penstock.tokenize.train import TrainConfig, train_tokenizer

FOLLOW = FollowConfig(complete=True, max_rejects=1.0, threads=2)
CONFIG = ShardConfig(rows_per_file=40, val_fraction=0.2, seed=3)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_text(
        "".join(
            f'{{"text": "int f{k}() {{ return {k}; }} // é <|endoftext|>"}}\n' for k in range(300)
        )
    )
    return path


@pytest.fixture(scope="module")
def tokenizer(lines: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([lines], folder, TrainConfig(vocab_size=300))
    return Tokenizer.load(folder)


@pytest.mark.parametrize("tokens", [False, True])
def test_shards_hold_what_the_tokenizer_gives(
    lines: Path, tokenizer: Tokenizer, tmp_path: Path, tokens: bool
) -> None:
    outcome = shard_jsonl(
        [lines], tmp_path / "out", CONFIG, FOLLOW, tokenizer=tokenizer, tokens=tokens
    )
    assert outcome.sealed
    opened = outcome.state.opened
    assert opened is not None
    assert opened.config["tokenizer"] == tokenizer.fingerprint
    assert opened.config["token_type"] == ("uint16" if tokens else "")
    rows = 0
    for file in [*outcome.state.split("train"), *outcome.state.split("val")]:
        table = pq.read_table(tmp_path / "out" / file.name)
        assert ("tokens" in table.column_names) == tokens
        for row in table.to_pylist():
            ids = tokenizer.encode(row["text"]).tolist()
            assert row["n_tokens"] == len(ids)
            assert 0 not in ids  # the special token in the text is content
            if tokens:
                assert row["tokens"] == ids
        assert file.tokens == sum(table["n_tokens"].to_pylist())
        rows += table.num_rows
    assert rows == 300
    assert not verify(open_store(tmp_path / "out"), full=True).faults


def test_a_restart_must_bring_the_same_tokenizer(
    lines: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    shard_jsonl([lines], tmp_path / "out", CONFIG, FOLLOW, tokenizer=tokenizer, tokens=True)
    with pytest.raises(BadConfig, match="begun with other options") as caught:
        shard_jsonl([lines], tmp_path / "out", CONFIG, FOLLOW)
    assert "token_type: 'uint16' before, '' now" in caught.value.why
    assert "tokenizer" in caught.value.why


def test_tokens_need_a_tokenizer(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="--tokens needs --tokenizer"):
        shard_jsonl([lines], tmp_path / "out", CONFIG, FOLLOW, tokens=True)
    with pytest.raises(BadConfig, match="--tokens needs --tokenizer"):
        replace(CONFIG, token_type="uint16")
    with pytest.raises(BadConfig, match="token_type is 'int8'"):
        replace(CONFIG, token_type="int8", tokenizer="x")


def test_verify_finds_counts_that_are_not_those_of_the_tokens(
    lines: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written wrong, hashed and committed: only the columns can show it."""
    from penstock.shard import columns

    honest = columns._with_tokens

    def wrong(batch, tokenizer, schema):  # type: ignore[no-untyped-def]
        import pyarrow as pa
        import pyarrow.compute as pc

        made, count = honest(batch, tokenizer, schema)
        more = pc.add(made.column(1), pa.scalar(1, pa.int32()))
        arrays = [made.column(0), more, *made.columns[2:]]
        return pa.RecordBatch.from_arrays(arrays, schema=schema), count

    monkeypatch.setattr(columns, "_with_tokens", wrong)
    for tokens, said in ((True, "counts its tokens wrong"), (False, "tokens")):
        out = tmp_path / str(tokens)
        shard_jsonl([lines], out, CONFIG, FOLLOW, tokenizer=tokenizer, tokens=tokens)
        assert not verify(open_store(out), full=False).faults
        faults = verify(open_store(out), full=True).faults
        assert len(faults) == len(Log.open(out).state.files)
        assert all(said in fault.what for fault in faults)
