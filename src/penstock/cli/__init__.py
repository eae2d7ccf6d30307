"""The command line: one file for each group of commands.

Options may be typed with dashes or underscores: --rows_per_file and --rows-per-file are one.
"""

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli import (
    chat,
    dataset,
    pipeline,
    produce,
    queue,
    sync,
    tokenize,
    tokenizer,
    watch,
)
from penstock.cli.command import add_command, heard, say
from penstock.cli.warm import warm
from penstock.errors import PenstockError

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("-", "_"),
}
app = typer.Typer(
    help="Turn raw files into training batches, while the data is still being made.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)
tokenizer_app = typer.Typer(
    help="Train a tokenizer, or compare some.", no_args_is_help=True, context_settings=_SETTINGS
)
app.add_typer(tokenizer_app, name="tokenizer")

add_command(app, pipeline.init)
add_command(app, pipeline.run)
add_command(app, produce.shard)
add_command(app, produce.chunk)
add_command(app, chat.conversations)
add_command(app, chat.audit_template, "audit-template")
add_command(app, sync.push)
add_command(app, sync.pull)
add_command(app, dataset.verify)
add_command(app, dataset.show)
add_command(app, dataset.explain)
add_command(app, dataset.estimate)
add_command(app, watch.watch)
add_command(app, tokenize.tokenize)
add_command(app, queue.prepare)
add_command(app, queue.train)
add_command(app, warm)
add_command(tokenizer_app, tokenizer.train)
add_command(tokenizer_app, tokenizer.eval)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        say(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True),
    ] = False,
    events: Annotated[
        str, typer.Option("--events", help="Add the command's events to this file, as JSON lines.")
    ] = "",
) -> None:
    """What stands before a command."""
    if events:
        heard.open(events)


def main(run: Callable[[], Any] = app) -> None:
    """Run the command; an error of ours is a message and exit code 1, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        run()
    except PenstockError as error:
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, MemoryError) as error:
        why = f"{type(error).__name__}: {error}"
        say(
            f"the system refused\n  why:    {why}\n  do:     fix that and run again",
            file=sys.stderr,
        )
        sys.exit(1)
