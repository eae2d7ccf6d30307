"""The kernels of `chunk`: choose cuts under a budget of tokens, and describe what was cut."""

from typing import Any

import numpy as np

from penstock.prepare.chunk_layout import (
    ANONYMOUS,
    ANY,
    CANDIDATES,
    CHUNKS,
    FULL,
    JOINT,
    MAX_SCOPE,
    NOT_SLASH,
    SCOPE_BYTES,
    SEPARATOR,
    SINGLE_NEWLINE,
    SYMBOL_BYTES,
    SYMBOLS,
)
from penstock.prepare.outline.outline import EDGE, FILE, FUNCTION, INSIDE, LINE, NAMESPACE, SPACE
from penstock.simd import copy_bytes, njit, peek, xxh64

MAX_CLIMB = 64
MAX_SYMBOLS = 64
MAX_NAME = 120


@njit
def is_blank(c: Any) -> Any:
    return c == 0x20 or c == 0x09


@njit
def is_safe(data: Any, start: Any, stop: Any, at: Any, family: Any) -> Any:
    """Whether the tokens on both sides of a cut are those of the whole text.

    The patterns of this family cut between a newline and what follows it, blanks included, unless
    more newlines follow those. gpt2 ties blanks to what follows: there the newline stands alone.
    o200k takes newlines and slashes together.
    """
    if at <= start or at >= stop:
        return True
    if family == ANY or peek(data, at - 1) != 0x0A:
        return False
    if family == SINGLE_NEWLINE:
        c = peek(data, at)
        if c <= 0x20 or c >= 0x7F or at - 2 < start:
            return False
        before = peek(data, at - 2)
        return 0x20 < before < 0x7F
    if family == NOT_SLASH and peek(data, at) == 0x2F:
        return False
    while at < stop and is_blank(peek(data, at)):
        at += 1
    if at >= stop:
        return False
    c = peek(data, at)
    return 0x20 < c < 0x7F


@njit
def tokens_before(token_at: Any, count: Any, at: Any) -> Any:
    """How many tokens begin before this byte."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if peek(token_at, middle) < at:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def place_tokens(tokens: Any, first: Any, last: Any) -> Any:
    """Where each token of a document begins, from 0 on, and at the end where the last one ends."""
    total = 0
    for k in range(first, last):
        tokens.at[k - first] = total
        total += peek(tokens.lengths, np.int64(peek(tokens.ids, k)))
    tokens.at[last - first] = total
    return total


@njit
def count_functions(
    document: Any, start: Any, outline: Any, token_at: Any, count: Any, node_tokens: Any
) -> None:
    """About how many tokens each function has, where nobody counted them exactly."""
    for node in range(outline.node_first[document], outline.node_first[document + 1]):
        if outline.node_kind[node] != FUNCTION or node_tokens[node] >= 0:
            continue
        a = tokens_before(token_at, count, outline.node_start[node] - start)
        b = tokens_before(token_at, count, outline.node_end[node] - start)
        split = a >= count or peek(token_at, a) != outline.node_start[node] - start
        node_tokens[node] = b - a + (1 if split else 0)


@njit
def find_close_calls(
    at: Any, documents: Any, outline: Any, tokens: Any, limits: Any, margin: Any, node_tokens: Any,
    close: Any,
) -> Any:  # fmt: skip
    """Count all functions of the documents; mark those that an exact count may decide."""
    found = 0
    budget = limits.budget
    for document in documents:
        start = at[document]
        first, last = tokens.first[document], tokens.first[document + 1]
        place_tokens(tokens, first, last)
        count_functions(document, start, outline, tokens.at, last - first, node_tokens)
        for node in range(outline.node_first[document], outline.node_first[document + 1]):
            if outline.node_kind[node] == FUNCTION and abs(node_tokens[node] - budget) <= margin:
                close[node] = 1
                found += 1
    return found


@njit
def add_candidate(
    place: Any, level: Any, count: Any, token_at: Any, candidates: Any, state: Any
) -> None:
    n = state[CANDIDATES]
    if place <= 0 or (n > 0 and candidates.at[n - 1] >= place):
        if n > 0 and candidates.at[n - 1] == place and level < candidates.level[n - 1]:
            candidates.level[n - 1] = level
        return
    low = np.int64(candidates.tokens[n - 1]) if n > 0 else 0
    while low < count and peek(token_at, low) < place:
        low += 1
    candidates.at[n] = place
    candidates.level[n] = level
    candidates.tokens[n] = low
    state[CANDIDATES] = n + 1


@njit
def after_line_end(data: Any, at: Any, stop: Any) -> Any:
    """The place after a line end that only blanks separate from `at`; `at` if there is none."""
    k = at
    while k < stop and is_blank(peek(data, k)):
        k += 1
    if k < stop and peek(data, k) == 0x0D:
        k += 1
        return k + 1 if k < stop and peek(data, k) == 0x0A else k
    return k + 1 if k < stop and peek(data, k) == 0x0A else at


@njit
def gather_candidates(
    data: Any, document: Any, start: Any, stop: Any, outline: Any, node_tokens: Any, budget: Any,
    count: Any, token_at: Any, candidates: Any, state: Any,
) -> None:  # fmt: skip
    """All places to cut that are in no function that fits; positions from the document's start."""
    state[CANDIDATES] = 0
    node, last_node = outline.node_first[document], outline.node_first[document + 1]
    last_cut = outline.cut_first[document + 1]
    free_from = start  # cuts before this are inside of a function that fits
    for cut in range(outline.cut_first[document], last_cut + 1):
        place = outline.cut_at[cut] if cut < last_cut else stop
        while node < last_node and outline.node_start[node] < place:
            begins = outline.node_start[node]
            if outline.node_kind[node] == FUNCTION and node_tokens[node] <= budget:
                ends = outline.node_end[node]
                if begins >= free_from:
                    for edge in (free_from, begins):
                        add_candidate(edge - start, EDGE, count, token_at, candidates, state)
                    # its line end goes with it where there is room: a byte is at most a token
                    line_end = after_line_end(data, ends, stop)
                    if node_tokens[node] + line_end - ends <= budget:
                        ends = line_end
                if ends > free_from:
                    free_from = ends
            node += 1
        if free_from <= place and free_from < stop:
            add_candidate(free_from - start, EDGE, count, token_at, candidates, state)
        if start < place < stop and place >= free_from and cut < last_cut:
            level = outline.cut_level[cut]
            add_candidate(place - start, level, count, token_at, candidates, state)


@njit
def cut_anywhere(data: Any, start: Any, least: Any, most: Any) -> Any:
    """The last line end in (least, most], else the last blank, else the last character."""
    k = most
    while k > least:
        if peek(data, start + k - 1) == 0x0A:
            return k, LINE
        k -= 1
    k = most
    while k > least:
        if is_blank(peek(data, start + k)) and not is_blank(peek(data, start + k - 1)):
            return k, SPACE
        k -= 1
    k = most
    while k > least + 1 and peek(data, start + k) & 0xC0 == 0x80:
        k -= 1
    if peek(data, start + k) & 0xC0 == 0x80:  # not even one character: take it whole
        k = most
        while peek(data, start + k) & 0xC0 == 0x80:
            k += 1
    return k, INSIDE


@njit
def put_chunk(
    document: Any, begins: Any, ends: Any, level: Any, first: Any, last: Any, exact: Any,
    rows: Any, state: Any,
) -> None:  # fmt: skip
    n = state[CHUNKS]
    if n >= len(rows.start):
        state[FULL] = 1
        return
    rows.document[n] = document
    rows.start[n] = begins
    rows.end[n] = ends
    rows.level[n] = level
    rows.first[n] = first
    rows.last[n] = last
    rows.exact[n] = exact
    state[CHUNKS] = n + 1


@njit
def is_function(
    data: Any, begins: Any, ends: Any, stop: Any, document: Any, outline: Any, node_tokens: Any,
    budget: Any,
) -> Any:  # fmt: skip
    """Whether a node of the document is a function that fits and has exactly this place, its line
    end included or not."""
    low, high = outline.node_first[document], outline.node_first[document + 1]
    last = high
    while low < high:
        middle = (low + high) >> 1
        if outline.node_start[middle] < begins:
            low = middle + 1
        else:
            high = middle
    while low < last and outline.node_start[low] == begins:
        if outline.node_kind[low] == FUNCTION and node_tokens[low] <= budget:
            end = outline.node_end[low]
            if end == ends:
                return True
            if end < ends and after_line_end(data, end, stop) == ends:
                return node_tokens[low] + ends - end <= budget
        low += 1
    return False


@njit
def plan_chunks(
    data: Any, at: Any, documents: Any, first_document: Any, slack: Any, outline: Any,
    node_tokens: Any, tokens: Any, limits: Any, candidates: Any, rows: Any, state: Any,
) -> Any:  # fmt: skip
    """Cut documents[first_document:]; the number of the first there was no room for, or the end.

    The furthest cut within the budget may be given up for one that breaks less, if that costs no
    more than what `least_fill` leaves of the budget.
    """
    budget, token_at, family = limits.budget, tokens.at, limits.family
    for number in range(first_document, len(documents)):
        document = documents[number]
        chunks_before = state[CHUNKS]
        start, stop = at[document], at[document + 1]
        first, last = tokens.first[document], tokens.first[document + 1]
        count = last - first
        if count <= budget:
            put_chunk(document, start, stop, FILE, first, last, 1, rows, state)
            if state[FULL] != 0:
                return number
            continue
        place_tokens(tokens, first, last)
        gather_candidates(
            data, document, start, stop, outline, node_tokens, budget, count, token_at, candidates,
            state,
        )  # fmt: skip
        found = state[CANDIDATES]
        limit = budget - slack[document]
        if limit < 1:
            limit = 1
        window = limit - (limit * limits.least_fill >> 10)
        here, next_candidate = 0, 0
        level: Any = FILE
        while here < stop - start:
            before = tokens_before(token_at, count, here)
            split = 0
            if before >= count or peek(token_at, before) != here:
                split = 1
            was_safe = is_safe(data, start, stop, start + here, family) and split == 0
            used = before - split
            if count - used <= limit:
                put_chunk(
                    document, start + here, stop, level, first + used, last, was_safe, rows, state
                )
                break
            while next_candidate < found and candidates.at[next_candidate] <= here:
                next_candidate += 1
            # of the candidates near the furthest within the limit, the one that breaks least
            k = next_candidate
            while k < found and candidates.tokens[k] - used <= limit:
                k += 1
            best = k - 1 if k > next_candidate else -1
            j = best - 1
            furthest = candidates.tokens[k - 1]
            while j >= next_candidate and furthest - candidates.tokens[j] <= window:
                if candidates.level[j] < candidates.level[best]:
                    best = j
                j -= 1
            fits = k < found and candidates.tokens[k] - used <= budget
            if best < 0 and fits and slack[document] < budget >> 2:
                best = k  # a function that fits, but for the slack
            # a function was counted alone: it fits, whatever the slack is
            if best < 0 and is_function(
                data, start + here, start + candidates.at[k] if k < found else stop, stop, document,
                outline, node_tokens, budget,
            ):  # fmt: skip
                if k == found:
                    put_chunk(
                        document, start + here, stop, level, first + used, last, was_safe, rows,
                        state,
                    )  # fmt: skip
                    break
                best = k
            if best >= 0:
                there, there_level = candidates.at[best], np.int64(candidates.level[best])
            else:
                most = peek(token_at, used + limit)
                if most <= here:
                    most = here + 1
                there, there_level = cut_anywhere(data, start, here, most)
            after = tokens_before(token_at, count, there)
            exact = (
                was_safe
                and is_safe(data, start, stop, start + there, family)
                and peek(token_at, after) == there
            )
            put_chunk(
                document, start + here, start + there, level, first + used, first + after, exact,
                rows, state,
            )  # fmt: skip
            if state[FULL] != 0:
                break
            here, level = there, there_level
        if state[FULL] != 0:
            state[CHUNKS] = chunks_before
            return number
    return len(documents)


@njit
def count_lines(data: Any, chunk_start: Any, chunk_end: Any, chunk_part: Any, line: Any) -> None:
    """The line on which each chunk begins, from 1 on."""
    now = 1
    for k in range(len(chunk_start)):
        if chunk_part[k] == 0:
            now = 1
        line[k] = now
        found = 0
        for i in range(chunk_start[k], chunk_end[k]):
            found += peek(data, i) == 0x0A
        now += found


@njit
def scope_of(place: Any, low: Any, high: Any, outline: Any) -> Any:
    """The innermost node of [low, high) whose body holds this place, or -1."""
    first = low
    while low < high:
        middle = (low + high) >> 1
        if outline.node_start[middle] <= place:
            low = middle + 1
        else:
            high = middle
    node = low - 1
    for _ in range(MAX_CLIMB):
        if node < first:
            return -1
        if outline.node_body[node] <= place < outline.node_end[node]:
            return node
        if outline.node_parent[node] < 0:
            return -1
        node = first + outline.node_parent[node]
    return -1


@njit
def put_bytes(source: Any, start: Any, stop: Any, out: Any, o: Any, writes: Any) -> Any:
    """Copy a name, but not more than MAX_NAME of it, nor half a character."""
    size = stop - start
    if size > MAX_NAME:
        size = MAX_NAME
        while size > 0 and peek(source, start + size) & 0xC0 == 0x80:
            size -= 1
    if writes:
        copy_bytes(source, start, out, o, size)
    return o + size


@njit
def describe_chunks(
    data: Any, writes: Any, rows: Any, outline: Any, words: Any, word_at: Any, path: Any, out: Any
) -> None:
    """The scope in which each chunk begins and the names that begin in it.

    Without `writes` only the sizes are found. `words` holds the kinds' names and the separators.
    """
    o = s = n = 0
    low_node = -1
    before = -1
    for k in range(len(rows.start)):
        document = rows.document[k]
        first, last = outline.node_first[document], outline.node_first[document + 1]
        if document != before:
            low_node = first
            before = document
        out.scope_at[k] = o
        out.symbol_first[k] = n
        # the nodes around the place, from the innermost out
        node = scope_of(rows.start[k], first, last, outline)
        depth = 0
        while node >= first and depth < MAX_SCOPE:
            path[depth] = node
            depth += 1
            if outline.node_parent[node] < 0:
                break
            node = first + outline.node_parent[node]
        kind_before: Any = 0
        for d in range(depth - 1, -1, -1):
            node = path[d]
            kind = np.int64(outline.node_kind[node])
            joined = kind == NAMESPACE and kind_before == NAMESPACE
            if kind_before != 0:
                word = JOINT if joined else SEPARATOR
                o = put_bytes(words, word_at[word], word_at[word + 1], out.scope, o, writes)
            if not joined:
                o = put_bytes(words, word_at[kind], word_at[kind + 1], out.scope, o, writes)
            if outline.name_end[node] > outline.name_start[node]:
                o = put_bytes(
                    data, outline.name_start[node], outline.name_end[node], out.scope, o, writes
                )
            else:
                o = put_bytes(
                    words, word_at[ANONYMOUS], word_at[ANONYMOUS + 1], out.scope, o, writes
                )
            kind_before = kind
        while low_node < last and outline.node_start[low_node] < rows.start[k]:
            low_node += 1
        node, found = low_node, 0
        while node < last and outline.node_start[node] < rows.end[k] and found < MAX_SYMBOLS:
            if (
                outline.node_kind[node] != NAMESPACE
                and outline.name_end[node] > outline.name_start[node]
            ):
                if writes:
                    out.symbol_at[n] = s
                s = put_bytes(
                    data, outline.name_start[node], outline.name_end[node], out.symbols, s, writes
                )
                n += 1
                found += 1
            node += 1
    out.scope_at[len(rows.start)] = o
    out.symbol_first[len(rows.start)] = n
    if writes:
        out.symbol_at[n] = s
    else:
        path[SCOPE_BYTES] = o
        path[SYMBOL_BYTES] = s
        path[SYMBOLS] = n


@njit
def gather_tokens(
    pool: Any, base: Any, rows: Any, first: Any, last: Any, out: Any, offsets: Any
) -> None:
    """Copy the tokens of these chunks to their places; pool[0] is the token numbered `base`."""
    for n in range(len(rows)):
        k = rows[n]
        o = np.int64(offsets[k])
        for i in range(first[k] - base, last[k] - base):
            out[o] = peek(pool, i)
            o += 1


@njit
def hash_rows(data: Any, at: Any, out: Any) -> None:
    for k in range(len(out)):
        out[k] = xxh64(data, at[k], at[k + 1], 0)


@njit
def copy_rows(data: Any, at: Any, rows: Any, out: Any, out_at: Any) -> None:
    for k in range(len(rows)):
        copy_bytes(data, at[rows[k]], out, out_at[k], at[rows[k] + 1] - at[rows[k]])
