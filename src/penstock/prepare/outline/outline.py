"""Where documents may be cut, and what stands where in them: the same for every language.

In:    what a language's reader found
Out:   `Outline`: cuts with their level, and nodes (namespaces, classes, functions, headings)
Keeps: positions count bytes of the whole buffer of `Documents`, ascending within a document

A cut is a position: one chunk ends before it, the next begins at it. The lower its level, the less
it breaks. A node of kind FUNCTION that fits the budget is never cut, whatever lies in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from penstock.arrays import Bytes, Int32s, Int64s, offsets_of

(
    FILE,
    DECLARATION,
    MEMBER,
    STATEMENT,
) = range(4)
MAX_DEPTH: Final = 24
"""Statements deeper than this are all alike."""

ELEMENT: Final = STATEMENT + MAX_DEPTH
EDGE: Final = ELEMENT + MAX_DEPTH
LINE: Final = EDGE + 1
SPACE: Final = LINE + 1
INSIDE: Final = SPACE + 1

# Prose has levels of its own on the same scale: a heading is as good a place as a declaration.
HEADING: Final = DECLARATION
PARAGRAPH: Final = MEMBER
SENTENCE: Final = STATEMENT


def level_name(level: int) -> str:
    """What a level is called in a shard.

    >>> [level_name(n) for n in (FILE, DECLARATION, STATEMENT + 3, ELEMENT, LINE, INSIDE)]
    ['file', 'declaration', 'statement', 'element', 'line', 'inside']
    """
    if level < STATEMENT:
        return ("file", "declaration", "member")[level]
    if level < ELEMENT:
        return "statement"
    if level < EDGE:
        return "element"
    return ("edge", "line", "space", "inside")[level - EDGE]


LEVEL_NAMES: Final = tuple(level_name(level) for level in range(INSIDE + 1))

(
    NAMESPACE,
    CLASS,
    ENUM,
    FUNCTION,
    SECTION,
) = range(1, 6)
KIND_NAMES: Final = ("", "namespace", "class", "enum", "function", "section")


class Outline(NamedTuple):
    """The outlines of some documents, end to end: document k has cuts cut_first[k:k + 2], …"""

    cut_first: Int64s
    cut_at: Int64s
    cut_level: Bytes
    node_first: Int64s
    node_kind: Bytes
    node_start: Int64s
    """Where what belongs to it begins: its head, `template <…>` and decorators included."""
    node_body: Int64s
    """Where its body begins: what starts from here to `node_end` has it as its scope."""
    node_end: Int64s
    name_start: Int64s
    name_end: Int64s
    node_parent: Int32s
    """The node around it, counted from the document's first; -1 for none."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A place to cut, for readers that are not kernels; `at` counts from the document's start."""

    at: int
    level: int


@dataclass(frozen=True, slots=True)
class Node:
    """A namespace, class, function or section; positions count from the document's start."""

    kind: int
    start: int
    body: int
    end: int
    name_start: int
    name_end: int
    parent: int = -1


def collect(found: Sequence[tuple[Sequence[Cut], Sequence[Node]]], at: Int64s) -> Outline:
    """One outline of what was found in each document; `at` says where the documents begin."""
    cut_first = offsets_of([len(cuts) for cuts, _ in found])
    node_first = offsets_of([len(nodes) for _, nodes in found])
    cuts = [(cut.at + int(at[k]), cut.level) for k in range(len(found)) for cut in found[k][0]]
    nodes = [
        (n.kind, n.start + base, n.body + base, n.end + base, n.name_start + base,
         n.name_end + base, n.parent)
        for k, base in enumerate(at[:-1].tolist())
        for n in found[k][1]
    ]  # fmt: skip
    table = np.array(nodes, np.int64).reshape(-1, 7)
    places = np.array(cuts, np.int64).reshape(-1, 2)
    return Outline(
        cut_first=cut_first,
        cut_at=np.ascontiguousarray(places[:, 0]),
        cut_level=places[:, 1].astype(np.uint8),
        node_first=node_first,
        node_kind=table[:, 0].astype(np.uint8),
        node_start=np.ascontiguousarray(table[:, 1]),
        node_body=np.ascontiguousarray(table[:, 2]),
        node_end=np.ascontiguousarray(table[:, 3]),
        name_start=np.ascontiguousarray(table[:, 4]),
        name_end=np.ascontiguousarray(table[:, 5]),
        node_parent=table[:, 6].astype(np.int32),
    )
