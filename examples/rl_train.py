"""Teach a small GPT to add by reinforcement: actor and learner are joined only by a live dataset.

In:    nothing: the task is made here, and its answers are checked here
Out:   a dataset of rollouts; checkpoints; a JSON line for each step of the learner
Keeps: killed at any moment and started again, either goes on: every rollout is trained on once,
       none is lost
Never: lets the actor see weights that are in no checkpoint: no rollout is of a version that a
       learner that was killed has not reached

    python examples/rl_train.py --folder run            both, each in a process of its own
    python examples/rl_train.py actor --folder run      one of them
    python examples/rl_train.py learner --folder run

    actor ──RolloutWriter──▶ run/rollouts ──RolloutDataLoader──▶ learner
      ▲                                                             │
      └────────────────────── run/checkpoints ◀─────────────────────┘

The part to copy into a trainer of your own is `learn` and `policy_loss`.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from base_train import GPT, Checkpoints, Ranks, at_least, move
from torch import Tensor

from penstock import (
    AdvantageConfig,
    BalanceConfig,
    LoaderRun,
    RolloutBatch,
    RolloutConfig,
    RolloutDataLoader,
    RolloutWriter,
)
from penstock.cli import main as run_command
from penstock.errors import ProducerStalled

# The task: "7+5=" is to be answered by "12.". A token is a character.
CHARACTERS: Final = "0123456789+=. "
IDS: Final = {character: number for number, character in enumerate(CHARACTERS)}
END: Final = IDS["."]
MOST_ANSWER: Final = 4
PROMPT: Final = 4
CLIP: Final = 0.2
"""How far the policy may move from the one that sampled, for each token."""


def question(rng: np.random.Generator, most: int) -> tuple[str, str]:
    """A sum, and what its answer is."""
    a, b = rng.integers(0, most + 1, 2).tolist()
    return f"{a}+{b}=", f"{a + b}."


def reward_of(answer: str, right: str) -> float:
    """1 for the right answer, else half of the share of it that is right from its beginning on.

    >>> [reward_of(answer, "12.") for answer in ("12.", "12", "13.", "2.")]
    [1.0, 0.3333333333333333, 0.16666666666666666, 0.0]
    """
    if answer == right:
        return 1.0
    same = 0
    while same < min(len(answer), len(right)) and answer[same] == right[same]:
        same += 1
    return 0.5 * same / len(right)


def make_policy(args: argparse.Namespace) -> GPT:
    torch.manual_seed(args.seed)
    return GPT(len(CHARACTERS), args.depth, args.dim)


# The actor


def act(args: argparse.Namespace) -> None:
    """Sample round after round, each with the newest weights, and write it; what an earlier life of
    this process wrote is there. Round n is for step n + 1 of the learner."""
    policy, weights = make_policy(args), Weights(args)
    with RolloutWriter(args.folder / "rollouts") as writer:
        for number in range(args.num_steps):
            groups = [
                group
                for group in range(args.groups)
                if not writer.has(rollout_id(number, group, args.group_size - 1))
            ]
            if not groups:
                continue
            version = weights.load(policy, least=number - args.ahead)
            for rollouts in sample(args, policy, number, groups, version):
                # a group is in one record, whole or not there: a kill leaves none in part
                writer.write_many(rollouts, wait=False)
            writer.flush()
        writer.seal()


def rollout_id(number: int, group: int, k: int) -> str:
    return f"{number}/{group}/{k}"


class Weights:
    """The newest weights that the learner has put into a checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._checkpoints = Checkpoints(args.folder / "checkpoints")
        self._stall_s = args.stall_s
        self._version = -1

    def load(self, policy: GPT, *, least: int) -> int:
        """Wait for a version that is not older than `least`, and load it; says which it is."""
        deadline = time.monotonic() + self._stall_s
        while True:
            found = self._checkpoints.found()
            version = int(found[-1].name.removeprefix("step_")) if found else -1
            if version >= max(0, least):
                if version == self._version:
                    return version
                try:
                    tensors = torch.load(found[-1] / "model.pt", weights_only=True)
                except FileNotFoundError:  # there are newer ones by now, and this one was removed
                    continue
                policy.load_state_dict(tensors["model"])
                self._version = version
                return version
            if time.monotonic() > deadline:
                raise ProducerStalled(
                    f"no weights of version {max(0, least)} or later for {self._stall_s:g} s",
                    where=str(self._checkpoints.folder),
                    do="start the learner, or look at what stopped it",
                )
            time.sleep(0.01)


@torch.no_grad()
def sample(
    args: argparse.Namespace, policy: GPT, number: int, groups: list[int], version: int
) -> list[list[dict[str, Any]]]:
    """Answers to the questions of a round, group by group, with their rewards."""
    asked = [question(np.random.default_rng([args.seed, number, k]), args.most) for k in groups]
    chance = torch.Generator().manual_seed(args.seed + 1_000_003 * number)
    ids = torch.tensor([[IDS[character] for character in text] for text, _ in asked])
    ids = ids.repeat_interleave(args.group_size, dim=0)
    logprobs = torch.zeros(len(ids), 0)
    for _ in range(MOST_ANSWER):
        places = torch.arange(ids.shape[1]).expand(len(ids), -1)
        said = policy.predict(policy.read(ids, places)[:, -1]).log_softmax(-1)
        chosen = torch.multinomial(said.exp(), 1, generator=chance)
        logprobs = torch.cat([logprobs, said.gather(1, chosen)], dim=1)
        ids = torch.cat([ids, chosen], dim=1)
    made: list[list[dict[str, Any]]] = []
    for row, answer in enumerate(ids[:, PROMPT:].tolist()):
        which, k = divmod(row, args.group_size)
        text, right = asked[which]
        tokens = answer.index(END) + 1 if END in answer else MOST_ANSWER
        written = "".join(CHARACTERS[token] for token in answer[:tokens])
        if k == 0:
            made.append([])
        made[-1].append(
            {
                "rollout_id": rollout_id(number, groups[which], k),
                "group_id": f"{number}/{groups[which]}",
                "group_size": args.group_size,
                "prompt_ids": ids[row, :PROMPT].numpy(),
                "completion_ids": answer[:tokens],
                "logprobs": logprobs[row, :tokens].numpy(),
                "reward": reward_of(written, right),
                "weight_version": version,
                "finish_reason": "stop" if END in answer else "length",
                "meta": {"question": text, "answer": written},
            }
        )
    return made


# The learner


def learn(args: argparse.Namespace) -> None:
    """A step on each batch until the dataset ends. Its checkpoints are what the actor samples
    with, so that the version of the weights is the number of steps."""
    ranks, policy = Ranks(), make_policy(args)
    checkpoints = Checkpoints(args.folder / "checkpoints")
    checkpoints.check_writable()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    loader = RolloutDataLoader(
        str(args.folder / "rollouts"),
        batch_size=args.groups * args.group_size,
        rollouts=RolloutConfig(max_staleness=args.ahead, stale="drop"),
        advantages=AdvantageConfig(method="grpo"),
        balance=BalanceConfig(max_tokens=args.max_tokens),
        run=LoaderRun(wait_s=args.stall_s, stall_s=args.stall_s),
    )
    checkpoints.restore(policy, optimizer, loader, resume=True)
    if not checkpoints.found():
        checkpoints.save(policy, optimizer, loader)  # the weights that the first round needs
    saved = loader.step
    while not loader.is_over:
        loader.version = loader.step
        began = time.monotonic()
        try:
            batch = loader.get_batch(loader.batch_size)
        except StopIteration:
            break
        waited = time.monotonic() - began
        optimizer.zero_grad()
        loss = sum(policy_loss(policy, part) for part in batch.micro_batches)
        move(ranks, policy, optimizer)
        tell(args, batch, loader, float(loss), waited)
        if loader.step % args.save_every == 0:
            checkpoints.save(policy, optimizer, loader)
            saved = loader.step
    if loader.step > saved:
        checkpoints.save(policy, optimizer, loader)
    loader.close()


def policy_loss(policy: GPT, part: RolloutBatch) -> float:
    """The loss of a micro-batch, as far as it counts in that of the batch; its gradients are
    added to the others."""
    tensors = part.to("cpu")
    hidden = policy.read(tensors.input_ids, tensors.position_ids)
    # a label stands where its token stands: the place before it predicts it
    chosen = tensors.loss_mask[:, 1:]
    logits = policy.predict(hidden[:, :-1][chosen])
    tokens = tensors.input_ids[:, 1:][chosen]
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None].long())[:, 0]
    ratio = (logprobs - tensors.old_logprobs[:, 1:][chosen]).exp()
    gained: Tensor = tensors.advantages[:, 1:][chosen]
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * gained, clipped * gained).sum() / part.num_loss_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def tell(
    args: argparse.Namespace, batch: RolloutBatch, loader: RolloutDataLoader, loss: float,
    waited_s: float,
) -> None:  # fmt: skip
    """A JSON line for a step, to be read by people and programs."""
    line = {
        "step": loader.step, "reward": round(float(batch.rewards.mean()), 4),
        "right": round(float((batch.rewards == 1).mean()), 4), "loss": round(loss, 5),
        "rollouts": len(batch.rewards), "tokens": batch.num_loss_tokens,
        "staleness": batch.metadata["staleness_max"],
        "stale": loader.counts.stale.rollouts, "incomplete": loader.counts.incomplete.rollouts,
        "waited_s": round(waited_s, 4), "time": round(time.time(), 3),
    }  # fmt: skip
    with (args.folder / "log.jsonl").open("a") as file:
        file.write(json.dumps({**line, "ids": batch.rollout_ids}) + "\n")
    if loader.step % args.print_every == 0 or loader.step == 1:
        print(json.dumps(line), flush=True)


# Both


def run_both(args: argparse.Namespace, argv: list[str]) -> None:
    """The two in processes of their own; one that was killed is started again."""

    def start(role: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, __file__, role, *argv])

    running = {role: start(role) for role in ("learner", "actor")}
    try:
        while running:
            time.sleep(0.05)
            for role, process in [*running.items()]:
                code = process.poll()
                if code == -signal.SIGKILL:
                    running[role] = start(role)
                elif code == 0:
                    del running[role]
                elif code is not None:
                    sys.exit(code)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    lines = read_log(args.folder / "log.jsonl")
    rewards = [line["reward"] for line in lines]
    part = max(1, len(rewards) // 10)
    print(
        json.dumps(
            {
                "steps": len(lines),
                "reward_first": round(float(np.mean(rewards[:part])), 4),
                "reward_last": round(float(np.mean(rewards[-part:])), 4),
                "right_last": round(float(np.mean([line["right"] for line in lines[-part:]])), 4),
            }
        ),
        flush=True,
    )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The line of each step; one that was done again after a kill counts as it was done last."""
    steps: dict[int, dict[str, Any]] = {}
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n"):  # a kill may leave the beginning of one
            line = json.loads(text)
            steps[line["step"]] = line
    return [steps[step] for step in sorted(steps)]


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    # fmt: off
    add("role", nargs="?", choices=("both", "actor", "learner"), default="both")
    add("--folder", type=Path, required=True, help="where rollouts, checkpoints and the log are")
    add("--num_steps", type=at_least(1), default=300, help="steps, and rounds of rollouts")
    add("--groups", type=at_least(1), default=16, help="questions of a round")
    add("--group_size", type=at_least(2), default=16, help="answers to a question")
    add("--most", type=at_least(1), default=9, choices=range(1, 10), metavar="1-9",
        help="the largest number that is added")
    add("--ahead", type=at_least(0), default=1,
        help="by how many versions the learner may be ahead of what it trains on")
    add("--save_every", type=at_least(1), default=1,
        help="steps between checkpoints: at most --ahead + 1")
    add("--max_tokens", type=at_least(PROMPT + MOST_ANSWER), default=4096,
        help="tokens of a micro-batch")
    add("--depth", type=at_least(1), default=2, help="layers")
    add("--dim", type=at_least(32, 32), default=64, help="width, a multiple of 32")
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--stall_s", type=float, default=120.0, help="silence of the other that is an error")
    add("--print_every", type=at_least(1), default=10)
    # fmt: on
    args = parser.parse_args(argv)
    if args.save_every > args.ahead + 1:
        parser.error(
            f"--save_every is {args.save_every}, --ahead {args.ahead}: the actor would wait for "
            "weights that the learner has no rollouts for; give --save_every at most --ahead + 1"
        )
    return args


def main() -> None:
    args = parse_flags()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # so small a model is not worth more
    if args.role == "both":
        run_both(args, [word for word in sys.argv[1:] if word != "both"])
    elif args.role == "actor":
        act(args)
    else:
        learn(args)


if __name__ == "__main__":
    run_command(main)
