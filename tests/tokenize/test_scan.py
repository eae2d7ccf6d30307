"""The scanners against `regex.finditer`: every code point, nasty strings, many scripts."""

from typing import Final

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.kernels import PAD
from penstock.tokenize.patterns import PATTERNS, _cut_all, cut_pretokens

REGEXES: Final = {name: regex.compile(pattern.regex) for name, pattern in PATTERNS.items()}
EVERY_FAMILY: Final = pytest.mark.parametrize("name", PATTERNS)

ALPHABET: Final = (
    "aestdmrvlxSTDMRVLEZÀéßſKﬀ"  # letters, among them those that fold to s and k
    "ǅᾈʰˇªºаЯאבجकกあア中한"  # titlecase, modifiers, caseless
    "\u0301\u0308\u0903\u20dd\u093f\ufe0f\u200d"  # marks, the joiner
    "0129²½Ⅷ٣५໓߁𝟘〇"  # digits of several scripts, and numbers that are none
    "      \t\v\f\x1c\x1f\x85\u00a0\u1680\u2009\u2028\u2029\u202f\u205f\u3000\u180e\u200b"
    "\r\n\r\n"
    "''''’\"`//\\.,!?-_#$%^&*()[]{}<>|~+=:;@"
    "😀👩🏽🇩🇪\U000e0041€→\ufffd\ufeff\0\x7f\x80\uffff\U0010ffff"
)

SCRIPTS: Final = {
    "latin": "Ça va? L'ÉTÉ's 12e été — naïve coöperation, straße; ĲSSELMEER's\tÆON\n\n  end  ",
    "greek": "Ο ΟΔΥΣΣΕΥΣ ἔφη· «ᾄδω» 'τα' ΑΒΓ123 ᾈδης\r\n",
    "cyrillic": "Ёжик'S съел 1234 груши/яблока!!\nСССР-ом  \n Њ",
    "armenian": "Բարեւ Ձեզ, աշխարհ։ ՀԱՅԱՍՏԱՆ՝ 2024\n",
    "georgian": "გამარჯობა ᲛᲡᲝᲤᲚᲘᲝ, 15 მაისი\n",
    "hebrew": "שָׁלוֹם עולם! מה שלומך? ״צה״ל״ 1948\n",
    "arabic": "السَّلامُ عليكم، ١٢٣٤٥ و٦٧؛ ﷺ ـــ نعم\n",
    "persian": "می‌خواهم ۱۲۳۴ کتاب‌ها\n",
    "devanagari": "नमस्ते दुनिया। क्या हाल है? १२३४ क्ष्म्य ज़\n",
    "bengali": "আমার সোনার বাংলা, ১২৩৪ টাকা।\n",
    "tamil": "வணக்கம் உலகம் ௧௨௩ கொ 's\n",
    "thai": "สวัสดีชาวโลก ๑๒๓๔ กำลังทำอะไรอยู่ ฯลฯ\n",
    "lao": "ສະບາຍດີ ໑໒໓ ໂລກ\n",
    "burmese": "မင်္ဂလာပါ ၁၂၃၄ ကမ္ဘာ\n",
    "khmer": "សួស្តី ១២៣ ពិភពលោក។\n",
    "tibetan": "བཀྲ་ཤིས་བདེ་ལེགས། ༡༢༣༤\n",
    "ethiopic": "ሰላም ለዓለም፡ ፩፪፫፬ ።\n",
    "hangul": "안녕하세요 세계 2024년 3월 ㅋㅋㅋ 한글\n",
    "japanese": "こんにちは、世界！ 東京タワーは333mです。 ﾊﾝｶｸ　全角１２３４\n",
    "chinese": "你好，世界！二〇二四年有366天。「引号」……\n\n　　段落",
    "cherokee": "ᎣᏏᏲ ᎡᎶᎯ ꭳꮟᏺ 12\n",
    "emoji": "👨‍👩‍👧‍👦 🏳️‍🌈!! ❤️1️⃣2️⃣ 🇯🇵🇺🇳 :-)\n",
    "deseret": "𐐀𐐁𐐨𐐩's 𐐀𐐁 𝒜𝓫𝟘𝟙𝟚𝟛\n",
    "code": "if (x->y != 'S') {\n\treturn foo_bar'll[i++] // 0xFF\r\n}\n\n\n#endif/\n/*\r\n*/  \n",
    "zalgo": "Z̸̢̛a̵͝l̷g̴o̶'S\u0301 \u0301A \u0301\u0301AB\u0301C\u0301d",
}


def regex_ends(name: str, text: str) -> list[int]:
    """Where each match of the regex ends, in bytes; together the matches are the whole text."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    at = np.append(np.flatnonzero(encoded & 0xC0 != 0x80), len(encoded))
    ends = [found.end() for found in REGEXES[name].finditer(text)]
    assert ends[-1:] == [len(text)][: len(text)]
    found: list[int] = at[np.array(ends, np.int64)].tolist()
    return found


def check(name: str, text: str) -> None:
    found, expected = cut_pretokens(PATTERNS[name], text.encode()), regex_ends(name, text)
    if found != expected:  # say where, not all of it
        at = next(k for k, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
        start = expected[at - 1] if at else 0
        around = text.encode()[max(0, start - 20) : start + 40]
        raise AssertionError(f"{name}: ends at {found[at]}, not {expected[at]}: {around!r}")


def written_code_points() -> list[str]:
    """The planes in which there are characters: 213,504 of them."""
    points = [*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200)]
    return [chr(point) for point in points]


@EVERY_FAMILY
def test_every_code_point_between_all_kinds_of_neighbours(name: str) -> None:
    check(name, "".join(f"a{c}b1{c}2'{c} {c}{c}\n" for c in written_code_points()))


@pytest.mark.parametrize("name", ["gpt2", "cl100k", "o200k"])
def test_every_code_point_before_a_capital_a_newline_and_after_a_tab(name: str) -> None:
    check(name, "".join(f"{c}A{c}\r\t{c}/" for c in written_code_points()))


@pytest.mark.parametrize("name", ["gpt2", "cl100k", "o200k"])
def test_every_code_point_of_the_planes_with_nothing_in_them(name: str) -> None:
    check(name, "".join(f"{chr(point)}a" for point in range(0x34000, 0x110000)))


@EVERY_FAMILY
def test_one_code_point_is_a_text(name: str) -> None:
    # one of each class and width, and the edges of the widths
    for c in {*ALPHABET, "\x7f", "\x80", "\u07ff", "\u0800", "\uffff", "\U00010000"}:
        assert cut_pretokens(PATTERNS[name], c.encode()) == [len(c.encode())], hex(ord(c))
    assert cut_pretokens(PATTERNS[name], b"") == []


@EVERY_FAMILY
@pytest.mark.parametrize("script", SCRIPTS)
def test_texts_of_many_scripts(name: str, script: str) -> None:
    check(name, SCRIPTS[script])
    check(name, SCRIPTS[script].upper())
    check(name, SCRIPTS[script].replace(" ", "'"))


@EVERY_FAMILY
def test_all_scripts_at_every_alignment(name: str) -> None:
    text = "".join(SCRIPTS.values())
    for shift in range(34):
        check(name, "x" * shift + text)


@EVERY_FAMILY
def test_every_prefix_of_a_text(name: str) -> None:
    text = SCRIPTS["latin"] + SCRIPTS["code"] + SCRIPTS["zalgo"] + SCRIPTS["emoji"]
    for stop in range(len(text) + 1):
        check(name, text[:stop])


@EVERY_FAMILY
def test_every_string_of_four_kinds_of_characters(name: str) -> None:
    # one of each class, and what a pattern names: all strings of up to four of them
    letters = "aA中\u0301\u01c51 \u00a0\n\r!'s/S"
    words = [""]
    for _ in range(4):
        words = [word + letter for word in words for letter in letters]
    # a text after a text: the spans of "…\nx" and of what follows are independent in all families
    check(name, "\nx".join(words))


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(list(PATTERNS)), st.text(st.sampled_from(ALPHABET), max_size=40))
@example("o200k", "\u0301AB")
@example("o200k", " \u0301A\u0301B'S")
@example("cl100k", "'ſa'ſ 'S")
@example("gpt2", "'S's 's  's")
def test_nasty_strings(name: str, text: str) -> None:
    check(name, text)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(list(PATTERNS)), st.text(max_size=60))
def test_any_string(name: str, text: str) -> None:
    check(name, text)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(PATTERNS)),
    st.lists(
        st.tuples(st.sampled_from("aA中\u0301é1!' \u3000\n\r/😀"), st.integers(1, 70)), max_size=6
    ),
)
def test_long_runs(name: str, runs: list[tuple[str, int]]) -> None:
    check(name, "".join(letter * times for letter, times in runs))


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(list(PATTERNS)),
    st.text(st.sampled_from(ALPHABET), max_size=20),
    st.text(st.sampled_from(ALPHABET), max_size=20),
    st.sampled_from([b"a", b"A", b"1", b" ", b"\n", b"'", b"s", b"/", b"\x80", b"\xff", b"\xf4"]),
)
def test_what_stands_around_a_text_has_no_part_in_it(
    name: str, before: str, text: str, slack: bytes
) -> None:
    start, size = len(before.encode()), len(text.encode())
    data = np.frombuffer(before.encode() + text.encode() + slack * PAD, np.uint8)
    ends = np.empty(size + 1, np.int64)
    count = _cut_all(data, start, start + size, PATTERNS[name].cutter(), ends)
    assert (ends[:count] - start).tolist() == regex_ends(name, text)
