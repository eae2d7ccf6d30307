"""Read files as blocks of whole lines, also while they are still being written.

In:    a path (plain, .gz, .zst, .bz2, .xz), the offset to resume from
Out:   blocks that end in a newline; at the end, what stands after the last newline
Keeps: at most one block and one line of `max_line_bytes` in memory, whatever the file holds
Never: takes silence for the end, hands out half a line, reads on in a file that was replaced

Offsets count the bytes of the text: for a compressed file those after decompression.
"""

import json
import os
from pathlib import Path
from typing import Final

import xxhash

from penstock.arrays import Bytes
from penstock.disk import replacing
from penstock.errors import BadInput, InputMissing
from penstock.ingest.jsonl import LINE_TOO_LONG, Block, Reject
from penstock.ingest.open import (
    COMPRESSED,
    ByteReader,
    CompressedBytes,
    PlainBytes,
    explained,
    open_regular,
    replaced,
)
from penstock.kernels import PAD, Kernel, used_buffer

BLOCK_BYTES: Final = 8 << 20
_NEWLINE = 0x0A
SAMPLE_BYTES: Final = 200

_next_index = Kernel("penstock.simd", "next_index", "int64(uint8[::1], int64, int64, int64)")
_last_index = Kernel("penstock.simd", "last_index", "int64(uint8[::1], int64, int64, int64)")

DONE_SUFFIX: Final = ".done"


class LineFile:
    """One input, read in blocks of whole lines from an offset on."""

    def __init__(
        self,
        path: Path,
        *,
        offset: int = 0,
        proof: dict[str, str | int] | None = None,
        max_line_bytes: int,
        block_bytes: int = BLOCK_BYTES,
        reader: ByteReader | None = None,
    ) -> None:
        """`reader` gives the bytes from `offset` on, where they are not those behind `path`."""
        self.path = path
        self.is_compressed = reader is None and path.suffix in COMPRESSED
        self._max_line_bytes = max_line_bytes
        self._block_bytes = block_bytes
        self._hash = xxhash.xxh3_64()  # of a compressed input's text, up to `_hashed`
        self._hashed = offset
        self._bytes: ByteReader
        if reader is not None:
            self._bytes = reader
        elif self.is_compressed:
            self._bytes = CompressedBytes(path, offset, self._hash)
        else:
            self._bytes = PlainBytes(path, offset)
        self._buffer: Bytes = used_buffer(block_bytes)
        self._base = offset  # where buffer[0] stands in the input
        self._taken = 0  # buffer[:taken] has been handed out
        self._have = 0  # buffer[:have] is filled
        self._skip_from = -1  # where a line began that is too long to keep
        self._heads: dict[int, bytes] = {}  # the first bytes of such lines, for `sample`
        if proof and self.prove(offset) != proof:
            self.close()
            raise replaced(path, f"the bytes before {offset:,} are not those that were read")

    def next_block(self) -> Block | None:
        """The next whole lines, or None when there is nothing new at the moment."""
        self._drop_taken()
        too_long: list[Reject] = []
        searched = 0
        while True:
            if self._have + PAD >= len(self._buffer):
                self._grow()
            room = self._buffer.data[self._have : len(self._buffer) - PAD]
            got = self._bytes.read_into(room[: self._block_bytes])
            if got == 0:
                return Block(self._buffer, 0, 0, self._base, too_long) if too_long else None
            self._have += got
            start = 0
            if self._skip_from >= 0:
                start = _next_index(self._buffer, 0, self._have, _NEWLINE)
                if start == self._have:
                    self._discard()
                    return Block(self._buffer, 0, 0, self._base, too_long)
                self._keep_head(start)
                start += 1
                too_long.append(self._too_long(self._base + start))
            last = _last_index(self._buffer, max(start, searched), self._have, _NEWLINE)
            if last >= 0:
                self._taken = last + 1
                return Block(self._buffer, start, last + 1, self._base, too_long)
            if start:
                self._taken = start
                self._drop_taken()
            if self._have > self._max_line_bytes:
                self._skip_from = self._base
                self._discard()
            searched = self._have

    def fragment(self) -> Block | None:
        """What stands after the last newline, once the input is known to have ended."""
        self._drop_taken()
        if self._skip_from >= 0:
            return Block(self._buffer, 0, 0, self._base, [self._too_long(self._base)])
        if self._have == 0:
            return None
        self._buffer[self._have] = _NEWLINE
        self._taken = self._have
        return Block(self._buffer, 0, self._have + 1, self._base, is_fragment=True)

    def sample(self, reject: Reject, limit: int = SAMPLE_BYTES) -> str:
        """The first bytes of a rejected line, for people; what is not UTF-8 is escaped."""
        start = reject.start - self._base
        if reject.start in self._heads:
            raw = self._heads.pop(reject.start)[:limit]
        else:
            raw = bytes(self._buffer[start : min(start + limit, reject.end - self._base)])
        return raw.rstrip(b"\n").decode("utf-8", "backslashreplace")

    def prove(self, to: int) -> dict[str, str | int]:
        """What shows later that the bytes before `to` are still the same.

        A plain file is asked for its first and last bytes before `to`, so that going on costs
        nothing; a compressed one is read from its start anyway, and answers for all of them.
        `to` lies in the block handed out last.
        """
        if isinstance(self._bytes, PlainBytes):
            return self._bytes.prove(to)
        self._hash_to(to)
        return {"text": self._hash.hexdigest()}

    @property
    def position(self) -> int:
        """How far it has been read, half lines included."""
        return self._base + self._have

    def still_there(self) -> None:
        """Raise InputReplaced if the path no longer leads to the file that is being read."""
        self._bytes.still_there()

    def size(self) -> int | None:
        """Its size now, where that can be known without reading it."""
        return self._bytes.size()

    def close(self) -> None:
        self._bytes.close()

    def _hash_to(self, to: int) -> None:
        if to > self._hashed:
            self._hash.update(self._buffer.data[self._hashed - self._base : to - self._base])
            self._hashed = to

    def _drop_taken(self) -> None:
        if self.is_compressed:
            self._hash_to(self._base + self._taken)
        rest = self._have - self._taken
        if self._taken:
            self._buffer[:rest] = self._buffer[self._taken : self._have].copy()
        self._base += self._taken
        self._have = rest
        self._taken = 0

    def _discard(self) -> None:
        self._keep_head(self._have)
        self._taken = self._have
        self._drop_taken()

    def _keep_head(self, stop: int) -> None:
        """Remember how a line that is too long began: its first bytes, however they came."""
        head = self._heads.get(self._skip_from, b"")
        self._heads[self._skip_from] = head + bytes(
            self._buffer[: min(stop, SAMPLE_BYTES - len(head))]
        )

    def _too_long(self, end: int) -> Reject:
        reject = Reject(LINE_TOO_LONG, self._skip_from, end, self._skip_from + self._max_line_bytes)
        self._skip_from = -1
        return reject

    def _grow(self) -> None:
        larger = used_buffer(2 * len(self._buffer))
        larger[: self._have] = self._buffer[: self._have]
        self._buffer = larger


def done_marker(path: Path) -> Path:
    """The marker that a producer leaves when `path` is complete.

    >>> done_marker(Path("data/chunked.jsonl")).name
    'chunked.jsonl.done'
    """
    return path.with_name(path.name + DONE_SUFFIX)


def mark_done(path: str | os.PathLike[str]) -> None:
    """Say that `path` is complete: for producers, after their last write."""
    path = Path(path)
    with replacing(done_marker(path)) as file:
        file.write(json.dumps({"bytes": path.stat().st_size}).encode() + b"\n")


def read_done(path: Path) -> int | None:
    """The bytes that the marker promises, -1 if it is empty, or None if there is no marker."""
    marker = done_marker(path)
    try:
        with os.fdopen(open_regular(marker), "rb") as opened, explained(marker):
            text = opened.read(1 << 16)
    except InputMissing:
        return None
    if not text.strip():
        return -1
    try:
        promised = int(json.loads(text)["bytes"])
        if promised < 0:
            raise ValueError
        return promised
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise BadInput(
            f"{marker.name} is not a marker penstock knows",
            where=str(marker),
            why=f"it holds {text[:40].decode('utf-8', 'backslashreplace')!r}",
            do='leave it empty, or write {"bytes": size of the file} into it',
        ) from None
