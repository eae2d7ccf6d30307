"""A shard is decoded once in a pass: it is held from its first document to its last."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import PlanConfig, PretrainDataLoader
from penstock.tokenize.token_file import Tokens

from .datasets import made_documents
from .memory_source import MemorySource
from .nested import nested


class CountingSource(MemorySource):
    """Says which of its shards were decoded, and which were forgotten."""

    def __init__(self, name: str, shards: list[list[list[int]]]) -> None:
        super().__init__(name, shards, None, [1])
        self.decoded: Counter[int] = Counter()

    def decode(self, shard: int) -> Tokens:
        self.decoded[shard] += 1
        return super().decode(shard)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    pool = draw(st.sampled_from([1, 4, 30, 200]))
    return {
        "seed": draw(st.integers(0, 1000)),
        "shards": draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),
        "rows": draw(st.integers(1, 20)),
        "pack": draw(st.sampled_from(["pad", "concat", "bestfit", "bestfit"])),
        "plan": PlanConfig(
            pool_size=pool,
            refill_threshold=draw(st.integers(0, pool - 1)),
            buffer_pieces=draw(st.sampled_from([1, 6, 100])),
        ),
        "chunk_size": draw(st.sampled_from([5, 48])),
        "batch_size": draw(st.sampled_from([1, 2, 8])),
    }


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_a_shard_is_decoded_once_in_a_pass(case: dict[str, Any]) -> None:
    random = np.random.default_rng(case["seed"])
    sources = [
        CountingSource(
            f"s{k}", [made_documents(random, case["rows"], first=50 * n) for n in range(shards)]
        )
        for k, shards in enumerate(case["shards"])
    ]
    options = {name: case[name] for name in ("pack", "plan", "chunk_size", "batch_size")}
    with PretrainDataLoader(
        {source.name: source for source in sources}, **nested(**options)
    ) as loader:
        for _ in loader:
            pass
    for source, shards in zip(sources, case["shards"], strict=True):
        assert source.decoded == dict.fromkeys(range(shards), 1)


@pytest.mark.parametrize("pack", ["pad", "concat", "bestfit"])
def test_a_shard_is_let_go_after_its_last_document(pack: str) -> None:
    """Of 60 shards the pool has two or three, and the next ones are on their way."""
    random = np.random.default_rng(1)
    source = CountingSource("a", [made_documents(random, 20, first=50 * n) for n in range(60)])
    plan = PlanConfig(pool_size=40, refill_threshold=20, buffer_pieces=6)
    held, decoded = [], 0
    with PretrainDataLoader(
        {"a": source}, pack=pack, plan=plan, chunk_size=48, batch_size=4
    ) as loader:
        for _ in loader:
            held.append(loader._engine.window.held)
            decoded = max(decoded, loader._engine.window.held_bytes)
    assert max(held) <= 10
    size = max(source.decode(shard).nbytes for shard in range(60))
    assert decoded <= 12 * size  # those on their way count too
