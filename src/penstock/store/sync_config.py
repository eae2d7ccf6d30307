"""How to move a dataset, and what was moved."""

import dataclasses
from typing import Final

from penstock.errors import BadConfig
from penstock.store.log import STALL_S
from penstock.work.values import check_numbers, whole

POLL_S: Final = (0.02, 0.25)
"""How long to wait for a new record: at first, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How to move a dataset."""

    once: bool = False
    """Move what is there and end, even if the dataset is not sealed."""
    connections: int = 8
    """Requests at a time. While pulling, twice as many ranges of 8 MB are in memory at most."""
    stall_s: float = STALL_S
    """A producer that gives no sign for so long is an error; so is one that never begins."""
    give_up_s: float = 300.0
    """A store that fails for so long is an error."""
    max_disk: int | None = None
    """While pulling: bytes of data kept in the directory. Files that the trainer has passed go."""

    def __post_init__(self) -> None:
        check_numbers(self)
        whole("connections", self.connections, 1, 10_000)
        for name in ("stall_s", "give_up_s"):
            if not getattr(self, name) > 0:
                raise BadConfig(f"{name} is {getattr(self, name)}", do="choose more than 0")
        if self.max_disk is not None and self.max_disk < 1:
            raise BadConfig(f"max_disk is {self.max_disk}", do="choose 1 or more bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Synced:
    """What was moved by this call, and where the mirror stands."""

    records: int
    files: int
    bytes: int
    last: int
    """Number of the mirror's last record."""
    sealed: bool
