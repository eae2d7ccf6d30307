"""`penstock prepare` and `penstock train`."""

import sys
from typing import Annotated

import typer

from penstock.cli.command import STOPPED, say, watched

Config = Annotated[
    str, typer.Argument(help="The shared config: a file of Python or TOML.", metavar="CONFIG")
]
Root = Annotated[str, typer.Option("--root", help="The folder that holds data and the trainer.")]


def prepare(
    config: Config,
    root: Root = ".",
    purge: Annotated[
        bool, typer.Option("--purge", help="First remove the batches that are in the queue.")
    ] = False,
) -> None:
    """Fill the queue of a config's dataset, until a signal or the end of the data.

    The provider is found by its place, data/<dataset>/prepare_streaming.py. After a kill the same
    command resumes: no batch is repeated or skipped.

    Example: penstock prepare config.toml --root .
    """
    from penstock.queue.config import find_provider, read_config

    shared = read_config(config, root)
    provider = find_provider(shared)(shared)
    if purge:
        provider.purge()
    with watched("prepare") as events:
        made = provider.run(events=events)
    told = ", ".join(f"{count:,} of {split}" for split, count in made.items())
    say(f"{shared.folder / 'queue'}: batches made: {told}")
    if provider.stopped_by is not None:
        say(STOPPED, file=sys.stderr)
        raise typer.Exit(128 + provider.stopped_by)


def train(config: Config, root: Root = ".") -> None:
    """Train on what `penstock prepare` makes: calls train(config, consumer) of train.py.

    The queue must have been made under the same config.

    Example: penstock train config.toml --root .
    """
    from penstock.queue.config import find_trainer, read_config
    from penstock.queue.consumer import ConsumerConfig, DatasetConsumer

    shared = read_config(config, root)
    run = find_trainer(shared)
    settings = ConsumerConfig(
        delete=shared.queue.delete,
        device=shared.get("device"),
        stall_s=shared.queue.stall_s,
        lease_s=shared.queue.lease_s,
    )
    with DatasetConsumer(shared.folder, settings, expect=shared) as consumer:
        run(shared, consumer)
