"""Make a dataset anew from the same inputs with other options, beside the old one.

In:    a dataset's address, the options and inputs wanted
Out:   the generation to write: the dataset itself, or DATASET/_gen/00002, 00003, …
Keeps: every generation a whole dataset of its own, so whoever trains on an old one goes on
Never: touches what is sealed; begins a new generation while the last one is not sealed

What the options that changed do not touch is not computed again: where only chunking differs, the
documents that were let go of are those that the last generation's rejects name.
"""

import bisect
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from penstock.errors import BadConfig
from penstock.ingest.formats import Piece, ReadConfig
from penstock.ingest.inputs import Input
from penstock.shard.damage import refuse_changed
from penstock.shard.write import ShardConfig, check_begun
from penstock.store.backends import Store, open_store
from penstock.store.log import Log, LogState

FOLDER: Final = "_gen"


@dataclass(slots=True)
class Generation:
    """A dataset to write, and what is known beforehand."""

    number: int
    log: Log
    verdicts: "Verdicts | None" = None


class Verdicts:
    """Which documents an earlier generation let go of: its rejects, by input and place."""

    def __init__(self, store: Store, state: LogState) -> None:
        self.url = store.url
        self._inputs = state.inputs
        self._starts: dict[str, list[int]] = {}
        self._lines: dict[str, list[bytes]] = {}
        for file in state.split("rejects"):
            for line in store.read(file.name).splitlines(keepends=True):
                about = json.loads(line)
                self._starts.setdefault(about["input"], []).append(about["start"])
                self._lines.setdefault(about["input"], []).append(line)

    def of(self, name: str, piece: Piece) -> list[bytes]:
        """The rejects of a piece."""
        starts = self._starts.get(name, [])
        low, high = bisect.bisect_left(starts, piece.start), bisect.bisect_left(starts, piece.end)
        return self._lines.get(name, [])[low:high]

    def check(self, opened: Input, content: str) -> None:
        """Refuse what is not the text that the rejects are of, however well it looked before."""
        known = self._inputs[opened.name]
        if known.proof.get("content", content) != content:
            error = opened.refuse_content(known.to)
            error.do = "remove this generation, and write to a new directory"
            raise error


def generation_url(url: str | os.PathLike[str], number: int) -> str:
    """Where a generation is.

    >>> generation_url("data/cpp", 1), generation_url("data/cpp/", 2)
    ('data/cpp', 'data/cpp/_gen/00002')
    """
    root = os.fspath(url).rstrip("/") or "/"
    return root if number == 1 else f"{root}/{FOLDER}/{number:05d}"


def choose_generation(
    url: str | os.PathLike[str], config: ShardConfig, inputs: Sequence[str], read: ReadConfig
) -> Generation:
    """The generation that was made with these options, begun or sealed; else a new one."""
    before: Log | None = None
    number = 0
    while True:
        number += 1
        log = Log(open_store(generation_url(url, number), make=True))
        log.refresh()
        if log.state.n >= 0:
            try:
                check_begun(log.store, log.state, config, inputs)
            except BadConfig:
                same_inputs = list(log.state.inputs) == list(inputs)
                if log.state.sealed is None or not config.prepare or not same_inputs:
                    raise
                before = log
                continue
        verdicts = None
        if before is not None and _same_verdicts(before.state, config, inputs):
            # they go by places in the inputs: in others they would be those of other documents
            do = "write to a new directory"
            refuse_changed(before.store.url, before.state, inputs, read, do)
            verdicts = Verdicts(before.store, before.state)
        return Generation(number, log, verdicts)


def _same_verdicts(state: LogState, config: ShardConfig, inputs: Sequence[str]) -> bool:
    """Whether the earlier generation decided over the same documents in the same way."""
    earlier = dict(state.opened.config) if state.opened else {}
    if list(state.inputs) != list(inputs):
        return False
    plans = [earlier.get("prepare") or {}, asdict(config)["prepare"]]
    if any(_changes_text(plan) for plan in plans):
        return False
    return _deciding(plans[0]) == _deciding(plans[1])


def _deciding(plan: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan that decides which documents are kept."""
    steps = [step for step in plan.get("steps", []) if step["step"] != "chunk"]
    return {"read": plan.get("read"), "steps": steps, "benchmarks": plan.get("benchmarks")}


def _changes_text(plan: dict[str, Any]) -> bool:
    return any(step["step"] == "process" for step in plan.get("steps", []))
