"""Random batches of rollouts, and our advantages of them beside those of other frameworks.

usage: oracles.py draw COUNT BATCHES.json [small]
       oracles.py compare BATCHES.json ANSWERS.json
       oracles.py record BATCHES.json ANSWERS.json EXPECTED.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from penstock.rollout.advantages import AdvantageConfig, Advantages, Scored, compute_advantages
from penstock.supply.balance import partition

Batch = dict[str, Any]


def draw(seed: int, *, most_rollouts: int = 24, most_tokens: int = 12) -> Batch:
    """A batch: every third one even (groups of one size, side by side), rewards of few kinds."""
    rng = np.random.default_rng([2026, seed])
    even = seed % 3 == 0
    if even:
        size = int(rng.integers(2, 7))
        sizes = [size] * int(rng.integers(1, max(2, most_rollouts // size)))
    else:
        sizes = rng.integers(1, 7, int(rng.integers(1, 6))).tolist()
    groups = [f"group-{k}" for k, size in enumerate(sizes) for _ in range(size)]
    if not even:
        rng.shuffle(groups)
    count = len(groups)
    # eighths, which float32 holds exactly: what differs is the formula
    kinds = [rng.integers(0, 2, count) * 8, rng.integers(-32, 33, count), np.full(count, 8)]
    rewards = kinds[int(rng.choice(3, p=[0.4, 0.5, 0.1]))] / 8
    masks, values = [], []
    for _ in range(count):
        mask = (rng.random(int(rng.integers(2, most_tokens))) < 0.7).astype(int)
        mask[rng.integers(len(mask))] = 1
        masks.append(mask.tolist())
        values.append((rng.integers(-16, 17, len(mask)) / 8).tolist())
    return {
        "rewards": rewards.tolist(),
        "groups": groups,
        "masks": masks,
        "values": values,
        "gamma": float(rng.choice([1.0, 0.9])),
        "lam": float(rng.choice([1.0, 0.95, 0.0])),
        "even": even,
        **draw_costs(rng),
    }


def draw_costs(rng: np.random.Generator) -> dict[str, Any]:
    """What is to be shared out, among how many: few different numbers, or many."""
    parts, equal = int(rng.integers(1, 9)), bool(rng.integers(2))
    count = int(rng.integers(parts, 49))
    costs = rng.integers(1, [4, 30, 100_000][int(rng.integers(3))], count - equal * (count % parts))
    return {"costs": costs.tolist(), "parts": parts, "equal": equal}


def scored(batch: Batch) -> Scored:
    return Scored.of(batch["rewards"], batch["groups"], batch["masks"], values=batch["values"])


def ours(batch: Batch, name: str) -> Advantages:
    """What stands for "framework/method" of an answer."""
    preset, _, method = name.removesuffix("_batch").partition("/")
    config = AdvantageConfig(
        method=method, preset=preset, gamma=batch["gamma"], lam=batch["lam"],
        scale="batch" if name.endswith("_batch") else None,
    )  # fmt: skip
    return compute_advantages(scored(batch), config)


def farthest(batch: Batch, answer: dict[str, list[list[float]]]) -> dict[str, float]:
    """How far we are from each answer, at sampled tokens: the most, absolute or relative; of a
    partition, how much dearer our dearest part is."""
    mask, found = scored(batch).mask, {}
    for name, rows in answer.items():
        if name == "verl/partition":
            mine = partition(batch["costs"], batch["parts"], equal_size=batch["equal"])
            costs = np.array(batch["costs"])
            theirs = max(costs[np.array(part, np.int64)].sum() for part in rows)
            found[name] = float(np.bincount(mine, costs).max() / theirs - 1)
            continue
        made = ours(batch, name.removesuffix("/returns"))
        tokens = made.returns if name.endswith("/returns") else made.advantages
        told = np.concatenate([np.asarray(row, np.float64) for row in rows])
        away = np.abs(tokens - told) / np.maximum(1.0, np.abs(told))
        found[name] = float(away[mask].max())
    return found


def _rounded(answer: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    return {
        name: [[round(value, 8) for value in row] for row in rows] for name, rows in answer.items()
    }


def main() -> None:
    if sys.argv[1] == "draw":
        most = {"most_rollouts": 8, "most_tokens": 5} if "small" in sys.argv else {}
        batches = [draw(seed, **most) for seed in range(int(sys.argv[2]))]
        Path(sys.argv[3]).write_text(json.dumps(batches))
        return
    batches, answers = (json.loads(Path(name).read_text()) for name in sys.argv[2:4])
    if sys.argv[1] == "record":
        lines = [
            json.dumps({"batch": batch, "answer": _rounded(answer)}, separators=(",", ":"))
            for batch, answer in zip(batches, answers, strict=True)
        ]
        Path(sys.argv[4]).write_text("\n".join(lines) + "\n")
        return
    worst: dict[str, float] = {}
    times: dict[str, int] = {}
    for batch, answer in zip(batches, answers, strict=True):
        for name, away in farthest(batch, answer).items():
            worst[name] = max(worst.get(name, 0.0), away)
            times[name] = times.get(name, 0) + 1
    for name in sorted(worst):
        print(f"{name:34} {times[name]:6} batches, at most {worst[name]:.1e} away")
    if max(worst.values()) > 1e-6:
        raise SystemExit("six digits differ")


if __name__ == "__main__":
    main()
