"""Train a small GPT on penstock's batches, while the data is still being made.

In:    datasets, live or sealed; a tokenizer; one process, or several under torchrun
Out:   checkpoints; a JSON line for each step, with the hash of what it was trained on
Keeps: killed at any moment and started again with --resume, on any number of ranks: the batches
       that remain, each once
Never: unpickles, guesses that the data has ended

    python examples/base_train.py --data_dir data --tokenizer tokenizer --streaming_data
    torchrun --nproc_per_node 2 examples/base_train.py --data_dir cpp=a,py=b --weights cpp=3,py=1 …

The part to copy into a trainer of your own is `run_steps` and `Checkpoints`. sft_train.py beside it
goes on from a checkpoint, with conversations, and shares all but the loader.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock import (
    ConversationDataLoader,
    DataLoader,
    DocumentConfig,
    LoaderRun,
    Log,
    PlanConfig,
    PretrainDataLoader,
    Tokenizer,
    TrainingBatch,
)
from penstock.cli import main as run_command
from penstock.errors import BadConfig, NoDataset
from penstock.store.log import chunk_length, generations

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Kernel = Callable[[Tensor, Sequence[int]], list[Attention]]
"""How each layer looks back, from the places of tokens in their documents and a window a layer."""
Loader = PretrainDataLoader | ConversationDataLoader
KEPT: Final = 2  # checkpoints; the newest is enough, the one before it is for peace of mind
HEAD_DIM: Final = 32
ROW_TOKENS: Final = 1024
"""Of a row, where neither a flag nor the data says it."""
SHAPE_FLAGS: Final = {
    "vocab_size": "--vocab_size (or the tokenizer)", "depth": "--depth", "dim": "--dim",
    "windows": "what layers see, by --window_pattern and --max_seq_len,",
}  # fmt: skip


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on normalised input and added to it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attend = nn.Linear(dim, 3 * dim, bias=False)
        self.project = nn.Linear(dim, dim, bias=False)
        self.widen = nn.Linear(dim, 4 * dim, bias=False)
        self.narrow = nn.Linear(4 * dim, dim, bias=False)
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, x: Tensor, turn: Tensor, attention: Attention) -> Tensor:
        rows, tokens, dim = x.shape
        parts = self.attend(F.rms_norm(x, (dim,))).view(rows, tokens, 3, -1, HEAD_DIM)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = attention(turned(q, turn), turned(k, turn), v)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, tokens, dim))
        wide: Tensor = F.relu(self.widen(F.rms_norm(x, (dim,)))).square()
        return x + self.narrow(wide)  # type: ignore[no-any-return]


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions: pairs of numbers, turned by the place of their token in its document."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class GPT(nn.Module):
    """Predicts the next token of a document from those before it in the same document."""

    def __init__(
        self, vocab_size: int, depth: int, dim: int, windows: Sequence[int] | None = None,
        kernel: Kernel | None = None,
    ) -> None:  # fmt: skip
        """`windows`: how many tokens each layer sees, 0 for all; `kernel`: one of `open_kernel`."""
        super().__init__()
        self.windows = list(windows or [0] * depth)
        self.kernel = kernel or open_kernel("current", self.windows)
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)  # the first loss is that of knowing nothing: log(vocab)
        self.speeds: Tensor
        speeds = 10_000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2)
        self.register_buffer("speeds", speeds, persistent=False)

    @property
    def shape(self) -> dict[str, Any]:
        """What a model is made again with."""
        vocab_size, dim = self.embed.weight.shape
        return {
            "vocab_size": vocab_size, "depth": len(self.blocks), "dim": dim,
            "windows": self.windows,
        }  # fmt: skip

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of all labels that are trained."""
        x = self.read(input_ids, position_ids)
        # a label stands where its token stands: the place before it predicts it
        targets = labels[:, 1:]
        trained = targets != -100
        logits = self.predict(x[:, :-1][trained])
        return F.cross_entropy(logits, targets[trained], reduction="sum")

    def read(
        self, input_ids: Tensor, position_ids: Tensor,
        attentions: Sequence[Attention] | None = None,
    ) -> Tensor:  # fmt: skip
        """What is known after each token; `attentions` are the kernel's unless others are given."""
        if attentions is None:
            attentions = self.kernel(position_ids, self.windows)
        x: Tensor = self.embed(input_ids)
        angles = position_ids[:, None, :, None] * self.speeds
        turn = torch.stack([angles.cos(), angles.sin()])
        for block, attention in zip(self.blocks, attentions, strict=True):
            x = block(x, turn, attention)
        return x

    def predict(self, x: Tensor) -> Tensor:
        """The logits of the next token."""
        logits: Tensor = self.head(F.rms_norm(x, (x.shape[-1],)))
        return logits.float()


def layer_windows(pattern: str, depth: int, max_seq_len: int) -> list[int]:
    """How many tokens each layer sees, 0 for all: the pattern, again and again. `L` is all, `S`
    half of a row; the last layer always sees all.

    >>> layer_windows("SSL", 5, 1024)
    [512, 512, 0, 512, 0]
    """
    if not pattern or {*pattern.upper()} - {*"LS"}:
        raise BadConfig(
            f"--window_pattern is {pattern!r}",
            do="give letters L (all tokens) and S (half of a row), such as SSSL",
        )
    letters = (pattern.upper() * depth)[: depth - 1] + "L"
    return [0 if letter == "L" else max(1, max_seq_len // 2) for letter in letters]


def open_kernel(name: str, windows: Sequence[int], flag: str = "--kernel xla") -> Kernel:
    """An implementation of attention: `current`, which is torch's choice for the device, `plain`,
    which is written out and good to compare with, or `xla`, which `flag` asked for."""
    if name == "xla":
        kernel = xla_kernel(flag)
        if any(windows):
            raise BadConfig(f"{flag} has no windows", do="give --window_pattern L")
        return kernel
    torchs: Callable[..., Tensor] = F.scaled_dot_product_attention
    return partial(masked, {"current": torchs, "plain": plain_attention}[name])


KERNELS: Final = ("current", "plain", "xla")


def masked(
    attend: Callable[..., Tensor], position_ids: Tensor, windows: Sequence[int]
) -> list[Attention]:
    """Documents are kept apart by a mask; layers with the same window share one."""
    masks = {window: document_mask(position_ids, window) for window in {*windows}}
    return [partial(attend, attn_mask=masks[window]) for window in windows]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    """Attention as it is written in papers."""
    scores = (q @ k.transpose(-2, -1)) * HEAD_DIM**-0.5
    found: Tensor = scores.masked_fill(~attn_mask, -torch.inf).softmax(dim=-1) @ v
    return found


def xla_kernel(flag: str) -> Kernel:
    """Attention of XLA's, told which document each token is of. Not run by our tests: they have no
    TPU."""
    try:
        from torch_xla.experimental.custom_kernel import flash_attention
    except ImportError:
        raise BadConfig(
            f"{flag} needs torch_xla, which is not installed",
            why="it is the flash attention of TPUs",
            do="install torch_xla on a TPU host, or leave the flag out: without it, documents are "
            "kept apart by a mask",
        ) from None

    def kernel(position_ids: Tensor, windows: Sequence[int]) -> list[Attention]:
        documents = (position_ids == 0).cumsum(dim=1)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found: Tensor = flash_attention(
                q, k, v, causal=True, q_segment_ids=documents, kv_segment_ids=documents,
                sm_scale=HEAD_DIM**-0.5,
            )  # fmt: skip
            return found

        return [attention] * len(windows)

    return kernel


def document_mask(position_ids: Tensor, window: int = 0) -> Tensor:
    """Which places each place may look at: earlier ones of its own document, `window` of them.

    >>> document_mask(torch.tensor([[0, 1, 0]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    >>> document_mask(torch.tensor([[0, 1, 2]]), window=2)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]

    Rows by tokens by tokens: plain and quick at 1,024 tokens on a CPU. At 16,384 on a GPU give the
    batch's `cu_seqlens` to attention that takes them instead.
    """
    document = (position_ids == 0).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    seen = same.tril()
    return (seen.triu(1 - window) if window else seen).unsqueeze(1)


class Ranks:
    """All processes of the run; one of them, without torchrun."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.rank = dist.get_rank() if self.size > 1 else 0

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def train(args: argparse.Namespace, ranks: Ranks) -> None:
    """Train a new model, or go on with one."""
    tokenizer = load_tokenizer(args.tokenizer, vocab_size=args.vocab_size)
    checkpoints = None
    if args.checkpoint_dir:
        checkpoints = Checkpoints(Path(args.checkpoint_dir), tokenizer)
        checkpoints.check_writable()
    args.max_seq_len = args.max_seq_len or found_length(args)
    torch.manual_seed(args.seed)  # every rank begins with the same model
    vocab_size = args.vocab_size or (tokenizer.vocab_size if tokenizer else 0)
    windows = layer_windows(args.window_pattern, args.depth, args.max_seq_len)
    kernel = open_kernel("xla" if args.xla_flash_attn else "current", windows, "--xla_flash_attn")
    model = GPT(vocab_size, args.depth, args.dim, windows, kernel).to(ranks.device)
    optimizer = new_optimizer(args, model)
    loader = open_loader(args, tokenizer, ranks)
    if checkpoints:
        checkpoints.restore(model, optimizer, loader, resume=args.resume)
    run_steps(args, ranks, model, optimizer, loader, checkpoints)
    loader.close()


def load_tokenizer(path: str | None, vocab_size: int | None = None) -> Tokenizer | None:
    """The tokenizer, by default ./tokenizer, as penstock chunk has it; none is needed where the
    size of the vocabulary is told."""
    if not (path or vocab_size) and os.path.isdir("tokenizer"):
        path = "tokenizer"
    if not (path or vocab_size):
        raise BadConfig("the size of the vocabulary is not known", do="give --tokenizer")
    return Tokenizer.load(path) if path else None


def new_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)


def run_steps(
    args: argparse.Namespace, ranks: Ranks, model: GPT, optimizer: torch.optim.Optimizer,
    loader: Loader, checkpoints: "Checkpoints | None",
) -> None:  # fmt: skip
    """Batch after batch until the data ends, or --num_steps."""
    report = Report(args, ranks, loader)
    # a run that was finished has nothing left to do; iterated again, a loader begins an epoch
    batches = iter(()) if loader.is_over else loader.get_iterator()
    saved = loader.step
    while args.num_steps is None or loader.step < args.num_steps:
        began = time.monotonic()
        batch = next(batches, None)
        if batch is None:  # on every rank at the same step: the plan is the same for all
            break
        waited = time.monotonic() - began
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, loader.step / max(1, args.warmup_steps))
        # conversations know their targets on all ranks; of other rows these are counted
        known = batch.num_loss_tokens if isinstance(loader, ConversationDataLoader) else None
        loss, trained, digest = train_step(args, ranks, model, optimizer, batch, known)
        report.step(loss, trained, digest, waited, time.monotonic() - began)
        if checkpoints and ranks.rank == 0 and loader.step % args.save_every == 0:
            checkpoints.save(model, optimizer, loader)
            saved = loader.step
    if checkpoints and ranks.rank == 0 and loader.step > saved:
        checkpoints.save(model, optimizer, loader)
    report.end(checkpoints.newest() if checkpoints else None)


def train_step(
    args: argparse.Namespace, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer,
    batch: TrainingBatch, known: int | None = None,
) -> tuple[float, int, str]:  # fmt: skip
    """One step on all ranks: the mean loss, the labels that were trained, the batch's hash."""
    # every rank puts what it has in its own places; the sum is the same for any number of ranks
    told = np.zeros(args.total_batch_size + 1, np.int64)
    first = args.total_batch_size * ranks.rank // ranks.size
    told[first : first + len(batch.input_ids)] = row_hashes(batch.input_ids)
    told[-1] = batch.loss_mask[:, 1:].sum()
    told = ranks.add_up(torch.from_numpy(told).to(ranks.device)).cpu().numpy()
    trained = int(told[-1]) if known is None else known

    optimizer.zero_grad()
    tensors = batch.to(ranks.device)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for at in range(0, len(batch.input_ids), args.device_batch_size):
        part = slice(at, at + args.device_batch_size)
        # by the labels of all ranks: one whose rows are all padding adds zeros, not a NaN
        loss = model(
            tensors.input_ids[part], tensors.position_ids[part], tensors.labels[part]
        ) / max(trained, 1)
        loss.backward()
        total += loss.detach()
    move(ranks, model, optimizer)
    return float(ranks.add_up(total)), trained, joint_hash(told[:-1])


def move(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step by the gradients of all ranks."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    together = ranks.add_up(nn.utils.parameters_to_vector(gradients))
    nn.utils.vector_to_parameters(together, gradients)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def row_hashes(input_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """A number for each row of token ids."""
    found = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in input_ids]
    return np.frombuffer(b"".join(found), np.int64)


def joint_hash(hashes: npt.NDArray[np.int64]) -> str:
    """One hash for a batch from those of its rows."""
    return hashlib.sha256(hashes.tobytes()).hexdigest()[:16]


def open_loader(
    args: argparse.Namespace, tokenizer: Tokenizer | None, ranks: Ranks
) -> PretrainDataLoader:
    """The loader; with --streaming_data it waits for the dataset to appear."""
    return PretrainDataLoader(
        named_paths(args.data_dir), tokenizer, args.max_seq_len, args.streaming_data,
        global_batch_size=args.total_batch_size,
        weights=args.weights, epochs=args.epochs or None, seed=args.seed, pack=args.pack,
        plan=PlanConfig(**args.plan), documents=DocumentConfig(ban=args.ban),
        run=LoaderRun(
            wait_s=wait_s(args), stall_s=args.stall_s, rank=ranks.rank, world_size=ranks.size
        ),
    )  # fmt: skip


def wait_s(args: argparse.Namespace) -> float:
    """How long to wait for data that is not there yet."""
    return args.stall_s or 120.0 if args.streaming_data else 0.0


def found_length(args: argparse.Namespace) -> int:
    """Tokens of a row, where no flag says it: those that the chunks of a dataset may have."""
    deadline = time.monotonic() + wait_s(args)
    for path in named_paths(args.data_dir).values():
        while (log := newest_log(path)) is None and is_to_come(path):
            if time.monotonic() > deadline:
                break  # the loader says what is missing
            time.sleep(0.05)
        if log is not None and (length := chunk_length(log.state)) is not None:
            return length
    return ROW_TOKENS


def newest_log(path: str) -> Log | None:
    """The log that a loader opens: of several generations the newest, a sealed one before others;
    None where there is no dataset."""
    if "://" not in path and not os.path.isdir(path):
        return None
    try:
        logs = [Log.open(one) for one in reversed(generations(path)[1])]
    except NoDataset:
        return None
    logs = [log for log in logs if not log.state.is_empty] or logs
    return next((log for log in logs if log.state.sealed), logs[0])


def is_to_come(path: str) -> bool:
    """Whether a dataset may still begin at a path: nothing of another kind is there."""
    if os.path.isdir(path):
        return all(name.startswith((".", "_")) for name in os.listdir(path))
    return not os.path.exists(path) and not any(letter in path for letter in "*?[")


class Checkpoints:
    """A directory for each: the model and the optimizer as tensors, the loader's state as JSON.

    It is written under another name, and renamed when it is on the disk: with its name it is whole.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer` is what the model reads with: a checkpoint says which one that was."""
        self.folder = folder
        self.tokenizer = tokenizer.fingerprint if tokenizer else None

    def check_writable(self) -> None:
        """Find out before the first step whether checkpoints can be saved at all."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(prefix="draft_", dir=self.folder))  # each rank has its own
        except OSError as error:
            raise BadConfig(
                f"no checkpoint can be written to {self.folder}",
                where=str(self.folder.absolute()),
                why=f"{type(error).__name__}: {error.strerror}",
                do="name another directory with --checkpoint_dir, or change who may write there",
            ) from None

    def save(self, model: GPT, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
        draft = self.folder / "draft"
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed while it saved
        draft.mkdir(parents=True)
        tensors = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        about = {**model.shape, "tokenizer": self.tokenizer}
        write_synced(draft / "model.pt", lambda file: torch.save(tensors, file))
        for name, told in (("model.json", about), ("loader.json", loader.state_dict())):
            write_synced(draft / name, partial(write_json, told))
        sync_folder(draft)
        draft.rename(self.folder / f"step_{loader.step:08d}")
        sync_folder(self.folder)
        for old in self.found()[:-KEPT]:
            shutil.rmtree(old)

    def restore(
        self, model: GPT, optimizer: torch.optim.Optimizer, loader: DataLoader, *, resume: bool,
    ) -> None:  # fmt: skip
        """Go on from the newest checkpoint, if there is one."""
        if not (found := self.found()):
            return
        if not resume:
            raise BadConfig(
                f"there is a checkpoint: {found[-1]}",
                do="go on from it with --resume, or name another --checkpoint_dir",
            )
        check_shape(found[-1], model)
        tensors = load_tensors(found[-1])
        model.load_state_dict(tensors["model"])
        optimizer.load_state_dict(tensors["optimizer"])
        loader.load_state_dict(json.loads((found[-1] / "loader.json").read_text()))

    def newest(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        return max(self.found(), default=None)

    def found(self) -> list[Path]:
        """Those that are whole, the newest last."""
        return sorted(self.folder.glob("step_*"))


def check_shape(checkpoint: Path, model: GPT) -> None:
    """Refuse a checkpoint of a model of another shape, and name what differs."""
    saved = json.loads((checkpoint / "model.json").read_text())
    differ = {
        name: (saved[name], asked)
        for name, asked in model.shape.items()
        if saved.get(name, asked) != asked
    }
    if "depth" in differ:
        differ.pop("windows", None)  # there is one for each layer
    if differ:
        flags = [f"{SHAPE_FLAGS[name]} is {asked}" for name, (_, asked) in differ.items()]
        known = [f"{name} {was}" for name, (was, _) in differ.items()]
        raise BadConfig(
            f"the checkpoint is of a model of another shape: {', '.join(flags)}",
            where=str(checkpoint),
            why=f"it was saved with {', '.join(known)}",
            do="give the flags that the run began with, or name another --checkpoint_dir",
        )


def load_tensors(checkpoint: Path) -> dict[str, Any]:
    """The model and the optimizer of a checkpoint, which is data, and can run nothing."""
    found: dict[str, Any] = torch.load(
        checkpoint / "model.pt", weights_only=True, map_location="cpu"
    )
    return found


def write_json(told: Mapping[str, Any], file: IO[bytes]) -> None:
    file.write(json.dumps(told).encode())


def write_synced(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


class Report:
    """What rank 0 says: a line for people, a line of JSON for programs, the ledger at the end."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, loader: Loader) -> None:
        self.args, self.ranks, self.loader = args, ranks, loader
        self.began, self.loss = loader.step, 0.0
        self.log = Path(args.log_file) if args.log_file and ranks.rank == 0 else None

    def step(self, loss: float, trained: int, digest: str, waited_s: float, took_s: float) -> None:
        step, self.loss = self.loader.step, loss  # steps done, this one included
        if self.log is not None:
            line = {
                "step": step, "loss": round(loss, 5), "tokens": trained, "batch": digest,
                "ranks": self.ranks.size, "waited_s": round(waited_s, 4),
                "took_s": round(took_s, 4), "time": round(time.time(), 3),
            }  # fmt: skip
            with self.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if self.ranks.rank == 0 and (step % self.args.print_every == 0 or step == 1):
            print(
                f"step {step:5}  loss {loss:6.3f}  {trained:,} tokens  "
                f"{trained / took_s:7,.0f} tokens/s  {waited_s:.2f} s for data", flush=True,
            )  # fmt: skip

    def end(self, checkpoint: Path | None) -> None:
        """Say why the run is over, what was trained in all, and where it is kept."""
        if self.ranks.rank:
            return
        step = self.loader.step
        is_cut = self.args.num_steps is not None and step >= self.args.num_steps
        why = f"--num_steps {self.args.num_steps} is reached" if is_cut else "the data has ended"
        told = f"last loss {self.loss:.3f}" if step > self.began else "nothing was left to do"
        tokens = sum(line.trained for line in self.loader.ledger())
        kept = f"checkpoint {checkpoint}" if checkpoint else "no checkpoint: give --checkpoint_dir"
        print(
            f"done at step {step}: {why}; {told}, {tokens:,} tokens trained in all; {kept}",
            flush=True,
        )
        if self.args.ledger:
            lines = [dataclasses.asdict(line) for line in self.loader.ledger()]
            if self.args.ledger == "-":
                print(json.dumps(lines), flush=True)
            else:
                Path(self.args.ledger).write_text(json.dumps(lines) + "\n")


def named_paths(given: list[str]) -> dict[str, str]:
    """Sources by name: `name=path`, or a path, which is called by its last part.

    >>> named_paths(["cpp=/data/a,/data/python"])
    {'cpp': '/data/a', 'python': '/data/python'}
    """
    named: dict[str, str] = {}
    for item in ",".join(given).split(","):
        found = re.fullmatch(r"([\w-]+)=(.+)", item)
        name, path = found.groups() if found else (os.path.basename(item.rstrip("/")), item)
        if name in named:
            raise BadConfig(f"two sources are called {name!r}", do="name them: name=path")
        named[name] = path
    return named


def pairs(kind: Callable[[str], Any]) -> Callable[[str], dict[str, Any]]:
    """A flag of the form a=1,b=2."""

    def parse(text: str) -> dict[str, Any]:
        found = {}
        for item in text.split(","):
            name, equals, value = item.partition("=")
            if not (name and equals and value):
                raise argparse.ArgumentTypeError(f"{item!r} is not of the form name=value")
            found[name] = kind(value)
        return found

    return parse


def number_or_word(text: str) -> int | str | bool:
    """A value of PlanConfig.

    >>> [number_or_word(text) for text in ("3", "false", "tokens")]
    [3, False, 'tokens']
    """
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def plan_options(text: str) -> dict[str, Any]:
    """Options of PlanConfig, but for those that have flags of their own."""
    found = pairs(number_or_word)(text)
    flags = {"seq_len": "max_seq_len", "pack": "pack", "epochs": "epochs", "seed": "seed"}
    hints = typing.get_type_hints(PlanConfig)
    known = {name: (typing.get_args(hint) or (hint,))[0] for name, hint in hints.items()}
    for name, value in found.items():
        if name in flags:
            raise argparse.ArgumentTypeError(f"{name} is given with --{flags[name]}")
        if name not in known:
            others = ", ".join(sorted(set(known) - set(flags)))
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {others}")
        if type(value) is not known[name]:
            raise argparse.ArgumentTypeError(f"{name} is {value!r}, no {known[name].__name__}")
    return found


def at_least(least: int, step: int = 1) -> Callable[[str], int]:
    """A whole number that is not below, and a multiple of `step`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least or value % step:
            also = f", a multiple of {step}" if step > 1 else ""
            raise argparse.ArgumentTypeError(f"{value} is not {least} or more{also}")
        return value

    parse.__name__ = "whole number"  # what argparse calls it
    return parse


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    # fmt: off
    add("--data_dir", action="append", required=True, metavar="[NAME=]PATH",
        help="a dataset; several, repeated or by commas, are mixed")
    add("--weights", type=pairs(float), metavar="NAME=W,…", help="shares of a mixture")
    add("--streaming_data", action="store_true", help="train while the data is still being made")
    add("--stall_s", type=float, help="a producer, or its input, silent for so long is an error")
    add("--tokenizer", help="the tokenizer of the dataset; by default ./tokenizer")
    add("--vocab_size", type=at_least(1), help="instead of a tokenizer, where shards hold tokens")
    add("--max_seq_len", type=at_least(1),
        help="tokens of a row; by default the --max_tokens of the dataset's chunks, or "
        f"{ROW_TOKENS:,} where it has none")
    add("--total_batch_size", type=at_least(1), default=16, help="rows of a step, over all ranks")
    add("--device_batch_size", type=at_least(1), default=8, help="rows in a rank's memory at once")
    add("--num_steps", type=at_least(0),
        help="steps at most, in all; without it, to the end of the data")
    add("--epochs", type=at_least(0), default=1, help="passes over the data; 0 for no end")
    add("--pack", default="bestfit", help="pad, concat or bestfit")
    add("--plan", type=plan_options, default={}, metavar="NAME=VALUE,…",
        help="other options of PlanConfig: pool_size, buffer_pieces, weigh, …")
    add("--ban", type=int, action="append", default=[], metavar="DOC_ID",
        help="leave a document out; repeatable")
    add("--depth", type=at_least(1), default=4, help="layers")
    add("--dim", type=at_least(HEAD_DIM, HEAD_DIM), default=256, help="width, a multiple of 32")
    add("--window_pattern", default="L", metavar="LETTERS",
        help="what layers see, in turn: L all tokens, S half of a row; the last one sees all")
    add("--xla_flash_attn", action="store_true", help="attention of TPUs; needs torch_xla")
    add("--lr", type=float, default=2e-3)
    add("--warmup_steps", type=at_least(0), default=20)
    add("--seed", type=int, default=0, help="of the model and of the order of the data")
    add("--checkpoint_dir", help="where checkpoints are")
    add("--save_every", type=at_least(1), default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--log_file", help="a JSON line for each step is added to it")
    add("--print_every", type=at_least(1), default=10)
    add("--ledger", nargs="?", const="-", metavar="FILE",
        help="at the end say what became of every token")
    # fmt: on
    return parser.parse_args(argv)


def main() -> None:
    args, ranks = parse_flags(), Ranks()
    try:
        train(args, ranks)
    finally:
        ranks.close()


if __name__ == "__main__":
    run_command(main)
