"""What comes from outside and is wrong is refused in words: no crash, no hang, no raw traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .targets import TARGETS

MUTANTS = 10_000


def run(name: str, first: int, count: int, folder: Path, timeout_s: float) -> dict[str, int]:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fuzz.targets", name, str(first), str(count), folder],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        timeout=timeout_s,
        check=False,
    )
    at = (folder / "at").read_text() if (folder / "at").exists() else "none"
    assert done.returncode == 0, f"{name}, mutant {at.strip()}: {done.stderr[-3000:]}"
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_mutants(name: str, tmp_path: Path) -> None:
    found = run(name, 0, 150, tmp_path, 200)
    assert sum(found.values()) == 150
    assert found["refused"] > 50


@pytest.mark.faults
@pytest.mark.parametrize("name", TARGETS)
def test_ten_thousand_mutants(name: str, tmp_path: Path) -> None:
    found = run(name, 1000, MUTANTS, tmp_path, 3000)
    print(name, found)
    assert sum(found.values()) == MUTANTS
