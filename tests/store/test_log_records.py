"""Records of a log: what a sound one adds up to, and how each kind of damage is named.

Damaged logs are written by hand, byte by byte, with hashes that are right: only the rule under
test is broken. Bit rot, where the hash is wrong, is tried at every byte of a record.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import AlreadySealed, LogDamaged, NoDataset
from penstock.store.local import LocalStore
from penstock.store.log import Log, LogState, LogWriter
from penstock.store.record import (
    FORMAT,
    Add,
    Beat,
    Fold,
    Op,
    Open,
    Progress,
    Record,
    Retire,
    Seal,
    Split,
    decode,
    encode,
    fold_name,
    is_name_of,
    record_name,
)
from penstock.store.store import open_store

DO = "restore the file from a copy, or use the dataset up to the record before"
ZERO = "0" * 64
OPEN = Open(config={"seed": 1}, inputs=["a.jsonl"], writer="test")


def add(name: str = "shard_00000.parquet", rows: int = 3, split: Split = "train") -> Add:
    return Add(name=name, sha256="ab" * 32, bytes=10 * rows, rows=rows, tokens=None, split=split)


def progress(start: int = 0, to: int = 30, kept: int = 3, **other: Any) -> Progress:
    fields = {"input": "a.jsonl", "read": kept, "dropped": {}, **other}
    return Progress(start=start, to=to, kept=kept, **fields)


class Chain:
    """A log written by hand: sound unless a field is overridden."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.n = -1
        self.head = ZERO
        self.epoch = 1
        (root / "_log").mkdir(parents=True, exist_ok=True)

    def write(self, *ops: Op, **fields: Any) -> Record:
        values = {
            "format": FORMAT,
            "dataset": "d" * 32,
            "n": self.n + 1,
            "prev": self.head,
            "epoch": self.epoch,
            "commit_id": f"{self.n + 1:032x}",
            "time": "2024-01-01T00:00:00.000+00:00",
            "ops": list(ops),
            **fields,
        }
        data = encode(Record(**values, sha256=""))
        self.n += 1
        (self.root / record_name(self.n)).write_bytes(data)
        self.head = data[-67:-3].decode()
        return msgspec.json.decode(data, type=Record)

    def damage(self) -> LogDamaged:
        """The error that opening this log gives."""
        with pytest.raises(LogDamaged) as caught:
            Log.open(self.root)
        return caught.value

    def where(self, n: int) -> str:
        return f"{self.root}, record {n}"


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path / "set")
    chain.write(OPEN)
    chain.write(add(), progress())
    return chain


def explained(error: LogDamaged) -> tuple[str, str, str, str]:
    return error.what, error.where, error.why, error.do


# A sound log.


def test_what_was_committed_is_what_is_read(tmp_path: Path) -> None:
    writer = LogWriter.take(
        LocalStore(tmp_path / "set", make=True), {"seed": 1}, ["a.jsonl"], writer="w", tokenizer="t"
    )
    follower = Log.open(tmp_path / "set")
    assert follower.state.opened == Open({"seed": 1}, ["a.jsonl"], "w", "t")
    writer.commit([add(), progress(proof={"size": 30}, blank=2)])
    writer.commit([Beat()])
    writer.commit(
        [
            add("shard_00001.parquet", rows=2),
            add("_val/val_00000.parquet", rows=1, split="val"),
            add("_rejects/rejects_00000.jsonl", rows=4, split="rejects"),
            progress(30, 90, 3, read=7, dropped={"empty": 3, "no_text": 1}, end="done marker"),
        ]
    )
    writer.commit([Retire("_val/val_00000.parquet"), add("val_shard.parquet", 1, "val")])
    writer.commit([Seal(shards=2, rows=6, bytes=60, head=writer.state.head)])
    assert follower.refresh() == 5
    assert follower.refresh() == 0
    for state in (writer.state, follower.state, Log.open(tmp_path / "set").state):
        assert (state.n, state.epoch, state.head) == (5, 1, writer.state.head)
        assert [file.name for file in state.split("train")] == [
            "shard_00000.parquet",
            "shard_00001.parquet",
        ]
        assert [file.name for file in state.split("val")] == ["val_shard.parquet"]
        assert [file.rows for file in state.split("rejects")] == [4]
        assert [*state.retired] == ["_val/val_00000.parquet"]
        known = state.inputs["a.jsonl"]
        assert (known.to, known.read, known.kept, known.blank) == (90, 10, 6, 2)
        assert known.dropped == {"empty": 3, "no_text": 1}
        assert (known.proof, known.end) == ({"size": 30}, "done marker")
        assert state.sealed == Seal(2, 6, 60, follower.record(4).sha256)


def test_each_record_names_the_one_before(tmp_path: Path) -> None:
    writer = LogWriter.take(LocalStore(tmp_path, make=True), {}, [], writer="w")
    for _ in range(3):
        writer.commit([Beat()])
    records = [writer.record(n) for n in range(4)]
    assert [record.prev for record in records] == [ZERO] + [r.sha256 for r in records[:-1]]
    assert len({record.commit_id for record in records}) == 4
    assert {record.dataset for record in records} == {records[0].dataset}
    assert len(records[0].dataset) == 32


def test_no_dataset_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(NoDataset) as caught:
        Log.open(tmp_path / "nothing")
    assert str(caught.value) == (
        f"there is no dataset at {tmp_path}/nothing\n"
        f"  where: {tmp_path}/nothing/_log/00000000000000000000.json\n"
        "  why:   it has no log\n"
        "  do:    make one with penstock shard, or check the path"
    )
    assert os.listdir(tmp_path) == []


def test_sealed_dataset_cannot_be_taken(chain: Chain) -> None:
    chain.write(Seal(shards=1, rows=3, bytes=30, head=chain.head))
    before = sorted(os.listdir(chain.root / "_log"))
    with pytest.raises(AlreadySealed) as caught:
        LogWriter.take(LocalStore(chain.root), {}, [], writer="w")
    assert str(caught.value) == (
        f"{chain.root} is sealed; nothing can be added to it\n"
        "  where: record 2 of 2024-01-01T00:00:00.000+00:00\n"
        "  do:    write to a new directory"
    )
    assert sorted(os.listdir(chain.root / "_log")) == before


def test_record_that_went_missing_is_named(chain: Chain) -> None:
    log = Log.open(chain.root)
    os.unlink(chain.root / record_name(1))
    with pytest.raises(LogDamaged) as caught:
        log.record(1)
    assert explained(caught.value) == (
        "record 1 is missing",
        f"{chain.root}/{record_name(1)}",
        "",
        DO,
    )


@settings(deadline=None)
@given(
    st.builds(
        Record,
        format=st.just(FORMAT),
        dataset=st.text(max_size=5),
        n=st.integers(0, 2**53),
        prev=st.text(max_size=5),
        epoch=st.integers(0, 2**53),
        commit_id=st.text(max_size=5),
        time=st.text(max_size=5),
        ops=st.lists(
            st.one_of(
                st.builds(
                    Add,
                    name=st.sampled_from(['","sha256":"', "x", "\\", '"}\n']),
                    sha256=st.text(max_size=20),
                    bytes=st.integers(0, 2**53),
                    rows=st.integers(0, 2**53),
                    tokens=st.none() | st.integers(0, 2**53),
                    split=st.sampled_from(["train", "val", "rejects"]),
                ),
                st.just(Beat()),
            ),
            max_size=3,
        ),
        sha256=st.text(max_size=80),
    )
)
def test_encode_and_decode_are_inverse(record: Record) -> None:
    data = encode(record)
    found = decode(data, Record, "here")
    assert found == msgspec.structs.replace(record, sha256=found.sha256)
    assert encode(found) == data
    assert data.count(b"\n") == 1
    assert json.loads(data)["sha256"] == found.sha256


# Damage with a right hash.


def test_gap_is_the_end_of_the_log(chain: Chain) -> None:
    chain.write(Beat())
    os.unlink(chain.root / record_name(1))
    assert Log.open(chain.root).state.n == 0


def test_wrong_number(chain: Chain) -> None:
    chain.write(Beat(), n=7)
    assert explained(chain.damage()) == ("record 2 holds number 7", chain.where(7), "", DO)


def test_broken_chain(chain: Chain) -> None:
    head = chain.head
    chain.write(Beat(), prev="ef" * 32)
    assert explained(chain.damage()) == (
        "the chain is broken",
        chain.where(2),
        f"it follows efefefefefef…, the record before is {head[:12]}…",
        DO,
    )


def test_first_record_follows_nothing(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.write(OPEN, prev="ef" * 32)
    assert explained(chain.damage()) == (
        "the chain is broken",
        chain.where(0),
        "it follows efefefefefef…, the record before is 000000000000…",
        DO,
    )


def test_record_rewritten_in_the_middle_breaks_the_chain(chain: Chain) -> None:
    chain.write(Beat())
    other = Record(
        FORMAT, "d" * 32, 1, Log.open(chain.root).record(0).sha256, 1, "x", "", [Beat()], ""
    )
    (chain.root / record_name(1)).write_bytes(encode(other))
    error = chain.damage()
    assert (error.what, error.where) == ("the chain is broken", chain.where(2))


def test_other_dataset(chain: Chain) -> None:
    chain.write(Beat(), dataset="e" * 32)
    assert explained(chain.damage()) == (
        "the record is of another dataset",
        chain.where(2),
        "",
        DO,
    )


def test_epoch_going_back(chain: Chain) -> None:
    chain.write(OPEN, epoch=3)
    chain.write(Beat(), epoch=2)
    assert explained(chain.damage()) == (
        "an older writer wrote after a newer one",
        chain.where(3),
        "",
        DO,
    )


@pytest.mark.parametrize(
    "ops", [[Beat()], [add("shard_00001.parquet"), progress(30, 60)], [OPEN], []]
)
def test_added_after_the_seal(chain: Chain, ops: list[Op]) -> None:
    chain.write(Seal(shards=1, rows=3, bytes=30, head=chain.head))
    chain.write(*ops)
    assert explained(chain.damage()) == (
        "something was added after the seal",
        chain.where(3),
        "",
        DO,
    )


def test_added_after_the_seal_in_the_same_record(chain: Chain) -> None:
    chain.write(
        Seal(shards=1, rows=3, bytes=30, head=chain.head),
        add("shard_00001.parquet"),
        progress(30, 60),
    )
    assert explained(chain.damage()) == (
        "something was added after the seal",
        chain.where(2),
        "",
        DO,
    )


@pytest.mark.parametrize("sealed", [(0, 3, 30), (2, 3, 30), (1, 2, 30), (1, 3, 31)])
def test_seal_with_other_totals(chain: Chain, sealed: tuple[int, int, int]) -> None:
    shards, rows, size = sealed
    chain.write(Seal(shards=shards, rows=rows, bytes=size, head=chain.head))
    assert explained(chain.damage()) == (
        "the seal's totals are not those of the shards",
        chain.where(2),
        f"sealed {sealed} shards, rows, bytes; added (1, 3, 30)",
        DO,
    )


def test_seal_counts_validation_rows_and_no_rejects(chain: Chain) -> None:
    chain.write(
        add("_val/val_00000.parquet", 2, "val"),
        add("_rejects/rejects_00000.jsonl", 1, "rejects"),
        progress(30, 60, 2, read=3, dropped={"empty": 1}),
    )
    chain.write(Seal(shards=1, rows=5, bytes=50, head=chain.head))
    assert Log.open(chain.root).state.sealed is not None


def test_seal_of_another_log(chain: Chain) -> None:
    chain.write(Seal(shards=1, rows=3, bytes=30, head="ef" * 32))
    assert explained(chain.damage()) == ("the seal is of another log", chain.where(2), "", DO)


@pytest.mark.parametrize(
    ("start", "to", "text"),
    [
        (29, 60, "a.jsonl was read from 29 to 60"),
        (31, 60, "a.jsonl was read from 31 to 60"),
        (0, 30, "a.jsonl was read from 0 to 30"),
        (30, 29, "a.jsonl was read from 30 to 29"),
        (1_000, 2_000, "a.jsonl was read from 1,000 to 2,000"),
    ],
)
def test_progress_that_does_not_tile(chain: Chain, start: int, to: int, text: str) -> None:
    chain.write(progress(start, to, 0))
    assert explained(chain.damage()) == (
        text,
        chain.where(2),
        "the record before left it at 30",
        DO,
    )


def test_progress_of_a_new_input_starts_at_zero(chain: Chain) -> None:
    chain.write(progress(5, 10, 0, input="b.jsonl"))
    assert explained(chain.damage()) == (
        "b.jsonl was read from 5 to 10",
        chain.where(2),
        "the record before left it at 0",
        DO,
    )


def test_read_is_kept_and_dropped(chain: Chain) -> None:
    chain.write(add("shard_00001.parquet", 9), progress(30, 60, 3, read=9, dropped={"empty": 5}))
    assert explained(chain.damage()) == (
        "a.jsonl: read 9 is not kept 3 + dropped {'empty': 5}",
        chain.where(2),
        "",
        DO,
    )


@pytest.mark.parametrize(
    ("ops", "by"),
    [
        ([add("shard_00001.parquet", 4), progress(30, 60, 3)], "+1"),
        ([add("shard_00001.parquet", 1_003), progress(30, 60, 3)], "+1,000"),
        ([progress(30, 60, 3)], "-3"),
        ([add("shard_00001.parquet")], "+3"),
        ([Retire("shard_00000.parquet")], "-3"),
        ([Retire("shard_00000.parquet"), add("shard_00001.parquet", 2)], "-1"),
    ],
)
def test_rows_that_do_not_balance(chain: Chain, ops: Sequence[Op], by: str) -> None:
    chain.write(*ops)
    assert explained(chain.damage()) == (
        "rows added and documents kept or dropped differ",
        chain.where(2),
        f"by {by} rows",
        DO,
    )


@pytest.mark.parametrize("together", [True, False])
def test_file_added_twice(chain: Chain, together: bool) -> None:
    if together:
        chain.write(add("shard_00001.parquet"), add("shard_00001.parquet"), progress(30, 60, 6))
    else:
        chain.write(add(), progress(30, 60, 3))
    name = "shard_00001.parquet" if together else "shard_00000.parquet"
    assert explained(chain.damage()) == (f"{name} is added twice", chain.where(2), "", DO)


@pytest.mark.parametrize("twice", [True, False])
def test_retired_and_never_added(chain: Chain, twice: bool) -> None:
    name = "shard_00000.parquet" if twice else "shard_00001.parquet"
    if twice:
        chain.write(Retire(name), add("shard_00002.parquet"))
    chain.write(Retire(name))
    assert explained(chain.damage()) == (
        f"{name} is retired and was never added",
        chain.where(chain.n),
        "",
        DO,
    )


def test_unsafe_name(chain: Chain) -> None:
    chain.write(add("../../etc/passwd"), progress(30, 60))
    assert explained(chain.damage()) == (
        "the log names '../../etc/passwd', which is not a name of a file of its split",
        chain.where(2),
        "no writer gives such names to files of 'train'",
        "do not use this dataset; ask whoever made it",
    )


OWN: list[tuple[Split, str]] = [
    ("train", "shard_00000.parquet"),
    ("train", "shard_00000-0a1b2c3d.parquet"),
    ("train", "shard_123456.parquet"),
    ("val", "val_shard.parquet"),
    ("val", "val_shard-0a1b2c3d.parquet"),
    ("val", "_val/val_00000.parquet"),
    ("rejects", "_rejects/rejects_00000.jsonl"),
    ("about", "_dedup/000000"),
    ("about", "_dedup/000000-0a1b2c3d"),
    ("about", "_features/000001"),
]
OWN_TOKENS = [
    "shard_00000.tokens.arrow",
    "shard_123456.tokens-0a1b2c3d.arrow",
    "val_shard.tokens.arrow",
    "_val/val_00000.tokens-0a1b2c3d.arrow",
]
OTHERS = [
    "_COMPLETE",
    "_events.jsonl",
    "_merged.json",
    record_name(0),
    fold_name(0),
    "_position/trainer.json",
    "_sums/a.parquet",
    "_gen/00002",
    "_rejects/stopped.jsonl",
    "_val/shard_00000.parquet",
    "README.md",
    "in.jsonl",
    "shard_.parquet",
    "shard_00000.parquet ",
    "shard_\u0661.parquet",
    "shard_00000.parquet\n",
    "_tokens/shard_00000.tokens.arrow",
    "_rejects/rejects_00000.tokens.arrow",
    "shard_00000-0a1b2c3d.tokens.arrow",
    "shard_00000.arrow",
]


@pytest.mark.parametrize("split", ["train", "val", "rejects", "about"])
def test_files_are_called_as_those_of_their_split(tmp_path: Path, split: Split) -> None:
    """A log that may name others may have them removed from a mirror: its own records, too."""
    for name in {*OTHERS, *OWN_TOKENS, *(name for _, name in OWN)}:
        state = LogState()
        record = Chain(tmp_path).write(OPEN, add(name, 0, split))
        if (split, name) in OWN:
            state.apply(record, "here")
            assert list(state.files) == [name]
            continue
        with pytest.raises(LogDamaged, match="is not a name of a file of its split"):
            state.apply(record, "here")
        assert state.files == {}


@pytest.mark.parametrize("name", [*OTHERS, *OWN_TOKENS, *(name for _, name in OWN)])
def test_names_of_token_files(name: str) -> None:
    assert is_name_of("tokens", name) == (name in OWN_TOKENS)


def tokens(name: str = "shard_00001.tokens.arrow", rows: int = 3, count: int | None = 70) -> Add:
    return Add(name=name, sha256="cd" * 32, bytes=400, rows=rows, tokens=count, split="tokens")


def test_token_files_hold_no_rows_and_belong_to_their_shards(chain: Chain) -> None:
    other = "shard_00001-0a1b2c3d.parquet"  # its name was taken; that of its tokens was free
    parts = "_val/val_00000.parquet", "_val/val_00000.tokens.arrow"
    chain.write(
        add(other, 2),
        tokens(rows=2),
        add(parts[0], 1, "val"),
        tokens(parts[1], 1),
        progress(30, 60),
    )
    log = Log.open(chain.root)
    files = log.state.files
    assert log.state.tokens_of(files[other]) == files["shard_00001.tokens.arrow"]
    assert log.state.tokens_of(files[parts[0]]) == files[parts[1]]
    assert log.state.tokens_of(files["shard_00000.parquet"]) is None
    assert [file.name for file in log.state.split("train")] == ["shard_00000.parquet", other]
    seal = Seal(shards=2, rows=6, bytes=60, head=chain.head)
    val = [add("val_shard.parquet", 1, "val"), tokens("val_shard.tokens.arrow", 1)]
    chain.write(*map(Retire, parts), *val, seal)
    log.refresh()
    assert log.state.sealed == seal
    assert log.state.tokens_of(val[0]) == val[1]
    part = log.state.retired[parts[0]]
    assert log.state.tokens_of(part) == log.state.retired[parts[1]], "a plan still counts in parts"
    assert log.state.parts_of(val[0]) == [part]
    assert log.state.parts_of(files[other]) == [files[other]]


SHARD = "shard_00001.parquet"


@pytest.mark.parametrize(
    ("ops", "what"),
    [
        ([tokens()], "shard_00001.tokens.arrow does not come with its shard"),
        ([tokens("shard_00000.tokens.arrow")], "shard_00000.tokens.arrow does not come with its"),
        ([add(SHARD), tokens(rows=2)], "shard_00001.tokens.arrow has 2 rows and 70 tokens"),
        ([add(SHARD), tokens(count=None)], "shard_00001.tokens.arrow has 3 rows and None tokens"),
        (
            [add(SHARD), tokens(), tokens("shard_00001.tokens-0a1b2c3d.arrow")],
            "holds tokens of shard_00001.parquet, and so does another file",
        ),
        (
            [add(SHARD), add("shard_00001-0a1b2c3d.parquet", 0), tokens()],
            "shard_00001.tokens.arrow does not come with its shard",
        ),
        (
            [add(SHARD), tokens(), Retire("shard_00001.tokens.arrow")],
            "shard_00001.tokens.arrow is retired without shard_00001.parquet",
        ),
        (
            [add(SHARD), tokens(), Retire(SHARD), add("shard_00002.parquet")],
            "shard_00001.parquet is retired without shard_00001.tokens.arrow",
        ),
    ],
)
def test_token_files_that_pair_with_nothing(chain: Chain, ops: list[Op], what: str) -> None:
    before = Log.open(chain.root).state
    record = chain.write(*ops, progress(30, 60))
    assert what in chain.damage().what
    with pytest.raises(LogDamaged, match=what):
        before.apply(record, "here")
    good = msgspec.structs.replace(record, ops=[add(SHARD), tokens(), progress(30, 60)])
    before.apply(good, "here")  # nothing of the refused record has stayed
    assert list(before.files) == ["shard_00000.parquet", SHARD, "shard_00001.tokens.arrow"]


def test_checking_a_record_pairs_nothing(chain: Chain) -> None:
    state = Log.open(chain.root).state
    state.check(chain.write(add(SHARD), tokens(), progress(30, 60)), "here")
    assert state.tokens_of(add(SHARD)) is None
    assert list(state.files) == ["shard_00000.parquet"]


@pytest.mark.parametrize("depth", [2_000, 200_000])
@pytest.mark.parametrize("where", ["config", "unknown"])
def test_values_that_nest_too_deep(chain: Chain, depth: int, where: str) -> None:
    record = chain.write(msgspec.structs.replace(OPEN, config={"x": "HERE"}), dataset="THERE")
    nested = "[" * depth + "]" * depth
    at, value = ("HERE", nested) if where == "config" else ("THERE", f'","x":{nested},"y":"')
    body = encode(record).decode().rpartition(',"sha256":"')[0].replace(f'"{at}"', value)
    body = body.replace('"dataset":",', '"dataset":"",').replace('"y":",', '"y":1,')
    data = f'{body},"sha256":"{hashlib.sha256(body.encode()).hexdigest()}"}}\n'
    (chain.root / record_name(2)).write_text(data)
    assert "record" in chain.damage().what


@pytest.mark.parametrize("version", [0, 3, 999])
def test_unknown_format(chain: Chain, version: int) -> None:
    chain.write(Beat(), format=version)
    assert explained(chain.damage()) == (
        f"the record is of format {version}",
        f"{chain.root}/{record_name(2)}",
        "this penstock reads formats 1 and 2",
        "install the penstock that wrote it, or a newer one",
    )


def test_newer_format_is_named_before_its_fields(chain: Chain) -> None:
    """A newer record may have other fields: what helps is the version, not the first of them."""
    (chain.root / record_name(2)).write_bytes(by_hand({"format": 3, "colour": "blue"}))
    assert chain.damage().what == "the record is of format 3"


def test_records_with_token_files_are_of_the_newer_format(tmp_path: Path) -> None:
    writer = LogWriter.take(open_store(tmp_path, make=True), {}, ["a.jsonl"], writer="test")
    plain = writer.commit([add(), progress()])
    newer = writer.commit([add(SHARD), tokens(), progress(30, 60)])
    assert (plain.format, newer.format) == (1, 2)


def test_a_beat_that_names_a_silent_input_is_of_the_newer_format(chain: Chain) -> None:
    """Whoever reads the first format alone then says that it is too old, not that it is damaged."""
    writer = LogWriter.take(open_store(chain.root), {}, [], writer="test")
    assert writer.commit([Beat()]).format == 1
    assert writer.commit([Beat("in.jsonl", 30)]).format == 2
    assert Log.open(chain.root).state.beat == Beat("in.jsonl", 30)


def by_hand(fields: dict[str, Any]) -> bytes:
    """A record of any fields, with the right hash."""
    body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def fields_of(record: Record) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(record)
    del fields["sha256"]
    return fields


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"colour": "blue"}, "Object contains unknown field `colour`"),
        ({"n": "2"}, "Expected `int`, got `str` - at `$.n`"),
        ({"n": 2.5}, "Expected `int`, got `float` - at `$.n`"),
        ({"ops": [{"type": "paint"}]}, "Invalid value 'paint' - at `$.ops[0].type`"),
        ({"ops": [{}]}, "Object missing required field `type` - at `$.ops[0]`"),
        (
            {"ops": [{"type": "beat", "x": 1}]},
            "Object contains unknown field `x` - at `$.ops[0]`",
        ),
        (
            {"ops": [{"type": "retire"}]},
            "Object missing required field `name` - at `$.ops[0]`",
        ),
    ],
)
def test_unknown_and_missing_fields(chain: Chain, change: dict[str, Any], why: str) -> None:
    fields = fields_of(chain.write(Beat()))
    (chain.root / record_name(2)).write_bytes(by_hand({**fields, **change}))
    assert explained(chain.damage()) == (
        "the record has fields that it should not have, or lacks some",
        f"{chain.root}/{record_name(2)}",
        why,
        DO,
    )


@pytest.mark.parametrize(
    "op",
    [OPEN, add(), progress(), Beat(), Retire("shard_00000.parquet"), Seal(0, 0, 0, ZERO)],
    ids=lambda op: type(op).__name__,
)
def test_no_operation_has_a_field_more(chain: Chain, op: Op) -> None:
    fields = fields_of(chain.write(Beat()))
    told = {**msgspec.to_builtins(op), "colour": "blue"}
    (chain.root / record_name(2)).write_bytes(by_hand({**fields, "ops": [told]}))
    assert chain.damage().why == "Object contains unknown field `colour` - at `$.ops[0]`"


FIELDS = ["format", "dataset", "n", "prev", "epoch", "commit_id", "time", "ops"]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_required(chain: Chain, field: str) -> None:
    fields = fields_of(chain.write(Beat()))
    del fields[field]
    (chain.root / record_name(2)).write_bytes(by_hand(fields))
    assert chain.damage().why == f"Object missing required field `{field}`"


@pytest.mark.parametrize("body", [b"[1", b'{"format":1', b'{"format":"1"', b"\xff\xfe"])
def test_right_hash_over_something_else(chain: Chain, body: bytes) -> None:
    data = body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    (chain.root / record_name(2)).write_bytes(data)
    assert chain.damage().what == "the record has fields that it should not have, or lacks some"


def test_damaged_record_changes_nothing(chain: Chain) -> None:
    """`verify` and a follower go on with the state: it must be that of the record before."""
    log = Log.open(chain.root)
    before = (log.state.n, log.state.head, dict(log.state.files), log.state.inputs["a.jsonl"].to)
    chain.write(Retire("shard_00000.parquet"), add("shard_00001.parquet", 99), progress(30, 60))
    for _ in range(2):  # asked again, the answer is the same
        with pytest.raises(LogDamaged) as caught:
            log.refresh()
        assert caught.value.what == "rows added and documents kept or dropped differ"
    after = (log.state.n, log.state.head, dict(log.state.files), log.state.inputs["a.jsonl"].to)
    assert after == before
    assert log.state.retired == {}


# Bit rot.


def long_record() -> bytes:
    ops: list[Op] = [
        add(),
        progress(proof={"inode": 7, "prefix": "ab"}, dropped={"empty": 0}),
        Seal(1, 3, 30, "ab" * 32),
    ]
    return encode(Record(FORMAT, "d" * 32, 5, "ab" * 32, 2, "c" * 32, "2024", ops, ""))


def test_every_flipped_bit_is_detected() -> None:
    data = long_record()
    decode(data, Record, "here")
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(LogDamaged) as caught:
                decode(bytes(flipped), Record, "here")
            assert caught.value.what in (
                "the record is not what was written",
                "this is not a record",
            )
            assert caught.value.where == "here"
            assert caught.value.why


def test_every_truncation_is_detected() -> None:
    data = long_record()
    for length in range(len(data)):
        for piece in (data[:length], data[len(data) - length :]):
            with pytest.raises(LogDamaged):
                decode(piece, Record, "here")
        with pytest.raises(LogDamaged):  # as a file system may leave it after a crash
            decode(data[:length] + bytes(len(data) - length), Record, "here")


def test_anything_appended_or_repeated_is_detected() -> None:
    data = long_record()
    for tail in (b"\n", b" ", b"\0", data, b'"}\n', b"{}\n"):
        with pytest.raises(LogDamaged):
            decode(data + tail, Record, "here")


def test_record_is_not_a_fold_and_the_other_way_round() -> None:
    fold = encode(Fold(FORMAT, "d", 0, 3, ZERO, ZERO, 1, "", [], ""))
    with pytest.raises(LogDamaged, match="fields that it should not have"):
        decode(fold, Record, "here")
    with pytest.raises(LogDamaged, match="fields that it should not have"):
        decode(long_record(), Fold, "here")


def test_texts_of_bit_rot(chain: Chain) -> None:
    path = chain.root / record_name(1)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"shard_00000", b"shard_00009"))
    error = chain.damage()
    assert error.what == "the record is not what was written"
    assert error.where == str(path)
    assert error.why.endswith(f"…, it says {data[-67:-55].decode()}…")
    path.write_bytes(data[:-1])
    assert explained(chain.damage()) == (
        "this is not a record",
        str(path),
        f"{len(data) - 1:,} bytes without a hash at the end",
        DO,
    )
    path.write_bytes(b"")
    assert chain.damage().why == "0 bytes without a hash at the end"


def test_names_of_records_sort_and_stand_in_their_folders() -> None:
    assert record_name(12) == "_log/00000000000000000012.json"
    assert fold_name(12) == "_fold/00000000000000000012.json"
    assert sorted([record_name(n) for n in (100, 9, 10**18)]) == [
        record_name(9),
        record_name(100),
        record_name(10**18),
    ]
