"""Say what a pipeline will make, and how long that takes, from a sample of its inputs.

In:    a pipeline; a few megabytes of each source, read as its stage reads them
Out:   for each stage its command, and an estimate: tokens, rows, bytes, refusals, seconds
Keeps: at most SAMPLE_BYTES of documents of each source, in a temporary directory that is removed
Never: writes where the pipeline will, takes an estimate for a promise

The sample goes through the stage's own command, so what is measured is what will run. One process
measures, because others take a second to begin; the time is divided by the workers that will run.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from penstock.disk import create
from penstock.errors import StageFailed
from penstock.ingest.find import expand_inputs, suffix_of
from penstock.ingest.formats import ReadConfig, read_parts
from penstock.ingest.inputs import Input, input_sizes, open_input
from penstock.pipeline.describe import Pipeline, Source, Stage
from penstock.pipeline.run import LEASH
from penstock.pipeline.view import read_lines
from penstock.produce.writer import ShardConfig
from penstock.store.log import Log
from penstock.work.run import RunConfig

SAMPLE_BYTES: Final = 8 << 20
_PIECE_BYTES: Final = 1 << 20
"""What is read of an input at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Documents of a source as files of their own."""

    inputs: tuple[str, ...]
    bytes: int
    """What was read for it, of the bytes as they lie on the disk."""
    total: int
    """What there is of them."""

    @property
    def times(self) -> float:
        """How many samples the whole is."""
        return self.total / max(1, self.bytes)


def estimate(pipeline: Pipeline, stages: Sequence[Stage]) -> Iterator[str]:
    """A few lines for each stage."""
    sources = {one.name: one for one in pipeline.sources}
    with tempfile.TemporaryDirectory(prefix="penstock-sample-") as folder:
        samples: dict[str, Sample] = {}
        tokenizer = pipeline.tokenizer
        made: dict[str, int] = {}
        for stage in stages:
            yield stage.name
            yield f"  $ {stage}"
            wanted = [stage.source] if stage.job == "chunk" else []
            if stage.job == "tokenizer":  # of the same sources, or of all if it has its own inputs
                known = [one for one in pipeline.sources if one.kind == "documents"]
                own = [one.name for one in known if {*one.inputs} <= {*stage.command}]
                wanted = own or [one.name for one in known]
            for name in (one for one in wanted if one not in samples):
                samples[name] = _take(pipeline, sources[name], Path(folder))
            if wanted and not any(samples[name].inputs for name in wanted):
                yield "  no estimate: its inputs hold no document"
            elif stage.job == "tokenizer" and wanted:
                tokenizer = os.path.join(folder, "tokenizer")
                learned = [samples[name] for name in wanted]
                yield f"  {_of_tokenizer(pipeline, stage, learned, tokenizer)}"
            elif stage.job == "chunk":
                told, size = _of_chunk(pipeline, stage, samples[stage.source], tokenizer, folder,
                                       sources[stage.source])  # fmt: skip
                made[stage.source] = size
                yield f"  {told}"
            elif stage.job in ("push", "pull") and stage.source in made:
                yield f"  about {_amount(made[stage.source])} to move, while they are made"
        yield from pipeline.doubts
        read, total = (sum(getattr(one, name) for one in samples.values())
                       for name in ("bytes", "total"))  # fmt: skip
        if total:
            yield (
                f"Estimates, from a sample of {_amount(read)} of {_amount(total)}. Stages run side "
                "by side: all of them take about as long as the slowest."
            )


def _take(pipeline: Pipeline, source: Source, folder: Path) -> Sample:
    """Read documents of each input in turn, and write them as files that a stage reads alike."""
    table = source.tables.get("read", {})
    config = ReadConfig(**{**table, "piece_bytes": _PIECE_BYTES})
    target = folder / source.name
    target.mkdir()
    with contextlib.chdir(pipeline.folder):
        names = expand_inputs(source.inputs)
        sizes = input_sizes(names, lambda one, k: open_input(one, k, config), grow=False)
        budget, passed, wrote = SAMPLE_BYTES // len(names), 0.0, False
        with os.fdopen(create(folder / f"{source.name}.jsonl"), "wb") as lines:
            for number, name in enumerate(names):
                if number and passed >= SAMPLE_BYTES:
                    break
                with contextlib.closing(open_input(name, number, config)) as opened:
                    share, found = _read_some(opened, config, max(budget, _PIECE_BYTES))
                for k, (text, origin) in enumerate(found):
                    if origin is None:
                        line = {config.text_field: text.decode("utf-8", "replace")}
                        lines.write(json.dumps(line).encode() + b"\n")
                        wrote = True
                    else:
                        path = target / f"{number}_{k}{suffix_of(origin)}"
                        with os.fdopen(create(path), "wb") as file:
                            file.write(text)
                passed += share * sizes.get(name, 0)
    inputs = [str(folder / f"{source.name}.jsonl")] if wrote else []
    if any(target.iterdir()):
        inputs.append(str(target))
    return Sample(inputs=tuple(inputs), bytes=int(passed), total=sum(sizes.values()))


def _read_some(
    opened: Input, config: ReadConfig, budget: int
) -> tuple[float, list[tuple[bytes, str | None]]]:
    """Documents of an input, and the share of it that they are."""
    found: list[tuple[bytes, str | None]] = []
    held, unit, is_all = 0, 0, True
    for piece in opened.pieces():
        for part, read in read_parts(piece, config, opened.name):
            documents = read.documents
            for k in range(len(documents)):
                origin = None if documents.sources is None else documents.sources[k]
                found.append((documents.text(k), origin))
                held += len(found[-1][0])
            unit = part.end
        if held >= budget:
            is_all = False
            break
    if is_all:
        return 1.0, found
    if opened.passed is not None:
        return min(1.0, opened.passed / max(1, sum(size for _, size, _ in opened.files()))), found
    return min(1.0, float(opened.fractions(np.array([unit]))[0])), found


def _measure(pipeline: Pipeline, stage: Stage, command: Sequence[str], folder: str) -> float:
    """Run a command on the sample; the seconds that its work took, without its beginning."""
    events, output = (Path(folder) / f"{stage.name}.{end}" for end in ("events.jsonl", "log"))
    penstock = [sys.executable, "-m", "penstock", "--events", str(events)]
    with (
        os.fdopen(create(output), "wb") as file,
        subprocess.Popen(  # the pipe's end ends it: see the leash
            [sys.executable, "-I", str(LEASH), *penstock, *command],
            cwd=pipeline.folder, stdin=subprocess.PIPE, stdout=file, stderr=file,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            code = process.wait()
        finally:
            assert process.stdin is not None
            process.stdin.close()
    if code:
        raise StageFailed(
            f"stage {stage.name} fails on a sample of its inputs",
            where=str(stage),
            why=output.read_text(errors="backslashreplace").strip()[-2000:],
            do="fix that: the whole would fail in the same way",
        )
    times = [event["time"] for event in read_lines(events, 0)[0]]
    return float(times[-1] - times[0]) if times else 0.0


def _of_tokenizer(pipeline: Pipeline, stage: Stage, samples: Sequence[Sample], output: str) -> str:
    at = stage.command.index("--output")
    inputs = [name for sample in samples for name in sample.inputs]
    command = ["tokenizer", "train", "--inputs", *inputs, "--output", output]
    seconds = _measure(
        pipeline, stage, [*command, *stage.command[at + 2 :]], os.path.dirname(output)
    )
    times = sum(one.total for one in samples) / max(1, sum(one.bytes for one in samples))
    return f"about {_span(seconds)} to {_span(seconds * times)}: counting grows with the inputs"


def _of_chunk(
    pipeline: Pipeline, stage: Stage, sample: Sample, tokenizer: str, folder: str, source: Source
) -> tuple[str, int]:
    """What the stage will make, in words, and its bytes."""
    at = stage.command.index("--parquet_dir")
    target = os.path.join(folder, f"{source.name}.dataset")
    command = ["chunk", "--inputs", *sample.inputs, "--parquet_dir", target]
    rest = list(stage.command[at + 2 :])
    rest[rest.index("--tokenizer") + 1] = tokenizer
    seconds = _measure(pipeline, stage, [*command, *rest, "--workers", "1"], folder)
    state = Log.open(target).state
    train = [*state.split("train"), *state.split("val")]
    times = sample.times
    rows = sum(file.rows for file in train) * times
    tokens = sum(file.tokens or 0 for file in train) * times
    size = int(sum(file.bytes for file in state.files.values()) * times)
    read = sum(one.read for one in state.inputs.values())
    refused = sum(sum(one.dropped.values()) for one in state.inputs.values())
    most = source.tables.get("shards", {}).get("rows_per_file", ShardConfig().rows_per_file)
    workers = source.tables.get("work", {}).get("workers", RunConfig().workers)
    return (
        f"about {_count(tokens)} tokens in {_count(rows)} chunks, {max(1, round(rows / most)):,} "
        f"shards, {_amount(size)}; {refused / max(1, read):.1%} of documents refused; "
        f"{_span(seconds * times / workers)} with {workers} workers"
    ), size


def _amount(size: float) -> str:
    """A size for people.

    >>> _amount(1_234_567), _amount(2.5e9)
    ('1.2 MB', '2.5 GB')
    """
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _count(number: float) -> str:
    """A number that is not exact.

    >>> _count(123.4), _count(45_678), _count(1_234_567)
    ('123', '46 thousand', '1.2 million')
    """
    if number >= 1e6:
        return f"{number / 1e6:,.1f} million"
    return f"{number / 1e3:,.0f} thousand" if number >= 1e4 else f"{number:,.0f}"


def _span(seconds: float) -> str:
    """A duration that is not exact.

    >>> _span(3.21), _span(75), _span(7300)
    ('3.2 s', '1.2 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
