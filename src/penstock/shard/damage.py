"""What may stop a run: damage, as against what is not wanted; inputs that hold each other."""

import os
from collections.abc import Sequence
from typing import Final

from penstock.errors import BadConfig
from penstock.ingest.inputs import kind_of
from penstock.prepare.dedup import REASONS as REPEATED
from penstock.prepare.filters import REASONS as FILTERED
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import Process, Step
from penstock.shard.batch import REASON as IN_BATCH
from penstock.store.log import LogState

_MIXED_KINDS: Final = frozenset({"files", "tar", "zip"})
_EXPECTED: Final = frozenset({"binary", "empty_text", "not_a_file"})
"""What every tree of sources holds: refused, counted, but no sign of damage."""


def is_expected(kind: str, reason: str) -> bool:
    """Whether an input of this kind has what is refused for this reason as a matter of course.

    >>> is_expected("files", "binary"), is_expected("jsonl", "empty_text")
    (True, False)
    """
    return kind in _MIXED_KINDS and reason in _EXPECTED


def damage_so_far(state: LogState, steps: Sequence[Step]) -> dict[str, int]:
    """What earlier runs refused when they read, by reason: all that no step decided."""
    decided = {*FILTERED, *REPEATED, IN_BATCH}
    for step in steps:
        if isinstance(step, FilterConfig):
            decided.update(step.rules)
        elif isinstance(step, Process):
            decided.add(step.name)
    found: dict[str, int] = {}
    for name, known in state.inputs.items():
        kind = kind_of(name)[0]
        for reason, count in known.dropped.items():
            if reason not in decided and not is_expected(kind, reason):
                found[reason] = found.get(reason, 0) + count
    return found


def refuse_overlap(inputs: Sequence[str], made: Sequence[str]) -> None:
    """Refuse inputs that lie in one another, and what is made inside of one: it would be read."""
    trees = [os.path.realpath(name) for name in inputs if os.path.isdir(name)]
    places = [(name, False) for name in inputs] + [(name, True) for name in made]
    for name, is_made in places:
        if "://" in name:
            continue
        place = os.path.realpath(name)
        what = "is written, and lies in an input" if is_made else "lies in another input"
        for tree in trees:
            if place.startswith(tree + os.sep) or (place == tree and is_made):
                raise BadConfig(
                    f"{name} {what}",
                    where=tree,
                    why="its files would be read twice, or what was made would be read",
                    do="name each file once, and write elsewhere",
                )
