"""Keep the files of a pulled dataset within a number of bytes.

In:    a directory, a limit, how far its readers have come (`_position/*.json`)
Out:   leave to bring a file, once there is room for it
Keeps: the limit; every file that a reader has not passed
Never: guesses what has been read: without a position nothing is removed

A reader writes `_position/<name>.json` when its checkpoint is durable: {"shard": 12} means that it
needs shard 12 of the train split and those after it, and none before.
"""

import json
import os
import re
from typing import Final

import msgspec

from penstock.disk import make_own_folder, read_own, replacing
from penstock.errors import BadConfig, LogDamaged
from penstock.store.local import LocalStore
from penstock.store.record import Add, stem_of

POSITIONS: Final = "_position"


class _Position(msgspec.Struct):
    shard: int


def check_reader(reader: str) -> str:
    """Refuse what cannot be the name of a file."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", reader):
        raise BadConfig(
            f"reader is {reader!r}", do="choose a name of letters, digits, dots and dashes"
        )
    return reader


def announce(folder: str | os.PathLike[str], reader: str, shard: int = 0) -> None:
    """Say that a reader begins: what it has not passed stays. One that comes back is as it was."""
    if not os.path.exists(os.path.join(os.fspath(folder), POSITIONS, f"{reader}.json")):
        write_position(folder, reader, shard)


def write_position(folder: str | os.PathLike[str], reader: str, shard: int) -> None:
    """Say that a reader of the dataset at `folder` will never again need a shard before `shard`."""
    check_reader(reader)
    path = os.path.join(os.fspath(folder), POSITIONS)
    make_own_folder(path)
    with replacing(os.path.join(path, f"{reader}.json")) as file:
        file.write(json.dumps({"shard": shard}).encode())


class DiskLimit:
    """Which files are held, which may come, and which are removed for them."""

    def __init__(self, store: LocalStore, limit: int | None) -> None:
        self._store = store
        self._limit = limit
        self._order: dict[str, int] = {}
        """Train shards by name: which they are in the log's order."""
        self._stems: dict[str, int] = {}
        """The same by what the name of a shard shares with that of its token file."""
        self._held: dict[str, int] = {}
        """Files that are here or coming, and their bytes."""
        self._held_bytes = 0
        self._passed = 0
        self._positions: dict[str, int] = {}
        """By the name of the reader's file, as they were last read."""

    @property
    def is_limited(self) -> bool:
        return self._limit is not None

    def know(self, file: Add) -> None:
        """The log names a file. Called in its order."""
        if file.split == "train":
            place = self._order.setdefault(file.name, len(self._order))
            self._stems[stem_of(file.name)] = place

    def admit(self, file: Add) -> bool | None:
        """True if there is room for a file, or it is here; False if nobody needs it any more; None
        if it has to wait. Called in the log's order: a later file never takes an earlier one's
        room."""
        if self._limit is None:
            return True
        if file.name in self._held:
            return True
        if self._store.size(file.name) is not None:
            self._hold(file)
            return True
        if file.bytes > self._limit:
            raise BadConfig(
                f"{file.name} has {file.bytes:,} bytes, max_disk is {self._limit:,}",
                do="allow more than the largest shard, twice as much at least",
            )
        self._read_positions()
        if self._place(file.name) < self._passed:
            return False
        if not self._make_room(self._limit - file.bytes):
            return None
        self._hold(file)
        return True

    def forget(self, name: str) -> None:
        """A file did not come, or was merged into another: it takes no room."""
        if name in self._held:
            self._store.remove(name)
            self._held_bytes -= self._held.pop(name)

    def explain(self, file: Add) -> str:
        """Why a file waits, and what would let it in."""
        if self._positions:
            least = min(self._positions.values())
            readers = ", ".join(f"{name} at shard {at}" for name, at in self._positions.items())
            why = f"readers have passed the shards before {least} ({readers})"
            do = (
                "it resumes when they release more; if none will, their window is larger than the "
                "limit: raise --max_disk. Remove the file of a reader that has ended"
            )
        else:
            why = f"no reader has written its position into {self._store.root / POSITIONS}"
            do = (
                "call loader.release(state) after each checkpoint; if the first has not come yet, "
                "the loader's window is larger than the limit: raise --max_disk"
            )
        return (
            f"{file.name} ({file.bytes:,} bytes) waits for room: {self._held_bytes:,} of "
            f"{self._limit:,} bytes (--max_disk) are held, and {why}; {do}"
        )

    def _place(self, name: str) -> int:
        """Which train shard a file is, or holds the tokens of; others come after all of them."""
        return self._order.get(name, self._stems.get(stem_of(name), 1 << 62))

    def _hold(self, file: Add) -> None:
        self._held[file.name] = file.bytes
        self._held_bytes += file.bytes

    def _make_room(self, most: int) -> bool:
        """Remove shards that readers have passed, in order, until at most `most` bytes are held.

        A shard and its token file go together.
        """
        passed = sorted((name for name in self._held if self._place(name) < self._passed),
                        key=self._place)  # fmt: skip
        last = -1
        for name in passed:
            if self._held_bytes <= most and self._place(name) != last:
                break
            last = self._place(name)
            self._store.remove(name)
            self._held_bytes -= self._held.pop(name)
        return self._held_bytes <= most

    def _read_positions(self) -> None:
        """The least of all readers' positions; none counts as the beginning."""
        folder = self._store.root / POSITIONS
        found: dict[str, int] = {}
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
            try:
                found[path.name] = msgspec.json.decode(read_own(path), type=_Position).shard
            except (OSError, msgspec.MsgspecError, RecursionError) as error:
                raise LogDamaged(
                    f"{path.name} is not a reader's position",
                    where=str(path),
                    why=str(error),
                    do="remove it, if its reader has ended",
                ) from None
        self._positions = found
        if found:
            self._passed = max(self._passed, min(found.values()))
