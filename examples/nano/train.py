"""Train a small masked-diffusion model on batches from a queue, and print what it writes.

In:    the shared config, and a consumer of the queue that prepare.py fills
Out:   losses on both splits, a checkpoint with the consumer's state, samples
Keeps: killed at any moment and started again: each batch of the queue once
Never: runs what a checkpoint holds

    python train.py config/train_char_diffusion.py        or: penstock train …

A batch is (x, y), or a dict with a weight for each label. Another model, another kind of training:
change `Predictor` and `loss_of`.
"""

import io
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock import DatasetConsumer, SharedConfig
from penstock.cli import main
from penstock.errors import BadConfig


class Block(nn.Module):
    """Looks at the neighbours on both sides, and adds what it concludes."""

    def __init__(self, dim: int, width: int = 9) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.look = nn.Conv1d(dim, 2 * dim, width, padding=width // 2)
        self.conclude = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.look(self.norm(x).transpose(1, 2)).transpose(1, 2)
        concluded: Tensor = self.conclude(F.gelu(seen))
        return x + concluded


class Predictor(nn.Module):
    """Guesses what stands in the place of each mask token. Convolutions: at this size a transformer
    has learned nothing in the 400 steps after which this one is at a quarter of the entropy."""

    def __init__(self, vocab_size: int, layers: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.blocks(self.embed(x))))
        return found


def loss_of(model: nn.Module, batch: Any, ignore_index: int) -> Tensor:
    """With weights the bound of LLaDA, in nats a token; without, the mean over all labels."""
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    losses = F.cross_entropy(
        model(x).flatten(0, 1), y.flatten(), ignore_index=ignore_index, reduction="none"
    )
    loss: Tensor = losses.sum() / (y != ignore_index).sum().clamp(min=1)
    if isinstance(batch, dict) and "weight" in batch:
        loss = (losses * batch["weight"].flatten()).sum() / y.numel()
    return loss


class Checkpoint:
    """The model, the optimizer and where in the queue they are: one file, replaced whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoint.pt"

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Durable when it returns: only then the queue may let go of batches."""
        content = io.BytesIO()
        torch.save(
            {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "consumer": json.dumps(state),
            },
            content,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, consumer: DatasetConsumer
    ) -> int:
        """Resume from what was saved, if anything was; the steps that it had done."""
        if not self.path.exists():
            return 0
        found = torch.load(self.path, weights_only=True)  # data, which can run nothing
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        consumer.load_state_dict(json.loads(found["consumer"]))
        return int(found["step"])


def train(config: SharedConfig, consumer: DatasetConsumer) -> None:
    """Batch after batch, to max_iters or the end of the data."""
    if consumer.world_size > 1:
        raise BadConfig("this trainer is of one process", do="start it without torchrun")
    meta, device = consumer.meta, config.get("device") or "cpu"
    ignore_index = int(meta.get("ignore_index", config.get("ignore_index", -100)))
    torch.manual_seed(config.queue.seed)
    model = Predictor(meta["vocab_size"], config.get("n_layer", 3), config.get("n_embd", 64))
    model.to(device)
    rate = config.get("learning_rate", 4e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99))
    checkpoint = Checkpoint(config.root / config.get("out_dir", f"out-{config.queue.dataset}"))
    step = checkpoint.restore(model, optimizer, consumer)
    last, save_interval = config.get("max_iters", 400), config.get("save_interval", 100)
    began = time.monotonic()
    while step < last:
        try:
            batch = consumer.get_batch("train", device)
        except StopIteration:
            break
        part = min(1.0, (step + 1) / max(1, config.get("warmup_iters", 20)))
        for group in optimizer.param_groups:
            group["lr"] = rate * part * (0.55 + 0.45 * math.cos(math.pi * step / last))
        loss = loss_of(model, batch, ignore_index)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % config.get("log_interval", 50) == 0 or step == 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.1f} s")
        if step % config.get("eval_interval", 100) == 0 or step == last:
            held_out = evaluate(model, consumer, device, config.get("eval_iters", 8), ignore_index)
            bound = meta.get("unigram_entropy")
            beside = f", unigram entropy {bound}" if bound is not None else ""
            print(f"step {step}: held-out loss {held_out:.3f}{beside}", flush=True)
        if step % save_interval == 0 or step == last:
            state = consumer.state_dict()
            checkpoint.save(step, model, optimizer, state)
            consumer.release(state)
    for _ in range(config.get("num_samples", 3) if "chars" in meta else 0):
        print("sample:", repr(sample(model, config, meta, device)))


@torch.no_grad()
def evaluate(
    model: nn.Module, consumer: DatasetConsumer, device: str, batches: int, ignore_index: int
) -> float:
    """The mean loss over the next batches of the held-out split."""
    losses = []
    for _ in range(batches):
        try:
            losses.append(loss_of(model, consumer.get_batch("val", device), ignore_index).item())
        except StopIteration:
            break
    return sum(losses) / max(1, len(losses))


@torch.no_grad()
def sample(model: nn.Module, config: SharedConfig, meta: dict[str, Any], device: str) -> str:
    """Text out of nothing but mask tokens: guess all, keep the surest, hide the rest again."""
    size, mask = config.queue.block_size, meta["mask_token_id"]
    steps = config.get("sample_steps", 64)
    x = torch.full((1, size), mask, device=device)
    for step in range(steps):
        logits = model(x)[0] / config.get("temperature", 0.8)
        logits[:, mask] = -torch.inf
        chances = logits.softmax(-1)
        guess = torch.multinomial(chances, 1)[:, 0]
        sure = chances.gather(1, guess[:, None])[:, 0]
        hidden = x[0] == mask
        sure[~hidden] = torch.inf
        keep = size - round(size * (1 - (step + 1) / steps))
        kept = sure.topk(keep).indices
        chosen = torch.full_like(x[0], mask)
        chosen[kept] = torch.where(hidden, guess, x[0])[kept]
        x = chosen[None]
    return "".join(meta["chars"][token] for token in x[0].tolist())


if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
