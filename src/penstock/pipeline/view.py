"""Show all stages of a pipeline while they run: a table in a terminal, else plain lines.

In:    events of stages, as JSON lines that they write; the trainer's JSON lines; /proc
Out:   for each stage its state, rate, what waits before it, refusals, memory; the time to the first
       batch; the events, for the conductor
Keeps: at most one look at each file in half a second, from where the last look ended
Never: decides anything, prints text of documents, writes to standard output
"""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from penstock.options import printable, printable_name
from penstock.pipeline.describe import Pipeline, Stage
from penstock.work.events import Event, finite, parse_line

_MAKERS: Final = ("chunk", "shard", "conversations")
_REFRESH_S: Final = 0.5
_LINES_S: Final = 5.0
"""How often a stage's line is printed where there is no terminal."""
_RATE_S: Final = 10.0
"""Over how long a rate is taken."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Row:
    """What is known of a stage."""

    stage: Stage
    state: str = "waits"
    pid: int = 0
    events: Path | None = None
    told_to: int = 0
    began: float = 0.0
    took_s: float = 0.0
    at: int = 0
    size: int | None = None
    files: int = 0
    read: int = 0
    refused: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    merges: tuple[int, int] | None = None
    steps: int = 0
    first_step: int = 0
    loss: float | None = None
    waited_s: float = 0.0
    memory: int = 0
    message: str = ""
    past: "deque[tuple[float, float]]" = field(default_factory=deque)
    """Moments with how far it was: bytes, or steps of a trainer."""

    def note(self, moment: float, amount: float) -> None:
        self.past.append((moment, amount))
        while len(self.past) > 2 and moment - self.past[0][0] > _RATE_S:
            self.past.popleft()

    @property
    def rate(self) -> float | None:
        if self.state != "runs" or len(self.past) < 2:
            return None
        (before, less), (now, more) = self.past[0], self.past[-1]
        return (more - less) / (now - before) if now > before else None


class View:
    """All rows; as a context it draws, if standard error is a terminal."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[Stage]) -> None:
        self._pipeline = pipeline
        self._rows = {one.name: _Row(one) for one in stages}
        self._log = pipeline.folder / pipeline.train.log if pipeline.train.log else None
        self._log_at = 0 if self._log is None else _end_of(self._log)
        self._began = time.time()
        self._looked = 0.0
        self._printed: dict[str, tuple[float, str]] = {}
        self._live: Any = None
        self._is_lost = False
        """Whether the terminal, or the pipe that was written to, is closed."""
        self.first_batch: float | None = None
        """When the trainer had its first batch of this run, as its log has it."""

    def __enter__(self) -> "View":
        if sys.stderr.isatty() and not os.environ.get("TQDM_DISABLE"):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), refresh_per_second=4, get_renderable=self._table,
                transient=False,
            )  # fmt: skip
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._live is not None:
            with contextlib.suppress(*([OSError] if self._is_lost else [])):
                self._live.stop()

    # What the conductor tells.

    def begin(self, stage: Stage, pid: int, events: Path, told_from: int) -> None:
        row = self._rows[stage.name]
        row.stage, row.state, row.pid = stage, "runs", pid
        row.events, row.told_to, row.began = events, told_from, time.time()
        self._print(f"$ {stage}")

    def end(self, stage: Stage, how: str) -> None:
        row = self._rows[stage.name]
        row.state, row.memory = how, 0
        row.took_s = time.time() - row.began if row.began else 0.0
        self._print(self._line(row))

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is None:
            self._print(text)
        else:
            write = self._live.console.print
            self._write(lambda: write(printable(text), markup=False, highlight=False))

    def look(self) -> list[Event]:
        """Read what is new, redraw now and then; the events, with the source of each."""
        found: list[Event] = []
        for row in self._rows.values():
            if row.events is None or row.state != "runs":
                continue
            events, row.told_to = read_lines(row.events, row.told_to)
            for event in events:
                _hear(row, event)
                found.append({**event, "source": row.stage.source})
                if event.get("kind") == "warn":
                    self.say(f"{row.stage.name}: {event.get('message', '')}")
        now = time.monotonic()
        if now - self._looked > _REFRESH_S:
            self._looked = now
            self.look_at_steps()
            for row in self._rows.values():
                if row.state == "runs":
                    row.memory = memory_of(row.pid)
            if self._live is None:
                self._print_lines(now)
        return found

    def tell_end(self) -> None:
        """Read the trainer's last lines, and say when the first batch was."""
        self.look_at_steps()
        row = self._rows.get("train")
        if row is not None and row.steps and self._live is None:
            steps = f"{row.steps - row.first_step + 1:,} steps, the last is {row.steps:,}"
            self._print(f"train: {steps}, {row.waited_s:.1f} s of them waiting for data")

    # What is shown.

    def look_at_steps(self) -> None:
        row = self._rows.get("train")
        if self._log is None or row is None:
            return
        lines, self._log_at = read_lines(self._log, self._log_at)
        for line in lines:
            step, moment = line.get("step"), finite(line.get("time", time.time()))
            if not isinstance(step, int) or finite(step) is None or moment is None:
                continue
            waited = finite(line.get("waited_s")) or 0.0
            if self.first_batch is None:
                took = finite(line.get("took_s")) or 0.0
                self.first_batch = moment - max(0.0, took - waited)
                row.first_step = step
                self.say(f"first batch after {self.first_batch - self._began:.1f} s")
            row.first_step = min(row.first_step, step)  # a log may be begun anew
            loss = finite(line.get("loss"))
            row.steps, row.loss = step, row.loss if loss is None else loss
            row.waited_s += waited
            row.note(moment, step)

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=printable_name(f"{self._pipeline.path}, {time.time() - self._began:.0f} s"),
            title_justify="left", expand=True, box=None, pad_edge=False, header_style="bold",
        )  # fmt: skip
        for name in ("stage", "state", "done", "rate", "before it", "refused", "memory"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        colours = {"runs": "green", "failed": "bold red", "waits": "dim", "stopped": "yellow"}
        for row in self._rows.values():
            table.add_row(
                Text(row.stage.name), Text(row.state, style=colours.get(row.state, "")),
                *(Text(printable_name(part)) for part in self._parts(row)),
            )  # fmt: skip
        if self.first_batch is not None:
            table.caption = f"first batch after {self.first_batch - self._began:.1f} s"
            table.caption_justify = "left"
        return table

    def _parts(self, row: _Row) -> tuple[str, str, str, str, str]:
        """How far, how fast, what waits before it, refusals, memory."""
        memory = f"{row.memory / 1e6:,.0f} MB" if row.memory else ""
        rate = row.rate
        if row.stage.job == "train":
            done = f"step {row.steps:,}" if row.steps else row.message
            loss = f", loss {row.loss:.3f}" if row.loss is not None and row.steps else ""
            speed = f"{rate:.1f} steps/s" if rate is not None else ""
            waits = f"{row.waited_s:.1f} s for data" if row.steps else ""
            return done + loss, speed, waits, "", memory
        if row.merges is not None:
            return f"{row.merges[0]:,}/{row.merges[1]:,} merges", "", "", "", memory
        size = "" if row.size is None else f"/{row.size / 1e6:,.1f}"
        done = f"{row.at / 1e6:,.1f}{size} MB" if row.at or row.size else row.message
        if row.files:
            done += f", {row.files:,} files"
        speed = f"{rate / 1e6:,.1f} MB/s" if rate is not None else ""
        refused = f"{row.refused:,} of {row.read:,}" if row.read else ""
        if row.reasons:
            most = max(row.reasons, key=lambda reason: row.reasons[reason])
            refused += f" ({most} {row.reasons[most]:,})"
        return done, speed, self._queue(row), refused, memory

    def _queue(self, row: _Row) -> str:
        """Files that the stage before it has, and it has not yet."""
        jobs = {"push": _MAKERS, "pull": ("push",)}.get(row.stage.job, ())
        for other in self._rows.values():
            if other.stage.job in jobs and other.stage.source == row.stage.source:
                return f"{max(0, other.files - row.files):,} files"
        return ""

    def _line(self, row: _Row) -> str:
        done, speed, waits, refused, memory = self._parts(row)
        if row.stage.job != "train":  # in the table the column says it
            waits = f"{waits} before it" if waits and row.state == "runs" else ""
            refused = f"refused {refused}" if refused else ""
        parts = [part for part in (done, speed, waits, refused, memory) if part]
        took = f" after {row.took_s:.1f} s" if row.state not in ("runs", "waits") else ""
        return f"{row.stage.name}: {row.state}{took}" + (f"; {', '.join(parts)}" if parts else "")

    def _print_lines(self, now: float) -> None:
        for name, row in self._rows.items():
            told, before = self._printed.get(name, (now, ""))
            self._printed.setdefault(name, (now, ""))
            if row.state == "runs" and now - told > _LINES_S:
                line = self._line(row)
                if line != before:
                    self._print(line)
                self._printed[name] = (now, line)

    def _print(self, text: str) -> None:
        if self._live is None:
            moment = time.time() - self._began
            line = f"{moment:7.1f} s  {printable(text)}"
            self._write(lambda: print(line, file=sys.stderr, flush=True))

    def _write(self, write: Callable[[], None]) -> None:
        """Write once more, unless nobody can be told: that ends a run, and while its stages stop
        no error may hide another."""
        try:
            if not self._is_lost:
                write()
        except OSError:
            self._is_lost = True
            raise


def _hear(row: _Row, event: Event) -> None:
    """Take what an event says into a row. Whoever writes the file may write anything there."""
    kind = event.get("kind")
    if kind in ("wait", "warn"):
        row.message = str(event.get("message", ""))[:200]
    elif kind == "merge" and (merged := finite(event.get("at"))) is not None:
        row.merges = int(merged), int(finite(event.get("size")) or 0)
    elif kind in ("progress", "made"):
        for name in ("at", "files", "read", "refused", "size"):
            if (count := finite(event.get(name))) is not None:
                setattr(row, name, int(count))
        if kind == "made" and row.size is not None:
            row.at = row.size
        if isinstance(event.get("reasons"), dict):
            counts = {str(name): finite(count) for name, count in event["reasons"].items()}
            row.reasons = {name: int(count) for name, count in counts.items() if count is not None}
        if (moment := finite(event.get("time"))) is not None:
            row.note(moment, row.at)


def read_lines(path: Path, at: int) -> tuple[list[dict[str, Any]], int]:
    """The JSON lines that a file has from a byte on, and the byte after the last whole one.

    A file that has become shorter is read from its beginning; one that cannot be read has none.
    """
    try:
        # a pipe with nobody at its other end is not waited for
        with open(path, "rb", opener=_without_waiting) as file:
            if os.fstat(file.fileno()).st_size < at:
                at = 0
            file.seek(at)
            data = file.read() or b""
    except (OSError, ValueError):
        return [], at
    whole = data[: data.rfind(b"\n") + 1]
    lines = map(parse_line, whole.split(b"\n"))
    return [line for line in lines if line is not None], at + len(whole)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _end_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def memory_of(pid: int) -> int:
    """Bytes of a process and of all that it started, as far as the system tells."""
    total, found = 0, [pid]
    while found:
        one = found.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE
            for task in os.listdir(f"/proc/{one}/task"):
                children = Path(f"/proc/{one}/task/{task}/children").read_text()
                found += [int(child) for child in children.split()]
    return total
