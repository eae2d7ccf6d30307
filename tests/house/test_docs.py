"""Every code block of README and docs that can run, runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(kind, code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (kind, code) in enumerate(
        re.findall(
            r"^```(python|bash)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
    )
]


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize(("kind", "code"), BLOCKS)
def test_block(kind: str, code: str, tmp_path: Path) -> None:
    command = (
        [sys.executable, "-c", code]
        if kind == "python"
        else ["bash", "-euo", "pipefail", "-c", code]
    )
    bin_folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": bin_folder + os.pathsep + os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
