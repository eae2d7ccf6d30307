"""The kernels of `cpp` that know heads: what stands between the last statement and a brace.

A head is kept as a few words: where it began, what stood before, how many brackets are open, and
flags for the keywords and signs that say what its brace opens.
"""

from typing import Any

from penstock.prepare.outline.cpp_layout import (
    ANGLE,
    AT_ANGLE,
    CALL,
    CALL_END,
    CALL_STOP,
    FLAGS,
    K_ACCESS,
    K_AFTER,
    K_ATTRIBUTE,
    K_BLOCK,
    K_CATCH,
    K_CLASS,
    K_CONTROL,
    K_ELSE,
    K_ENUM,
    K_EXPORT,
    K_EXTERN,
    K_FINAL,
    K_NAMESPACE,
    K_NONE,
    K_OPERATOR,
    K_REQUIRES,
    K_RETURN,
    K_SIGN,
    K_TEMPLATE,
    K_WHILE,
    NAME,
    NAME_END,
    OUTER,
    PAREN,
    PREV,
    START,
    TYPE,
    TYPE_END,
)
from penstock.prepare.outline.cpp_lex_kernel import all_capitals
from penstock.simd import njit, peek

# what stood before, in head[PREV]
(
    P_NONE, P_WORD, P_PAREN, P_BRACKET, P_ANGLE, P_ASSIGN, P_BRACE, P_COLON, P_BLOCK, P_AFTER,
    P_STRING, P_SCOPE, P_OPERATOR, P_REQUIRES, P_CLASS, P_CLASS_NAME, P_OTHER,
) = range(17)  # fmt: skip

# flags of a head
NAMESPACE_HEAD = 1
CLASS_HEAD = 2
ENUM_HEAD = 4
EXTERN_HEAD = 8
CALL_HEAD = 16
ASSIGN_HEAD = 32
INIT_LIST = 64
LAMBDA_HEAD = 128
RETURN_HEAD = 256
TYPE_NAMED = 512
ACCESS_HEAD = 1024
CATCH_HEAD = 2048
REQUIRES_HEAD = 4096
ATTRIBUTE = 8192
TEMPLATE = 16384
OPERATOR = 32768
REQUIRES_BARE = 65536
IN_ATTRIBUTE = 131072
PARAMETERS = 262144
CONTROL_HEAD = 524288
NOT_A_MACRO = 1048576
TRAILING_TYPE = 2097152
RETURNS_CLASS = 4194304
# after these `requires` is no name
NOT_A_NAME = CALL_HEAD | ASSIGN_HEAD | INIT_LIST | LAMBDA_HEAD | RETURN_HEAD | REQUIRES_HEAD


@njit
def clear_head(head: Any) -> None:
    head[START] = -1
    head[OUTER] = -1
    head[FLAGS] = 0
    head[PREV] = P_NONE
    head[PAREN] = 0
    head[ANGLE] = 0
    head[NAME] = -1
    head[NAME_END] = 0
    head[CALL] = head[CALL_END] = 0
    head[TYPE] = head[TYPE_END] = 0


@njit
def take_word(data: Any, i: Any, j: Any, keyword: Any, head: Any) -> None:
    """A word or keyword becomes part of the head."""
    flags, prev = head[FLAGS], head[PREV]
    if head[ANGLE] > 0 or head[PAREN] > 0:
        head[PREV] = P_AFTER if keyword == K_AFTER else P_WORD
        if keyword == K_CLASS and head[PAREN] == 1 and head[ANGLE] == 0:
            head[PREV] = P_CLASS
        if keyword == K_RETURN and head[PAREN] == 0:
            head[FLAGS] = flags | RETURN_HEAD
        return
    head[PREV] = P_WORD
    if flags & OPERATOR:
        head[NAME_END] = j
        return
    # int requires(…, char *requires(…, int namespace(…, struct namespace *f(…: names of C
    if keyword == K_REQUIRES:
        if (prev == P_WORD or prev == P_OTHER) and not flags & NOT_A_NAME:
            keyword = K_NONE
    elif keyword == K_NAMESPACE:
        after = peek(data, j + 1) if peek(data, j) == 0x20 else peek(data, j)
        if after == 0x28 or prev == P_CLASS:
            keyword = K_NONE
    if keyword == K_NONE:
        if prev != P_SCOPE or head[NAME] < 0:
            head[NAME] = i
        head[NAME_END] = j
        if prev == P_PAREN or prev == P_AFTER:
            flags |= PARAMETERS
        flags &= ~(ATTRIBUTE | REQUIRES_BARE)
        if flags & (CLASS_HEAD | ENUM_HEAD | NAMESPACE_HEAD) and not flags & TYPE_NAMED:
            if prev != P_SCOPE or head[TYPE_END] <= 0:
                head[TYPE] = i
            head[TYPE_END] = j
            if prev == P_CLASS:
                head[PREV] = P_CLASS_NAME
    elif keyword == K_FINAL:
        head[PREV] = P_AFTER if flags & CALL_HEAD else P_WORD
    elif keyword == K_NAMESPACE:
        flags |= NAMESPACE_HEAD
    elif keyword == K_CLASS or keyword == K_ENUM:
        if prev == P_PAREN:  # a macro and its arguments, before the class; or parameters
            flags = flags & ~CALL_HEAD | PARAMETERS
        elif prev == P_AFTER:  # const struct S: parameters
            flags |= PARAMETERS
        if not flags & CALL_HEAD:
            if keyword == K_ENUM:
                flags |= ENUM_HEAD
            elif not flags & ENUM_HEAD:
                flags |= CLASS_HEAD
            flags &= ~TYPE_NAMED
            head[TYPE] = head[TYPE_END] = 0
            head[PREV] = P_CLASS
    elif keyword == K_EXTERN:
        flags |= EXTERN_HEAD
    elif keyword == K_EXPORT:
        flags |= EXTERN_HEAD
        head[PREV] = P_BLOCK
    elif keyword == K_TEMPLATE:
        flags |= TEMPLATE
    elif keyword == K_OPERATOR:
        flags = flags & ~ATTRIBUTE | OPERATOR | NOT_A_MACRO
        if prev != P_SCOPE or head[NAME] < 0:
            head[NAME] = i
        head[NAME_END] = j
        head[PREV] = P_OPERATOR
    elif keyword == K_BLOCK or keyword == K_ELSE:
        head[PREV] = P_BLOCK
    elif keyword == K_CATCH:
        if prev == P_NONE:
            flags |= CATCH_HEAD
    elif keyword == K_ACCESS:
        if prev == P_NONE:
            flags |= ACCESS_HEAD
    elif keyword == K_AFTER:
        head[PREV] = P_AFTER if prev == P_PAREN or prev == P_AFTER else P_WORD
    elif keyword == K_ATTRIBUTE:
        flags |= ATTRIBUTE
        head[PREV] = prev
    elif keyword == K_RETURN:
        flags |= RETURN_HEAD
        head[PREV] = P_OTHER
    elif keyword == K_REQUIRES:
        # after a sign in a clause or an expression it has parameters and a body of its own; after
        # anything else it begins a clause, of which a function may have two
        inside = flags & (REQUIRES_HEAD | ASSIGN_HEAD | RETURN_HEAD)
        if prev == P_ASSIGN or (prev == P_OTHER and inside):
            flags |= REQUIRES_BARE
            head[PREV] = P_REQUIRES
        else:
            head[PREV] = P_OTHER
        flags |= REQUIRES_HEAD
    elif keyword == K_CONTROL or keyword == K_WHILE:
        flags |= CONTROL_HEAD
    elif keyword == K_SIGN:
        head[PREV] = P_OTHER
    head[FLAGS] = flags


@njit
def take_brackets(data: Any, i: Any, c: Any, head: Any) -> None:
    """A parenthesis or bracket becomes part of the head."""
    flags, prev = head[FLAGS], head[PREV]
    if c == 0x28:  # (
        if head[PAREN] == 0 and head[ANGLE] == 0:
            if flags & ATTRIBUTE:
                head[FLAGS] = flags & ~ATTRIBUTE | IN_ATTRIBUTE
            elif prev == P_CLASS_NAME:
                pass  # a macro with arguments between `class` and its name
            elif flags & OPERATOR or prev == P_WORD or prev == P_ANGLE:
                if not flags & (INIT_LIST | ASSIGN_HEAD) and head[NAME_END] > 0:
                    head[FLAGS] = flags & ~OPERATOR | CALL_HEAD
                    # of two calls the later has the name, unless it looks like a macro
                    again = flags & CALL_HEAD and head[CALL_END] > 0
                    capitals = all_capitals(data, head[NAME], head[NAME_END])
                    if not again or not (flags & TRAILING_TYPE or capitals):
                        head[CALL] = head[NAME]
                        head[CALL_END] = head[NAME_END]
                    # struct S f(…, but class API ALIGN(… and struct S<void(…
                    if flags & (CLASS_HEAD | ENUM_HEAD) and not (flags & TYPE_NAMED or capitals):
                        head[FLAGS] |= RETURNS_CLASS
            elif prev != P_NONE and not flags & REQUIRES_HEAD:
                head[FLAGS] = flags | CALL_HEAD
        head[PAREN] += 1
        head[PREV] = P_OTHER
    elif c == 0x29:  # )
        if head[PAREN] > 0:
            head[PAREN] -= 1
        if head[PAREN] == 0 and flags & IN_ATTRIBUTE:
            head[FLAGS] = flags & ~IN_ATTRIBUTE
            head[PREV] = P_AFTER if flags & CALL_HEAD else P_WORD
        elif head[PAREN] == 0 and prev == P_CLASS:  # a macro around `class`: ALIGNED(class) A {
            head[FLAGS] = flags & ~(CALL_HEAD | TYPE_NAMED) | CLASS_HEAD
            head[TYPE] = head[TYPE_END] = 0
            head[PREV] = P_CLASS
        else:
            head[PREV] = P_PAREN
            head[CALL_STOP] = i + 1
    elif c == 0x5B:  # [
        if prev != P_WORD and prev != P_PAREN and prev != P_BRACKET and prev != P_ANGLE:
            head[FLAGS] = flags | LAMBDA_HEAD
        head[PREV] = P_OTHER
    else:
        head[PREV] = P_BRACKET


@njit
def take_angle(c: Any, head: Any) -> None:
    """< or >: only those of `template <…>` are counted; elsewhere they may be comparisons."""
    if head[ANGLE] > 0:
        if head[PAREN] == head[AT_ANGLE]:
            head[ANGLE] += 1 if c == 0x3C else -1
        head[PREV] = P_NONE if head[ANGLE] == 0 else P_ANGLE
    elif c == 0x3C:
        if head[FLAGS] & TEMPLATE:
            head[FLAGS] &= ~TEMPLATE
            head[ANGLE] = 1
            head[AT_ANGLE] = head[PAREN]
        elif head[TYPE_END] > 0:
            head[FLAGS] |= TYPE_NAMED
        head[PREV] = P_OTHER
    else:
        head[PREV] = P_ANGLE


@njit
def is_in_template(data: Any, i: Any, stop: Any, head: Any) -> Any:
    """Whether the brace before i belongs to an argument of `template <…>`: a value or a lambda.

    If not, a < that compares was counted.
    """
    prev = head[PREV]
    if head[FLAGS] & LAMBDA_HEAD and (prev == P_BRACKET or prev == P_PAREN or prev == P_AFTER):
        return True
    return prev == P_ANGLE or (i < stop and peek(data, i) == 0x7D)
