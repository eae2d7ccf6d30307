"""The kernels of `cpp` that know braces: heads, the frames that they open, and conditions.

A frame is what a brace opens. Its kind is read from its head: what stands between the end of the
last statement and the brace. Frames point to the one around them and are never changed when they
close, so that `#else` can go back to the frame and the head that `#if` saw, by number.
"""

from typing import Any

from penstock.prepare.outline.cpp_head_kernel import (
    ASSIGN_HEAD,
    CALL_HEAD,
    CATCH_HEAD,
    CLASS_HEAD,
    CONTROL_HEAD,
    ENUM_HEAD,
    EXTERN_HEAD,
    INIT_LIST,
    LAMBDA_HEAD,
    NAMESPACE_HEAD,
    NOT_A_MACRO,
    P_AFTER,
    P_ANGLE,
    P_BLOCK,
    P_BRACE,
    P_BRACKET,
    P_COLON,
    P_NONE,
    P_PAREN,
    P_REQUIRES,
    P_STRING,
    P_WORD,
    REQUIRES_BARE,
    RETURN_HEAD,
    RETURNS_CLASS,
    TRAILING_TYPE,
    clear_head,
)
from penstock.prepare.outline.cpp_layout import (
    AFTER_MACROS,
    ANGLE,
    C_BEST,
    C_BEST_HEAD,
    C_FRAME,
    C_HEAD,
    C_PROTECTED,
    C_TOP,
    C_ZERO,
    CALL,
    CALL_END,
    CALL_STOP,
    COLUMN,
    CONDITION,
    CONDITIONS,
    DEPTH,
    FLAGS,
    FRAME,
    FULL,
    FULL_FRAMES,
    FULL_NODES,
    HEAD,
    HEAD_COLUMN,
    INDENT,
    K_ACCESS,
    K_AFTER,
    K_BLOCK,
    K_FINAL,
    K_NAMESPACE,
    K_REQUIRES,
    K_TEMPLATE,
    KIND,
    LAST_FUNCTION,
    MACROS,
    MAX_CONDITIONS,
    NAME,
    NAME_END,
    NEST,
    NODE,
    NODE_ROOM,
    NODES,
    OLD_NAME,
    OLD_NAME_END,
    OLD_STYLE,
    OUTER,
    PAREN,
    PARENT,
    PREV,
    PROTECTED,
    SAVED,
    START,
    TOP,
    TWIN,
    TYPE,
    TYPE_END,
)
from penstock.prepare.outline.cpp_lex_kernel import D_ELSE, D_IF, all_capitals, is_zero, skip_blanks
from penstock.prepare.outline.outline import (
    DECLARATION,
    ELEMENT,
    FUNCTION,
    MAX_DEPTH,
    MEMBER,
    NAMESPACE,
    STATEMENT,
)
from penstock.simd import next_index, njit, peek

# kinds of frames; those that make nodes have the numbers of the kinds of nodes
F_FILE, F_NAMESPACE, F_CLASS, F_ENUM, F_FUNCTION, F_BLOCK, F_LAMBDA, F_INIT = range(8)

MAX_TWINS = 64
"""Braces that the branches of one #if may leave open, and branches that may do so."""
MACRO_BYTES = 1024
"""Macros above a function that are kept together with it, if they have no more bytes than this."""
MAX_CLIMB = 64
"""How many frames a brace may close that stands where an outer one began."""


@njit
def is_bare(head: Any) -> Any:
    """Whether nothing but attributes stands before a brace."""
    prev = head[PREV]
    only = head[NAME] < 0 and head[FLAGS] == 0 and (prev == P_NONE or prev == P_WORD)
    return head[START] < 0 or only


@njit
def kind_of(head: Any, around: Any, old_style: Any) -> Any:
    """What the brace after this head opens."""
    flags, prev = head[FLAGS], head[PREV]
    after_call = prev == P_PAREN or prev == P_AFTER
    if head[PAREN] > 0 or head[ANGLE] > 0:
        return F_LAMBDA if after_call or prev == P_BRACKET or flags & LAMBDA_HEAD else F_INIT
    if prev == P_REQUIRES or (flags & REQUIRES_BARE and prev == P_PAREN):
        return F_INIT
    if flags & NAMESPACE_HEAD and not flags & ASSIGN_HEAD:
        return F_NAMESPACE
    if flags & (ENUM_HEAD | CLASS_HEAD) and not flags & ASSIGN_HEAD:
        returned = after_call or flags & (TRAILING_TYPE | RETURNS_CLASS)
        if not (flags & CALL_HEAD and returned):
            return F_ENUM if flags & ENUM_HEAD else F_CLASS
    if around <= F_CLASS:
        exports = prev == P_BLOCK and not flags & CALL_HEAD  # or else a function's try
        if flags & EXTERN_HEAD and (prev == P_STRING or exports):
            return F_NAMESPACE
        if flags & ASSIGN_HEAD:
            lambda_ends = after_call or prev == P_BRACKET or prev == P_WORD
            return F_LAMBDA if flags & LAMBDA_HEAD and lambda_ends else F_INIT
        if flags & INIT_LIST:
            return F_INIT if prev == P_WORD or prev == P_ANGLE else F_FUNCTION
        if flags & CALL_HEAD or flags & CATCH_HEAD:
            return F_FUNCTION
        if is_bare(head):
            return F_FUNCTION if old_style >= 0 and around <= F_NAMESPACE else F_BLOCK
        # one word alone is a macro that begins something; more are a variable and its value
        return F_BLOCK if prev == P_COLON or head[NAME] == head[START] else F_INIT
    if around == F_ENUM or around == F_INIT:
        return F_LAMBDA if flags & LAMBDA_HEAD and (after_call or prev == P_BRACKET) else F_INIT
    if flags & LAMBDA_HEAD and (after_call or prev == P_BRACKET or prev == P_WORD):
        return F_LAMBDA
    if head[START] < 0 or prev == P_COLON or prev == P_BRACE or prev == P_BLOCK:
        return F_BLOCK
    if after_call:
        return F_LAMBDA if flags & (ASSIGN_HEAD | RETURN_HEAD) else F_BLOCK
    return F_INIT


@njit
def put_node(
    kind: Any, begins: Any, body: Any, named: Any, named_end: Any, parent: Any, counts: Any,
    outline: Any,
) -> Any:  # fmt: skip
    n = counts[NODES]
    if n >= counts[NODE_ROOM]:
        counts[FULL] = FULL_NODES
        return -1
    outline.node_kind[n] = kind
    outline.node_start[n] = begins
    outline.node_body[n] = body
    outline.node_end[n] = -1
    outline.name_start[n] = named
    outline.name_end[n] = named_end
    outline.node_parent[n] = parent
    counts[NODES] = n + 1
    return n


@njit
def open_frame(
    at: Any, body: Any, column: Any, frame: Any, head: Any, frames: Any, counts: Any,
    outline: Any,
) -> Any:  # fmt: skip
    """Push what the brace at `at` opens; its number, or -1 if there is no room."""
    top = counts[TOP]
    if (top + 1) * FRAME > len(frames):
        counts[FULL] = FULL_FRAMES
        return -1
    outside = frame * FRAME
    around = frames[outside + KIND]
    kind = kind_of(head, around, counts[OLD_STYLE])
    flags = head[FLAGS]
    node = frames[outside + NODE]
    base = top * FRAME
    frames[base + KIND] = kind
    frames[base + PARENT] = frame
    frames[base + TWIN] = -1
    frames[base + NEST] = frames[outside + NEST] + 1
    frames[base + COLUMN] = column
    frames[base + HEAD_COLUMN] = head[INDENT] if head[START] >= 0 else column
    depth = 0
    if kind >= F_BLOCK and (kind == F_INIT) == (around == F_INIT) and around >= F_FUNCTION:
        depth = frames[outside + DEPTH] + 1
    frames[base + DEPTH] = depth
    if kind == F_FUNCTION and flags & CATCH_HEAD and not flags & CALL_HEAD:
        if counts[LAST_FUNCTION] >= 0:  # the function whose try block this belongs to goes on
            node = counts[LAST_FUNCTION]
    elif NAMESPACE <= kind <= FUNCTION and (kind != F_NAMESPACE or flags & NAMESPACE_HEAD):
        begins = head[START] if head[START] >= 0 else at
        named, named_end = head[TYPE], head[TYPE_END]
        if kind == F_FUNCTION:
            named, named_end = head[CALL], head[CALL_END]
            if counts[OLD_STYLE] >= 0 and is_bare(head):
                begins = counts[OLD_STYLE]
                named, named_end = counts[OLD_NAME], counts[OLD_NAME_END]
        widest = begins
        if 0 <= head[OUTER] < begins:
            widest = head[OUTER]
        if kind != F_FUNCTION:
            begins = widest
        elif counts[MACROS] < widest <= counts[AFTER_MACROS]:
            widest = counts[MACROS]
        last = counts[NODES] - 1
        # nodes are in order
        if widest < begins and (last < 0 or outline.node_start[last] <= widest):
            # another branch of an #if has a head of its own for this body, or macros stand above
            # it: all is kept together if that fits, and if not, this head
            wide = put_node(kind, widest, body, 0, 0, node, counts, outline)
            if wide < 0:
                return -1
        node = put_node(kind, begins, body, named, named_end, node, counts, outline)
        if node < 0:
            return -1
    frames[base + NODE] = node
    for k in range(HEAD):
        frames[base + SAVED + k] = head[k]
    counts[TOP] = top + 1
    counts[OLD_STYLE] = -1
    clear_head(head)
    return top


@njit
def end_node(at: Any, frame: Any, frames: Any, outline: Any) -> Any:
    """The node that this frame made, if it made one, ends here, if not later; its number, or -1."""
    base = frame * FRAME
    node = frames[base + NODE]
    if node < 0 or node == frames[frames[base + PARENT] * FRAME + NODE]:
        return -1
    if at > outline.node_end[node]:
        outline.node_end[node] = at
        # the wide one, if there is one, stands before it with the same body
        if node > 0 and outline.node_body[node - 1] == outline.node_body[node]:
            outline.node_end[node - 1] = at
    return node


@njit
def close_frame(at: Any, frame: Any, frames: Any, counts: Any, outline: Any) -> None:
    """The brace before `at` closes this frame and its twins in other branches of an #if."""
    for _ in range(MAX_TWINS):
        if frame <= 0:
            return
        node = end_node(at, frame, frames, outline)
        if node >= 0 and frames[frame * FRAME + KIND] == F_FUNCTION:
            counts[LAST_FUNCTION] = node
        frame = frames[frame * FRAME + TWIN]


@njit
def join_branches(one: Any, other: Any, frames: Any) -> None:
    """What two branches of an #if left open is closed by the same braces."""
    a, b = one, other
    if frames[a * FRAME + NEST] != frames[b * FRAME + NEST]:
        return
    for _ in range(MAX_TWINS):
        if a == b:
            return
        if a < b and frames[b * FRAME + TWIN] < 0:
            frames[b * FRAME + TWIN] = a
        a = frames[a * FRAME + PARENT]
        b = frames[b * FRAME + PARENT]


@njit
def leave_branch(at: Any, frame: Any, first: Any, frames: Any, outline: Any) -> None:
    """What a branch opened, from frame `first` on, and left open ends with the branch."""
    while frame >= first and frame > 0:
        end_node(at, frame, frames, outline)
        frame = frames[frame * FRAME + PARENT]


@njit
def keep_branch(
    at: Any,
    frame: Any,
    head: Any,
    frames: Any,
    conditions: Any,
    base: Any,
    outline: Any,
) -> None:
    """A branch ends: the deepest counts, a later one if equal; its head may begin in another."""
    if conditions[base + C_ZERO] != 0:
        leave_branch(at, frame, conditions[base + C_TOP], frames, outline)
        return
    best = conditions[base + C_BEST]
    if best >= 0:
        join_branches(best, frame, frames)
        deeper = frames[best * FRAME + NEST] - frames[frame * FRAME + NEST]
        if deeper > 0:
            leave_branch(at, frame, conditions[base + C_TOP], frames, outline)
            return
        if deeper < 0:
            leave_branch(at, best, conditions[base + C_TOP], frames, outline)
    first, outer = conditions[base + C_BEST_HEAD + START], conditions[base + C_BEST_HEAD + OUTER]
    conditions[base + C_BEST] = frame
    for n in range(HEAD):
        conditions[base + C_BEST_HEAD + n] = head[n]
    if best == frame and first >= 0 and first != head[START]:
        conditions[base + C_BEST_HEAD + OUTER] = outer if outer >= 0 else first


@njit
def condition(
    data: Any, at: Any, name: Any, end: Any, kind: Any, frame: Any, head: Any, frames: Any,
    conditions: Any, counts: Any, outline: Any,
) -> Any:  # fmt: skip
    """Heed #if, #else, #endif; the frame to go on in, and in `head` what was begun there."""
    depth = counts[CONDITIONS]
    if kind == D_IF:
        counts[CONDITIONS] = depth + 1
        if depth < MAX_CONDITIONS:
            base = depth * CONDITION
            conditions[base + C_FRAME] = frame
            conditions[base + C_ZERO] = is_zero(data, name, end)
            conditions[base + C_BEST] = -1
            conditions[base + C_TOP] = counts[TOP]
            conditions[base + C_PROTECTED] = counts[PROTECTED]
            for n in range(HEAD):
                conditions[base + C_HEAD + n] = head[n]
            counts[PROTECTED] = counts[TOP]
        return frame
    if depth == 0 or depth > MAX_CONDITIONS:
        if kind != D_ELSE and depth > 0:
            counts[CONDITIONS] = depth - 1
        return frame
    base = (depth - 1) * CONDITION
    if kind == D_ELSE:
        keep_branch(at, frame, head, frames, conditions, base, outline)
        conditions[base + C_ZERO] = 0
        counts[PROTECTED] = counts[TOP]
        for n in range(HEAD):
            head[n] = conditions[base + C_HEAD + n]
        return conditions[base + C_FRAME]
    counts[CONDITIONS] = depth - 1
    if conditions[base + C_BEST] >= 0:
        keep_branch(at, frame, head, frames, conditions, base, outline)
        for n in range(HEAD):
            head[n] = conditions[base + C_BEST_HEAD + n]
        frame = conditions[base + C_BEST]
    elif conditions[base + C_ZERO] != 0:  # nothing of it was ever compiled
        leave_branch(at, frame, conditions[base + C_TOP], frames, outline)
        for n in range(HEAD):
            head[n] = conditions[base + C_HEAD + n]
        frame = conditions[base + C_FRAME]
    # what the branches closed is not needed any more, unless a condition around this one needs it
    counts[PROTECTED] = conditions[base + C_PROTECTED]
    counts[TOP] = max(frame + 1, conditions[base + C_TOP])
    return frame


@njit
def is_macro_call(data: Any, frame: Any, head: Any, frames: Any, outline: Any) -> Any:
    """Whether the head, a name and its arguments, is not that of a constructor."""
    first, last = head[CALL], head[CALL_END]
    if first != head[START] or last == 0 or head[FLAGS] & (NOT_A_MACRO | INIT_LIST | ASSIGN_HEAD):
        return False
    node = frames[frame * FRAME + NODE]
    if frames[frame * FRAME + KIND] == F_CLASS and node >= 0:
        size = outline.name_end[node] - outline.name_start[node]
        if size == last - first:
            for k in range(size):
                if peek(data, first + k) != peek(data, outline.name_start[node] + k):
                    break
            else:
                return False
    for k in range(first, last):
        c = peek(data, k)
        if c == 0x3A or c == 0x7E:
            return False
    return True


@njit
def has_empty_line(data: Any, line: Any, stop: Any, eol: Any) -> Any:
    """Whether one of the lines from `line` to `stop` is empty."""
    while line < stop:
        first = skip_blanks(data, line, stop)
        if peek(data, first) == 0x0D:
            first += 1
        if first >= stop or peek(data, first) == eol:
            return True
        line = next_index(data, first, stop, eol) + 1
    return False


@njit
def part_macro(data: Any, ended: Any, line: Any, at: Any, eol: Any, head: Any,
               counts: Any) -> None:  # fmt: skip
    """The head so far is a macro by itself, `at` begins something new.

    It may yet be an attribute: what directly follows it is kept together with it if that fits.
    """
    first = head[START]
    if first != counts[AFTER_MACROS] or first - counts[MACROS] > MACRO_BYTES:
        counts[MACROS] = first
    counts[AFTER_MACROS] = at
    if has_empty_line(data, ended, line, eol):
        counts[MACROS] = at
    clear_head(head)


@njit
def level_in(frames: Any, frame: Any) -> Any:
    """How much a cut between two things in this frame breaks."""
    kind = frames[frame * FRAME + KIND]
    if kind <= F_NAMESPACE:
        return DECLARATION
    if kind == F_CLASS:
        return MEMBER
    depth = frames[frame * FRAME + DEPTH]
    if depth > MAX_DEPTH - 1:
        depth = MAX_DEPTH - 1
    if kind == F_ENUM or kind == F_INIT:
        return ELEMENT + depth
    return STATEMENT + depth


@njit
def find_partner(frame: Any, column: Any, frames: Any) -> Any:
    """For a brace that begins its line at this column, where braces are known not to match: the
    innermost frame that began at the same column; 0 if it belongs to none; else this frame."""
    here = frame
    for _ in range(MAX_CLIMB):
        if here == 0:
            break
        base = here * FRAME
        if frames[base + COLUMN] == column or frames[base + HEAD_COLUMN] == column:
            return here
        here = frames[base + PARENT]
    return 0 if frames[frame * FRAME + COLUMN] < column else frame


@njit
def find_ended_function(frame: Any, head: Any, frames: Any) -> Any:
    """Where braces are known not to match: the function around this frame that must have ended if
    this head begins another, no further right; or -1."""
    flags, column = head[FLAGS], head[INDENT]
    if head[PREV] != P_PAREN or flags & (CALL_HEAD | CONTROL_HEAD | ASSIGN_HEAD) != CALL_HEAD:
        return -1
    found = -1
    for _ in range(MAX_CLIMB):
        base = frame * FRAME
        if frame == 0 or frames[base + KIND] <= F_CLASS:
            break
        if frames[base + KIND] == F_FUNCTION and frames[base + HEAD_COLUMN] >= column:
            found = frame
        frame = frames[base + PARENT]
    return found


@njit
def find_macro_end(
    data: Any, line: Any, eol: Any, keyword: Any, frame: Any, head: Any, frames: Any, counts: Any,
    outline: Any,
) -> Any:  # fmt: skip
    """Where the line after a macro begins, if the head so far is a macro by itself, or -1.

    Macros often have no semicolon; what begins on a line of its own after one begins something
    new, unless it is a macro for specifiers.
    """
    flags, prev = head[FLAGS], head[PREV]
    if prev == P_PAREN and head[PAREN] == 0 and flags & CALL_HEAD:
        goes_on = keyword == K_AFTER or keyword == K_FINAL or keyword == K_REQUIRES
        if goes_on or keyword == K_BLOCK:
            return -1
        if keyword == K_TEMPLATE or keyword == K_NAMESPACE:  # these never go on with anything
            return next_index(data, head[CALL_STOP], line, eol) + 1
        if not is_macro_call(data, frame, head, frames, outline):
            head[FLAGS] = flags | NOT_A_MACRO  # its name is not looked at again
            return -1
        # or else a function of old, whose parameters are declared before its body
        counts[OLD_STYLE] = head[START]
        counts[OLD_NAME] = head[CALL]
        counts[OLD_NAME_END] = head[CALL_END]
        return next_index(data, head[CALL_STOP], line, eol) + 1
    if prev != P_WORD or head[NAME] < head[START]:
        return -1
    ended = next_index(data, head[NAME_END], line, eol) + 1
    if keyword == K_ACCESS and frames[frame * FRAME + KIND] == F_CLASS:
        return -1 if flags & CLASS_HEAD else ended  # as after Q_OBJECT
    if keyword == K_TEMPLATE and flags == 0:
        return ended
    # without arguments it must be in capitals, and have a line of something else after it
    if head[NAME] != head[START] or flags != 0 or ended >= line:
        return -1
    if peek(data, skip_blanks(data, ended, line)) == 0x23:
        return -1
    return ended if all_capitals(data, head[NAME], head[NAME_END]) else -1
