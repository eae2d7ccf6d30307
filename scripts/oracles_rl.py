"""What TRL, verl and OpenRLHF say of the advantages of given rollouts, by their own functions.

Runs in the environment of `scripts/oracles_rl`, which has the frameworks and not penstock.
usage: oracles_rl.py BATCHES.json ANSWERS.json

BATCHES is a list of {rewards, groups, masks, values, gamma, lam, even} with {costs, parts, equal};
ANSWERS is a list of {"framework/method": advantages of the tokens of each rollout}, with
"…/returns" where there are some, and "verl/partition", the items of each part. TRL and OpenRLHF
know groups of one size only, side by side: they answer `even` batches.
"""

import importlib.abc
import importlib.machinery
import json
import logging
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

Batch = dict[str, Any]
Answer = dict[str, list[list[float]]]


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that OpenRLHF imports at its top and that need CUDA."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in ("flash_attn", "deepspeed", "vllm", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Rows of different lengths as one tensor, zeros behind the shorter ones."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *([0.0] * (most - len(row)))] for row in rows], dtype=torch.float64)


def rows_of(found: torch.Tensor, masks: list[list[int]]) -> list[list[float]]:
    """The lines of a tensor, as long as the masks."""
    return [found[k, : len(mask)].tolist() for k, mask in enumerate(masks)]


def on_last(rewards: list[float], masks: list[list[int]]) -> torch.Tensor:
    """Rewards at the last sampled token of each rollout."""
    rows = [[0.0] * len(mask) for mask in masks]
    for row, mask, reward in zip(rows, masks, rewards, strict=True):
        row[max(t for t, sampled in enumerate(mask) if sampled)] = reward
    return padded(rows)


def ask_verl(batch: Batch) -> Answer:
    verl = import_module("verl.trainer.ppo.core_algos")
    masks = batch["masks"]
    mask, rewards = padded(masks), on_last(batch["rewards"], masks)
    index = np.array(batch["groups"], dtype=object)
    config = types.SimpleNamespace(gamma=batch["gamma"])
    found = {
        "grpo": verl.compute_grpo_outcome_advantage(rewards.clone(), mask, index),
        "dr_grpo": verl.compute_grpo_outcome_advantage(
            rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False
        ),
        "rloo": verl.compute_rloo_outcome_advantage(rewards.clone(), mask, index),
        "reinforce++": verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards.clone(), mask, config=config
        ),
        "reinforce++_baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards.clone(), mask, index
        ),
        "gae": verl.compute_gae_advantage_return(
            rewards, padded(batch["values"]), mask, batch["gamma"], batch["lam"]
        ),
    }
    share = import_module("verl.utils.seqlen_balancing").get_seqlen_balanced_partitions
    answers: Answer = {
        "verl/partition": share(batch["costs"], batch["parts"], equal_size=batch["equal"])
    }
    for name, (advantages, returns) in found.items():
        answers[f"verl/{name}"] = rows_of(advantages, masks)
        if name in ("gae", "reinforce++"):
            answers[f"verl/{name}/returns"] = rows_of(returns, masks)
    return answers


def ask_openrlhf(batch: Batch) -> Answer:
    made_of = import_module("openrlhf.trainer.ppo_utils.experience").Experience
    makes = import_module("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    masks, size = batch["masks"], batch["groups"].count(batch["groups"][0])
    answers: Answer = {}
    for name, estimator in (
        ("grpo", "group_norm"), ("dr_grpo", "dr_grpo"), ("rloo", "rloo"),
        ("reinforce++", "reinforce"), ("reinforce++_baseline", "reinforce_baseline"),
        ("gae", "gae"),
    ):  # fmt: skip
        if size == 1 and estimator in ("group_norm", "rloo"):
            continue  # not a number there
        maker = makes.__new__(makes)
        advantage = types.SimpleNamespace(
            estimator=estimator, gamma=batch["gamma"], lambd=batch["lam"], no_std_norm=False
        )
        arguments = MagicMock()
        arguments.algo.advantage = advantage
        arguments.rollout.n_samples_per_prompt = size
        arguments.reward.clip_range = None
        arguments.reward.overlong_buffer_len = None
        arguments.reward.stop_properly_penalty_coef = None
        maker.strategy = types.SimpleNamespace(args=arguments)
        maker.advantage_estimator = estimator
        maker.kl_ctl = types.SimpleNamespace(value=0.0)
        mask = padded(masks)
        experience = made_of(
            index=list(range(len(masks))),
            rewards=torch.tensor(batch["rewards"], dtype=torch.float64),
            values=padded(batch["values"]), kl=torch.zeros_like(mask), action_mask=mask.bool(),
        )  # fmt: skip
        (made,) = maker.compute_advantages_and_returns([experience])
        answers[f"openrlhf/{name}"] = rows_of(made.advantages, masks)
        if name in ("gae", "reinforce++"):
            answers[f"openrlhf/{name}/returns"] = rows_of(made.returns, masks)
    return answers


class Trl:
    """Trainers of TRL around a model of two tokens; all but the generation is theirs."""

    def __init__(self, folder: Path) -> None:
        trl, transformers = import_module("trl"), import_module("transformers")
        tokenizers = import_module("tokenizers")
        words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a")
        plain = tokenizers.Tokenizer(words)
        plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"
        )
        config = transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=64,
        )  # fmt: skip
        self.rewards: list[float] = []
        data = import_module("datasets").Dataset.from_dict({"prompt": ["a"] * 64})

        def reward(completions: list[str], **_: Any) -> list[float]:
            return self.rewards

        def trainer(kind: Any, settings: Any, **options: Any) -> Any:
            made = kind(
                model=transformers.LlamaForCausalLM(config), reward_funcs=reward,
                processing_class=tokenizer, train_dataset=data,
                args=settings(
                    output_dir=str(folder), per_device_train_batch_size=4, num_generations=4,
                    use_cpu=True, bf16=False, report_to="none", max_completion_length=4, **options,
                ),
            )  # fmt: skip
            is_grpo = kind is trl.GRPOTrainer

            def generate(prompts: list[str]) -> Any:
                ids, done = [[2]] * len(prompts), [[2, 1]] * len(prompts)
                if is_grpo:
                    return ids, done, None, ["a"] * len(prompts), None, {}, None, None
                return ids, done, ["a"] * len(prompts)

            made._generate = generate
            return made

        self.trainers = {
            "grpo": trainer(trl.GRPOTrainer, trl.GRPOConfig),
            "grpo_batch": trainer(trl.GRPOTrainer, trl.GRPOConfig, scale_rewards="batch"),
            "dr_grpo": trainer(trl.GRPOTrainer, trl.GRPOConfig, scale_rewards="none"),
            "rloo": trainer(trl.RLOOTrainer, trl.RLOOConfig, beta=0.0),
        }

    def ask(self, batch: Batch) -> Answer:
        """One advantage for each rollout: TRL spreads it over tokens in its loss.

        It is asked in float64, as the others are. In float32 its own formula is up to 1.1e-6 away
        from itself in float64 (batch 2775), and rounding would be taken for another formula.
        """
        size = batch["groups"].count(batch["groups"][0])
        self.rewards = batch["rewards"]
        answers: Answer = {}
        for name, trainer in self.trainers.items():
            trainer.model.train()
            trainer.num_generations = size
            torch.set_default_dtype(torch.float64)
            try:
                with torch.no_grad():
                    made = trainer._generate_and_score_completions(
                        [{"prompt": "a"} for _ in batch["rewards"]]
                    )
            finally:
                torch.set_default_dtype(torch.float32)
            answers[f"trl/{name}"] = [
                [advantage if sampled else 0.0 for sampled in mask]
                for advantage, mask in zip(made["advantages"].tolist(), batch["masks"], strict=True)
            ]
        return answers


def main(batches: Path, answers: Path) -> None:
    logging.disable(logging.WARNING)  # OpenRLHF repeats for each batch what gamma it takes
    trl = Trl(answers.parent / "trl")
    sys.meta_path.append(Stubs())  # after transformers, which looks for them
    found = []
    for batch in json.loads(batches.read_text()):
        answer = ask_verl(batch)
        if batch["even"]:
            answer |= ask_openrlhf(batch)
            answer |= trl.ask(batch)
        found.append(answer)
    answers.write_text(json.dumps(found))
    print(f"{len(found)} batches, {sum(map(len, found))} answers")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
