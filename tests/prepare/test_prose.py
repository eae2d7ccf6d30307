"""Prose, Markdown and code of no known grammar: where they are cut, and what sections they have."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.kernels import PAD
from penstock.prepare.outline.outline import (
    DECLARATION,
    HEADING,
    MEMBER,
    PARAGRAPH,
    SECTION,
    SENTENCE,
    STATEMENT,
    Outline,
)
from penstock.prepare.outline.prose_layout import LONG
from penstock.prepare.outline.readers import outline_prose
from penstock.records import LANGUAGES


def outline(texts: list[bytes], languages: list[str]) -> tuple[Outline, list[int]]:
    data = np.frombuffer(b"".join(texts) + bytes(PAD), np.uint8)
    at = np.cumsum([0, *map(len, texts)])
    numbers = np.array([LANGUAGES.index(name) for name in languages], np.uint8)
    return outline_prose(data, at, numbers), at.tolist()


def cuts_of(language: str, text: bytes) -> list[tuple[bytes, int]]:
    """What begins at each cut, up to the next one or a newline, with its level."""
    found, _ = outline([text], [language])
    places = [*found.cut_at.tolist(), len(text)]
    return [
        (text[places[k] : places[k + 1]].partition(b"\n")[0].rstrip(), level)
        for k, level in enumerate(found.cut_level.tolist())
    ]


def sections_of(text: bytes) -> list[tuple[bytes, int, bytes, bytes]]:
    """Name, parent, first line and what follows, of each section."""
    found, _ = outline([text], ["markdown"])
    assert (found.node_kind == SECTION).all()
    return [
        (
            text[found.name_start[k] : found.name_end[k]],
            int(found.node_parent[k]),
            text[found.node_start[k] : found.node_body[k]],
            text[found.node_end[k] :].partition(b"\n")[0],
        )
        for k in range(len(found.node_start))
    ]


def test_markdown_is_cut_at_headings_paragraphs_and_sentences() -> None:
    text = (
        b"# One\n\nFirst thing. Second thing!\nStill second. Third\n\n"
        b"Para two.\n- item a\n- item b. More\n\nTitle\n=====\n\nEnd.\n"
    )
    assert cuts_of("markdown", text) == [
        (b"First thing.", PARAGRAPH),
        (b"Second thing!", SENTENCE),
        (b"Still second.", SENTENCE),
        (b"Third", SENTENCE),
        (b"Para two.", PARAGRAPH),
        (b"- item a", SENTENCE),
        (b"- item b.", SENTENCE),
        (b"More", SENTENCE),
        (b"Title", HEADING),
        (b"End.", PARAGRAPH),
    ]


def test_sections_nest_by_rank_and_end_at_their_like() -> None:
    text = b"# A\nx\n## B ##\n### C#\n## D\n\nE\n---\nz\n# F\n"
    assert sections_of(text) == [
        (b"A", -1, b"# A\n", b"# F"),
        (b"B", 0, b"## B ##\n", b"## D"),
        (b"C#", 1, b"### C#\n", b"## D"),
        (b"D", 0, b"## D\n", b"E"),
        (b"E", 0, b"E\n---\n", b"# F"),
        (b"F", -1, b"# F\n", b""),
    ]


@pytest.mark.parametrize("fence", [b"```", b"~~~~"])
def test_fenced_blocks_are_kept_together(fence: bytes) -> None:
    text = b"Look:\n" + fence + b"py\n# no heading\n\nx = 1. Y\ny = 2\n" + fence + b"\nAfter.\n"
    assert cuts_of("markdown", text) == [
        (fence + b"py", SENTENCE),
        (b"x = 1. Y", STATEMENT + 1),
        (b"y = 2", STATEMENT + 2),
        (b"After.", PARAGRAPH),
    ]
    assert sections_of(text) == []


def test_front_matter_is_no_title() -> None:
    text = b"---\ntitle: A. B\ntags: x\n---\nHello.\n"
    assert cuts_of("markdown", text) == [(b"Hello.", PARAGRAPH)]
    assert sections_of(text) == []


def test_rules_and_items_are_no_titles() -> None:
    assert sections_of(b"- item\n---\ntext\n\n---\n\na | b\n") == []
    assert sections_of(b"two\nlines\n---\n") == []
    assert sections_of(b"    # code\n#hash\n####### seven\n") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"Dr. Smith and J. Doe met e.g. Ann. He left.", [b"He left."]),
        (b'He said "No." Then? (Yes.) 3 came.', [b"Then?", b"(Yes.)", b"3 came."]),
        (b"It is v1.2 and a.b. not new. end", []),
        ("中文。你好！”再见。".encode(), ["你好！”".encode(), "再见。".encode()]),
        ("Привет. Мир. и мир. Ёж.".encode(), ["Мир. и мир.".encode(), "Ёж.".encode()]),
        ("Ça va. État. été.".encode(), ["État. été.".encode()]),
        (b"1. First item. Next", [b"Next"]),
        (b"Wait... What?! Yes", [b"What?!", b"Yes"]),
    ],
)
def test_sentences(text: bytes, expected: list[bytes]) -> None:
    assert cuts_of("text", text) == [(sentence, SENTENCE) for sentence in expected]


def test_text_has_paragraphs_but_no_headings() -> None:
    long = b"w" * (LONG + 1)
    text = b"# One\nrest\n\nTitle\n*****\nbody\n\n\x0cTwo\n" + long + b"\nafter long\n\x0c\nlast\n"
    assert cuts_of("text", text) == [
        (b"Title", PARAGRAPH),
        (b"Two", PARAGRAPH),
        (b"after long", PARAGRAPH),
        (b"last", PARAGRAPH),
    ]


def test_other_code_is_cut_by_empty_lines_and_indent() -> None:
    text = b"def a\n  x\n\n  y\nend\n\ndef b\n  z\nend\ncall\n\n}\n\tq\nelse\nr\n"
    assert cuts_of("other", text) == [
        (b"  y", MEMBER),
        (b"def b", DECLARATION),
        (b"call", STATEMENT),
        (b"r", STATEMENT),
    ]


def test_any_other_language_is_cut_like_code() -> None:
    text = b"a\n\nb\n"
    assert cuts_of("python", text) == cuts_of("other", text) == [(b"b", DECLARATION)]


def test_carriage_returns_tabs_and_a_byte_order_mark() -> None:
    text = b"\xef\xbb\xbf# One\r\n\r\nA b.\r\nC d.\r\n\r\n\tE\r\n"
    assert cuts_of("markdown", text) == [
        (b"A b.", PARAGRAPH),
        (b"C d.", SENTENCE),
        (b"\tE", PARAGRAPH),
    ]
    assert [name for name, *_ in sections_of(text)] == [b"One"]


def test_rows_choose_documents() -> None:
    texts = [b"A\n\nB\n", b"# X\n\nYes. Zed\n", b"C\n\nD\n"]
    data = np.frombuffer(b"".join(texts) + bytes(PAD), np.uint8)
    at = np.cumsum([0, *map(len, texts)])
    found = outline_prose(data, at, np.array([0, 1, 0], np.uint8), np.array([2, 1]))
    assert found.cut_first.tolist() == [0, 1, 3]
    assert found.cut_at.tolist() == [at[2] + 3, at[1] + 5, at[1] + 10]
    assert found.node_first.tolist() == [0, 0, 1]
    none = outline_prose(data, at, np.zeros(3, np.uint8), np.zeros(0, np.int64))
    assert none.cut_first.tolist() == [0]


def test_more_cuts_than_were_foreseen() -> None:
    text = b"# a\n" * 20_000
    found, _ = outline([text], ["markdown"])
    assert found.cut_at.tolist() == list(range(4, len(text), 4))
    assert len(found.node_start) == 20_000
    assert found.node_end.tolist() == [*range(4, len(text), 4), len(text)]
    found, _ = outline([b"A. " * 50_000], ["text"])  # initials, all of them
    assert len(found.cut_at) == 0
    found, _ = outline([b"Ab. " * 50_000], ["text"])
    assert len(found.cut_at) == 49_999


_PIECES = st.sampled_from(
    ["# a", "##", "```", "~~~", "---", "===", "- x", "1. y", "A b. C", "。", "é", "\x0c", "\t", " ",
     "\r\n", "\n", "\n\n", "}", "end", "Dr. X", "\ufeff", "|", "> q", "!?", '"', "x" * 300],
)  # fmt: skip
_TEXTS = st.one_of(st.lists(_PIECES, max_size=40).map("".join), st.text(max_size=80)).map(
    lambda text: text.encode("utf-8", "ignore")
)


@given(
    st.lists(st.tuples(st.one_of(_TEXTS, st.binary(max_size=60)), st.sampled_from(LANGUAGES)),
             max_size=5),
)  # fmt: skip
@example([(b"\xef\xbb", "markdown"), (b"\xbf# a\n", "markdown")])
@example([(b"a\n--", "markdown"), (b"--\n\nb", "text")])
def test_outlines_keep_the_contract(documents: list[tuple[bytes, str]]) -> None:
    texts, languages = [text for text, _ in documents], [name for _, name in documents]
    found, at = outline(texts, languages)
    for k, text in enumerate(texts):
        cuts = (found.cut_at[found.cut_first[k] : found.cut_first[k + 1]] - at[k]).tolist()
        assert cuts == sorted(set(cuts))
        assert all(0 < cut < len(text) for cut in cuts)
        assert all(text[cut] & 0xC0 != 0x80 for cut in cuts)
        first, last = int(found.node_first[k]), int(found.node_first[k + 1])
        ends = []
        for j in range(first, last):
            start, body, end = (
                int(column[j]) - at[k]
                for column in (found.node_start, found.node_body, found.node_end)
            )
            ends.append(end)
            assert 0 <= start <= body <= end <= len(text)
            assert at[k] <= found.name_start[j] <= found.name_end[j] <= at[k + 1]
            parent = int(found.node_parent[j])
            assert parent < j - first
            if parent >= 0:
                assert end <= ends[parent]
            assert start == 0 or start in cuts
        # alone or among others: the same
        alone, _ = outline([text], [languages[k]])
        assert alone.cut_at.tolist() == cuts


def test_a_megabyte_in_one_line_and_no_text_at_all() -> None:
    found, _ = outline(
        [b"x" * 1_000_000, b"", b"\n", b" \n \n"], ["text", "markdown", "text", "other"]
    )
    assert len(found.cut_at) == 0
    assert found.cut_first.tolist() == [0] * 5
