"""Outline prose, Markdown and code of no known grammar, by lines.

In:    documents, and which of them
Out:   `Outline` of those: headings, paragraphs, sentences; SECTION nodes of Markdown
Keeps: one pass; a cut after white space, so that the next chunk begins with text or its indent
Never: cuts inside a UTF-8 sequence

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

from typing import Final

import numpy as np

from penstock.arrays import Bytes, Int64s
from penstock.kernels import Kernel
from penstock.prepare.outline.outline import SECTION, Outline

LONG: Final = 200
"""A line of more bytes than this is a paragraph."""

CUTS, NODES, LAST = range(3)
"""What the kernel's state holds: how many cuts and nodes so far, where the last cut is."""


def _packed(words: str) -> tuple[int, ...]:
    """Words as kernels compare them: little-endian numbers."""
    return tuple(int.from_bytes(word.encode(), "little") for word in words.split())


SHORT_FORMS: Final = _packed("mr mrs ms dr st jr sr vs cf fig eq vol prof gen rep sen pp")
"""Words of two to four letters whose full stop ends no sentence."""

STOPS: Final = _packed("。 ！ ？ ｡ ।")
"""Full stops that need no space after them, three bytes each."""

CLOSERS: Final = _packed("’ ” 」 』 ） 】 》 〉")
"""What may stand between the end of a sentence and the space, three bytes each."""

ENDINGS: Final = _packed("end else elif elsif elseif fi done esac then")
"""What begins a line of code that belongs to the lines above."""

_outline_lines = Kernel(
    "penstock.prepare.outline.prose_kernel",
    "outline_lines",
    "void(uint8[::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64[::1], uint8[::1], "
    "int64[::1], int64[::1], int64[::1], int64[::1])",
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
    cut_first = np.empty(len(rows) + 1, np.int64)
    node_first = np.empty(len(rows) + 1, np.int64)
    state = np.zeros(3, np.int64)
    open_nodes = np.empty(7, np.int64)
    while True:
        cut_at = np.empty(most_cuts, np.int64)
        cut_level = np.empty(most_cuts, np.uint8)
        nodes = np.empty(6 * most_nodes, np.int64)
        _outline_lines(
            data, at, rows, language, cut_first, cut_at, cut_level, node_first, nodes, open_nodes,
            state,
        )  # fmt: skip
        num_cuts, num_nodes = int(state[CUTS]), int(state[NODES])
        if num_cuts <= most_cuts and num_nodes <= most_nodes:
            break
        most_cuts, most_nodes = max(num_cuts, most_cuts), max(num_nodes, most_nodes)
    columns = np.ascontiguousarray(nodes[: 6 * num_nodes].reshape(-1, 6).T)
    node_start, node_body, node_end, name_start, name_end, node_parent = columns
    return Outline(
        cut_first=cut_first,
        cut_at=cut_at[:num_cuts],
        cut_level=cut_level[:num_cuts],
        node_first=node_first,
        node_kind=np.full(num_nodes, SECTION, np.uint8),
        node_start=node_start,
        node_body=node_body,
        node_end=node_end,
        name_start=name_start,
        name_end=name_end,
        node_parent=node_parent.astype(np.int32),
    )
