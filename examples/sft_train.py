"""Fine-tune a model of base_train.py on conversations, and measure what it has learned.

In:    conversations, raw or made by `penstock conversations`; a checkpoint of base_train.py
Out:   checkpoints; a JSON line for each step; the share of well-formed tool calls, before and after
Keeps: a conversation sees itself alone, however rows are packed; the loss of a step is a sum over
       its targets on all ranks, divided by their number; killed and started again with --resume, on
       any number of ranks, it trains on the batches that remain, each once
Never: unpickles, trains what the assistant did not say

    python examples/sft_train.py --data tool_call_sft.jsonl --epochs 4 --batch_size 8 --lr 1e-4 \\
        --kernel current --save_every 5000 --no_compile --held held.jsonl
    torchrun --nproc_per_node 2 examples/sft_train.py --data tool_call_sft.jsonl …

It reads ./tokenizer and goes on from ./checkpoints, unless flags say otherwise. The model, the
checkpoints and the steps are those of base_train.py.
"""

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from base_train import (
    GPT,
    HEAD_DIM,
    KERNELS,
    Checkpoints,
    Ranks,
    at_least,
    layer_windows,
    load_tensors,
    load_tokenizer,
    named_paths,
    new_optimizer,
    open_kernel,
    pairs,
    run_steps,
    write_json,
    write_synced,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from penstock import ConversationDataLoader, LoaderRun, PlanConfig, Tokenizer
from penstock.cli import main as run_command
from penstock.errors import BadConfig

CALL: Final = ("<tool_call>", "</tool_call>")
MEASURED: Final = ("chatml", "qwen")
"""Templates whose calls look like that."""


def train(args: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, train to the end of the data, measure again."""
    tokenizer = load_tokenizer(args.tokenizer)
    assert tokenizer is not None
    checkpoints = Checkpoints(Path(args.checkpoint_dir), tokenizer)
    checkpoints.check_writable()
    begin = (checkpoints.newest() if args.resume else None) or find_base(args)
    measure = Measure(args, tokenizer, ranks) if args.held else None
    torch.manual_seed(args.seed)  # every rank begins with the same model
    model = open_model(args, tokenizer, begin).to(ranks.device)
    optimizer = new_optimizer(args, model)
    loader = open_loader(args, tokenizer, ranks)
    checkpoints.restore(model, optimizer, loader, resume=args.resume)
    if not args.no_compile:
        for block in model.blocks:  # all are compiled by the first: they differ in numbers alone
            block.compile()
    if measure:
        measure.note("before", model, loader.step)
    run_steps(args, ranks, model, optimizer, loader, checkpoints)
    if measure:
        measure.note("after", model, loader.step)
    loader.close()


def find_base(args: argparse.Namespace) -> Path | None:
    """The checkpoint to begin with; none with --from_scratch."""
    if args.from_scratch:
        return None
    base = Path(args.base)
    found = base if (base / "model.json").exists() else Checkpoints(base).newest()
    if found is None or not (found / "model.json").exists():
        raise BadConfig(
            f"there is no checkpoint of base_train.py in {base}",
            do="name its --checkpoint_dir with --base, or train a new model with --from_scratch",
        )
    return found


def open_model(args: argparse.Namespace, tokenizer: Tokenizer, begin: Path | None) -> GPT:
    """The model of a checkpoint, or a new one."""
    if begin is None:
        windows = layer_windows(args.window_pattern, args.depth, args.max_length)
        kernel = open_kernel(args.kernel, windows)
        return GPT(tokenizer.vocab_size, args.depth, args.dim, windows, kernel)
    shape = json.loads((begin / "model.json").read_text())
    known = shape.pop("tokenizer")
    if shape["vocab_size"] != tokenizer.vocab_size or known not in (None, tokenizer.fingerprint):
        raise BadConfig(
            "the model was trained with another tokenizer",
            where=str(begin),
            why=f"it has {shape['vocab_size']:,} tokens of {(known or 'an unknown one')[:12]}, the "
            f"tokenizer {tokenizer.vocab_size:,} of {tokenizer.fingerprint[:12]}",
            do="give the --tokenizer that base_train.py had",
        )
    model = GPT(**shape, kernel=open_kernel(args.kernel, shape["windows"]))
    model.load_state_dict(load_tensors(begin)["model"])
    return model


def open_loader(
    args: argparse.Namespace, tokenizer: Tokenizer, ranks: Ranks, **other: Any
) -> ConversationDataLoader:
    """Conversations; a raw file becomes a dataset in the cache while it is trained on."""
    options: dict[str, Any] = {
        "path": named_paths(args.data), "epochs": args.epochs or None,
        "global_batch_size": args.total_batch_size,
        "pack": args.pack, "plan": PlanConfig(weights=args.weights, seed=args.seed), **other,
    }  # fmt: skip
    run = LoaderRun(cache_dir=args.cache_dir, rank=ranks.rank, world_size=ranks.size)
    return ConversationDataLoader(
        tokenizer=tokenizer, max_length=args.max_length, chat_template=args.chat_template, run=run,
        **options,
    )  # fmt: skip


@dataclass(slots=True)
class Counts:
    """What became of held prompts; all are prompts."""

    due: int = 0
    """Prompts that a tool of the list can answer: the conversation goes on with a call."""
    well_formed: int = 0
    """Of these, answered with calls alone: of the template's form, each of a tool of the list, with
    a JSON object of arguments, and the stop token behind the last."""
    right_tools: int = 0
    """Of these, with the tools of the conversation, in its order."""
    exact: int = 0
    """Of these, with its arguments too."""
    not_due: int = 0
    """Prompts that are answered with words."""
    not_called: int = 0
    """Of these, answered without the beginning of a call."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is shown, and what it is to say."""

    ids: list[int]
    tools: set[str]
    calls: list[dict[str, Any]] | None
    stop: int


class Measure:
    """Held prompts, answered greedily: how many tool calls are well-formed."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, ranks: Ranks) -> None:
        if args.chat_template not in MEASURED:
            raise BadConfig(
                f"calls of {args.chat_template!r} are not measured",
                do=f"give --chat_template {' or '.join(MEASURED)}, or leave --held out",
            )
        self.args, self.tokenizer, self.ranks = args, tokenizer, ranks
        self.file = Path(args.measure_file or Path(args.checkpoint_dir) / "measured.json")
        self.prompts = self._read()

    def _read(self) -> list[Prompt]:
        """This rank's prompts: each conversation up to its first trained token."""
        found = []
        with open_loader(
            self.args, self.tokenizer, self.ranks, path=self.args.held, pack="pad", epochs=1,
            plan=PlanConfig(seed=self.args.seed),
            global_batch_size=max(self.args.held_count, self.ranks.size),
        ) as loader:  # fmt: skip
            batch = next(loader.get_iterator())
        for ids, trained in zip(batch.input_ids, batch.loss_mask, strict=True):
            if not trained.any():  # a row of padding: there are fewer conversations
                continue
            first = int(trained.argmax())
            last = first + int(np.argmin([*trained[first:], False]))
            text = self.tokenizer.decode(ids[:first])
            said = self.tokenizer.decode(ids[first : last - 1])
            found.append(
                Prompt(ids[:first].tolist(), tool_names(text), calls_in(said), int(ids[last - 1]))
            )
        return found

    def note(self, when: str, model: GPT, step: int) -> None:
        """Measure, print, and add to the file. What a run before this one noted `before` it
        trained stays."""
        is_first, known = self.ranks.rank == 0, {}
        if is_first and self.file.exists() and (step or when == "after"):
            known = json.loads(self.file.read_text())
        # what the first rank found decides for all: others may not see its disk
        skip = torch.tensor(int(when == "before" and when in known), device=self.ranks.device)
        if self.ranks.add_up(skip):
            return
        told = {"step": step, **self._count(model)}
        if not is_first:
            return
        print(json.dumps({when: told}), flush=True)
        known[when] = told
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draft = self.file.with_name(self.file.name + ".draft")
        write_synced(draft, lambda file: write_json(known, file))
        draft.replace(self.file)

    def _count(self, model: GPT) -> dict[str, Any]:
        counts = Counts()
        for prompt in self.prompts:
            ids = generate(model, prompt.ids, prompt.stop, self.args.max_new_tokens)
            text = self.tokenizer.decode(ids[:-1]) if ids[-1] == prompt.stop else None
            score(counts, prompt, text, started=CALL[0] in self.tokenizer.decode(ids))
        numbers = torch.tensor(dataclasses.astuple(counts), device=self.ranks.device)
        counts = Counts(*self.ranks.add_up(numbers).tolist())
        share = counts.well_formed / counts.due if counts.due else 0.0
        return {**dataclasses.asdict(counts), "share_well_formed": round(share, 4)}


def score(counts: Counts, prompt: Prompt, text: str | None, *, started: bool) -> None:
    """Count one answer; it has no text if it did not stop by itself."""
    if prompt.calls is None:
        counts.not_due += 1
        counts.not_called += not started
        return
    counts.due += 1
    calls = None if text is None else calls_in(text)
    if calls is None or not {call["name"] for call in calls} <= prompt.tools:
        return
    counts.well_formed += 1
    right = [call["name"] for call in calls] == [call["name"] for call in prompt.calls]
    counts.right_tools += right
    counts.exact += calls == prompt.calls


def calls_in(text: str) -> list[dict[str, Any]] | None:
    """The calls that an answer consists of; None if it is anything else.

    >>> calls_in('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
    [{'name': 'add', 'arguments': {'a': 1}}]
    >>> calls_in('<tool_call>\\n{"name": "add", "arguments": {"a": 1}\\n</tool_call>') is None
    True
    """
    lines = text.split("\n")
    if len(lines) % 3 or {*lines[::3]} != {CALL[0]} or {*lines[2::3]} != {CALL[1]}:
        return None
    try:
        calls = [json.loads(line) for line in lines[1::3]]
    except ValueError:
        return None
    for call in calls:
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return None
        if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
            return None
    return calls


def tool_names(prompt: str) -> set[str]:
    """The tools that a prompt lists.

    >>> tool_names('<tools>\\n{"type": "function", "function": {"name": "add"}}\\n</tools>')
    {'add'}
    """
    _, _, rest = prompt.partition("<tools>\n")
    listed, _, _ = rest.partition("\n</tools>")
    return {json.loads(line)["function"]["name"] for line in listed.split("\n") if line}


class Remembered:
    """Attention of one layer to all tokens so far, of which it keeps the keys and values."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is not None:
            k, v = (torch.cat(both, dim=2) for both in zip(self.kept, (k, v), strict=True))
        self.kept = k, v
        places = torch.arange(k.shape[2], device=q.device)
        back = places[-q.shape[2] :, None] - places
        seen = (back >= 0) & (back < self.window) if self.window else back >= 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@torch.no_grad()
def generate(model: GPT, prompt: list[int], stop: int, most: int) -> list[int]:
    """The likeliest next token, again and again, up to and with `stop`, or `most` of them."""
    attentions = [Remembered(window) for window in model.windows]
    device = model.embed.weight.device
    found: list[int] = []
    ids, place = prompt, 0
    # what is compiled is for training: here each step has another length
    with torch.compiler.set_stance("force_eager"):
        while len(found) < most and stop not in found[-1:]:
            places = torch.arange(place, place + len(ids), device=device)[None]
            x = model.read(torch.tensor([ids], device=device), places, attentions)
            place += len(ids)
            ids = [int(model.predict(x[:, -1]).argmax())]
            found += ids
    return found


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    # fmt: off
    add("--data", action="append", required=True, metavar="[NAME=]PATH",
        help="conversations: JSON lines, or a dataset of penstock conversations; several, repeated "
        "or by commas, are mixed")
    add("--weights", type=pairs(float), metavar="NAME=W,…", help="shares of a mixture")
    add("--tokenizer", help="the tokenizer of the base model; by default ./tokenizer")
    add("--chat_template", default="chatml", help="a preset, a Jinja template, or its file")
    add("--max_length", type=at_least(2), default=2048, help="tokens of a row")
    add("--pack", default="bestfit", help="bestfit, or pad: one conversation a row")
    add("--base", default="checkpoints", metavar="DIR",
        help="the --checkpoint_dir of base_train.py, or one checkpoint of it")
    add("--from_scratch", action="store_true", help="train a new model instead")
    add("--depth", type=at_least(1), default=4, help="layers of a new model")
    add("--dim", type=at_least(HEAD_DIM, HEAD_DIM), default=256, help="its width")
    add("--window_pattern", default="L", metavar="LETTERS", help="what its layers see")
    add("--epochs", type=at_least(0), default=4, help="passes over the data; 0 for no end")
    add("--num_steps", type=at_least(0), help="steps at most, in all")
    add("--batch_size", dest="total_batch_size", type=at_least(1), default=8,
        help="rows of a step, over all ranks")
    add("--device_batch_size", type=at_least(1), default=8, help="rows in a rank's memory at once")
    add("--lr", type=float, default=1e-4)
    add("--warmup_steps", type=at_least(0), default=20)
    add("--kernel", choices=KERNELS, default="current",
        help="attention: torch's choice for the device, written out, or of TPUs (torch_xla)")
    add("--no_compile", action="store_true",
        help="run the model as it is written; without it torch.compile takes half a minute first")
    add("--seed", type=int, default=0, help="of a new model and of the order of the data")
    add("--cache_dir", help="where datasets of raw files are made; by default ~/.cache/penstock")
    add("--checkpoint_dir", default="checkpoints_sft", help="where checkpoints are")
    add("--save_every", type=at_least(1), default=5000, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--log_file", help="a JSON line for each step is added to it")
    add("--print_every", type=at_least(1), default=10)
    add("--ledger", nargs="?", const="-", metavar="FILE",
        help="at the end say what became of every token")
    add("--held", metavar="PATH", help="conversations whose tool calls are measured")
    add("--held_count", type=at_least(1), default=100, help="how many of them")
    add("--max_new_tokens", type=at_least(1), default=256, help="of an answer")
    add("--measure_file", help="by default measured.json in --checkpoint_dir")
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
