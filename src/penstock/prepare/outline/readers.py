"""Choose the reader for each language, and put what they find together.

In:    documents with their language
Out:   one `Outline` of all of them, in order
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.arrays import Int64s, offsets_of
from penstock.prepare.outline.cpp import outline_cpp
from penstock.prepare.outline.outline import Outline, collect
from penstock.prepare.outline.prose import outline_prose
from penstock.prepare.outline.syntax import outline_syntax
from penstock.records import LANGUAGES, Documents

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
