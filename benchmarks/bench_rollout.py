"""Rollouts from inference workers to micro-batches: penstock beside verl and TRL.

scripts/rivals rl
python benchmarks/bench_rollout.py [--rollouts 8192] [--sequences 100000] [--rivals PYTHON]

All take the same rollouts (groups of 8, lengths with a heavy tail), as lists in memory, in
processes of their own and batches of 512; reading them into memory and imports are not counted.
    penstock           RolloutWriter, a durable record for each 512; RolloutDataLoader from that
                       dataset: checked, advantages, micro-batches of at most 16,384 tokens
    penstock_list      the same loader from the list, nothing written
    verl               pad_2d_list_to_length into a DataProto, save_to_disk (a pickle, not synced);
                       load_from_disk, GRPO advantages, rearrange_micro_batches
    trl                GRPOTrainer's own scoring of a batch, with the generation replaced by the
                       rollouts: pads, rewards, advantages; then its split into steps. It stores
                       nothing, and decodes completions for its log
    latency            from the call of RolloutWriter.write_many with a group to the batch of it in
                       another process, one group every 50 ms; and from two writers
    balance            the partition over 8 and 64 ranks by 24,576 L + L^2, beside verl's; whole
                       batches over 8 ranks: tokens of ranks, the cap
"""

import argparse
import hashlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OURS = ("penstock", "penstock_list", "latency", "balance")
THEIRS = ("verl", "trl", "verl_balance")
BATCH, GROUP, CAP, MOST = 512, 8, 16_384, 8_192
Answer = dict[str, Any]
Record = dict[str, Any]


def lengths_of(count: int, seed: int = 7) -> Any:
    """Lengths of completions: half are below 300 tokens, one in a hundred is above 4,000."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(5.7, 1.15, count), 8, MOST - 512).astype(np.int64)


def make_rollouts(count: int) -> list[Record]:
    """Rollouts as an inference engine has them: lists of numbers."""
    rng = np.random.default_rng(11)
    made = []
    for k, tokens in enumerate(lengths_of(count).tolist()):
        group = k // GROUP
        prompt = np.random.default_rng([3, group]).integers(0, 50_000, 40 + group % 200)
        mask = (rng.random(tokens) < 0.9).astype(np.int64)
        mask[-1] = 1
        made.append(
            {
                "rollout_id": f"{group}/{k % GROUP}",
                "group_id": f"{group}",
                "group_size": GROUP,
                "prompt_ids": prompt.tolist(),
                "completion_ids": rng.integers(0, 50_000, tokens).tolist(),
                "completion_mask": mask.tolist(),
                "logprobs": (-rng.random(tokens)).astype(np.float32).tolist(),
                "reward": float(rng.integers(0, 5)) / 4,
                "weight_version": 0,
            }
        )
    return made


def rollouts_of(folder: Path) -> list[Record]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]


def batches_of(folder: Path) -> list[list[Record]]:
    rollouts = rollouts_of(folder)
    return [rollouts[first : first + BATCH] for first in range(0, len(rollouts), BATCH)]


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def __call__(self, stage: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = work()
        self.spent[stage] = self.spent.get(stage, 0.0) + time.perf_counter() - began
        return found


def checked(found: dict[str, float], micro_tokens: list[int]) -> Answer:
    """What a contender answers: a sum of advantages shows that all of them did the same."""
    return {**found, "most_tokens": max(micro_tokens), "micro_batches": len(micro_tokens)}


# Ours


def penstock(folder: Path) -> Answer:
    from penstock import AdvantageConfig, BalanceConfig, RolloutDataLoader, RolloutWriter

    batches, clock = batches_of(folder), Clock()
    warm_up(batches[0])
    out = Path(tempfile.mkdtemp(dir=folder)) / "dataset"
    with RolloutWriter(out) as writer:
        for batch in batches:
            clock("write", lambda: writer.write_many(batch))  # noqa: B023
        clock("write", writer.seal)
    total, tokens = 0.0, []
    loader = RolloutDataLoader(
        str(out), batch_size=BATCH, advantages=AdvantageConfig(preset="verl"),
        balance=BalanceConfig(max_tokens=CAP),
    )  # fmt: skip
    with loader:
        for _ in batches:
            batch = clock("load", lambda: loader.get_batch(BATCH))
            total += float(np.abs(batch.advantages).sum())
            tokens += [int(part.fills.sum()) for part in batch.micro_batches]
    return {**clock.spent, **checked({"advantages": total}, tokens)}


def penstock_list(folder: Path) -> Answer:
    from penstock import AdvantageConfig, BalanceConfig, RolloutDataLoader

    rollouts, clock = rollouts_of(folder), Clock()
    warm_up(rollouts[:BATCH])
    total = 0.0
    tokens: list[int] = []

    def read() -> None:
        nonlocal total
        loader = RolloutDataLoader(
            rollouts, batch_size=BATCH, advantages=AdvantageConfig(preset="verl"),
            balance=BalanceConfig(max_tokens=CAP),
        )  # fmt: skip
        with loader:
            for batch in loader:
                assert batch.advantages is not None
                total += float(np.abs(batch.advantages).sum())
                tokens.extend(int(part.fills.sum()) for part in batch.micro_batches)

    clock("load", read)
    return {**clock.spent, **checked({"advantages": total}, tokens)}


def warm_up(batch: list[Record]) -> None:
    """Link the kernels: once for a machine they are compiled, once for a process linked."""
    from penstock import AdvantageConfig, BalanceConfig, RolloutDataLoader

    with RolloutDataLoader(
        batch, batch_size=BATCH, advantages=AdvantageConfig(preset="verl"),
        balance=BalanceConfig(max_tokens=CAP),
    ) as loader:  # fmt: skip
        loader.get_batch(BATCH)


def latency(folder: Path) -> Answer:
    """A loader here, writers in processes of their own: an id has the time of its writing."""
    found = {}
    for writers in (1, 2):
        out = Path(tempfile.mkdtemp(dir=folder)) / "dataset"
        groups = int(os.environ.get("BENCH_GROUPS", "200"))
        command = [sys.executable, str(Path(__file__).resolve()), "--folder", str(out), "--job"]
        running = [
            subprocess.Popen(
                [*command, "write_groups", "--writer", f"{k}", "--groups", f"{groups}"]
            )
            for k in range(writers)
        ]
        took = _follow(out, groups * writers)
        for process in running:
            assert process.wait(60) == 0
        found[f"{writers} writers" if writers > 1 else "1 writer"] = {
            "median_s": statistics.median(took),
            "p99_s": sorted(took)[int(0.99 * len(took))],
            "worst_s": max(took),
            "groups": len(took),
        }
    return found


def _follow(out: Path, groups: int) -> list[float]:
    from penstock import LoaderRun, RolloutDataLoader

    took = []
    with RolloutDataLoader(str(out), batch_size=GROUP, run=LoaderRun(wait_s=60)) as loader:
        for _ in range(groups):
            batch = loader.get_batch(GROUP)
            now = time.monotonic_ns()
            took.append((now - int(batch.rollout_ids[0].split("/")[2])) / 1e9)
    return took[5:]  # the first are those of a process that starts


def write_groups(out: Path, writer_name: str, groups: int) -> Answer:
    from penstock import RolloutWriter

    made = make_rollouts(GROUP)
    with RolloutWriter(out) as writer:
        for number in range(groups):
            time.sleep(0.05)
            began = time.monotonic_ns()
            group = f"{writer_name}-{number}"
            writer.write_many(
                [
                    one | {"rollout_id": f"{group}/{k}/{began}", "group_id": group}
                    for k, one in enumerate(made)
                ]
            )
    return {}


def balance(folder: Path) -> Answer:
    from penstock import BalanceConfig, balance
    from penstock.supply.balance import partition

    about = json.loads((folder / "balance.json").read_text())
    costs = np.array(about["costs"])
    partition(costs[:100], 8)  # links the kernel
    found: Answer = {"partition": {}, "ranks": {}}
    for parts in about["parts"]:
        began = time.perf_counter()
        made = partition(costs, parts)
        spent = time.perf_counter() - began
        sums = np.bincount(made, costs, parts)
        found["partition"][str(parts)] = {"wall_s": spent, "makespan": int(sums.max())}
    over = 0
    for count in (BATCH, 8 * BATCH, len(costs)):
        worst = {"tokens_apart": 0.0, "work_above_mean": 0.0, "tokens_apart_by_tokens": 0.0}
        for seed in range(1 if count == len(costs) else 50):
            lengths = lengths_of(count, seed)
            for quadratic in (1, 0):
                config = BalanceConfig(max_tokens=CAP, quadratic=quadratic)
                shared = balance(lengths, 8, config)
                tokens = np.bincount(shared.rank, lengths, 8)
                work = np.bincount(shared.rank, config.costs(lengths), 8)
                apart = float(tokens.max() / tokens.min() - 1)
                name = "tokens_apart" if quadratic else "tokens_apart_by_tokens"
                worst[name] = max(worst[name], apart)
                above = float(work.max() / work.mean() - 1)
                worst["work_above_mean"] = max(worst["work_above_mean"], above)
                places = shared.rank.astype(np.int64) * shared.num_micro + shared.micro
                over += int((np.bincount(places, lengths) > CAP).sum())
        found["ranks"][str(count)] = worst
    return {**found, "over_cap": over}


# Theirs, in .venv-rivals/rl


def verl(folder: Path) -> Answer:
    torch: Any = importlib.import_module("torch")
    protocol: Any = importlib.import_module("verl.protocol")
    algorithms: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    functions: Any = importlib.import_module("verl.utils.torch_functional")
    balancing: Any = importlib.import_module("verl.utils.seqlen_balancing")
    batches, clock = batches_of(folder), Clock()
    out = Path(tempfile.mkdtemp(dir=folder))

    def write(number: int, batch: list[Record]) -> None:
        def padded(name: str, value: float) -> Any:
            return functions.pad_2d_list_to_length([one[name] for one in batch], value)

        prompts = functions.pad_2d_list_to_length([one["prompt_ids"][::-1] for one in batch], 0)
        sizes = torch.tensor([len(one["prompt_ids"]) for one in batch])
        tokens = torch.tensor([len(one["completion_ids"]) for one in batch])
        responses = padded("completion_ids", 0)
        mask = padded("completion_mask", 0)
        width, more = prompts.shape[1], responses.shape[1]
        attended = torch.cat(
            [
                torch.arange(width)[None].flip(1) < sizes[:, None],
                torch.arange(more)[None] < tokens[:, None],
            ],
            dim=1,
        )
        rewards = torch.zeros(responses.shape)
        last = (mask * torch.arange(1, more + 1)).argmax(1)
        rewards[torch.arange(len(batch)), last] = torch.tensor([one["reward"] for one in batch])
        data = protocol.DataProto.from_dict(
            tensors={
                "prompts": prompts.flip(1), "responses": responses, "response_mask": mask,
                "input_ids": torch.cat([prompts.flip(1), responses], dim=1),
                "attention_mask": attended.long(), "rollout_log_probs": padded("logprobs", 0.0),
                "token_level_rewards": rewards,
            },
            non_tensors={"uid": np.array([one["group_id"] for one in batch], dtype=object)},
        )  # fmt: skip
        data.save_to_disk(str(out / f"{number}.pkl"))

    def load(number: int) -> Any:
        data = protocol.DataProto.load_from_disk(str(out / f"{number}.pkl"))
        advantages, returns = algorithms.compute_grpo_outcome_advantage(
            data.batch["token_level_rewards"], data.batch["response_mask"],
            data.non_tensor_batch["uid"],
        )  # fmt: skip
        data.batch["advantages"], data.batch["returns"] = advantages, returns
        parts, _ = balancing.rearrange_micro_batches(data.batch, max_token_len=CAP)
        return advantages, parts

    for number, batch in enumerate(batches):
        clock("write", lambda: write(number, batch))  # noqa: B023
    total, micro = 0.0, []
    for number in range(len(batches)):
        advantages, parts = clock("load", lambda: load(number))  # noqa: B023
        total += float(advantages.abs().sum())
        micro += [int(part["attention_mask"].sum()) for part in parts]
    return {**clock.spent, **checked({"advantages": total}, micro)}


def trl(folder: Path) -> Answer:
    library: Any = importlib.import_module("trl")
    utils: Any = importlib.import_module("trl.trainer.utils")
    hub: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    datasets: Any = importlib.import_module("datasets")
    torch: Any = importlib.import_module("torch")
    words = {f"w{k}": k for k in range(50_000)} | {"<pad>": 50_000, "<eos>": 50_001}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = hub.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"
    )
    model = hub.LlamaForCausalLM(
        hub.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1,
        )
    )  # fmt: skip
    now = SimpleNamespace(batch=[])

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [one["reward"] for one in now.batch]

    steps = 8
    trainer = library.GRPOTrainer(
        model=model, reward_funcs=reward, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1"] * BATCH}),
        args=library.GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=BATCH // steps,
            steps_per_generation=steps, gradient_accumulation_steps=steps, num_generations=GROUP,
            use_cpu=True, bf16=False, report_to="none",
        ),
    )  # fmt: skip

    def generate(prompts: list[str]) -> Any:
        batch = now.batch
        ids, made = [one["prompt_ids"] for one in batch], [one["completion_ids"] for one in batch]
        texts = ["w1"] * len(batch)
        masks = [one["completion_mask"] for one in batch]
        return ids, made, masks, texts, None, {}, None, None

    trainer._generate = generate
    trainer.model.train()
    batches, clock = batches_of(folder), Clock()
    inputs = [{"prompt": "w1"} for _ in range(BATCH)]

    def load() -> Any:
        with torch.no_grad():
            made = trainer._generate_and_score_completions(inputs)
        made = utils.shuffle_sequence_dict(made)
        return utils.split_tensor_dict(made, steps)

    total, micro = 0.0, []
    for batch in batches:
        now.batch = batch
        for part in clock("load", load):
            micro.append(int(part["prompt_mask"].sum() + part["completion_mask"].sum()))
            trained = (part["completion_mask"] * part["tool_mask"]).sum(1)
            total += float((part["advantages"].abs() * trained).sum())
    return {**clock.spent, **checked({"advantages": total}, micro)}


def verl_balance(folder: Path) -> Answer:
    balancing: Any = importlib.import_module("verl.utils.seqlen_balancing")
    about = json.loads((folder / "balance.json").read_text())
    costs, found = about["costs"], {}
    for parts in about["parts"]:
        began = time.perf_counter()
        made = balancing.get_seqlen_balanced_partitions(costs, parts, equal_size=False)
        spent = time.perf_counter() - began
        makespan = max(sum(costs[item] for item in part) for part in made)
        found[str(parts)] = {"wall_s": spent, "makespan": makespan}
    return {"partition": found}


# All of them


def prepare(folder: Path, rollouts: int, sequences: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rollouts.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(one) + "\n" for one in make_rollouts(rollouts)))
    lengths = lengths_of(sequences)
    costs = (24_576 * lengths + lengths**2).tolist()
    (folder / "balance.json").write_text(json.dumps({"costs": costs, "parts": [8, 64]}))


def show(found: dict[str, Answer], rollouts: int) -> None:
    from measure import table

    lines = [["", "written/s", "loaded/s", "both/s", "x verl", "most tokens", "micro-batches"]]
    theirs = found.get("verl", {})
    slowest = theirs.get("write", 0) + theirs.get("load", 0)
    for name in ("penstock", "penstock_list", "verl", "trl"):
        if (one := found.get(name)) is None:
            continue
        both = one.get("write", 0.0) + one["load"]
        lines.append(
            [name, f"{rollouts / one['write']:,.0f}" if "write" in one else "",
             f"{rollouts / one['load']:,.0f}",
             f"{rollouts / both:,.0f}" if "write" in one else "",
             f"{slowest / both:.1f}" if slowest and "write" in one else "",
             f"{one['most_tokens']:,}", f"{one['micro_batches']:,}"]
        )  # fmt: skip
    table(f"{rollouts:,} rollouts in batches of {BATCH}, micro-batches of {CAP:,} tokens", lines)
    if delays := found.get("latency"):
        lines = [["write to batch", "median", "99%", "worst", "groups"]]
        for name, one in delays.items():
            times = [f"{1000 * one[key]:,.0f} ms" for key in ("median_s", "p99_s", "worst_s")]
            lines.append([name, *times, f"{one['groups']}"])
        table("latency on a directory", lines)
    ours, others = found.get("balance"), found.get("verl_balance")
    if ours and others:
        lines = [["ranks", "ours", "verl", "x", "our makespan / verl's"]]
        for parts, mine in ours["partition"].items():
            other = others["partition"][parts]
            lines.append(
                [parts, f"{mine['wall_s']:.3f} s", f"{other['wall_s']:.2f} s",
                 f"{other['wall_s'] / mine['wall_s']:,.0f}",
                 f"{mine['makespan'] / other['makespan']:.7f}"]
            )  # fmt: skip
        table("partition", lines)
    if ours:
        lines = [
            [
                "sequences",
                "dearest rank above the mean",
                "tokens of ranks apart",
                "with quadratic=0",
            ]
        ]
        for count, one in ours["ranks"].items():
            keys = ("work_above_mean", "tokens_apart", "tokens_apart_by_tokens")
            lines.append([f"{int(count):,}", *(f"{100 * one[key]:.3f}%" for key in keys)])
        table(f"8 ranks; micro-batches over the cap: {ours['over_cap']}", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=200, help="of the latency, by each writer")
    parser.add_argument("--contenders", nargs="+", default=[*OURS, *THEIRS])
    parser.add_argument("--rivals", default=str(ROOT / ".venv-rivals" / "rl" / "bin" / "python"))
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--keep", action="store_true", help="write results/rollout.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--writer", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job == "write_groups":
        write_groups(given.folder, given.writer, given.groups)
        return
    if given.job:
        print(json.dumps(globals()[given.job](given.folder)))
        return
    from measure import DATA, keep, warm

    if given.rollouts % BATCH:
        sys.exit(f"--rollouts is {given.rollouts}: give a multiple of {BATCH}")
    folder = DATA / f"rollout_{given.rollouts}"
    prepare(folder, given.rollouts, given.sequences)
    load = os.getloadavg()[0]
    found: dict[str, Answer] = {}
    for number in range(given.rounds):
        for name in given.contenders:
            if number and name in ("latency", "balance", "verl_balance"):
                continue
            one = run_one(name, given, folder)
            before = found.get(name)
            if before is None or one.get("load", 0) + one.get("write", 0) < before.get(
                "load", 0
            ) + before.get("write", 0):
                found[name] = one
    for left in folder.glob("tmp*"):
        shutil.rmtree(left)
    show(found, given.rollouts)
    sums = {name: round(one["advantages"], 2) for name, one in found.items() if "advantages" in one}
    print(f"\nsums of |advantages|: {sums}; load {load:.1f} when it began")
    if given.keep:
        about = {"rollouts": given.rollouts, "sequences": given.sequences, "load": load}
        hashed = {
            "sha256": warm(folder / "rollouts.jsonl"),
            "lengths_sha256": hashlib.sha256((folder / "balance.json").read_bytes()).hexdigest(),
        }
        keep("rollout", {**about, **hashed, "runs": found})


def run_one(name: str, given: argparse.Namespace, folder: Path) -> Answer:
    python = sys.executable if name in OURS else given.rivals
    command = [python, str(Path(__file__).resolve()), "--job", name, "--folder", str(folder)]
    quiet = {
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "BENCH_GROUPS": f"{given.groups}",
    }  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
