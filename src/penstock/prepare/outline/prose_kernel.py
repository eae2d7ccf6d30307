"""The kernels of `readers`: outline text line by line.

In:    documents end to end, PAD bytes after the last
Out:   cuts and sections as `readers` defines them
Keeps: counting what does not fit, so that the caller can come back with larger arrays
Never: allocates, reads a line more than a few times, looks behind the end of a document
"""

from typing import Any

import numpy as np

from penstock.prepare.outline.outline import (
    DECLARATION,
    HEADING,
    MEMBER,
    PARAGRAPH,
    SENTENCE,
    STATEMENT,
)
from penstock.prepare.outline.prose_layout import (
    BODY,
    CLOSERS,
    CUTS,
    END,
    ENDINGS,
    LAST,
    LONG,
    NAME,
    NAME_END,
    NODE,
    NODES,
    PARENT,
    RANKS,
    SHORT_FORMS,
    START,
    STOPS,
)
from penstock.records import LANGUAGES
from penstock.simd import load64, next_index, njit, peek

_TEXT, _MARKDOWN = LANGUAGES.index("text"), LANGUAGES.index("markdown")


@njit
def _is_space(c: Any) -> Any:
    """Space, tab, vertical tab, form feed, carriage return."""
    return c == 32 or c == 9 or (c >= 11 and c <= 13)


@njit
def is_letter(c: Any) -> Any:
    return (c | 32) >= 97 and (c | 32) <= 122


@njit
def _is_digit(c: Any) -> Any:
    return c >= 48 and c <= 57


@njit
def skip_space(data: Any, i: Any, stop: Any) -> Any:
    while i < stop and _is_space(peek(data, i)):
        i += 1
    return i


@njit
def trim(data: Any, start: Any, stop: Any) -> Any:
    while stop > start and _is_space(peek(data, stop - 1)):
        stop -= 1
    return stop


@njit
def begins_with(data: Any, i: Any, stop: Any, word: Any, size: Any) -> Any:
    """Whether data[i:stop] begins with the `size` bytes of a little-endian word."""
    shift = np.uint64(64 - 8 * size)
    return i + size <= stop and (load64(data, i) << shift) == (word << shift)


@njit
def word_at(data: Any, start: Any, stop: Any) -> Any:
    """The first eight letters and underscores from `start`, as a little-endian word."""
    word = np.uint64(0)
    i = start
    while i < stop and i < start + 8:
        c = peek(data, i)
        if not (is_letter(c) or c == 95):
            break
        word |= np.uint64(c) << np.uint64(8 * (i - start))
        i += 1
    return word


@njit
def _run(data: Any, i: Any, end: Any) -> Any:
    """How many bytes equal to the first stand at `i`."""
    start = i
    while i < end and peek(data, i) == peek(data, start):
        i += 1
    return i - start


@njit
def _is_one_of(word: Any, table: Any) -> Any:
    for other in table:
        if word == np.uint64(other):
            return True
    return False


@njit
def _cut(at: Any, level: Any, data: Any, stop: Any, cuts: Any, state: Any) -> None:
    if at >= stop or (peek(data, at) & 0xC0) == 0x80:
        return
    n = state[CUTS]
    if at == state[LAST] and n <= len(cuts.at) and n > 0 and cuts.at[n - 1] == at:
        cuts.level[n - 1] = min(cuts.level[n - 1], np.uint8(level))
    elif at > state[LAST]:
        if n < len(cuts.at):
            cuts.at[n] = at
            cuts.level[n] = level
        state[CUTS] = n + 1
        state[LAST] = at


@njit
def _begins_sentence(data: Any, i: Any, stop: Any) -> Any:
    """A capital letter, a digit, an opening quote or bracket, or a letter without case."""
    if i >= stop:
        return False
    c = peek(data, i)
    d = peek(data, i + 1) if i + 1 < stop else np.uint8(0)
    if c < 0x80:
        if (c >= 65 and c <= 90) or _is_digit(c):
            return True
        return c == 34 or c == 39 or c == 40 or c == 91 or c == 42 or c == 95 or c == 96
    # small letters, in two bytes: Latin-1, Greek, Cyrillic
    is_small = (c == 0xC3 and d > 0x9E) or (c == 0xCE and d > 0xAB) or (c == 0xD0 and d > 0xAF)
    return not is_small and c != 0xCF and c != 0xD1


@njit
def _is_short_form(data: Any, line: Any, dot: Any) -> Any:
    """Whether the full stop belongs to an initial, a title, an item's number or `e.g.`."""
    i = dot
    word = np.uint64(0)
    while i > line and dot - i < 5 and is_letter(peek(data, i - 1)):
        i -= 1
        word = word << np.uint64(8) | np.uint64(peek(data, i) | 32)
    size = dot - i
    if size == 0:
        while i > line and _is_digit(peek(data, i - 1)):
            i -= 1
        return i == line and i < dot
    if size == 1:
        return peek(data, i) < 97 or (i > line and peek(data, i - 1) == 46)
    return size <= 4 and _is_one_of(word, SHORT_FORMS)


@njit
def _skip_closers(data: Any, i: Any, stop: Any) -> Any:
    """Past what may stand between a sentence's last mark and the space: more marks, quotes."""
    while i < stop:
        c = peek(data, i)
        is_mark = c == 33 or c == 34 or c == 39 or c == 41 or c == 42 or c == 46 or c == 63
        if is_mark or c == 93 or c == 95 or c == 96:
            i += 1
        elif c == 0xC2 and i + 1 < stop and peek(data, i + 1) == 0xBB:
            i += 2
        elif c >= 0xE0 and i + 3 <= stop:
            mark = load64(data, i) & np.uint64(0xFFFFFF)
            if not (_is_one_of(mark, CLOSERS) or _is_one_of(mark, STOPS)):
                break
            i += 3
        else:
            break
    return i


@njit
def _sentences(data: Any, start: Any, end: Any, stop: Any, cuts: Any, state: Any) -> Any:
    """Cut between the sentences of a line; whether the line ends with one."""
    i = start
    while i < end:
        c = peek(data, i)
        if c == 46 or c == 33 or c == 63:
            after = _skip_closers(data, i + 1, end)
            is_short = c == 46 and after == i + 1 and _is_short_form(data, start, i)
            if after >= end:
                return not is_short
            if _is_space(peek(data, after)):
                after = skip_space(data, after, end)
                if not is_short and _begins_sentence(data, after, end):
                    _cut(after, SENTENCE, data, stop, cuts, state)
            i = after
        elif (
            c >= 0xE0 and i + 3 <= end and _is_one_of(load64(data, i) & np.uint64(0xFFFFFF), STOPS)
        ):
            after = _skip_closers(data, i + 3, end)
            while after < end and (
                _is_space(peek(data, after))
                or begins_with(data, after, end, np.uint64(0x8080E3), 3)
            ):
                after += 1 if peek(data, after) < 0x80 else 3
            if after >= end:
                return True
            _cut(after, SENTENCE, data, stop, cuts, state)
            i = after
        else:
            i += 1
    return False


@njit
def heading_at(data: Any, i: Any, end: Any) -> Any:
    """1 to 6 for `# …` to `###### …`, else 0."""
    rank = _run(data, i, end) if peek(data, i) == 35 else 0
    return rank if rank <= 6 and (i + rank == end or _is_space(peek(data, i + rank))) else 0


@njit
def fence_at(data: Any, i: Any, end: Any) -> Any:
    """How many ` or ~ open a fenced block here, or 0."""
    c = peek(data, i)
    if c != 96 and c != 126:
        return 0
    size = _run(data, i, end)
    has_more = c == 96 and next_index(data, i + size, end, 96) < end  # `code` in a line
    return 0 if size < 3 or has_more else size


@njit
def _item_size(data: Any, i: Any, end: Any) -> Any:
    """How many bytes the mark of a list's item takes with its space, or 0."""
    size = 0
    while size < 9 and i + size < end and _is_digit(peek(data, i + size)):
        size += 1
    c = peek(data, i + size)
    if not (c == 46 or c == 41 if size > 0 else c == 45 or c == 42 or c == 43) or i + size >= end:
        return 0
    size += 1
    if i + size == end:
        return size
    return size + 1 if _is_space(peek(data, i + size)) else 0


@njit
def _rule_of(data: Any, i: Any, end: Any) -> Any:
    """The mark of which the whole line consists, or 0."""
    c = np.int64(peek(data, i))
    is_mark = c > 32 and c < 127 and not is_letter(c) and not _is_digit(c)
    return c if is_mark and _run(data, i, end) == end - i else 0


@njit
def _front_matter_end(data: Any, start: Any, stop: Any) -> Any:
    """Where the YAML between two lines of `---` at the top ends, or `start`."""
    i = start
    while i < stop:
        end = next_index(data, i, stop, 10)
        is_rule = trim(data, i, end) - i == 3 and begins_with(data, i, end, np.uint64(0x2D2D2D), 3)
        if i == start and not is_rule:
            break
        if i > start and is_rule:
            return min(end + 1, stop)
        i = end + 1
    return start


@njit
def _open_section(
    rank: Any, start: Any, body: Any, name: Any, name_end: Any, first_node: Any, sections: Any,
    state: Any,
) -> None:  # fmt: skip
    n, nodes, opened = state[NODES], sections.nodes, sections.open
    _close_sections(rank, start, sections)
    if NODE * n + NODE <= len(nodes):
        nodes[NODE * n + START], nodes[NODE * n + BODY] = start, body
        nodes[NODE * n + NAME], nodes[NODE * n + NAME_END] = name, name_end
        nodes[NODE * n + PARENT] = -1
        for other in range(1, rank):
            if opened[other] >= 0:
                nodes[NODE * n + PARENT] = opened[other] - first_node
    opened[rank] = n
    state[NODES] = n + 1


@njit
def _close_sections(rank: Any, at: Any, sections: Any) -> None:
    nodes, opened = sections.nodes, sections.open
    for other in range(rank, RANKS):
        if opened[other] >= 0 and NODE * opened[other] + NODE <= len(nodes):
            nodes[NODE * opened[other] + END] = at
        opened[other] = -1


@njit
def _outline_text(
    data: Any, start: Any, stop: Any, is_markdown: Any, cuts: Any, sections: Any, state: Any
) -> None:
    first_node = state[NODES]
    sections.open[:] = -1
    front = _front_matter_end(data, start, stop) if is_markdown else start
    fence: Any = np.int64(0)  # the byte that opened a fenced block, 0 outside
    fence_size: Any = np.int64(0)
    fence_lines = np.int64(0)
    has_gap = has_ended = was_long = False  # of the line before: a gap, a sentence's end, its size
    title = np.int64(-1)  # where that line begins if it may be a title, -2 if it is text
    title_text = title_end = title_cuts = np.int64(0)
    i = start
    while i < stop:
        line = begin = text = i
        end = next_index(data, line, stop, 10)
        i = min(end + 1, stop)
        if line == start and begins_with(data, line, stop, np.uint64(0xBFBBEF), 3):
            text += 3
        while text < end and _is_space(peek(data, text)):
            text += 1
            if peek(data, text - 1) == 12:
                has_gap = True
                begin = text  # the next chunk begins after a form feed
        last = trim(data, text, end)
        if text == last or line < front:
            has_gap = text == last or i >= front
            title = np.int64(-1)
            continue
        c = np.int64(peek(data, text))
        if fence != 0:
            size = _run(data, text, last)
            if c == fence and size >= fence_size and size == last - text:
                fence = np.int64(0)
                has_gap = True
                continue
            if fence_lines > 0:
                level = STATEMENT + 1 if has_gap else STATEMENT + 2
                _cut(begin, level, data, stop, cuts, state)
            fence_lines += 1
            has_gap = False
            continue
        is_near = text - line < 4  # further in, it is code or part of an item
        rank = heading_at(data, text, last) if is_markdown and is_near else 0
        fence_size = fence_at(data, text, last) if is_markdown else 0
        rule = _rule_of(data, text, last)
        if last - text < (2 if is_markdown else 3) or (is_markdown and rule != 61 and rule != 45):
            rule = 0
        if rank > 0:
            _cut(begin, HEADING, data, stop, cuts, state)
            name = skip_space(data, text + rank, last)
            name_end = last
            while name_end > name and peek(data, name_end - 1) == 35:
                name_end -= 1
            if name_end > name and not _is_space(peek(data, name_end - 1)):
                name_end = last  # `# C#` is a name, `# C #` closes
            name_end = trim(data, name, name_end)
            _open_section(rank, begin, i, name, name_end, first_node, sections, state)
        elif fence_size > 0:
            level = PARAGRAPH if has_gap else SENTENCE
            _cut(begin, level, data, stop, cuts, state)
            fence, fence_lines = c, np.int64(0)
        elif rule > 0 and title >= 0:
            state[CUTS] = title_cuts
            state[LAST] = min(state[LAST], max(title - 1, start))
            level = HEADING if is_markdown else PARAGRAPH
            _cut(title, level, data, stop, cuts, state)
            if is_markdown:
                _open_section(
                    1 if rule == 61 else 2, title, i, title_text, title_end, first_node, sections,
                    state,
                )  # fmt: skip
        else:
            item = _item_size(data, text, last)
            is_title = item == 0 and rule == 0 and c != 62 and c != 124 and is_near
            is_title = is_title and (has_gap or title == -1)
            title = begin if is_title else np.int64(-2)
            title_text, title_end, title_cuts = text, last, state[CUTS]
            if has_gap or (was_long and not is_markdown):
                _cut(begin, PARAGRAPH, data, stop, cuts, state)
            elif item > 0 or (has_ended and _begins_sentence(data, text, last)):
                _cut(begin, SENTENCE, data, stop, cuts, state)
            has_ended = _sentences(data, text + item, last, stop, cuts, state)
            was_long = last - line > LONG
            has_gap = False
            continue
        has_gap = has_ended = was_long = False
        title = np.int64(-1)
    _close_sections(1, stop, sections)


@njit
def _closes(data: Any, i: Any, end: Any) -> Any:
    """Whether a line of code ends or goes on with what stands before it."""
    c = peek(data, i)
    if c == 125 or c == 93 or c == 41:
        return True
    if c == 60:
        return i + 1 < end and peek(data, i + 1) == 47
    return _is_one_of(word_at(data, i, end), ENDINGS)


@njit
def _outline_code(data: Any, start: Any, stop: Any, cuts: Any, state: Any) -> None:
    has_gap = was_inside = False
    i = start
    while i < stop:
        line = i
        end = next_index(data, line, stop, 10)
        i = min(end + 1, stop)
        text = skip_space(data, line, end)
        if text == end:
            has_gap = True
            continue
        closes = _closes(data, text, end)
        if not closes:
            if has_gap:
                level = DECLARATION if text == line else MEMBER
                _cut(line, level, data, stop, cuts, state)
            elif was_inside and text == line:
                _cut(line, STATEMENT, data, stop, cuts, state)
        was_inside = closes or text > line
        has_gap = False


@njit
def outline_lines(
    data: Any, at: Any, rows: Any, language: Any, cuts: Any, sections: Any, state: Any
) -> None:
    state[:] = 0
    for k in range(len(rows)):
        start, stop = at[rows[k]], at[rows[k] + 1]
        cuts.first[k] = state[CUTS]
        sections.first[k] = state[NODES]
        state[LAST] = start
        kind = language[rows[k]]
        if kind == _TEXT or kind == _MARKDOWN:
            _outline_text(data, start, stop, kind == _MARKDOWN, cuts, sections, state)
        else:
            _outline_code(data, start, stop, cuts, state)
    cuts.first[len(rows)] = state[CUTS]
    sections.first[len(rows)] = state[NODES]
