"""Where work runs, and how much of the machine it may take."""

import os
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import BadConfig
from penstock.work.on_ray import RayPool
from penstock.work.pool import HerePool, LocalPool, Pool
from penstock.work.values import check_numbers, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where and how to run. None of it changes a byte of the dataset."""

    workers: int = field(default_factory=lambda: max(1, min(8, os.cpu_count() or 1)))
    """Processes that compute; 1 computes in this one."""

    engine: str = "local"
    """"local", or "ray" for a Ray cluster."""

    max_memory_bytes: int = 2 << 30
    """Of all processes together."""

    max_rejects: float = 0.01
    """Share of documents that may be refused as damaged before the run stops. What filters and
    dedup let go of does not count."""

    plugins: tuple[str, ...] = ()
    """Modules to import first: they register formats, filters and processors."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        whole("--workers", self.workers, most=10_000)
        if self.workers < 1:
            raise BadConfig(f"--workers is {self.workers}", do="choose at least 1")
        if self.engine not in ("local", "ray"):
            raise BadConfig(f"--engine is {self.engine!r}", do="choose local or ray")
        if not 0 <= self.max_rejects <= 1:
            raise BadConfig(f"--max_rejects is {self.max_rejects}", do="choose a share from 0 to 1")
        if self.max_memory_bytes < 512 << 20:
            raise BadConfig(
                f"--max_memory is {self.max_memory_bytes:,} bytes", do="give at least 512MB"
            )


def open_pool(task: str, setup: dict[str, Any], run: RunConfig) -> Pool:
    """Where the task runs."""
    if run.engine == "ray":
        return RayPool(task, setup)
    return HerePool(task, setup) if run.workers == 1 else LocalPool(task, setup, run.workers)
