"""`penstock watch`."""

import sys
from typing import Annotated

import typer

import penstock
from penstock.cli.command import Fields, options, say


@options(
    config=Fields(
        "WatchConfig", "port", "host", "tokenizer", "chunk_size", "batch_size", "seed", "pack",
        "bans",
    )
)  # fmt: skip
def watch(
    folder: Annotated[
        str,
        typer.Argument(
            help="A dataset, the directory of a run, or one with several of them.", metavar="DIR"
        ),
    ],
    config: "penstock.WatchConfig",
) -> None:
    """Serve a page that shows what goes on: stages, shards, losses, any batch, rejects, the order.

    It is read-only, and for this machine only unless a --host is given. Runs are found by their
    descriptions, TOML files with a table [loader]; a dataset without one is shown with the options
    below.

    Example: penstock watch data
    """
    from penstock.watch.server import serve

    def tell(url: str) -> None:
        say(f"{url}  (Ctrl-C ends it)")
        sys.stdout.flush()

    serve(folder, config, on_ready=tell)
