"""Claims: who has a batch, whose work counts, and what becomes of those who are silent."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flow.queue_pair import Numbers, numbers_config
from penstock import ConsumerConfig, DatasetConsumer, SharedConfig
from penstock.errors import BadBatch, BadConfig, LogDamaged, ProducerStalled
from penstock.queue import claims as module
from penstock.queue.claims import Claims
from penstock.queue.folder import Queue

LEASE_S = 0.2


def filled(folder: Path, batches: int = 6, **settings: Any) -> SharedConfig:
    config = numbers_config(
        folder, train_batches=batches, val_batches=0, backlog_batches=100, **settings
    )
    Numbers(config).run()
    return config


def opened(config: SharedConfig, lease_s: float = LEASE_S, stall_s: float = 20) -> Claims:
    return DatasetConsumer(config.folder, ConsumerConfig(lease_s=lease_s, stall_s=stall_s)).claims(
        "train"
    )


def left(config: SharedConfig) -> set[str]:
    """All that is in the split's folder, but for what is always there."""
    root = config.folder / "queue" / "train"
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {name for name in found if name not in ("end.json", "mode.json", "_ack/lock")}


@pytest.mark.parametrize("each", [1, 4])
def test_each_batch_is_given_once_and_nothing_is_left(tmp_path: Path, each: int) -> None:
    config = filled(tmp_path, 22, batches_per_file=each)
    with opened(config) as one, opened(config) as two:
        seen = []
        for a, b in zip(one, two, strict=True):
            for claim in (a, b):
                assert int(claim.batch()[0][0, 0]) == claim.number
                assert claim.attempt == 0
                assert claim.ack()
                assert not claim.ack()  # once is enough
                seen.append(claim.number)
    assert seen == list(range(22))
    names = {name for name in left(config) if not name.startswith("_floor/")}
    assert names == ({f"{20:020d}.safetensors"} if each == 4 else set())


def test_the_work_of_one_that_closes_is_free_at_once(tmp_path: Path) -> None:
    config = filled(tmp_path, 2)
    one, two = opened(config, lease_s=1000), opened(config, lease_s=1000)
    assert [one.take().number, two.take().number] == [0, 1]
    one.close()
    again = two.take()
    assert (again.number, again.attempt) == (0, 1)
    assert again.ack()
    two.close()


def test_the_work_of_one_that_is_silent_is_given_to_another(tmp_path: Path) -> None:
    config = filled(tmp_path, 1)
    one, two = opened(config), opened(config)
    held = one.take()
    began = time.monotonic()
    one._lease._end.set()  # its pulse stops, as that of a dead process
    taken = two.take()
    assert (taken.number, taken.attempt) == (0, 1)
    assert time.monotonic() - began > LEASE_S
    assert taken.ack()
    assert not held.ack()
    with pytest.raises(StopIteration) as ended:
        two.take()
    told = (
        f"all 1 batches of {config.folder / 'queue/train'} are acknowledged, and no more will come"
    )
    assert str(ended.value) == told
    one.close()
    two.close()


def test_whoever_acknowledges_first_counts(tmp_path: Path) -> None:
    config = filled(tmp_path, 1)
    one, two = opened(config), opened(config)
    held = one.take()
    one._lease._end.set()
    taken = two.take()
    assert held.ack()  # it was paused, and no more
    assert not taken.ack()
    one.close()
    two.close()


def test_a_live_owner_is_waited_for(tmp_path: Path) -> None:
    config = filled(tmp_path, 1)
    one, two = opened(config), opened(config, stall_s=0.1)
    held = one.take()
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(StopIteration):
            two.take()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(3 * LEASE_S)
    assert not ended.is_set()  # neither stolen nor stalled
    assert held.ack()
    thread.join()
    assert ended.is_set()
    one.close()
    two.close()


def test_a_batch_that_is_given_up_is_free_at_once(tmp_path: Path) -> None:
    config = filled(tmp_path, 1)
    with opened(config, lease_s=1000) as one, opened(config, lease_s=1000) as two:
        one.take().give_up()
        taken = two.take()
        assert taken.attempt == 2  # nobody's was the one between
        assert taken.ack()


def test_claims_that_are_never_acknowledged_are_told(tmp_path: Path) -> None:
    config = filled(tmp_path, 1)
    with opened(config) as claims:
        claims.take()
        with pytest.raises(BadConfig, match="that it has not acknowledged"):
            claims.take()


def test_a_provider_that_is_silent_is_told(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, backlog_batches=2)
    provider = Numbers(config)
    thread = threading.Thread(target=provider.run)
    thread.start()
    while not (config.folder / "queue" / "meta.json").exists():
        time.sleep(0.005)
    with opened(config) as claims:
        assert [claims.take().ack() for _ in range(30)] == [True] * 30
    provider.stopped_by = 15
    thread.join()
    with (
        opened(config, stall_s=0.2) as claims,
        pytest.raises(ProducerStalled, match="no provider runs"),
    ):
        list(map(module.Claim.ack, claims))


def test_a_paused_process_comes_back_to_find_its_work_done(tmp_path: Path) -> None:
    config = filled(tmp_path, 12)
    said, heard = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with opened(config) as claims:
            claim = claims.take()
            os.write(said[1], b"!")
            os.read(heard[0], 1)
            os.write(said[1], b"y" if claim.ack() else b"n")
            # its lease was taken away; it gets another, and goes on
            more = [one.ack() for one in claims]
            os.write(said[1], b"%d" % len(more))
        os._exit(0)
    assert os.read(said[0], 1) == b"!"
    os.kill(pid, signal.SIGSTOP)
    with opened(config) as claims:
        first = sorted((claims.take() for _ in range(12)), key=lambda one: one.number)
        assert [one.number for one in first] == list(range(12))
        assert all(one.ack() for one in first[:9])
        os.kill(pid, signal.SIGCONT)
        os.write(heard[1], b"!")
        assert os.read(said[0], 1) == b"n"
        for one in first[9:]:
            one.give_up()
        assert int(os.read(said[0], 2)) == 3
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for descriptor in (*said, *heard):
        os.close(descriptor)


def test_a_claim_on_what_is_done_with_comes_to_nothing(tmp_path: Path) -> None:
    """Every order in which one consumer is late and another tidies up."""
    config = filled(tmp_path, 4)
    late, quick = opened(config, lease_s=1000), opened(config, lease_s=1000)
    held = late.take()
    late._split.store.remove(f"_lease/{late._lease.owner}")  # as if it had been silent
    done = [quick.take() for _ in range(4)]
    assert sorted(one.number for one in done) == [0, 1, 2, 3]
    assert all(one.ack() for one in done)
    quick._tidy()
    assert Queue(config.folder).split("train", late.consumer.about).floor() == 4
    assert not held.ack()  # its claim went with the batch
    # it had looked before all that, and claims now; a provider of old even wrote the file again
    assert late._claim(0, 2) is None
    provider = Numbers(config)
    layout = late._split.layout
    data = layout.encode(0, [provider.make_batch("train", 0, layout.schema)])
    late._split.store.create(layout.name(0), b"".join(data))
    assert late._claim(0, 2) is None
    assert not [name for name in left(config) if name.startswith(("_claim/", "_ack/0"))]
    late.close()
    quick.close()


def test_the_claim_of_a_late_one_does_not_count_for_a_zombie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that looked before all was tidied up claims batch 0 anew, for a moment, under the
    name that a zombie's claim had: whose ack must not count beside the one that did."""
    config = filled(tmp_path, 2)
    zombie, quick, late = (opened(config, lease_s=1000) for _ in range(3))
    held = zombie.take()
    zombie._split.store.remove(f"_lease/{zombie._lease.owner}")  # as if it had been silent
    done = [quick.take() for _ in range(2)]
    assert all(one.ack() for one in done)
    quick._tidy()
    said = []

    def look(number: int) -> bool:
        said.append(held.ack())  # its claim is made, and nobody has looked whether it may be
        return False

    monkeypatch.setattr(late, "_is_acked", look)
    assert late._claim(0, held.attempt) is None
    assert said == [False]
    monkeypatch.undo()
    for one in (zombie, quick, late):
        one.close()
    assert not [name for name in left(config) if name.startswith(("_claim/", "_ack/0"))]


def test_what_one_that_died_had_not_removed_is_removed(tmp_path: Path) -> None:
    config = filled(tmp_path, 6)
    with opened(config) as claims:
        for _ in range(3):
            assert claims.take().ack()
        claims._split._raise(3)  # and then it was killed
        claims._untidy = 0
    with opened(config) as claims:
        assert [claim.number for claim in claims if claim.ack()] == [3, 4, 5]
    assert not [name for name in left(config) if name.endswith(".safetensors")]


def test_one_that_was_robbed_while_it_waits_is_heard_by_the_provider_again(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, train_batches=6, val_batches=0, backlog_batches=2)
    provider = Numbers(config)
    thread = threading.Thread(target=provider.run)
    thread.start()
    split = config.folder / "queue" / "train"
    while not (split / f"{1:020d}.safetensors").exists():
        time.sleep(0.005)
    provider.stopped_by = 15
    thread.join()
    with opened(config, lease_s=1000) as claims:
        assert [claims.take().number for _ in range(2)] == [0, 1]  # the floor stays
        for folder in ("_lease", "_read"):  # as one does that takes it for dead, and dies too
            claims._split.store.remove(f"{folder}/{claims._lease.owner}")
        again = Numbers(config)
        thread = threading.Thread(target=again.run)
        thread.start()
        found: list[int] = []
        taking = threading.Thread(
            target=lambda: found.extend(claims.take().number for _ in range(4)), daemon=True
        )
        taking.start()
        taking.join(20)
        again.stopped_by = 15
        thread.join()
        assert found == [0, 1, 2, 3]  # its own work, which anybody might have; then what is new


def test_temporary_files_of_the_dead_are_removed_and_their_owners_survive_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = filled(tmp_path, 2)
    one, two = opened(config), opened(config)
    one.take()
    one._lease._end.set()
    folder = config.folder / "queue" / "train" / "_claim"
    (folder / f".tmp-{int(one._lease.owner, 16)}-00").write_bytes(b"")
    (folder / ".tmp-77-00").write_bytes(b"")
    assert [two.take().number, two.take().number] == [1, 0]
    assert [path.name for path in folder.iterdir() if path.name[0] == "."] == [".tmp-77-00"]
    # one that wakes up while it claims finds its temporary file removed, and tries again
    from penstock.store import local

    name_once, failures = local._name_once, [True]

    def fail_once(source: Path, target: Path) -> None:
        if failures and "_claim" in str(target):
            failures.pop()
            raise FileNotFoundError(2, "No such file or directory")
        name_once(source, target)

    monkeypatch.setattr(local, "_name_once", fail_once)
    assert one._split.create("_claim/x", b"y")
    assert not failures
    one.close()
    two.close()


def test_the_floor_rises_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIDY", 3)
    config = filled(tmp_path, 10)
    with opened(config) as claims:
        taken = [claims.take() for _ in range(7)]
        split = Queue(config.folder).split("train", claims.consumer.about)
        for number, floor in ((1, 0), (0, 0), (2, 3), (4, 3), (5, 3), (6, 3), (3, 3)):
            assert taken[number].ack()
            assert split.floor() == floor
        claims._tidy()
        assert split.floor() == 7
        assert not [name for name in left(config) if name < f"{7:020d}"]
        for claim in claims:
            claim.ack()


def test_what_a_power_cut_took_comes_again_while_a_claim_waits(tmp_path: Path) -> None:
    """The floor is held low, and nobody remembers how far was read: the backlog alone would not
    lead the provider to the batch that is damaged."""
    config = filled(tmp_path, 9)
    with opened(config) as claims:
        held = [claims.take() for _ in range(6)]
        assert all(claim.ack() for claim in held[1:])
        claims._untidy = 0  # the power is cut: its batch 0 is not done
        root = claims._split.root
        damaged = root / f"{6:020d}.safetensors"
        damaged.write_bytes(bytes(damaged.stat().st_size))
    for path in (root / "_read").iterdir():
        path.unlink()
    small = numbers_config(tmp_path, train_batches=9, val_batches=0, backlog_batches=1)
    found: list[int] = []
    with opened(config) as claims:

        def work() -> None:
            found.extend(claim.number for claim in claims if claim.ack())

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.1)
        provider = Numbers(small)
        making = threading.Thread(target=provider.run)
        making.start()
        thread.join()
        making.join()
    assert found == [0, 6, 7, 8]


def test_a_claim_on_what_stays_damaged_is_given_up(tmp_path: Path) -> None:
    config = filled(tmp_path, 2)
    path = config.folder / "queue" / "train" / f"{0:020d}.safetensors"
    whole = path.read_bytes()
    path.write_bytes(b"")
    with opened(config, stall_s=0.1) as one, opened(config, lease_s=1000) as two:
        with pytest.raises(BadBatch, match="is not a file of batches"):
            one.take()
        path.write_bytes(whole)
        assert [two.take().number, two.take().number] == [0, 1]


@pytest.mark.parametrize("changed", [True, False], ids=["other settings", "the same"])
def test_one_that_outlives_a_purge_takes_nothing_from_the_new_queue(
    tmp_path: Path, changed: bool
) -> None:
    """It knows of a floor and of acks that are not there any longer."""
    old = opened(config := filled(tmp_path, 12), stall_s=0.2)
    for _ in range(10):
        assert old.take().ack()
    Numbers(config).purge()
    config = filled(tmp_path, 12, **({"seed": 5} if changed else {}))
    new, done = opened(config), []
    held = new.take()
    for _ in range(5):
        claim = new.take()
        assert claim.ack()
        done.append(claim.number)
    with pytest.raises(LogDamaged, match="was purged while it was in use"):
        old.take()
    old.close()
    assert held.ack()
    with opened(config) as third:
        assert done + [claim.number for claim in third if claim.ack()] == list(range(1, 12))
    new.close()
