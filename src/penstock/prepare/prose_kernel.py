"""The kernels of `prose` and `languages`: outline text line by line, guess what a text is.

In:    documents end to end, PAD bytes after the last
Out:   cuts and sections as `prose` defines them; numbers in LANGUAGES
Keeps: counting what does not fit, so that the caller can come back with larger arrays
Never: allocates, reads a line more than a few times
"""

from typing import Any

import numpy as np

from penstock.prepare.languages import COLUMNS, COMMENTS, ENDS, GAPS, LINES, LINKS, MARKS, SIZE
from penstock.prepare.outline import DECLARATION, HEADING, MEMBER, PARAGRAPH, SENTENCE, STATEMENT
from penstock.prepare.prose import CLOSERS, CUTS, ENDINGS, LAST, LONG, NODES, SHORT_FORMS, STOPS
from penstock.records import LANGUAGES
from penstock.simd import load64, next_index, njit, peek

(
    _TEXT, _MARKDOWN, _C, _CPP, _PYTHON, _JAVA, _GO, _RUST, _JAVASCRIPT, _TYPESCRIPT, _TSX, _OTHER,
) = range(len(LANGUAGES))  # fmt: skip


@njit
def _is_space(c: Any) -> Any:
    """Space, tab, vertical tab, form feed, carriage return."""
    return c == 32 or c == 9 or (c >= 11 and c <= 13)


@njit
def _is_letter(c: Any) -> Any:
    return (c | 32) >= 97 and (c | 32) <= 122


@njit
def _is_digit(c: Any) -> Any:
    return c >= 48 and c <= 57


@njit
def _skip_space(data: Any, i: Any, stop: Any) -> Any:
    while i < stop and _is_space(peek(data, i)):
        i += 1
    return i


@njit
def _trim(data: Any, start: Any, stop: Any) -> Any:
    while stop > start and _is_space(peek(data, stop - 1)):
        stop -= 1
    return stop


@njit
def _begins_with(data: Any, i: Any, word: Any, size: Any) -> Any:
    """Whether data[i:] begins with the `size` bytes of a little-endian word."""
    return (load64(data, i) << np.uint64(64 - 8 * size)) == (word << np.uint64(64 - 8 * size))


@njit
def _word(data: Any, start: Any, stop: Any) -> Any:
    """The first eight letters and underscores from `start`, as a little-endian word."""
    word = np.uint64(0)
    i = start
    while i < stop and i < start + 8:
        c = peek(data, i)
        if not (_is_letter(c) or c == 95):
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
def _cut(
    at: Any, level: Any, data: Any, stop: Any, cut_at: Any, cut_level: Any, state: Any
) -> None:
    if at >= stop or (peek(data, at) & 0xC0) == 0x80:
        return
    n = state[CUTS]
    if at == state[LAST] and n <= len(cut_at) and n > 0 and cut_at[n - 1] == at:
        cut_level[n - 1] = min(cut_level[n - 1], np.uint8(level))
    elif at > state[LAST]:
        if n < len(cut_at):
            cut_at[n] = at
            cut_level[n] = level
        state[CUTS] = n + 1
        state[LAST] = at


@njit
def _begins_sentence(data: Any, i: Any) -> Any:
    """A capital letter, a digit, an opening quote or bracket, or a letter without case."""
    c = peek(data, i)
    d = peek(data, i + 1)
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
    while i > line and dot - i < 5 and _is_letter(peek(data, i - 1)):
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
        elif c == 0xC2 and peek(data, i + 1) == 0xBB:
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
def _sentences(
    data: Any, start: Any, end: Any, stop: Any, cut_at: Any, cut_level: Any, state: Any
) -> Any:
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
                after = _skip_space(data, after, end)
                if not is_short and _begins_sentence(data, after):
                    _cut(after, SENTENCE, data, stop, cut_at, cut_level, state)
            i = after
        elif (
            c >= 0xE0 and i + 3 <= end and _is_one_of(load64(data, i) & np.uint64(0xFFFFFF), STOPS)
        ):
            after = _skip_closers(data, i + 3, end)
            while after < end and (
                _is_space(peek(data, after)) or _begins_with(data, after, np.uint64(0x8080E3), 3)
            ):
                after += 1 if peek(data, after) < 0x80 else 3
            if after >= end:
                return True
            _cut(after, SENTENCE, data, stop, cut_at, cut_level, state)
            i = after
        else:
            i += 1
    return False


@njit
def _heading_rank(data: Any, i: Any, end: Any) -> Any:
    """1 to 6 for `# …` to `###### …`, else 0."""
    rank = _run(data, i, end) if peek(data, i) == 35 else 0
    return rank if rank <= 6 and (i + rank == end or _is_space(peek(data, i + rank))) else 0


@njit
def _fence_size(data: Any, i: Any, end: Any) -> Any:
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
    is_mark = c > 32 and c < 127 and not _is_letter(c) and not _is_digit(c)
    return c if is_mark and _run(data, i, end) == end - i else 0


@njit
def _front_matter_end(data: Any, start: Any, stop: Any) -> Any:
    """Where the YAML between two lines of `---` at the top ends, or `start`."""
    i = start
    while i < stop:
        end = next_index(data, i, stop, 10)
        is_rule = _trim(data, i, end) - i == 3 and _begins_with(data, i, np.uint64(0x2D2D2D), 3)
        if i == start and not is_rule:
            break
        if i > start and is_rule:
            return min(end + 1, stop)
        i = end + 1
    return start


@njit
def _open_section(
    rank: Any, start: Any, body: Any, name: Any, name_end: Any, nodes: Any, first_node: Any,
    open_nodes: Any, state: Any,
) -> None:  # fmt: skip
    n = state[NODES]
    _close_sections(rank, start, nodes, open_nodes)
    if 6 * n + 6 <= len(nodes):
        nodes[6 * n], nodes[6 * n + 1] = start, body
        nodes[6 * n + 3], nodes[6 * n + 4] = name, name_end
        nodes[6 * n + 5] = -1
        for other in range(1, rank):
            if open_nodes[other] >= 0:
                nodes[6 * n + 5] = open_nodes[other] - first_node
    open_nodes[rank] = n
    state[NODES] = n + 1


@njit
def _close_sections(rank: Any, at: Any, nodes: Any, open_nodes: Any) -> None:
    for other in range(rank, 7):
        if open_nodes[other] >= 0 and 6 * open_nodes[other] + 6 <= len(nodes):
            nodes[6 * open_nodes[other] + 2] = at
        open_nodes[other] = -1


@njit
def _outline_text(
    data: Any, start: Any, stop: Any, is_markdown: Any, cut_at: Any, cut_level: Any, nodes: Any,
    open_nodes: Any, state: Any,
) -> None:  # fmt: skip
    first_node = state[NODES]
    open_nodes[:] = -1
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
        if line == start and _begins_with(data, line, np.uint64(0xBFBBEF), 3) and line + 3 <= stop:
            text += 3
        while text < end and _is_space(peek(data, text)):
            text += 1
            if peek(data, text - 1) == 12:
                has_gap = True
                begin = text  # the next chunk begins after a form feed
        last = _trim(data, text, end)
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
                _cut(begin, level, data, stop, cut_at, cut_level, state)
            fence_lines += 1
            has_gap = False
            continue
        is_near = text - line < 4  # further in, it is code or part of an item
        rank = _heading_rank(data, text, last) if is_markdown and is_near else 0
        fence_size = _fence_size(data, text, last) if is_markdown else 0
        rule = _rule_of(data, text, last)
        if last - text < (2 if is_markdown else 3) or (is_markdown and rule != 61 and rule != 45):
            rule = 0
        if rank > 0:
            _cut(begin, HEADING, data, stop, cut_at, cut_level, state)
            name = _skip_space(data, text + rank, last)
            name_end = last
            while name_end > name and peek(data, name_end - 1) == 35:
                name_end -= 1
            if name_end > name and not _is_space(peek(data, name_end - 1)):
                name_end = last  # `# C#` is a name, `# C #` closes
            name_end = _trim(data, name, name_end)
            _open_section(rank, begin, i, name, name_end, nodes, first_node, open_nodes, state)
        elif fence_size > 0:
            level = PARAGRAPH if has_gap else SENTENCE
            _cut(begin, level, data, stop, cut_at, cut_level, state)
            fence, fence_lines = c, np.int64(0)
        elif rule > 0 and title >= 0:
            state[CUTS] = title_cuts
            state[LAST] = min(state[LAST], max(title - 1, start))
            level = HEADING if is_markdown else PARAGRAPH
            _cut(title, level, data, stop, cut_at, cut_level, state)
            if is_markdown:
                _open_section(
                    1 if rule == 61 else 2, title, i, title_text, title_end, nodes, first_node,
                    open_nodes, state,
                )  # fmt: skip
        else:
            item = _item_size(data, text, last)
            is_title = item == 0 and rule == 0 and c != 62 and c != 124 and is_near
            is_title = is_title and (has_gap or title == -1)
            title = begin if is_title else np.int64(-2)
            title_text, title_end, title_cuts = text, last, state[CUTS]
            if has_gap or (was_long and not is_markdown):
                _cut(begin, PARAGRAPH, data, stop, cut_at, cut_level, state)
            elif item > 0 or (has_ended and _begins_sentence(data, text)):
                _cut(begin, SENTENCE, data, stop, cut_at, cut_level, state)
            has_ended = _sentences(data, text + item, last, stop, cut_at, cut_level, state)
            was_long = last - line > LONG
            has_gap = False
            continue
        has_gap = has_ended = was_long = False
        title = np.int64(-1)
    _close_sections(1, stop, nodes, open_nodes)


@njit
def _closes(data: Any, i: Any, end: Any) -> Any:
    """Whether a line of code ends or goes on with what stands before it."""
    c = peek(data, i)
    if c == 125 or c == 93 or c == 41:
        return True
    if c == 60:
        return i + 1 < end and peek(data, i + 1) == 47
    return _is_one_of(_word(data, i, end), ENDINGS)


@njit
def _outline_code(
    data: Any, start: Any, stop: Any, cut_at: Any, cut_level: Any, state: Any
) -> None:
    has_gap = was_inside = False
    i = start
    while i < stop:
        line = i
        end = next_index(data, line, stop, 10)
        i = min(end + 1, stop)
        text = _skip_space(data, line, end)
        if text == end:
            has_gap = True
            continue
        closes = _closes(data, text, end)
        if not closes:
            if has_gap:
                level = DECLARATION if text == line else MEMBER
                _cut(line, level, data, stop, cut_at, cut_level, state)
            elif was_inside and text == line:
                _cut(line, STATEMENT, data, stop, cut_at, cut_level, state)
        was_inside = closes or text > line
        has_gap = False


@njit
def outline_lines(
    data: Any, at: Any, rows: Any, language: Any, cut_first: Any, cut_at: Any, cut_level: Any,
    node_first: Any, nodes: Any, open_nodes: Any, state: Any,
) -> None:  # fmt: skip
    state[:] = 0
    for k in range(len(rows)):
        start, stop = at[rows[k]], at[rows[k] + 1]
        cut_first[k] = state[CUTS]
        node_first[k] = state[NODES]
        state[LAST] = start
        kind = language[rows[k]]
        if kind == _TEXT or kind == _MARKDOWN:
            is_markdown = kind == _MARKDOWN
            _outline_text(
                data, start, stop, is_markdown, cut_at, cut_level, nodes, open_nodes, state
            )
        else:
            _outline_code(data, start, stop, cut_at, cut_level, state)
    cut_first[len(rows)] = state[CUTS]
    node_first[len(rows)] = state[NODES]


# What a text is. The first word of a line gives points by rules, what stands in it by the code
# here; comments, docstrings and fenced blocks give none.


def _packed(word: str) -> Any:
    return np.uint64(int.from_bytes(word.encode(), "little"))


_DOUBLE, _SINGLE = _packed('"' * 3), _packed("'" * 3)
_STRING, _NUMBER, _BOOLEAN, _SELF = (_packed(w) for w in ("string", "number", "boolean", "self"))


@njit
def _find(data: Any, i: Any, stop: Any, word: Any, size: Any) -> Any:
    """Where the `size` bytes of a little-endian word stand first in data[i:stop], or `stop`."""
    while i + size <= stop and not _begins_with(data, i, word, size):
        i = next_index(data, i + 1, stop, np.int64(word & np.uint64(0xFF)))
    return min(i, stop) if i + size <= stop else stop


@njit
def _rule_word(data: Any, text: Any, last: Any) -> Any:
    """The first word as rules have it: letters; or # < @, a space for any, letters or one byte."""
    c = peek(data, text)
    if c != 35 and c != 60 and c != 64:
        return _word(data, text, last)
    word = np.uint64(c)
    shift = 8
    name = _skip_space(data, text + 1, last)
    if name > text + 1:
        word |= np.uint64(32 << 8)
        shift = 16
    rest = _word(data, name, last)
    if rest == 0 and name < last:
        rest = np.uint64(peek(data, name))
    return word | rest << np.uint64(shift)


@njit
def _give_points(
    data: Any, text: Any, last: Any, buckets: Any, words: Any, ends: Any, needs: Any, points: Any,
    base: Any, out: Any,
) -> Any:  # fmt: skip
    """Apply the first rule that fits the line; whether one did."""
    word = _rule_word(data, text, last)
    bucket = np.int64((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56))
    end = np.uint64(peek(data, last - 1))
    for k in range(buckets[bucket], buckets[bucket + 1]):
        if words[k] != word:
            continue
        allowed = ends[k]
        while allowed != 0 and (allowed & np.uint64(0xFF)) != end:
            allowed >>= np.uint64(8)
        size = needs[2 * k + 1]
        fits = allowed != 0 or ends[k] == 0
        if fits and (size == 0 or _find(data, text, last, needs[2 * k], np.int64(size)) < last):
            for j in range(len(LANGUAGES)):
                out[base + j] += points[k * len(LANGUAGES) + j]
            return True
    return False


@njit
def _look_inside(data: Any, text: Any, last: Any, base: Any, out: Any) -> Any:
    """Count marks of code and gaps of prose, and give points for what few languages write.

    A gap of prose is one space between two words: one in seven bytes of English, one in thirty of
    code without its comments.
    """
    marks = gaps = np.int64(0)
    before = np.uint8(0)
    i = text
    while i < last:
        c = peek(data, i)
        i += 1
        if c > 126 or _is_letter(c):
            before = c
            continue
        d = peek(data, i) if i < last else np.uint8(0)
        if c == 32:
            gaps += (before >= 97 or before == 44) and (_is_letter(d) or d > 126)
        elif c == 58 and d == 58:
            out[base + _CPP] += 1
            out[base + _RUST] += 1
            marks += 2
            i += 1
        elif c == 58 and d == 61:
            out[base + _GO] += 2
        elif c == 58 and d == 32:
            i += 1
            is_type = _begins_with(data, i, _STRING, 6) or _begins_with(data, i, _NUMBER, 6)
            out[base + _TYPESCRIPT] += 3 if is_type or _begins_with(data, i, _BOOLEAN, 7) else 0
        elif c == 61:
            marks += 1
            out[base + _JAVASCRIPT] += d == 62 or (d == 61 and peek(data, i + 1) == 61)
            out[base + _RUST] += d == 62
        elif c == 46:
            out[base + _PYTHON] += i >= text + 5 and _begins_with(data, i - 5, _SELF, 4)
        elif c == 93 and d == 40:
            out[base + LINKS] += 2
        elif c == 42 and d == 42:
            out[base + LINKS] += _is_letter(peek(data, i + 1))
            marks += 1
            i += 1
        elif c == 123 or c == 125 or c == 59 or c == 60 or c == 62 or c == 95:
            out[base + _TSX] += c == 60 and d == 47
            marks += 1
        elif c == 38 or c == 124 or c == 92 or c == 36 or c == 91 or c == 93:
            marks += 1
        elif c == 40 or c == 41:
            marks += d == 41 or d == 59
        before = c
    out[base + MARKS] += marks
    out[base + GAPS] += gaps
    return gaps < 5 or gaps < 2 * marks


@njit
def _score(
    data: Any, i: Any, stop: Any, buckets: Any, words: Any, ends: Any, needs: Any, points: Any,
    base: Any, out: Any,
) -> None:  # fmt: skip
    i += 3 if _begins_with(data, i, np.uint64(0xBFBBEF), 3) else 0
    in_fence = False
    while i < stop and (out[base + _CPP] <= 20 or out[base + _CPP] < out[base + LINES]):
        text = _skip_space(data, i, stop)
        end = next_index(data, i, stop, 10)
        i = end + 1
        last = _trim(data, text, end)
        if text >= last:
            continue
        c, d = peek(data, text), peek(data, text + 1)
        if c == 47 and (d == 42 or d == 47):
            out[base + COMMENTS] += 1
            i = _find(data, text + 2, stop, np.uint64(0x2F2A), 2) + 2 if d == 42 else i
            continue
        if (c == 96 or c == 126) and _fence_size(data, text, last) > 0:
            out[base + _MARKDOWN] += 0 if in_fence else 3
            in_fence = not in_fence
            continue
        quote = text + 1 if c == 114 or c == 82 else text  # a docstring may begin with r
        q = peek(data, quote)
        if q == 34 or q == 39:
            triple = _DOUBLE if q == 34 else _SINGLE
            if _begins_with(data, quote, triple, 3):
                out[base + _PYTHON] += 1
                i = _find(data, quote + 3, stop, triple, 3) + 3
                continue
        if in_fence:
            continue
        out[base + LINES] += 1
        out[base + SIZE] += last - text
        z = peek(data, last - 1)
        out[base + ENDS] += z == 59 or z == 123 or z == 125 or z == 40
        is_code = _look_inside(data, text, last, base, out)
        has_rule = (is_code or c == 35) and _give_points(
            data, text, last, buckets, words, ends, needs, points, base, out
        )
        if c == 35 and not has_rule and _heading_rank(data, text, last) > 0:
            is_alone = i < stop and (peek(data, i) == 10 or peek(data, i) == 13)
            out[base + _MARKDOWN] += 4 if is_alone else (2 if d == 35 else 1)


@njit
def score_languages(
    data: Any, at: Any, rows: Any, sample_bytes: Any, buckets: Any, words: Any, ends: Any,
    needs: Any, points: Any, out: Any,
) -> None:  # fmt: skip
    for k in range(len(rows)):
        start, stop = at[rows[k]], at[rows[k] + 1]
        stop = min(stop, start + sample_bytes)
        _score(data, start, stop, buckets, words, ends, needs, points, k * COLUMNS, out)
