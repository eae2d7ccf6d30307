"""Every code block of README and docs that can run, runs; what pages name and link is there.

A block whose first line is `# needs: pip install "penstock[torch]"` needs that extra. All others
need the wheel alone: `make wheel` sets PENSTOCK_DOCS_PYTHON to the Python of an environment that
has nothing else, and runs those.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("PENSTOCK_DOCS_PYTHON", sys.executable)
PLAIN = "PENSTOCK_DOCS_PYTHON" in os.environ
NEEDS = re.compile(r"# needs: .*penstock\[[a-z,]+\]")
GUARANTEES = ROOT / "docs" / "guarantees.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(kind, code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (kind, code) in enumerate(
        re.findall(
            r"^```(python|bash)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
    )
    if not (PLAIN and NEEDS.match(code))
]


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize(("kind", "code"), BLOCKS)
def test_block(kind: str, code: str, tmp_path: Path) -> None:
    command = [PYTHON, "-c", code] if kind == "python" else ["bash", "-euo", "pipefail", "-c", code]
    bin_folder = str(Path(PYTHON).absolute().parent)
    names = os.environ.keys() - ({"PYTHONPATH"} if PLAIN else set())
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={name: os.environ[name] for name in names}
        | {"PATH": bin_folder + os.pathsep + os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "code"), BLOCKS)
def test_what_users_need_is_imported_from_penstock_alone(kind: str, code: str) -> None:
    if kind == "python":
        names = [
            name
            for node in ast.walk(ast.parse(code))
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        ]
        assert [name for name in names if name.startswith("penstock.")] == []


def anchors(text: str) -> set[str]:
    """The names that a page's headings have in links.

    >>> sorted(anchors("# The log, and `penstock show`\\n## A word\\n"))
    ['a-word', 'the-log-and-penstock-show']
    """
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text("utf-8")), link


def test_each_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (.+) \| (\[.+) \|$", GUARANTEES.read_text("utf-8"), re.MULTILINE)
    assert len(rows) >= 38
    for promise, shown in rows:
        for path, names in re.findall(r"\]\(\.\./(tests/[^)]+)\): ([^;]+)", shown):
            found = set(re.findall(r"def (test_\w+)\(", (ROOT / path).read_text()))
            named = re.findall(r"`(\w+)`", names)
            assert named, f"{promise}: {path} without a test"
            assert set(named) <= found, f"{promise}: {path}"
        assert shown.count("](") == shown.count("): "), f"{promise}: a file without a test"


def test_plots_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("plots", ROOT / "benchmarks" / "plots.py")
    assert spec is not None
    assert spec.loader is not None
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    for name, drawing in plots.drawings().items():
        kept = (plots.TARGET / name).read_text()
        assert kept == drawing, "python benchmarks/plots.py"
        assert name in (ROOT / "docs" / "benchmarks.md").read_text()
