"""Tell listeners what a stage does: the progress bar now, the dashboard later.

In:    events from any stage
Out:   the same events to listeners, and as lines of <dataset>/_events.jsonl; a bar on standard
       error with amount, time left and counts, and notices as plain lines
Keeps: the work: a listener or a full disk never stops it; tqdm's conventions: a bar on a terminal
       and in a notebook, none where TQDM_DISABLE is set
Never: carries text of documents, decides anything, prints to standard output

An event is {"time", "stage", "kind", …}; kinds so far: start, progress, commit, ledger, wait,
warn, end. A trainer's losses are lines of their own, <run_dir>/loss.jsonl: see `log_loss`.
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from penstock.disk import open_own
from penstock.options import printable, printable_name

Event = dict[str, Any]
Listener = Callable[[Event], None]

EVENTS: Final = "_events.jsonl"
LOSS: Final = "loss.jsonl"

_TOLD: Final[set[str]] = set()
"""Files of losses that could not be written, which is told once."""
_COUNTS: Final = ("read", "refused", "files", "faults")
_MOST_NAME: Final = 10
"""Characters of an input's name, its last ones, so that a line of 80 holds the rest."""
_REASONS: Final = 3
"""Why documents were refused is told for the most frequent reasons."""


class Events:
    """One stage's voice."""

    def __init__(self, stage: str, *, path: Path | None = None) -> None:
        self._stage = stage
        self._path = path
        self._descriptor: int | None = None
        self._listeners: list[Listener] = []

    @property
    def is_heard(self) -> bool:
        """Whether anybody is told: what only they need is not measured for nobody."""
        return bool(self._listeners) or self._path is not None

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> None:
        event: Event = {"time": time.time(), "stage": self._stage, "kind": kind, **fields}
        for listener in self._listeners:
            listener(event)
        self._append(event)

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _append(self, event: Event) -> None:
        if self._path is None:
            return
        try:
            if self._descriptor is None:
                self._descriptor = open_own(self._path, 0o644, append=True)
            os.write(self._descriptor, (json.dumps(event) + "\n").encode())
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._path.parent.exists():
                return  # what is told before the dataset begins is told to listeners alone
            told = f"penstock: no more events in {self._path}: {error.strerror}"
            print(printable(told), file=sys.stderr)
            self._path = None


def finite(value: Any) -> float | None:
    """A number of a file that anybody may write; None for what is none, or not finite.

    >>> finite(3), finite("2.31"), finite(None), finite(True), finite(math.nan), finite(10**400)
    (3.0, None, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def parse_line(line: bytes) -> Event | None:
    """The object that a line of JSON is; None for any other line.

    >>> parse_line(b'{"a": 1}'), parse_line(b"[1]"), parse_line(b"[" * 100_000)
    ({'a': 1}, None, None)
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def log_loss(
    step: int, loss: float, *, run_dir: str | os.PathLike[str], **more: int | float | str
) -> None:
    """Add a line to the losses of a run, for `penstock watch`: from a spike it leads to the batch.

    `step` is the loader's `step` after the batch: the first batch, number 0, is step 1. `more` goes
    along as it is; `waited_s` and `took_s` of a step show how long the trainer waited for data.
    A full disk or a lost directory is told once, and ends no training.
    """
    line = {**more, "step": int(step), "loss": float(loss), "time": round(time.time(), 3)}
    path = Path(run_dir) / LOSS
    try:
        os.makedirs(run_dir, exist_ok=True)
        descriptor = open_own(path, 0o644, append=True)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        if str(path) not in _TOLD:
            _TOLD.add(str(path))
            told = f"penstock: step {step:,} is not in {path}: {error.strerror or error}"
            print(printable(told), file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown(events: Events | None, stage: str) -> Iterator[Events]:
    """The events that were given; else new ones, with a bar if somebody may be watching.

    For work that is called from Python. Where nobody watches, warnings are logged.
    """
    if events is not None:
        yield events
        return
    with contextlib.closing(Events(stage)) as own:
        if _is_watched():
            with progress_bar(own, stage):
                yield own
        else:
            own.listen(_log_warning)
            yield own


@contextlib.contextmanager
def progress_bar(events: Events, label: str) -> Iterator[None]:
    """Follow `events` with a bar while the block runs; with lines where there can be no bar."""
    if not _is_watched():
        events.listen(_print_notice)
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(10),
        TextColumn("{task.fields[amount]}", markup=False, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(elapsed_when_finished=True),
        # what does not fit in the line is left out here
        TextColumn(
            "{task.fields[counts]}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        console=console,
        expand=True,
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def show(event: Event) -> None:
            if event["kind"] in ("wait", "warn"):
                console.print(printable(event["message"]), markup=False, highlight=False)
            if event["kind"] not in ("progress", "merge"):
                return
            unit = "merges" if event["kind"] == "merge" else "bytes"
            if unit not in tasks:
                tasks[unit] = bar.add_task(label, total=None, amount="", counts="")
            task = tasks[unit]
            bar.update(task, completed=event["at"], total=event["size"])
            speed = bar.tasks[bar.task_ids.index(task)].speed
            name = printable_name(str(event.get("input", "")))
            if len(name) > _MOST_NAME:
                name = "…" + name[1 - _MOST_NAME :]
            bar.update(
                task,
                description=f"{label}, merging" if unit == "merges" else f"{label} {name}",
                amount=_amount(event["at"], event["size"], speed, unit),
                counts=_counts(event),
            )

        events.listen(show)
        yield


def _is_watched() -> bool:
    """Whether somebody sees what is drawn: standard error is a terminal, or a notebook's."""
    if os.environ.get("TQDM_DISABLE"):
        return False
    if sys.stderr.isatty():
        return True
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def _amount(at: int, size: int | None, speed: float | None, unit: str) -> str:
    """How far it is, and how fast it goes on.

    >>> _amount(12_000_000, 96_000_000, 2e6, "bytes"), _amount(1_000, None, None, "merges")
    ('12.0/96.0 MB 2.0/s', '1,000 merges')
    """

    def told(number: float, *, bare: bool = False) -> str:
        if unit != "bytes":
            return f"{number:,.0f}" if bare else f"{number:,.0f} {unit}"
        return f"{number / 1e6:,.1f}" if bare else f"{number / 1e6:,.1f} MB"

    so_far = told(at) if size is None else f"{told(at, bare=True)}/{told(size)}"
    return so_far if speed is None else f"{so_far} {told(speed, bare=True)}/s"


def _counts(event: Event) -> str:
    """What was counted on the way.

    >>> _counts({"read": 1200, "refused": 7, "reasons": {"blob": 5, "binary": 2}, "files": 1})
    '1,200 read, 7 refused (blob 5, binary 2), 1 files'
    """
    told = []
    for name in _COUNTS:
        if name not in event:
            continue
        reasons = event.get("reasons", {}) if name == "refused" else {}
        most = sorted(reasons.items(), key=lambda item: -item[1])[:_REASONS]
        why = ", ".join(f"{printable_name(reason)} {count:,}" for reason, count in most)
        told.append(f"{event[name]:,} {name}" + (f" ({why})" if why else ""))
    if "memory_bytes" in event:
        told.append(f"{event['memory_bytes'] / 1e9:.1f} GB of memory")
    return ", ".join(told)


def _print_notice(event: Event) -> None:
    if event["kind"] in ("wait", "warn"):
        print(printable(event["message"]), file=sys.stderr, flush=True)


def _log_warning(event: Event) -> None:
    if event["kind"] == "warn":
        logging.getLogger(f"penstock.{event['stage']}").warning("%s", printable(event["message"]))
