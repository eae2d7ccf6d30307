"""`penstock run` and `penstock init`."""

import shlex
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from penstock.cli.command import STOPPED, say


def run(
    pipeline: Annotated[
        str, typer.Argument(help="The pipeline's file, such as pipeline.toml.", metavar="PIPELINE")
    ],
    only: Annotated[
        str, typer.Option("--only", help="Run these stages alone, by commas, such as pull,train.")
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option("--dry_run", help="Print the stages, with an estimate, and run none."),
    ] = False,
) -> None:
    """Run all stages of a pipeline at the same time, from raw files to the trainer.

    A stage that dies is named with its error, and the others stop. After that, or after a kill or
    Ctrl-C, the same command resumes.

    Example: penstock run pipeline.toml --dry-run
    """
    from penstock.pipeline.describe import read_pipeline
    from penstock.pipeline.run import choose_stages, run_pipeline

    described = read_pipeline(pipeline)
    stages = choose_stages(described, [name for name in only.split(",") if name])
    if dry_run:
        from penstock.pipeline.estimate import estimate

        for number in (signal.SIGTERM, signal.SIGHUP):  # leave no sample behind
            signal.signal(number, _end)
        for line in estimate(described, stages):
            say(line)
        return
    stopped_by = run_pipeline(described, stages)
    if stopped_by is not None:
        say(STOPPED, file=sys.stderr)
        raise typer.Exit(128 + stopped_by)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def init(
    folder: Annotated[
        str, typer.Argument(help="The directory that holds the inputs.", metavar="DIR")
    ] = ".",
) -> None:
    """Write a commented pipeline.toml for the files of a directory.

    Source trees, JSON lines, conversations, parquet files and archives become sources.

    Example: penstock init corpus
    """
    from penstock.pipeline.begin import write_pipeline

    path, found = write_pipeline(folder)
    for line in found:
        say(line)
    say(f"{path}: read it, then penstock run {shlex.quote(str(path))} --dry-run")
