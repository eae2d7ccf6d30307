"""Let all ranks answer alike where the answer depends on when somebody looks.

In:    what this rank sees; a directory or bucket prefix that all ranks share, or torch.distributed
Out:   what the first rank that came to the question saw
Keeps: an answer, once given, for ever: it is created once, like a record of a log
Never: guesses: a rank that cannot ask the others refuses

Two things depend on that moment: whether a run began with data that was still being made (`ramp`),
and whether a source had its shards when the plan asked, unless the plan waits for shards.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.disk import replacing
from penstock.errors import BadConfig, StateMismatch
from penstock.store.store import AlreadyThere, Store, Unsure, open_store, read_back
from penstock.stream.plan import PlanConfig
from penstock.supply.settings import LoaderRun

RAMP: Final = "_choices/ramp.json"


class Grows(Protocol):
    """A source that knows whether its data is still being made."""

    url: str

    @property
    def grows(self) -> bool: ...


def choose_ramp(config: PlanConfig, sources: Sequence[Grows], run: LoaderRun, about: str) -> bool:
    """Whether the run that `about` describes begins with a ramp: as it was told, as it chose when
    it began, or by whether all of its sources are sealed now; the same on every rank."""
    if config.ramp is not None:
        return config.ramp
    if (recorded := read_record(run.record)) is not None:
        return recorded
    live = [source.url for source in sources if source.grows]
    rank, ranks = run.found_rank()
    if run.run_dir:
        store = open_store(run.run_dir, make=True)
        ramp = _create_once(store, RAMP, bool(live))
    elif (compare_set := _torch_store(ranks)) is not None:
        key = f"penstock/ramp/{hashlib.sha256(about.encode()).hexdigest()[:32]}"
        ramp = compare_set(key, "", str(int(bool(live)))) == b"1"
    elif ranks > 1 and live:
        raise BadConfig(
            f"ramp is not given for {ranks} ranks",
            where=live[0],
            why="it is still being made, and may be sealed when another rank looks: "
            "one would begin with a ramp, the other without",
            do="give ramp=True in the plan to begin at the first shard, ramp=False to begin with a "
            "full pool (base_train.py: --plan ramp=true), or run_dir, a directory that all ranks "
            "share",
        )
    else:
        ramp = bool(live)
    if run.record and rank == 0:
        _write_record(run.record, ramp)
    return ramp


def recorded_ramp(state: Mapping[str, Any]) -> bool:
    """What the run chose that a state is of."""
    settings = state.get("config") if isinstance(state, Mapping) else None
    ramp = settings.get("ramp") if isinstance(settings, Mapping) else None
    return ramp is True


def read_record(path: str | None) -> bool | None:
    """The choice that a run's record keeps; None if it has made none yet."""
    if not path or not os.path.exists(path):
        return None
    try:
        ramp = json.loads(Path(path).read_text())["ramp"]
    except (ValueError, TypeError, KeyError):
        ramp = None
    if not isinstance(ramp, bool):
        raise StateMismatch(
            f"{path} is not the record of a run",
            why="it does not say whether the run began with a ramp",
            do='write {"ramp": false}, or true if the data was still being made then',
        )
    return ramp


def _write_record(path: str, ramp: bool) -> None:
    with replacing(path) as file:
        file.write(json.dumps({"ramp": ramp}).encode() + b"\n")


def _create_once(store: Store, name: str, mine: bool) -> bool:
    """The answer of whoever came first."""
    try:
        store.create(name, b"true" if mine else b"false")
    except (AlreadyThere, Unsure):
        return read_back(store, name) == b"true"
    return mine


def _torch_store(ranks: int) -> Callable[[str, str, str], bytes] | None:
    """How to set a value once for all ranks of torch.distributed, if these are they."""
    torch = sys.modules.get("torch.distributed")
    if ranks < 2 or torch is None or not torch.is_available() or not torch.is_initialized():
        return None
    if torch.get_world_size() != ranks:
        return None
    found: Callable[[str, str, str], bytes]
    found = torch.distributed_c10d._get_default_store().compare_set
    return found


Decided = dict[tuple[int, int], bool]


class Agreement:
    """Answers by source and number of the question."""

    def __init__(self, behind: str, run_dir: str | None, world_size: int) -> None:
        if behind != "wait" and world_size > 1 and not run_dir:
            raise BadConfig(
                f"behind is {behind!r} on {world_size} ranks",
                why="ranks see new shards at different times, and must decide alike",
                do="give run_dir, a directory or bucket prefix that all ranks share, or wait",
            )
        self._behind = behind
        self._store: Store | None = open_store(run_dir, make=True) if run_dir else None
        self._decided: Decided = {}

    def bind(self, about: str) -> None:
        """Let the answers be those of one run: another one must not find them."""
        if self._store is None or self._behind == "wait":
            return
        try:
            self._store.create("_behind/run.json", about.encode())
        except (AlreadyThere, Unsure):
            if read_back(self._store, "_behind/run.json") != about.encode():
                raise BadConfig(
                    "run_dir holds the answers of another run",
                    where=self._store.url,
                    why="its settings or its data differ from those of this loader",
                    do="give each run a run_dir of its own",
                ) from None

    def decide(self, source: int, number: int, ready: bool) -> bool:
        """Whether the shards count as there, for every rank."""
        key = source, number
        if key not in self._decided:
            self._decided[key] = self._agreed(source, number, ready)
        return self._decided[key]

    def _agreed(self, source: int, number: int, ready: bool) -> bool:
        if self._store is None:
            return ready
        return _create_once(self._store, f"_behind/{source:05d}-{number:012d}.json", ready)

    def state(self, asked: Sequence[int]) -> list[list[int]]:
        """Answers that a plan will ask for again when it is restored: to the questions from
        `asked` on, a number for each source."""
        return [
            [source, number, int(ready)]
            for (source, number), ready in self._decided.items()
            if number >= asked[source]
        ]

    def restore(self, state: list[list[int]]) -> None:
        self._decided = {(source, number): bool(ready) for source, number, ready in state}
