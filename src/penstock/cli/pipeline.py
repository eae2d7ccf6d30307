"""`penstock run` and `penstock init`."""

import sys
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
    """
    from penstock.pipeline.describe import read_pipeline
    from penstock.pipeline.run import choose_stages, run_pipeline

    described = read_pipeline(pipeline)
    stages = choose_stages(described, [name for name in only.split(",") if name])
    if dry_run:
        for stage in stages:
            say(f"{stage.name}\n  $ {stage}")
        return
    stopped_by = run_pipeline(described, stages)
    if stopped_by is not None:
        say(STOPPED, file=sys.stderr)
        raise typer.Exit(128 + stopped_by)
