"""Make a dataset: from JSON lines that may still grow, or from inputs of any kind by steps.

In:    inputs; what decides the bytes (`ShardConfig`, steps), and how to run
Out:   a live dataset, sealed when every input is known to have ended; or JSON lines
Keeps: each input's offset in the log, in the record of the shard that it covers: the same call
       resumes from there and gives the same shards, byte for byte
Never: computes anything: `producer` is the engine of both

    shard_jsonl          lines, finished or growing ─▶ Job ─┐
    shard_conversations  the same, rendered         ─▶ Job ─┤   (see conversations.py)
    prepare_dataset      anything, through steps    ─▶ Job ─┴▶ Producer ─▶ ShardWriter, LinesWriter
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.errors import BadConfig
from penstock.ingest.inputs import Input, ReadConfig, input_sizes, open_input, open_lines
from penstock.options import check_numbers, config_of, show_bytes, whole
from penstock.prepare.steps import Step, plan_of, steps_as_json
from penstock.produce.guards import choose_generation, inputs_given, lines_given, refuse_changed
from penstock.produce.lines import (
    LinesWriter,
    Waiting,
    claimed,
    look_at_log,
    plan_of_lines,
    refuse_other_lines,
)
from penstock.produce.producer import Job, Known, Producer
from penstock.produce.writer import ShardConfig, ShardWriter, Writer, finish, tell_earlier
from penstock.store.log import BEAT_S, InputState, LogState
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events
from penstock.work.run import RunConfig, signals_noted

HELD_BYTES: Final = 256 << 20
"""Text of shards in memory, for each thread that encodes; two shards are held in any case, so that
one is read while the other is encoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowConfig:
    """How to read and when to stop. None of it changes the bytes of a shard."""

    complete: bool = False
    """The inputs are complete: read them to their end and seal."""

    until_idle_s: float | None = None
    """Take an input that has not grown for this long as ended (for foreign writers)."""

    max_rejects: float = 0.01
    """Share of documents that may be refused before the run stops."""

    threads: int = field(default_factory=lambda: max(2, min(8, os.cpu_count() or 2)))
    """Shards encoded side by side, as far as their text is below 256 MB for each thread; two if
    there is more than one thread."""

    wait_for_input_s: float = 60.0
    """How long an input may not be there yet, when following."""

    beat_s: float = BEAT_S
    """How often to commit a sign of life while waiting."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        whole("--threads", self.threads, most=10_000)
        if not 0 <= self.max_rejects <= 1:
            raise BadConfig(f"--max_rejects is {self.max_rejects}", do="choose a share from 0 to 1")
        if self.threads < 1:
            raise BadConfig(f"--threads is {self.threads}", do="choose at least 1")
        if self.until_idle_s is not None and self.until_idle_s <= 0:
            raise BadConfig("--until_idle must be longer than 0 s", do="for example 60s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    sealed: bool
    state: LogState
    stopped_by: int | None = None
    """The signal that ended it early."""
    url: str = ""
    """Where what was made is."""
    redacted: int = 0
    """Documents in which this run overwrote secrets or personal data."""
    documents: Mapping[str, InputState] = field(default_factory=dict)
    """What became of the documents of each input, over all runs."""


def shard_jsonl(
    inputs: Sequence[str | os.PathLike[str]],
    parquet_dir: str | os.PathLike[str],
    config: ShardConfig | None = None,
    follow: FollowConfig | None = None,
    *,
    tokenizer: Any = None,
    tokens: bool = False,
    events: Events | None = None,
) -> Outcome:
    """Read `inputs` into the dataset at `parquet_dir`, from wherever an earlier run left off.

    A `tokenizer`, by path or as an object, counts the tokens of every document; with `tokens`
    shards have token files too. Of lines that `prepare_dataset` writes it is known how they were
    cut and counted: the dataset is the one that it would make of them itself. If another process
    makes that one at the moment, its seal is waited for.
    """
    config = config_of("config", config, ShardConfig)
    follow = config_of("follow", follow, FollowConfig)
    if not os.fspath(parquet_dir):
        raise BadConfig("--parquet_dir is empty", do="name a directory or a bucket address")
    names, events = lines_given(inputs), events or Events("shard")
    first, waiting = Path(names[0]), Waiting(events)
    with signals_noted(waiting):
        is_there = waiting.for_file(first, 0.0 if follow.complete else follow.wait_for_input_s)
    if waiting.stopped_by is not None:
        url = os.fspath(parquet_dir)
        return Outcome(sealed=False, state=LogState(), stopped_by=waiting.stopped_by, url=url)
    if not is_there:  # it was waited for
        follow = replace(follow, wait_for_input_s=0.0)
    plan = plan_of_lines(first, parquet_dir) if is_there and len(names) == 1 else None
    if plan is None:
        job = _plain_job(names, config, follow, tokenizer, tokens)
        return make_dataset(job, parquet_dir, events)
    config, tokenizer, tokens = plan.applied(config, tokenizer, tokens)
    job, log = _plain_job(names, config, follow, tokenizer, tokens), look_at_log(parquet_dir)
    while True:
        with claimed(first, log.store.url) as is_ours:
            if is_ours:
                return make_dataset(job, parquet_dir, events)
        with signals_noted(waiting):
            waiting.for_seal(log)
        if log.state.sealed is not None or waiting.stopped_by is not None:
            made = log.state.opened.config.get("rows_per_file") if log.state.opened else None
            if made not in (None, config.rows_per_file):
                told = f"{log.store.url}: made by another process, with --rows_per_file {made}"
                events.emit("warn", message=f"{told}, not {config.rows_per_file}")
            return Outcome(
                sealed=log.state.sealed is not None,
                state=log.state,
                stopped_by=waiting.stopped_by,
                url=log.store.url,
                documents=log.state.inputs,
            )


def _plain_job(
    names: list[str], config: ShardConfig, follow: FollowConfig, tokenizer: Any, tokens: bool
) -> Job:
    # lines stay in their order, and inputs that may grow come one after the other: else what comes
    # when would depend on who was faster
    most = config.max_line_bytes
    read = ReadConfig(text_field=config.text_field, max_document_bytes=most, order="path")
    loaded = None if tokenizer is None else Tokenizer.load(tokenizer)
    return lines_job(names, read, config, follow, tokenizer=loaded, tokens=tokens)


def follow_lines(read: ReadConfig, follow: FollowConfig) -> Callable[[str, int], Input]:
    """How lines are opened that may still grow."""
    return functools.partial(
        open_lines,
        config=read,
        complete=follow.complete,
        until_idle_s=follow.until_idle_s,
        wait_s=follow.wait_for_input_s,
    )


def lines_job(
    names: list[str], read: ReadConfig, config: ShardConfig, follow: FollowConfig, *,
    tokenizer: Tokenizer | None, tokens: bool, given: Any = None, steps: Sequence[Step] = (),
    workers: int = 1,
) -> Job:  # fmt: skip
    """The work on JSON lines. `given` is what the tokenizer was loaded from."""
    run = RunConfig(workers=workers, max_rejects=follow.max_rejects)
    return Job(
        inputs=names,
        open=follow_lines(read, follow),
        config=_with_tokenizer(config, tokenizer, tokens),
        run=run,
        setup={**_setup(names, read, steps, run, tokenizer, tokens, given), "is_plain": True},
        steps=steps,
        is_plain=True,
        beat_s=follow.beat_s,
        shards_ahead=follow.threads,
        held_bytes=max(follow.threads * HELD_BYTES, 2 * config.bytes_per_file),
    )


def prepare_dataset(
    inputs: Sequence[str | os.PathLike[str]],
    parquet_dir: str | os.PathLike[str] | None,
    steps: Sequence[Step] = (),
    config: ShardConfig | None = None,
    run: RunConfig | None = None,
    *,
    read: ReadConfig | None = None,
    tokenizer: Any = None,
    tokens: bool = False,
    output: str | os.PathLike[str] | None = None,
    events: Events | None = None,
) -> Outcome:
    """Take `inputs` through `steps` into the dataset at `parquet_dir`, from where it was left.

    Chunking needs a `tokenizer`, by path or as an object; with `tokens` shards have token
    files too. With `output` the chunks become JSON lines there first, which `penstock shard` may
    follow; if nobody did, they are made into the dataset at the end.
    """
    run, read = config_of("run", run, RunConfig), config_of("read", read, ReadConfig)
    config = config_of("config", config, ShardConfig)
    if not (parquet_dir or output):
        raise BadConfig("--parquet_dir is empty", do="name a directory or a bucket address")
    if 2 * config.bytes_per_file > run.max_memory_bytes:
        raise BadConfig(
            f"shards of {show_bytes(config.bytes_per_file)} do not fit in --max_memory "
            f"{show_bytes(run.max_memory_bytes)}",
            why="the text of a shard is held in memory until it is written",
            do=f"give --bytes_per_file {show_bytes(run.max_memory_bytes // 4)}, or more memory",
        )
    names = inputs_given(inputs, [parquet_dir, output], read, run.plugins)
    plan = plan_of(read, steps, has_tokenizer=tokenizer is not None)
    loaded = None if tokenizer is None else Tokenizer.load(tokenizer, ready=run.is_here)
    config = replace(config, text_field=read.text_field, prepare=plan)
    read = read.among(len(names), run.max_memory_bytes // 16)
    job = Job(
        inputs=names,
        open=functools.partial(open_input, config=read, seed=config.seed),
        config=_with_tokenizer(config, loaded, tokens),
        run=run,
        setup={
            **_setup(names, read, steps, run, loaded, tokens, tokenizer),
            "by_lines": plan.get("by_lines", []),
        },
        steps=steps,
        is_mixed=read.order == "shuffled" and len(names) > 1,
        beat_s=BEAT_S,
        held_bytes=run.max_memory_bytes // 4,
    )
    events = events or Events("chunk")
    if output is None:
        assert parquet_dir is not None
        return make_dataset(job, parquet_dir, events)
    if parquet_dir:
        refuse_other_lines(parquet_dir, Path(output))
    path = tokenizer if isinstance(tokenizer, str | os.PathLike) else ""
    made = _make_lines(job, Path(output), events, os.path.abspath(path) if path else "")
    if not made.sealed or not parquet_dir:
        return made
    log = look_at_log(parquet_dir)
    if log.state.sealed is not None:  # by a `penstock shard`, with whatever options
        sharded = Outcome(sealed=True, state=log.state, url=log.store.url)
    else:
        sharded = shard_jsonl(
            [output], parquet_dir, replace(config, prepare={}, text_field="text"),
            tokenizer=loaded, tokens=tokens, events=events,
        )  # fmt: skip
    return replace(sharded, documents=made.documents, redacted=made.redacted)


def _setup(
    names: list[str], read: ReadConfig, steps: Sequence[Step], run: RunConfig,
    tokenizer: Tokenizer | None, tokens: bool, given: Any,
) -> dict[str, Any]:  # fmt: skip
    """What a task is made from; it is sent, unless the task runs here."""
    made: Any = tokenizer
    if not run.is_here and isinstance(given, str | os.PathLike):
        made = os.path.abspath(os.fspath(given))  # shorter than its content
    elif not run.is_here and tokenizer is not None:
        made = tokenizer.content
    return {
        "inputs": names,
        "read": read if run.is_here else read.as_json(),
        "steps": steps if run.is_here else steps_as_json(steps),
        "plugins": list(run.plugins),
        "tokenizer": made,
        "keep_tokens": tokens,
    }


def _with_tokenizer(config: ShardConfig, tokenizer: Tokenizer | None, tokens: bool) -> ShardConfig:
    if tokenizer is None:
        if tokens:
            raise BadConfig("--tokens needs --tokenizer", do="name the tokenizer")
        return replace(config, tokenizer="", token_type="")
    kind = np.dtype(tokenizer.dtype).name if tokens else ""
    return replace(config, tokenizer=tokenizer.fingerprint, token_type=kind)


def make_dataset(job: Job, parquet_dir: str | os.PathLike[str], events: Events) -> Outcome:
    """Write the shards of a dataset, of a new generation, or none where all is sealed."""
    config, names = job.config, job.inputs
    generation = choose_generation(parquet_dir, config, names, job.open)
    log, url = generation.log, generation.log.store.url
    if log.state.sealed:
        refuse_changed(url, log.state, names, job.open, "write to a new directory")
        log.store.epoch = log.state.epoch
        log.store.settle()  # the seal may be visible and not durable: nothing may rest on it then
        finish(log)
        return Outcome(sealed=True, state=log.state, url=url, documents=log.state.inputs)
    known = generation.verdicts
    if known is not None:
        events.emit("warn", message=f"{url}: what is kept is known from {known.url}")
    if not config.token_type and generation.before and generation.before.state.split("tokens"):
        # options are those of this command alone, and a trainer would tokenise anew in silence
        earlier = generation.before.store.url
        told = f"{url}: without token files, which {earlier} has: give --tokens for them"
        events.emit("warn", message=told)
    writer = ShardWriter(log.store, config, names, threads=job.shards_ahead)
    tell_earlier(writer.log, events)
    return _run(job, writer, events, known)


def _make_lines(job: Job, output: Path, events: Events, tokenizer_path: str) -> Outcome:
    """Write JSON lines, or none where they are complete."""
    writer = LinesWriter(output, job.config, job.inputs, tokenizer_path)
    if writer.sealed:
        writer.close()
        refuse_changed(writer.url, writer.state, job.inputs, job.open, "name another --output")
        known = writer.state.inputs
        return Outcome(sealed=True, state=writer.state, url=writer.url, documents=known)
    return _run(job, writer, events)


def _run(job: Job, writer: Writer, events: Events, known: Known | None = None) -> Outcome:
    sizes = input_sizes(job.inputs, job.open, grow=job.is_plain) if events.is_heard else {}
    producer = Producer(job, writer, events.emit, known, sizes)
    with signals_noted(producer):
        sealed = producer.run()
    return Outcome(
        sealed=sealed,
        state=writer.state,
        stopped_by=producer.stopped_by,
        url=writer.url,
        redacted=producer.redacted,
        documents=writer.state.inputs,
    )
