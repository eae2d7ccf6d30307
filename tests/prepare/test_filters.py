"""Filters: every feature as a slow reference has it, every reason reached, nothing shared."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock import plugins
from penstock.errors import BadConfig
from penstock.kernels import byte_buffer
from penstock.plugins import register
from penstock.prepare.filters import (
    PRESETS,
    REASONS,
    Features,
    FilterConfig,
    Limit,
    Verdicts,
    features,
    judge,
    limits,
    measure,
)
from penstock.prepare.measure_layout import (
    HEADER,
    MAX_WORDS,
    N_STRONG,
    TEXT_FEATURES,
    WORD_FEATURES,
)
from penstock.records import Documents


def column(texts: Sequence[str | bytes], around: bytes = b"") -> Documents:
    """Documents of these texts, with `around` in the slack behind them."""
    raw = [text.encode() if isinstance(text, str) else text for text in texts]
    at = np.cumsum([0, *map(len, raw)], dtype=np.int64)
    data = byte_buffer(int(at[-1]))
    data[: at[-1]] = np.frombuffer(b"".join(raw), np.uint8)
    slack = (around * 64)[:64]
    data[at[-1] : at[-1] + len(slack)] = np.frombuffer(slack, np.uint8)
    places = np.zeros(len(raw), np.int64)
    return Documents(data, at, places, places)


def measured(texts: Sequence[str | bytes], around: bytes = b"") -> Features:
    return measure(column(texts, around), words=True, secrets=True, pii=True)


# The reference: plain Python, one document at a time

STOPS = ("the", "be", "to", "of", "and", "that", "have", "with")
SPACE = " \t\n\r\x0b\x0c"
SIGNS = [
    (0x80, 0xA9), (0xAB, 0xB4), (0xB6, 0xB9), (0xBB, 0xBF), (0xD7, 0xD7), (0xF7, 0xF7),
    (0x300, 0x36F), (0x2000, 0x2BFF), (0x2E00, 0x3004), (0x3006, 0x303F), (0xE000, 0xF8FF),
    (0xFE00, 0xFE6F), (0xFF00, 0xFF20), (0xFFE0, 0xFFFF), (0x1F000, 0x1FBFF),
]  # fmt: skip


def is_letter(char: str) -> bool:
    if char < "\x80":
        return char.isalpha()
    return not any(low <= ord(char) <= high for low, high in SIGNS)


def is_latin(char: str) -> bool:
    return ord(char) < 0x250 or 0x1E00 <= ord(char) <= 0x1EFF


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def lines_of(text: str) -> list[str]:
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def hex_lists(text: bytes) -> list[int]:
    item = re.compile(rb'(?:0[xX]([0-9a-fA-F]{1,16})|\\x[0-9a-fA-F]{1,16})([\s,"]{0,8})')
    sizes, at = [], 0
    while begin := re.compile(rb"0[xX]|\\x").search(text, at):
        at = begin.start()
        count, end, wide = 0, at, False
        while found := item.match(text, at):
            count, end, at = count + 1, found.start(2), found.end()
            wide |= len(found[1] or b"") > 2
        size = end - begin.start()
        if count >= 8 and (not wide or size >= 8192):
            sizes.append(size)
        at = max(end, begin.start() + 1)
    return sizes


def base64_runs(text: bytes) -> Iterator[tuple[int, int]]:
    for run in re.finditer(rb"[A-Za-z0-9+/=_-]{64,}", text):
        has = [re.search(kind, run[0]) for kind in (rb"[0-9]", rb"[A-Z]", rb"[a-z]")]
        if has[0] and ((has[1] and has[2]) or re.fullmatch(rb"[0-9a-fA-F]+", run[0])):
            yield run.span()


def comment_lines(head: bytes) -> Iterator[tuple[bytes, bool]]:
    """Lines of comments before the first code, and whether no words stand on the line before."""
    end, follows = b"", False
    for line in head.split(b"\n"):
        text = line.strip(b" \t\r\x0b\x0c")
        fresh, follows = not follows, bool(re.search(rb"[A-Za-z0-9]", text))
        if end:
            yield text, fresh
            end = b"" if end in text else end
        elif opening := re.match(rb"/\*|<!--|[rRuUbB]?(\"\"\"|''')", text):
            end = {b"/*": b"*/", b"<!--": b"-->"}.get(opening[0], opening[1])
            end = b"" if end in text[opening.end() :] else end
            yield text, True
        elif re.match(rb"//|#|;|--|%|!|dnl |@?rem ", text, re.I):
            yield text, fresh
        elif re.search(rb"[=({]", text):
            return
        else:
            follows = False
            end = b"*/" if text.rfind(b"/*") > text.rfind(b"*/") else b""


def any_of(group: str) -> bytes:
    return b"(?:" + b"|".join(word.encode() for word in HEADER[group]) + b")"


BY = rb"\s+" + any_of("by") + rb"(?![a-z0-9_])"
NOUN = rb"\s+" + any_of("nouns") + rb"(?![a-z0-9_])"
HANDS = rb"\s+" + any_of("hands") + rb"(?![a-z0-9_])"
ENDS = rb"\s*(?:$|[^\sa-z0-9_(\[])"


def words_of(text: bytes) -> list[bytes]:
    return re.findall(rb"[a-z0-9]+", text)


def is_said_of(before: bytes, after: bytes) -> bool:
    """This file is generated; the code in this file was generated; this is a generated file."""
    verb = re.search(rb"\s(?:is|was|has been)(\s+an?)?\s+$", before)
    prior = words_of(before[: verb.start()]) if verb else []
    if not verb or not prior:
        return False
    this = b"this" in prior[:4]
    if verb[1]:
        return this and bool(re.match(NOUN, after))
    if prior[-1] == b"this":
        return len(prior) <= 2
    return bool(re.fullmatch(any_of("subjects"), prior[-1])) and (this or len(prior) == 1)


def says_so(text: bytes, at: int, fresh: bool) -> bool:
    """Whether the "generated" at this place is said of the file."""
    low = text.lower()
    before, after = low[:at], low[at + len(b"generated") :]
    while found := re.search(any_of("prefixes") + rb"$", before):
        before = before[: found.start()]
    quoted = b'"' in before and re.match(rb"#[a-z]", low)
    if re.search(rb"[a-z0-9_-]$", before) or quoted:
        return False
    prior, first = words_of(before), text[len(before) : len(before) + 1]
    opens = first.isupper() or first == b"@" or (fresh and not prior)
    opens &= not prior or bool(re.search(rb"[.:!;]\s*$", before))
    if opens and re.match(BY + b"|" + NOUN + b"|" + ENDS, after):
        return True
    if is_said_of(before, after):
        return True
    begin = re.search(rb"[A-Za-z0-9]", text)
    if not prior or not re.match(BY, after) or not begin or not (fresh or begin[0].isupper()):
        return False
    if len(prior) <= 3 and re.fullmatch(any_of("subjects"), prior[-1]):
        return True
    quote = re.match(rb"\s+from ['\"]", after)
    return prior == [b"makefile", b"in"] or bool(quote and len(prior) <= 6)


def line_says(text: bytes, fresh: bool) -> bool:
    text = text[:200]
    low = text.lower()
    if any(hint.encode() in low for hint in HEADER["hints"][N_STRONG:]):
        return True
    parts = {part.encode() for part in HEADER["parts"]}
    if parts & set(words_of(low)) or b"java source" in low:
        return False
    for found in re.finditer(rb"generated(?![a-z0-9_])", low):
        if says_so(text, found.start(), fresh):
            return True
    for found in re.finditer(rb"(?:do not|don't) (edit|modify)(?![a-z0-9_])", low):
        after = low[found.end() :]
        if b'"' in low[: found.start()] and re.match(rb"#[a-z]", low):
            continue
        if re.match(HANDS, after):
            return True
        shouted = found[0].upper() == text[found.start() : found.end()]
        this = re.match(rb"\s+this file(?![a-z0-9_])", after)
        if found[1] == b"edit" and (this or (shouted and re.match(ENDS, after))):
            return True
    return False


def text_features(text: str) -> dict[str, float]:
    raw = text.encode()
    chars = len(text)
    words = [word.decode() for word in raw.split()]
    lines = lines_of(text)
    solid = [line for line in lines if line.strip(SPACE)]
    letters = [char for char in text if is_letter(char)]
    digits = [char for char in text if char in "0123456789"]
    space = [char for char in text if char in SPACE]
    marks = (".", "?", "!", "。", "！", "？", "؟", "।")
    lists, runs = hex_lists(raw), list(base64_runs(raw))
    longest, chain, end = max(lists, default=0), 0, -1000
    for a, b in runs:
        chain, end = (a if a - end > 8 else chain), b
        longest = max(longest, b - chain)
    mean = share(sum(map(len, lines)), len(lines))
    return {
        "size_bytes": len(raw),
        "n_chars": chars,
        "n_lines": len(lines),
        "max_line_length": max(map(len, lines), default=0),
        "mean_line_length": mean,
        "alphanumeric_fraction": share(len(letters) + len(digits), chars - len(space)),
        "letter_fraction": share(len(letters), chars),
        "latin_fraction": sum(map(is_latin, letters)) / len(letters) if letters else 1.0,
        "digit_fraction": share(len(digits), chars),
        "whitespace_fraction": share(len(space), chars),
        "non_ascii_fraction": share(sum(char >= "\x80" for char in text), chars),
        "n_words": len(words),
        "mean_word_length": share(sum(map(len, words)), len(words)),
        "hashes_per_word": share(text.count("#"), len(words)),
        "ellipses_per_word": share(text.count("...") + text.count("…"), len(words)),
        "newlines_per_word": share(text.count("\n"), len(words)),
        "n_sentences": len(re.findall(rf"[.?!](?=[{SPACE}]|\Z)", text)),
        "short_line_fraction": share(sum(len(line) <= 30 for line in solid), len(solid)),
        "punctuated_line_fraction": share(
            sum(line.rstrip(SPACE).endswith(marks) for line in solid), len(solid)
        ),
        "bullet_line_fraction": share(
            sum(line.lstrip(SPACE).startswith(("-", "•")) for line in lines), len(lines)
        ),
        "ellipsis_line_fraction": share(
            sum(line.rstrip(SPACE).endswith(("...", "…")) for line in lines), len(lines)
        ),
        "data_fraction": 1.0
        if re.match(rb"/\* XPM \*/[\s\S]{2}|:[0-9a-fA-F]{10}", raw)
        else share(sum(lists) + sum(b - a for a, b in runs), len(raw)),
        "longest_data_run": longest,
        "minified": (mean >= 100 and len(space) * 30 <= chars)
        or (mean >= 200 and len(space) * 10 <= chars),
        "autogenerated": any(line_says(*line) for line in comment_lines(raw[:2048])),
        "licence": any(mark.encode() in raw[:4096].lower() for mark in HEADER["licence"]),
        "curly_brackets": text.count("{"),
        "lorem_ipsum": raw.lower().count(b"lorem ipsum"),
        "long_line_fraction": share(
            sum(len(line) for line in lines if len(line) > 4000), sum(map(len, lines))
        ),
        "number_fraction": share(len(digits), len(letters) + len(digits)),
    }


def again(things: Sequence[Any]) -> list[int]:
    """The places of what stood before."""
    return [k for k, thing in enumerate(things) if thing in things[:k]]


def ngram_features(words: list[str], chars: int) -> dict[str, float]:
    """As datatrove has them, but that an n-gram is its words, not the text they make."""
    values: dict[str, float] = {}
    for n in range(2, 5):
        grams = Counter(tuple(words[k : k + n]) for k in range(len(words) - n + 1))
        top, count = grams.most_common(1)[0] if grams else ((), 0)
        values[f"top_{n}gram_chars"] = share(len(" ".join(top)) * count, chars)
    for n in range(5, 11):
        seen, length, k = set(), 0, 0
        while k < len(words) - n + 1:
            gram = tuple(words[k : k + n])
            if gram in seen:
                length += len("".join(gram))
                k += n
            else:
                seen.add(gram)
                k += 1
        values[f"duplicate_{n}gram_chars"] = share(length, chars)
    return values


def word_features(text: str) -> dict[str, float]:
    raw, chars = text.encode(), len(text)
    words = [word.decode() for word in raw.split()]
    stops = [word for word in words if word in STOPS]
    pieces = [piece.strip(SPACE) for piece in text.split("\n")]
    lines = [piece for piece in pieces if piece]
    paragraphs, exact = [], []
    solid = itertools.groupby(text.split("\n"), lambda piece: bool(piece.strip(SPACE)))
    for is_solid, group in solid:
        block = list(group)
        if is_solid:
            paragraphs.append(tuple(piece.strip(SPACE) for piece in block))
            exact.append("\n".join(block).strip(SPACE))
    twice = sum(len(lines[k]) for k in again(lines))
    return {
        "letter_word_fraction": share(sum(any(map(is_letter, word)) for word in words), len(words)),
        "stop_words": len(set(stops)),
        "stop_word_fraction": share(len(stops), len(words)),
        "duplicate_line_fraction": share(len(again(lines)), len(lines)),
        "duplicate_line_chars": share(twice, chars),
        "duplicate_line_chars_of_lines": share(twice, chars - text.count("\n")),
        "duplicate_paragraph_fraction": share(len(again(paragraphs)), len(paragraphs)),
        "duplicate_paragraph_chars": share(sum(len(exact[k]) for k in again(paragraphs)), chars),
        **ngram_features(words, chars),
    }


def reference(text: str) -> dict[str, float]:
    return {**text_features(text), **word_features(text)}


PARTS = st.sampled_from(
    [
        "the ", "be to of ", "and that ", "have with ", "The", " ", "  ", "\n", "\n\n", "\r\n",
        "\r", "\t", "\x0b", "\x0c", ".", "..", "...", "… ", "…\n", "? ", "!\n", "#", "{", "- ",
        "• ", "-", "•", "a b c d e f g ", "a b c d e f g h i j k ", "x y ", "same line\n",
        "same line.\n\n", "a rather longer line of some forty characters\n", "12 ", "0x1f, ",
        "0x1F,\n", "\\x1f", "0x", "0X12345678901234567 ", "\\x", "deadbeef" * 8,
        "Zm9v" * 16 + "3", "=" * 70, "/" * 64, "A" * 63, "aB3" * 11, "é", "ß ", "中文", "Привет ",
        "×", "\u0301", "ø", "𝒳", "\U0001f600", "。\n", "؟\n", "！", "\u2028", "\xa0", "\u1e9e",
        "lorem ipsum", "Lorem Ipsum ", "lorem  ipsum", "DO NOT EDIT", "auto-Generated",
        "generated by", "@generated", "do not edi", "Copyright", "SPDX-License-Identifier:",
        "licensed under", "loooooooooooooooooooooooooooooooooooooooooooooooooong ", "_", "\x7f",
        "\x01",
    ]
)  # fmt: skip
TEXTS = st.lists(
    PARTS | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
    min_size=1,
    max_size=40,
).map("".join).filter(bool)  # fmt: skip


def check(found: Features, row: int, text: str) -> None:
    for name, expected in reference(text).items():
        assert found[name][row] == pytest.approx(float(expected), abs=1e-12), (name, text)


@settings(max_examples=400, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from([b"", b"a", b" ", b"\n", b"."]))
@example(["a"], b"b")
@example([" "], b"x")
@example(["\n"], b"\n")
@example(["\n\n\n\n"], b"")
@example(["\r\n\r\n"], b"")
@example(["a.\r\nb\r\n"], b"")
@example(["é"], b"")
@example(["lorem ipsu", "m"], b"")
@example(["do not edi", "t"], b"t")
@example([".", " "], b"")
@example(["a b " * 20], b"")
@example(["." * 32], b".")
@example(["aB3" * 21 + "a"], b"a")
@example(["0x1,0x1,0x1,0x1,0x1,0x1,0x1,0x1"], b"1")
def test_every_feature_is_as_the_reference_has_it(texts: list[str], around: bytes) -> None:
    found = measured(texts, around)
    assert (
        tuple(found.columns)[: len(TEXT_FEATURES) + len(WORD_FEATURES)]
        == TEXT_FEATURES + WORD_FEATURES
    )
    assert set(reference(texts[0])) == set(TEXT_FEATURES + WORD_FEATURES)
    for row, text in enumerate(texts):
        check(found, row, text)


SAYINGS = st.lists(
    st.sampled_from(
        [
            "# ", "// ", "/* ", " * ", "*/", '"""', "'''", "r'''", "<!--", "-->", "; ", "-- ",
            "dnl ", "REM ", "@rem ", "% ", "! ", "\n", "\n\n", "\r\n", " ", "  ", "\t",
            "import x;", "x = 1", "f(", "#define ", '"', "'", "/*", "This ", "this ", "The ",
            "code ", "in ", "file", " file", "File ", " is ", " was ", " has been ", "is a ",
            "was an ", "generated", "Generated", " generated", "GENERATED", "auto", "Auto-",
            "auto ", "Automatically ", "automatically ", "machine-", "@", "code-", " by", " from",
            " from 'x'", " with ", " code", " automatically", "header", "Form implementation",
            "A lexical scanner", "Makefile.in", "keys ", "NOTE: ", "x.h.  ", ", ", ".", ":", "!",
            "(", "-", "_", "7", "do not edit", "DO NOT EDIT", "Do not edit", "DO NOT MODIFY",
            "don't edit", " this file", " by hand", " manually", "s", "section ", "following ",
            "java source ", "made by GNU Bison", "é", "one word after another ",
        ]
    ),
    min_size=1,
    max_size=14,
).map("".join)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(SAYINGS, min_size=60, max_size=60))
def test_what_headers_say_is_as_the_reference_has_it(texts: list[str]) -> None:
    found = measure(column(texts, b"generated"), words=False, secrets=False, pii=False)
    for row, text in enumerate(texts):
        expected = any(line_says(*line) for line in comment_lines(text.encode()[:2048]))
        assert found["autogenerated"][row] == expected, text


WORDS = st.lists(
    st.sampled_from(["a", "bb", "ccc", "dd", "e", "of", "the", "x7", "…"]), min_size=1, max_size=150
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS.map(" ".join), min_size=1, max_size=3))
def test_repetition_of_few_words_is_as_the_reference_has_it(texts: list[str]) -> None:
    found = measured(texts)
    for row, text in enumerate(texts):
        for name, expected in word_features(text).items():
            assert found[name][row] == pytest.approx(float(expected), abs=1e-12), (name, text)


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=6))
def test_documents_do_not_influence_each_other(texts: list[str]) -> None:
    together = measured(texts)
    for row, text in enumerate(texts):
        alone = measured([text])
        for name in together.columns:
            assert alone[name][0] == together[name][row], name


def test_a_batch_without_documents() -> None:
    config = FilterConfig(preset="web", secrets="reject", pii="reject")
    found = features(column([]), config)
    assert len(found) == 0
    assert all(len(found[name]) == 0 for name in found.columns)
    assert judge(found, config).codes.shape == (0,)
    assert judge(found, config).counts() == {}


def test_one_line_of_five_megabytes() -> None:
    line = "word " * 1_000_000 + "é"
    found = measured([line, "x"])
    assert found["max_line_length"].tolist() == [5_000_001, 1]
    assert found["n_words"].tolist() == [1_000_001, 1]
    assert found["letter_word_fraction"].tolist() == [1, 1]
    # MAX_WORDS words, alike: the first ten are new, and all that follow in tens are not
    length = 5 * MAX_WORDS - 1
    assert found["top_2gram_chars"][0] == pytest.approx(9 * (MAX_WORDS - 1) / length)
    tens = (MAX_WORDS - 1) // 10
    assert found["duplicate_10gram_chars"][0] == pytest.approx(40 * tens / length)


def test_a_word_of_five_megabytes_and_a_run_of_data() -> None:
    found = measured(["a" * 5_000_000, "aB3+" * 1_250_000, "=" * 5_000_000])
    assert found["n_words"].tolist() == [1, 1, 1]
    assert found["mean_word_length"].tolist() == [5_000_000] * 3
    assert found["longest_data_run"].tolist() == [0, 5_000_000, 0]
    assert found["data_fraction"].tolist() == [0, 1, 0]


def test_more_words_than_are_compared_are_all_counted() -> None:
    tail = " ".join(f"w{k}" for k in range(MAX_WORDS + 5000)) + " the of" + " 1" * 3000
    found = measured([tail])
    words = tail.split()
    assert found["n_words"][0] == len(words)
    assert found["stop_words"][0] == 2
    assert found["letter_word_fraction"][0] == pytest.approx((len(words) - 3000) / len(words))
    # what repeats stands behind the words that are compared
    assert found["duplicate_5gram_chars"][0] == 0


def test_letters_are_near_what_unicode_says() -> None:
    text = (
        "Größe straße naïve ŝipo Ελληνικά русский עברית العربية हिन्दी ไทย 中文字符 かなカナ 한국어 "
        "“quotes” — dashes … ×÷ € ½ ° § ¿ ¡ • → ∑ ☃ 《》、。"
    )
    marks = "\u094d\u0e49\u093f"  # vowel signs: letters here, marks in Unicode
    differ = {char for char in text if is_letter(char) != char.isalpha()} - set(marks)
    assert differ <= set("ीि्")


# Configs


@pytest.mark.parametrize("preset", PRESETS)
def test_config_comes_back_from_json(preset: str) -> None:
    config = FilterConfig(preset=preset, max_line_length=77, rules=("mine",))
    plain = config.as_json()
    assert FilterConfig.from_json(json.loads(json.dumps(plain))) == config
    assert plain["rules"] == ["mine"]
    assert plain["max_line_length"] == 77


def test_options_beat_the_preset_and_zero_switches_off() -> None:
    web = FilterConfig(preset="web", min_words=0, max_top_ngrams=(), curly_brackets=False)
    asked = {limit.reason for limit in limits(web)}
    assert "few_words" not in asked
    assert "top_ngrams" not in asked
    assert "curly_brackets" not in asked
    assert {"many_words", "duplicate_ngrams", "lorem_ipsum"} <= asked
    assert limits(FilterConfig()) == [Limit("too_small", "size_bytes", "below", 1)]


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        (
            {"preset": "cod"},
            "no preset is called 'cod'",
            "did you mean code? choose from none, code, web",
        ),
        ({"preset": "zzz"}, "no preset is called 'zzz'", "choose from none, code, web"),
        (
            {"pii": "redakt"},
            "no treatment of pii is called 'redakt'",
            "did you mean redact? choose from keep, reject, redact",
        ),
        ({"min_bytes": -1}, "min_bytes is -1", "choose a number from 0 on; 0 is no limit"),
        ({"min_bytes": "9"}, "min_bytes is '9'", "choose a number from 0 on; 0 is no limit"),
        ({"min_words": True}, "min_words is True", "choose a number from 0 on; 0 is no limit"),
        (
            {"max_hashes": float("nan")},
            "max_hashes is nan",
            "choose a number from 0 on; 0 is no limit",
        ),
        ({"min_words": 1.5}, "min_words is 1.5", "choose a whole number; 0 is no limit"),
        ({"min_latin": 1.1}, "min_latin is 1.1", "choose a share from 0 to 1; 0 is no limit"),
        ({"minified": 1}, "minified is 1", "choose True or False"),
        ({"rules": ["a"]}, "rules is ['a']", "give a tuple of names, each once"),
        ({"rules": ("a", "a")}, "rules is ('a', 'a')", "give a tuple of names, each once"),
        (
            {"max_top_ngrams": (0.1,)},
            "max_top_ngrams is (0.1,)",
            "give 3 shares from 0 to 1, or ()",
        ),
        (
            {"max_duplicate_ngrams": (2.0,) * 6},
            f"max_duplicate_ngrams is {(2.0,) * 6!r}",
            "give 6 shares from 0 to 1, or ()",
        ),
        (
            {"min_bytes": 9, "max_bytes": 8},
            "min_bytes is 9 and max_bytes is 8: nothing can be both",
            "choose min_bytes at the most max_bytes, or 0 for no limit",
        ),
    ],
)
def test_a_bad_option_is_an_error_that_says_what_to_do(
    options: dict[str, Any], what: str, do: str
) -> None:
    with pytest.raises(BadConfig) as caught:
        FilterConfig(**options)
    assert (caught.value.what, caught.value.do) == (what, do)


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(BadConfig, match="'max_line_lenght' is not an option of filters") as caught:
        FilterConfig.from_json({"max_line_lenght": 5})
    assert caught.value.do.startswith("did you mean max_line_length? choose from preset, min_b")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_threshold_of_a_preset_is_asked(preset: str) -> None:
    asked = limits(FilterConfig(preset=preset))
    treated = {"secrets", "pii", "max_top_ngrams", "max_duplicate_ngrams"}
    several = 9 if preset == "web" else 0
    assert len(asked) == len(set(PRESETS[preset]) - treated) + several


# Verdicts

ENGLISH = (
    "The people of the town have to walk with care, and that is not easy to be sure of. "
    "Every morning somebody opens a window above the river. "
    "Nobody remembers when this custom began! "
    "Some say that it was the baker; others name a teacher. "
    "Is any of it true? "
    "It makes for a good story when the evenings grow long. "
    "Children ask for it again."
)
CODE = "int main() {\n    return answer(6, 7);\n}\n" * 2
BASE64 = "aGVsbG8gd29ybGQ5" * 8


def verdict(text: str, **options: Any) -> str:
    config = FilterConfig(**options)
    return judge(features(column([text]), config), config).reason(0)


def test_good_documents_stay() -> None:
    assert verdict(ENGLISH, preset="web") == ""
    assert verdict(CODE, preset="code") == ""
    assert verdict("x", preset="none") == ""


@pytest.mark.parametrize(
    ("reason", "text", "options"),
    [
        ("too_small", "x", {"preset": "code"}),
        ("too_large", "int x;\n" * 150_000, {"preset": "code"}),
        ("autogenerated", "// Code generated by a tool. DO NOT EDIT.\n" + CODE, {"preset": "code"}),
        ("blob", CODE[:20] + "\n" + BASE64, {"preset": "code"}),
        ("blob", "int x;\n" * 5000 + BASE64 * 300, {"preset": "code"}),
        ("blob", "char a[] = {" + "0x1f, " * 100 + "};", {"preset": "code"}),
        ("blob", "int a[] = {" + "0x12345, " * 1000 + "};", {"preset": "code"}),
        ("blob", "int a[] = {" + "104, 9, 255,\n" * 100 + "};", {"preset": "code"}),
        ("blob", "/* XPM */\nstatic char *dot[] = {\"1 1 1 1\"};\n", {"preset": "code"}),
        ("blob", ":100000000C9434000C943E000C943E000C943E0082\n" * 9, {"preset": "code"}),
        ("minified", "var a=function(b){return b};" * 40, {"preset": "code"}),
        ("line_too_long", CODE * 50 + "x " * 501, {"max_line_length": 1000}),
        ("lines_too_long", CODE * 20 + "x " * 9000, {"preset": "code"}),
        ("lines_too_long", ("x y " * 80 + "\n") * 3, {"preset": "code"}),
        ("few_alphanumerics", "// " + "= " * 30 + "\n", {"preset": "code"}),
        ("few_letters", "1234 abc", {"min_letters": 0.5}),
        ("many_digits", "1234 abc", {"max_digits": 0.4}),
        ("many_non_ascii", "ααα a", {"max_non_ascii": 0.5}),
        ("licence", "/* Licensed under the MIT licence */", {"licence": True}),
        ("secret", 'key = "AKIAQ7RT5WXZ2PLMN4KD"', {"secrets": "reject"}),
        ("pii", "write to someone@somewhere.org", {"pii": "reject"}),
        ("few_words", "Too short.", {"preset": "web"}),
        ("many_words", "word " * 100_001, {"preset": "web"}),
        ("short_words", "a of " * 40, {"preset": "web"}),
        ("long_words", "incomprehensibilities " * 60, {"preset": "web"}),
        ("hashes", ENGLISH + " #tag" * 20, {"preset": "web"}),
        ("ellipses", ENGLISH.replace(" the ", " the... "), {"preset": "web", "max_ellipses": 0.03}),
        ("bullets", "- " + ENGLISH.replace(". ", ".\n- "), {"preset": "web"}),
        ("ellipsis_lines", ENGLISH.replace(". ", "...\n"), {"preset": "web"}),
        ("words_without_letters", ENGLISH + " 1234" * 30, {"preset": "web"}),
        ("language", "Весь этот текст написан кириллицей. " * 12, {"preset": "web"}),
        ("few_stop_words", "Le chat dort bien. " * 15, {"preset": "web"}),
        ("language", "Le chat dort bien. " * 30 + "of the", {"preset": "web"}),
        ("curly_brackets", ENGLISH + " {", {"preset": "web"}),
        ("lorem_ipsum", ENGLISH + " Lorem Ipsum dolor.", {"preset": "web"}),
        ("few_sentences", ENGLISH.replace(".", ";"), {"preset": "web"}),
        ("unpunctuated_lines", ENGLISH + "\n" + "a line without an end\n" * 30, {"preset": "web"}),
        ("short_lines", ENGLISH + "\n" + "Short line here.\n" * 4, {"preset": "web"}),
        ("list", ENGLISH + "\n" * 30, {"preset": "web"}),
        ("duplicate_lines", "one\ntwo\none\n", {"max_duplicate_lines": 0.3}),
        ("duplicate_lines", "one\ntwo\none\n", {"max_duplicate_line_chars": 0.2}),
        ("duplicate_lines", "one\ntwo\none\n", {"max_duplicate_chars": 0.3}),
        ("duplicate_lines", (ENGLISH + "\n") * 2, {"preset": "web"}),
        ("duplicate_paragraphs", "one\n\ntwo\n\none", {"max_duplicate_paragraphs": 0.3}),
        ("duplicate_paragraphs", "one\n\ntwo\n\none", {"max_duplicate_paragraph_chars": 0.2}),
        ("top_ngrams", ENGLISH + " good day" * 12 + ".", {"preset": "web"}),
        ("duplicate_ngrams", ENGLISH + " And: " + ENGLISH, {"preset": "web"}),
    ],
)  # fmt: skip
def test_each_reason_is_reached(reason: str, text: str, options: dict[str, Any]) -> None:
    assert verdict(text, **options) == reason


def test_no_reason_is_left_out_above() -> None:
    (cases,) = [
        mark.args[1]
        for mark in test_each_reason_is_reached.pytestmark
        if mark.name == "parametrize"
    ]
    assert {case[0] for case in cases} == set(REASONS)


@pytest.mark.parametrize(
    ("option", "good", "text"),
    [
        ("min_bytes", 10, "0123456789"),
        ("max_bytes", 10, "0123456789"),
        ("max_line_length", 4, "four\néééé\r\n"),
        ("max_long_lines", 0.5, "é" * 4001 + "\r\n" + "x" * 4000 + "\ny"),
        ("max_numbers", 0.75, "a 1,2,3"),
        ("max_mean_line_length", 3.0, "ab\nabcd\n"),
        ("min_alphanumeric", 0.5, "a1--"),
        ("min_letters", 0.25, "a1--"),
        ("max_digits", 0.25, "a1--"),
        ("max_non_ascii", 0.25, "é1--"),
        ("max_data_run", 64, "aB3+" * 16),
        ("min_words", 3, "a b c"),
        ("max_words", 3, "a b c"),
        ("min_mean_word_length", 2.0, "a bbb"),
        ("max_mean_word_length", 2.0, "a bbb"),
        ("max_bullet_lines", 0.5, "- a\nb"),
        ("max_ellipsis_lines", 0.5, "a...\nb"),
        ("min_letter_words", 0.5, "a 1"),
        ("min_stop_words", 2, "the of the"),
        ("min_latin", 0.5, "aα"),
        ("min_english", 0.5, "the cat"),
        ("min_sentences", 2, "A. B."),
        ("min_punctuated_lines", 0.5, "a.\nb"),
        ("max_short_lines", 0.5, "a\n" + "b" * 31),
        ("max_newlines", 0.5, "a\nb"),
        ("max_duplicate_lines", 0.5, "a\na"),
    ],
)
def test_a_threshold_itself_is_kept(option: str, good: float, text: str) -> None:
    assert verdict(text, **{option: good}) == ""
    step = 1 if isinstance(good, int) else 1e-9
    bad = good + step if option.startswith("min") else good - step
    assert verdict(text, **{option: bad}) != ""


def test_the_first_rule_that_fails_is_the_reason_and_all_are_counted() -> None:
    config = FilterConfig(preset="code", secrets="reject", pii="reject")
    texts = ["x", "x y@z.com", CODE, CODE + "a@example.org", CODE + "AKIAQ7RT5WXZ2PLMN4KD a@b.org"]
    found = judge(features(column(texts), config), config)
    assert [found.reason(k) for k in range(5)] == ["too_small", "too_small", "", "pii", "secret"]
    assert found.counts() == {"too_small": 2, "pii": 1, "secret": 1}
    assert found.keep.tolist() == [False, False, True, False, False]
    assert found.codes.dtype == np.int32
    assert isinstance(found, Verdicts)


def test_thresholds_are_applied_after_measuring() -> None:
    config = FilterConfig(preset="web")
    found = features(column([ENGLISH]), config)
    assert judge(found, config).counts() == {}
    assert judge(found, replace(config, min_words=1000, max_words=2000)).counts() == {
        "few_words": 1
    }


def test_what_no_rule_needs_is_not_measured() -> None:
    assert set(features(column(["x"]), FilterConfig()).columns) == set(TEXT_FEATURES)
    code = features(column(["x"]), FilterConfig(preset="code"))
    assert set(code.columns) == {*TEXT_FEATURES, "secrets", "pii"}
    some = features(column(["x"]), FilterConfig(min_stop_words=1, pii="redact"))
    assert set(some.columns) == {*TEXT_FEATURES, *WORD_FEATURES, "pii"}


# Rules of the user


@pytest.fixture(autouse=True)
def fresh_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: dict(named) for kind, named in plugins._known.items()}
    monkeypatch.setattr(plugins, "_known", known)


def test_a_custom_rule() -> None:
    @register("filter", "no_goto")
    def no_goto(texts: pa.LargeStringArray, found: Features) -> pa.BooleanArray:
        assert texts.to_pylist() == ["goto é;", "fine", ""][: len(texts)]
        return pc.invert(pc.match_substring(texts, "goto"))

    @register("filter", "tiny")
    def tiny(texts: pa.LargeStringArray, found: Features) -> Any:
        return found["size_bytes"] > 4

    config = FilterConfig(rules=("no_goto", "tiny"))
    documents = column(["goto é;", "fine"], b"beyond")
    found = judge(features(documents, config), config, documents)
    assert found.counts() == {"no_goto": 1, "tiny": 1}
    assert found.reasons == (*REASONS, "no_goto", "tiny")
    backwards = replace(config, rules=("tiny",))
    assert judge(features(documents, config), backwards, documents).reason(0) == ""


def test_a_rule_may_not_have_the_name_of_another() -> None:
    register("filter", "mine")(lambda texts, found: None)
    with pytest.raises(BadConfig, match="there are two filters called 'mine'") as caught:
        register("filter", "mine")(lambda texts, found: None)
    assert "test_filters" in caught.value.where
    with pytest.raises(BadConfig, match="there are two filters called 'blob'") as caught:
        register("filter", "blob")(lambda texts, found: None)
    assert caught.value.where.startswith("penstock.prepare.filters.judge and ")


def ask(rule: Any) -> BadConfig:
    register("filter", "mine")(rule)
    documents, config = column(["a", "b"]), FilterConfig(rules=("mine",))
    with pytest.raises(BadConfig) as caught:
        judge(features(documents, config), config, documents)
    return caught.value


def test_a_rule_that_raises_is_named() -> None:
    def fails(texts: Any, found: Any) -> Any:
        raise KeyError("no such thing")

    error = ask(fails)
    assert error.what == "filter rule 'mine' failed on 2 documents"
    assert error.where.endswith("fails")
    assert error.why == "KeyError: 'no such thing'"
    assert error.do == "fix the rule, or leave 'mine' out of `rules`"


@pytest.mark.parametrize("answer", [[True], [1, 0], [[True, False]], None])
def test_a_rule_that_does_not_answer_is_named(answer: Any) -> None:
    error = ask(lambda texts, found: answer)
    assert error.what == "filter rule 'mine' did not answer for each document"
    assert error.why.startswith("wanted 2 booleans, got shape")
    assert error.do == "return one boolean for each text: True keeps it"


def test_a_rule_that_nobody_registered() -> None:
    register("filter", "mine")(lambda texts, found: None)
    documents, config = column(["a"]), FilterConfig(rules=("mime",))
    with pytest.raises(BadConfig, match="there is no filter called 'mime'") as caught:
        judge(features(documents, config), config, documents)
    assert caught.value.do.startswith("did you mean mine? choose from autogenerated, ")
    config = FilterConfig(rules=("blob",))
    with pytest.raises(BadConfig, match="'blob' in rules is not a custom rule") as caught:
        judge(features(documents, config), config, documents)
    assert caught.value.do == "set the threshold of that one, and leave it out of `rules`"
