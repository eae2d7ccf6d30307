"""`penstock push` and `penstock pull`."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Any

import typer

from penstock.work.values import parse_bytes, parse_seconds


def push(
    source: Annotated[str, typer.Argument(help="The dataset's directory.", metavar="DIR")],
    target: Annotated[
        str, typer.Argument(help="s3://, gs://, az:// or a directory.", metavar="URL")
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Move what is there and end, sealed or not.")
    ] = False,
    connections: Annotated[int, typer.Option("--connections", help="Requests at a time.")] = 8,
    stall: Annotated[
        str, typer.Option("--stall", help="Silence of the producer that is an error.")
    ] = "120s",
    give_up: Annotated[
        str,
        typer.Option(
            "--patience", "--give_up", help="How long a store may fail before that is an error."
        ),
    ] = "5m",
) -> None:
    """Upload a dataset while it is being made; end at its seal.

    Shards go first, then the record that names them: a reader of the bucket never sees half of one.
    Run it again after any failure: it goes on where the bucket stands.
    """
    from penstock.store.sync import push as push_dataset

    _sync(push_dataset, source, target, once=once, connections=connections, stall=stall,
          give_up=give_up, label="push")  # fmt: skip


def pull(
    source: Annotated[
        str, typer.Argument(help="s3://, gs://, az:// or a directory.", metavar="URL")
    ],
    target: Annotated[str, typer.Argument(help="The directory to fill.", metavar="DIR")],
    once: Annotated[
        bool, typer.Option("--once", help="Move what is there and end, sealed or not.")
    ] = False,
    connections: Annotated[int, typer.Option("--connections", help="Requests at a time.")] = 8,
    stall: Annotated[
        str, typer.Option("--stall", help="Silence of the producer that is an error.")
    ] = "120s",
    give_up: Annotated[
        str,
        typer.Option(
            "--patience", "--give_up", help="How long a store may fail before that is an error."
        ),
    ] = "5m",
    max_disk: Annotated[
        str, typer.Option("--max_disk", help="Data kept here; what the trainer has passed goes.")
    ] = "",
) -> None:
    """Download a dataset while it is being made; end at its seal.

    A file gets its name once its bytes are those of the log. Run it again after any failure: it
    goes on at the byte.
    """
    from penstock.store.sync import pull as pull_dataset

    _sync(pull_dataset, source, target, once=once, connections=connections, stall=stall,
          give_up=give_up, label="pull", max_disk=max_disk)  # fmt: skip


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


def _sync(
    move: Callable[..., Any], source: str, target: str, *, once: bool, connections: int, stall: str,
    give_up: str, label: str, max_disk: str = "",
) -> None:  # fmt: skip
    from penstock.store.sync_config import SyncConfig
    from penstock.watch.progress import progress_bar
    from penstock.work.events import Events

    config = SyncConfig(
        once=once,
        connections=connections,
        stall_s=parse_seconds(stall, "--stall"),
        give_up_s=parse_seconds(give_up, "--patience"),
        max_disk=parse_bytes(max_disk, "--max_disk") if max_disk else None,
    )
    events = Events(label)
    try:
        with progress_bar(events, label):
            moved = _interruptible(lambda: move(source, target, config, events))
    except KeyboardInterrupt:
        print("stopped by a signal; the same command goes on from here", file=sys.stderr)
        sys.stderr.flush()
        os._exit(128 + signal.SIGINT)  # as a kill would: threads may wait for a store for a minute
    print(
        f"{label}: {moved.files:,} files, {moved.bytes / 1e6:,.1f} MB, {moved.records:,} records; "
        + ("sealed" if moved.sealed else "not sealed yet")
    )
