"""Show events of long work on a terminal; stay quiet where there is none.

In:    events
Out:   a bar on standard error with rate, bytes, ETA and rejects; notices as plain lines
Never: prints to standard output, which belongs to results
"""

import contextlib
import sys
from collections.abc import Iterator

from penstock.work.events import Event, Events
from penstock.work.values import printable, printable_name

_COUNTS = ("read", "refused", "files", "faults")


@contextlib.contextmanager
def progress_bar(events: Events, label: str) -> Iterator[None]:
    """Follow `events` with a bar while the block runs."""
    if not sys.stderr.isatty():
        events.listen(_print_notice)
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[counts]}", markup=False),
        console=console,
    ) as bar:
        task = bar.add_task(label, total=None, counts="")

        def show(event: Event) -> None:
            if event["kind"] == "progress":
                bar.update(
                    task,
                    description=f"{label} {printable_name(str(event.get('input', '')))}",
                    completed=event["at"],
                    total=event["size"],
                    counts=", ".join(
                        f"{event[count]:,} {count}" for count in _COUNTS if count in event
                    ),
                )
            elif event["kind"] == "merge":
                bar.update(
                    task,
                    description=f"{label}, merging",
                    completed=event["at"],
                    total=event["size"],
                    counts="",
                )
            elif event["kind"] in ("wait", "warn"):
                console.print(printable(event["message"]), markup=False, highlight=False)

        events.listen(show)
        yield


def _print_notice(event: Event) -> None:
    if event["kind"] in ("wait", "warn"):
        print(printable(event["message"]), file=sys.stderr, flush=True)
