"""`penstock push` and `penstock pull`."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Any

import typer

import penstock
from penstock.cli.command import STOPPED, Fields, options, watched
from penstock.work.events import Events

Address = Annotated[str, typer.Argument(help="s3://, gs://, az:// or a directory.", metavar="URL")]
_MOVING = ("once", "connections", "stall_s")
_PATIENCE = "--patience --give_up"


@options(config=Fields("SyncConfig", *_MOVING, give_up_s=_PATIENCE))
def push(
    source: Annotated[str, typer.Argument(help="The dataset's directory.", metavar="DIR")],
    target: Address,
    config: "penstock.SyncConfig",
) -> None:
    """Upload a dataset while it is being made; end at its seal.

    Shards go first, then the record that names them: a reader of the bucket never sees half of one.
    Run it again after any failure: it resumes from what the bucket has.

    Example: penstock push data/cpp s3://bucket/cpp
    """
    _sync("push", source, lambda events: penstock.push(source, target, config, events))


@options(
    config=Fields("SyncConfig", *_MOVING, "only", give_up_s=_PATIENCE, max_disk_bytes="--max_disk"),
)
def pull(
    source: Address,
    target: Annotated[str, typer.Argument(help="The directory to fill.", metavar="DIR")],
    config: "penstock.SyncConfig",
) -> None:
    """Download a dataset while it is being made; end at its seal.

    A file gets its name once its bytes are those of the log. Run it again after any failure: it
    resumes at the byte.

    Example: penstock pull s3://bucket/cpp local/cpp --max_disk 50GB
    """
    _sync("pull", target, lambda events: penstock.pull(source, target, config, events))


def _interruptible(run: Callable[[], Any]) -> Any:
    """Run in a thread: Python hears no Ctrl-C while its first one waits for a store."""
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            outcome.set_result(run())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="penstock-sync", daemon=True).start()
    return outcome.result()


def _sync(label: str, folder: str, move: "Callable[[Events], penstock.Synced]") -> None:
    # by way of the log: a directory of plain files keeps no events, since they would move along
    kept = folder if "://" in folder else os.path.join(folder, "_log", "..")
    try:
        with watched(label, kept) as events:
            moved = _interruptible(lambda: move(events))
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        sys.stderr.flush()
        os._exit(128 + signal.SIGINT)  # as a kill would: threads may wait for a store for a minute
    print(
        f"{label}: {moved.files:,} files, {moved.bytes / 1e6:,.1f} MB, {moved.records:,} records; "
        + ("sealed" if moved.sealed else "not sealed yet")
    )
