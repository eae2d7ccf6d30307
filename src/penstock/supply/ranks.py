"""Which rank this is, of how many: from arguments, torch.distributed, or the environment."""

import os
import sys
from typing import Final

from penstock.errors import BadConfig
from penstock.options import whole

VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""Those that launchers set: a process's rank, and of how many."""
LOCAL_SIZES: Final = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
"""How many of them are on this host."""


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The rank and the number of ranks.

    >>> find_rank(1, 4)
    (1, 4)
    """
    if rank is None and world_size is None:
        rank, world_size = _told()
    if rank is None or world_size is None:
        raise BadConfig(
            "one of rank and world_size is given and the other is not", do="give both or neither"
        )
    rank, world_size = whole("rank", rank), whole("world_size", world_size, most=1 << 30)
    if world_size < 1 or not 0 <= rank < world_size:
        raise BadConfig(
            f"rank {rank} of {world_size} cannot be", do="ranks go from 0 to world_size - 1"
        )
    return rank, world_size


def find_hosts(world_size: int) -> int:
    """On how many hosts the ranks run, as far as the environment says."""
    for name in LOCAL_SIZES:
        local = os.environ.get(name, "")
        if local.isdecimal() and 0 < int(local) <= world_size:
            return -(-world_size // int(local))
    return 1


def _told() -> tuple[int, int]:
    torch = sys.modules.get("torch")  # if nobody has imported it, nobody has set it up
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for number, count in VARIABLES:
        if number in os.environ and count in os.environ:
            try:
                return int(os.environ[number]), int(os.environ[count])
            except ValueError:
                raise BadConfig(
                    f"{number}={os.environ[number]} and {count}={os.environ[count]} "
                    "are not numbers",
                    do="set them to whole numbers, or give rank and world_size",
                ) from None
    return 0, 1
