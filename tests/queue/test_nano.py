"""The document's steps, followed by a new user in a copy of examples/nano; and its own example."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock import ConsumerConfig, DatasetConsumer

pytestmark = pytest.mark.torch
NANO = Path(__file__).parents[2] / "examples" / "nano"
PROVIDER = """
from typing import Dict

import numpy as np

from penstock import DataProviderBase


class MyProvider(DataProviderBase):
    vocab_size = 27
    mask_token_id = 26

    def build_meta(self) -> Dict:
        return {
            "training_type": "MLM",
            "vocab_size": self.vocab_size,
            "mask_token_id": self.mask_token_id,
            "batch_schema": [
                {"name": "x", "dtype": "int64", "shape": [self.block_size], "role": "input"},
                {"name": "y", "dtype": "int64", "shape": [self.block_size], "role": "target"},
            ],
        }

    def sample_batch(self, split, rng):
        first = rng.integers(0, 26, (self.batch_size, 1))
        rows = (first + np.arange(self.block_size)) % 26  # the alphabet, from anywhere on
        hidden = rng.random(rows.shape) < globals()["mask_probability"]
        masked_inputs = np.where(hidden, self.mask_token_id, rows)
        reconstruction_targets = np.where(hidden, rows, globals()["ignore_index"])
        return {"x": masked_inputs, "y": reconstruction_targets}
"""
CONFIG = """
dataset = 'my_dataset'
batch_size = 8
block_size = 32
mask_probability = 0.3
ignore_index = -1

max_iters = 40
eval_interval = 40
eval_iters = 4
save_interval = 10
n_layer = 2
n_embd = 32
"""


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(NANO, folder / "nano", ignore=shutil.ignore_patterns("queue")))


def run(root: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def prepared(root: Path, config: str, *command: str) -> Iterator["subprocess.Popen[str]"]:
    """`python prepare.py` beside whatever is done with its batches."""
    with (root / "prepare.log").open("w") as log:
        provider = subprocess.Popen(
            [sys.executable, *(command or ("prepare.py",)), config], cwd=root, stdout=log,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not list(root.glob("data/*/queue/meta.json")):
            assert provider.poll() is None, (root / "prepare.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield provider
    finally:
        provider.send_signal(signal.SIGTERM)
        code = provider.wait(timeout=60)
    said = (root / "prepare.log").read_text()
    assert code == 128 + signal.SIGTERM, said
    assert "batches made" in said
    assert "the same command resumes from here" in said


def held_out(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", said)]


def test_the_five_steps(tmp_path: Path) -> None:
    root = copied(tmp_path)
    # steps 1 and 2: a provider, in its place
    (root / "data" / "my_dataset").mkdir()
    (root / "data" / "my_dataset" / "prepare_streaming.py").write_text(PROVIDER)
    # step 3: a config
    (root / "config" / "my_config.py").write_text(CONFIG)
    assert "sufficient" in run(root, "config/validator.py", "config/my_config.py")
    # the trainer first: it fails loudly
    early = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "train", "config/my_config.py"], cwd=root,
        env=os.environ, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert early.returncode == 1
    assert "Queue directory not found" in early.stderr
    assert "prepare.py" in early.stderr
    # step 4: producer and trainer
    with prepared(root, "config/my_config.py"):
        said = run(root, "train.py", "config/my_config.py")
    (loss,) = held_out(said)
    assert loss < 2.5  # log(26) is 3.26
    # step 5: meta and schema
    folder = root / "data" / "my_dataset"
    with DatasetConsumer(folder, ConsumerConfig(delete="checkpointed")) as consumer:
        assert consumer.meta["vocab_size"] == 27
        schema = consumer.schema("train")
        assert schema is not None
        assert [field["role"] for field in schema] == ["input", "target"]
        assert consumer.position("train") == 40  # what is in the checkpoint is not given again
        assert sorted(folder.glob("queue/train/*.safetensors"))[0].stem == f"{40:020d}"
    # a changed config is refused, with the command that purges
    (root / "config" / "my_config.py").write_text(CONFIG.replace("0.3", "0.4"))
    stale = subprocess.run(
        [sys.executable, "prepare.py", "config/my_config.py"], cwd=root, env=os.environ,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert stale.returncode == 1
    assert "mask_probability: 0.3 before, 0.4 now" in stale.stderr
    assert "penstock prepare config/my_config.py --purge" in stale.stderr


def test_the_diffusion_model_learns_and_writes(tmp_path: Path) -> None:
    said = trained(copied(tmp_path), 60)[0]
    entropy = float(re.findall(r"unigram entropy ([\d.]+)", said)[0])
    assert held_out(said)[-1] < entropy
    assert len(re.findall(r"^sample: ", said, re.MULTILINE)) == 3


@pytest.mark.faults
def test_the_diffusion_model_resumes(tmp_path: Path) -> None:
    first, second, third = trained(copied(tmp_path), 30, 75, 400)
    assert "step 1: " in first
    assert "step 1: " not in second
    assert "step 50: " in second
    assert "step 50: " not in third
    assert held_out(third)[-1] < held_out(second)[-1] < held_out(first)[-1]
    assert held_out(third)[-1] < 1.2
    print(third)


def trained(root: Path, *iterations: int) -> list[str]:
    """What the trainer says, of runs that each go further."""
    config, said = root / "config" / "train_char_diffusion.py", []
    text = config.read_text().replace("save_interval = 100", "save_interval = 15")
    with prepared(root, "config/train_char_diffusion.py", "-m", "penstock.cli", "prepare"):
        for number in iterations:
            config.write_text(text.replace("max_iters = 400", f"max_iters = {number}"))
            said.append(run(root, "-m", "penstock.cli", "train", "config/train_char_diffusion.py"))
    return said
