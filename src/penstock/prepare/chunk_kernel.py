"""The kernels of `chunk`: choose cuts under a budget of tokens, and describe what was cut."""

from typing import Any

import numpy as np

from penstock.simd import copy_bytes, njit, peek, xxh64

# levels: those of `outline`
L_FILE = 0
L_EDGE = 51
L_LINE, L_SPACE, L_INSIDE = L_EDGE + 1, L_EDGE + 2, L_EDGE + 3
N_NAMESPACE, N_FUNCTION = 1, 4

# families of patterns, by how text may be cut without changing a token beside the cut
ANY, NEWLINES, SINGLE_NEWLINE, NOT_SLASH = range(4)

# what plan_chunks keeps in `state`
CHUNKS, CANDIDATES, FULL = range(3)

MAX_CLIMB = 64
MAX_SCOPE = 12
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
def place_tokens(ids: Any, lengths: Any, first: Any, last: Any, token_at: Any) -> Any:
    """Where each token of a document begins, from 0 on, and at the end where the last one ends."""
    total = 0
    for k in range(first, last):
        token_at[k - first] = total
        total += peek(lengths, np.int64(peek(ids, k)))
    token_at[last - first] = total
    return total


@njit
def count_functions(
    document: Any, start: Any, node_first: Any, node_kind: Any, node_start: Any, node_end: Any,
    token_at: Any, count: Any, node_tokens: Any,
) -> None:  # fmt: skip
    """About how many tokens each function has, where nobody counted them exactly."""
    for node in range(node_first[document], node_first[document + 1]):
        if node_kind[node] != N_FUNCTION or node_tokens[node] >= 0:
            continue
        a = tokens_before(token_at, count, node_start[node] - start)
        b = tokens_before(token_at, count, node_end[node] - start)
        split = a >= count or peek(token_at, a) != node_start[node] - start
        node_tokens[node] = b - a + (1 if split else 0)


@njit
def find_close_calls(
    at: Any, documents: Any, node_first: Any, node_kind: Any, node_start: Any, node_end: Any,
    ids: Any, lengths: Any, token_first: Any, token_at: Any, budget: Any, margin: Any,
    node_tokens: Any, close: Any,
) -> Any:  # fmt: skip
    """Count all functions of the documents; mark those that an exact count may decide."""
    found = 0
    for document in documents:
        start = at[document]
        first, last = token_first[document], token_first[document + 1]
        place_tokens(ids, lengths, first, last, token_at)
        count_functions(
            document, start, node_first, node_kind, node_start, node_end, token_at, last - first,
            node_tokens,
        )  # fmt: skip
        for node in range(node_first[document], node_first[document + 1]):
            if node_kind[node] == N_FUNCTION and abs(node_tokens[node] - budget) <= margin:
                close[node] = 1
                found += 1
    return found


@njit
def add_candidate(
    place: Any, level: Any, count: Any, token_at: Any, candidate_at: Any, candidate_level: Any,
    candidate_tokens: Any, state: Any,
) -> None:  # fmt: skip
    n = state[CANDIDATES]
    if place <= 0 or (n > 0 and candidate_at[n - 1] >= place):
        if n > 0 and candidate_at[n - 1] == place and level < candidate_level[n - 1]:
            candidate_level[n - 1] = level
        return
    low = np.int64(candidate_tokens[n - 1]) if n > 0 else 0
    while low < count and peek(token_at, low) < place:
        low += 1
    candidate_at[n] = place
    candidate_level[n] = level
    candidate_tokens[n] = low
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
    data: Any, document: Any, start: Any, stop: Any, cut_first: Any, cut_at: Any, cut_level: Any,
    node_first: Any, node_kind: Any, node_start: Any, node_end: Any, node_tokens: Any,
    budget: Any, count: Any, token_at: Any, candidate_at: Any, candidate_level: Any,
    candidate_tokens: Any, state: Any,
) -> None:  # fmt: skip
    """All places to cut that are in no function that fits; positions from the document's start."""
    state[CANDIDATES] = 0
    node, last_node = node_first[document], node_first[document + 1]
    free_from = start  # cuts before this are inside of a function that fits
    for cut in range(cut_first[document], cut_first[document + 1] + 1):
        place = cut_at[cut] if cut < cut_first[document + 1] else stop
        while node < last_node and node_start[node] < place:
            begins = node_start[node]
            if node_kind[node] == N_FUNCTION and node_tokens[node] <= budget:
                ends = node_end[node]
                if begins >= free_from:
                    for edge in (free_from, begins):
                        add_candidate(
                            edge - start, L_EDGE, count, token_at, candidate_at, candidate_level,
                            candidate_tokens, state,
                        )  # fmt: skip
                    # its line end goes with it where there is room: a byte is at most a token
                    line_end = after_line_end(data, ends, stop)
                    if node_tokens[node] + line_end - ends <= budget:
                        ends = line_end
                if ends > free_from:
                    free_from = ends
            node += 1
        if free_from <= place and free_from < stop:
            add_candidate(
                free_from - start, L_EDGE, count, token_at, candidate_at, candidate_level,
                candidate_tokens, state,
            )  # fmt: skip
        if start < place < stop and place >= free_from and cut < cut_first[document + 1]:
            add_candidate(
                place - start, cut_level[cut], count, token_at, candidate_at, candidate_level,
                candidate_tokens, state,
            )  # fmt: skip


@njit
def cut_anywhere(data: Any, start: Any, least: Any, most: Any) -> Any:
    """The last line end in (least, most], else the last blank, else the last character."""
    k = most
    while k > least:
        if peek(data, start + k - 1) == 0x0A:
            return k, L_LINE
        k -= 1
    k = most
    while k > least:
        if is_blank(peek(data, start + k)) and not is_blank(peek(data, start + k - 1)):
            return k, L_SPACE
        k -= 1
    k = most
    while k > least + 1 and peek(data, start + k) & 0xC0 == 0x80:
        k -= 1
    if peek(data, start + k) & 0xC0 == 0x80:  # not even one character: take it whole
        k = most
        while peek(data, start + k) & 0xC0 == 0x80:
            k += 1
    return k, L_INSIDE


@njit
def put_chunk(
    document: Any, begins: Any, ends: Any, level: Any, first: Any, last: Any, exact: Any,
    chunk_document: Any, chunk_start: Any, chunk_end: Any, chunk_level: Any, chunk_first: Any,
    chunk_last: Any, chunk_exact: Any, state: Any,
) -> None:  # fmt: skip
    n = state[CHUNKS]
    if n >= len(chunk_start):
        state[FULL] = 1
        return
    chunk_document[n] = document
    chunk_start[n] = begins
    chunk_end[n] = ends
    chunk_level[n] = level
    chunk_first[n] = first
    chunk_last[n] = last
    chunk_exact[n] = exact
    state[CHUNKS] = n + 1


@njit
def is_function(
    data: Any, begins: Any, ends: Any, stop: Any, low: Any, high: Any, node_kind: Any,
    node_start: Any, node_end: Any, node_tokens: Any, budget: Any,
) -> Any:  # fmt: skip
    """Whether one of the nodes [low, high) is a function that fits and has exactly this place, its
    line end included or not."""
    last = high
    while low < high:
        middle = (low + high) >> 1
        if node_start[middle] < begins:
            low = middle + 1
        else:
            high = middle
    while low < last and node_start[low] == begins:
        if node_kind[low] == N_FUNCTION and node_tokens[low] <= budget:
            if node_end[low] == ends:
                return True
            if node_end[low] < ends and after_line_end(data, node_end[low], stop) == ends:
                return node_tokens[low] + ends - node_end[low] <= budget
        low += 1
    return False


@njit
def plan_chunks(
    data: Any, at: Any, documents: Any, first_document: Any, slack: Any,
    cut_first: Any, cut_at: Any, cut_level: Any, node_first: Any, node_kind: Any, node_start: Any,
    node_end: Any, node_tokens: Any, ids: Any, lengths: Any, token_first: Any, token_at: Any,
    budget: Any, least_fill: Any, family: Any, candidate_at: Any, candidate_level: Any,
    candidate_tokens: Any, chunk_document: Any, chunk_start: Any, chunk_end: Any,
    chunk_level: Any, chunk_first: Any, chunk_last: Any, chunk_exact: Any, state: Any,
) -> Any:  # fmt: skip
    """Cut documents[first_document:]; the place of the first there was no room for, or the end.

    `least_fill` is in 1024ths of the budget: the furthest cut within the budget may be given up for
    one that breaks less, if that costs no more than the rest of it.
    """
    for number in range(first_document, len(documents)):
        document = documents[number]
        chunks_before = state[CHUNKS]
        start, stop = at[document], at[document + 1]
        first, last = token_first[document], token_first[document + 1]
        count = last - first
        if count <= budget:
            put_chunk(
                document, start, stop, L_FILE, first, last, 1, chunk_document, chunk_start,
                chunk_end, chunk_level, chunk_first, chunk_last, chunk_exact, state,
            )  # fmt: skip
            if state[FULL] != 0:
                return number
            continue
        place_tokens(ids, lengths, first, last, token_at)
        gather_candidates(
            data, document, start, stop, cut_first, cut_at, cut_level, node_first, node_kind,
            node_start, node_end, node_tokens, budget, count, token_at, candidate_at,
            candidate_level, candidate_tokens, state,
        )  # fmt: skip
        candidates = state[CANDIDATES]
        limit = budget - slack[document]
        if limit < 1:
            limit = 1
        window = limit - (limit * least_fill >> 10)
        here, next_candidate = 0, 0
        level: Any = L_FILE
        while here < stop - start:
            before = tokens_before(token_at, count, here)
            split = 0
            if before >= count or peek(token_at, before) != here:
                split = 1
            was_safe = is_safe(data, start, stop, start + here, family) and split == 0
            used = before - split
            if count - used <= limit:
                put_chunk(
                    document, start + here, stop, level, first + used, last, was_safe,
                    chunk_document, chunk_start, chunk_end, chunk_level, chunk_first, chunk_last,
                    chunk_exact, state,
                )  # fmt: skip
                break
            while next_candidate < candidates and candidate_at[next_candidate] <= here:
                next_candidate += 1
            # of the candidates near the furthest within the limit, the one that breaks least
            k = next_candidate
            while k < candidates and candidate_tokens[k] - used <= limit:
                k += 1
            best = k - 1 if k > next_candidate else -1
            j = best - 1
            while j >= next_candidate and candidate_tokens[k - 1] - candidate_tokens[j] <= window:
                if candidate_level[j] < candidate_level[best]:
                    best = j
                j -= 1
            fits = k < candidates and candidate_tokens[k] - used <= budget
            if best < 0 and fits and slack[document] < budget >> 2:
                best = k  # a function that fits, but for the slack
            # a function was counted alone: it fits, whatever the slack is
            if best < 0 and is_function(
                data, start + here, start + candidate_at[k] if k < candidates else stop, stop,
                node_first[document], node_first[document + 1], node_kind, node_start, node_end,
                node_tokens, budget,
            ):  # fmt: skip
                if k == candidates:
                    put_chunk(
                        document, start + here, stop, level, first + used, last, was_safe,
                        chunk_document, chunk_start, chunk_end, chunk_level, chunk_first,
                        chunk_last, chunk_exact, state,
                    )  # fmt: skip
                    break
                best = k
            if best >= 0:
                there, there_level = candidate_at[best], np.int64(candidate_level[best])
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
                chunk_document, chunk_start, chunk_end, chunk_level, chunk_first, chunk_last,
                chunk_exact, state,
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
def scope_of(place: Any, low: Any, high: Any, node_start: Any, node_body: Any, node_end: Any,
             node_parent: Any) -> Any:  # fmt: skip
    """The innermost node of [low, high) whose body holds this place, or -1."""
    first = low
    while low < high:
        middle = (low + high) >> 1
        if node_start[middle] <= place:
            low = middle + 1
        else:
            high = middle
    node = low - 1
    for _ in range(MAX_CLIMB):
        if node < first:
            return -1
        if node_body[node] <= place < node_end[node]:
            return node
        if node_parent[node] < 0:
            return -1
        node = first + node_parent[node]
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
    data: Any, writes: Any, chunk_document: Any, chunk_start: Any, chunk_end: Any,
    node_first: Any, node_kind: Any, node_start: Any, node_body: Any, node_end: Any,
    name_start: Any, name_end: Any, node_parent: Any, words: Any, word_at: Any, path: Any,
    scope: Any, scope_at: Any, symbols: Any, symbol_at: Any, symbol_first: Any,
) -> None:  # fmt: skip
    """The scope in which each chunk begins and the names that begin in it.

    Without `writes` only the sizes are found. `words` holds the kinds' names and the separators.
    """
    o = s = n = 0
    low_node = -1
    before = -1
    for k in range(len(chunk_start)):
        document = chunk_document[k]
        first, last = node_first[document], node_first[document + 1]
        if document != before:
            low_node = first
            before = document
        scope_at[k] = o
        symbol_first[k] = n
        # the nodes around the place, from the innermost out
        node = scope_of(chunk_start[k], first, last, node_start, node_body, node_end, node_parent)
        depth = 0
        while node >= first and depth < MAX_SCOPE:
            path[depth] = node
            depth += 1
            if node_parent[node] < 0:
                break
            node = first + node_parent[node]
        kind_before: Any = 0
        for d in range(depth - 1, -1, -1):
            node = path[d]
            kind = np.int64(node_kind[node])
            joined = kind == N_NAMESPACE and kind_before == N_NAMESPACE
            if kind_before != 0:
                word = 7 if joined else 6
                o = put_bytes(words, word_at[word], word_at[word + 1], scope, o, writes)
            if not joined:
                o = put_bytes(words, word_at[kind], word_at[kind + 1], scope, o, writes)
            if name_end[node] > name_start[node]:
                o = put_bytes(data, name_start[node], name_end[node], scope, o, writes)
            else:
                o = put_bytes(words, word_at[8], word_at[9], scope, o, writes)
            kind_before = kind
        while low_node < last and node_start[low_node] < chunk_start[k]:
            low_node += 1
        node, found = low_node, 0
        while node < last and node_start[node] < chunk_end[k] and found < MAX_SYMBOLS:
            if node_kind[node] != N_NAMESPACE and name_end[node] > name_start[node]:
                if writes:
                    symbol_at[n] = s
                s = put_bytes(data, name_start[node], name_end[node], symbols, s, writes)
                n += 1
                found += 1
            node += 1
    scope_at[len(chunk_start)] = o
    symbol_first[len(chunk_start)] = n
    if writes:
        symbol_at[n] = s
    else:
        path[0] = o
        path[1] = s
        path[2] = n


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
