"""`penstock tokenize`."""

from typing import Annotated

import typer

import penstock
from penstock.cli.command import Dataset, exit_if_stopped, say, watched


def tokenize(
    dataset: Dataset,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="The tokenizer: a file or a directory.")
    ],
    threads: Annotated[
        int | None, typer.Option("--threads", help="Shards encoded side by side.")
    ] = None,
) -> None:
    """Add token files to a sealed dataset, as a new generation that has the same text.

    After a kill the same command resumes; where the tokens are there already it does nothing.

    Example: penstock tokenize data/cpp --tokenizer tokenizer
    """
    with watched("tokenize") as events:
        outcome = penstock.tokenize_dataset(dataset, tokenizer, threads=threads, events=events)
    files = outcome.state.split("tokens")
    say(
        f"{outcome.url}: {'sealed' if outcome.sealed else 'not sealed'}, "
        f"{len(outcome.state.split('train')):,} shards, "
        f"{sum(file.tokens or 0 for file in files):,} tokens"
    )
    exit_if_stopped(outcome)
