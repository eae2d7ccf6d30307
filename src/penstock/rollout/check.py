"""Check rollouts, all rules at once over all rows, and name what is wrong by file, row and field.

In:    records as Python has them, JSON lines, parquet files, Arrow tables
Out:   `Rollouts` of those that can be trained on; `Fault`s of the others
Keeps: text becomes ids only where `retokenize` asks for it
Never: repairs a record, or drops one in silence; loops over tokens in Python

    records ─▶ raw columns ─▶ judged ─▶ Rollouts, faults
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays import Bools, Bytes, Floats, Int64s, offsets_of, values_of
from penstock.errors import BadConfig, BadRollout, InputDamaged
from penstock.options import MOST, suggest
from penstock.prepare.wire import numbers, strings
from penstock.rollout.records import (
    Checked,
    Fault,
    Float32s,
    Rollouts,
    bools_of,
    content_of,
    spans_of,
)

FIELDS: Final = (
    "rollout_id", "group_id", "group_size", "prompt_ids", "completion_ids", "completion_mask",
    "logprobs", "values", "reward", "rewards", "weight_version", "weight_versions", "temperature",
    "top_p", "finish_reason", "meta",
)  # fmt: skip
"""What a record may say."""
TEXTS: Final = ("prompt", "completion")
"""The same for text alone."""

MOST_ID: Final = (1 << 31) - 1
MOST_FLOAT: Final = float(np.finfo(np.float32).max)
"""Batches have rewards, values and log-probabilities in float32."""
ROUNDING: Final = 1e-3
"""How far a log-probability may be above 0: engines compute them in bfloat16 and add them up."""
SAMPLE: Final = 40
BOTH_VERSIONS: Final = "weight_versions is there too: give one of them"

_LISTS: Final[dict[str, str]] = {
    "prompt_ids": "ids", "completion_ids": "ids", "completion_mask": "mask", "logprobs": "floats",
    "values": "floats", "weight_versions": "integers",
}  # fmt: skip
REASONS: Final[dict[str, str]] = {
    "bad_type": "",
    "unknown_field": "",
    "text_alone": "completion_ids",
    "no_rollout_id": "rollout_id",
    "no_group_id": "group_id",
    "bad_group_size": "group_size",
    "prompt_empty": "prompt_ids",
    "completion_empty": "completion_ids",
    "id_out_of_range": "completion_ids",
    "prompt_id_out_of_range": "prompt_ids",
    "mask_length": "completion_mask",
    "mask_not_0_or_1": "completion_mask",
    "mask_without_1": "completion_mask",
    "logprobs_missing": "logprobs",
    "logprobs_length": "logprobs",
    "logprob_not_finite": "logprobs",
    "logprob_above_0": "logprobs",
    "values_missing": "values",
    "values_length": "values",
    "value_not_finite": "values",
    "no_reward": "reward",
    "reward_not_finite": "reward",
    "named_reward_not_finite": "rewards",
    "no_version": "weight_versions",
    "negative_version": "weight_versions",
    "bad_temperature": "temperature",
    "bad_top_p": "top_p",
    "other_content": "rollout_id",
    "duplicate": "rollout_id",
}
"""Why a rollout is left out, and the field that shows it. A duplicate is the same again."""
_CODES: Final = {reason: code for code, reason in enumerate(REASONS, 1)}


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def encode_rows(self, data: Bytes, at: Int64s) -> tuple[npt.NDArray[Any], Int64s]: ...


def check_records(
    records: Sequence[Mapping[str, Any]],
    *,
    where: str = "rollout_data",
    bad: str = "raise",
    tokenizer: Encodes | None = None,
    retokenize: bool = False,
) -> Checked:
    """Records as Python has them: lists, arrays or tensors of one dimension, numbers, text.

    >>> one = {"rollout_id": "r0", "group_id": "g0", "prompt_ids": [5, 6], "completion_ids": [7],
    ...        "logprobs": [-0.5], "reward": 1.0, "weight_version": 3}
    >>> check_records([one]).rollouts.lengths.tolist()
    [3]
    """
    raw = _Raw(len(records), lambda row: f"{where}, row {row}")
    raw.fill(records)
    return _checked(raw, bad, tokenizer, retokenize)


def check_table(
    table: pa.Table | pa.RecordBatch,
    *,
    where: str = "rollout_data",
    bad: str = "raise",
    tokenizer: Encodes | None = None,
    retokenize: bool = False,
    first_row: int = 0,
) -> Checked:
    """Records as Arrow has them; `first_row` is the number of the first in its file."""
    raw = _Raw(table.num_rows, lambda row: f"{where}, row {first_row + row}")
    raw.fill_from(table, where)
    return _checked(raw, bad, tokenizer, retokenize)


def check_lines(
    lines: Iterable[bytes],
    *,
    where: str,
    bad: str = "raise",
    tokenizer: Encodes | None = None,
    retokenize: bool = False,
    first_line: int = 1,
) -> Checked:
    """Records as lines of JSON; blank lines are none."""
    held, at = [], []
    for number, line in enumerate(lines, first_line):
        if line.strip():
            held.append(line)
            at.append(number)
    raw = _Raw(len(held), lambda row: f"{where}, line {at[row]}")
    raw.fill([_parsed(line) for line in held])
    return _checked(raw, bad, tokenizer, retokenize)


class _NotJson(dict[str, Any]):
    """Stands for a line that is not a JSON object."""

    why = ""


def _parsed(line: bytes) -> Mapping[str, Any]:
    why = ""
    try:
        found = msgspec.json.decode(line)
        if isinstance(found, dict):
            return found
        why = f"a JSON {type(found).__name__}, not an object"
    except (msgspec.DecodeError, RecursionError) as error:
        why = str(error)
        for word in (b"NaN", b"Infinity"):
            if word in line:
                why += f"; {word.decode()} is not JSON: null is, in rewards, and nothing elsewhere"
    stands = _NotJson()
    stands.why = why
    return stands


@dataclass(slots=True)
class _List:
    """A column of lists: all values end to end, where each begins, which rows have one."""

    values: npt.NDArray[Any]
    at: Int64s
    given: Bools

    @property
    def sizes(self) -> Int64s:
        found: Int64s = np.diff(self.at)
        return found

    def rows_with(self, wrong: Bools) -> Bools:
        """Rows in which a value is wrong."""
        if not wrong.any():
            return np.zeros(len(self.given), np.bool_)
        ends = np.concatenate([[0], np.cumsum(wrong)])
        found: Bools = np.diff(ends[self.at]) > 0
        return found


class _Raw:
    """Records as columns, before anybody has looked at them."""

    def __init__(self, count: int, label: Any) -> None:
        self.count = count
        self.label = label
        self.lists: dict[str, _List] = {}
        self.ids: dict[str, list[str]] = {}
        self.numbers: dict[str, Floats] = {}
        self.named: dict[str, Floats] = {}
        self.named_wrong: dict[int, str] = {}
        """Rows with a named reward that was given and is no finite number."""
        self.texts: dict[str, list[str | None]] = {name: [None] * count for name in TEXTS}
        self.told: dict[int, tuple[str, str, str]] = {}
        """Rows that are wrong before any rule is asked: reason, field, why."""

    def tell(self, row: int, reason: str, field: str, why: str) -> None:
        self.told.setdefault(row, (reason, field, why))

    # From Python

    def fill(self, records: Sequence[Mapping[str, Any]]) -> None:
        known = {*FIELDS, *TEXTS}
        for row, record in enumerate(records):
            if isinstance(record, _NotJson):
                self.tell(row, "bad_type", "line", record.why)
            elif not isinstance(record, Mapping):
                self.tell(row, "bad_type", "record", f"a {type(record).__name__}, not a mapping")
            elif not known.issuperset(record):
                name = min(str(name) for name in record if name not in known)
                why = f"{name!r} is not a field: {suggest(name, sorted(known))}; or put it in meta"
                self.tell(row, "unknown_field", name, why)
        rows: Sequence[Mapping[str, Any]] = records
        if self.told:
            rows = [{} if row in self.told else record for row, record in enumerate(records)]
        for name, kind in _LISTS.items():
            self.lists[name] = self._list(name, kind, rows)
        for name in ("rollout_id", "group_id"):
            self.ids[name] = [self._id(row, name, record) for row, record in enumerate(rows)]
        for name in ("group_size", "temperature", "top_p"):
            self.numbers[name] = self._numbers(name, [record.get(name) for record in rows])
        self._rewards(rows)
        self.ids["finish_reason"] = [
            self._text(row, "finish_reason", record) or "" for row, record in enumerate(rows)
        ]
        for name in TEXTS:
            self.texts[name] = [self._text(row, name, record) for row, record in enumerate(rows)]
        self.ids["meta"] = [self._meta(row, record.get("meta")) for row, record in enumerate(rows)]

    def _list(self, name: str, kind: str, records: Sequence[Mapping[str, Any]]) -> _List:
        arrays, given = [], np.zeros(self.count, np.bool_)
        empty = np.zeros(0, np.float64 if kind == "floats" else np.int64)
        for row, record in enumerate(records):
            value = record.get(name)
            if name == "weight_versions" and (one := record.get("weight_version")) is not None:
                if value is not None:
                    self.tell(row, "bad_type", "weight_version", BOTH_VERSIONS)
                value = [one]
            array = empty
            if value is not None:
                given[row] = True
                try:
                    array = _as_array(value, kind)
                except (TypeError, ValueError, OverflowError) as error:
                    self.tell(row, "bad_type", name, str(error))
            arrays.append(array)
        sizes = np.fromiter(map(len, arrays), np.int64, self.count)
        values = np.concatenate([empty, *arrays]) if arrays else empty
        return _List(values, offsets_of(sizes), given)

    def _id(self, row: int, name: str, record: Mapping[str, Any]) -> str:
        value = record.get(name)
        if value is None:
            return ""
        if isinstance(value, str):
            return value if _is_utf8(value) else self._not_text(row, name, value)
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return str(value)
        return self._not_text(row, name, value)

    def _text(self, row: int, name: str, record: Mapping[str, Any]) -> str | None:
        value = record.get(name)
        if value is None or (isinstance(value, str) and _is_utf8(value)):
            return value
        return self._not_text(row, name, value)

    def _not_text(self, row: int, name: str, value: Any) -> str:
        self.tell(row, "bad_type", name, f"{_shown(value)}, expected text")
        return ""

    def _numbers(self, name: str, values: Sequence[Any]) -> Floats:
        """Numbers, one for each row: not a number where there is none."""
        found = np.full(self.count, np.nan)
        for row, value in enumerate(values):
            if value is None:
                continue
            number = _as_number(value)
            if number is None or not np.isfinite(number):
                self.tell(row, "bad_type", name, f"{_shown(value)}, expected a number")
            else:
                found[row] = number
        return found

    def _rewards(self, records: Sequence[Mapping[str, Any]]) -> None:
        found = np.full(self.count, np.nan)
        for row, record in enumerate(records):
            named, value = record.get("rewards"), record.get("reward")
            if isinstance(value, Mapping) and named is None:
                named, value = value, None
            if value is not None:
                number = _as_number(value)
                if number is None:
                    self.tell(row, "bad_type", "reward", f"{_shown(value)}, expected a number")
                elif not abs(number) <= MOST_FLOAT:
                    self.tell(row, "reward_not_finite", "reward", f"it is {_named(number)}")
                else:
                    found[row] = number
            if named is None:
                continue
            if not isinstance(named, Mapping):
                why = f"{_shown(named)}, expected numbers by name"
                self.tell(row, "bad_type", "rewards", why)
                continue
            for name, one in named.items():
                self._named_reward(row, name, one)
        self.numbers["reward"] = found

    def _named_reward(self, row: int, name: Any, value: Any) -> None:
        if value is None:
            return
        number = _as_number(value)
        if not isinstance(name, str) or number is None:
            why = f"{_shown(name)}: {_shown(value)}, expected a number by name"
            self.tell(row, "bad_type", "rewards", why)
            return
        if name not in self.named:
            self.named[name] = np.full(self.count, np.nan)
        self.named[name][row] = number
        if not abs(number) <= MOST_FLOAT:
            why = f"{name!r} is {_named(number)}; null says that there is none"
            self.named_wrong.setdefault(row, why)

    def _meta(self, row: int, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, Mapping):
            try:
                return msgspec.json.encode(value).decode()
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                self.tell(row, "bad_type", "meta", f"it is not JSON: {error}")
                return ""
        self.tell(row, "bad_type", "meta", f"{_shown(value)}, expected a mapping")
        return ""

    # From Arrow

    def fill_from(self, table: pa.Table | pa.RecordBatch, where: str) -> None:
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        for name in table.column_names:
            if name not in FIELDS and name not in TEXTS:
                raise BadRollout(
                    f"{name!r} is not a field of a rollout",
                    where=where,
                    do=f"{suggest(name, sorted((*FIELDS, *TEXTS)))}; or put it in meta",
                )
        for name, kind in _LISTS.items():
            self.lists[name] = self._list_from(table, name, kind, where)
        for name in ("rollout_id", "group_id", "finish_reason"):
            self.ids[name] = [text or "" for text in self._texts_from(table, name, where)]
        for name in TEXTS:
            if name in table.column_names:
                self.texts[name] = self._texts_from(table, name, where)
        for name in ("group_size", "temperature", "top_p", "reward"):
            self.numbers[name] = self._numbers_from(table, name, where)
        self._named_from(table, where)
        self.ids["meta"] = [""] * self.count
        if "meta" in table.column_names:
            column = table.column("meta")
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                self.ids["meta"] = [text or "" for text in column.to_pylist()]
            else:
                self.ids["meta"] = [
                    self._meta(row, value) for row, value in enumerate(column.to_pylist())
                ]

    def _list_from(self, table: pa.Table, name: str, kind: str, where: str) -> _List:
        nothing = np.zeros(0, np.float64 if kind == "floats" else np.int64)
        column = table.column(name) if name in table.column_names else None
        if column is not None and name == "weight_versions":
            self._refuse_both(table)
        if column is None and name == "weight_versions" and "weight_version" in table.column_names:
            one = table.column("weight_version")
            if pa.types.is_integer(one.type):  # as they are: float64 has 53 bits
                one = one.combine_chunks()
                given = np.asarray(one.is_valid())
                whole = np.asarray(one.drop_null())
                if whole.dtype == np.uint64:
                    whole = np.where(whole > MOST, -1, whole.astype(np.int64))
                return _List(whole.astype(np.int64), offsets_of(given), given)
            versions = self._numbers_from(table, "weight_version", where)
            given = ~np.isnan(versions)
            for row in np.flatnonzero(given & (versions % 1 != 0)).tolist():
                why = f"{versions[row]:g}, expected a whole number"
                self.tell(row, "bad_type", "weight_version", why)
            return _List(versions[given].astype(np.int64), offsets_of(given), given)
        if column is None or pa.types.is_null(column.type):
            empty = np.zeros(self.count + 1, np.int64)
            return _List(nothing, empty, np.zeros(self.count, np.bool_))
        kinds = pa.types
        if not (kinds.is_list(column.type) or kinds.is_large_list(column.type)):
            raise _wrong_column(name, column.type, "a list", where)
        inner = column.type.value_type
        fits = {
            "ids": kinds.is_integer(inner),
            "integers": kinds.is_integer(inner),
            "mask": kinds.is_integer(inner) or kinds.is_boolean(inner),
            "floats": kinds.is_floating(inner) or kinds.is_integer(inner),
        }
        if not fits[kind] and not kinds.is_null(inner):
            expected = {"floats": "numbers", "mask": "0 and 1"}.get(kind, "whole numbers")
            raise _wrong_column(name, column.type, f"a list of {expected}", where)
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # of no chunk at all
            array = pa.array([], column.type)
        given = np.asarray(array.is_valid())
        sizes = np.asarray(pc.fill_null(array.value_lengths(), 0)).astype(np.int64)
        flat = array.flatten()
        found = _List(nothing, offsets_of(sizes), given)
        if flat.null_count:
            nulls = np.asarray(flat.is_null())
            if kind != "floats":
                for row in np.flatnonzero(found.rows_with(nulls)).tolist():
                    self.tell(row, "bad_type", name, "a null in it, expected a number")
            flat = pc.fill_null(flat, float("nan") if kinds.is_floating(inner) else 0)
        if kinds.is_boolean(flat.type):
            flat = flat.cast(pa.uint8())
        values = np.asarray(flat)
        if values.dtype == np.uint64:
            values = np.where(values > MOST, -1, values.astype(np.int64))
        if kind == "floats" and values.dtype != np.float32:
            values = values.astype(np.float64)
        found.values = values
        return found

    def _refuse_both(self, table: pa.Table) -> None:
        """One that was sampled with one version and with several is one too many."""
        if "weight_version" in table.column_names:
            both = [table.column(name).is_valid() for name in ("weight_version", "weight_versions")]
            for row in np.flatnonzero(np.asarray(pc.and_(*both))).tolist():
                self.tell(row, "bad_type", "weight_version", BOTH_VERSIONS)

    def _texts_from(self, table: pa.Table, name: str, where: str) -> list[str | None]:
        if name not in table.column_names:
            return [None] * self.count
        column = table.column(name)
        kinds = pa.types
        if kinds.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if kinds.is_integer(column.type) and name in ("rollout_id", "group_id"):
            column = column.cast(pa.string())
        if not (
            kinds.is_string(column.type)
            or kinds.is_large_string(column.type)
            or kinds.is_string_view(column.type)
            or kinds.is_null(column.type)
        ):
            raise _wrong_column(name, column.type, "text", where)
        found: list[str | None] = column.to_pylist()
        return found

    def _numbers_from(self, table: pa.Table, name: str, where: str) -> Floats:
        if name not in table.column_names:
            return np.full(self.count, np.nan)
        column = table.column(name)
        kinds = pa.types
        if not (
            kinds.is_integer(column.type)
            or kinds.is_floating(column.type)
            or kinds.is_null(column.type)
        ):
            raise _wrong_column(name, column.type, "numbers", where)
        given = np.asarray(column.is_valid())
        column = column.cast(pa.float64(), safe=False)
        found = np.asarray(pc.fill_null(column, float("nan"))).astype(np.float64)
        reason = "reward_not_finite" if name == "reward" else "bad_type"
        fits = np.abs(found) <= MOST_FLOAT
        for row in np.flatnonzero(given & ~fits).tolist():
            self.tell(row, reason, name, f"it is {_named(found[row])}")
        return np.where(fits, found, np.nan)

    def _named_from(self, table: pa.Table, where: str) -> None:
        if "rewards" not in table.column_names:
            return
        column = table.column("rewards").combine_chunks()
        kinds = pa.types
        if kinds.is_null(column.type) or isinstance(column, pa.ChunkedArray):
            return
        if kinds.is_struct(column.type):
            there = np.asarray(column.is_valid())
            for number in range(column.type.num_fields):
                name = column.type.field(number).name
                child = pc.struct_field(column, name)
                self._note_named(name, np.flatnonzero(there), child.filter(bools_of(there)), where)
        elif kinds.is_map(column.type):
            # a row that is null may have entries all the same: they are nobody's
            there = np.flatnonzero(np.asarray(column.is_valid()))
            spans, at = spans_of(np.asarray(column.offsets).astype(np.int64), there)
            rows, picks = np.repeat(there, np.diff(at)), numbers(spans)
            keys = column.keys.take(picks).dictionary_encode()
            items = column.items.take(picks)
            codes = np.asarray(keys.indices)
            for code, name in enumerate(keys.dictionary.to_pylist()):
                mine = codes == code
                self._note_named(name, rows[mine], items.filter(bools_of(mine)), where)
        else:
            raise _wrong_column("rewards", column.type, "a struct or a map of numbers", where)

    def _note_named(self, name: str, rows: Int64s, column: pa.Array, where: str) -> None:
        kinds = pa.types
        if not (
            kinds.is_integer(column.type)
            or kinds.is_floating(column.type)
            or kinds.is_null(column.type)
        ):
            raise _wrong_column(f"rewards.{name}", column.type, "numbers", where)
        given = np.asarray(column.is_valid())
        values = np.asarray(pc.fill_null(column.cast(pa.float64()), float("nan")))
        found = self.named.setdefault(name, np.full(self.count, np.nan))
        found[rows[given]] = values[given]
        for row in rows[given & ~(np.abs(values) <= MOST_FLOAT)].tolist():
            why = f"{name!r} is {_named(found[row])}; null says that there is none"
            self.named_wrong.setdefault(row, why)

    # Judging

    def judge(self, vocab_size: int | None) -> npt.NDArray[np.int64]:
        """Of each row the first thing that is wrong with it, by its number; 0 for none."""
        codes = np.zeros(self.count, np.int64)

        def mark(reason: str, wrong: Bools) -> None:
            codes[(codes == 0) & wrong] = _CODES[reason]

        for row, (reason, _, _) in self.told.items():
            codes[row] = _CODES[reason]
        lists = self.lists
        completion, prompt, mask = (
            lists[name] for name in ("completion_ids", "prompt_ids", "completion_mask")
        )
        has_text = np.array([text is not None for text in self.texts["completion"]], np.bool_)
        mark("text_alone", ~completion.given & has_text)
        for name in ("rollout_id", "group_id"):
            mark(f"no_{name}", np.array([not text for text in self.ids[name]], np.bool_))
        sizes = self.numbers["group_size"]
        given = ~np.isnan(sizes)
        mark("bad_group_size", given & ((sizes < 1) | (sizes > MOST_ID) | (sizes % 1 != 0)))
        mark("prompt_empty", prompt.sizes == 0)
        mark("completion_empty", completion.sizes == 0)
        most = MOST_ID if vocab_size is None else vocab_size - 1
        for reason, ids in (
            ("prompt_id_out_of_range", prompt), ("id_out_of_range", completion)
        ):  # fmt: skip
            if len(ids.values) and (ids.values.min() < 0 or ids.values.max() > most):
                mark(reason, ids.rows_with((ids.values < 0) | (ids.values > most)))
        mark("mask_length", mask.given & (mask.sizes != completion.sizes))
        mark("mask_not_0_or_1", mask.rows_with((mask.values != 0) & (mask.values != 1)))
        ones = offsets_of(mask.values == 1)
        mark("mask_without_1", mask.given & (np.diff(ones[mask.at]) == 0))
        for name, one in (("logprobs", "logprob"), ("values", "value")):
            column = lists[name]
            if column.given.any():
                mark(f"{name}_missing", ~column.given)
            mark(f"{name}_length", column.given & (column.sizes != completion.sizes))
            odd, above = ~(np.abs(column.values) <= MOST_FLOAT), column.values > ROUNDING
            if name == "values" or not above.any():
                above = np.zeros(0, np.bool_)
            if odd.any() or len(above):
                # only of rows that fit their masks so far: others are marked
                sampled = self._sampled(column, codes == 0)
                mark(f"{one}_not_finite", column.rows_with(sampled & odd))
                if len(above):
                    mark("logprob_above_0", column.rows_with(sampled & above))
        rewarded = ~np.isnan(self.numbers["reward"])
        for rewards in self.named.values():
            rewarded |= ~np.isnan(rewards)
        wrong = np.zeros(self.count, np.bool_)
        wrong[list(self.named_wrong)] = True
        mark("named_reward_not_finite", wrong)
        mark("no_reward", ~rewarded)
        versions = lists["weight_versions"]
        mark("no_version", versions.sizes == 0)
        mark("negative_version", versions.rows_with(versions.values < 0))
        with np.errstate(invalid="ignore"):
            temperature, top_p = self.numbers["temperature"], self.numbers["top_p"]
            mark("bad_temperature", ~np.isnan(temperature) & ~(temperature >= 0))
            mark("bad_top_p", ~np.isnan(top_p) & ~((top_p > 0) & (top_p <= 1)))
        return codes

    def _sampled(self, column: _List, rows: Bools) -> Bools:
        """Which values of a column are of sampled tokens, in rows that are right so far."""
        mask = self.lists["completion_mask"]
        found = np.repeat(rows, column.sizes)
        masked = rows & mask.given & column.given
        spans, _ = spans_of(column.at, np.flatnonzero(masked))
        inside, _ = spans_of(mask.at, np.flatnonzero(masked))
        found[spans] &= mask.values[inside] == 1
        return found

    def fault(self, row: int, reason: str) -> Fault:
        """What is wrong with a row, in words."""
        if row in self.told:
            reason, name, why = self.told[row]
        else:
            name, why = REASONS[reason], self._why(row, reason)
        ids = (self.ids["rollout_id"][row], self.ids["group_id"][row])
        return Fault(self.label(row), row, name, reason, why, *ids)

    def _why(self, row: int, reason: str) -> str:
        lists = self.lists
        sizes = {name: int(column.sizes[row]) for name, column in lists.items()}
        name = REASONS[reason]
        values = np.zeros(0)
        if name in lists:
            values = lists[name].values[lists[name].at[row] : lists[name].at[row + 1]]
        match reason:
            case "text_alone":
                return (
                    "it has text and no ids. Ids are what was sampled: text becomes other ids "
                    "where a tokenizer cuts it otherwise, and their log-probabilities are lost "
                    "(retokenize=True takes that into account)"
                )
            case "mask_length" | "logprobs_length" | "values_length":
                return f"{name} has {sizes[name]}, completion_ids has {sizes['completion_ids']}"
            case "mask_without_1":
                return f"none of {sizes['completion_ids']} tokens was sampled: nothing to train"
            case "logprobs_missing" | "values_missing":
                return f"other rollouts have {name}, this one has none"
            case "id_out_of_range" | "prompt_id_out_of_range" | "negative_version":
                return f"from {values.min()} to {values.max()}"
            case "logprob_not_finite" | "value_not_finite" | "logprob_above_0":
                mask, odd = lists["completion_mask"], ~(np.abs(values) <= MOST_FLOAT)
                if reason == "logprob_above_0":
                    odd = values > ROUNDING
                if mask.given[row]:
                    odd &= mask.values[mask.at[row] : mask.at[row + 1]] == 1
                first = int(np.flatnonzero(odd)[0])
                return f"token {first} of the completion has {values[first]:g}"
            case "named_reward_not_finite":
                return self.named_wrong[row]
            case "bad_group_size" | "bad_temperature" | "bad_top_p":
                return f"it is {self.numbers[name][row]:g}"
            case "mask_not_0_or_1":
                return f"{_shown(values.tolist())}, expected 0 for what a tool wrote, else 1"
        return "it is not there, or empty"

    def encode_texts(self, tokenizer: Encodes) -> int:
        """Make ids of text where there are none; says of how many rows."""
        texts, lists = self.texts, self.lists
        rows = [
            row
            for row in range(self.count)
            if row not in self.told
            and texts["prompt"][row] is not None
            and texts["completion"][row] is not None
            and not (lists["prompt_ids"].given[row] or lists["completion_ids"].given[row])
        ]
        for row in rows:
            for name in ("completion_mask", "logprobs", "values"):
                if lists[name].given[row]:
                    why = "it is of ids that are not there, and fits no others"
                    self.tell(row, "bad_type", name, why)
        for name, ids in (("prompt", "prompt_ids"), ("completion", "completion_ids")):
            encoded = [str(texts[name][row]).encode() for row in rows]
            at = offsets_of([len(text) for text in encoded])
            data = np.frombuffer(b"".join(encoded) + bytes(64), np.uint8)
            made, ends = tokenizer.encode_rows(data, at)
            column = lists[ids]
            sizes = column.sizes.copy()
            sizes[rows] = np.diff(ends)
            moved = offsets_of(sizes)
            values = np.zeros(int(moved[-1]), np.int64)
            others = np.setdiff1d(np.arange(self.count), rows)
            source, _ = spans_of(column.at, others)
            target, _ = spans_of(moved, others)
            values[target] = column.values[source]
            target, _ = spans_of(moved, np.asarray(rows, np.int64))
            values[target] = made
            column.given[rows] = True
            lists[ids] = _List(values, moved, column.given)
        return len(rows)

    def rollouts(self, rows: Int64s) -> Rollouts:
        """Rows that are right."""
        lists, picked = self.lists, rows.tolist()

        def listed(name: str) -> tuple[npt.NDArray[Any], Int64s]:
            if len(rows) == self.count:
                return lists[name].values, lists[name].at
            spans, at = spans_of(lists[name].at, rows)
            return lists[name].values[spans], at

        prompt, prompt_at = listed("prompt_ids")
        completion, completion_at = listed("completion_ids")
        versions, version_at = listed("weight_versions")
        masked = lists["completion_mask"].given[rows]
        if masked.all():
            mask = listed("completion_mask")[0] == 1
        else:
            mask = np.ones(len(completion), np.bool_)
            inside, _ = spans_of(completion_at, np.flatnonzero(masked))
            spans, _ = spans_of(lists["completion_mask"].at, rows[masked])
            mask[inside] = lists["completion_mask"].values[spans] == 1
        floats: dict[str, Float32s | None] = {"logprobs": None, "values": None}
        for name in floats:
            if len(rows) and lists[name].given.any():
                values, _ = listed(name)
                floats[name] = np.where(mask, values, np.float32(0)).astype(np.float32, copy=False)
        sizes = np.nan_to_num(self.numbers["group_size"][rows])
        return Rollouts(
            rollout_id=strings([self.ids["rollout_id"][row] for row in picked]),
            group_id=strings([self.ids["group_id"][row] for row in picked]),
            group_size=sizes.astype(np.int32),
            prompt_ids=prompt.astype(np.int32, copy=False),
            prompt_at=prompt_at,
            completion_ids=completion.astype(np.int32, copy=False),
            completion_at=completion_at,
            mask=mask,
            logprobs=floats["logprobs"],
            values=floats["values"],
            reward=self.numbers["reward"][rows],
            rewards={name: column[rows] for name, column in sorted(self.named.items())},
            versions=versions.astype(np.int64, copy=False),
            version_at=version_at,
            temperature=self.numbers["temperature"][rows].astype(np.float32),
            top_p=self.numbers["top_p"][rows].astype(np.float32),
            finish_reason=strings([self.ids["finish_reason"][row] for row in picked]),
            meta=strings([self.ids["meta"][row] for row in picked]),
        )


def _checked(raw: _Raw, bad: str, tokenizer: Encodes | None, retokenize: bool) -> Checked:
    if bad not in ("raise", "reject"):
        raise BadConfig(f"bad is {bad!r}", do="choose raise or reject")
    if retokenize:
        if tokenizer is None:
            raise BadConfig("retokenize needs a tokenizer", do="give the one of the model")
        raw.encode_texts(tokenizer)
    codes = raw.judge(None if tokenizer is None else tokenizer.vocab_size)
    names = list(REASONS)
    good = np.flatnonzero(codes == 0)
    rollouts = raw.rollouts(good)
    repeats = find_repeats(rollouts)
    if repeats:
        for k, reason in repeats.items():
            codes[good[k]] = _CODES[reason]
        stay = np.setdiff1d(np.arange(len(good)), list(repeats))
        good, rollouts = good[stay], rollouts.take(stay)
    faults = []
    for row in np.flatnonzero(codes).tolist():
        reason = names[codes[row] - 1]
        fault = raw.fault(row, reason)
        if reason in ("duplicate", "other_content"):
            told = "the same rollout" if reason == "duplicate" else "another rollout"
            fault = replace(fault, why=f"{told} of that id was given before")
        if bad == "raise" and reason != "duplicate":
            raise fault.error()
        faults.append(fault)
    return Checked(rollouts, good, faults)


def find_repeats(rollouts: Rollouts) -> dict[int, str]:
    """Rollouts whose id was there before: the same again (`duplicate`), or `other_content`."""
    codes = values_of(rollouts.rollout_id.dictionary_encode().indices, np.int32)
    counts = np.bincount(codes, minlength=1)
    if not len(codes) or counts.max() <= 1:
        return {}
    first: dict[int, bytes] = {}
    found: dict[int, str] = {}
    for row in np.flatnonzero(counts[codes] > 1).tolist():
        digest = content_of(rollouts, row)
        before = first.setdefault(int(codes[row]), digest)
        if before is not digest:
            found[row] = "duplicate" if before == digest else "other_content"
    return found


def read_rollouts(
    path: str | os.PathLike[str],
    *,
    bad: str = "raise",
    tokenizer: Encodes | None = None,
    retokenize: bool = False,
) -> Checked:
    """All rollouts of a file: JSON lines (.jsonl), parquet (.parquet) or Arrow (.arrow)."""
    name = os.fspath(path)
    suffix = os.path.splitext(name)[1].lower()
    check = {"bad": bad, "tokenizer": tokenizer, "retokenize": retokenize}
    if suffix in (".parquet", ".arrow", ".feather"):
        return check_table(_table_of(name, suffix), where=name, **check)  # type: ignore[arg-type]
    if suffix in (".jsonl", ".json", ".ndjson"):
        with open(name, "rb") as lines:
            return check_lines(lines, where=name, **check)  # type: ignore[arg-type]
    raise BadConfig(
        f"{os.path.basename(name)} is no file of rollouts",
        where=name,
        do="give .jsonl, .parquet or .arrow",
    )


def _table_of(name: str, suffix: str) -> pa.Table:
    """The table in a file."""
    try:
        if suffix == ".parquet":
            import pyarrow.parquet as pq

            with pa.OSFile(name, "rb") as file, pq.ParquetFile(file) as parquet:
                return parquet.read()
        with pa.OSFile(name, "rb") as file:
            return pa.ipc.open_file(file).read_all()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputDamaged(
            f"{os.path.basename(name)} is not a file of {suffix[1:]}",
            where=name,
            why=str(error),
            do="write it again",
        ) from error


def _wrong_column(name: str, kind: pa.DataType, expected: str, where: str) -> BadRollout:
    error = BadRollout(
        f"column {name!r} is {kind}",
        where=where,
        why=f"expected {expected}",
        do="write the column as that",
    )
    error.field, error.reason = name, "bad_type"
    return error


def _as_array(value: Any, kind: str) -> npt.NDArray[Any]:
    """One list of a record."""
    if isinstance(value, str | bytes | Mapping):
        raise TypeError(f"{_shown(value)}, expected a list")
    value = _untorched(value)
    array = np.asarray(value)
    if kind == "floats" and array.dtype.kind == "O" and array.ndim == 1:
        array = np.array([np.nan if one is None else one for one in value])
    if array.ndim != 1:
        raise TypeError(f"{_shown(value)}, expected a list of numbers")
    if not len(array):
        return np.zeros(0, np.float64 if kind == "floats" else np.int64)
    kinds = {"ids": "iu", "integers": "iu", "mask": "iub", "floats": "fiu"}[kind]
    if array.dtype.kind not in kinds:
        expected = {"floats": "numbers", "mask": "0 and 1"}.get(kind, "whole numbers")
        raise TypeError(f"{_shown(value)}, expected a list of {expected}")
    if array.dtype == np.uint64 and array.max() > MOST:
        return np.where(array > MOST, -1, array.astype(np.int64))
    return array.astype(np.float64 if kind == "floats" else np.int64)


def _untorched(value: Any) -> Any:
    """A tensor without its graph, where and as NumPy can read it: NumPy has no bfloat16."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return value.float() if value.is_floating_point() else value


def _as_number(value: Any) -> float | None:
    """A number of any type; None for what is none."""
    if isinstance(value, bool | np.bool_ | str | bytes):
        return None
    value = _untorched(value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _named(number: float) -> str:
    """A number that does not fit, and why."""
    return f"{number}, more than float32 holds" if np.isfinite(number) else f"{number}"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SAMPLE else text[: SAMPLE - 1] + "…"
