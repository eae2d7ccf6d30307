"""Push and pull directories of plain parquet files, finished when they hold `_COMPLETE`.

In:    a directory or prefix without a log
Out:   the same files at the other end, `_COMPLETE` last
Keeps: a file is moved when it ends as parquet files end; beside it goes its hash, in `_sums/`
Never: takes a quiet directory for a finished one, takes a file that has changed for the same

Without a log there is no hash of what a foreign producer put into a bucket: such files are checked
by size and by reading their footer.
"""

import hashlib
import os
import time
from collections.abc import Callable
from functools import partial

from penstock.errors import BadConfig, ProducerStalled, ShardMismatch
from penstock.mirror.claim import COMPLETE, refuse_log, refuse_others
from penstock.mirror.config import POLL_S, SyncConfig, Synced
from penstock.mirror.threads import DaemonThreads
from penstock.mirror.transfer import Patience, Receiver, Removed, footer_error, send
from penstock.store.local import LocalStore
from penstock.store.record import HASH, Add
from penstock.store.store import AlreadyThere, Depot, Unsure, taken
from penstock.work.events import Events


def push_plain(
    here: LocalStore, there: Depot, config: SyncConfig, patience: Patience, events: Events | None
) -> Synced:
    """A directory to a store."""
    seen: dict[str, tuple[int, int]] = {}

    def move(name: str, size: int) -> int:
        about = os.stat(here.root / name)
        with open(here.root / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        moved = _file(name, size, digest)
        patience.call(lambda: _write_checksum(there, name, digest))
        send(here, there, moved, patience)
        seen[name] = (about.st_size, about.st_mtime_ns)
        return size

    def check() -> None:
        for name, known in seen.items():
            try:
                about = os.stat(here.root / name)
            except FileNotFoundError:
                raise _removed_error(name, here) from None
            if known != (about.st_size, about.st_mtime_ns):
                raise ShardMismatch(
                    f"{name} has changed since it was pushed",
                    where=here.url,
                    do="push to another prefix, and let the producer write each file once",
                )

    return _follow(here, there, move, check, config, patience, events)


def pull_plain(
    there: Depot, here: LocalStore, config: SyncConfig, receiver: Receiver, patience: Patience,
    events: Events | None,
) -> Synced:  # fmt: skip
    """A store to a directory."""

    def move(name: str, size: int) -> int:
        try:
            digest = patience.call(lambda: there.read(f"_sums/{name}")).decode("ascii", "replace")
        except FileNotFoundError:
            digest = ""
        if digest and not HASH.fullmatch(digest):
            raise ShardMismatch(
                f"_sums/{name} does not hold a sha256",
                where=there.url,
                why=f"it holds {digest[:80]!r}",
                do="do not use this dataset; ask whoever made it",
            )
        return size if receiver.receive(_file(name, size, digest)) else 0

    return _follow(there, here, move, lambda: None, config, patience, events)


def _check_names(here: Depot) -> None:
    """Refuse parquet files that cannot be moved: none is left out without a word."""
    if not isinstance(here, LocalStore):
        return  # a bucket lists every name, and one that cannot be moved is an error then
    paths = sorted(here.root.rglob("*.parquet"))
    movable = {name for name, _ in here.names()}  # after them: files may come meanwhile
    for path in paths:
        name = str(path.relative_to(here.root))
        if name not in movable and not name.startswith((".", "_sums/")):
            raise BadConfig(
                f"{name} cannot be moved",
                where=here.url,
                why="names are of letters, digits, dots, dashes and underscores, in the directory "
                "itself, and links are not followed",
                do="rename it, copy it here, or move it out of the directory",
            )


def _removed_error(name: str, source: Depot) -> ShardMismatch:
    return ShardMismatch(
        f"{name} is no longer there", where=source.url, do="let files stay until they were moved"
    )


def _file(name: str, size: int, sha256: str) -> Add:
    return Add(name, sha256, size, 0, None, "train")


def _follow(
    source: Depot,
    target: Depot,
    move: Callable[[str, int], int],
    check: Callable[[], None],
    config: SyncConfig,
    patience: Patience,
    events: Events | None,
) -> Synced:
    done: set[str] = set()
    total = 0
    silence = _Silence(source, config, events)
    _check_names(source)
    patience.call(lambda: refuse_log(target))
    with DaemonThreads(config.connections, "penstock-move") as threads:
        try:
            while True:
                # first the sentinel, then the files: whatever came before it is in the list
                complete = patience.call(lambda: source.size(COMPLETE)) is not None
                names = patience.call(source.names)
                if not done or complete:
                    refuse = partial(refuse_others, target, dict(names), complete=complete)
                    patience.call(refuse)
                fresh = [one for one in names if one[0].endswith(".parquet") and one[0] not in done]
                whole = [one for one in fresh if _is_whole(source, one[0], complete=complete)]
                for (name, _), future in [(one, threads.submit(move, *one)) for one in whole]:
                    try:
                        total += future.result()
                    except (Removed, FileNotFoundError):
                        raise _removed_error(name, source) from None
                    done.add(name)
                    if events is not None:
                        size = sum(size for name, size in names)
                        events.emit("progress", input=target.url, at=total, size=size,
                                    files=len(done))  # fmt: skip
                if complete:
                    _check_names(source)
                    check()
                    patience.call(refuse)  # a second push may have begun beside this one
                    patience.call(lambda: _write_once(target, COMPLETE, source.read(COMPLETE)))
                if complete or config.once:
                    if events is not None:
                        events.emit("end", sealed=complete)
                    return Synced(0, len(done), total, -1, complete)
                silence.note(names)
                time.sleep(POLL_S[1])
        except BaseException:
            patience.stop()
            raise


class _Silence:
    """How long a producer without a log has given no sign: no file that is new or has grown."""

    def __init__(self, source: Depot, config: SyncConfig, events: Events | None) -> None:
        self._url = source.url
        self._stall_s = config.stall_s
        self._events = events
        self._names: list[tuple[str, int]] | None = None
        self._since = time.monotonic()
        self._told = False

    def note(self, names: list[tuple[str, int]]) -> None:
        if names != self._names:
            self._names, self._since = names, time.monotonic()
            return
        if not self._told and self._events is not None:
            self._told = True
            self._events.emit(
                "wait", message=f"waiting for more parquet files, or {COMPLETE}, at {self._url}"
            )
        if time.monotonic() - self._since > self._stall_s:
            raise ProducerStalled(
                f"no parquet file has come in {self._stall_s:g} s, and there is no {COMPLETE}",
                where=self._url,
                why="silence is not the end",
                do=f"write {COMPLETE} if all files are there, or start the producer, then this "
                "command again; --stall waits longer",
            )


def _is_whole(source: Depot, name: str, *, complete: bool) -> bool:
    """Whether a file ends as parquet files end; objects of a bucket are never half there."""
    if not isinstance(source, LocalStore):
        return True
    why = footer_error(source.root / name)
    if why and complete:
        raise ShardMismatch(
            f"{name} is not a whole parquet file, and the directory says that it is complete",
            where=f"{source.url}/{name}",
            why=why,
            do=f"write the file again, and {COMPLETE} after it",
        )
    return not why


def _write_checksum(target: Depot, name: str, digest: str) -> None:
    try:
        _write_once(target, f"_sums/{name}", digest.encode())
    except ShardMismatch:
        raise taken(name, target.url) from None  # the file is what people know


def _write_once(target: Depot, name: str, data: bytes) -> None:
    """A small object; one that is there must be the same."""
    try:
        target.create(name, data)
    except (AlreadyThere, Unsure):
        if target.read(name) != data:
            raise taken(name, target.url) from None
