"""What goes on in a directory: its datasets, the stages that work on them, runs and their losses.

In:    a directory with datasets, run descriptions, events and losses, at most three levels deep
Out:   one JSON object for the page: rates and backlogs over time, shards as they come, losses
Keeps: bounded memory: a file of events is read once, from where the last look ended, and its
       series are thinned; 10,000 shards cost as much to show as 100
Never: writes, follows links out of the directory, fails because one dataset is damaged
"""

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from penstock.errors import BadConfig, PenstockError
from penstock.store.log import (
    Log,
    chunk_length,
    generation_url,
    generations,
    newest_filled,
    split_generation,
)
from penstock.store.record import Add, record_name
from penstock.work.events import EVENTS, finite, parse_line

Json = dict[str, Any]

DEPTH: Final = 3
"""Levels of directories that are looked into."""
MOST_FOLDERS: Final = 2000
LOOK_S: Final = 1.0
"""How often new datasets, runs and losses are looked for."""
TAIL_BYTES: Final = 8 << 20
"""Of a file of events that is larger, the end is read."""
POINTS: Final = 240
"""Of a series at most."""
BINS: Final = 160
"""Bars in which shards are shown."""
SAMPLED_RECORDS: Final = 120
"""Records that are read to know when shards came."""
MOST_LOSSES: Final = 200_000
SILENT_S: Final = 30.0
"""A stage that has not ended and says nothing for so long is shown as silent."""
SPIKES: Final = 12
MOST_STAGES: Final = 64
"""Stages that one file of events may name."""
MOST_MESSAGE: Final = 500
"""Characters of a message that are shown."""
MOST_SOURCES: Final = 200
"""Sources of a ledger that are shown."""
_OF_RUN: Final = ("start", "end", "stage", "stage_end", "beat")
_MIRRORS: Final = ("push", "pull")
_NOW: Final = ("at", "size", "read", "refused", "files", "faults", "memory_bytes")
"""Numbers of a stage's last event that the page is told."""


class Tail:
    """The lines of a file that grows; what was read is not read again."""

    def __init__(self, path: Path, most_bytes: int = TAIL_BYTES) -> None:
        self.path = path
        self._at = max(0, _size(path) - most_bytes)
        self._is_cut = self._at > 0
        self._rest = b""
        self._inode = 0

    def read(self) -> Iterator[Json]:
        """The objects that have come since; a line that is no object is passed over."""
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_size < self._at or self._inode not in (0, about.st_ino):
                    self._at, self._rest, self._is_cut = 0, b"", False  # begun anew
                self._inode = about.st_ino
                file.seek(self._at)
                data = file.read(2 * TAIL_BYTES)
        except OSError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._is_cut and lines:
            lines, self._is_cut = lines[1:], False
        if len(self._rest) > TAIL_BYTES:  # no line is so long
            self._rest, self._is_cut = b"", True
        for line in lines:
            if (found := parse_line(line)) is not None:
                yield found


class Stage:
    """One stage's events as series over time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = self.last = 0.0
        self.state = "running"
        self.message = ""
        self.now: Json = {}
        self._points: list[list[float]] = []
        """Time, bytes done, documents read, refused, bytes to come: sums since the beginning."""
        self._notices: deque[Json] = deque(maxlen=50)
        self.waits = 0
        self.ledgers: list[Json] = []
        self.first_batch_s: float | None = None
        self._parts: dict[str, Json] = {}
        """Of a run: its stages, with what became of each."""

    def take(self, event: Json) -> None:
        kind, at = event.get("kind"), _number(event.get("time"))
        self.began = self.began or at
        self.last = max(self.last, at)
        if kind in _OF_RUN and self._take_of_run(event, at):
            return
        if kind == "start":
            self.state, self.message = "running", ""
            # one that resumes does not say how much was read before
            begun = math.nan if event.get("bytes") else 0.0
            self._points.append([at, begun, 0.0, 0.0, math.nan])
        elif kind == "end":
            self.state = "sealed" if event.get("sealed") else "ended"
        elif kind in ("wait", "warn"):
            message = _cut(event.get("message"))
            self._notices.append({"time": at, "kind": kind, "message": message})
            if kind == "wait":
                self.state, self.waits = "waiting", self.waits + 1
                self.message = message
        elif kind in ("progress", "merge"):
            self.state = "running"
            done, size = _number(event.get("at")), event.get("size")
            left = math.nan if size is None else max(0.0, _number(size) - done)
            read, refused = _number(event.get("read")), _number(event.get("refused"))
            self._points.append([at, done, read, refused, left])
            self.now = {key: _number(event[key]) for key in _NOW if event.get(key) is not None}
            if "input" in event:
                self.now["input"] = _cut(event["input"])
            self._thin()
        elif kind == "ledger":
            self.state = "running"
            sources = event.get("sources")
            if isinstance(sources, list) and sources:
                told = [
                    {"source": _cut(one.get("source")), "trained": _number(one.get("trained"))}
                    for one in sources[:MOST_SOURCES]
                    if isinstance(one, dict)
                ]
                step = _number(event.get("step"))
                self.ledgers.append({"time": at, "step": step, "sources": told})
                if len(self.ledgers) > 2 * POINTS:
                    self.ledgers = [*self.ledgers[:-1:2], self.ledgers[-1]]

    def _take_of_run(self, event: Json, at: float) -> bool:
        """Take what the conductor of several stages says; whether it is that."""
        kind, name = event["kind"], _cut(event.get("name"))
        if kind == "start":
            stages = event.get("stages")
            if not isinstance(stages, dict):
                return False
            names = [_cut(one) for one in stages][:MOST_STAGES]
            self._parts = {one: {"name": one, "state": "waits", "took_s": 0.0} for one in names}
            self.state, self.message, self.began, self.first_batch_s = "running", "", at, None
        elif kind == "end":
            if not self._parts:
                return False
            states = {part["state"] for part in self._parts.values()}
            for part in self._parts.values():
                if part["state"] == "runs":
                    part["state"], part["took_s"] = "stopped", at - part["took_s"]
                elif part["state"] == "waits":
                    part["state"] = "not begun"
            self.state = (
                "failed"
                if "failed" in states
                else "stopped"
                if event.get("stopped_by")
                else "ended"
            )
            self.first_batch_s = finite(event.get("first_batch_s"))
        elif name in self._parts:
            self._take_of_part(self._parts[name], event, at)
        return True

    def _take_of_part(self, part: Json, event: Json, at: float) -> None:
        if event["kind"] == "stage":
            part["state"], part["took_s"] = "runs", at  # when it began, until it ends
        elif part["state"] == "runs":
            how = event.get("how")
            part["state"] = how if how in ("done", "failed", "stopped") else "ended"
            part["took_s"] = at - part["took_s"]

    def _parts_at(self, now: float) -> list[Json]:
        return [
            {**part, "took_s": now - part["took_s"]} if part["state"] == "runs" else part
            for part in self._parts.values()
        ]

    def _thin(self) -> None:
        if len(self._points) > 8 * POINTS:
            kept = self._points[:-1:2]
            self._points = [*kept, self._points[-1]]

    def about(self, now: float, *, is_sealed: bool = False) -> Json:
        """All of it for the page; `is_sealed` says so of the dataset that it works on."""
        points = self._points
        step = max(1, -(-len(points) // POINTS))
        chosen = [*points[:-1:step], *points[-1:]]
        rates: list[list[float]] = []
        reads: list[list[float]] = []
        backlog = []
        for before, after in itertools.pairwise(chosen):
            took = after[0] - before[0]
            if took <= 0 or math.isnan(after[1]) or math.isnan(before[1]):
                continue
            for series, column in ((rates, 1), (reads, 2)):
                rate = max(0.0, after[column] - before[column]) / took
                if not series:
                    series.append([before[0], rate])
                series.append([after[0], rate])
            if not math.isnan(after[4]):
                backlog.append([after[0], after[4]])
        state = self.state
        if state in ("running", "waiting") and now - self.last > SILENT_S:
            # a mirror does not say that it has ended
            at, size = self.now.get("at", 0.0), self.now.get("size", 0.0)
            state = "ended" if is_sealed and self.name in _MIRRORS and at >= size > 0 else "silent"
        return {
            "name": self.name, "state": state, "began": self.began, "last": self.last,
            "message": self.message if state == "waiting" else "", "now": self.now,
            "bytes_per_s": rates, "documents_per_s": reads, "backlog": backlog,
            "stages": self._parts_at(now), "first_batch_s": self.first_batch_s,
            "waits": self.waits, "notices": list(self._notices)[-20:], "ledgers": self.ledgers,
        }  # fmt: skip


class Losses:
    """What a trainer wrote: a line for each step."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.path = path
        self._lines: dict[int, list[float]] = {}
        """By step: loss, share of the step's time that it waited for data, time. A step that is
        trained again after a resume counts once."""

    def refresh(self) -> None:
        for line in self._tail.read():
            step, loss = line.get("step"), line.get("loss")
            loss = loss if isinstance(loss, float) else finite(loss)  # NaN is shown
            if not isinstance(step, int) or finite(step) is None or loss is None:
                continue
            waited, took = _number(line.get("waited_s")), _number(line.get("took_s"))
            share = min(1.0, max(0.0, waited / took)) if took > 0 else math.nan
            self._lines[step] = [float(loss), share, _number(line.get("time"))]
        while len(self._lines) > MOST_LOSSES:
            self._lines.pop(next(iter(self._lines)))

    def about(self) -> Json:
        steps = sorted(self._lines)
        stride = max(1, -(-len(steps) // (4 * POINTS)))
        spikes = find_spikes(steps, [self._lines[step][0] for step in steps])
        # a spike is never thinned away
        chosen = sorted({*steps[::stride], *steps[-1:], *spikes})
        lines = [self._lines[step] for step in chosen]
        return {
            "steps": len(steps), "step": chosen, "loss": [_plain(line[0]) for line in lines],
            "waited": [_plain(line[1]) for line in lines], "spikes": spikes,
            "last": max((line[2] for line in self._lines.values()), default=0.0),
        }  # fmt: skip


def find_spikes(steps: list[int], losses: list[float], window: int = 24) -> list[int]:
    """The steps whose loss stands out most from those before it, in their order.

    >>> find_spikes([1, 2, 3, 4, 5, 6, 7, 8], [3.0, 2.9, 3.0, 2.8, 2.9, 6.0, 2.8, 2.7])
    [6]
    """
    found = []
    for k in range(4, len(steps)):
        if not math.isfinite(losses[k]):
            found.append((math.inf, steps[k]))
            continue
        before = [loss for loss in losses[max(0, k - window) : k] if math.isfinite(loss)]
        if len(before) < 4:
            continue
        # against the last few, since losses fall; by how much they move from step to step
        level = statistics.median(before[-5:])
        moves = statistics.median(abs(b - a) for a, b in itertools.pairwise(before))
        if losses[k] > level + max(6 * moves, 0.1 * abs(level)):
            found.append((losses[k] - level, steps[k]))
    return sorted(step for _, step in sorted(found, reverse=True)[:SPIKES])


class Dataset:
    """A dataset's log, followed; what cannot be read is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: Json | None = None
        self.log: Log | None = None
        self._times: dict[int, tuple[float, int]] = {}
        """Of sampled records: when, and how many train shards there were with it."""
        self._about: Json = {}
        self._about_n = -1
        self._known = 0
        """Generations that had begun when one of them was opened."""

    @property
    def shown(self) -> Path:
        """The directory of the generation that is shown."""
        return self.path if self.log is None else Path(self.log.store.url)

    def has_begun_anew(self) -> bool:
        """Whether there is a generation that was not known when one was opened."""
        return (Path(generation_url(self.path, self._known + 1)) / record_name(0)).exists()

    def refresh(self) -> None:
        try:
            if self.log is None or self.has_begun_anew():
                # of several generations the one that `penstock show` shows
                found = generations(str(self.path))[1]
                newest = found[0] if len(found) == 1 else newest_filled(found)
                if self.log is None or newest != self.log.store.url:
                    self.log, self._times, self._about_n = Log.open(newest), {}, -1
                self._known = len(found)
            elif self.log.state.sealed is None:
                self.log.refresh()
            self.error = None
        except (PenstockError, OSError) as error:
            self.error = told_error(error)

    def about(self) -> Json:
        log = self.log
        if log is None:
            return {"sealed": False, "error": self.error, "shards": 0, "rows": 0, "bytes": 0}
        if self._about_n != log.state.n:
            self._about, self._about_n = self._described(log), log.state.n
        return {**self._about, "error": self.error}

    def _described(self, log: Log) -> Json:
        state = log.state
        train, val = state.split("train"), state.split("val")
        rejects: dict[str, int] = {}
        for known in state.inputs.values():
            for reason, count in known.dropped.items():
                rejects[reason] = rejects.get(reason, 0) + count
        tokens = [_tokens_of(log, file) for file in train]
        counted = all(count is not None for count in tokens) and bool(train)
        opened = state.opened
        prepare = (opened.config.get("prepare") if opened else None) or {}
        return {
            "sealed": state.sealed is not None, "id": state.dataset,
            "generation": split_generation(log.store.url)[1] or 1, "last_record": state.time,
            "last": _seconds(state.time), "records": state.n + 1, "writers": state.epoch,
            "shards": len(train), "rows": sum(file.rows for file in train),
            "bytes": sum(file.bytes for file in train),
            "tokens": sum(count or 0 for count in tokens) if counted else None,
            "val_rows": sum(file.rows for file in val), "has_tokens": bool(state.split("tokens")),
            "chunk_tokens": chunk_length(state),
            "steps": [str(step.get("step")) for step in prepare.get("steps") or []],
            "rejects": rejects, "bins": _binned(train, tokens),
            "timeline": self._timeline(log, train),
            "inputs": [
                {"name": name, "read": known.read, "kept": known.kept, "bytes": known.to,
                 "dropped": sum(known.dropped.values()), "ended": known.end}
                for name, known in list(state.inputs.items())[:40]
            ],
            "num_inputs": len(state.inputs), "silent_s": state.beat.silent_s if state.beat else 0,
        }  # fmt: skip

    def _timeline(self, log: Log, train: list[Add]) -> list[list[float]]:
        """When shards came: of some records, their times and the shards that were there then."""
        last = log.state.n
        number = {file.name: k + 1 for k, file in enumerate(train)}
        step = max(1, -(-(last + 1) // SAMPLED_RECORDS))
        self._times = {n: kept for n, kept in self._times.items() if n % step == 0}
        for n in {*range(0, last + 1, step), last} - self._times.keys():
            with contextlib.suppress(PenstockError, OSError):
                record = log.find(n)
                if record is not None:
                    names = [op.name for op in record.ops if isinstance(op, Add)]
                    count = max((number.get(name, 0) for name in names), default=0)
                    self._times[n] = _seconds(record.time), count
        found, most = [], 0
        for _, (at, count) in sorted(self._times.items()):
            most = max(most, count)
            found.append([at, most])
        return found


def _binned(train: list[Add], tokens: list[int | None]) -> list[Json]:
    """Shards in their order, as at most BINS bars."""
    size = max(1, -(-len(train) // BINS))
    return [
        {
            "first": at, "count": len(part), "name": part[0].name,
            "rows": sum(file.rows for file in part), "bytes": sum(file.bytes for file in part),
            "tokens": sum(count or 0 for count in tokens[at : at + size]),
        }
        for at in range(0, len(train), size)
        if (part := train[at : at + size])
    ]  # fmt: skip


def _tokens_of(log: Log, file: Add) -> int | None:
    beside = log.state.tokens_of(file)
    return file.tokens if beside is None else beside.tokens


class Pipeline:
    """Everything in a directory, as it is now."""

    def __init__(self, root: str) -> None:
        self.root = Path(root).absolute()
        if not self.root.is_dir():
            raise BadConfig(
                f"there is no directory {root}",
                where=str(self.root),
                do="name a dataset, a directory of a run, or one that holds several of them",
            )
        self._lock = threading.Lock()
        self._looked_at = -math.inf
        self._wait_s = LOOK_S
        self._refused: dict[str, tuple[int, int]] = {}
        """Files that are no run's and no trainer's, with when they changed and their size."""
        self.datasets: dict[str, Dataset] = {}
        self.run_files: dict[str, Path] = {}
        self._events: dict[str, tuple[Tail, dict[str, Stage]]] = {}
        self._losses: dict[str, Losses] = {}

    def refresh(self) -> None:
        """Look again."""
        with self._lock:
            self._find()
            for dataset in self.datasets.values():
                dataset.refresh()
            for tail, stages in self._events.values():
                for event in tail.read():
                    name = _cut(event.get("stage") or "?")
                    if name in stages or len(stages) < MOST_STAGES:
                        stages.setdefault(name, Stage(name)).take(event)
            for losses in self._losses.values():
                losses.refresh()

    def log(self, key: str) -> Log | None:
        """The log of a dataset, with a state that no refresh changes; None if there is none."""
        with self._lock:
            dataset = self.datasets.get(key)
            if dataset is None or dataset.log is None:
                return None
            state = dataset.log.state
            found = Log(dataset.log.store)
            inputs = {
                name: dataclasses.replace(known, dropped=dict(known.dropped))
                for name, known in state.inputs.items()
            }
            found.state = dataclasses.replace(state, files=dict(state.files), inputs=inputs)
            return found

    def stamp(self) -> str:
        """What differs from another stamp whenever there is something new to show; cheap."""
        with self._lock:
            self._find()
        seen = [len(self.datasets), len(self.run_files), len(self._losses), len(self._events)]
        for dataset in list(self.datasets.values()):
            log = dataset.log
            seen.append(-1 if log is None else log.state.n)
            seen.append(dataset.has_begun_anew())
            if log is not None and log.state.sealed is None:
                seen.append(_size(Path(log.store.url) / record_name(log.state.n + 1)))
        for tail, _ in list(self._events.values()):
            seen.append(_size(tail.path))
        for losses in list(self._losses.values()):
            seen.append(_size(losses.path))
        return ".".join(map(str, seen))

    def overview(self) -> Json:
        """All of it for the page."""
        self.refresh()
        now = time.time()
        with self._lock:
            known = list(self.datasets.values())
            sealed = {one.shown for one in known if one.about()["sealed"]}
            # earlier generations of what is shown
            aside = {
                folder for one in known for folder in _generations_in(one.path)
                if folder != one.shown
            }  # fmt: skip
            return {
                "root": str(self.root), "name": self.root.name or "/", "time": now,
                "datasets": [
                    {"key": key, "path": str(one.path), **one.about()}
                    for key, one in self.datasets.items()
                ],
                "stages": [
                    {"key": key, "where": os.path.dirname(key),
                     **stage.about(now, is_sealed=folder in sealed)}
                    for key, (tail, stages) in self._events.items()
                    for stage in stages.values()
                    # a producer writes those of all generations beside the first one
                    if (folder := tail.path.parent) not in aside or stage.name not in _MIRRORS
                ],
                "losses": [
                    {"key": key, "where": os.path.dirname(key), **one.about()}
                    for key, one in self._losses.items()
                ],
            }  # fmt: skip

    def _find(self) -> None:
        """Look for datasets, runs, events and losses in the directory, at most every LOOK_S, and
        for a twentieth of the time."""
        began = time.monotonic()
        if began - self._looked_at < self._wait_s:
            return
        for folder in _folders(self.root):
            if (folder / record_name(0)).is_file():
                self.datasets.setdefault(self._key(folder), Dataset(folder))
            for made in _generations_in(folder):
                if _is_own(path := made / EVENTS) and self._key(path) not in self._events:
                    self._events[self._key(path)] = Tail(path), {}
            if (folder / "_log").is_dir():
                continue  # of its other files the log knows
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                named = [one for one in entries if one.name.endswith((".toml", ".jsonl"))]
                for entry in sorted(named, key=lambda one: one.name):
                    self._judge(entry)
        self._looked_at = time.monotonic()
        self._wait_s = max(LOOK_S, 20 * (self._looked_at - began))

    def _judge(self, entry: "os.DirEntry[str]") -> None:
        """Take a file as a run's or a trainer's; any other is read again when it changes."""
        path = Path(entry.path)
        key = self._key(path)
        if key in self.run_files or key in self._losses:
            return
        with contextlib.suppress(OSError):
            about = entry.stat(follow_symlinks=False)
            stamp = about.st_mtime_ns, about.st_size
            if self._refused.get(key) == stamp:
                return
            if path.suffix == ".toml" and is_run(path):
                self.run_files[key] = path
            elif path.suffix == ".jsonl" and is_losses(path):
                self._losses[key] = Losses(path)
            else:
                self._refused[key] = stamp

    def _key(self, path: Path) -> str:
        """A path as the page names it: from the directory on."""
        found = os.path.relpath(path, self.root)
        return self.root.name if found == "." else found


def _folders(root: Path) -> Iterator[Path]:
    """The directory and those in it, nearest first; none of a dataset's own, none by a link."""
    level, seen = [root], 0
    for _ in range(DEPTH + 1):
        deeper = []
        for folder in level:
            seen += 1
            if seen > MOST_FOLDERS:
                return
            yield folder
            if (folder / "_log").is_dir():
                continue
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                deeper += sorted(
                    Path(entry.path)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith((".", "_"))
                )
        level = deeper


def _generations_in(folder: Path) -> list[Path]:
    """A directory, and those of its later generations if it is a dataset."""
    found = [folder]
    while (later := Path(generation_url(folder, len(found) + 1))).is_dir():
        found.append(later)
    return found


def is_run(path: Path) -> bool:
    """Whether a TOML file describes a run: it has a table [loader]."""
    with contextlib.suppress(OSError, ValueError):
        return _is_own(path) and _size(path) < 1 << 20 and "[loader" in path.read_text()
    return False


def is_losses(path: Path) -> bool:
    """Whether a file has a trainer's lines: the first has a step and a loss."""
    with contextlib.suppress(OSError):
        if not _is_own(path):
            return False
        with path.open("rb") as file:
            line = parse_line(file.readline(4096))
        return line is not None and {"step", "loss"} <= line.keys()
    return False


def told_error(error: Exception) -> Json:
    """An error as the page shows it."""
    if isinstance(error, PenstockError):
        return {"what": error.what, "where": error.where, "why": error.why, "do": error.do}
    return {"what": f"{type(error).__name__}: {error}", "where": "", "why": "", "do": ""}


def _is_own(path: Path) -> bool:
    """Whether a path is a file, and no link to one elsewhere."""
    return path.is_file() and not path.is_symlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _number(value: Any) -> float:
    found = finite(value)
    return 0.0 if found is None else found


def _cut(value: Any) -> str:
    """A text of a file that anybody may write, no longer than is shown."""
    return str(value)[:MOST_MESSAGE]


def _plain(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _seconds(time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return 0.0
