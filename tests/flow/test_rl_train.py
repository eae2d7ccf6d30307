"""The actor and the learner of examples/rl_train.py: the reward rises, and kills lose nothing.

make check: both, each killed once. make faults: many kills of either, and one that comes back late.
"""

import argparse
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest

from penstock.errors import ProducerStalled
from penstock.produce.verify import verify
from rollout.made import ids_in

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
TRAINER: Final = EXAMPLES / "rl_train.py"
GROUPS, SIZE = 8, 16


def load_trainer() -> Any:
    spec = importlib.util.spec_from_file_location("rl_train", TRAINER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))  # as for whoever runs it: the model is base_train's
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


def flags(folder: Path, steps: int, *more: str) -> list[str]:
    return [
        *("--folder", str(folder / "run"), "--num_steps", str(steps), "--most", "2"),
        *("--groups", str(GROUPS), "--group_size", str(SIZE), "--dim", "32", "--depth", "1"),
        *("--lr", "0.005", "--stall_s", "60", *more),
    ]


def start(folder: Path, role: str, *given: str) -> "subprocess.Popen[bytes]":
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, str(TRAINER), role, *given], stdout=said, stderr=said,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def steps_in(folder: Path) -> int:
    """The last step in the log."""
    path = folder / "run" / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def wait_for_step(folder: Path, step: int, running: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 90
    while steps_in(folder) < step:
        assert running.poll() is None, (folder / "said").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_whole(folder: Path, steps: int, ahead: int) -> list[dict[str, Any]]:
    """Every rollout in one step, and what was done again after a kill was the same; answers the
    line of each step."""
    found: dict[int, dict[str, Any]] = {}
    for text in (folder / "run" / "log.jsonl").read_text().splitlines():
        line = json.loads(text)
        before = found.setdefault(line["step"], line)
        assert before["ids"] == line["ids"]
        found[line["step"]] = line
        assert line["stale"] == line["incomplete"] == 0
        assert 0 <= line["staleness"] <= ahead
        assert np.isfinite(line["loss"])
    lines = list(found.values())
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    trained = [name for line in lines for name in line["ids"]]
    written = ids_in(folder / "run" / "rollouts")
    assert len(trained) == len({*trained}) == steps * GROUPS * SIZE
    assert sorted(trained) == sorted(written)
    assert verify(folder / "run" / "rollouts", full=True).faults == []
    return lines


def mean_reward(lines: list[dict[str, Any]]) -> float:
    return float(np.mean([line["reward"] for line in lines]))


def test_the_reward_rises_and_both_are_killed(tmp_path: Path) -> None:
    steps = 70
    running = start(tmp_path, "both", *flags(tmp_path, steps))
    for at, role in ((12, "learner"), (24, "actor")):
        wait_for_step(tmp_path, at, running)
        (victim,) = (
            child for child in psutil.Process(running.pid).children() if role in child.cmdline()
        )
        victim.send_signal(signal.SIGKILL)
    assert running.wait(timeout=90) == 0, (tmp_path / "said").read_text()[-3000:]
    lines = check_whole(tmp_path, steps, ahead=1)
    first, last = mean_reward(lines[:10]), mean_reward(lines[-10:])
    assert last > first + 0.25, (first, last)
    said = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert said[-1]["steps"] == steps
    assert said[-1]["reward_last"] > said[-1]["reward_first"]
    # all is there, all is trained: started again, both have nothing left to do
    trainer = load_trainer()
    for role in (trainer.act, trainer.learn):
        role(trainer.parse_flags(flags(tmp_path, steps)))
    check_whole(tmp_path, steps, ahead=1)


def test_the_loss_is_that_of_grpo() -> None:
    """Beside each token's own, one by one; a token that moved too far has no gradient."""
    import torch

    from penstock import RolloutDataLoader

    trainer = load_trainer()
    args = trainer.parse_flags(["--folder", "x", "--group_size", "6", "--dim", "32"])
    policy = trainer.make_policy(args)
    torch.nn.init.normal_(policy.head.weight, std=0.3)
    (made,) = trainer.sample(args, policy, 0, [0], 0)
    for k, one in enumerate(made):
        one["reward"] = float(k % 3)
        one["logprobs"] = one["logprobs"] - np.float32(0.3 * (k % 2))
    (batch,) = RolloutDataLoader(made, batch_size=6)
    loss = trainer.policy_loss(policy, batch)
    rewards = np.array([one["reward"] for one in made])
    gains = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    total, tokens = 0.0, 0
    for gain, one in zip(gains, made, strict=True):
        ids = torch.tensor([[*one["prompt_ids"].tolist(), *one["completion_ids"]]])
        with torch.no_grad():
            said = policy.predict(policy.read(ids, torch.arange(ids.shape[1])[None]))
        chances = said.log_softmax(-1)[0]
        for k, token in enumerate(one["completion_ids"]):
            ratio = float(chances[len(one["prompt_ids"]) + k - 1, token].exp()) / np.exp(
                float(one["logprobs"][k])
            )
            total -= min(ratio * gain, float(np.clip(ratio, 0.8, 1.2)) * gain)
            tokens += 1
    assert loss == pytest.approx(total / tokens, abs=1e-5)
    assert batch.num_loss_tokens == tokens


def test_an_actor_without_a_learner_says_so(tmp_path: Path) -> None:
    trainer = load_trainer()
    args = argparse.Namespace(folder=tmp_path, stall_s=0.05)
    with pytest.raises(ProducerStalled, match=r"no weights of version 3 or later for 0\.05 s"):
        trainer.Weights(args).load(None, least=3)


def test_flags_that_would_wait_for_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_trainer().parse_flags(["--folder", "x", "--save_every", "3", "--ahead", "1"])
    assert "--save_every is 3, --ahead 1" in capsys.readouterr().err


@pytest.mark.faults
@pytest.mark.parametrize(("ahead", "save_every"), [(0, 1), (1, 1), (4, 5)])
def test_many_kills_of_either(tmp_path: Path, ahead: int, save_every: int) -> None:
    steps, chance = 200, random.Random(ahead)
    given = flags(tmp_path, steps, "--ahead", str(ahead), "--save_every", str(save_every))
    running = {role: start(tmp_path, role, *given) for role in ("actor", "learner")}
    kills = 0
    deadline = time.monotonic() + 900
    while running:
        time.sleep(0.02)
        assert time.monotonic() < deadline
        for role, process in [*running.items()]:
            code = process.poll()
            if code == 0:
                del running[role]
            elif code is not None:
                assert code == -signal.SIGKILL, (tmp_path / "said").read_text()[-3000:]
                running[role] = start(tmp_path, role, *given)
        if running and kills < 14 and steps_in(tmp_path) > kills * 12 + 5:
            victim = chance.choice(sorted(running))
            time.sleep(chance.uniform(0, 0.5))
            running[victim].kill()
            running[victim].wait()
            kills += 1
    assert kills == 14
    lines = check_whole(tmp_path, steps, ahead)
    assert mean_reward(lines[-20:]) > mean_reward(lines[:20]) + 0.2
