"""Shards with token counts and token files: the tokenizer's own, proven by `verify`."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import xxhash

from penstock import PretrainDataLoader
from penstock.errors import BadConfig, ShardMismatch
from penstock.produce.columns import SCHEMA
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig, ShardWriter
from penstock.store.log import Log, LogWriter
from penstock.store.record import Add, Op, Open, Progress, Record, Seal, encode, record_name
from penstock.store.store import open_store
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
        assert table.schema.equals(SCHEMA)
        encoded = [tokenizer.encode(text).tolist() for text in table["text"].to_pylist()]
        assert 0 not in [id for ids in encoded for id in ids]  # special text in content is content
        assert table["n_tokens"].to_pylist() == [len(ids) for ids in encoded]
        assert file.tokens == sum(map(len, encoded))
        beside = outcome.state.tokens_of(file)
        assert (beside is not None) == tokens
        if beside is not None:
            assert beside.name == file.name.replace(".parquet", ".tokens.arrow")
            assert (beside.rows, beside.tokens) == (file.rows, file.tokens)
            found = pa.ipc.open_file(tmp_path / "out" / beside.name).read_all()
            assert found["tokens"].to_pylist() == encoded
            assert found["doc_id"].equals(table["doc_id"])
        rows += table.num_rows
    assert rows == 300
    assert not verify(open_store(tmp_path / "out"), full=True).faults
    assert not list((tmp_path / "out" / "_val").iterdir())


@pytest.fixture(scope="module")
def made(lines: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    shard_jsonl([lines], out, CONFIG, FOLLOW, tokenizer=tokenizer, tokens=True)
    return out


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def data(dataset: Path) -> dict[str, bytes]:
    found = [path for path in dataset.rglob("*") if path.is_file()]
    return {str(path.relative_to(dataset)): path.read_bytes() for path in found}


def test_a_name_that_is_taken_and_a_file_whose_record_never_came(
    made: Path, lines: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Other bytes are left alone by a first writer and removed by a later one; its own adopted."""
    out, whole = tmp_path / "out", Log.open(made).state
    names = ["shard_00000.tokens.arrow", "val_shard.tokens.arrow"]
    out.mkdir()
    for name in names:
        (out / name).write_bytes(b"not ours")
    (out / "shard_00001.tokens.arrow").write_bytes((made / "shard_00001.tokens.arrow").read_bytes())
    shard_jsonl([lines], out, CONFIG, FOLLOW, tokenizer=tokenizer, tokens=True)
    state = Log.open(out).state
    for file in whole.split("tokens"):
        shard = whole.shard_of(file)
        assert shard is not None
        found = state.tokens_of(state.files[shard.name])
        assert found is not None
        assert found.sha256 == file.sha256
        taken = found.name != file.name
        assert taken == (file.name in names)
        if taken:
            assert (out / file.name).read_bytes() == b"not ours"
    assert not verify(open_store(out), full=True).faults


def test_a_dataset_that_an_earlier_penstock_began(
    made: Path, lines: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its shards held tokens in a column: begun so, it cannot be finished otherwise."""
    whole = Log.open(made)
    opened = whole.record(0).ops
    without = [op for op in whole.record(1).ops if not isinstance(op, Add) or op.split != "tokens"]
    store = open_store(tmp_path / "out", make=True)
    assert isinstance(opened[0], Open)
    writer = LogWriter.take(store, opened[0].config, opened[0].inputs, writer="before")
    writer.commit(without)
    with pytest.raises(BadConfig, match="begun by an earlier penstock") as caught:
        shard_jsonl([lines], tmp_path / "out", CONFIG, FOLLOW, tokenizer=tokenizer, tokens=True)
    assert "finish it with the penstock that began it" in caught.value.do


@pytest.mark.parametrize("kind", ["parquet", "tokens.arrow"])
def test_the_seal_does_not_launder_a_damaged_part(
    lines: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It gives the rows and tokens of all validation parts a new hash: each is proven first."""
    out, name = tmp_path / "out", f"_val/val_00001.{kind}"
    seal = ShardWriter.seal

    def damage_and_seal(writer: ShardWriter) -> Iterator[Record]:
        yield from writer.commit(0)
        data = bytearray((out / name).read_bytes())
        data[len(data) // 2] ^= 1
        (out / name).write_bytes(data)
        yield from seal(writer)

    monkeypatch.setattr(ShardWriter, "seal", damage_and_seal)
    with pytest.raises(ShardMismatch, match=f"{name} is not what was written"):
        shard_jsonl([lines], out, CONFIG, FOLLOW, tokenizer=tokenizer, tokens=True)
    assert Log.open(out).state.sealed is None


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
    from penstock.prepare import task

    honest = task._with_tokens

    def wrong(rows: pa.RecordBatch, tokens: pa.ListArray, *, keep: bool) -> pa.RecordBatch:
        made = honest(rows, tokens, keep=keep)
        more = pc.add(made.column("n_tokens"), pa.scalar(1, pa.int32()))
        return made.set_column(made.schema.names.index("n_tokens"), "n_tokens", more)

    def counted(rows: pa.RecordBatch, tokens: pa.ListArray, *, keep: bool) -> pa.RecordBatch:
        others = pa.array([[0, *row] for row in tokens.to_pylist()], tokens.type)
        return honest(rows, others, keep=keep)

    monkeypatch.setattr(task, "_with_tokens", counted)
    out = tmp_path / "out"
    shard_jsonl([lines], out, CONFIG, FOLLOW, tokenizer=tokenizer, tokens=True)
    assert not verify(open_store(out), full=True).faults  # ids that nobody encoded, told alike
    monkeypatch.setattr(task, "_with_tokens", wrong)
    with pytest.raises(AssertionError, match="as many ids as the rows say"):
        shard_jsonl([lines], tmp_path / "b", CONFIG, FOLLOW, tokenizer=tokenizer, tokens=True)


def rewrite(dataset: Path, name: str, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
    """Change a token file, and have the log say that it is so."""
    path = dataset / name
    batch = change(pa.ipc.open_file(path.read_bytes()).get_batch(0))
    with pa.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    retell(dataset, name, path.read_bytes())


def retell(
    dataset: Path, name: str, data: bytes, xxh3: str | None = None, more_tokens: int = 0
) -> None:
    """Have the log say that a file holds `data`, and so many more tokens than it said before."""
    (dataset / name).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    xxh3 = xxhash.xxh3_128_hexdigest(data) if xxh3 is None else xxh3
    before = Log.open(dataset)
    records = [before.record(n) for n in range(before.state.n + 1)]
    head = "0" * 64
    for record in records:
        ops: list[Op] = []
        for op in record.ops:
            if isinstance(op, Add) and op.name == name:
                tokens = (op.tokens or 0) + more_tokens
                op = msgspec.structs.replace(
                    op, sha256=digest, bytes=len(data), tokens=tokens, xxh3=xxh3
                )
            elif isinstance(op, Seal):
                op = msgspec.structs.replace(op, head=head)
            ops.append(op)
        line = encode(msgspec.structs.replace(record, ops=ops, prev=head))
        (dataset / record_name(record.n)).write_bytes(line)
        head = line[-67:-3].decode()
    (dataset / "_COMPLETE").write_bytes(line)


def with_column(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    number = batch.schema.get_field_index(name)
    return batch.set_column(number, batch.schema.field(number), values)


def reversed_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array(range(len(batch))[::-1]))


def other_documents(batch: pa.RecordBatch) -> pa.RecordBatch:
    return with_column(batch, "doc_id", pa.array(range(len(batch)), pa.uint64()))


def longer_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """As many tokens in all, and others in the rows."""
    rows = batch.column("tokens").to_pylist()
    rows[0], rows[1] = [*rows[0], rows[1][0]], rows[1][1:]
    return with_column(batch, "tokens", pa.array(rows, batch.schema.field("tokens").type))


def one_more(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows = batch.column("tokens").to_pylist()
    rows[0].append(1)
    return with_column(batch, "tokens", pa.array(rows, batch.schema.field("tokens").type))


def of_others(batch: pa.RecordBatch) -> pa.RecordBatch:
    about = {**(batch.schema.metadata or {}), b"penstock.tokenizer": b"another"}
    return batch.replace_schema_metadata(about)


def wider(batch: pa.RecordBatch) -> pa.RecordBatch:
    kind = pa.large_list(pa.field("item", pa.uint32(), nullable=False))
    fields = [pa.field("tokens", kind, nullable=False), batch.schema.field("doc_id")]
    return batch.cast(pa.schema(fields, metadata=batch.schema.metadata))


@pytest.mark.parametrize(
    ("change", "what", "why"),
    [
        (reversed_rows, "is not of the rows of", "doc_id, rows 0 to"),
        (other_documents, "is not of the rows of", "doc_id, rows 0 to"),
        (longer_rows, "is not of the rows of", "n_tokens, rows 0 to"),
        (one_more, "tokens", "the log says"),
        (of_others, "is not a token file", "its tokens are those of another"),
        (wider, "has tokens of uint32", "the log says uint16"),
        (lambda batch: batch.slice(1), "is not a token file", "rows"),
    ],
)
@pytest.mark.parametrize("name", ["shard_00001.tokens.arrow", "val_shard.tokens.arrow"])
def test_verify_finds_files_of_tokens_that_are_not_those_of_their_shard(
    copy: Path,
    name: str,
    change: Callable[[pa.RecordBatch], pa.RecordBatch],
    what: str,
    why: str,
) -> None:
    """Written wrong, hashed and committed: only what is in them can show it."""
    rewrite(copy, name, change)
    assert not verify(open_store(copy), full=False).faults
    (fault,) = verify(open_store(copy), full=True).faults
    assert name in fault.what
    assert what in fault.what
    assert why in fault.why


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("name", ["shard_00001.parquet", "val_shard.parquet"])
def test_verify_finds_a_log_that_counts_other_tokens_than_the_rows(
    copy: Path, name: str, more: int
) -> None:
    before = Log.open(copy).state.files[name].tokens
    retell(copy, name, (copy / name).read_bytes(), "", more)
    assert not verify(open_store(copy), full=False).faults
    found = [(fault.what, fault.why) for fault in verify(open_store(copy), full=True).faults]
    told = (f"{name} has {before:,} tokens", f"the log says {(before or 0) + more:,}")
    assert found == ([told] if more else [])


def test_verify_finds_files_of_tokens_that_are_missing_or_changed(copy: Path) -> None:
    name = "shard_00001.tokens.arrow"
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-40] + b"x" + data[-39:])
    (fault,) = verify(open_store(copy), full=True).faults
    assert fault.what == f"{name} is not what was written"
    (copy / name).write_bytes(data[:-1])
    assert [fault.what for fault in verify(open_store(copy)).faults] == [
        f"{name} has the wrong size"
    ]
    (copy / name).unlink()
    assert [fault.what for fault in verify(open_store(copy)).faults] == [f"{name} is missing"]
    retell(copy, "shard_00002.tokens.arrow", b"these are no tokens")
    found = {fault.what for fault in verify(open_store(copy), full=True).faults}
    assert "shard_00002.tokens.arrow is not a token file" in found


def test_the_checksum_of_a_token_file_is_what_loaders_go_by(copy: Path) -> None:
    name = "shard_00001.tokens.arrow"
    data = (copy / name).read_bytes()
    told = {file.name: file.xxh3 for file in Log.open(copy).state.files.values()}
    assert told[name] == xxhash.xxh3_128_hexdigest(data)
    assert {file for file, xxh3 in told.items() if not xxh3 and file.endswith(".arrow")} == set()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    (copy / name).write_bytes(flipped)
    with pytest.raises(ShardMismatch, match=f"{name} is not what was written") as caught:
        list(PretrainDataLoader(str(copy), chunk_size=64))
    assert f"xxh3 {xxhash.xxh3_128_hexdigest(flipped)[:12]}…" in caught.value.why
    assert f"the log says {len(data):,} bytes, {told[name][:12]}…" in caught.value.why
    retell(copy, name, data, "0" * 32)
    (fault,) = verify(open_store(copy), full=True).faults
    assert fault.what == f"{name} has another checksum than the log says"
    retell(copy, name, data, "")  # as a log without them: the sha256 is compared
    assert list(PretrainDataLoader(str(copy), chunk_size=64))


def test_verify_finds_a_shard_without_a_file_of_tokens_beside_others(
    made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "out", ignore=shutil.ignore_patterns("_log", "_COMPLETE"))
    whole = Log.open(made)
    writer = LogWriter.take(open_store(tmp_path / "out"), {}, [], writer="test")
    writer.commit(whole.record(1).ops)
    ops = [op for op in whole.record(2).ops if isinstance(op, Progress)]
    shard = whole.state.files["shard_00001.parquet"]
    val = [op for op in whole.record(2).ops if isinstance(op, Add) and op.split == "val"]
    writer.commit([shard, *ops, *val])
    found = [fault.what for fault in verify(open_store(tmp_path / "out")).faults]
    assert "shard_00001.parquet has no token file" in found
    assert "shard_00000.parquet has no token file" not in found
