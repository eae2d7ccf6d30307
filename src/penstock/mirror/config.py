"""How to move a dataset, and what was moved."""

import dataclasses
from typing import Final

from penstock.errors import BadConfig
from penstock.options import check_numbers, config_of, whole
from penstock.store.log import STALL_S

POLL_S: Final = (0.02, 0.25)
"""How long to wait for a new record: at first, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How to move a dataset."""

    once: bool = False
    """Move what is there and end, even if the dataset is not sealed."""
    connections: int = 8
    """Requests at a time. While pulling, at most twice as many ranges of 8 MB are in memory."""
    stall_s: float = STALL_S
    """Silence of the producer that is an error; so is one that never begins."""
    give_up_s: float = 300.0
    """How long a store may fail before that is an error."""
    max_disk_bytes: int | None = None
    """Data kept in the directory while pulling: what the trainer has passed is removed."""
    only: str = ""
    """While pulling: "tokens" brings the log and the token files, which is what a trainer
    needs, and leaves out text, rejects and the rest."""

    @classmethod
    def of(cls, given: "SyncConfig | None") -> "SyncConfig":
        """What was given as `config`, or the default one."""
        return config_of("config", given, cls)

    def __post_init__(self) -> None:
        check_numbers(self)
        whole("connections", self.connections, 1, 10_000)
        for name in ("stall_s", "give_up_s"):
            if not getattr(self, name) > 0:
                raise BadConfig(f"{name} is {getattr(self, name)}", do="choose more than 0")
        if self.max_disk_bytes is not None and self.max_disk_bytes < 1:
            raise BadConfig(f"max_disk is {self.max_disk_bytes}", do="choose 1 or more bytes")
        if self.only not in ("", "tokens"):
            raise BadConfig(
                f"only is {self.only!r}",
                why="what can be pulled alone: tokens",
                do="choose tokens, or leave it out to bring everything",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Synced:
    """What was moved by this call, and where the mirror stands."""

    records: int
    files: int
    bytes: int
    last: int
    """Number of the mirror's last record."""
    sealed: bool
