"""What `render` and its kernels share: kinds of operations, codes, vectors by name."""

from typing import Final, NamedTuple

from penstock.arrays import Bytes, Int32s, Int64s, UInt32s

# What an operation does: the ids of a constant; the next run of text; that part of the next but one
# that the next run is, and then the rest of it; a turn begins.
CONST, RUN, HEAD, REST, TURN = range(5)

# Flags of an operation. A trained range may end after a STOP only.
TRAINED, STOP = 1, 2

# What became of a conversation.
OK, JOINED, NO_STOP, WRONG_ROLE, NOTHING = range(5)
FAULTS: Final = {
    JOINED: ("joined_header", "its first token spans the header and the text: is there white space "
             "at its beginning?"),
    NO_STOP: ("no_stop_token", "what is trained does not end with a control token"),
    WRONG_ROLE: ("wrong_role", "what is trained is of a role that is not to be trained"),
    NOTHING: ("nothing_to_train", "no token of it is trained"),
}  # fmt: skip
"""Reasons, and how they are told."""


class Table(NamedTuple):
    """The operations of a template: what each does, with which ids and which text."""

    kind: Int32s
    flags: Int32s
    first: Int32s
    """The ids of a constant or of a run's head are ids[first:last]; a turn's role is `first`."""
    last: Int32s
    ids: UInt32s
    text_first: Int32s
    """The text of a constant is text[text_first:text_last]."""
    text_last: Int32s
    text: Bytes


class Script(NamedTuple):
    """Conversations as operations, and the runs of text that they take in turn."""

    ops: Int32s
    at: Int64s
    """Conversation k has ops[at[k]:at[k + 1]]."""
    run_ids: UInt32s
    run_at: Int64s
    may_train: Bytes
    """Of each role."""


class Made(NamedTuple):
    """Room for what comes of it; `at` vectors have one more than there are conversations."""

    ids: UInt32s
    at: Int64s
    spans: Int32s
    """Ranges that are trained, from and to, within a conversation."""
    spans_at: Int64s
    turns: Int32s
    """Role and first token of each turn."""
    turns_at: Int64s
    trained: Int64s
    """Tokens of each conversation that are trained."""
    status: Bytes
