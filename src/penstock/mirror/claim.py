"""Tell what stands at an address before anything is moved: a log, plain parquet files, or neither.

In:    a store
Out:   which of them it is, once it has begun; or why nothing of the kind may be written there
Never: takes a log that has lost its beginning for plain files, lets two datasets mix
"""

import time
from collections.abc import Mapping
from typing import Final

from penstock.errors import LogDamaged, NoDataset, ProducerStalled, StateMismatch
from penstock.mirror.config import POLL_S, SyncConfig
from penstock.mirror.transfer import Patience
from penstock.store.log import LogState
from penstock.store.record import Record, decode, record_name
from penstock.store.store import Depot
from penstock.work.events import Events

PLAIN: Final = "plain"
COMPLETE: Final = "_COMPLETE"
_ELSEWHERE: Final = "choose an empty directory or prefix for this dataset"


def is_plain(name: str) -> bool:
    """Whether an object belongs to a dataset without a log."""
    return name.endswith(".parquet") or name == COMPLETE


def await_first(
    source: Depot, config: SyncConfig, patience: Patience, events: Events | None
) -> str:
    """Wait for a dataset to begin. Returns "log", or PLAIN if it is plain files."""
    deadline, told = time.monotonic() + config.stall_s, False
    while True:
        if found := patience.call(lambda: _look(source)):
            return found
        if config.once:
            raise NoDataset(
                f"there is no dataset at {source.url}",
                where=f"{source.url}/{record_name(0)}",
                why="it has no log, and no parquet files",
                do="check the path, or start the producer",
            )
        if time.monotonic() > deadline:
            raise ProducerStalled(
                f"no dataset has begun at {source.url} in {config.stall_s:g} s",
                do="start the producer, then this command again; --stall waits longer",
            )
        if not told and events is not None:
            told = True
            events.emit("wait", message=f"waiting for a dataset at {source.url}")
        time.sleep(POLL_S[1])


def _look(source: Depot) -> str:
    if source.size(record_name(0)) is not None:
        return "log"
    if not any(is_plain(name) for name, _ in source.names()):
        return ""
    remains = remains_of_log(source)
    # a log that began since the first look has files by now, too
    if source.size(record_name(0)) is not None:
        return "log"
    if remains:
        raise LogDamaged(
            "the first record of the log is missing",
            where=f"{source.url}/{record_name(0)}",
            why=f"{remains} shows that there was one: these are not plain parquet files",
            do="restore _log from a copy of the dataset, or make it again; if only the parquet "
            "files are wanted, copy them to a directory of their own",
        )
    return PLAIN


def remains_of_log(store: Depot) -> str:
    """An object that only a dataset with a log has; empty if there is none."""
    for folder in ("_log", "_fold"):
        if found := store.names(folder):
            return found[0][0]
    try:
        decode(store.read(COMPLETE), Record, store.url)
    except (FileNotFoundError, LogDamaged):
        return ""
    return COMPLETE


def refuse_log(target: Depot) -> None:
    """Plain files are not put among those of a log."""
    if remains := remains_of_log(target):
        raise StateMismatch(
            f"{target.url} holds a dataset with a log, and this one has none",
            where=f"{target.url}/{remains}",
            do=_ELSEWHERE,
        )


def refuse_plain(target: Depot, state: LogState) -> None:
    """A log is not begun among files that it does not name."""
    # a sealed one has its marker before its end is known here
    own = {*state.files, *state.retired, *([COMPLETE] if state.sealed else [])}
    for name, _ in target.names():
        if is_plain(name) and name not in own:
            raise _mixed(target, name, "it is not of the dataset that was to be written there")


def refuse_others(target: Depot, wanted: Mapping[str, int], *, complete: bool) -> None:
    """Plain files are not put among other plain files."""
    for name, size in target.names():
        if name.endswith(".parquet") and name not in wanted:
            raise _mixed(target, name, "the dataset that was to be written there does not have it")
        if name.endswith(".parquet") and size != wanted[name]:
            why = f"it has {size:,} bytes there, and {wanted[name]:,} in the dataset"
            raise _mixed(target, name, why)
        if name == COMPLETE and not complete:
            raise _mixed(target, name, "a dataset has ended there, and this one has not")


def _mixed(target: Depot, name: str, why: str) -> StateMismatch:
    return StateMismatch(
        f"another dataset is at {target.url}", where=f"{target.url}/{name}", why=why, do=_ELSEWHERE
    )
