"""Run the stages of a pipeline at the same time, as processes that end together.

In:    a pipeline: commands, each of which resumes from where it was
Out:   the same commands run; their events and what they print in pipeline.run
Keeps: one conductor for each pipeline: a lock that ends with it and its stages; no process left
       behind, however the conductor ends
Never: computes, moves data, restarts a stage: the same command resumes all of them

A stage waits for what it needs by itself: a loader for a shard, a mirror for a record. So all begin
at once, but for what needs the tokenizer, and for readers of a dataset that was there before: they
begin when it is known which generation of it is made now, and the trainer when it has come there.

          begin ─▶ tokenizer ─▶ chunk ∥ push ∥ pull ∥ train ─▶ end
                        one fails, or a signal: SIGTERM to all, then SIGKILL
"""

import contextlib
import dataclasses
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from penstock.disk import make_own_folder, open_own, read_own, replacing
from penstock.errors import BadConfig, PenstockError, StageFailed
from penstock.options import differences, suggest
from penstock.pipeline.describe import Pipeline, Stage
from penstock.pipeline.view import View
from penstock.produce.writer import as_begun
from penstock.store.log import Log, generation_url, generations, split_generation
from penstock.store.record import record_name
from penstock.work.events import Event, Events

LOOK_S: Final = 0.05
STOP_S: Final = 30.0
"""How long stages may take to stop, before they are killed."""
KILL_S: Final = 3.0
"""How long a leash may take to kill what it holds, before it is killed itself."""
BEAT_S: Final = 10.0
"""How often the events say that the run lives."""
FIND_S: Final = 10.0
"""How long a store may fail, when the generation is looked for that is pushed or pulled."""
LOCK_S: Final = 5.0
"""How long stages of a killed conductor may take to end, before a pipeline counts as running."""
_MAKERS: Final = ("chunk", "shard", "conversations")
_LAST_LINES: Final = 12
_TAIL_BYTES: Final = 16 << 10
LEASH: Final = Path(__file__).with_name("leash.py")


def choose_stages(pipeline: Pipeline, only: Sequence[str]) -> list[Stage]:
    """The stages that are named, by job or by name; all of them if none is."""
    names = {name for one in pipeline.stages for name in (one.job, one.name)}
    for name in only:
        if name not in names:
            raise BadConfig(f"no stage is called {name!r}", do=suggest(name, sorted(names)))
    return [one for one in pipeline.stages if not only or {one.job, one.name} & {*only}]


def run_pipeline(
    pipeline: Pipeline, stages: Sequence[Stage], *, stop_s: float = STOP_S
) -> int | None:
    """Run the stages to their end; returns the signal that stopped them early, if one did."""
    folder = pipeline.run_folder
    make_own_folder(folder)
    with (
        _locked(folder / "lock", pipeline.path) as lock,
        contextlib.closing(Events("run", path=folder / "_events.jsonl")) as events,
        View(pipeline, stages) as view,
    ):
        for doubt in pipeline.doubts:
            view.say(doubt)
        try:
            return _Conductor(pipeline, stages, lock, events, view, stop_s).run()
        finally:
            view.tell_end()


@contextlib.contextmanager
def _locked(path: Path, pipeline: Path) -> Iterator[int]:
    """A lock that this process and its stages hold together: it is free when all have ended."""
    descriptor = open_own(path)
    deadline = time.monotonic() + LOCK_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BadConfig(
                        f"{pipeline} is running already",
                        where=str(path),
                        why="another penstock run holds its lock, and would write the same data",
                        do="wait for it or stop it; the lock is free when its processes have ended",
                    ) from None
                time.sleep(LOOK_S)
        yield descriptor
    finally:
        os.close(descriptor)


class _Running:
    """A stage's process, and where its output and events go."""

    def __init__(self, stage: Stage, pipeline: Pipeline, lock: int) -> None:
        name = stage.name.replace(" ", "-")
        self.stage = stage
        self.output = pipeline.run_folder / f"{name}.log"
        self.events = pipeline.run_folder / f"{name}.events.jsonl"
        self.told_from = _size(self.events)
        self.asked_to_stop: float | None = None
        """When, if it was."""
        command = list(stage.command)
        if command[0] == "penstock":
            command[:1] = [sys.executable, "-m", "penstock", "--events", str(self.events)]
        output = open_own(self.output, append=True)
        self.from_byte = os.fstat(output).st_size
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(LEASH), *command],
                stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=pipeline.folder,
                start_new_session=True, pass_fds=[lock],
            )  # fmt: skip
        finally:
            os.close(output)

    def stop(self) -> None:
        self.asked_to_stop = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all that is left of it."""
        if self.process.stdin is not None:
            self.process.stdin.close()  # the leash kills what is in other sessions too
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        """The end of what it printed in this run."""
        with open(self.output, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(self.from_byte, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", "backslashreplace")
        return "\n".join(text.strip().splitlines()[-_LAST_LINES:])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class _Conductor:
    """Starts, watches and stops the stages of one run."""

    def __init__(
        self, pipeline: Pipeline, stages: Sequence[Stage], lock: int, events: Events, view: View,
        stop_s: float,
    ) -> None:  # fmt: skip
        self._pipeline = pipeline
        self._waiting = list(stages)
        self._running: list[_Running] = []
        self._lock = lock
        self._events = events
        self._view = view
        self._stop_s = stop_s
        self._signals: list[int] = []
        self._beat_at = time.monotonic()
        self._known: dict[str, str] = {}
        """Sources whose generation of this run is known, with its address."""

    def run(self) -> int | None:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)  # the terminal was closed
        handlers = {number: signal.signal(number, self._note) for number in numbers}
        began = time.time()
        self._events.emit("start", stages={one.name: str(one) for one in self._waiting})
        try:
            self._choose_generations()
            while (self._waiting or self._running) and not self._signals:
                self._begin()
                self._look()
                self._beat()
                if not (self._waiting or self._running):
                    break
                time.sleep(LOOK_S)
            if self._signals:
                self._view.say("stopping: SIGTERM to all stages; a second signal kills them")
        finally:
            self._stop()
            self._view.look_at_steps()
            stopped_by = self._signals[0] if self._signals else None
            first_s = None if self._view.first_batch is None else self._view.first_batch - began
            self._events.emit("end", stopped_by=stopped_by, first_batch_s=first_s)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return stopped_by

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    # Beginning.

    def _begin(self) -> None:
        """Start what has what it needs."""
        training = any(
            one.job == "tokenizer" for one in [*self._waiting, *(r.stage for r in self._running)]
        )
        for stage in list(self._waiting):
            if training and stage.job != "tokenizer":
                continue
            if stage.job not in (*_MAKERS, "tokenizer") and not self._knows_generations(stage):
                continue
            if stage.job == "train" and not self._has_begun_to_come():
                continue
            self._waiting.remove(stage)
            if self._is_trained(stage):
                self._view.say(f"{stage.name}: {stage.dataset} was trained by this command already")
                self._view.end(stage, "done")
                continue
            if stage.job == "tokenizer":
                self._keep_tokenizer(stage)
            running = _Running(self._of_generation(stage), self._pipeline, self._lock)
            self._running.append(running)
            self._view.begin(running.stage, running.process.pid, running.events, running.told_from)
            self._events.emit("stage", name=stage.name, command=str(running.stage))

    def _choose_generations(self) -> None:
        """Where nothing is made in this run, the newest generation is pushed or pulled."""
        made = {one.source for one in self._waiting if one.job in _MAKERS}
        for stage in self._waiting:
            if stage.job not in ("push", "pull") or stage.source in {*made, *self._known}:
                continue
            start = stage.command[2]
            if split_generation(start)[1] is not None:
                continue
            with contextlib.suppress(PenstockError, OSError):  # the stage says what is wrong
                place = start if "://" in start else self._pipeline.folder / start
                number = split_generation(generations(place, patience_s=FIND_S)[0])[1]
                if number is not None and number > 1:
                    self._known[stage.source] = generation_url(start, number)
                    told = f"generation {number} of {start} is the newest, and is taken"
                    self._view.say(f"{stage.name}: {told}")

    def _is_trained(self, stage: Stage) -> bool:
        """Whether the tokenizer is there, made by the same command: another would be another
        dataset, and inputs may have grown since."""
        if stage.job != "tokenizer" or not (self._pipeline.folder / stage.dataset).exists():
            return False
        return self._is_of("done", stage)

    def _is_of(self, which: str, stage: Stage) -> bool:
        """Whether the tokenizer's training was begun, or done, by this command last."""
        with contextlib.suppress(FileNotFoundError):
            return read_own(self._trained(which)) == str(stage).encode()
        return False

    def _trained(self, which: str) -> Path:
        """Where the command stands that the tokenizer's training was begun, or done, by."""
        return self._pipeline.run_folder / f"tokenizer.{which}"

    def _keep_tokenizer(self, stage: Stage) -> None:
        """Copy a tokenizer that another command made, or somebody: datasets and models that were
        made with it are of no use without it."""
        place = self._pipeline.folder / stage.dataset
        if os.path.lexists(place) and not self._is_of("begun", stage):
            kept = next(
                name
                for k in itertools.count(1)
                if not os.path.lexists(name := place.with_name(f"{place.name}.old-{k}"))
            )
            files = (
                [one for one in place.rglob("*") if one.is_file()] if place.is_dir() else [place]
            )
            for one in files:
                target = kept / one.relative_to(place)
                os.makedirs(target.parent, exist_ok=True)
                with open(one, "rb") as source, replacing(target, sync=True) as file:
                    shutil.copyfileobj(source, file)
            if files:
                told = f"{stage.dataset} was not made by this command: it is kept as {kept.name}"
                self._view.say(f"{stage.name}: {told}; what was made with it needs it")
        self._trained("done").unlink(missing_ok=True)
        self._note_training("begun", stage)

    def _note_training(self, which: str, stage: Stage) -> None:
        with replacing(self._trained(which), sync=True) as file:
            file.write(str(stage).encode())

    def _knows_generations(self, stage: Stage) -> bool:
        """Whether a reader would open what is made now, and not what was there before."""
        for running in [*(r.stage for r in self._running), *self._waiting]:
            if running.job not in _MAKERS or running.source in self._known:
                continue
            if stage.source not in ("", running.source):
                continue
            if (
                "://" in running.dataset
                or (self._pipeline.folder / running.dataset / record_name(0)).exists()
            ):
                return False
        return True

    def _has_begun_to_come(self) -> bool:
        """Whether new generations have begun where a trainer reads. It takes the newest that fits:
        before, that was one which another tokenizer may have made."""
        for stage in [*(r.stage for r in self._running), *self._waiting]:
            number = split_generation(self._known.get(stage.source, ""))[1]
            if stage.job not in ("pull", *_MAKERS) or number is None or number < 2:
                continue
            place = generation_url(split_generation(stage.dataset)[0], number)
            if "://" not in place and not (self._pipeline.folder / place / record_name(0)).exists():
                return False
        return True

    def _of_generation(self, stage: Stage) -> Stage:
        """The same stage for the generation that is made now, where that is not the first."""
        url = self._known.get(stage.source, "")
        number = split_generation(url)[1]
        if stage.job not in ("push", "pull") or number is None or number < 2:
            return stage
        ends = [generation_url(end, number) for end in stage.command[2:4]]
        command = (*stage.command[:2], *ends, *stage.command[4:])
        return dataclasses.replace(stage, command=command, dataset=ends[1])

    # Watching.

    def _look(self) -> None:
        for event in self._view.look():
            self._hear(event)
        for running in list(self._running):
            code = running.process.poll()
            asked = running.asked_to_stop
            if code is None and asked is not None and time.monotonic() > asked + self._stop_s:
                running.kill()
                code = running.process.poll()
            if code is None:
                continue
            for event in self._view.look():  # what it said last
                self._hear(event)
            self._running.remove(running)
            self._forget(running, code)

    def _hear(self, event: Event) -> None:
        """Learn which generation a source is made as, and say so if it is a new one."""
        source, url = event.get("source", ""), event.get("dataset")
        if event.get("kind") not in ("start", "made") or source in self._known:
            return
        if not isinstance(url, str) or not url:
            return
        self._known[source] = url
        number = split_generation(url)[1]
        if number is None or number < 2:
            return
        read = next(
            (one.dataset for one in self._pipeline.stages
             if one.job == "pull" and one.source == source),
            split_generation(url)[0],
        )  # fmt: skip
        read = generation_url(read, number)
        for line in _what_differs(self._pipeline.folder, url, number, read):
            self._view.say(f"{source}: {line}")
        self._events.emit("generation", source=source, dataset=url)

    def _forget(self, running: _Running, code: int) -> None:
        """Take note of a stage's end; an error if it failed."""
        running.kill()  # what it started, and left
        stage = running.stage
        is_asked = running.asked_to_stop is not None
        how = "done" if code == 0 else "stopped" if is_asked else "failed"
        self._events.emit("stage_end", name=stage.name, code=code, how=how)
        if how != "failed":
            self._view.end(stage, how)
            if stage.job == "tokenizer" and code == 0:
                self._note_training("done", stage)
            if stage.job == "train" and code == 0:
                for other in self._running:  # nobody will pass what it still wants to bring
                    if other.stage.bounded:
                        other.stop()
            if stage.job in _MAKERS:
                self._known.setdefault(stage.source, stage.dataset)
            return
        self._view.end(stage, "failed")
        number = -code if code < 0 else code - 128
        ended = f"exit code {code}"
        if number in {one.value for one in signal.Signals}:
            ended = f"ended by {signal.Signals(number).name}"
        raise StageFailed(
            f"stage {stage.name} failed: {ended}",
            where=str(stage),
            why=running.last_words() or "it printed nothing",
            do=f"fix that and run the same command again: it resumes. All output: {running.output}",
        )

    def _beat(self) -> None:
        """Say now and then that it lives: stages may run for hours without an end."""
        now = time.monotonic()
        if now > self._beat_at + BEAT_S:
            self._beat_at = now
            self._events.emit("beat")

    # Stopping.

    def _stop(self) -> None:
        """Ask all stages to end, wait, and kill what does not."""
        for running in self._running:
            running.stop()
        deadline = time.monotonic() + self._stop_s
        signals = min(1, len(self._signals))
        while any(one.process.poll() is None for one in self._running):
            if time.monotonic() > deadline or len(self._signals) > signals:
                break
            self._view.look()
            time.sleep(LOOK_S)
        for running in self._running:
            running.kill()
        for running in self._running:
            self._view.end(running.stage, "stopped")
        self._running.clear()


def _what_differs(folder: Path, url: str, number: int, read: str) -> list[str]:
    """A new generation, what tells it from the one before it, and where a loader `read`s it."""
    found = [f"generation {number} of the dataset: {url}"]
    before = generation_url(split_generation(url)[0], number - 1)
    with contextlib.suppress(PenstockError, OSError, ValueError):
        configs = []
        for one in (before, url):
            opened = Log.open(one if "://" in one else folder / one).state.opened
            configs.append(as_begun(opened.config) if opened else {})
        found += [f"  {line}" for line in differences(configs[0], configs[1])]
    found.append(
        f"  {before} stays as it is; a loader opens what is sealed first: name "
        f'path = "{read}" in [loader] to train on the new one while it is made'
    )
    return found
