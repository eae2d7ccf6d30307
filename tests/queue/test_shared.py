"""Several consumers on one queue, some of them dying: each batch exactly once.

In:    a provider and four consumers, each a process; two of them are killed at calls of their own
Out:   by claims: who got True from `ack`; by numbers: what is in the model at the end
Keeps: the oracle outside: lines that the consumers append to a file of the test

make check: a few runs of both. make faults: 500 of each.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flow.calls import Fault, Watch
from flow.queue_pair import Numbers, numbers_config
from penstock import ConsumerConfig, DatasetConsumer, SharedConfig

BATCHES = 24
RUNS = 500


@pytest.fixture
def memory() -> Iterator[Path]:
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="penstock-shared-", dir=place) as folder:
        yield Path(os.path.realpath(folder))


def fork(work: Callable[[], None]) -> int:
    """Do something in a process of its own; its exit code is 0 if it came to its end."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def how(pid: int) -> int:
    """How a process ended: 0, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start_provider(folder: Path, **settings: Any) -> tuple[SharedConfig, int]:
    """A provider, once its queue can be opened."""
    config = numbers_config(folder, train_batches=BATCHES, val_batches=0, **settings)
    pid = fork(lambda: run_to_end(Numbers(config)))
    while not (config.folder / "queue" / "meta.json").exists():
        time.sleep(0.002)
    return config, pid


def run_to_end(provider: Numbers) -> None:
    provider.run()


def die_at(call: int, config: SharedConfig) -> None:
    """Kill this process at one of its calls to the queue's folder."""
    if call:
        Watch(str(config.folder), "-", Fault("kill", call)).install()


# By claims


def claim_all(config: SharedConfig, name: int, log: int, call: int, seed: int) -> None:
    """Take batches to the end; a line before each ack, a line after it."""
    chance, write = random.Random(seed), os.write
    die_at(call, config)
    with (
        DatasetConsumer(config.folder, ConsumerConfig(lease_s=0.2, stall_s=60)) as consumer,
        consumer.claims("train") as claims,
    ):
        for claim in claims:
            x, _ = claim.batch()
            assert int(x[0, 0]) == claim.number
            write(log, f"{name} tries {claim.number}\n".encode())
            time.sleep(chance.random() * 0.004)
            counts = claim.ack()
            write(log, f"{name} {'counts' if counts else 'lost'} {claim.number}\n".encode())


def run_claims(folder: Path, seed: int) -> list[str]:
    """What is wrong after one run."""
    chance = random.Random(seed)
    each = chance.choice((1, 1, 3))
    config, provider = start_provider(
        folder, backlog_batches=chance.choice((2, 5, 40)), batches_per_file=each
    )
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    dying = set(chance.sample(range(4), 2))
    calls = [chance.randint(1, 400) if name in dying else 0 for name in range(4)]
    workers = [
        fork(lambda name=name: claim_all(config, name, log, calls[name], seed * 10 + name))  # type: ignore[misc]
        for name in range(4)
    ]
    codes = [how(pid) for pid in workers]
    os.close(log)
    wrong = [f"consumer {k} ended with {code}" for k, code in enumerate(codes)
             if code and not (code == -signal.SIGKILL and k in dying)]  # fmt: skip
    if how(provider):
        wrong.append("the provider failed")
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    counted = Counter(int(number) for _, what, number in lines if what == "counts")
    last = {name: (what, int(number)) for name, what, number in lines}
    # one that was killed in ack() may have been counted, and could not say so
    unsaid = Counter(number for what, number in last.values() if what == "tries")
    for number in range(BATCHES):
        if counted[number] > 1:
            wrong.append(f"batch {number} counted {counted[number]} times")
        if not counted[number] and not unsaid[number]:
            wrong.append(f"batch {number} lost")
    return [f"seed {seed}: {what}" for what in wrong]


@pytest.mark.parametrize("seed", range(4))
def test_claims_with_two_that_die(memory: Path, seed: int) -> None:
    assert not run_claims(memory, seed)


@pytest.mark.faults
@pytest.mark.parametrize("part", range(10))
def test_claims_often(memory: Path, part: int) -> None:
    wrong = []
    for seed in range(1000 + part * RUNS // 10, 1000 + (part + 1) * RUNS // 10):
        folder = memory / str(seed)
        folder.mkdir()
        wrong += run_claims(folder, seed)
        shutil.rmtree(folder)
    assert not wrong


# By numbers


class Job:
    """A training on several ranks that go in step, as torchrun would start it: if one dies, all are
    ended, and the next launch begins at the last checkpoint, on any number of ranks."""

    def __init__(self, config: SharedConfig, chance: random.Random) -> None:
        self.config, self.chance = config, chance
        self.saved: dict[str, Any] = {"seen": [], "state": None}
        self.deaths = 0

    def launch(self, ranks: int, dying: int) -> bool:
        """Train to the end, or until a rank dies; whether it came to the end."""
        seen = list(self.saved["seen"])
        calls = [self.chance.randint(5, 150) if rank < dying else 0 for rank in range(ranks)]
        self.chance.shuffle(calls)
        pipes = [(os.pipe(), os.pipe()) for _ in range(ranks)]
        pids = [
            fork(lambda rank=rank: self._rank(rank, ranks, calls[rank], pipes))  # type: ignore[misc]
            for rank in range(ranks)
        ]
        for (_, said), (heard, _) in pipes:
            os.close(said)
            os.close(heard)
        files = [os.fdopen(said, "rb") for (said, _), _ in pipes]
        done, step = False, 0
        while True:
            told = [json.loads(line) if (line := file.readline()) else None for file in files]
            if None in told:
                break
            done = all(one["end"] for one in told if one)
            assert done or not any(one["end"] for one in told if one), "they end at another step"
            if done:
                break
            step += 1
            seen += [one["batch"] for one in told if one]
            if step % 4 == 0:
                self.saved = {"seen": list(seen), "state": told[0] and told[0]["state"]}
            for _, (_, answer) in pipes:  # none of them is in the model before all of them are
                os.write(answer, b"r" if step % 4 == 0 else b"s")
        if done:
            self.saved = {"seen": seen, "state": told[0] and told[0]["state"]}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.deaths += sum(how(pid) == -signal.SIGKILL for pid in pids) > 0 and not done
        for file in files:
            file.close()
        for _, (_, answer) in pipes:
            os.close(answer)
        return done

    def _rank(self, rank: int, ranks: int, call: int, pipes: Any) -> None:
        (_, said), (heard, _) = pipes[rank]
        for number, ((a, b), (c, d)) in enumerate(pipes):
            for one in (a, d) if number == rank else (a, b, c, d):
                os.close(one)
        write, read = os.write, os.read
        die_at(call, self.config)
        settings = ConsumerConfig(delete="checkpointed", rank=rank, world_size=ranks, stall_s=60)
        with DatasetConsumer(self.config.folder, settings) as consumer:
            if self.saved["state"] is not None:
                consumer.load_state_dict(self.saved["state"])
            while True:
                try:
                    batch: int | None = int(consumer.get_batch("train")[0][0, 0])
                except StopIteration:
                    batch = None
                state = consumer.state_dict()
                told = {"batch": batch, "end": batch is None, "state": state}
                write(said, json.dumps(told).encode() + b"\n")
                answer = read(heard, 1)
                if answer == b"r":
                    consumer.release(state)
                if not answer:
                    return


def run_numbers(folder: Path, seed: int) -> list[str]:
    """What is wrong after one run."""
    chance = random.Random(seed)
    each = chance.choice((1, 1, 3))
    config, provider = start_provider(
        folder, backlog_batches=chance.choice((1, 5, 40)), batches_per_file=each
    )
    job = Job(config, chance)
    job.launch(4, dying=2)
    for _ in range(chance.randrange(3)):
        ranks = chance.choice((1, 2, 4))
        job.launch(ranks, dying=min(ranks, 2))
    job.launch(4, dying=0)
    assert job.launch(1, dying=0)  # what does not go round on four
    wrong = [] if how(provider) == 0 else ["the provider failed"]
    if job.saved["seen"] != list(range(BATCHES)):
        wrong.append(f"the model has seen {job.saved['seen']}")
    return [f"seed {seed}: {what}" for what in wrong]


@pytest.mark.parametrize("seed", range(4))
def test_numbers_with_two_ranks_that_die(memory: Path, seed: int) -> None:
    assert not run_numbers(memory, seed)


@pytest.mark.faults
@pytest.mark.parametrize("part", range(10))
def test_numbers_often(memory: Path, part: int) -> None:
    wrong = []
    for seed in range(1000 + part * RUNS // 10, 1000 + (part + 1) * RUNS // 10):
        folder = memory / str(seed)
        folder.mkdir()
        wrong += run_numbers(folder, seed)
        shutil.rmtree(folder)
    assert not wrong
