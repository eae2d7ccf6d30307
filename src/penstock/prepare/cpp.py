"""Where C and C++ may be cut: a one-pass lexer, never regular expressions on lines.

In:    documents end to end
Out:   their `Outline`
Keeps: comments, line continuations, raw strings, digit separators, digraphs and directives are
       read as a compiler reads them; at #else the braces of #if are restored
Never: parses, expands macros, takes more than a few steps for a byte, fails

What cannot be understood costs structure, not text. Where braces do not match, indentation decides.
A document with more cuts, nodes or open braces than MAX_CUTS, MAX_NODES, MAX_FRAMES has none: it is
cut by lines.
"""

from typing import Any, Final

import numpy as np

from penstock.kernels import Kernel
from penstock.prepare.outline import Outline
from penstock.records import Bytes, Int64s

KEYWORDS: Final = (
    (), ("namespace",), ("class", "struct", "union"), ("enum",), ("extern",), ("template",),
    ("operator",), ("do", "try"), ("catch",), ("public", "private", "protected", "signals"),
    ("const", "noexcept", "override", "mutable", "volatile", "throw"),
    ("__attribute__", "__attribute", "alignas", "decltype", "__declspec", "explicit", "_Alignas",
     "__asm__", "__asm", "asm"),
    ("return", "co_return"), ("requires",), ("if", "for", "switch"), ("while",), ("else",),
    ("final",), ("export",), ("and", "or", "not"),
)  # fmt: skip
"""Words that say what a brace opens; the place of each group is its number in the kernel."""

MAX_CUTS: Final = 1 << 24
MAX_NODES: Final = 1 << 20
MAX_FRAMES: Final = 1 << 17
_SLOTS = 256
_HEAD_WORDS = 15
_FRAME_WORDS = 8 + _HEAD_WORDS
_CONDITION_WORDS = 256 * (5 + 2 * _HEAD_WORDS)
_COUNTS, _FULL, _MAX_CUTS, _MAX_NODES = 19, 6, 13, 14
_FULL_CUTS, _FULL_NODES, _FULL_FRAMES = 1, 2, 3

_outline_cpp = Kernel(
    "penstock.prepare.cpp_kernel",
    "outline_cpp",
    "int64(uint8[::1], int64[::1], int64[::1], int64, int64, uint8[::1], uint64[::1], uint8[::1],"
    " int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " uint8[::1], int64[::1], uint8[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1], int32[::1])",
)


def _classes() -> Bytes:
    """Of each byte: 0 other, 1 blank, 2 newline, 3 part of a word, 4 digit.

    Twice: the second is for texts in which a carriage return ends a line.
    """
    table = np.zeros(256, np.uint8)
    table[list(b" \t\r\v\f")] = 1
    table[0x0A] = 2
    table[list(range(0x61, 0x7B)) + list(range(0x41, 0x5B)) + [0x5F, 0x24]] = 3
    table[0x80:] = 3
    table[0x30:0x3A] = 4
    other = table.copy()
    other[0x0D] = 2
    return np.concatenate([table, other])


def _keyword_table() -> tuple[Any, Bytes]:
    words, numbers = np.zeros(_SLOTS, np.uint64), np.zeros(_SLOTS, np.uint8)
    for number, group in enumerate(KEYWORDS):
        for text in group:
            word = int.from_bytes(text.encode()[:8], "little") ^ (len(text) << 56)
            slot = (word * 0x9E3779B97F4A7C15 % 2**64) >> 56
            while numbers[slot]:
                slot = (slot + 1) % _SLOTS
            words[slot], numbers[slot] = word, number
    return words, numbers


_CLASSES = _classes()
_WORDS, _NUMBERS = _keyword_table()


def outline_cpp(
    data: Bytes,
    starts: Int64s,
    stops: Int64s,
    *,
    max_cuts: int = MAX_CUTS,
    max_nodes: int = MAX_NODES,
    max_frames: int = MAX_FRAMES,
) -> Outline:
    """The outline of the documents data[starts[k]:stops[k]], PAD bytes after the last."""
    count, size = len(starts), int((stops - starts).sum())
    outline = _room(count, max(1024, size // 16), max(256, size // 128))
    counts = np.zeros(_COUNTS, np.int64)
    counts[_MAX_CUTS], counts[_MAX_NODES] = max_cuts, max_nodes
    conditions = np.zeros(_CONDITION_WORDS, np.int64)
    stack = np.zeros(min(1 << 10, max_frames) * _FRAME_WORDS, np.int64)
    head, pending = np.zeros(_HEAD_WORDS, np.int64), np.zeros(4, np.int64)
    done = 0
    while True:
        done = _outline_cpp(
            data, starts, stops, done, count, _CLASSES, _WORDS, _NUMBERS, stack, conditions, counts,
            head, pending, outline.cut_first, outline.cut_at, outline.cut_level,
            outline.node_first, outline.node_kind, outline.node_start, outline.node_body,
            outline.node_end, outline.name_start, outline.name_end, outline.node_parent,
        )  # fmt: skip
        if done == count:
            break
        # something was too small: this document begins again with four times as much of it
        full, used_cuts, used_nodes = counts[_FULL], int(counts[0]), int(counts[1])
        cuts, nodes = len(outline.cut_at) - used_cuts, len(outline.node_kind) - used_nodes
        frames = len(stack) // _FRAME_WORDS
        if full == _FULL_CUTS and cuts < max_cuts:
            cuts = min(4 * cuts + 1024, max_cuts)
        elif full == _FULL_NODES and nodes < max_nodes:
            nodes = min(4 * nodes + 256, max_nodes)
        elif full == _FULL_FRAMES and frames < max_frames:
            stack = np.zeros(min(4 * frames, max_frames) * _FRAME_WORDS, np.int64)
            continue
        else:
            done += 1  # nothing is known of it: it is cut by lines
            outline.cut_first[done], outline.node_first[done] = used_cuts, used_nodes
            continue
        larger = _room(count, used_cuts + cuts, used_nodes + nodes)
        outline = _copied(outline, larger, used_cuts, used_nodes)
    cuts, nodes = int(outline.cut_first[count]), int(outline.node_first[count])
    return _copied(outline, _room(count, cuts, nodes), cuts, nodes)


def _room(count: int, cuts: int, nodes: int) -> Outline:
    return Outline(
        cut_first=np.zeros(count + 1, np.int64),
        cut_at=np.empty(cuts, np.int64),
        cut_level=np.empty(cuts, np.uint8),
        node_first=np.zeros(count + 1, np.int64),
        node_kind=np.empty(nodes, np.uint8),
        node_start=np.empty(nodes, np.int64),
        node_body=np.empty(nodes, np.int64),
        node_end=np.empty(nodes, np.int64),
        name_start=np.empty(nodes, np.int64),
        name_end=np.empty(nodes, np.int64),
        node_parent=np.empty(nodes, np.int32),
    )


def _copied(outline: Outline, to: Outline, cuts: int, nodes: int) -> Outline:
    """The first cuts and nodes, in another outline."""
    to.cut_first, to.node_first = outline.cut_first, outline.node_first
    for name in ("cut_at", "cut_level"):
        getattr(to, name)[:cuts] = getattr(outline, name)[:cuts]
    for name in ("node_kind", "node_start", "node_body", "node_end", "name_start", "name_end",
                 "node_parent"):  # fmt: skip
        getattr(to, name)[:nodes] = getattr(outline, name)[:nodes]
    return to
