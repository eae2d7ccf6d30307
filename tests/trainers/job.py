"""The trainers of others on our loaders, each as docs/trainers.md says, as a job that may be ended.

usage: job.py NAME FOLDER STOP_AT      resumes from what FOLDER has, and dies before step STOP_AT

FOLDER has a dataset `data` and a tokenizer `tok`. Every trained batch becomes a line of the file
`seen` in it: the trainer's own count of steps, and a hash of the batch.
"""

import hashlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock import PretrainDataLoader, TorchDataset
from penstock.disk import replacing

EPOCHS = 2
SAVE_EVERY = 3
ROWS, TOKENS, VOCABULARY = 8, 128, 300


class Stopped(Exception):
    """The job ends here."""


class Seen:
    """Notes what is trained, and ends the job."""

    def __init__(
        self, folder: Path, stop_at: int, end: Callable[[], None], name: str = "seen"
    ) -> None:
        self._file, self._stop_at, self._end = folder / name, stop_at, end

    def __call__(self, step: int, input_ids: torch.Tensor) -> None:
        if step == self._stop_at:
            self._end()
        line = f"{step} {fingerprint(input_ids.numpy().tobytes())}\n"
        with open(self._file, "a") as out:
            out.write(line)


def fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def open_loader(folder: Path) -> PretrainDataLoader:
    return PretrainDataLoader(
        str(folder / "data"), str(folder / "tok"), chunk_size=TOKENS, batch_size=ROWS, seed=5
    )


class Model(nn.Module):
    """The least that has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> dict[str, Any]:
        logits = self.table(input_ids)
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        return {"loss": loss, "logits": logits}


def stateful(folder: Path, seen: Seen, workers: int = 0) -> None:
    """torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(
        TorchDataset(open_loader(folder)), batch_size=None, num_workers=workers
    )
    step = first = 0
    if (folder / "checkpoint").exists():
        saved = json.loads((folder / "checkpoint").read_text())
        step, first = saved["step"], saved["epoch"]
        loader.load_state_dict(saved["loader"])
    for epoch in range(first, EPOCHS):
        for batch in loader:
            seen(step, batch["input_ids"])
            step += 1
            if step % SAVE_EVERY == 0:
                saved = {"step": step, "epoch": epoch, "loader": loader.state_dict()}
                with replacing(folder / "checkpoint") as out:
                    out.write(json.dumps(saved).encode())


def stateful_with_workers(folder: Path, seen: Seen) -> None:
    stateful(folder, seen, workers=2)


def accelerated(folder: Path, seen: Seen) -> None:
    """Accelerate, with a StatefulDataLoader that it prepares."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torchdata.stateful_dataloader import StatefulDataLoader

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = TorchDataset(open_loader(folder))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, StatefulDataLoader(dataset, batch_size=None)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saves = sorted((folder / "saves").glob("*"), key=lambda path: int(path.name))
    if saves:
        accelerator.load_state(str(saves[-1]))
    for epoch in range(progress.epoch, EPOCHS):
        progress.epoch = epoch
        for batch in loader:
            seen(progress.step, batch["input_ids"])
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % SAVE_EVERY == 0:
                # after the last batch the state of the loader is that of an epoch that is over
                progress.epoch = epoch + loader.end_of_dataloader
                accelerator.save_state(str(folder / "unfinished"))
                os.replace(folder / "unfinished", folder / "saves" / str(progress.step))


class Progress:
    """How far Accelerate's loop came: its checkpoints hold what has a state."""

    step = epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.epoch = state["step"], state["epoch"]


def hugging_face(folder: Path, seen: Seen) -> None:
    """Trainer of transformers: it passes over what an earlier run has trained."""
    train_with_transformers(folder, seen, TorchDataset(open_loader(folder)))


def train_with_transformers(folder: Path, seen: Seen, dataset: TorchDataset) -> None:
    from transformers import Trainer, TrainingArguments

    class Noting(Trainer):
        def training_step(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
            seen(self.state.global_step, inputs["input_ids"])
            return super().training_step(model, inputs, *others, **more)

    trainer = Noting(
        model=Model(),
        args=TrainingArguments(
            str(folder / "checkpoints"), per_device_train_batch_size=1, num_train_epochs=EPOCHS,
            save_steps=SAVE_EVERY, use_cpu=True, report_to="none", disable_tqdm=True,
        ),
        train_dataset=dataset,
        data_collator=TorchDataset.collate,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=any((folder / "checkpoints").glob("checkpoint-*")))


def on_lightning(folder: Path, seen: Seen) -> None:
    """Lightning, which saves the states of loaders that have one."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any) -> Any:
            seen(self.global_step, batch["input_ids"])
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    kept = folder / "lightning"
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(kept, every_n_train_steps=SAVE_EVERY, save_last=True)],
    )  # fmt: skip
    last = kept / "last.ckpt"
    trainer.fit(
        Module(),
        TorchDataset(open_loader(folder), at_end="next_epoch"),
        ckpt_path=str(last) if last.exists() else None,
        weights_only=False,
    )


JOBS: dict[str, Callable[[Path, Seen], None]] = {
    job.__name__: job
    for job in (stateful, stateful_with_workers, accelerated, hugging_face, on_lightning)
}


def run(name: str, folder: Path, stop_at: int, end: Callable[[], None]) -> None:
    (folder / "saves").mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the frameworks about themselves
        JOBS[name](folder, Seen(folder, stop_at, end))


if __name__ == "__main__":
    run(
        sys.argv[1],
        Path(sys.argv[2]),
        int(sys.argv[3]),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
    )
