"""Say what is going on, for whoever looks: the progress bar now, the dashboard later.

In:    events from any stage
Out:   the same events to listeners, and as lines of <dataset>/_events.jsonl
Keeps: the work: a listener or a full disk never stops it
Never: carries text of documents, decides anything

An event is {"time", "stage", "kind", …}; kinds so far: start, progress, commit, ledger, wait,
warn, end.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.disk import open_own
from penstock.work.values import printable

Event = dict[str, Any]
Listener = Callable[[Event], None]


class Events:
    """One stage's voice."""

    def __init__(self, stage: str, *, path: Path | None = None) -> None:
        self._stage = stage
        self._path = path
        self._descriptor: int | None = None
        self._listeners: list[Listener] = []

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
            told = f"penstock: no more events in {self._path}: {error.strerror}"
            print(printable(told), file=sys.stderr)
            self._path = None
