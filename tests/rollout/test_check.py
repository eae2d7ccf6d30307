"""Rollouts: the same by every way in, and every fault named by file, row and field."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig, BadRollout, InputDamaged
from penstock.rollout.check import (
    REASONS,
    check_lines,
    check_records,
    check_table,
    find_repeats,
    read_rollouts,
)
from penstock.rollout.records import SCHEMA, Rollouts, content_of
from penstock.tokenize.tokenizer import Tokenizer

Record = dict[str, Any]


def record(**changed: Any) -> Record:
    """A rollout with all that it may say."""
    made: Record = {
        "rollout_id": "r0",
        "group_id": "g0",
        "group_size": 4,
        "prompt_ids": [5, 6, 7],
        "completion_ids": [8, 9, 10, 11],
        "completion_mask": [1, 1, 0, 1],
        "logprobs": [-0.5, -1.25, 0.0, -0.25],
        "values": [0.5, 0.25, 0.0, 1.0],
        "reward": 1.5,
        "rewards": {"right": 1.0, "short": 0.5},
        "weight_versions": [3, 4],
        "temperature": 1.0,
        "top_p": 0.95,
        "finish_reason": "stop",
        "meta": {"prompt": "two plus two?"},
    }
    made |= changed
    return {name: value for name, value in made.items() if value is not ...}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


def same(one: Rollouts, two: Rollouts) -> bool:
    return bool(one.to_table().equals(two.to_table()))


WRONG: list[tuple[str, str, Record, str]] = [
    ("no_rollout_id", "rollout_id", {"rollout_id": ...}, "not there, or empty"),
    ("no_group_id", "group_id", {"group_id": ""}, "not there, or empty"),
    ("bad_group_size", "group_size", {"group_size": 0}, "it is 0"),
    ("bad_group_size", "group_size", {"group_size": 2.5}, "it is 2.5"),
    ("prompt_empty", "prompt_ids", {"prompt_ids": []}, "not there, or empty"),
    ("completion_empty", "completion_ids", {"completion_ids": ...}, "not there, or empty"),
    ("id_out_of_range", "completion_ids", {"completion_ids": [1, 2, -3, 4]}, "from -3 to 4"),
    ("prompt_id_out_of_range", "prompt_ids", {"prompt_ids": [1 << 40]}, "from 1099511627776"),
    ("mask_length", "completion_mask", {"completion_mask": [1]}, "completion_mask has 1, "),
    ("mask_not_0_or_1", "completion_mask", {"completion_mask": [1, 2, 0, 1]}, "[1, 2, 0, 1]"),
    ("mask_without_1", "completion_mask", {"completion_mask": [0] * 4}, "none of 4 tokens was"),
    ("logprobs_length", "logprobs", {"logprobs": [-1.0]}, "logprobs has 1, completion_ids has 4"),
    ("logprob_not_finite", "logprobs", {"logprobs": [-1, float("-inf"), 0, -1]}, "-inf"),
    ("logprob_above_0", "logprobs", {"logprobs": [-1, 0.5, 0, -1]}, "has 0.5"),
    ("values_length", "values", {"values": [1.0]}, "values has 1, completion_ids has 4"),
    ("value_not_finite", "values", {"values": [1, float("nan"), 0, 1]}, "nan"),
    ("no_reward", "reward", {"reward": ..., "rewards": {"right": None}}, "not there, or empty"),
    ("reward_not_finite", "reward", {"reward": float("nan")}, "it is nan"),
    ("named_reward_not_finite", "rewards", {"rewards": {"a": float("inf")}}, "'a' is inf"),
    ("reward_not_finite", "reward", {"reward": 1e39}, "it is 1e+39, more than float32 holds"),
    ("named_reward_not_finite", "rewards", {"rewards": {"a": -1e39}}, "more than float32 holds"),
    ("logprob_not_finite", "logprobs", {"logprobs": [-1, -1e39, 0, -1]}, "has -1e+39"),
    (
        "value_not_finite",
        "values",
        {"values": [1, 1e300, 0, 1]},
        "token 1 of the completion has 1e+300",
    ),
    ("bad_type", "temperature", {"temperature": float("inf")}, "inf"),
    ("no_version", "weight_versions", {"weight_versions": ...}, "not there, or empty"),
    ("negative_version", "weight_versions", {"weight_versions": [-1, 2]}, "from -1 to 2"),
    ("bad_temperature", "temperature", {"temperature": -1.0}, "it is -1"),
    ("bad_top_p", "top_p", {"top_p": 1.5}, "it is 1.5"),
]
BY_PYTHON: list[tuple[str, str, Record, str]] = [
    ("bad_type", "completion_ids", {"completion_ids": "abcd"}, "'abcd', expected a list"),
    ("bad_type", "completion_ids", {"completion_ids": [1.0, 2.0]}, "a list of whole numbers"),
    ("bad_type", "prompt_ids", {"prompt_ids": [[1, 2], [3]]}, "inhomogeneous"),
    ("bad_type", "prompt_ids", {"prompt_ids": [[1, 2]]}, "expected a list of numbers"),
    ("bad_type", "prompt_ids", {"prompt_ids": [True]}, "a list of whole numbers"),
    ("bad_type", "completion_mask", {"completion_mask": ["a"] * 4}, "a list of 0 and 1"),
    ("bad_type", "logprobs", {"logprobs": ["a"] * 4}, "a list of numbers"),
    ("bad_type", "reward", {"reward": "1"}, "'1', expected a number"),
    ("bad_type", "reward", {"reward": True}, "True, expected a number"),
    ("bad_type", "rewards", {"rewards": [1.0]}, "expected numbers by name"),
    ("bad_type", "rewards", {"rewards": {"a": "x"}}, "'a': 'x', expected a number by name"),
    ("bad_type", "group_id", {"group_id": 1.5}, "1.5, expected text"),
    ("bad_type", "finish_reason", {"finish_reason": 7}, "7, expected text"),
    ("bad_type", "temperature", {"temperature": "hot"}, "'hot', expected a number"),
    ("bad_type", "meta", {"meta": "text"}, "'text', expected a mapping"),
    ("bad_type", "meta", {"meta": {"a": {1, object()}}}, "it is not JSON"),
    ("bad_type", "rollout_id", {"rollout_id": "\ud800"}, "expected text"),
    ("unknown_field", "completion_id", {"completion_id": [1]}, "did you mean completion_ids?"),
    ("text_alone", "completion_ids", {"completion_ids": ..., "completion": "a"}, "retokenize=True"),
]


@pytest.mark.parametrize(("reason", "field", "changed", "why"), [*WRONG, *BY_PYTHON])
def test_what_is_wrong_is_named(reason: str, field: str, changed: Record, why: str) -> None:
    given_ = [record(), record(rollout_id="r1", **changed) if "rollout_id" not in changed
              else record(**changed)]  # fmt: skip
    with pytest.raises(BadRollout) as e:
        check_records(given_, where="x.jsonl")
    assert e.value.where.startswith("x.jsonl, row 1")
    assert (e.value.row, e.value.field, e.value.reason) == (1, field, reason)
    assert field in e.value.what
    assert why in e.value.why
    assert "reject" in e.value.do
    found = check_records(given_, bad="reject")
    assert found.counts == {reason: 1}
    assert found.rows.tolist() == [0]
    assert found.faults[0].as_json()["reason"] == reason


@pytest.mark.parametrize(("reason", "field", "changed", "why"), WRONG)
def test_what_is_wrong_is_named_in_arrow_too(
    reason: str, field: str, changed: Record, why: str
) -> None:
    names = [about.name for about in SCHEMA if about.name != "meta"]
    second = record(rollout_id="r1") | {
        name: None if value is ... else value for name, value in changed.items()
    }
    kinds = {"rewards": pa.map_(pa.string(), pa.float64()), "prompt_ids": pa.list_(pa.int64())}
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in (record(), second)]
        if name == "rewards":
            values = [None if v is None else list(v.items()) for v in values]
        columns[name] = pa.array(values, kinds.get(name))
    with pytest.raises(BadRollout) as e:
        check_table(pa.table(columns), where="x.parquet", first_row=10)
    assert e.value.where.startswith("x.parquet, row 11")
    assert (e.value.field, e.value.reason) == (field, reason)
    assert why in e.value.why


def test_every_reason_was_asked_for() -> None:
    asked = {reason for reason, *_ in (*WRONG, *BY_PYTHON)}
    elsewhere = {"logprobs_missing", "values_missing", "duplicate", "other_content"}
    assert asked | elsewhere == {*REASONS}


def test_lines_that_are_no_json_are_named() -> None:
    good = json.dumps(record()).encode()
    for line, why in (
        (b"{", "truncated"),
        (b"[1]", "a JSON list, not an object"),
        (json.dumps(record(reward=float("nan"))).encode(), "NaN is not JSON"),
        (b"\xff", "invalid"),
        (b'{"a":' * 2000, ""),
    ):
        with pytest.raises(BadRollout) as e:
            check_lines([good, b"\n", line], where="x.jsonl")
        assert e.value.where == "x.jsonl, line 3"
        assert e.value.field == "line"
        assert why in e.value.why


@pytest.mark.parametrize("name", ["logprobs", "values"])
def test_all_have_them_or_none(name: str) -> None:
    both = [record(), record(rollout_id="r1", **{name: ...})]
    with pytest.raises(BadRollout, match=f"{name}: {name} missing") as e:
        check_records(both)
    assert e.value.why == f"other rollouts have {name}, this one has none"
    assert getattr(check_records(both[1:]).rollouts, name) is None


def test_the_same_twice_is_one_and_another_under_its_id_is_a_fault() -> None:
    found = check_records([record(), record(), record(meta={"other": 1})])
    assert len(found.rollouts) == 1
    assert found.counts == {"duplicate": 2}
    with pytest.raises(BadRollout) as e:
        check_records([record(), record(reward=0.0)])
    assert e.value.reason == "other_content"
    assert "another rollout of that id was given before" in e.value.why
    found = check_records([record(), record(reward=0.0), record()], bad="reject")
    assert found.counts == {"other_content": 1, "duplicate": 1}
    assert not find_repeats(found.rollouts)


def test_what_a_tool_wrote_needs_no_logprob() -> None:
    made = record(logprobs=[-0.5, -1.25, None, -0.25], values=[1, 1, float("nan"), 1])
    found = check_records([made]).rollouts
    assert found.logprobs is not None
    assert found.values is not None
    assert found.logprobs.tolist() == [-0.5, -1.25, 0, -0.25]
    assert found.values.tolist() == [1, 1, 0, 1]
    with pytest.raises(BadRollout, match="logprob not finite"):
        check_records([record(logprobs=[None, -1, 0, -1])])


@pytest.mark.torch
def test_shapes_that_people_write() -> None:
    import torch

    plain = check_records([record()]).rollouts
    arrays = record(
        prompt_ids=np.array([5, 6, 7], np.int16), completion_ids=torch.tensor([8, 9, 10, 11]),
        completion_mask=np.array([1, 1, 0, 1], np.bool_), logprobs=(-0.5, -1.25, 0.0, -0.25),
        values=np.array([0.5, 0.25, 0.0, 1.0], np.float16), reward=np.float32(1.5),
    )  # fmt: skip
    assert same(plain, check_records([arrays]).rollouts)
    versions = [check_records([record(weight_versions=..., weight_version=3)]).rollouts]
    versions.append(check_records([record(weight_versions=[3])]).rollouts)
    assert same(*versions)
    numbers = check_records([record(rollout_id=7, group_id=np.int64(8))]).rollouts
    assert (numbers.rollout_id[0].as_py(), numbers.group_id[0].as_py()) == ("7", "8")
    named = check_records([record(reward={"a": 1, "b": 2}, rewards=...)]).rollouts
    assert named.totals().tolist() == [3]
    without = check_records([record(completion_mask=..., logprobs=..., values=...)]).rollouts
    assert without.mask.all()


def test_totals() -> None:
    rows = [
        record(rollout_id="a"),
        record(rollout_id="b", reward=..., rewards={"right": 2.0}),
        record(rollout_id="c", rewards=...),
    ]
    found = check_records(rows).rollouts
    assert found.totals().tolist() == [1.5, 2.0, 1.5]
    weighed = found.totals({"right": 2.0, "short": -1.0})
    assert weighed[:2].tolist() == [1.5, 4.0]
    assert np.isnan(weighed[2])
    assert np.isnan(found.totals({"fast": 1.0})).all()  # others may have it


def test_the_same_rewards_are_the_same_total_wherever_they_stand() -> None:
    """A product of matrices gave others at the end of a shard, so that a group without variance
    seemed to have some."""
    rewards = dict(zip("abcdef", (0.33, 0.79, 0.3, 0.45, 0.13, 0.4), strict=True))
    for count in range(1, 40):
        rows = [record(rollout_id=f"{k}", reward=..., rewards=rewards) for k in range(count)]
        assert len({*check_records(rows).rollouts.totals().tolist()}) == 1


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Records that are right, of all shapes."""
    has = {name: draw(st.booleans()) for name in ("logprobs", "values")}
    made = []
    for row in range(draw(st.integers(0, 6))):
        tokens = draw(st.integers(1, 5))
        mask = draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
        mask[0] = 1
        numbers = st.floats(-8, 0, width=32)
        one = record(
            rollout_id=f"r{row}",
            group_id=draw(st.sampled_from(["a", "b"])),
            completion_ids=draw(st.lists(st.integers(0, 99), min_size=tokens, max_size=tokens)),
            completion_mask=draw(st.sampled_from([mask, ...])),
            reward=draw(st.sampled_from([1.0, 0.25, -3.0])),
            rewards=draw(st.sampled_from([..., {}, {"a": 1.0}, {"a": None, "b": 2.0}])),
            weight_versions=draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
            group_size=draw(st.sampled_from([..., 1, 9])),
            temperature=draw(st.sampled_from([..., 0.5])),
            finish_reason=draw(st.sampled_from([..., "stop"])),
            meta=draw(st.sampled_from([..., {"a": [1, "\u00e9"]}])),
        )
        for name, given_ in has.items():
            values = draw(st.lists(numbers, min_size=tokens, max_size=tokens))
            one |= {name: values} if given_ else {}
            if not given_:
                one.pop(name)
        made.append(one)
    return made


@given(made=records(), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_every_way_in_gives_the_same(
    made: list[Record], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ways")
    plain = check_records(made).rollouts
    lines = [json.dumps(one) + "\n" for one in made]
    (folder / "a.jsonl").write_text("".join(lines))
    assert same(plain, read_rollouts(folder / "a.jsonl").rollouts)
    table = plain.to_table()
    pq.write_table(table, folder / "a.parquet")
    assert same(plain, read_rollouts(folder / "a.parquet").rollouts)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, SCHEMA) as out:
        out.write_table(table)
    assert same(plain, read_rollouts(folder / "a.arrow").rollouts)
    rows = np.random.default_rng(seed).permutation(len(made))
    assert same(plain.take(rows), check_records([made[k] for k in rows]).rollouts)
    if made:
        parts = [plain.take(np.arange(1)), plain.take(np.arange(1, len(made)))]
        assert same(plain, Rollouts.concat(parts)) or len(made) == 1
        assert same(check_table(table.slice(1)).rollouts, plain.take(np.arange(1, len(made))))


def test_struct_columns_and_narrow_types_are_read() -> None:
    table = check_records([record()]).rollouts.to_table()
    struct = pa.array([{"right": 1.0, "short": 0.5}])
    at = table.column_names.index("rewards")
    other = table.set_column(at, "rewards", struct)
    ids = pa.array([[8, 9, 10, 11]], pa.list_(pa.uint16()))
    other = other.set_column(table.column_names.index("completion_ids"), "completion_ids", ids)
    mask = pa.array([[True, True, False, True]])
    other = other.set_column(table.column_names.index("completion_mask"), "completion_mask", mask)
    names = other.column("rollout_id").dictionary_encode()
    other = other.set_column(0, "rollout_id", names)
    meta = pa.array([{"prompt": "two plus two?"}])
    other = other.set_column(table.column_names.index("meta"), "meta", meta)
    assert same(check_table(other).rollouts, check_table(table).rollouts)


def test_entries_under_a_null_are_nobodys() -> None:
    """Arrow lets a row that is null have some; those of later rows were shifted by them."""
    rows = [record(rollout_id=f"r{k}", reward=..., rewards={"a": k}) for k in range(3)]
    table = check_records(rows).rollouts.to_table()
    keys, items = pa.array(["a"] * 4), pa.array([0.0, 100.0, 200.0, 2.0])
    full = pa.MapArray.from_arrays(pa.array([0, 1, 3, 4], pa.int32()), keys, items)
    entries = pa.StructArray.from_arrays(
        [keys, items], fields=[full.type.key_field, full.type.item_field]
    )
    valid = pa.py_buffer(bytes([0b101]))
    column = pa.Array.from_buffers(full.type, 3, [valid, full.buffers()[1]], children=[entries])
    assert column.to_pylist() == [[("a", 0.0)], None, [("a", 2.0)]]
    table = table.set_column(table.column_names.index("rewards"), "rewards", column)
    for first in (0, 1):
        found = check_table(table.slice(first), bad="reject")
        assert found.rollouts.totals().tolist() == [0.0, 2.0][first:]
        assert found.counts == {"no_reward": 1}


@pytest.mark.parametrize(
    ("name", "column", "why"),
    [
        ("completion_ids", pa.array(["abc"]), "expected a list"),
        ("completion_ids", pa.array([[1.5]]), "expected a list of whole numbers"),
        ("logprobs", pa.array([["a"]]), "expected a list of numbers"),
        ("completion_mask", pa.array([[0.5]]), "expected a list of 0 and 1"),
        ("reward", pa.array(["1"]), "expected numbers"),
        ("rollout_id", pa.array([1.5]), "expected text"),
        ("rewards", pa.array([1.5]), "expected a struct or a map of numbers"),
        ("rewards", pa.array([{"a": "x"}]), "expected numbers"),
    ],
)
def test_columns_of_other_types_are_refused(name: str, column: pa.Array, why: str) -> None:
    table = check_records([record()]).rollouts.to_table()
    table = table.set_column(table.column_names.index(name), name, column)
    with pytest.raises(BadRollout) as e:
        check_table(table, where="x.parquet")
    assert e.value.why == why
    assert e.value.where == "x.parquet"


def test_unknown_columns_and_nulls_in_lists_are_refused() -> None:
    table = check_records([record()]).rollouts.to_table()
    with pytest.raises(BadRollout, match="'logprob' is not a field of a rollout") as e:
        check_table(table.append_column("logprob", pa.array([[0.5]])))
    assert "did you mean logprobs?" in e.value.do
    ids = pa.array([[1, None, 3, 4]])
    table = table.set_column(table.column_names.index("completion_ids"), "completion_ids", ids)
    with pytest.raises(BadRollout) as e:
        check_table(table)
    assert e.value.why == "a null in it, expected a number"


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    check_records([record()], tokenizer=tokenizer)
    with pytest.raises(BadRollout, match="id out of range"):
        check_records([record(completion_ids=[1, 2, 3, tokenizer.vocab_size])], tokenizer=tokenizer)


def test_text_becomes_ids_only_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    text = record(
        prompt_ids=..., completion_ids=..., completion_mask=..., logprobs=..., values=...,
        prompt="two plus two?", completion=" four",
    )  # fmt: skip
    other = record(rollout_id="r1", logprobs=..., values=...)
    found = check_records([text, other], tokenizer=tokenizer, retokenize=True).rollouts
    assert found.prompt_ids[:-3].tolist() == tokenizer.encode("two plus two?").tolist()
    first = found.completion_at[1]
    assert found.completion_ids[:first].tolist() == tokenizer.encode(" four").tolist()
    assert found.completion_ids[first:].tolist() == [8, 9, 10, 11]
    with pytest.raises(BadConfig, match="retokenize needs a tokenizer"):
        check_records([text], retokenize=True)
    with pytest.raises(BadRollout) as e:
        check_records([text | {"logprobs": [-1.0]}], tokenizer=tokenizer, retokenize=True)
    assert "fits no others" in e.value.why


def test_files_of_other_kinds_and_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"x\.csv is no file of rollouts"):
        read_rollouts(tmp_path / "x.csv")
    with pytest.raises(BadConfig, match="bad is 'drop'"):
        check_records([], bad="drop")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str) -> None:
    for data in (b"", b"not one of them"):
        path = tmp_path / f"x.{suffix}"
        path.write_bytes(data)
        with pytest.raises(InputDamaged, match=f"x.{suffix} is not a file of {suffix}") as e:
            read_rollouts(path)
        assert e.value.where == str(path)


def test_large_versions_are_kept_to_the_last_digit() -> None:
    """Nanoseconds since 1970 are no float64, and no int32."""
    version = 1_763_497_620_123_456_789
    rows = [
        record(weight_versions=..., weight_version=version),
        record(weight_versions=np.array([version], np.uint64)),
    ]
    for row in rows:
        assert check_records([row]).rollouts.versions.tolist() == [version]
    table = check_records([record()]).rollouts.to_table().drop_columns(["weight_versions"])
    for kind in (pa.int64(), pa.uint64()):
        other = table.append_column("weight_version", pa.array([version], kind))
        assert check_table(other).rollouts.versions.tolist() == [version]
    other = table.append_column("weight_version", pa.array([None], pa.int64()))
    assert check_table(other, bad="reject").counts == {"no_version": 1}


def test_two_answers_to_one_question_are_refused() -> None:
    """`weight_version` was left aside in silence."""
    with pytest.raises(BadRollout, match="weight_version: bad type") as e:
        check_records([record(weight_version=3, weight_versions=[7])])
    assert "give one of them" in e.value.why
    table = check_records([record(weight_versions=[7])]).rollouts.to_table()
    with pytest.raises(BadRollout, match="weight_version: bad type"):
        check_table(table.append_column("weight_version", pa.array([3])))
    assert len(check_table(table.append_column("weight_version", pa.nulls(1))).rollouts) == 1


def test_tensors_as_engines_and_trainers_have_them() -> None:
    """bfloat16, which NumPy does not know, and with a graph, which it refuses."""
    torch = pytest.importorskip("torch")
    narrow = torch.tensor([-0.5, -1.0, 0.0, -0.25], dtype=torch.bfloat16)
    graph = torch.tensor([-0.5, -1.0, 0.0, -0.25], requires_grad=True)
    for logprobs in (narrow, graph):
        reward = torch.tensor(2.0, dtype=logprobs.dtype, requires_grad=True)
        found = check_records([record(logprobs=logprobs, reward=reward)]).rollouts
        assert found.logprobs is not None
        assert found.logprobs.tolist() == [-0.5, -1.0, 0.0, -0.25]
        assert found.reward.tolist() == [2.0]


def test_a_number_that_is_none_is_shown() -> None:
    """It said from nan to nan."""
    row = record(logprobs=[None, -1.0, None, float("-inf")], completion_mask=[0, 1, 0, 1])
    with pytest.raises(BadRollout) as e:
        check_records([row])
    assert e.value.why == "token 3 of the completion has -inf"


def test_nothing_is_nothing() -> None:
    empty = check_records([]).rollouts
    assert len(empty) == len(empty.oldest) == len(empty.newest) == len(empty.groups()) == 0
    assert empty.nbytes >= 0
    assert same(empty, check_table(empty.to_table()).rollouts)


def test_fractions_of_versions_are_refused() -> None:
    """From Python they never came in; from a file they were cut."""
    table = check_records([record()]).rollouts.to_table().drop_columns(["weight_versions"])
    for version, wrong in ((2.0, False), (2.5, True)):
        given_ = table.append_column("weight_version", pa.array([version]))
        found = check_table(given_, bad="reject")
        assert [fault.field for fault in found.faults] == ["weight_version"] * wrong
        assert found.rollouts.versions.tolist() == [2] * (not wrong)


def test_the_content_is_all_but_meta() -> None:
    def content(**changed: Any) -> bytes:
        return content_of(check_records([record(**changed)]).rollouts, 0)

    known = {content()}
    for changed in (
        {"rewards": {"right": 1.0, "fast": 0.5}}, {"rewards": {"right": 1.0}}, {"rewards": ...},
        {"reward": 1.25}, {"group_size": 8}, {"temperature": 0.5}, {"top_p": 0.5},
        {"finish_reason": "length"}, {"group_id": "g1"}, {"weight_versions": [3]},
        {"completion_mask": [1, 1, 1, 1]}, {"logprobs": ...}, {"values": ...},
        {"prompt_ids": [5, 6]},
    ):  # fmt: skip
        found = content(**changed)
        assert found not in known, changed
        known.add(found)
    assert content(meta={"other": 1}) in known
    # nor does it matter what others beside it have
    beside = [record(), record(rollout_id="r1", rewards={"other": 2.0})]
    assert content_of(check_records(beside).rollouts, 0) == content()
