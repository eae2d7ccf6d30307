"""What happens to documents on their way into a shard: a list of steps that can be read aloud.

In:    steps, as people write them
Out:   the same as JSON, for the log and for workers, and back

    [FilterConfig(preset="code"), DedupConfig(), ChunkConfig(max_tokens=4096)]
"""

import hashlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from penstock import plugins
from penstock.chat.render import SKIPPED, ChatConfig
from penstock.errors import BadConfig
from penstock.ingest.formats import ReadConfig
from penstock.ingest.open import missing
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.dedup import REASONS as REPEATED
from penstock.prepare.dedup import DedupConfig
from penstock.prepare.filters import REASONS as FILTERED
from penstock.prepare.filters import FilterConfig
from penstock.prepare.outline.syntax import missing_grammars

DUPLICATE: Final = "duplicate"
"""Why batch dedup lets go of a document."""


class DataProcessor(ABC):
    """Changes documents, a column at a time. Register a class, or name it "module:Class".

    A processor must give the same for the same documents, wherever it runs.
    """

    @abstractmethod
    def process(self, documents: pa.RecordBatch) -> pa.Array:
        """From columns text, source and language the new texts, one for each row, in order.

        A null drops the document; the reason is the processor's name.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A step of the user's: a `DataProcessor` by name."""

    name: str

    def load(self) -> DataProcessor:
        module, _, member = self.name.partition(":")
        made: Any
        if not member:
            made = plugins.find("processor", self.name).make
        else:
            try:
                made = getattr(importlib.import_module(module), member)
            except (ImportError, AttributeError) as error:
                raise BadConfig(
                    f"there is no processor {self.name}",
                    why=str(error),
                    do="name it module:Class, with the module on PYTHONPATH",
                ) from error
        try:
            processor: DataProcessor = made()
        except Exception as error:  # code of others: whatever it raises
            raise BadConfig(
                f"the processor {self.name} cannot be made",
                why=f"{type(error).__name__}: {error}",
                do="name a class that needs no arguments",
            ) from error
        if not callable(getattr(processor, "process", None)):
            raise BadConfig(f"{self.name} has no method process", do="implement DataProcessor")
        return processor

    def answer(self, processor: DataProcessor, documents: pa.RecordBatch) -> pa.Array:
        """The new texts, checked: what others wrote may answer anything."""
        new = processor.process(documents)
        if isinstance(new, pa.ChunkedArray):
            new = new.combine_chunks()
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_null)
        if not isinstance(new, pa.Array) or not any(is_kind(new.type) for is_kind in kinds):
            raise BadConfig(
                f"processor {self.name} did not answer with texts",
                why=f"it gave {getattr(new, 'type', type(new).__name__)}",
                do="return an Arrow array of strings, one for each row: null drops it",
            )
        if len(new) != len(documents):
            raise BadConfig(
                f"processor {self.name} did not answer for each document",
                why=f"it gave {len(new):,} texts for {len(documents):,} documents",
                do="return one text for each row: null drops it",
            )
        return new.cast(pa.large_string())


@dataclass(frozen=True, kw_only=True, slots=True)
class Decontaminate:
    """Drop documents that hold items of a benchmark."""

    files: tuple[str, ...]
    """JSONL or text files with the items."""
    text_field: str = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDedup:
    """Dedup in a pass of its own before all else, for corpora whose index exceeds memory.

    Nothing is published before that pass is done; duplicates are connected components.
    """

    near: bool = True
    threshold: float = 0.8

    def config(self) -> DedupConfig:
        return DedupConfig(near=self.near, threshold=self.threshold)


Step = FilterConfig | DedupConfig | BatchDedup | ChunkConfig | ChatConfig | Process | Decontaminate
_NAMES: Final = {
    "filter": FilterConfig,
    "dedup": DedupConfig,
    "batch_dedup": BatchDedup,
    "chunk": ChunkConfig,
    "conversations": ChatConfig,
    "process": Process,
    "decontaminate": Decontaminate,
}


def steps_as_json(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """One object for each step, its name first."""
    _check(steps)
    found = []
    for step in steps:
        name = next(name for name, kind in _NAMES.items() if isinstance(step, kind))
        plain = step.as_json() if isinstance(step, FilterConfig | DedupConfig) else asdict(step)
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}
        found.append({"step": name, **lists})
    return found


def plan_of(
    read: ReadConfig, steps: Sequence[Step], *, has_tokenizer: bool = False
) -> dict[str, Any]:
    """How documents are read, filtered and cut, as the log has it."""
    if counts_tokens(steps) and not has_tokenizer:
        raise BadConfig(
            "chunking counts tokens, and no tokenizer is given",
            do="name one with --tokenizer; penstock tokenizer train makes one",
        )
    if has_tokenizer and not counts_tokens(steps):
        raise BadConfig(
            "a tokenizer is given, and no step counts tokens",
            do="add a ChunkConfig, or leave the tokenizer out",
        )
    plan: dict[str, Any] = {"read": read.as_json(), "steps": steps_as_json(steps)}
    if by_lines := _without_grammars(steps):
        plan["by_lines"] = by_lines
    items = [name for step in steps if isinstance(step, Decontaminate) for name in step.files]
    if items:
        plan["benchmarks"] = {name: _sha256(Path(name)) for name in items}
    return plan


def _without_grammars(steps: Sequence[Step]) -> list[str]:
    """The languages that are to be cut, and whose grammars are not installed.

    They are in the log: a run that goes on where they are installed would cut otherwise.
    """
    asked = [step.language for step in steps if isinstance(step, ChunkConfig)]
    return [name for name in missing_grammars() if {"auto", name} & {*asked}]


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        raise missing(path) from None


def reasons_of(steps: Sequence[Step]) -> set[str]:
    """For what these steps let go of documents, in the words of the rejects."""
    found = {*FILTERED, *REPEATED, DUPLICATE}
    for step in steps:
        if isinstance(step, FilterConfig):
            found.update(step.rules)
        elif isinstance(step, Process):
            found.add(step.name)
        elif isinstance(step, ChatConfig):
            found.update(SKIPPED)
    return found


def counts_tokens(steps: Sequence[Step]) -> bool:
    """Whether a tokenizer is needed for them."""
    return any(isinstance(step, ChunkConfig | ChatConfig) for step in steps)


def steps_from_json(plain: Sequence[dict[str, Any]]) -> list[Step]:
    """What `steps_as_json` gave."""
    steps: list[Step] = []
    for about in plain:
        options = dict(about)
        kind = _NAMES[options.pop("step")]
        if kind in (FilterConfig, DedupConfig):
            steps.append(kind.from_json(options))
        else:
            options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
            steps.append(kind(**options))
    return steps


def _check(steps: Sequence[Step]) -> None:
    for step in steps:
        if not isinstance(step, tuple(_NAMES.values())):
            raise BadConfig(
                f"{type(step).__name__} is not a step",
                do=f"choose from {', '.join(kind.__name__ for kind in _NAMES.values())}",
            )
    for kinds in ((DedupConfig, BatchDedup), (ChunkConfig,)):
        if sum(isinstance(step, kinds) for step in steps) > 1:
            raise BadConfig(f"{kinds[0].__name__} is given twice", do="give it once")
    kinds_given = {type(step) for step in steps}
    if {BatchDedup, Process} <= kinds_given:
        raise BadConfig(
            "batch dedup and a processor do not go together",
            why="what it finds of a text is used in a second pass over the same text",
            do="change the texts in a run of their own first",
        )
    if any(isinstance(step, ChunkConfig) for step in steps[:-1]):
        raise BadConfig("chunking is not the last step", do="put ChunkConfig at the end")
    if any(isinstance(step, ChatConfig) for step in steps[:-1]):
        raise BadConfig("rendering is not the last step", do="put ChatConfig at the end")


def make_steps(
    *,
    processors: Sequence[str] = (),
    filter: FilterConfig | None = None,
    benchmarks: Sequence[str] = (),
    dedup: str = "none",
    chunk: ChunkConfig | None = None,
) -> list[Step]:
    """The steps that the options of a command stand for, in their order."""
    steps: list[Step] = [Process(name=name) for name in processors]
    if filter is not None:
        steps.append(filter)
    if benchmarks:
        steps.append(Decontaminate(files=tuple(benchmarks)))
    if dedup not in ("none", "exact", "near", "batch"):
        raise BadConfig(f"--dedup is {dedup!r}", do="choose none, exact, near or batch")
    if dedup == "batch":
        steps.append(BatchDedup())
    elif dedup != "none":
        steps.append(DedupConfig(near=dedup == "near"))
    if chunk is not None:
        steps.append(chunk)
    return steps
