"""Two ranks under the trainers of others, each as docs/trainers.md says; killed, and begun again.

usage: ranks.py NAME FOLDER STOP_AT…     once for each STOP_AT: rank 0 kills itself before that step

The ranks are forks of this process, which has imported all that they need, and talk by gloo. Every
trained batch becomes a line of `seen.0` or `seen.1` in FOLDER: the trainer's count of steps, and a
hash of the batch.
"""

import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from penstock import LoaderRun, PretrainDataLoader, TorchDataset

from . import job

RANKS = 2
TIMEOUT_S = 120.0


def open_loader(folder: Path, run: LoaderRun | None = None) -> PretrainDataLoader:
    return PretrainDataLoader(
        str(folder / "data"), str(folder / "tok"), chunk_size=job.TOKENS, batch_size=job.ROWS,
        seed=5, run=run,
    )  # fmt: skip


ALONE = LoaderRun(rank=0, world_size=1)
"""For a loader whose batches somebody else deals out."""


def registered(folder: Path, seen: job.Seen) -> None:
    """The loader deals out its batches by itself; Accelerate saves its state."""
    accelerator = _accelerator()
    model, optimizer = accelerator.prepare(*_model())
    loader = open_loader(folder)
    progress = job.Progress()
    accelerator.register_for_checkpointing(progress, loader)
    _load(accelerator, folder)
    for epoch in range(progress.epoch, job.EPOCHS):
        progress.epoch = epoch
        for batch in loader:
            _train(accelerator, model, optimizer, batch.to(accelerator.device), seen, progress)
            if progress.step % job.SAVE_EVERY == 0:
                progress.epoch = loader.epoch + loader.is_over
                _save(accelerator, folder, progress)


def _accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def _model() -> Any:
    model = job.Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _train(
    accelerator: Any, model: Any, optimizer: Any, batch: Any, seen: job.Seen, progress: job.Progress
) -> None:
    seen(progress.step, batch["input_ids"])
    accelerator.backward(model(**batch)["loss"])
    optimizer.step()
    optimizer.zero_grad()
    progress.step += 1


def _load(accelerator: Any, folder: Path) -> None:
    saves = sorted((folder / "saves").glob("*"), key=lambda path: int(path.name))
    if saves:
        accelerator.load_state(str(saves[-1]))


def _save(accelerator: Any, folder: Path, progress: job.Progress) -> None:
    accelerator.save_state(str(folder / "unfinished"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(folder / "unfinished", folder / "saves" / str(progress.step))
    accelerator.wait_for_everyone()


def trainer(folder: Path, seen: job.Seen) -> None:
    """Trainer of transformers deals out the items of its dataset."""
    job.train_with_transformers(folder, seen, TorchDataset(open_loader(folder, ALONE)))


JOBS = {one.__name__: one for one in (registered, trainer)}


def run(name: str, folder: Path, stop_at: int) -> list[int]:
    """Run both ranks until they end, or until one of them does not end well; how each ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "saves").mkdir(exist_ok=True)
    pids = [_fork(name, folder, stop_at, rank, port) for rank in range(RANKS)]
    ended: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(ended) < RANKS:
        for pid in set(pids) - set(ended):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
        if any(ended.values()) or time.monotonic() > deadline:  # as launchers do
            for pid in set(pids) - set(ended):
                os.kill(pid, signal.SIGKILL)
                ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.02)
    return [ended[pid] for pid in pids]


def _fork(name: str, folder: Path, stop_at: int, rank: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(RANKS), ACCELERATE_USE_CPU="true",
        )  # fmt: skip
        torch.set_num_threads(1)
        seen = job.Seen(folder, stop_at if rank == 0 else -1, _kill, name=f"seen.{rank}")
        JOBS[name](folder, seen)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    import accelerate  # noqa: F401
    import transformers  # noqa: F401

    for one in sys.argv[3:]:
        codes = run(sys.argv[1], Path(sys.argv[2]), int(one))
        if codes[0] != (-signal.SIGKILL if int(one) < 10**9 else 0) or codes == [0, 1]:
            sys.exit(f"stop at {one}: the ranks ended with {codes}")
