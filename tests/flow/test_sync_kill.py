"""Kill push and pull anywhere: what is there is a beginning of the dataset, and a restart is exact.

In:    the commands, in forks of the warm process; a proxy that knows when a request passes
Out:   after each kill: a mirror without a wrong byte; after the same command again: the dataset
Keeps: kills at every request, before the server has it and before the client hears of it; at calls
       to the file system; at random moments while the dataset grows

make check: every 12th request, 6 calls, 12 random kills. make faults: all, and 200 of the
last.
"""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.proxy import Proxy
from services.servers import Server, clouds

from .calls import Call, Fault
from .mirror import BucketView, FolderView, Template, View, Watcher, wrong_beginning, wrong_end
from .sweep import Ended, Running, Small, Warm, litter, spread

END_S = 60.0


@dataclass(slots=True)
class Mirrors:
    """Runs the two commands on a small dataset, and kills them."""

    warm: Warm
    moto: Server
    proxy: Proxy
    template: Template
    live: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def new_url(self) -> str:
        return clouds()["moto"](self.moto).new_url("a/mirror")

    def start(self, *command: str | Path, folder: Path, **options: Any) -> Running:
        """`penstock push` or `pull` in a fork, over the proxy."""
        argv = [*map(str, command), "--stall", "20s", "--give_up", "10s", "--connections", "2"]
        return self.warm.start(
            [argv], folder=folder, input=folder / "none", seed=None,
            environment=self.environment, **options,
        )  # fmt: skip

    def run(self, *command: str | Path, **options: Any) -> Ended:
        ended = self.start(*command, **options).wait()
        assert ended is not None
        return ended

    def kill_at_request(self, *command: str | Path, folder: Path, at: int, after: bool) -> Ended:
        """Kill it as its at-th request has come, or has been answered; nothing passes then."""
        seen = 0
        started = threading.Event()
        running: list[Running] = []
        lock = threading.Lock()

        def strike(line: str) -> None:
            nonlocal seen
            with lock:
                seen += 1
                if seen == at:
                    started.wait(10)
                    os.kill(running[0].pid, signal.SIGKILL)
                    if not after:
                        raise ConnectionAbortedError("the request has not left its machine")

        self.proxy.before, self.proxy.after = (None, strike) if after else (strike, None)
        try:
            running.append(self.start(*command, folder=folder))
            started.set()
            ended = running[0].wait()
        finally:
            self.proxy.before = self.proxy.after = None
        assert ended is not None
        return ended


@pytest.fixture(scope="module")
def mirrors(
    small: Small, moto: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mirrors]:
    folder = small.scratch / "mirrors"
    folder.mkdir()
    template = Template.make(folder / "template", documents=60, text_bytes=2_000, rows_per_file=12)
    template.grow(folder / "live", random.Random(0), 0)
    with Proxy(moto.port) as proxy:
        environment = clouds()["moto"](moto).environment(proxy.port)
        yield Mirrors(small.warm, moto, proxy, template, folder / "live", folder, environment)
    shutil.rmtree(folder)


def requests_of(mirrors: Mirrors, *command: str | Path, folder: Path) -> int:
    """How many requests an undisturbed run makes."""
    before = len(mirrors.proxy.seen)
    ended = mirrors.run(*command, folder=folder)
    assert ended.code == 0, str(ended)
    return len(mirrors.proxy.seen) - before


def restart(mirrors: Mirrors, view: View, *command: str | Path, folder: Path) -> list[str]:
    """What is wrong with what a killed command left, and with what the next one made of it."""
    found = wrong_beginning(mirrors.template, view)
    ended = mirrors.run(*command, folder=folder)
    if ended.code != 0:
        found.append(f"the restart failed: {ended}")
    found += wrong_end(mirrors.template, view)
    if isinstance(view, FolderView):
        found += [f"{name} is left" for name in litter(view.folder)]
    return found


def sweep_push(mirrors: Mirrors, step: int) -> tuple[int, list[str]]:
    total = requests_of(mirrors, "push", mirrors.live, mirrors.new_url(), folder=mirrors.live)
    bad, points = [], 0
    for after in (False, True):
        for at in range(1 + after, total + 1, step):
            url = mirrors.new_url()
            command = ("push", mirrors.live, url)
            ended = mirrors.kill_at_request(*command, folder=mirrors.live, at=at, after=after)
            view = BucketView(clouds()["moto"](mirrors.moto), url)
            found = [] if ended.signal == signal.SIGKILL else [f"it was not killed: {ended}"]
            found += restart(mirrors, view, *command, folder=mirrors.live)
            bad += [f"push, request {at}, after={after}: {what}" for what in found]
            points += 1
    return points, bad


def sweep_pull(mirrors: Mirrors, step: int) -> tuple[int, list[str]]:
    url = mirrors.new_url()
    assert mirrors.run("push", mirrors.live, url, folder=mirrors.live).code == 0
    total = requests_of(mirrors, "pull", url, mirrors.folder / "first", folder=mirrors.folder)
    shutil.rmtree(mirrors.folder / "first")
    bad, points = [], 0
    for after in (False, True):
        for at in range(1 + after, total + 1, step):
            back = mirrors.folder / f"back-{at}-{after}"
            command = ("pull", url, back)
            ended = mirrors.kill_at_request(*command, folder=back, at=at, after=after)
            found = [] if ended.signal == signal.SIGKILL else [f"it was not killed: {ended}"]
            found += restart(mirrors, FolderView(back), *command, folder=back)
            bad += [f"pull, request {at}, after={after}: {what}" for what in found]
            points += 1
            shutil.rmtree(back)
    return points, bad


def sweep_calls(mirrors: Mirrors, keep: int) -> tuple[int, list[str]]:
    """Kill pull as it makes, writes, syncs or names a file."""
    url = mirrors.new_url()
    assert mirrors.run("push", mirrors.live, url, folder=mirrors.live).code == 0
    listed = mirrors.folder / "calls.json"
    first = mirrors.folder / "first"
    assert mirrors.run("pull", url, first, folder=first, calls=listed).code == 0
    total = len([Call(*row) for row in json.loads(listed.read_text())])
    assert total > 100
    shutil.rmtree(first)
    bad, points = [], spread(total - 10, keep)  # threads: the number varies by a few
    for at in points:
        back = mirrors.folder / f"back-{at}"
        ended = mirrors.run("pull", url, back, folder=back, fault=Fault("kill", at))
        found = [] if ended.signal == signal.SIGKILL else [f"it was not killed: {ended}"]
        found += restart(mirrors, FolderView(back), "pull", url, back, folder=back)
        bad += [f"pull, call {at}: {what}" for what in found]
        shutil.rmtree(back)
    return len(points), bad


def kill_while_it_grows(mirrors: Mirrors, seed: int, kills: int) -> list[str]:
    """Both commands beside the producer, each killed again and again at random moments."""
    chance = random.Random(seed)
    folder = mirrors.folder / f"grows-{seed}"
    live, back, url = folder / "live", folder / "back", mirrors.new_url()
    producer = threading.Thread(
        target=mirrors.template.grow, args=(live, random.Random(seed), 0.1 * kills / 3)
    )
    watcher = Watcher(mirrors.template, FolderView(back))
    commands: dict[str, tuple[str | Path, ...]] = {
        "push": ("push", live, url),
        "pull": ("pull", url, back),
    }
    found: list[str] = []
    producer.start()
    deadline = time.monotonic() + END_S
    alive = {name: mirrors.start(*command, folder=folder) for name, command in commands.items()}
    for _ in range(kills):
        time.sleep(chance.uniform(0, 0.3))
        name = chance.choice(list(alive))
        try:
            os.kill(alive[name].pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        ended = alive[name].wait()
        if ended is not None and ended.code not in (None, 0):
            found.append(f"{name} gave up: {ended}")
        alive[name] = mirrors.start(*commands[name], folder=folder)
    producer.join(END_S)
    for name, running in alive.items():
        ended = running.wait()
        if ended is None or ended.code != 0:
            found.append(f"{name}: {ended}")
    if time.monotonic() > deadline:
        found.append("it took too long")
    found += watcher.close()
    bucket = BucketView(clouds()["moto"](mirrors.moto), url)
    found += [f"bucket: {what}" for what in wrong_end(mirrors.template, bucket)]
    found += [f"directory: {what}" for what in wrong_end(mirrors.template, FolderView(back))]
    found += [f"{name} is left" for name in litter(back)]
    shutil.rmtree(folder)
    return [f"seed {seed}: {what}" for what in found]


def judge(points: int, bad: list[str]) -> None:
    print(f"{points} points")
    assert not bad, f"{len(bad)} bad of {points} points\n" + "\n".join(bad[:10])


def test_push_killed_at_requests(mirrors: Mirrors) -> None:
    judge(*sweep_push(mirrors, 12))


def test_pull_killed_at_requests(mirrors: Mirrors) -> None:
    judge(*sweep_pull(mirrors, 12))


def test_pull_killed_at_calls(mirrors: Mirrors) -> None:
    judge(*sweep_calls(mirrors, 6))


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments_while_it_grows(mirrors: Mirrors, seed: int) -> None:
    judge(6, kill_while_it_grows(mirrors, seed, 6))


@pytest.mark.faults
def test_push_killed_at_every_request(mirrors: Mirrors) -> None:
    judge(*sweep_push(mirrors, 1))


@pytest.mark.faults
def test_pull_killed_at_every_request(mirrors: Mirrors) -> None:
    judge(*sweep_pull(mirrors, 1))


@pytest.mark.faults
def test_pull_killed_at_every_call(mirrors: Mirrors) -> None:
    judge(*sweep_calls(mirrors, 1_000_000))


@pytest.mark.faults
@pytest.mark.parametrize("part", range(4))
def test_killed_at_200_random_moments_while_it_grows(mirrors: Mirrors, part: int) -> None:
    bad = [what for seed in range(5)
           for what in kill_while_it_grows(mirrors, 100 + 10 * part + seed, 10)]  # fmt: skip
    judge(50, bad)
