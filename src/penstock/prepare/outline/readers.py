"""Choose the reader for each language, and put what they find together.

In:    documents with their language
Out:   one `Outline` of all of them, in order
Keeps: a cut after white space, so that the next chunk begins with text or its indent
Never: cuts inside a UTF-8 sequence

C and C++ are read by `cpp`, what has a grammar by `syntax`; all else here, by lines, in one pass:

Markdown. `# …` and a line underlined by = or - are a HEADING, and a SECTION named by it that ends
at the next heading of its rank or a higher one. What follows an empty line, a form feed or a fenced
block is a PARAGRAPH. Inside ``` or ~~~ there are no paragraphs and no headings: lines are
STATEMENT + 2, after an empty line STATEMENT + 1. YAML between `---` at the top is left whole.

Text. Paragraphs as above; besides, a line underlined by three or more equal marks begins one, and
so does the line after one of more than LONG bytes, which nobody wrapped.

Both. An item of a list, and what follows . ! ? and a space if it begins with a capital, a digit, a
quote or a letter that has no case, is a SENTENCE; so is what follows 。！？ or a danda. Initials,
titles (SHORT_FORMS) and numbers of items end none.

Code. After an empty line, what begins a line is a DECLARATION and what is indented a MEMBER; what
begins a line after an indented one is a STATEMENT. A line that closes (`}`, `end`, `else`, `</…`)
goes with what stands before it. Any language that is neither text nor markdown is cut like this.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.arrays import Bytes, Int64s, offsets_of
from penstock.kernels import Kernel
from penstock.prepare.outline.cpp import outline_cpp
from penstock.prepare.outline.outline import SECTION, Outline, collect
from penstock.prepare.outline.prose_layout import (
    BODY,
    CUTS,
    END,
    NAME,
    NAME_END,
    NODE,
    NODES,
    PARENT,
    RANKS,
    START,
    STATE,
    Cuts,
    Sections,
)
from penstock.prepare.outline.syntax import outline_syntax
from penstock.records import LANGUAGES, Documents

_outline_lines = Kernel(
    "penstock.prepare.outline.prose_kernel",
    "outline_lines",
    "void(uint8[::1], int64[::1], int64[::1], uint8[::1], Cuts, Sections, int64[::1])",
    *(Cuts, Sections),
)

_C: Final = [LANGUAGES.index(name) for name in ("c", "cpp")]
_GRAMMARS: Final = [
    LANGUAGES.index(name)
    for name in ("python", "java", "go", "rust", "javascript", "typescript", "tsx")
]


def outline_documents(documents: Documents, without: Sequence[str] = ()) -> Outline:
    """The outline of every document, by its language; languages `without` a grammar by lines."""
    starts, stops = documents.at[:-1].copy(), documents.at[1:].copy()
    is_c = np.isin(documents.language, _C)
    if is_c.all():
        return outline_cpp(documents.data, starts, stops)
    left_out = [LANGUAGES.index(name) for name in without]
    has_grammar = np.isin(documents.language, [one for one in _GRAMMARS if one not in left_out])
    found = {
        k: outline_syntax(LANGUAGES[documents.language[k]], documents.text(k))
        for k in np.flatnonzero(has_grammar).tolist()
    }
    for k, (cuts, _) in found.items():
        has_grammar[k] = bool(cuts)  # what the grammar makes nothing of is cut like any code
    in_c, by_grammar = np.flatnonzero(is_c), np.flatnonzero(has_grammar)
    by_lines = np.flatnonzero(~is_c & ~has_grammar)
    return _merged(
        [
            (in_c, outline_cpp(documents.data, starts[in_c], stops[in_c])),
            (
                by_grammar,
                collect([found[k] for k in by_grammar.tolist()], np.append(starts[by_grammar], 0)),
            ),
            (by_lines, outline_prose(documents.data, documents.at, documents.language, by_lines)),
        ],
        len(documents),
    )


def outline_prose(data: Bytes, at: Int64s, language: Bytes, rows: Int64s | None = None) -> Outline:
    """The outlines of the documents numbered `rows`, of all without it.

    `data` has `kernels.PAD` bytes after the last document; document k is data[at[k]:at[k + 1]].

    >>> text = b"# One\\n\\nFirst. Second.\\n"
    >>> data = np.frombuffer(text + bytes(64), np.uint8)
    >>> found = outline_prose(data, np.array([0, len(text)]), np.ones(1, np.uint8))
    >>> found.cut_at.tolist(), found.cut_level.tolist(), found.name_end.tolist()
    ([7, 14], [2, 3], [5])
    """
    if rows is None:
        rows = np.arange(len(at) - 1)
    size = int((at[rows + 1] - at[rows]).sum())
    # English has a sentence for each 100 bytes or so, Markdown a heading for each 1,000
    most_cuts, most_nodes = 1024 + size // 24, 256 + size // 256
    first = np.empty(len(rows) + 1, np.int64)
    node_first, open_nodes = first.copy(), np.empty(RANKS, np.int64)
    state = np.zeros(STATE, np.int64)
    while True:
        cuts = Cuts(first, np.empty(most_cuts, np.int64), np.empty(most_cuts, np.uint8))
        sections = Sections(node_first, np.empty(NODE * most_nodes, np.int64), open_nodes)
        _outline_lines(data, at, rows, language, cuts, sections, state)
        num_cuts, num_nodes = int(state[CUTS]), int(state[NODES])
        if num_cuts <= most_cuts and num_nodes <= most_nodes:
            break
        most_cuts, most_nodes = max(num_cuts, most_cuts), max(num_nodes, most_nodes)
    nodes = np.ascontiguousarray(sections.nodes[: NODE * num_nodes].reshape(-1, NODE).T)
    return Outline(
        cut_first=cuts.first,
        cut_at=cuts.at[:num_cuts],
        cut_level=cuts.level[:num_cuts],
        node_first=node_first,
        node_kind=np.full(num_nodes, SECTION, np.uint8),
        node_start=nodes[START],
        node_body=nodes[BODY],
        node_end=nodes[END],
        name_start=nodes[NAME],
        name_end=nodes[NAME_END],
        node_parent=nodes[PARENT].astype(np.int32),
    )


def _merged(parts: Sequence[tuple[Int64s, Outline]], count: int) -> Outline:
    """One outline of all, from outlines of some; each with the numbers of its documents."""
    cuts, nodes = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for rows, outline in parts:
        cuts[rows] = np.diff(outline.cut_first)
        nodes[rows] = np.diff(outline.node_first)
    cut_first, node_first = offsets_of(cuts), offsets_of(nodes)
    merged = Outline(
        cut_first=cut_first,
        cut_at=np.empty(cut_first[-1], np.int64),
        cut_level=np.empty(cut_first[-1], np.uint8),
        node_first=node_first,
        node_kind=np.empty(node_first[-1], np.uint8),
        node_start=np.empty(node_first[-1], np.int64),
        node_body=np.empty(node_first[-1], np.int64),
        node_end=np.empty(node_first[-1], np.int64),
        name_start=np.empty(node_first[-1], np.int64),
        name_end=np.empty(node_first[-1], np.int64),
        node_parent=np.empty(node_first[-1], np.int32),
    )
    for rows, outline in parts:
        _place(outline, merged, ("cut_at", "cut_level"), cut_first[rows], outline.cut_first)
        names = ("node_kind", "node_start", "node_body", "node_end", "name_start", "name_end",
                 "node_parent")  # fmt: skip
        _place(outline, merged, names, node_first[rows], outline.node_first)
    return merged


def _place(
    part: Outline, whole: Outline, names: Sequence[str], firsts: Int64s, part_first: Int64s
) -> None:
    """Copy the entries of each document of `part` to where they belong in `whole`."""
    sizes = np.diff(part_first)
    where = np.repeat(firsts - part_first[:-1], sizes) + np.arange(part_first[-1])
    for name in names:
        getattr(whole, name)[where] = getattr(part, name)
