"""The kernels of the plan: permute samples, mix sources, pack documents into rows.

The packing kernel is one loop over documents. It stops where Python must help: a source has no
samples left in its cycle, a rest is over, the rows asked for are there. Called again, it goes on
as if it had never stopped.
"""

from typing import Any

import numpy as np

from penstock.simd import njit, splitmix64
from penstock.stream.plan_layout import (
    BESTFIT,
    CONTEXT,
    CROP,
    CROPPED,
    DOCUMENTS,
    DONE,
    DRAWN,
    DROP,
    FILL,
    FREE,
    GROW,
    HELD,
    HELD_TOKENS,
    LEDGER,
    NEWEST,
    OLDEST,
    OPEN_AT,
    OPEN_LEFT,
    OPEN_PASS,
    OPEN_ROW,
    OPEN_SHARD,
    OPEN_SOURCE,
    PAD,
    PADDED,
    PIECE,
    PLACED,
    READ,
    REFILL,
    REST_OVER,
    ROW_SOURCE,
    ROWS,
    SEGMENT,
    SEGMENTS,
    SKIPPED,
    SKIPPED_DOCUMENTS,
)  # fmt: skip

# Pieces in the buffer of BESTFIT before the first row.
FIRST_PIECES = 32

# Pieces among which the first of the last two of a row is looked for; some 10 are enough.
LOOKED_AT = 1024


@njit
def shuffle(order: Any, key: Any, first: Any) -> None:
    """Fisher and Yates on int32, with splitmix64 as RNG; from `first` on the order is right.

    It fixes the last place first, so who needs the end of an order alone stops there.
    """
    state = splitmix64(np.uint64(key))
    for k in range(len(order) - 1, max(first - 1, 0), -1):
        state = splitmix64(state)
        low = (state & np.uint64(0xFFFFFFFF)) * np.uint64(k + 1)
        high = (state >> np.uint64(32)) * np.uint64(k + 1) + (low >> np.uint64(32))
        pick = np.int64(high >> np.uint64(32))
        held = order[k]
        order[k] = order[pick]
        order[pick] = held


@njit
def _highest(word: Any) -> Any:
    """The place of the highest bit that is set."""
    place = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(shift):
            word = word >> np.uint64(shift)
            place += shift
    return place


@njit
def _longest(words: Any, room: Any) -> Any:
    """The greatest length of a piece in the buffer that is not over `room`; 0 if there is none."""
    block = room >> 6
    word = words[block] & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(63 - (room & 63)))
    while word == 0 and block > 0:
        block -= 1
        word = words[block]
    if word == 0:
        return 0
    return (block << 6) + _highest(word)


@njit
def _hold(scalars: Any, buffer: Any, at: Any, length: Any) -> None:
    """The next `length` tokens of the open document become the newest piece of the buffer."""
    pieces, older, newer, after, first, last, words = buffer
    slot = scalars[FREE]
    scalars[FREE] = newer[slot]
    for k in range(4):
        pieces[slot * PIECE + k] = scalars[OPEN_SOURCE + k]
    pieces[slot * PIECE + 4] = at
    pieces[slot * PIECE + 5] = length
    older[slot] = scalars[NEWEST]
    newer[slot] = -1
    if scalars[NEWEST] >= 0:
        newer[scalars[NEWEST]] = slot
    else:
        scalars[OLDEST] = slot
    scalars[NEWEST] = slot
    after[slot] = -1
    if last[length] >= 0:
        after[last[length]] = slot
    else:
        first[length] = slot
        words[length >> 6] |= np.uint64(1) << np.uint64(length & 63)
    last[length] = slot
    scalars[HELD] += 1
    scalars[HELD_TOKENS] += length


@njit
def _release(scalars: Any, buffer: Any, slot: Any) -> None:
    """Take a piece out of the buffer. Of its length it is the oldest."""
    pieces, older, newer, after, first, last, words = buffer
    length = pieces[slot * PIECE + 5]
    first[length] = after[slot]
    if after[slot] < 0:
        last[length] = -1
        words[length >> 6] &= ~(np.uint64(1) << np.uint64(length & 63))
    if older[slot] >= 0:
        newer[older[slot]] = newer[slot]
    else:
        scalars[OLDEST] = newer[slot]
    if newer[slot] >= 0:
        older[newer[slot]] = older[slot]
    else:
        scalars[NEWEST] = older[slot]
    newer[slot] = scalars[FREE]
    scalars[FREE] = slot
    scalars[HELD] -= 1
    scalars[HELD_TOKENS] -= length


@njit
def _next_piece(scalars: Any, buffer: Any, room: Any) -> Any:
    """The piece that comes next into a row with so much room; -1 if none fits.

    The oldest, as long as there is room for more than two of the mean length; then the first of
    those two that fill the room best. Rows of the longest that fit used up what is long, and were
    left with what fills no row: 0.947 of them was filled with conversations of 288 to 683 tokens in
    rows of 2,048. Now 0.9998 is, and a piece waits half as long.
    """
    best = _longest(buffer.words, room)
    if best == 0:
        return -1
    slot = buffer.first[best]
    if best == room:
        return slot
    share = 2 * room * scalars[HELD]
    oldest = scalars[OLDEST]
    if share >= 5 * scalars[HELD_TOKENS] and buffer.pieces[oldest * PIECE + 5] <= room:
        return oldest
    if share < 3 * scalars[HELD_TOKENS]:
        return slot
    piece = oldest
    for _ in range(LOOKED_AT):
        length = buffer.pieces[piece * PIECE + 5]
        if length < room:
            other = _longest(buffer.words, room - length)
            if other == length and buffer.after[buffer.first[length]] < 0:
                other = _longest(buffer.words, length - 1)  # it is itself
            if other > 0 and length + other > best:
                best, slot = length + other, piece
                if best == room:
                    break
        piece = buffer.newer[piece]
        if piece < 0:
            break
    return slot


@njit
def _place(
    scalars: Any, out: Any, ledger: Any, numbers: Any, base: Any, at: Any, length: Any
) -> None:
    """Write a segment of the row in making. `numbers[base:]` names its document."""
    if scalars[FILL] == 0:
        scalars[ROW_SOURCE] = numbers[base]
    k = scalars[SEGMENTS] * SEGMENT
    out[k] = scalars[ROWS]
    for n in range(4):
        out[k + 1 + n] = numbers[base + n]
    out[k + 5] = at
    out[k + 6] = length
    scalars[SEGMENTS] += 1
    scalars[FILL] += length
    ledger[numbers[base] * LEDGER + PLACED] += length
    ledger[numbers[base] * LEDGER + CONTEXT] += 1  # its first token has nothing before it


@njit
def _end_row(scalars: Any, fills: Any, ledger: Any, seq_len: Any) -> None:
    """A row is full, or nothing fits it: its padding is that of its first document's source."""
    fills[scalars[ROWS]] = scalars[FILL]
    ledger[scalars[ROW_SOURCE] * LEDGER + PADDED] += seq_len - scalars[FILL]
    scalars[ROWS] += 1
    scalars[FILL] = 0


@njit
def _draw(arena: Any, sources: Any, scalars: Any, how: Any) -> Any:
    """Open the next document: that of the source furthest behind its weight.

    Answers DONE with OPEN_LEFT above 0, REST_OVER, REFILL + source, or -1 if there is no source.
    """
    at, end, weight, credit, ledger = sources
    long, seq_len = how.long, how.seq_len
    while scalars[OPEN_LEFT] == 0:
        if scalars[DRAWN] == how.rest_until:
            return REST_OVER
        best = -1
        for s in range(len(weight)):
            if weight[s] > 0.0 and (best < 0 or credit[s] > credit[best]):
                best = s
        if best < 0:
            return -1
        k = at[best]
        if k == end[best]:
            return REFILL + best
        at[best] += 1
        scalars[DRAWN] += 1
        length = np.int64(arena.lengths[k])
        banned = length < 0
        if banned:
            length = -1 - length
        line = best * LEDGER
        ledger[line + DOCUMENTS] += 1
        ledger[line + READ] += length
        kept = length
        if banned or (long == DROP and length > seq_len):
            kept = np.int64(0)
            ledger[line + SKIPPED] += length
            ledger[line + SKIPPED_DOCUMENTS] += 1
        elif long == CROP and length > seq_len:
            kept = seq_len
            ledger[line + CROPPED] += length - seq_len
        amount = 1.0
        if how.by_tokens:
            amount = np.float64(kept)
        if not banned:
            for s in range(len(weight)):
                credit[s] += weight[s] * amount
            credit[best] -= amount
        scalars[OPEN_SOURCE] = best
        scalars[OPEN_PASS] = arena.passes[k]
        scalars[OPEN_SHARD] = arena.shards[k]
        scalars[OPEN_ROW] = arena.rows[k]
        scalars[OPEN_AT] = 0
        scalars[OPEN_LEFT] = kept
    return DONE


@njit
def advance(
    arena: Any, sources: Any, scalars: Any, buffer: Any, out: Any, fills: Any, how: Any, want: Any,
    given: Any,
) -> Any:  # fmt: skip
    """Make rows until there are `want` in `out`, or until Python must help.

    `given` rows were made before those in `out`; the buffer grows with the rows, so that the first
    one does not wait for a full buffer. At the end of all sources it answers DONE with fewer rows.
    """
    ledger, pieces = sources.ledger, buffer.pieces
    pack, seq_len = how.pack, how.seq_len
    capacity = len(buffer.older)
    room = len(out) // SEGMENT
    while scalars[ROWS] < want:
        ended = False
        if scalars[SEGMENTS] + (min(capacity, seq_len) if pack == BESTFIT else 1) > room:
            return GROW
        if pack != BESTFIT:
            if scalars[OPEN_LEFT] == 0:
                code = _draw(arena, sources, scalars, how)
                if code > 0:
                    return code
                ended = code < 0
            if ended:
                if scalars[FILL] > 0:
                    _end_row(scalars, fills, ledger, seq_len)
                return DONE
            taken = min(scalars[OPEN_LEFT], seq_len - scalars[FILL])
            _place(scalars, out, ledger, scalars, OPEN_SOURCE, scalars[OPEN_AT], taken)
            scalars[OPEN_AT] += taken
            scalars[OPEN_LEFT] -= taken
            if pack == PAD or scalars[FILL] == seq_len:
                _end_row(scalars, fills, ledger, seq_len)
            continue
        while scalars[HELD] < min(capacity, FIRST_PIECES + given + scalars[ROWS]):
            if scalars[OPEN_LEFT] == 0:
                code = _draw(arena, sources, scalars, how)
                if code > 0:
                    return code
                if code < 0:
                    break
            taken = min(scalars[OPEN_LEFT], seq_len)
            _hold(scalars, buffer, scalars[OPEN_AT], taken)
            scalars[OPEN_AT] += taken
            scalars[OPEN_LEFT] -= taken
        if scalars[HELD] == 0:
            return DONE
        slot = scalars[OLDEST]
        while slot >= 0:
            base = slot * PIECE
            _place(scalars, out, ledger, pieces, base, pieces[base + 4], pieces[base + 5])
            _release(scalars, buffer, slot)
            slot = -1
            if scalars[FILL] < seq_len:
                slot = _next_piece(scalars, buffer, seq_len - scalars[FILL])
        _end_row(scalars, fills, ledger, seq_len)
    return DONE
