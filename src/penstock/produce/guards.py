"""What may stop a run before it begins or while it runs, and which generation it writes.

In:    names of inputs, what a log says of them, the options wanted
Out:   errors for inputs that hold each other, hold nothing that is meant, or are not those of what
       is sealed; damage, as against what is not wanted; the generation to write: the dataset
       itself, or DATASET/_gen/00002, 00003, …
Keeps: every generation a whole dataset of its own, so whoever trains on an old one goes on
Never: touches what is sealed; begins a new generation while the last one is not sealed

What the options that changed do not touch is not computed again: where only chunking differs, the
documents that were let go of are those that the last generation's rejects name.
"""

import bisect
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from penstock import plugins
from penstock.errors import AlreadySealed, BadConfig
from penstock.ingest.find import OWN_INPUTS as OWN_INPUTS
from penstock.ingest.find import check_name, expand_inputs
from penstock.ingest.formats import Piece, ReadConfig, read_parts
from penstock.ingest.inputs import Input, open_input
from penstock.options import checked_path
from penstock.prepare.rows import contents, hash_texts
from penstock.prepare.steps import Step, reasons_of
from penstock.produce.columns import has_chat_columns
from penstock.produce.writer import ShardConfig, as_begun, check_begun, inputs_begun, is_shuffled
from penstock.store.log import InputState, Log, LogState, generation_url, split_generation
from penstock.store.store import Store, open_store

TEXT_OF: Final = "text_of"
"""In the config of a generation whose text is that of another dataset: the id of that one."""

OpenInput = Callable[[str, int], Input]
"""Opens an input by its name and number."""

MIXED_KINDS: Final = frozenset({"files", "tar", "zip"})
_EXPECTED: Final = frozenset({"binary", "empty_text", "not_a_file", *OWN_INPUTS})
"""What every tree of sources holds: refused, counted, but no sign of damage."""


def is_expected(kind: str, reason: str) -> bool:
    """Whether an input of this kind has what is refused for this reason as a matter of course.

    >>> is_expected("files", "binary"), is_expected("jsonl", "empty_text")
    (True, False)
    """
    return kind in MIXED_KINDS and reason in _EXPECTED


def damage_so_far(
    state: LogState, steps: Sequence[Step], kind_of: Callable[[str], str]
) -> dict[str, int]:
    """What earlier runs refused when they read, by reason: all that no step decided."""
    found: dict[str, int] = {}
    decided = reasons_of(steps)
    for name, known in state.inputs.items():
        kind = kind_of(name)
        for reason, count in known.dropped.items():
            if reason not in decided and not is_expected(kind, reason):
                found[reason] = found.get(reason, 0) + count
    return found


def lines_given(inputs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The names of files of lines, which need not be there yet."""
    names = [checked_path("--input", path) for path in inputs]
    if len({os.path.realpath(name) for name in names}) != len(names) or not names:
        raise BadConfig("the same input is given twice, or none", do="name each input once")
    for name in names:
        check_name(name)
    return names


def inputs_given(
    inputs: Sequence[str | os.PathLike[str]],
    made: Sequence[str | os.PathLike[str] | None],
    read: ReadConfig,
    modules: Sequence[str],
) -> list[str]:
    """The inputs that are meant, unless what is made would be read, or nothing would.

    `modules` are imported first: they may register formats.
    """
    plugins.load(modules)
    names = expand_inputs([checked_path("--inputs", name) for name in inputs])
    refuse_overlap(names, [checked_path("what is made", name) for name in made if name])
    refuse_nothing_meant(names, read)
    return names


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
    url: str, state: LogState, inputs: Sequence[str], open_one: OpenInput, do: str
) -> None:
    """Refuse inputs that are new, have grown, or are not what is sealed there."""
    for number, name in enumerate(inputs):
        known = state.inputs.get(name)
        if known is None:
            raise AlreadySealed(f"{url} is sealed, and {name} is not in it", where=name, do=do)
        opened = open_one(name, number)
        try:
            if why := opened.more(known.to):
                raise AlreadySealed(
                    f"{url} is sealed, and {os.path.basename(name)} holds more than is in it",
                    where=name,
                    why=why,
                    do=do,
                )
            check_input(opened, known)
        finally:
            opened.close()


def resumes_at(opened: Input, known: InputState | None, url: str) -> int:
    """Where an input is read on, if it is still what was read."""
    if known is None:
        return 0
    if opened.kind == "jsonl" and opened.proves_content and "content" not in known.proof:
        raise BadConfig(
            "the dataset was begun by an earlier penstock",
            where=f"{url}, {opened.name}",
            why="it noted the places of lines, and what proves them, otherwise: they would mean "
            "two things in one dataset",
            do="write to a new directory, or finish it with the penstock that began it",
        )
    check_input(opened, known)
    return known.to


def check_input(opened: Input, known: InputState) -> None:
    """Refuse an input that is not what was read: by names, sizes and the time of the last change.

    If that time differs, it is read again: who only touched or copied it has changed nothing.
    """
    if opened.check(known.to, known.proof) or "content" not in known.proof:
        return
    total = 0
    for piece in opened.pieces(0):
        for part, found in read_parts(piece, opened.config, opened.name):
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


# Generations.


@dataclass(slots=True)
class Generation:
    """A dataset to write, and what is known beforehand."""

    number: int
    log: Log
    verdicts: "Verdicts | None" = None
    before: Log | None = None
    """The newest one that was made with other options."""


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

    def check_piece(self, opened: Input, piece: Piece, content: int) -> None:
        """The sum of all pieces is looked at."""

    def check_end(self, opened: Input, content: int) -> None:
        """Refuse what is not the text that the rejects are of, however well it looked before."""
        known, found = self._inputs[opened.name], as_content(content)
        if known.proof.get("content", found) != found:
            error = opened.refuse_content(known.to)
            error.do = "remove this generation, and write to a new directory"
            raise error

    def remove(self) -> None:
        """They are part of a dataset: they stay."""


def is_tokenized(state: LogState) -> bool:
    """Whether a generation has the text of another, tokenised anew."""
    return state.opened is not None and TEXT_OF in state.opened.config


def holds_conversations(state: LogState) -> bool:
    """Whether the rows of a dataset are conversations."""
    prepare = state.opened.config.get("prepare") if state.opened is not None else None
    return has_chat_columns(prepare or {})


def find_generation(url: str | os.PathLike[str], wants: Callable[[LogState], bool]) -> Log:
    """The first generation beside a dataset that is wanted, or where the next one goes.

    `url` is that of the dataset, or of one of its generations.
    """
    root, _ = split_generation(url)
    for number in itertools.count(2):
        log = Log(open_store(generation_url(root, number)))
        log.refresh()
        if log.state.n < 0 or wants(log.state):
            break
    return log if log.state.n >= 0 else Log(open_store(generation_url(root, number), make=True))


def choose_generation(
    url: str | os.PathLike[str], config: ShardConfig, inputs: Sequence[str], open_one: OpenInput
) -> Generation:
    """The generation that was made with these options, begun or sealed; else a new one.

    One in which nothing was kept is in the way of nobody, whatever was changed since.
    """
    before: Log | None = None
    number = 0
    while True:
        number += 1
        log = Log(open_store(generation_url(url, number), make=True))
        log.refresh()
        if log.state.n >= 0:
            if is_tokenized(log.state):
                continue
            try:
                check_begun(log.store, log.state, config, inputs)
            except BadConfig:
                if log.state.is_empty:
                    continue
                same_inputs = inputs_begun(log.state) == list(inputs)
                if log.state.sealed is None or not config.prepare or not same_inputs:
                    raise
                before = log
                continue
        verdicts = None
        if before is not None and _same_verdicts(before.state, config, inputs):
            # they go by places in the inputs: in others they would be those of other documents
            do = "write to a new directory"
            refuse_changed(before.store.url, before.state, inputs, open_one, do)
            verdicts = Verdicts(before.store, before.state)
        return Generation(number, log, verdicts, before)


def _same_verdicts(state: LogState, config: ShardConfig, inputs: Sequence[str]) -> bool:
    """Whether the earlier generation decided over the same documents in the same way."""
    earlier, now = as_begun(state.opened.config if state.opened else {}), asdict(config)
    if inputs_begun(state) != list(inputs):
        return False
    plans = [earlier["prepare"], now["prepare"]]
    if any(_changes_text(plan) for plan in plans):
        return False
    # another seed is another order: of places in the inputs, and of what repeats what
    same_order = not is_shuffled(now) or earlier["seed"] == now["seed"]
    return same_order and _deciding(plans[0]) == _deciding(plans[1])


def _deciding(plan: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan that decides which documents are kept."""
    steps = [step for step in plan.get("steps", []) if step["step"] != "chunk"]
    return {"read": plan.get("read"), "steps": steps, "benchmarks": plan.get("benchmarks")}


def _changes_text(plan: dict[str, Any]) -> bool:
    return any(step["step"] == "process" for step in plan.get("steps", []))
