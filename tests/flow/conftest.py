"""What the sweeps share: a warm process to fork runs from, and the small run."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sweep import Small, Warm


@pytest.fixture(scope="session")
def small() -> Iterator[Small]:
    """The small run, in memory where that can be: only a power loss needs a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="penstock-flow-", dir=memory) as folder:
        scratch = Path(os.path.realpath(folder))
        warm = Warm(scratch)
        try:
            yield Small.prepare(warm, scratch)
        finally:
            warm.close()
