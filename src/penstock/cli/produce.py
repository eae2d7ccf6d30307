"""`penstock shard` and `penstock chunk`."""

import os
from typing import Annotated

import typer

import penstock
from penstock.cli.command import (
    INPUTS,
    Fields,
    Inputs,
    dropped_of,
    exit_if_stopped,
    heard,
    options,
    refuse_nothing,
    say,
    watched,
)
from penstock.errors import BadConfig

Tokens = Annotated[bool, typer.Option("--tokens", help="Store the tokens beside the text.")]


@options(
    config=Fields(
        "ShardConfig", "rows_per_file", "bytes_per_file", "val_fraction", "seed", "text_field",
        "max_line_bytes",
    ),
    follow=Fields(
        "FollowConfig", "complete", "until_idle_s", "wait_for_input_s", "max_rejects", "threads",
    ),
)  # fmt: skip
def shard(
    inputs: Annotated[
        list[str],
        typer.Option(*INPUTS, help="JSONL files, growing or complete; more may follow it."),
    ],
    parquet_dir: Annotated[str, typer.Option("--parquet_dir", help="The dataset to write.")],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Count tokens with this one.")
    ] = None,
    tokens: Tokens = False,
    *,
    config: "penstock.ShardConfig",
    follow: "penstock.FollowConfig",
) -> None:
    """Turn JSONL, finished or still growing, into the shards of a live dataset.

    An input has ended when INPUT.done is there (penstock's producers leave it), when it is
    compressed, or when --complete or --until-idle says so. After a kill the same command resumes.

    Example: penstock shard --input raw.jsonl --parquet_dir data --rows_per_file 50000
    """
    with watched("shard", parquet_dir) as events:
        outcome = penstock.shard_jsonl(
            inputs, parquet_dir, config, follow, tokenizer=tokenizer, tokens=tokens, events=events
        )
    heard.made(outcome)
    state = outcome.state
    kept = sum(known.kept for known in state.inputs.values())
    dropped = dropped_of(outcome)
    is_cut = state.opened is not None and state.opened.config.get("prepare")
    say(
        f"{outcome.url}: {'sealed' if outcome.sealed else 'not sealed'}, "
        f"{len(state.split('train')):,} shards, {kept:,} {'chunks' if is_cut else 'documents'} "
        f"kept, {dropped.total():,} refused"
    )
    exit_if_stopped(outcome)
    refuse_nothing(outcome, kept, "--text_field")


@options(
    chunk=Fields("ChunkConfig", "max_tokens", "reserve_tokens", "language"),
    filter=Fields("FilterConfig", "secrets", "pii", preset="--filter", rules="--rule"),
    read=Fields("ReadConfig", "suffixes", "text_field", "decode", "max_document_bytes", "order"),
    config=Fields("ShardConfig", "rows_per_file", "bytes_per_file", "val_fraction", "seed"),
    run=Fields(
        "RunConfig", "workers", "engine", "max_rejects", max_memory_bytes="--max_memory",
        plugins="--plugin",
    ),
)  # fmt: skip
def chunk(
    inputs: Inputs,
    parquet_dir: Annotated[
        str | None, typer.Option("--parquet_dir", help="The dataset to write.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", help="Write JSON lines here; penstock shard may follow them."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Counts the tokens; without it, ./tokenizer is taken."),
    ] = None,
    tokens: Tokens = False,
    dedup: Annotated[
        str, typer.Option("--dedup", help="Drop what was seen before: none, exact, near or batch.")
    ] = "none",
    benchmark: Annotated[
        list[str] | None,
        typer.Option("--benchmark", help="Drop documents that hold items of this file."),
    ] = None,
    thresholds: Annotated[
        list[str] | None,
        typer.Option("--set", help="A threshold of the filter, such as min_alnum=0.2; repeatable."),
    ] = None,
    processor: Annotated[
        list[str] | None, typer.Option("--processor", help="A DataProcessor: name or module:Class.")
    ] = None,
    *,
    chunk: "penstock.ChunkConfig",
    filter: "penstock.FilterConfig | None" = None,
    read: "penstock.ReadConfig",
    config: "penstock.ShardConfig",
    run: "penstock.RunConfig",
) -> None:
    """Cut source files into chunks at function boundaries, into the shards of a live dataset.

    After a kill the same command resumes. The result is the same, byte for byte, for any number
    of workers, here or on a Ray cluster.

    Example: penstock chunk --inputs src --parquet_dir data/cpp --max_tokens 2048 --filter code
    --dedup near --tokens
    """
    from penstock.prepare.filters import set_thresholds
    from penstock.prepare.steps import make_steps

    if parquet_dir is None and output is None:
        raise BadConfig("nothing is to be written", do="name --parquet_dir, --output, or both")
    if thresholds:
        filter = set_thresholds(filter or penstock.FilterConfig(), thresholds)
    steps = make_steps(
        processors=tuple(processor or ()),
        filter=filter,
        benchmarks=tuple(benchmark or ()),
        dedup=dedup,
        chunk=chunk,
    )
    with watched("chunk", parquet_dir if output is None else None) as events:
        outcome = penstock.prepare_dataset(
            inputs,
            parquet_dir,
            steps,
            config,
            run,
            read=read,
            tokenizer=tokenizer or _tokenizer_here(),
            tokens=tokens,
            output=output,
            events=events,
        )
    heard.made(outcome)
    state = outcome.state
    known = outcome.documents.values()
    say(
        f"{outcome.url}: {'sealed' if outcome.sealed else 'not sealed'}, "
        f"{sum(i.read for i in known):,} documents read, {sum(i.kept for i in known):,} kept as "
        f"{sum(i.rows for i in known):,} chunks in {len(state.split('train')):,} shards"
    )
    for reason, count in dropped_of(outcome).most_common():
        say(f"  {count:,} not kept: {reason}")
    if outcome.redacted:
        say(f"  {outcome.redacted:,} redacted: see the columns secrets and pii in _features")
    exit_if_stopped(outcome)
    refuse_nothing(outcome, sum(i.rows for i in known), "--text_field, --filter, --suffixes")


def _tokenizer_here() -> str:
    """The tokenizer that `penstock tokenizer train --output tokenizer` leaves."""
    for name in ("tokenizer", "tokenizer.json"):
        if os.path.exists(name):
            return name
    raise BadConfig(
        "no tokenizer is given, and there is none in ./tokenizer",
        why="a chunk has at most --max_tokens tokens of a tokenizer",
        do="name one with --tokenizer, or make one: "
        "penstock tokenizer train --inputs … --output tokenizer",
    )
