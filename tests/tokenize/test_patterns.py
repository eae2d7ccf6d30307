"""Pattern names, their other spellings, and the class of every code point, against `regex`."""

from typing import Final

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig
from penstock.tokenize.patterns import _SPELLINGS, PATTERNS, code_point_classes, find_pattern
from penstock.tokenize.scan_layout import (
    BLANK,
    CASELESS,
    LOWER,
    MARK,
    NEWLINE,
    NUMBER,
    OTHER,
    SPACE,
    UPPER,
)

# In the order in which one class goes before another; the number of the group is the place here.
CLASSES: Final = (
    (BLANK, r" "),
    (NEWLINE, r"[\r\n]"),
    (SPACE, r"\s"),
    (MARK, r"\p{M}"),
    (UPPER, r"\p{Lu}|\p{Lt}"),
    (LOWER, r"\p{Ll}"),
    (CASELESS, r"\p{Lm}|\p{Lo}"),
    (NUMBER, r"\p{N}"),
    (OTHER, r"[^\s\p{L}\p{N}\p{M}]"),
)

NASTY: Final = st.text(
    st.one_of(
        st.sampled_from("sStTdDmMlLvVrReE'aZ129 \n\r\t!/ſ"),
        st.sampled_from("\x0b\x0c\x1c\x1d\x1e\x1f\x85\u00a0\u1680\u2003\u2028\u2029\u202f\u3000"),
        st.sampled_from("éÉǅʰ中ה\u0301\u0903²٣Ⅷ😀\u200d\ufffd\0"),
        st.characters(codec="utf-8"),
    ),
    max_size=30,
)


def test_every_code_point_has_the_class_that_regex_gives_it() -> None:
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    groups = "|".join(f"({members})" for _, members in CLASSES)
    found = regex.finditer(groups, "".join(map(chr, points)))
    expected = np.fromiter(
        (CLASSES[(match.lastindex or 0) - 1][0] for match in found), np.uint8, len(points)
    )
    classes = code_point_classes()
    assert len(classes) == 0x110000
    wrong = np.flatnonzero(classes[points] != expected)
    assert [hex(points[k]) for k in wrong[:20].tolist()] == []


def test_no_class_shares_a_code_point_with_another() -> None:
    # what the order above would hide
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    for members in (r"\s", r"\p{M}", r"\p{L}", r"\p{N}"):
        others = {r"\s", r"\p{M}", r"\p{L}", r"\p{N}"} - {members}
        both = rf"(?={members})(?:{'|'.join(sorted(others))})"
        assert regex.search(both, every) is None, members


def test_the_class_table_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        code_point_classes()[0] = 1


@pytest.mark.parametrize("name", PATTERNS)
def test_a_name_and_its_regex_are_the_same_pattern(name: str) -> None:
    assert find_pattern(name) is PATTERNS[name]
    assert find_pattern(PATTERNS[name].regex) is PATTERNS[name]
    assert PATTERNS[name].name == name
    assert PATTERNS[name].is_scanned


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_a_spelling_is_the_pattern_it_is_listed_under(spelling: str) -> None:
    assert find_pattern(spelling) is PATTERNS[_SPELLINGS[spelling]]


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_a_spelling_cuts_as_the_pattern_does(spelling: str) -> None:
    # what stands for a spelling in `find_pattern` must give what that spelling gives
    theirs = regex.compile(spelling)
    ours = regex.compile(PATTERNS[_SPELLINGS[spelling]].regex)

    @settings(max_examples=600, deadline=None)
    @example("x\n  ")
    @example("\n\u00a0")
    @example("  \r\n \t")
    @example("it'S 'ſ 'LL'")
    @given(NASTY)
    def same(text: str) -> None:
        assert theirs.findall(text) == ours.findall(text)

    same()


def test_any_other_regex_goes_through_the_regex_module() -> None:
    found = find_pattern(r"\p{L}+|\P{L}")
    assert (found.name, found.regex, found.is_scanned) == ("regex", r"\p{L}+|\P{L}", False)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadConfig) as caught:
        find_pattern("cl100")
    assert caught.value.what == "there is no pattern 'cl100'"
    assert caught.value.do == (
        "did you mean cl100k? choose from gpt2, cl100k, o200k, qwen2, nanochat, or give a regex"
    )


def test_a_regex_that_does_not_compile_says_why() -> None:
    with pytest.raises(BadConfig) as caught:
        find_pattern(r"\w+(")
    assert caught.value.what == "the pattern does not compile"
    assert caught.value.where == r"\w+("
    assert caught.value.why == "missing ) at position 4"
    assert caught.value.do == "fix it, or choose from gpt2, cl100k, o200k, qwen2, nanochat"


@pytest.mark.parametrize("text", ["[a", r"\p{Foo}", "(?P<a", "a{3,2}", "*", "(" * 5000])
def test_every_regex_that_does_not_compile_is_bad_config(text: str) -> None:
    with pytest.raises(BadConfig, match="the pattern does not compile"):
        find_pattern(text)
