"""The tokens of rows are those that the plan names, with what is put around documents."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.stream.plan import Plan, PlanConfig
from penstock.supply.batch import RowBatch
from penstock.supply.fetch import Fetch
from penstock.tokenize.token_file import Tokens

from .memory_source import MemorySource

PAD, IGNORE = 65_000, -100


class Typed(MemorySource):
    """Tokens of 16 or 32 bits, and so many put around each document."""

    def __init__(self, name: str, shards: list[list[list[int]]], kind: Any, extra: int) -> None:
        super().__init__(name, shards, None, [1])
        self._kind, self._extra = kind, extra

    def _read_lengths(self, shard: int) -> Any:
        return super()._read_lengths(shard) + np.int32(self._extra)

    def decode(self, shard: int) -> Tokens:
        decoded = super().decode(shard)
        return Tokens(decoded.values.astype(self._kind), decoded.at)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=6), min_size=1, max_size=4)
    return {
        "sizes": [draw(sizes) for _ in range(draw(st.integers(1, 2)))],
        "bos": draw(st.sampled_from([-1, 60_001])),
        "eos": draw(st.sampled_from([-1, 60_002])),
        "kinds": [draw(st.sampled_from([np.uint16, np.uint32])) for _ in range(2)],
        "config": PlanConfig(
            seq_len=draw(st.sampled_from([1, 7, 16, 33, 64])),
            pack=draw(st.sampled_from(["pad", "concat", "bestfit"])),
            pool_size=10,
            refill_threshold=5,
        ),
    }


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_rows_hold_the_tokens_that_the_plan_names(case: dict[str, Any]) -> None:
    bos, eos, config = case["bos"], case["eos"], case["config"]
    extra = (bos >= 0) + (eos >= 0)
    count = 0
    contents: list[list[list[list[int]]]] = []
    for sizes in case["sizes"]:
        contents.append([])
        for shard in sizes:
            contents[-1].append([])
            for size in shard:
                contents[-1][-1].append([(count + k) % 60_000 for k in range(size)])
                count += size
    sources = [Typed(f"s{k}", shards, case["kinds"][k], extra) for k, shards in enumerate(contents)]
    plan = Plan(sources, config, [1.0] * len(sources))
    fetch = Fetch(sources, max_bytes=1 << 30, bos=bos, eos=eos, pad=PAD)
    while len((rows := plan.take(9)).fills):
        ids = fetch.fill(rows, 0, len(rows.fills), config.seq_len)
        expected: list[list[int]] = [[] for _ in rows.fills]
        labels: list[list[int]] = [[] for _ in rows.fills]
        positions: list[list[int]] = [[] for _ in rows.fills]
        for row, source, _, shard, document, at, size in rows.segments.tolist():
            whole = [*[bos][: bos >= 0], *contents[source][shard][document], *[eos][: eos >= 0]]
            expected[row] += whole[at : at + size]
            labels[row] += [IGNORE, *whole[at + 1 : at + size]]
            positions[row] += range(size)
        padding = [config.seq_len - len(row) for row in expected]
        assert ids.tolist() == [r + [PAD] * n for r, n in zip(expected, padding, strict=True)]
        batch = RowBatch(ids, rows.segments, rows.fills, packed=True, metadata={})
        assert batch.labels.tolist() == [
            row + [IGNORE] * n for row, n in zip(labels, padding, strict=True)
        ]
        assert batch.position_ids.tolist() == [
            row + list(range(n)) for row, n in zip(positions, padding, strict=True)
        ]
    fetch.close()


@pytest.mark.parametrize("fills", [[3, 0], [4, 1], [0, 4]])
def test_the_mask_is_that_of_the_tokens(fills: list[int]) -> None:
    batch = RowBatch(
        np.zeros((2, 4), np.int32), np.zeros((0, 7), np.int32), np.array(fills, np.int32),
        packed=False, metadata={},
    )  # fmt: skip
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1] * fill + [0] * (4 - fill) for fill in fills]
