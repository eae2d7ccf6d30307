"""A source that lives in memory, so that twenty thousand journeys take minutes and not hours."""

from typing import Any

import numpy as np

from penstock.supply.sources.dataset import ShardFile, ShardSource, SourceConfig
from penstock.tokenize.token_file import LossSpans, Tokens


class MemorySource(ShardSource):
    """Shards of token lists; they arrive when somebody has waited often enough."""

    def __init__(
        self, name: str, shards: list[list[list[int]]], arrived: int | None, patience: list[int]
    ) -> None:
        super().__init__(name, SourceConfig(name=name))
        self.has_tokens = True
        self._shards = shards
        self._patience = patience
        self._asked = 0
        self._arrived = len(shards) if arrived is None else min(arrived, len(shards))
        self._sealed = arrived is None
        self._list()

    def _list(self) -> None:
        self._files = [
            ShardFile(str(k), len(rows), 0, None, sum(map(len, rows)))
            for k, rows in enumerate(self._shards[: self._arrived])
        ]

    @property
    def is_sealed(self) -> bool:
        return self._sealed

    def _refresh(self) -> None:
        """Now and then something has come since."""
        self._asked += 1
        if self._asked % self._patience[self._asked % len(self._patience)] == 0:
            self._wait()

    def _wait(self) -> None:
        if self._arrived < len(self._shards):
            self._arrived += 1
        else:
            self._sealed = True
        self._list()

    def _read_lengths(self, shard: int) -> Any:
        return np.array([len(row) for row in self._shards[shard]], np.int32)

    def decode(self, shard: int) -> Tokens:
        rows = self._shards[shard]
        at = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
        values = np.array([token for row in rows for token in row], np.uint16)
        return Tokens(values, at.astype(np.int64))

    def _open(self, name: str) -> Any:
        raise AssertionError("there are no files")

    def _read(self, name: str) -> bytes:
        raise AssertionError("there are no files")

    def identity(self) -> dict[str, str | int]:
        return {"name": self.name, "shards": self._arrived}

    def check_identity(self, seen: dict[str, str | int]) -> str:
        # whoever resumes sees at least what was seen
        while self._arrived < int(seen["shards"]):
            self._wait()
        return ""


class ChatSource(MemorySource):
    """Conversations in memory: of each, two of three tokens are trained, from the second or, where
    there are more than two and the first is odd, the third on."""

    @property
    def chat(self) -> dict[str, Any]:
        return {"chat_template": "chatml", "max_length": 2}

    def decode(self, shard: int) -> Tokens:
        tokens = super().decode(shard)
        spans = [
            [
                k
                for first in range(1 + (len(row) > 2 and row[0] % 2), len(row), 3)
                for k in (first, min(first + 2, len(row)))
            ]
            for row in self._shards[shard]
        ]
        at = np.concatenate([[0], np.cumsum([len(one) for one in spans], dtype=np.int64)])
        values = np.array([k for one in spans for k in one], np.int32)
        return Tokens(tokens.values, tokens.at, spans=LossSpans(values, at.astype(np.int64)))
