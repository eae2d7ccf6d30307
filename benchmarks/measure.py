"""Run a command in a process of its own and measure it; print tables; keep results.

Every contender is a fresh process, so that wall time holds its imports and memory is its own.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data"


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of one contender took."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def run(command: Sequence[str], **environment: str) -> Run:
    """Run `command` to its end; its own peak of resident memory, its own CPU time."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{said.decode()[-2000:]}")
    return Run(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def best(runs: Sequence[Run]) -> Run:
    """The fastest of several, with the largest memory of any."""
    fastest = min(runs, key=lambda one: one.wall_s)
    return Run(fastest.wall_s, fastest.cpu_s, max(one.peak_mb for one in runs))


def warm(path: Path) -> str:
    """Read a file into the page cache; its sha256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows as columns, the first row as the heading."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    print(f"\n{title}")
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  " + "  ".join(cells))


def keep(job: str, results: dict[str, Any]) -> None:
    """Write benchmarks/results/<job>.json with commit and machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    about = {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()},
    }
    target = HERE / "results" / f"{job}.json"
    target.parent.mkdir(exist_ok=True)
    plain = json.dumps({**about, **results}, indent=2, default=asdict)
    plain = plain.replace(f"{HERE.parent.resolve()}/", "")  # where the project lies is nobody's
    target.write_text(plain + "\n")
    print(f"\nkept in {target.relative_to(HERE.parent)}")
