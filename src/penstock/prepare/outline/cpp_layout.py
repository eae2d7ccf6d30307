"""What `cpp` and its kernels share: positions in their vectors, codes, named tuples of vectors."""

from typing import NamedTuple

from penstock.arrays import Bytes, Int64s, UInt64s

# the classes of bytes
OTHER, SPACE, NEWLINE, WORD, DIGIT = range(5)

KEYWORD_SLOTS = 256
# groups of words that say what a brace opens
(
    K_NONE, K_NAMESPACE, K_CLASS, K_ENUM, K_EXTERN, K_TEMPLATE, K_OPERATOR, K_BLOCK, K_CATCH,
    K_ACCESS, K_AFTER, K_ATTRIBUTE, K_RETURN, K_REQUIRES, K_CONTROL, K_WHILE, K_ELSE, K_FINAL,
    K_EXPORT, K_SIGN,
) = range(20)  # fmt: skip

# the head of what comes next, in `head`: INDENT is the column at which its first line begins, OUTER
# where it began in an earlier branch of an #if, PAREN how many parentheses are open, ANGLE how many
# < of a `template <`, AT_ANGLE the parentheses open at the first of them, CALL the name before a
# parenthesis, TYPE that of a class
(
    START, INDENT, OUTER, FLAGS, PREV, PAREN, ANGLE, AT_ANGLE, NAME, NAME_END, CALL, CALL_END,
    CALL_STOP, TYPE, TYPE_END,
) = range(15)  # fmt: skip
HEAD = TYPE_END + 1

# fields of a frame, before the head around it
KIND, PARENT, NODE, TWIN, DEPTH, NEST, COLUMN, HEAD_COLUMN, SAVED = range(9)
FRAME = SAVED + HEAD

# fields of a condition, before the heads: at #if, and at the end of the branch that counts so far
C_FRAME, C_ZERO, C_BEST, C_TOP, C_PROTECTED, C_HEAD = range(6)
C_BEST_HEAD = C_HEAD + HEAD
CONDITION = C_BEST_HEAD + HEAD
MAX_CONDITIONS = 256
"""Conditions nested deeper than this are not heeded."""

# what the kernel keeps in `counts`; FULL says what there was no room for; MOST_… are the
# most for one document, …_ROOM where its room ends
(
    CUTS, NODES, TOP, LAST_CUT, CONDITIONS, PROTECTED, FULL, NO_RAW, LAST_FUNCTION, OLD_STYLE,
    OLD_NAME, OLD_NAME_END, NO_ATTRIBUTE, MOST_CUTS, MOST_NODES, CUT_ROOM, NODE_ROOM, MACROS,
    AFTER_MACROS,
) = range(19)  # fmt: skip
COUNTS = AFTER_MACROS + 1
FULL_CUTS, FULL_NODES, FULL_FRAMES = 1, 2, 3

# a cut that waits for the token after it, in `pending`
WAITS, WHERE, LEVEL, FIXED = range(4)
PENDING = FIXED + 1


class Lexicon(NamedTuple):
    """What bytes and words are."""

    classes: Bytes
    """Of each byte, twice: the second is for texts in which a carriage return ends a line."""
    words: UInt64s
    """Keywords by their first bytes and length, hashed into KEYWORD_SLOTS."""
    numbers: Bytes
    """The group of each; K_NONE where a slot is free."""


class State(NamedTuple):
    """What the kernel works with; `counts` tells the caller how far it came."""

    frames: Int64s
    conditions: Int64s
    counts: Int64s
    head: Int64s
    pending: Int64s
