"""The JSON kernel against `json.loads`, line by line, wherever a block may end."""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.ingest.jsonl import MAX_DEPTH, REASONS, Block, Columns, LineParser, Reject
from penstock.ingest.lines import LineFile
from penstock.kernels import PAD

BOM: Final = b"\xef\xbb\xbf"
PLENTY: Final = 1 << 20
PARSER: Final = LineParser(text_field="text", salt=0, threshold=0, max_line_bytes=PLENTY)


@pytest.fixture(autouse=True, scope="module")
def _whole_numbers_of_any_length() -> Iterator[None]:
    """`json.loads` refuses a whole number of 4,300 digits; JSON does not, and nor do we."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


# What is expected, from json.loads alone.


@dataclass
class Lines:
    """What became of each line of an input."""

    kept: list[tuple[str, int, int]] = field(default_factory=list)
    """text, and the bytes of the line"""
    rejects: list[tuple[int, int, str]] = field(default_factory=list)
    blank: int = 0


def reasons_for(line: bytes) -> set[str]:
    """Every reason that may be given for a line; none when it is a document."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return {"invalid_utf8", "invalid_json"}
    except json.JSONDecodeError:
        return {"invalid_json"}
    except RecursionError:
        return {"nested_too_deep"}
    if not isinstance(value, dict):
        return {"not_an_object"}
    if "text" not in value:
        return {"no_text"}
    text = value["text"]
    if not isinstance(text, str):
        return {"text_not_a_string"}
    if text == "":
        return {"empty_text"}
    reasons = set()
    if "\0" in text:
        reasons.add("nul_in_text")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        reasons.add("lone_surrogate")
    return reasons


def check_against_json(content: bytes, found: Lines, max_line_bytes: int = PLENTY) -> None:
    """Every line of `content` is exactly one of kept, rejected, blank, and rightly so."""
    kept, rejects = iter(found.kept), iter(found.rejects)
    blank = at = 0
    pieces = content.split(b"\n")
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        if is_last and not piece:
            break
        end = at + len(piece) + (0 if is_last else 1)
        line = piece.removeprefix(BOM) if at == 0 else piece
        reasons = reasons_for(line)
        if is_last and reasons & {"invalid_json", "invalid_utf8"}:
            reasons = {"half_line"}
        if len(piece) > max_line_bytes:
            reasons = {"line_too_long"}
        elif not line.strip(b" \t\r"):
            blank += 1
            at = end
            continue
        if reasons:
            start, stop, reason = next(rejects, (-1, -1, "nothing"))
            assert reason in reasons, line
            assert (start, stop) == (at, end), line
        else:
            assert next(kept, None) == (json.loads(line)["text"], at, end), line
        at = end
    assert at == len(content)
    assert next(kept, None) is None
    assert next(rejects, None) is None
    assert found.blank == blank


# What is found, by the kernel.

COLUMNS: Final = Columns.allocate(1 << 20, 1000)


def take_block(parser: LineParser, block: Block, into: Columns, found: Lines) -> None:
    """Parse a block into `into`, and note in `found` what became of its lines."""
    for reject in block.too_long:
        found.rejects.append((reject.start, reject.end, reject.reason))
    at = block.start
    while at < block.stop:
        taken = parser.take(
            block, at, 0, into,
            max_train_rows=PLENTY, max_text_bytes=1 << 30, max_rejects=PLENTY,
        )  # fmt: skip
        assert taken.stop > at
        assert taken.kept + taken.blank + len(taken.rejects) > 0
        at = taken.stop
        found.blank += taken.blank
        for reject in taken.rejects:
            assert reject.start <= reject.at <= reject.end
            found.rejects.append((reject.start, reject.end, reject.reason))
    assert at == block.stop


def texts(columns: Columns) -> list[str]:
    data, at = columns.filled.text.tobytes(), columns.filled.text_at
    return [data[at[k] : at[k + 1]].decode() for k in range(columns.rows)]


def close(columns: Columns, found: Lines) -> Lines:
    rows = columns.rows
    found.kept = list(
        zip(
            texts(columns),
            columns.filled.start[:rows].tolist(),
            columns.filled.end[:rows].tolist(),
            strict=True,
        )
    )
    return found


def block_of(content: bytes, slack: bytes = b"\x00") -> Block:
    """All of `content` as one block, the last line as a fragment if it has no newline."""
    is_fragment = bool(content) and not content.endswith(b"\n")
    if is_fragment:
        content += b"\n"
    poison = (slack * PAD)[:PAD]
    data = np.frombuffer(content + poison, np.uint8).copy()
    return Block(data, 0, len(content), 0, is_fragment=is_fragment)


def split_fragment(content: bytes, slack: bytes = b"\x00") -> list[Block]:
    """`content` as LineFile gives it: whole lines, then what stands after the last newline."""
    whole = content[: content.rfind(b"\n") + 1]
    blocks = [block_of(whole, slack)] if whole else []
    if whole != content:
        rest = block_of(content[len(whole) :], slack)
        rest.offset = len(whole)
        blocks.append(rest)
    return blocks


def parse(
    content: bytes, parser: LineParser = PARSER, *, slack: bytes = b"\x00", into: Columns = COLUMNS
) -> Lines:
    into.clear()
    found = Lines()
    for block in split_fragment(content, slack):
        take_block(parser, block, into, found)
    return close(into, found)


def parse_file(
    path: Path, parser: LineParser, block_bytes: int, *, poison: int | None = None
) -> Lines:
    COLUMNS.clear()
    found = Lines()
    file = LineFile(path, max_line_bytes=parser.max_line_bytes, block_bytes=block_bytes)
    if poison is not None:
        file._buffer[:] = poison
    while (block := file.next_block()) is not None:
        take_block(parser, block, COLUMNS, found)
    if (block := file.fragment()) is not None:
        take_block(parser, block, COLUMNS, found)
    file.close()
    return close(COLUMNS, found)


# Lines to try it on.

KEYS: Final = (
    "text",
    "Text",
    "texts",
    "tex",
    "",
    "id",
    "source",
    "a" * 40,
    "é",
    "\U0001f600",
    "\0",
)
ASCII_ESCAPES: Final = {
    '"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f",
    "\n": "\\n", "\r": "\\r", "\t": "\\t",
}  # fmt: skip


class Pen:
    """Writes a value as JSON in one of the many ways in which it can be written."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.escape_share = dice.choice((0.0, 0.1, 1.0))
        self.space_share = dice.choice((0.0, 0.3))

    def space(self) -> str:
        if self.dice.random() >= self.space_share:
            return ""
        return "".join(self.dice.choices(" \t\r", k=self.dice.choice((1, 2, 40))))

    def unit(self, code: int) -> str:
        return "\\u" + "".join(self.dice.choice((d.lower(), d.upper())) for d in f"{code:04x}")

    def letter(self, letter: str) -> str:
        code = ord(letter)
        must = letter in '"\\' or code < 0x20 or 0xD800 <= code < 0xE000
        if not must and self.dice.random() >= self.escape_share:
            return letter
        if letter in ASCII_ESCAPES and self.dice.random() < 0.7:
            return ASCII_ESCAPES[letter]
        if code >= 0x10000:
            code -= 0x10000
            return self.unit(0xD800 + (code >> 10)) + self.unit(0xDC00 + (code & 0x3FF))
        return self.unit(code)

    def write(self, value: object) -> str:
        match value:
            case str():
                return '"' + "".join(map(self.letter, value)) + '"'
            case list():
                inside = ",".join(self.space() + self.write(item) + self.space() for item in value)
                return "[" + (inside or self.space()) + "]"
            case tuple():  # an object: pairs, so that a key can come twice
                inside = ",".join(
                    self.space() + self.write(key) + self.space() + ":" + self.space()
                    + self.write(item) + self.space()
                    for key, item in value
                )  # fmt: skip
                return "{" + (inside or self.space()) + "}"
            case _:
                return json.dumps(value)

    def line(self, value: object) -> bytes:
        return (self.space() + self.write(value) + self.space()).encode()


LETTERS: Final = st.text(
    st.one_of(st.sampled_from('ab"\\/\n\t\0\x1f\x7f\x80é\u2028€\ud7ff\ue000\uffff\U0001f600'),
              st.characters()),
    max_size=80,
)  # fmt: skip
SCALARS: Final = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), LETTERS,
    st.sampled_from([10**20, -(10**30), 1e308, 5e-324, -0.0]),
)  # fmt: skip
VALUES: Final = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.tuples(st.sampled_from(KEYS), inner), max_size=3).map(tuple),
    ),
    max_leaves=6,
)
TEXTS: Final = st.one_of(
    LETTERS,
    st.text(min_size=1, max_size=300),
    # lone surrogates too
    st.text(st.characters(categories=("Cs", "Lu")), max_size=5),
    VALUES,
)
FIELDS: Final = st.one_of(
    st.tuples(st.just("text"), TEXTS),
    st.tuples(st.one_of(st.sampled_from(KEYS[1:]), LETTERS), VALUES),
)
DICE: Final = st.integers(0, 2**32).map(random.Random)
OBJECTS: Final = st.lists(FIELDS, max_size=5).map(tuple)


def _lines(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return st.builds(lambda dice, value: Pen(dice).line(value), DICE, values)


def _dumped(value: dict[str, object], ensure_ascii: bool) -> bytes:
    return json.dumps(value, ensure_ascii=ensure_ascii).encode("utf-8", "surrogatepass")


def _mutate(dice: random.Random, line: bytes, times: int) -> bytes:
    data = bytearray(line)
    for _ in range(times):
        at = dice.randrange(len(data) + 1)
        kind = dice.randrange(4)
        if kind == 0:
            data.insert(at, dice.choice((dice.randrange(256), *b'"\\{}[]:,\n\r\0u\xc3\xff')))
        elif kind == 1:
            del data[at:]
        elif at < len(data):
            if kind == 2:
                data[at] ^= 1 << dice.randrange(8)
            else:
                del data[at]
    return bytes(data)


DOCUMENT_LINES: Final = _lines(OBJECTS)
DUMPED_LINES: Final = st.builds(
    _dumped, st.dictionaries(st.sampled_from(KEYS), LETTERS), st.booleans()
)
MUTATED_LINES: Final = st.builds(_mutate, DICE, DOCUMENT_LINES | DUMPED_LINES, st.integers(1, 4))
ODD_LINES: Final = st.one_of(
    _lines(VALUES),
    st.binary(max_size=40),
    st.text(" \t\r", max_size=70).map(str.encode),
    st.sampled_from([BOM, BOM + b'{"text": "marked"}', b'{"text": NaN}', b"-Infinity", b"01"]),
)
ANY_LINE: Final = st.one_of(DOCUMENT_LINES, DUMPED_LINES, MUTATED_LINES, ODD_LINES)
CONTENTS: Final = st.builds(
    lambda mark, lines, ending, last: (BOM if mark else b"") + ending.join(lines) + last,
    st.booleans(),
    st.lists(ANY_LINE, max_size=8),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\n", b"\r\n"]),
)
SHORT_CONTENTS: Final = CONTENTS.filter(lambda content: len(content) <= 160)
MANY: Final = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FEW: Final = settings(MANY, max_examples=40)


@MANY
@given(CONTENTS)
@example(b"")
@example(b"\n")
@example(BOM)
@example(BOM + b"\n")
@example(BOM + b' {"text": "marked"}\r\n' + BOM + b'{"text": "not here"}\n')
@example(b'{"text": "first", "text": "last"}\n{"text": "first", "text": 1}\n')
@example(b'{"text": 1, "text": "last"}\n{"text": "\\u0000", "text": "a"}\n')
@example(b'{"te\\u0078t": "escaped key"}\n')
@example(b'{"text": "' + b"9" * 5000 + b'", "n": ' + b"9" * 5000 + b"}\n")
def test_each_line_is_what_json_says(content: bytes) -> None:
    check_against_json(content, parse(content))


@MANY
@given(DICE, OBJECTS, LETTERS.filter(bool))
def test_the_text_of_a_document_survives_any_way_to_write_it(
    dice: random.Random, fields: tuple[tuple[str, object], ...], text: str
) -> None:
    text = text.encode("utf-8", "replace").decode().replace("\0", "-")
    line = Pen(dice).line((*((k, v) for k, v in fields if k != "text"), ("text", text)))
    found = parse(line + b"\n")
    assert found.kept == [(text, 0, len(line) + 1)]
    assert not found.rejects


@MANY
@given(CONTENTS, st.sampled_from([b'"', b"\\", b"\xff", b"\n", b'\\u00"', b"\x00", b"{", b"}"]))
def test_nothing_after_the_end_matters(content: bytes, slack: bytes) -> None:
    found = parse(content, slack=slack)
    assert found == parse(content)
    tiny = Columns.allocate(1, 1)
    assert parse(content, slack=slack, into=tiny) == found  # and the columns grow as needed


@FEW
@given(SHORT_CONTENTS, st.sampled_from([1, 7, 30, PLENTY]), st.sampled_from([None, 0x22, 0x5C]))
def test_blocks_may_end_anywhere(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, most: int, poison: int | None
) -> None:
    parser = LineParser(text_field="text", salt=0, threshold=0, max_line_bytes=most)
    path = tmp_path_factory.getbasetemp() / "blocks.jsonl"
    path.write_bytes(content)
    check_against_json(content, parse(content, parser), most)
    for block_bytes in range(1, len(content) + 2):
        found = parse_file(path, parser, block_bytes, poison=poison)
        check_against_json(content, found, most)


@FEW
@given(CONTENTS, st.sampled_from([7, 30, PLENTY]), DICE)
def test_a_file_may_grow_anywhere(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, most: int, dice: random.Random
) -> None:
    """The same lines, looked at after every few bytes while the file is being written."""
    parser = LineParser(text_field="text", salt=0, threshold=0, max_line_bytes=most)
    path = tmp_path_factory.getbasetemp() / "growing.jsonl"
    path.write_bytes(b"")
    COLUMNS.clear()
    found = Lines()
    file = LineFile(path, max_line_bytes=most)
    at = 0
    with path.open("ab", buffering=0) as writer:
        while at < len(content):
            step = dice.choice((1, 3, 20, 200))
            writer.write(content[at : at + step])
            at += step
            if (block := file.next_block()) is not None:
                take_block(parser, block, COLUMNS, found)
    assert file.next_block() is None
    if (block := file.fragment()) is not None:
        take_block(parser, block, COLUMNS, found)
    file.close()
    check_against_json(content, close(COLUMNS, found), most)


def test_a_blank_line_that_is_too_long_is_the_same_in_every_block_size(tmp_path: Path) -> None:
    """Whether it is called blank or too long, it may not depend on where the blocks end."""
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b" " * 60 + b'\n{"text": "b"}\n')
    parser = LineParser(text_field="text", salt=0, threshold=0, max_line_bytes=20)
    whole = parse_file(path, parser, 1 << 20)
    for block_bytes in range(1, 90):
        assert parse_file(path, parser, block_bytes) == whole, block_bytes


# Each reason, on purpose.

DEEP: Final = MAX_DEPTH
REASON_LINES: Final = {
    "invalid_json": [
        b"{", b"}", b"nul", b"nan", b"+1", b"01", b"1.", b".5", b"1e", b"-", b"'a'", b"-NaN",
        b'{"text": "a"', b'{"text": "a",}', b'{"text": "a"} x', b'{"text": "a"}{"text": "b"}',
        b'{text: "a"}', b'{"text" "a"}', b'{"text": }', b'{"text": "a" "b": 1}', b'{"text": "\\x"}',
        b'{"text": "\\u12g4"}', b'{"text": "\\u 123"}', b'{"text": "\x00"}', b'{"text": "\x1f"}',
        b'{"text": "\t"}', b'{"a": [1, ], "text": "a"}', b'{"a": [1}, "text": "a"}', b"[,]",
        b'{"a": {"b" 1}, "text": "a"}', b'{"text": "a"}\x00', b'{"text": "\\ud800\\u12"}',
        b'{"text": "a"} \xc3\xa9', b"\xc3\xa9", b" " + BOM + b'{"text": "a"}', b'{"a": Nan}',
        b'{"text": "\\', b'{"text": "\\u', b'{"text": "\\u123', b'{"a": tru', b'{"text": "a\\"}',
    ],
    "invalid_utf8": [
        b'{"text": "\xff"}', b'{"text": "\x80"}', b'{"text": "\xc0\x80"}', b'{"text": "\xc1\xbf"}',
        b'{"text": "\xe0\x9f\xbf"}', b'{"text": "\xed\xa0\x80"}', b'{"text": "\xed\xbf\xbf"}',
        b'{"text": "\xf0\x8f\xbf\xbf"}', b'{"text": "\xf4\x90\x80\x80"}', b'{"text": "\xf5"}',
        b'{"text": "\xc3"}', b'{"text": "\xe2\x82"}', b'{"text": "\xf0\x9f\x98"}',
        b'{"text": "a", "b": "\xff"}', b'{"text": "a", "\xff": 1}', b'"\xff"', b'["\xfe"]',
    ],
    "not_an_object": [b"1", b'"text"', b"null", b'["text"]', b"NaN", b"-Infinity", b" [] ", b"1e5"],
    "no_text": [b"{}", b'{"Text": "a"}', b'{"a": {"text": "b"}}', b'{"text\\u0000": "a"}'],
    "text_not_a_string": [
        b'{"text": null}', b'{"text": 1}', b'{"text": ["a"]}', b'{"text": {"text": "a"}}',
        b'{"text": NaN}', b'{"text": "a", "text": false}',
    ],
    "empty_text": [b'{"text": ""}', b'{"text": "a", "text": ""}'],
    "nul_in_text": [b'{"text": "\\u0000"}', b'{"text": "a\\u0000b", "c": 1}'],
    "lone_surrogate": [
        b'{"text": "\\ud800"}', b'{"text": "a\\udc00b"}', b'{"text": "\\udc00\\ud800"}',
        b'{"text": "\\ud800\\u0041"}', b'{"text": "\\ud800\\ud800\\udc00"}',
        b'{"text": "\\uDBFFx"}',
    ],
    "nested_too_deep": [
        b'{"text": "a", "b": ' + b"[" * (DEEP + 1) + b"1" + b"]" * (DEEP + 1) + b"}",
        b'{"text": "a", "b": ' + b'{"c":' * (DEEP + 1) + b"1" + b"}" * (DEEP + 1) + b"}",
        b'{"text": ' + b"[" * 100_000, b"[" * (DEEP + 2) + b"]" * (DEEP + 2), b'[{"a":' * 100_000,
    ],
    "bad_provenance": [
        b'{"text": "a", "source": "f", "start": 1, "end": 2, "part": 3, "parts": 3}',
        b'{"text": "a", "source": null, "start": 1, "end": 2, "part": 0, "parts": 3}',
    ],
    "line_too_long": [b'{"text": "' + b"a" * PLENTY + b'"}', b"a" * (PLENTY + 1)],
    "blank": [b"", b" ", b"\r", b" \t \r"],
}  # fmt: skip


@pytest.mark.parametrize("reason", [*REASON_LINES])
def test_each_reason(reason: str) -> None:
    for line in REASON_LINES[reason]:
        found = parse(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
        assert [text for text, _, _ in found.kept] == ["before", "after"], line
        if reason == "blank":
            assert (found.blank, found.rejects) == (1, []), line
        else:
            assert found.rejects == [(19, 19 + len(line) + 1, reason)], line
            if reason not in ("nested_too_deep", "line_too_long", "bad_provenance"):
                assert reason in reasons_for(line), line


def test_every_code_has_a_reason_and_a_test() -> None:
    assert {*REASONS} == {"", "half_line", *REASON_LINES}
    assert [Reject(code, 0, 0, 0).reason for code in range(len(REASONS))] == [*REASONS]


def test_half_a_line_at_the_end_is_told_at_every_cut() -> None:
    line = '{"id": [1, 2e3], "text": "Zo\\u00eb 😀 \\ud83d\\ude00\\n", "x": null}'.encode()
    assert not reasons_for(line)
    for cut in range(1, len(line)):
        found = parse(b'{"text": "a"}\n' + line[:cut])
        assert found.rejects == [(14, 14 + cut, "half_line")]
        assert [text for text, _, _ in found.kept] == ["a"]
    whole = parse(b'{"text": "a"}\n' + line)
    assert not whole.rejects
    assert whole.kept[1] == (json.loads(line)["text"], 14, 14 + len(line))


def test_a_last_line_without_newline_that_is_json_keeps_its_own_reason() -> None:
    assert parse(b"{}").rejects == [(0, 2, "no_text")]
    assert parse(b"12").rejects == [(0, 2, "not_an_object")]
    assert parse(b"  ").blank == 1


@pytest.mark.parametrize("depth", [1, 2, DEEP - 1, DEEP])
def test_nesting_up_to_the_bound_is_fine(depth: int) -> None:
    line = b'{"a": ' + b"[" * depth + b"1" + b"]" * depth + b', "text": "a"}\n'
    assert parse(line).kept == [("a", 0, len(line))]
    mixed = (
        b'{"a": ' + b'[{"b":' * (depth // 2) + b"[]" + b"}]" * (depth // 2) + b', "text": "a"}\n'
    )
    assert parse(mixed).kept == [("a", 0, len(mixed))]


def test_the_length_of_a_line_is_bounded_to_the_byte() -> None:
    line = b'{"text": "abc"}'
    for most, reason in ((len(line), None), (len(line) - 1, "line_too_long")):
        parser = LineParser(text_field="text", salt=0, threshold=0, max_line_bytes=most)
        for ending in (b"\n", b""):
            found = parse(line + ending, parser)
            assert [r for _, _, r in found.rejects] == ([reason] if reason else [])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        pytest.param(
            b'{"te\\ud800xt": "not it"}',
            None,
        ),
        pytest.param(
            b'{"text": "it", "te\\udfffxt": "not it"}',
            "it",
        ),
        (b'{"\\udc00text": "not it", "text": "it"}', "it"),
    ],
)
def test_a_key_with_a_lone_surrogate_is_another_key(line: bytes, text: str | None) -> None:
    assert json.loads(line).get("text") == text
    assert [kept for kept, _, _ in parse(line + b"\n").kept] == ([text] if text else [])


def test_another_text_field() -> None:
    for name in ("content", "é", "a" * 100, "source", "start", "a b", "\0"):
        parser = LineParser(text_field=name, salt=0, threshold=0, max_line_bytes=PLENTY)
        line = json.dumps({"text": "no", name: "yes", "z": 1}).encode() + b"\n"
        assert parse(line, parser).kept == [("yes", 0, len(line))]


# Where a document says it comes from.


def provenance_of(line: bytes) -> tuple[int, int, int, int] | None:
    """start, end, part, parts as told by the line, if all of it is told."""
    value = json.loads(line)
    source = value.get("source")
    if not isinstance(source, str) or not source or any(c in "\0" for c in source):
        return None
    if any("\ud800" <= c <= "\udfff" for c in source):
        return None
    numbers = [value.get(key) for key in ("start", "end", "part", "parts")]
    if any(type(number) is not int or not 0 <= number < 10**18 for number in numbers):
        return None
    start, end, part, parts = numbers
    return (start, end, part, parts) if start <= end and part < parts < 2**31 else None


def sources(columns: Columns) -> list[str]:
    data, at = columns.filled.source.tobytes(), columns.filled.source_at
    return [data[at[k] : at[k + 1]].decode() for k in range(columns.rows)]


NUMBERS: Final = st.one_of(
    st.integers(0, 5), st.integers(-3, 10**19), st.sampled_from([2**31 - 1, 2**31, 10**18 - 1]),
    st.just(1.0), st.just("1"), st.none(), st.booleans(), st.just([1]),
)  # fmt: skip
TOLD: Final = st.fixed_dictionaries(
    {"text": st.text("abc", min_size=1)},
    optional={
        "source": st.one_of(st.text("x/é", max_size=40), st.none(), st.just(7), st.just("\ud800")),
        "start": NUMBERS,
        "end": NUMBERS,
        "part": NUMBERS,
        "parts": NUMBERS,
    },
)


@MANY
@given(st.lists(st.one_of(TOLD, TOLD.map(lambda d: {**d, "start": 1, "end": 9, "part": 0,
                                                    "parts": 2, "source": "f.h"})), max_size=6),
       DICE)  # fmt: skip
def test_told_provenance_is_kept_and_half_told_is_not(
    documents: list[dict[str, object]], dice: random.Random
) -> None:
    lines = []
    for document in documents:
        pairs = [*document.items()]
        dice.shuffle(pairs)
        lines.append(Pen(dice).line(tuple(pairs)) + b"\n")

    def is_wrong(line: bytes) -> bool:
        all_five = {"source", "start", "end", "part", "parts"} <= set(json.loads(line))
        return all_five and provenance_of(line) is None

    found = parse(b"".join(lines))
    assert [reason for _, _, reason in found.rejects] == ["bad_provenance"] * sum(
        map(is_wrong, lines)
    )
    lines = [line for line in lines if not is_wrong(line)]
    found = parse(b"".join(lines))
    assert len(found.kept) == len(lines)
    at = 0
    for k, (line, name) in enumerate(zip(lines, sources(COLUMNS), strict=True)):
        told = provenance_of(line)
        value = json.loads(line)
        assert name == (value["source"] if told else "")
        assert (
            int(COLUMNS.filled.start[k]), int(COLUMNS.filled.end[k]),
            int(COLUMNS.filled.part[k]), int(COLUMNS.filled.parts[k]),
        ) == (told or (at, at + len(line), 0, 1))  # fmt: skip
        hashed = value["source"] if told else value["text"]
        assert int(COLUMNS.filled.doc_id[k]) == xxhash.xxh64_intdigest(hashed.encode())
        at += len(line)
    assert COLUMNS.has_sources == any(provenance_of(line) for line in lines)


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"start": 9}, True),
        ({"start": 10}, False),
        ({"part": 1}, True),
        ({"part": 2}, False),
        ({"parts": 0}, False),
        ({"parts": 2**31 - 1}, True),
        ({"parts": 2**31}, False),
        ({"end": 10**18 - 1}, True),
        ({"end": 10**18}, False),
        ({"end": 9.0}, False),
        ({"start": -1}, False),
        ({"start": True}, False),
        ({"source": ""}, False),
        ({"source": "\0"}, False),
        ({"source": "a\ud800"}, False),
        *(({key: None}, False) for key in ("source", "start", "end", "part", "parts")),
    ],
)
def test_the_bounds_of_provenance(change: dict[str, object], is_told: bool) -> None:
    told = {"source": "f.h", "start": 3, "end": 9, "part": 0, "parts": 2, "text": "a", **change}
    line = json.dumps(told).encode() + b"\n"
    assert (provenance_of(line) is not None) == is_told
    found = parse(line)
    if is_told:
        assert sources(COLUMNS) == ["f.h"]
        assert int(COLUMNS.filled.end[0]) == told["end"]
    else:  # all five are there, and wrong: taken as something else it could leak between splits
        assert found.rejects == [(0, len(line), "bad_provenance")]


@pytest.mark.parametrize("key", ["source", "start", "end", "part", "parts"])
def test_four_of_five_fields_are_no_provenance(key: str) -> None:
    told = {"source": "f.h", "start": 3, "end": 9, "part": 0, "parts": 2, "text": "a"}
    del told[key]
    line = json.dumps(told).encode() + b"\n"
    assert parse(line).kept == [("a", 0, len(line))]


def test_a_source_alone_is_no_provenance() -> None:
    line = b'{"source": "f.h", "text": "a"}\n'
    assert parse(line).kept == [("a", 0, len(line))]
    assert not COLUMNS.has_sources
    assert int(COLUMNS.filled.doc_id[0]) == xxhash.xxh64_intdigest(b"a")


@pytest.mark.parametrize(
    "again", [b'"source": 5', b'"start": "x"', b'"start": -1', b'"parts": null', b'"end": [1]']
)
def test_of_two_provenance_fields_the_last_counts(again: bytes) -> None:
    line = (
        b'{"source": "f.h", "start": 0, "end": 9, "part": 0, "parts": 1, "text": "a", '
        + again
        + b"}\n"
    )
    assert provenance_of(line) is None
    assert parse(line).rejects == [(0, len(line), "bad_provenance")]


# Filling columns piece by piece.


@FEW
@given(
    CONTENTS, st.integers(1, 4), st.integers(1, 60), st.integers(1, 3), st.integers(0, 2**64 - 1)
)
def test_rows_taken_in_small_pieces_are_the_same(
    content: bytes, max_train_rows: int, max_text_bytes: int, max_rejects: int, threshold: int
) -> None:
    """Whatever closes a batch, the batches end to end are the whole, each within its bounds."""
    parser = LineParser(text_field="text", salt=3, threshold=threshold, max_line_bytes=PLENTY)
    whole = parse(content, parser)
    is_val = COLUMNS.filled.is_val[: COLUMNS.rows].tolist()
    pieces = Lines()
    pieces_val: list[int] = []
    into = Columns.allocate(64, 2)
    for block in split_fragment(content):
        at = block.start
        while at < block.stop:
            taken = parser.take(
                block, at, 0, into,
                max_train_rows=max_train_rows,
                max_text_bytes=max_text_bytes,
                max_rejects=max_rejects,
            )  # fmt: skip
            assert len(taken.rejects) <= max_rejects
            assert into.train_rows <= max_train_rows
            assert into.rows == 0 or into.filled.text_at[into.rows - 1] < max_text_bytes
            at = taken.stop
            pieces.rejects += [(r.start, r.end, r.reason) for r in taken.rejects]
            pieces.blank += taken.blank
            if into.train_rows == max_train_rows or into.held_bytes >= max_text_bytes:
                pieces.kept += close(into, Lines()).kept
                pieces_val += into.filled.is_val[: into.rows].tolist()
                into.clear()
    pieces.kept += close(into, Lines()).kept
    pieces_val += into.filled.is_val[: into.rows].tolist()
    assert pieces == whole
    assert pieces_val == is_val


def test_more_rejects_than_the_kernel_has_room_for() -> None:
    found = parse(b"x\n" * 10_000 + b'{"text": "a"}\n')
    assert found.rejects == [(2 * k, 2 * k + 2, "invalid_json") for k in range(10_000)]
    assert len(found.kept) == 1
