"""What may stop a run: damage, as against what is not wanted; inputs that hold each other, that
hold nothing that is meant, or that are not those of what is sealed."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.errors import AlreadySealed, BadConfig
from penstock.ingest.formats import ReadConfig, read_parts
from penstock.ingest.inputs import Input, kind_of, open_input
from penstock.prepare.dedup import REASONS as REPEATED
from penstock.prepare.filters import REASONS as FILTERED
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import Process, Step
from penstock.prepare.task import contents, hash_texts
from penstock.shard.batch import REASON as IN_BATCH
from penstock.store.log import InputState, LogState

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


def refuse_nothing_meant(inputs: Sequence[str], read: ReadConfig) -> None:
    """Refuse `suffixes` that leave nothing at all; what is empty itself may be."""
    if read.suffixes is None:
        return
    found: Counter[str] = Counter()
    for number, name in enumerate(inputs):
        opened = open_input(name, number, read)
        left_out = opened.left_out()
        opened.close()
        if not left_out:
            return
        found += left_out
    held = [f"{suffix or 'no suffix'} ({count:,})" for suffix, count in found.most_common(5)]
    more = f" and {len(found) - 5} other kinds" if len(found) > 5 else ""
    raise BadConfig(
        f"no file ends in {' or '.join(sorted(read.suffixes))}",
        where=", ".join(inputs[:3]) + (f" and {len(inputs) - 3} more" if len(inputs) > 3 else ""),
        why=f"there are {sum(found.values()):,} files: {', '.join(held)}{more}",
        do="give other --suffixes, or leave them out to read every file",
    )


def refuse_changed(
    url: str, state: LogState, inputs: Sequence[str], read: ReadConfig, do: str
) -> None:
    """Refuse inputs that are new, have grown, or are not what is sealed there."""
    for number, name in enumerate(inputs):
        known = state.inputs.get(name)
        if known is None:
            raise AlreadySealed(f"{url} is sealed, and {name} is not in it", where=name, do=do)
        opened = open_input(name, number, read)
        try:
            if why := opened.more(known.to):
                raise AlreadySealed(
                    f"{url} is sealed, and {os.path.basename(name)} holds more than is in it",
                    where=name,
                    why=why,
                    do=do,
                )
            check_input(opened, known, read)
        finally:
            opened.close()


def check_input(opened: Input, known: InputState, read: ReadConfig) -> None:
    """Refuse an input that is not what was read: by names, sizes and the time of the last change.

    If that time differs, it is read again: who only touched or copied it has changed nothing.
    """
    if opened.check(known.to, known.proof) or "content" not in known.proof:
        return
    total = 0
    for piece in opened.pieces(0):
        for part, found in read_parts(piece, read, opened.name):
            documents = found.documents
            digests = contents(found, hash_texts(documents))
            starts = [*documents.start.tolist(), *(r.start for r in found.refusals)]
            total += int(digests[np.array(starts, np.int64) < known.to].sum(dtype=np.uint64))
            if part.end >= known.to:
                break
        if piece.end >= known.to:
            break
    if as_content(total) != known.proof["content"]:
        raise opened.refuse_content(known.to)


def as_content(total: int) -> str:
    """A sum of `contents`, as a proof holds it."""
    return f"{total % (1 << 64):016x}"
