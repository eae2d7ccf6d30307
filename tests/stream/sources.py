"""Sources for tests of the plan: made of numbers, finished or arriving."""

import numpy as np

from penstock.arrays import Int32s


class MadeSource:
    """Shards whose samples have the given token counts; `arrived` of them are there."""

    def __init__(self, name: str, shards: list[list[int]], arrived: int | None = None) -> None:
        self.name = name
        self._shards = [np.array(lengths, np.int32) for lengths in shards]
        self.arrived = len(shards) if arrived is None else arrived
        self.sealed = arrived is None
        self.waits = 0

    def has_shard(self, shard: int) -> bool | None:
        if shard < self.arrived:
            return True
        return False if self.sealed else None

    def wait_shard(self, shard: int) -> bool:
        """What a live source does, with time passing only when somebody waits."""
        while (there := self.has_shard(shard)) is None:
            self.waits += 1
            if self.arrived < len(self._shards):
                self.arrived += 1
            else:
                self.sealed = True
        return there

    def rows(self, shard: int) -> int:
        assert shard < self.arrived, "asked for a shard that is not there"
        return len(self._shards[shard])

    def lengths(self, shard: int) -> Int32s:
        assert shard < self.arrived, "asked for a shard that is not there"
        return self._shards[shard]

    def identity(self) -> dict[str, str | int]:
        return {"name": self.name}

    def check_identity(self, seen: dict[str, str | int]) -> str:
        return "" if seen == self.identity() else "another source"
