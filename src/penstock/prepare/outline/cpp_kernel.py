"""The kernel of `cpp`: one pass over C or C++ that finds where it may be cut.

A cut waits until the next token is known: comments belong to what follows them, a comment on the
line of a statement to that statement, and `else` to the block before it.
"""

from typing import Any

import numpy as np

from penstock.prepare.outline.cpp_frame_kernel import (
    F_BLOCK,
    F_CLASS,
    F_ENUM,
    F_FILE,
    F_FUNCTION,
    F_INIT,
    F_NAMESPACE,
    close_frame,
    condition,
    find_ended_function,
    find_macro_end,
    find_partner,
    level_in,
    open_frame,
    part_macro,
)
from penstock.prepare.outline.cpp_head_kernel import (
    ACCESS_HEAD,
    ASSIGN_HEAD,
    CALL_HEAD,
    CLASS_HEAD,
    ENUM_HEAD,
    INIT_LIST,
    LAMBDA_HEAD,
    OPERATOR,
    P_AFTER,
    P_ASSIGN,
    P_BRACE,
    P_COLON,
    P_OPERATOR,
    P_OTHER,
    P_PAREN,
    P_SCOPE,
    P_STRING,
    P_WORD,
    PARAMETERS,
    REQUIRES_BARE,
    REQUIRES_HEAD,
    TRAILING_TYPE,
    TYPE_NAMED,
    clear_head,
    is_in_template,
    take_angle,
    take_brackets,
    take_word,
)
from penstock.prepare.outline.cpp_layout import (
    AFTER_MACROS,
    ANGLE,
    CALL,
    CALL_END,
    COLUMN,
    CONDITIONS,
    CUT_ROOM,
    CUTS,
    DEPTH,
    DIGIT,
    FIXED,
    FLAGS,
    FRAME,
    FULL,
    FULL_CUTS,
    HEAD,
    HEAD_COLUMN,
    INDENT,
    K_CATCH,
    K_ELSE,
    K_NONE,
    K_WHILE,
    KIND,
    LAST_CUT,
    LAST_FUNCTION,
    LEVEL,
    MACROS,
    MOST_CUTS,
    MOST_NODES,
    NAME,
    NAME_END,
    NEST,
    NEWLINE,
    NO_ATTRIBUTE,
    NO_RAW,
    NODE,
    NODE_ROOM,
    NODES,
    OLD_NAME,
    OLD_NAME_END,
    OLD_STYLE,
    PAREN,
    PARENT,
    PREV,
    PROTECTED,
    SAVED,
    SPACE,
    START,
    TOP,
    TWIN,
    WAITS,
    WHERE,
    WORD,
)
from penstock.prepare.outline.cpp_lex_kernel import (
    D_ELSE,
    D_IF,
    D_NONE,
    directive_of,
    end_of_directive,
    find_eol,
    is_raw_prefix,
    keyword_of,
    skip_blanks,
    skip_block_comment,
    skip_line_comment,
    skip_number,
    skip_quoted,
    skip_raw,
)
from penstock.prepare.outline.outline import ELEMENT, MAX_DEPTH, STATEMENT
from penstock.simd import njit, peek

# empty lines belong to what ends before them, comments to what follows
ON_LINE, AFTER_LINE, BEFORE_COMMENT = range(3)

ELEMENT_BYTES = 32
"""Elements of a table are not marked nearer to each other than this."""
ATTRIBUTE_BYTES = 512
"""An attribute that is longer is not seen as one."""


@njit
def emit(at: Any, level: Any, start: Any, stop: Any, outline: Any, counts: Any) -> Any:
    if at <= start or at >= stop or at < counts[LAST_CUT]:
        return
    n = counts[CUTS]
    if at == counts[LAST_CUT]:
        if level < outline.cut_level[n - 1]:
            outline.cut_level[n - 1] = level
        return
    if n >= counts[CUT_ROOM]:
        counts[FULL] = FULL_CUTS
        return
    outline.cut_at[n] = at
    outline.cut_level[n] = level
    counts[CUTS] = n + 1
    counts[LAST_CUT] = at


@njit
def worse(level: Any) -> Any:
    """A level for the same place where something holds the two sides together."""
    if level == STATEMENT + MAX_DEPTH - 1 or level == ELEMENT + MAX_DEPTH - 1:
        return level
    return level + 1


@njit
def wait(pending: Any, at: Any, level: Any) -> None:
    pending[WAITS] = 1
    pending[WHERE] = at
    pending[LEVEL] = level
    pending[FIXED] = 0


@njit
def settle(level: Any, start: Any, stop: Any, pending: Any, outline: Any, counts: Any) -> None:
    """What waited becomes a cut."""
    emit(pending[WHERE], level, start, stop, outline, counts)
    pending[WAITS] = 0


@njit
def find_attribute_end(data: Any, i: Any, stop: Any, counts: Any) -> Any:
    """After the ]] of the attribute whose [[ stands at i, or -1.

    Where none was found, none is looked for again.
    """
    if i < counts[NO_ATTRIBUTE]:
        return -1
    last = min(i + ATTRIBUTE_BYTES, stop - 1)
    j = i + 2
    is_in_string = False
    while j < last:
        c = peek(data, j)
        if c == 0x22:  # a string
            is_in_string = not is_in_string
        elif c == 0x5C:  # the next byte is escaped
            j += 1
        elif not is_in_string:
            if c == 0x5D and peek(data, j + 1) == 0x5D:
                return j + 2
            if c == 0x7B or c == 0x3B:
                break
        j += 1
    counts[NO_ATTRIBUTE] = j
    return -1


@njit
def outline_cpp(
    data: Any, starts: Any, stops: Any, first: Any, last: Any, lexicon: Any, state: Any,
    outline: Any,
) -> Any:  # fmt: skip
    """Outline documents first:last; the number of the first that there was no room for, or last.

    A document whose braces do not match is read again: then a brace that begins its line closes
    what began at the same column, and a function that begins no further right ends another.
    """
    classes, words, numbers = lexicon
    frames, conditions, counts, head, pending = state
    document, guesses = first, False
    while document < last:
        start, stop = starts[document], stops[document]
        cuts_before, nodes_before = counts[CUTS], counts[NODES]
        outline.cut_first[document] = cuts_before
        outline.node_first[document] = nodes_before
        counts[TOP] = 1
        counts[LAST_CUT] = start
        counts[CONDITIONS] = 0
        counts[PROTECTED] = 0
        counts[FULL] = 0
        counts[CUT_ROOM] = min(len(outline.cut_at), cuts_before + counts[MOST_CUTS])
        counts[NODE_ROOM] = min(len(outline.node_kind), nodes_before + counts[MOST_NODES])
        counts[NO_RAW] = 0
        counts[LAST_FUNCTION] = -1
        counts[OLD_STYLE] = -1
        counts[NO_ATTRIBUTE] = 0
        counts[MACROS] = counts[AFTER_MACROS] = -1
        frames[KIND] = F_FILE
        frames[PARENT] = 0
        frames[NODE] = -1
        frames[DEPTH] = 0
        frames[TWIN] = -1
        frames[NEST] = 0
        frames[COLUMN] = frames[HEAD_COLUMN] = -1
        clear_head(head)
        pending[WAITS] = 0
        frame, around, extra = 0, np.int64(F_FILE), 0
        eol = find_eol(data, start, stop)
        table = np.int64(0 if eol == 0x0A else 256)
        i = line = start
        if stop - start >= 3 and peek(data, i) == 0xEF and peek(data, i + 1) == 0xBB:
            i += 3  # a byte order mark
        fresh = True  # nothing but blanks and comments on this line so far
        indent = np.int64(0)
        while i < stop and counts[FULL] == 0:
            c = peek(data, i)
            kind = peek(classes, table + c)
            if kind == SPACE:
                i += 1
                continue
            if kind == NEWLINE:
                i += 1
                line = i
                fresh = True
                if pending[WAITS] != 0 and pending[FIXED] <= AFTER_LINE:
                    pending[WHERE] = i
                    pending[FIXED] = AFTER_LINE
                continue
            after = peek(data, i + 1) if i + 1 < stop else np.uint8(0)
            if c == 0x2F and (after == 0x2F or after == 0x2A) and pending[FIXED] == AFTER_LINE:
                pending[FIXED] = BEFORE_COMMENT
            if c == 0x2F and after == 0x2F:
                i = skip_line_comment(data, i + 2, stop, eol)
                continue
            if c == 0x2F and after == 0x2A:
                i = skip_block_comment(data, i + 2, stop)
                continue
            if c == 0x5C:  # a backslash before a newline: the line goes on
                i += 1
                if i < stop and peek(data, i) == 0x0D:
                    i += 1
                if i < stop and peek(data, i) == 0x0A:
                    i += 1
                continue
            if fresh and (c == 0x23 or (c == 0x25 and after == 0x3A)):
                name = skip_blanks(data, i + (1 if c == 0x23 else 2), stop)
                end = end_of_directive(data, name, stop, eol)
                which = directive_of(data, name, end)
                alone = head[START] < 0
                if alone and pending[WAITS] != 0:
                    level = worse(pending[LEVEL]) if which >= D_ELSE else pending[LEVEL]
                    settle(level, start, stop, pending, outline, counts)
                if which != D_NONE:
                    frame = condition(
                        data, i, name, end, which, frame, head, frames, conditions, counts,
                        outline,
                    )  # fmt: skip
                    around = frames[frame * FRAME + KIND]
                if alone and head[START] < 0:
                    level = level_in(frames, frame)
                    wait(pending, end, worse(level) if D_IF <= which <= D_ELSE else level)
                i = end
                continue
            begins_line = fresh
            if fresh:
                fresh = False
                indent = i - line
            if kind == WORD:
                j = i + 1
                while j < stop and peek(classes, np.int64(peek(data, j))) >= WORD:
                    j += 1
                if j < stop and peek(data, j) == 0x22 and is_raw_prefix(data, i, j):
                    end = skip_raw(data, j, stop) if counts[NO_RAW] == 0 else -1
                    if end == -2:
                        counts[NO_RAW] = 1
                    if end > 0:
                        if pending[WAITS] != 0:
                            level = pending[LEVEL]
                            settle(level, start, stop, pending, outline, counts)
                        if head[START] < 0:
                            head[START] = i
                            head[INDENT] = indent
                        head[PREV] = P_STRING
                        i = end
                        continue
                keyword = keyword_of(data, i, j, words, numbers)
                if pending[WAITS] != 0:
                    level = pending[LEVEL]
                    if keyword == K_ELSE or keyword == K_CATCH or keyword == K_WHILE:
                        level = worse(level)
                    settle(level, start, stop, pending, outline, counts)
                if begins_line and around <= F_CLASS and head[START] >= 0:
                    ended = find_macro_end(
                        data, line, eol, keyword, frame, head, frames, counts, outline
                    )
                    if ended >= 0:
                        level = worse(level_in(frames, frame))
                        emit(ended, level, start, stop, outline, counts)
                        part_macro(data, ended, line, i, eol, head, counts)
                if head[START] < 0:
                    head[START] = i
                    head[INDENT] = indent
                take_word(data, i, j, keyword, head)
                i = j
                continue
            if c == 0x7B or (c == 0x3C and after == 0x25):  # { or <%
                size = 1 if c == 0x7B else 2
                if pending[WAITS] != 0:
                    settle(pending[LEVEL], start, stop, pending, outline, counts)
                if head[ANGLE] > 0 and not is_in_template(data, i + size, stop, head):
                    head[ANGLE] = 0
                if guesses and around >= F_FUNCTION:
                    ended = find_ended_function(frame, head, frames)
                    while ended > 0 and frame >= ended:
                        where = head[START]
                        close_frame(where, frame, frames, counts, outline)
                        frame = frames[frame * FRAME + PARENT]
                inner = open_frame(i, i + size, indent, frame, head, frames, counts, outline)
                if inner < 0:
                    break
                frame = inner
                i += size
                around = frames[frame * FRAME + KIND]
                in_table = around == F_INIT or around == F_ENUM
                if not in_table or i - counts[LAST_CUT] >= ELEMENT_BYTES:
                    wait(pending, i, level_in(frames, frame))
                continue
            if c == 0x7D or (c == 0x25 and after == 0x3E):  # } or %>
                size = 1 if c == 0x7D else 2
                i += size
                partner = frame
                if frame == 0:  # one too many
                    extra += 1
                elif guesses and begins_line:
                    partner = find_partner(frame, indent, frames)
                if partner == 0:
                    clear_head(head)
                    wait(pending, i, level_in(frames, frame))
                    continue
                # what waits stays where it is: the end of the last thing in the frame
                if pending[WAITS] != 0:
                    level = worse(pending[LEVEL])
                    settle(level, start, stop, pending, outline, counts)
                while frame > partner:
                    close_frame(i - size, frame, frames, counts, outline)
                    frame = frames[frame * FRAME + PARENT]
                close_frame(i, frame, frames, counts, outline)
                base = frame * FRAME
                closed = frames[base + KIND]
                frame = frames[base + PARENT]
                around = frames[frame * FRAME + KIND]
                counts[TOP] = max(frame + 1, counts[PROTECTED])
                if closed == F_NAMESPACE or closed == F_FUNCTION or closed == F_BLOCK:
                    clear_head(head)
                    wait(pending, i, level_in(frames, frame))
                else:
                    for k in range(HEAD):
                        head[k] = frames[base + SAVED + k]
                    head[PREV] = P_BRACE
                    head[FLAGS] &= ~(LAMBDA_HEAD | REQUIRES_BARE)
                    if head[START] < 0:
                        head[START] = i - size
                continue
            if c == 0x3B:  # ;
                if head[START] < 0 and pending[WAITS] != 0:
                    wait(pending, i + 1, pending[LEVEL])
                elif head[PAREN] == 0:
                    if pending[WAITS] != 0:
                        settle(pending[LEVEL], start, stop, pending, outline, counts)
                    if around <= F_NAMESPACE:
                        # parameters may be declared between `f(a, b)` and its body, as of old
                        flags = head[FLAGS]
                        if flags & PARAMETERS and flags & (CALL_HEAD | CLASS_HEAD | ENUM_HEAD):
                            counts[OLD_STYLE] = head[START]
                            counts[OLD_NAME] = head[CALL]
                            counts[OLD_NAME_END] = head[CALL_END]
                        elif flags & ASSIGN_HEAD:
                            counts[OLD_STYLE] = -1
                    clear_head(head)
                    wait(pending, i + 1, level_in(frames, frame))
                i += 1
                continue
            if pending[WAITS] != 0:
                settle(pending[LEVEL], start, stop, pending, outline, counts)
            if c == 0x5B and begins_line and after == c and around <= F_CLASS and head[START] >= 0:
                ended = find_macro_end(
                    data, line, eol, K_NONE, frame, head, frames, counts, outline
                )
                if ended >= 0:
                    level = worse(level_in(frames, frame))
                    emit(ended, level, start, stop, outline, counts)
                    part_macro(data, ended, line, i, eol, head, counts)
            if head[START] < 0:
                head[START] = i
                head[INDENT] = indent
            if kind == DIGIT or (
                c == 0x2E and i + 1 < stop and peek(classes, np.int64(after)) == DIGIT
            ):
                head[PREV] = P_OTHER
                i = skip_number(data, i, stop, classes)
                continue
            if c == 0x22 or c == 0x27:
                i = skip_quoted(data, i + 1, stop, c, eol)
                if not head[FLAGS] & OPERATOR:
                    head[PREV] = P_STRING
                continue
            if head[FLAGS] & OPERATOR and head[PAREN] == 0:
                if c == 0x28:
                    if head[PREV] != P_OPERATOR:
                        take_brackets(data, i, c, head)
                        i += 1
                        continue
                    # operator()(…): the first pair is its name
                    k = skip_blanks(data, i + 1, stop)
                    i = k if k < stop and peek(data, k) == 0x29 else i
                head[NAME_END] = i + 1
                head[PREV] = P_WORD
                i += 1
                continue
            if c == 0x28 or c == 0x29 or c == 0x5D:
                take_brackets(data, i, c, head)
                i += 1
                continue
            if c == 0x5B or (
                c == 0x3C and after == 0x3A and not (i + 2 < stop and peek(data, i + 2) == 0x3A)
            ):
                if after == 0x5B:
                    end = find_attribute_end(data, i, stop, counts)
                    if end > 0:
                        i = end
                        continue
                take_brackets(data, i, 0x5B, head)
                i += 1 if c == 0x5B else 2
                continue
            if c == 0x3C or c == 0x3E:
                take_angle(c, head)
                i += 1
                continue
            if c == 0x2C:  # ,
                if head[PAREN] == 0 and (around == F_INIT or around == F_ENUM):
                    clear_head(head)
                    if i + 1 - counts[LAST_CUT] >= ELEMENT_BYTES:
                        wait(pending, i + 1, level_in(frames, frame))
                else:
                    head[PREV] = P_OTHER
                i += 1
                continue
            if c == 0x3A:  # :
                if after == 0x3A:
                    head[PREV] = P_SCOPE
                    i += 2
                    continue
                if after == 0x3E:  # :> is ]
                    take_brackets(data, i, 0x5D, head)
                    i += 2
                    continue
                if head[PAREN] == 0 and head[ANGLE] == 0:
                    alone = head[NAME] == head[START] and head[PREV] == P_WORD
                    if around == F_CLASS and (head[FLAGS] & ACCESS_HEAD or alone):
                        clear_head(head)
                        i += 1
                        continue
                    if head[FLAGS] & (CLASS_HEAD | ENUM_HEAD):
                        head[FLAGS] |= TYPE_NAMED | INIT_LIST
                    elif around <= F_CLASS and head[FLAGS] & CALL_HEAD and head[CALL_END] > 0:
                        head[FLAGS] |= INIT_LIST
                    head[PREV] = P_COLON
                i += 1
                continue
            if c == 0x7E:  # ~ joins a destructor's name
                if head[PREV] != P_SCOPE or head[NAME] < 0:
                    head[NAME] = i
                head[PREV] = P_SCOPE
                i += 1
                continue
            if c == 0x3D and head[PAREN] == 0 and head[ANGLE] == 0:
                before = peek(data, i - 1) if i > start else np.uint8(0)
                compares = after == 0x3D or before == 0x3D or before == 0x21
                if not compares and before != 0x3C and before != 0x3E:
                    head[FLAGS] |= ASSIGN_HEAD
                    head[PREV] = P_ASSIGN
                    i += 1
                    continue
            if c == 0x2D and after == 0x3E:  # ->, whose > closes nothing
                i += 1
                head[PREV] = P_OTHER
                if head[PAREN] == 0 and head[ANGLE] == 0 and head[FLAGS] & CALL_HEAD:
                    head[FLAGS] = head[FLAGS] & ~REQUIRES_HEAD | TRAILING_TYPE
            elif c == 0x26 and (head[PREV] == P_PAREN or head[PREV] == P_AFTER):
                head[PREV] = P_AFTER  # a member function for lvalues, or rvalues
            else:
                head[PREV] = P_OTHER
            i += 1
        if counts[FULL] != 0:
            counts[CUTS], counts[NODES] = cuts_before, nodes_before
            return document
        if not guesses and (frame != 0 or extra != 0):
            guesses = True
            counts[CUTS], counts[NODES] = cuts_before, nodes_before
            continue
        for node in range(nodes_before, counts[NODES]):
            if outline.node_end[node] < 0:
                outline.node_end[node] = stop
            if outline.node_parent[node] >= 0:
                outline.node_parent[node] -= nodes_before
        document, guesses = document + 1, False
    outline.cut_first[last] = counts[CUTS]
    outline.node_first[last] = counts[NODES]
    return last
