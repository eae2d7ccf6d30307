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

from penstock.arrays import Bytes, Int64s
from penstock.kernels import Kernel
from penstock.prepare.outline import cpp_layout as layout
from penstock.prepare.outline.cpp_layout import Lexicon, State
from penstock.prepare.outline.outline import Outline

KEYWORDS: Final = {
    layout.K_NAMESPACE: ("namespace",),
    layout.K_CLASS: ("class", "struct", "union"),
    layout.K_ENUM: ("enum",),
    layout.K_EXTERN: ("extern",),
    layout.K_TEMPLATE: ("template",),
    layout.K_OPERATOR: ("operator",),
    layout.K_BLOCK: ("do", "try"),
    layout.K_CATCH: ("catch",),
    layout.K_ACCESS: ("public", "private", "protected", "signals"),
    layout.K_AFTER: ("const", "noexcept", "override", "mutable", "volatile", "throw"),
    layout.K_ATTRIBUTE: (
        *("__attribute__", "__attribute", "alignas", "decltype", "__declspec", "explicit"),
        *("_Alignas", "__asm__", "__asm", "asm"),
    ),
    layout.K_RETURN: ("return", "co_return"),
    layout.K_REQUIRES: ("requires",),
    layout.K_CONTROL: ("if", "for", "switch"),
    layout.K_WHILE: ("while",),
    layout.K_ELSE: ("else",),
    layout.K_FINAL: ("final",),
    layout.K_EXPORT: ("export",),
    layout.K_SIGN: ("and", "or", "not"),
}
"""Words that say what a brace opens."""

MAX_CUTS: Final = 1 << 24
MAX_NODES: Final = 1 << 20
MAX_FRAMES: Final = 1 << 17

_outline_cpp = Kernel(
    "penstock.prepare.outline.cpp_kernel",
    "outline_cpp",
    "int64(uint8[::1], int64[::1], int64[::1], int64, int64, Lexicon, State, Outline)",
    *(Lexicon, State, Outline),
)


def _classes() -> Bytes:
    table = np.full(256, layout.OTHER, np.uint8)
    table[list(b" \t\r\v\f")] = layout.SPACE
    table[0x0A] = layout.NEWLINE
    table[list(range(0x61, 0x7B)) + list(range(0x41, 0x5B)) + [0x5F, 0x24]] = layout.WORD
    table[0x80:] = layout.WORD
    table[0x30:0x3A] = layout.DIGIT
    other = table.copy()
    other[0x0D] = layout.NEWLINE
    return np.concatenate([table, other])


def _keyword_table() -> tuple[Any, Bytes]:
    slots = layout.KEYWORD_SLOTS
    words, numbers = np.zeros(slots, np.uint64), np.full(slots, layout.K_NONE, np.uint8)
    for number, group in KEYWORDS.items():
        for text in group:
            word = int.from_bytes(text.encode()[:8], "little") ^ (len(text) << 56)
            slot = (word * 0x9E3779B97F4A7C15 % 2**64) >> 56
            while numbers[slot]:
                slot = (slot + 1) % slots
            words[slot], numbers[slot] = word, number
    return words, numbers


_LEXICON = Lexicon(_classes(), *_keyword_table())


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
    state = State(
        frames=np.zeros(min(1 << 10, max_frames) * layout.FRAME, np.int64),
        conditions=np.zeros(layout.MAX_CONDITIONS * layout.CONDITION, np.int64),
        counts=np.zeros(layout.COUNTS, np.int64),
        head=np.zeros(layout.HEAD, np.int64),
        pending=np.zeros(layout.PENDING, np.int64),
    )
    counts = state.counts
    counts[layout.MOST_CUTS], counts[layout.MOST_NODES] = max_cuts, max_nodes
    done = 0
    while True:
        done = _outline_cpp(data, starts, stops, done, count, _LEXICON, state, outline)
        if done == count:
            break
        # something was too small: this document begins again with four times as much of it
        full = counts[layout.FULL]
        used_cuts, used_nodes = int(counts[layout.CUTS]), int(counts[layout.NODES])
        cuts, nodes = len(outline.cut_at) - used_cuts, len(outline.node_kind) - used_nodes
        frames = len(state.frames) // layout.FRAME
        if full == layout.FULL_CUTS and cuts < max_cuts:
            cuts = min(4 * cuts + 1024, max_cuts)
        elif full == layout.FULL_NODES and nodes < max_nodes:
            nodes = min(4 * nodes + 256, max_nodes)
        elif full == layout.FULL_FRAMES and frames < max_frames:
            frames = min(4 * frames, max_frames)
            state = state._replace(frames=np.zeros(frames * layout.FRAME, np.int64))
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
    for name in ("cut_at", "cut_level"):
        getattr(to, name)[:cuts] = getattr(outline, name)[:cuts]
    for name in ("node_kind", "node_start", "node_body", "node_end", "name_start", "name_end",
                 "node_parent"):  # fmt: skip
        getattr(to, name)[:nodes] = getattr(outline, name)[:nodes]
    return to._replace(cut_first=outline.cut_first, node_first=outline.node_first)
