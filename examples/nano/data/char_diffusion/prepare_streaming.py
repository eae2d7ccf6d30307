"""Masked diffusion on the characters of input.txt.

In:    input.txt; from the shared config noise, ignore_index, stages, or one mask_probability
Out:   x with characters hidden, y with the hidden ones, and what each is worth in the loss
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import DataProviderBase, DiffusionConfig, SharedConfig, corrupt

HELD_OUT = 0.1


class CharDiffusionProvider(DataProviderBase):
    """Rows of characters from anywhere in the text, some of them hidden."""

    def __init__(self, config: SharedConfig) -> None:
        super().__init__(config)
        text = (self.data_dir / "input.txt").read_text("utf-8")
        self.input_hash = hashlib.sha256(text.encode()).hexdigest()
        self.chars = sorted(set(text))
        self.vocab_size = len(self.chars) + 1
        self.mask_token_id = len(self.chars)
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.searchsorted([ord(char) for char in self.chars], points)
        cut = int(len(ids) * (1 - HELD_OUT))
        self.ids = {"train": ids[:cut], "val": ids[cut:]}
        names = ("noise", "eps", "mask_probability", "ignore_index")
        given = {name: config[name] for name in names if name in config}
        stages = config.get("stages", ())
        self.noise = {
            "train": DiffusionConfig(mask_token_id=self.mask_token_id, stages=stages, **given),
            "val": DiffusionConfig(mask_token_id=self.mask_token_id, **given),
        }

    def build_meta(self) -> dict[str, Any]:
        row = [self.block_size]
        schema: list[dict[str, Any]] = [
            {"name": "x", "dtype": "int64", "shape": row, "role": "input"},
            {"name": "y", "dtype": "int64", "shape": row, "role": "target"},
        ]
        if self.config.get("mask_probability") is None:
            schema.append({"name": "weight", "dtype": "float32", "shape": row, "role": "weight"})
        return {
            "training_type": "MLM",
            "vocab_size": self.vocab_size,
            "mask_token_id": self.mask_token_id,
            "ignore_index": self.noise["train"].ignore_index,
            "chars": self.chars,
            "input_sha256": self.input_hash,
            "unigram_entropy": round(unigram_entropy(self.ids["val"]), 4),
            "batch_schema": schema,
        }

    def sample_batch(self, split: str, rng: np.random.Generator) -> Mapping[str, Any]:
        ids = self.ids[split]
        starts = rng.integers(0, len(ids) - self.block_size + 1, self.batch_size)
        rows = ids[starts[:, None] + np.arange(self.block_size)].astype(np.int64)
        seed = int(rng.integers(1 << 63))
        hidden = corrupt(rows, self.noise[split], seed=seed, batch=self.batch_number)
        batch = {"x": hidden.input_ids, "y": hidden.labels, "weight": hidden.weights}
        if self.config.get("mask_probability") is not None:
            del batch["weight"]
        return batch


def unigram_entropy(ids: npt.NDArray[Any]) -> float:
    """The loss, in nats a character, of knowing how frequent each character is and no more."""
    counts = np.bincount(ids)
    shares = counts[counts > 0] / len(ids)
    return float(-(shares * np.log(shares)).sum())
