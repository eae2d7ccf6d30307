"""`penstock conversations` and `penstock audit-template`."""

import os
import sys
from typing import Annotated

import typer

import penstock
from penstock.cli.command import (
    INPUTS,
    AsJson,
    Fields,
    dropped_of,
    exit_if_stopped,
    heard,
    options,
    refuse_nothing,
    say,
    watched,
)

Tokenizer = Annotated[
    str, typer.Option("--tokenizer", help="A tokenizer.json, or a directory with one.")
]


@options(
    chat=Fields(
        "ChatConfig", "chat_template", "max_length", "train_on", "turns", "overflow", "history",
        "format", "branch", "strip", "date", ignore="--ignore",
    ),
    config=Fields(
        "ShardConfig", "rows_per_file", "bytes_per_file", "val_fraction", "seed", "max_line_bytes"
    ),
    follow=Fields("FollowConfig", "complete", "until_idle_s", "max_rejects", "threads"),
)  # fmt: skip
def conversations(
    inputs: Annotated[
        list[str],
        typer.Option(*INPUTS, help="JSONL files, growing or complete; more may follow it."),
    ],
    parquet_dir: Annotated[str, typer.Option("--parquet_dir", help="The dataset to write.")],
    tokenizer: Tokenizer = "tokenizer",
    workers: Annotated[int, typer.Option("--workers", help="Processes that render.")] = 1,
    *,
    chat: "penstock.ChatConfig",
    config: "penstock.ShardConfig",
    follow: "penstock.FollowConfig",
) -> None:
    """Render conversations, finished or still growing, into the shards of a live dataset.

    Tokens and the ranges that are trained stand beside the messages, so that a loader does no work
    for a row. A row that is no conversation is refused with its file, row, field and reason.

    Example: penstock conversations --inputs talk.jsonl --parquet_dir sft --tokenizer tokenizer
    --complete
    """
    with watched("conversations", parquet_dir) as events:
        outcome = penstock.shard_conversations(
            inputs, parquet_dir, chat, config, follow, tokenizer=tokenizer, workers=workers,
            events=events,
        )  # fmt: skip
    heard.made(outcome)
    known = outcome.documents.values()
    say(
        f"{outcome.url}: {'sealed' if outcome.sealed else 'not sealed'}, "
        f"{sum(i.read for i in known):,} conversations read, {sum(i.kept for i in known):,} kept "
        f"as {sum(i.rows for i in known):,} samples in "
        f"{len(outcome.state.split('train')):,} shards"
    )
    for reason, count in dropped_of(outcome).most_common():
        say(f"  {count:,} not kept: {reason}")
    exit_if_stopped(outcome)
    refuse_nothing(outcome, sum(i.rows for i in known), "--max_length, --train_on, --format")


def audit_template(
    template: Annotated[
        str, typer.Argument(help='A preset, a Jinja file, or "tokenizer" for the tokenizer\'s own.')
    ],
    tokenizer: Tokenizer = "tokenizer",
    jinja: Annotated[
        bool, typer.Option("--jinja", help="Print a preset as a Jinja template, and nothing else.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look at a chat template before anything is trained with it; exit code 1 if it is not fit.

    Prefix property, stop tokens, text of tools, null contents, history that is rewritten, a second
    BOS; then three conversations with what is trained in colour, or between « and ».

    Example: penstock audit-template chatml --tokenizer tokenizer
    """
    import json

    from penstock.chat.audit import coloured
    from penstock.chat.jinja import preset_jinja

    if jinja:
        print(preset_jinja(template), end="")
        return
    audit = penstock.audit_template(template, tokenizer)
    if as_json:
        found = [{"check": f.check, "verdict": f.verdict, "seen": f.seen} for f in audit.findings]
        print(json.dumps({"fit": audit.is_fit, "findings": found}, indent=2))
    else:
        for finding in audit.findings:
            say(f"{finding.verdict:5} {finding.check:24} {finding.seen}")
        colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        loaded = penstock.Tokenizer.load(tokenizer)
        for name, samples in audit.samples:
            for fault in samples.refused.values():
                say(f"\n-- {name}: refused, {fault.reason}: {fault}")
            for k in range(len(samples)):
                print(f"\n-- {name}" + (f", sample {k + 1}" if len(samples) > 1 else ""))
                columns = (samples.tokens, samples.loss_spans, samples.turns)
                print(coloured(loaded, *(one[k].as_py() for one in columns), colours=colours))
    if not audit.is_fit:
        raise typer.Exit(1)
