"""The folder that a provider and its consumers share, and what each may conclude from it.

In:    data/<dataset>/queue
Out:   which batches there are, which are done with, who is at work; the files themselves
Keeps: batches [floor, next) of a split are there, each created once; below the floor they are done
       with and may be removed, and nobody makes or takes them again. The floor only rises.
       A power cut may take or damage batches of a provider that can make them again, and nothing
       else: meta, ends, floors, claims and acks are durable before anybody acts on them
Never: decides by a clock, or by which files a listing shows: names are computed from numbers

    queue/meta.json                      created once: meta, settings, seed, what a batch is
          _provider                      locked by the provider that runs
          train/00000000000000000012.safetensors …
                _floor/00000000000000000008   created once each; the highest counts
                _read/rank-0             how far a consumer has read: paces the provider, no more
                end.json                 created once, if there is a last batch
                _claim, _ack, _lease     see claims.py
          val/…
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.arrays import Rooms
from penstock.disk import make_own_folder, open_own, read_own
from penstock.errors import BadBatch, BadConfig, LogDamaged, NoDataset, StoreFailed
from penstock.queue.batch_file import SUFFIX, Arrays, BatchFile, Layout, Schema
from penstock.store.local import Draft, LocalStore
from penstock.store.store import AlreadyThere

SPLITS: Final = ("train", "val")
QUEUE: Final = "queue"
_META: Final = "meta.json"
_END: Final = "end.json"
_MODE: Final = "mode.json"
_PROVIDER: Final = "_provider"
_FOLDERS: Final = ("_read", "_claim", "_ack", "_lease", "_floor")
"""In the order in which a purge empties them."""
_BATCHES: Final = re.compile(r"\d{20}\.safetensors")
_OURS: Final = re.compile(r"\d{20}\.safetensors|\.tmp-\d+-[0-9a-f]+|end\.json|mode\.json")
_FORMAT: Final = 1
POLLS_S: Final = (0.0005, 0.01)
"""The first and the longest pause between two looks for what another process does."""
_LOCK_TRIES: Final = 6
"""Looks at the provider's lock: a consumer that asks who holds it has it for a moment."""


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the batches of a queue are, and what they were made under."""

    format: int
    dataset: str
    meta: dict[str, Any]
    """What `build_meta` gave."""
    settings: dict[str, Any]
    """The settings of the shared config that decide batches."""
    chosen: bool
    """Whether the provider names those settings; otherwise they are all that might."""
    seed: int
    batch_size: int
    batches_per_file: int
    config: str
    """The file that the settings are of, for messages alone."""
    fingerprint: str
    filling: str = ""
    """A random name: after a purge the same batches come again, under another one."""

    @classmethod
    def make(cls, **given: Any) -> "About":
        made = cls(format=_FORMAT, fingerprint="", filling=secrets.token_hex(8), **given)
        return msgspec.structs.replace(made, fingerprint=made._sum())

    def _sum(self) -> str:
        told = [
            self.meta,
            self.settings,
            self.chosen,
            self.seed,
            self.batch_size,
            self.batches_per_file,
        ]
        text = json.dumps([self.format, self.dataset, *told], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def decides(self) -> dict[str, Any]:
        """All that decides batches."""
        return {
            **self.settings, "meta": self.meta, "seed": self.seed, "batch_size": self.batch_size,
            "batches_per_file": self.batches_per_file,
        }  # fmt: skip

    def is_whole(self) -> bool:
        return self.format == _FORMAT and self.fingerprint == self._sum()

    def layout(self, split: str, where: str) -> Layout:
        """What files of a split must be."""
        schema = Schema.parse(self.meta.get("batch_schema"), where)
        return Layout(schema, self.batch_size, split, self.fingerprint, self.batches_per_file)

    @property
    def command(self) -> str:
        """What fills the queue."""
        return command_for(self.config)


def command_for(config: str) -> str:
    """What fills the queue of a config."""
    return f"penstock prepare {config or 'CONFIG'}"


def changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    within: str = "",
    *,
    told: str = "{!r} before, {!r} now",
) -> list[str]:
    """What differs between two sets of settings as JSON has them: there 1 and 1.0 are two values.

    >>> changes({"meta": {"size": 27}, "level": 1}, {"meta": {"size": 28}, "level": 1.0})
    ['level: 1 before, 1.0 now', 'meta.size: 27 before, 28 now']
    """
    found = []
    for name in sorted({*before, *now}):
        one, two = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(two, dict):
            found += changes(one, two, f"{within}{name}.", told=told)
        elif json.dumps(one, sort_keys=True) != json.dumps(two, sort_keys=True):
            found.append(f"{within}{name}: {told.format(one, two)}")
    return found


def stale(found: Sequence[str], command: str, where: str) -> BadConfig:
    """The error for a queue whose batches were made under something else than what the command
    makes."""
    return BadConfig(
        "the queue holds batches that were made under other settings",
        where=where,
        why="\n".join(found),
        do=f"purge it: {command} --purge; or go back to those settings",
    )


class Queue:
    """The queue of a dataset."""

    def __init__(self, data_dir: str | os.PathLike[str]) -> None:
        """`data_dir` is the dataset's folder, data/<dataset>."""
        self.root = Path(data_dir) / QUEUE
        self.where = str(self.root)
        self._store = LocalStore(self.root)

    def find(self) -> About | None:
        """What the queue is; None while there is no `meta.json`."""
        if not self.root.is_dir():
            raise NoDataset(
                "Queue directory not found",
                where=self.where,
                why="no provider has made it yet, or the trainer runs in another folder",
                do="run `python prepare.py CONFIG` with the same config, from the same folder; "
                "or penstock prepare CONFIG",
            )
        try:
            about = msgspec.json.decode(self._store.read(_META), type=About)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise self._damaged(str(error)) from None
        if not about.is_whole():
            raise self._damaged("its fingerprint is not that of what it says")
        return about

    def _damaged(self, why: str) -> LogDamaged:
        return LogDamaged(
            f"{_META} of the queue is not as a provider writes it",
            where=self.where,
            why=why,
            do="purge the queue: penstock prepare CONFIG --purge",
        )

    def open(self, about: About) -> None:
        """Let the queue be what a provider says, or refuse it if it is something else. For the
        provider that holds the lock."""
        for root in (self.root, *(self.root / name for name in SPLITS)):
            if root.is_dir():  # names of one that was killed may not be durable yet
                store = LocalStore(root)
                store.epoch = 1
                store.settle()
        found = self.find()
        if found is None:
            for name in SPLITS:
                self._clear(name)  # what a purge left that was killed
                split = Split(self.root / name, about.layout(name, self.where), make=True)
                split.store.settle()  # or a power cut could give back an end, or acks of before
            with contextlib.suppress(AlreadyThere):
                self._store.create(_META, json.dumps(msgspec.to_builtins(about)).encode())
            found = self.find()
        if found is None or found.fingerprint != about.fingerprint:
            known = found or about
            raise stale(changes(known.decides(), about.decides()), about.command, self.where)

    def split(self, name: str, about: About, *, consumer: bool = False) -> "Split":
        """One of its splits, as the provider or a consumer has it."""
        if name not in SPLITS:
            raise BadConfig(f"split is {name!r}", do=f"choose from {', '.join(SPLITS)}")
        found = Split(self.root / name, about.layout(name, self.where))
        found.store.epoch = int(consumer)  # temporary files say whose they are
        return found

    def purge(self) -> None:
        """Remove all batches, and all that is known of them. Killed, it is done by the next."""
        if self.root.is_dir():
            self._store.remove(_META)
            self._store.settle()  # or a power cut could give it back, and not what it is about
            for name in SPLITS:
                self._clear(name)

    def _clear(self, name: str) -> None:
        root = self.root / name
        if not root.is_dir():
            return
        LocalStore(self.root).refuse_link(name)
        store = LocalStore(root)
        for file in os.listdir(root):
            if _OURS.fullmatch(file):
                with store.explained("remove", file):
                    os.unlink(root / file)
        for folder in _FOLDERS:  # the floor last: without it numbers would be used again
            store.refuse_link(folder)
            with contextlib.suppress(FileNotFoundError):
                for file in os.listdir(root / folder):
                    with store.explained("remove", f"{folder}/{file}"):
                        os.unlink(root / folder / file)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the provider of this queue; the lock ends with its process."""
        LocalStore(self.root, make=True)
        descriptor = open_own(self.root / _PROVIDER, 0o644)
        try:
            if not _lock_soon(descriptor):
                raise BadConfig(
                    "another provider fills this queue",
                    where=self.where,
                    do="let it, or end it first; ranks and consumers may share one queue",
                )
            yield
        finally:
            os.close(descriptor)

    def has_provider(self) -> bool:
        """Whether a provider of this machine runs."""
        try:
            descriptor = open_own(self.root / _PROVIDER, make=False, write=False)
        except OSError:
            return False
        try:
            return not _lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)


class Split:
    """The batches of a split."""

    def __init__(self, root: Path, layout: Layout, *, make: bool = False) -> None:
        self.root, self.layout = root, layout
        self.store = LocalStore(root, make=make)
        self._floor = 0
        """The highest floor that was seen."""
        if make:
            self._raise(0)

    def floor(self) -> int:
        """The first batch that is not done with."""
        try:
            names = os.listdir(self.root / "_floor")
        except FileNotFoundError:
            names = []
        found = [int(name) for name in names if name.isdecimal()]
        if not found:
            raise LogDamaged(
                "the queue does not say which batches are done with",
                where=str(self.root / "_floor"),
                why="it was purged while it was in use, or changed by hand",
                do="start again; if that does not help: penstock prepare CONFIG --purge",
            )
        self._floor = max(self._floor, *found)
        return self._floor

    def raise_floor(self, number: int) -> None:
        """All batches below are done with: nobody will ask for them again. Durable when it
        returns; then their files are removed."""
        before = self.floor()
        if number > before:
            self._raise(number)
            self._floor = number
        self._remove(before, number)

    def _raise(self, number: int) -> None:
        self.create(f"_floor/{number:020d}", b"")

    def _remove(self, before: int, number: int) -> None:
        """Remove what a floor that has risen leaves behind."""
        each = self.layout.each
        for first in range(self.layout.first(before), self.layout.first(number), each):
            self.store.remove(self.layout.name(first))
        # the floor before stays: a listing that is under way sees one of the two
        for name in os.listdir(self.root / "_floor"):
            if name.isdecimal() and int(name) < min(before, number):
                self.store.remove(f"_floor/{name}")

    def sweep(self) -> None:
        """Remove what killed processes left: files below the floor, and temporary files of those
        that stand where this one does, providers or consumers."""
        floor, epoch = self.layout.first(self.floor()), self.store.epoch
        for folder in (self.root, self.root / "_floor"):
            for name in os.listdir(folder):
                number = name.removesuffix(SUFFIX)
                is_done = number.isdecimal() and number != name and int(number) < floor
                if is_done or name.startswith(f".tmp-{epoch}-"):
                    with self.store.explained("remove", name):
                        (folder / name).unlink(missing_ok=True)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object once; whether it was us."""
        for is_last in (False, True):
            try:
                self.store.create(name, data)
                return True
            except AlreadyThere:
                return False
            except StoreFailed as error:
                # another took our temporary file for one of a process that was killed
                if is_last or not isinstance(error.__cause__, FileNotFoundError):
                    raise
        raise AssertionError("unreachable")

    def has(self, number: int) -> bool:
        """Whether the file with a batch is there."""
        return self.store.size(self.layout.name(number)) is not None

    def first_missing(self, number: int) -> int:
        """The first batch from that one on whose file is not there."""
        while self.has(number):
            number = self.layout.first(number) + self.layout.each
        return number

    def open(self, number: int) -> BatchFile:
        """The file that has a batch; FileNotFoundError if it is not there."""
        name, first = self.layout.name(number), self.layout.first(number)
        descriptor = self.store.open_file(name)
        return BatchFile(descriptor, self.layout, first, str(self.root / name))

    def draft(self, first: int, batches: Sequence[Arrays]) -> Draft:
        """Write a file of batches that has no name yet."""
        return self.store.draft(self.layout.name(first), self.layout.encode(first, batches))

    def made(self) -> list[int]:
        """The first batches of the files that are there, those that are done with aside."""
        floor, each, found = self.layout.first(self.floor()), self.layout.each, []
        for name in os.listdir(self.root):
            if _BATCHES.fullmatch(name) and (number := int(name[:20])) % each == 0:
                found.append(number)
        return sorted(number for number in found if number >= floor)

    def is_whole(self, number: int, end: int | None, rooms: Mapping[str, Rooms]) -> bool:
        """Whether the file that begins with a batch is what it was when it appeared. All of it is
        read. FileNotFoundError if it is not there."""
        each = self.layout.each
        batches = each if end is None else min(each, end - number)
        try:
            with contextlib.closing(self.open(number)) as file:
                for one in range(file.batches):
                    file.read(number + one, rooms)
                return file.batches == batches
        except BadBatch:
            return False

    def sync(self, stop: int) -> None:
        """Make all files before batch `stop` durable."""
        firsts = range(self.layout.first(self.floor()), stop, self.layout.each)
        self.store.sync(map(self.layout.name, firsts))

    def publish(self, drafts: Sequence[Draft], *, synced: bool) -> None:
        """Let files appear, in order."""
        self.store.publish(drafts, synced=synced)
        floor = self.layout.name(self.floor())
        for draft in drafts:
            if draft.name < floor:  # it was there before, and is done with
                self.store.remove(draft.name)

    def end(self) -> int | None:
        """How many batches there are in all, if that is known."""
        found: int | None = self._told(_END, "batches")
        return found

    def set_end(self, batches: int) -> int:
        """There will be no more batches than these; what holds, if that was said before."""
        self.create(_END, json.dumps({"batches": batches}).encode())
        found = self.end()
        return batches if found is None else found

    def agree(self, mode: str) -> None:
        """Let all consumers of the split take batches in one way."""
        self.create(_MODE, json.dumps({"mode": mode}).encode())
        if (found := self._told(_MODE, "mode")) != mode:
            raise BadConfig(
                f"batches of this split are taken by {found}, not by {mode}",
                where=str(self.root),
                why="another consumer began so, and its batches would be given twice",
                do="take them in the same way, or purge the queue: penstock prepare CONFIG --purge",
            )

    def _told(self, name: str, key: str) -> Any:
        try:
            found = json.loads(self.store.read(name))[key]
            if type(found) is not {_END: int, _MODE: str}[name]:
                raise TypeError(key)
            return found
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise LogDamaged(
                f"{name} of the queue is not as it was written",
                where=str(self.root),
                do="purge the queue: penstock prepare CONFIG --purge",
            ) from None

    def wanted_from(self, floor: int) -> int:
        """The first batch that no consumer has asked for: a hint."""
        marks = [floor]
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.root / "_read"):
                marks.append(read_mark(self.root / "_read" / name) or 0)
        return max(marks)


class Mark:
    """A number that one process writes and others read. It is not synced: a hint, or a pulse."""

    def __init__(self, path: Path) -> None:
        make_own_folder(path.parent)
        self._path = path
        self._store = LocalStore(path.parent)
        with self._store.explained("write", path.name):
            self._descriptor = open_own(path, 0o644)

    def write(self, number: int) -> None:
        with self._store.explained("write", self._path.name):
            os.pwrite(self._descriptor, b"%020d\n" % number, 0)

    def lock(self) -> bool:
        """Be the only one with this mark, until it is closed; False if another is."""
        return _lock_soon(self._descriptor)

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed the file."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self, *, remove: bool = False) -> None:
        if self._descriptor >= 0:
            if remove and not self.is_removed:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = -1


def read_mark(path: Path) -> int | None:
    """The number of a mark; None if there is none."""
    try:
        text = read_own(path)
    except OSError:
        return None
    return int(text) if re.fullmatch(rb"\d{20}\n", text) else None


def checked_meta(given: Any, where: str) -> dict[str, Any]:
    """What `build_meta` gave, if JSON can hold it and give it back."""
    if not isinstance(given, Mapping):
        raise BadConfig(f"build_meta gave {type(given).__name__}", where=where, do="return a dict")
    _check_json("build_meta()", given, where)
    found: dict[str, Any] = json.loads(json.dumps(given))
    return found


def _check_json(name: str, value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise BadConfig(
                    f"{name} has the key {key!r}",
                    where=where,
                    why="keys of JSON are texts: it would come back as another",
                    do="use texts as keys, or a list",
                )
            _check_json(f"{name}[{key!r}]", one, where)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _check_json(f"{name}[{number}]", one, where)
    elif value is not None and (
        type(value) not in (str, int, float, bool)
        or (type(value) is float and not math.isfinite(value))
    ):
        raise BadConfig(
            f"{name} is {value!r}",
            where=where,
            why=f"a {type(value).__name__} is nothing that JSON has",
            do="use numbers, texts, lists and dicts of Python; int(…) for a number of NumPy",
        )


def pauses() -> Iterator[float]:
    """Longer and longer pauses between two looks; the caller sleeps."""
    pause, most = POLLS_S
    while True:
        yield pause
        pause = min(2 * pause, most)


def _lock_soon(descriptor: int) -> bool:
    """Try a lock a few times."""
    for _, pause in zip(range(_LOCK_TRIES), pauses(), strict=False):
        if _lock(descriptor, fcntl.LOCK_EX):
            return True
        time.sleep(pause)
    return False


def _lock(descriptor: int, kind: int) -> bool:
    """Try a lock; True also where there are none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
