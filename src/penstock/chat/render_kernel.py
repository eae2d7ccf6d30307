"""The kernels of `render`: put the tokens of conversations together, and their texts."""

from typing import Any

import numpy as np

from penstock.chat.render_layout import (
    CONST,
    HEAD,
    JOINED,
    NO_STOP,
    NOTHING,
    OK,
    REST,
    STOP,
    TRAINED,
    TURN,
    WRONG_ROLE,
)
from penstock.simd import njit


@njit
def assemble(table: Any, script: Any, made: Any) -> None:
    """The ids, trained ranges and turns of each conversation, and what is wrong with it."""
    run = 0
    out = np.int64(0)
    span = np.int64(0)
    turn = np.int64(0)
    for k in range(len(script.at) - 1):
        begin = out
        open_at = np.int64(-1)
        stopped = False
        role = -1
        status = OK
        rest = np.int64(0)
        joined = False
        count = np.int64(0)
        made.at[k] = begin
        made.spans_at[k] = span
        made.turns_at[k] = turn
        for o in range(script.at[k], script.at[k + 1]):
            op = script.ops[o]
            kind = table.kind[op]
            if kind == TURN:
                role = table.first[op]
                made.turns[turn] = role
                made.turns[turn + 1] = np.int32(out - begin)
                turn += 2
                continue
            trained = (table.flags[op] & TRAINED) != 0
            first = np.int64(table.first[op])
            head = np.int64(table.last[op]) - first
            start = out
            if kind == CONST:
                for i in range(head):
                    made.ids[out + i] = table.ids[first + i]
                out += head
            elif kind == REST:
                if trained and joined:
                    status = JOINED
                for i in range(script.run_at[run - 1] + rest, script.run_at[run]):
                    made.ids[out] = script.run_ids[i]
                    out += 1
            elif kind == HEAD:
                # the head must be tokens of its own, those that a prompt ends with
                head_at, text_at = script.run_at[run], script.run_at[run + 1]
                rest = text_at - head_at
                size = script.run_at[run + 2] - text_at
                run += 2
                joined = rest > size
                rest = min(rest, size)
                for i in range(rest):
                    joined |= script.run_ids[text_at + i] != script.run_ids[head_at + i]
                    made.ids[out + i] = script.run_ids[text_at + i]
                out += rest
            else:
                text_at = script.run_at[run]
                size = script.run_at[run + 1] - text_at
                run += 1
                if trained and head > size:
                    status = JOINED
                elif trained:
                    for i in range(head):
                        if script.run_ids[text_at + i] != table.ids[first + i]:
                            status = JOINED
                for i in range(size):
                    made.ids[out + i] = script.run_ids[text_at + i]
                start = out + min(head, size)
                out += size
            if trained and (role < 0 or not script.may_train[role]):
                status = WRONG_ROLE
            if open_at >= 0 and (not trained or start > made.spans[span + 1] + begin):
                # the range before ends here
                if not stopped:
                    status = NO_STOP
                count += made.spans[span + 1] - made.spans[span]
                span += 2
                open_at = np.int64(-1)
            if trained and out > start:
                if open_at < 0:
                    open_at = start
                    made.spans[span] = np.int32(max(np.int64(1), start - begin))
                made.spans[span + 1] = np.int32(out - begin)
                stopped = (table.flags[op] & STOP) != 0
        if open_at >= 0:
            if not stopped:
                status = NO_STOP
            count += made.spans[span + 1] - made.spans[span]
            span += 2
        if status == OK and count <= 0:
            status = NOTHING
        made.trained[k] = count
        made.status[k] = status
    n = len(script.at) - 1
    made.at[n] = out
    made.spans_at[n] = span
    made.turns_at[n] = turn


@njit
def join_texts(table: Any, ops: Any, at: Any, data: Any, data_at: Any, out: Any, ends: Any) -> None:
    """The whole text of each conversation, as a template would print it."""
    run = 0
    end = np.int64(0)
    for k in range(len(at) - 1):
        ends[k] = end
        for o in range(at[k], at[k + 1]):
            op = ops[o]
            kind = table.kind[op]
            if kind == TURN or kind == REST:
                continue
            if kind == CONST:
                for i in range(table.text_first[op], table.text_last[op]):
                    out[end] = table.text[i]
                    end += 1
                continue
            if kind == HEAD:
                run += 1
            for i in range(data_at[run], data_at[run + 1]):
                out[end] = data[i]
                end += 1
            run += 1
    ends[len(at) - 1] = end
