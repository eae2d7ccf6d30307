"""The list of planted bugs does not rot: each can be planted, and names tests that are there."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
MUTANTS = LIST["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["breaks"])
def test_a_bug_can_be_planted(mutant: dict[str, str]) -> None:
    """If this fails after a change of that module: find the place again, or plant another bug."""
    assert set(mutant) <= {"file", "old", "new", "breaks", "tests", "survives"}
    path = ROOT / "src" / "penstock" / mutant["file"]
    text = path.read_text()
    assert text.count(mutant["old"]) == 1, f"{mutant['old']!r} in {mutant['file']}"
    planted = text.replace(mutant["old"], mutant["new"])
    assert planted != text
    compile(planted, str(path), "exec")


def test_there_are_enough_of_them_and_their_tests_are_there() -> None:
    assert len(MUTANTS) >= 100
    for folder, least in (
        *((name, 15) for name in ("store", "produce", "supply", "prepare", "tokenize")),
        *((name, 10) for name in ("stream", "ingest")),
    ):
        assert sum(mutant["file"].startswith(f"{folder}/") for mutant in MUTANTS) >= least
    assert len({mutant["breaks"] for mutant in MUTANTS}) == len(MUTANTS)
    named = [test for tests in LIST["beside"].values() for test in tests]
    for mutant in MUTANTS:
        named += mutant.get("tests") or LIST["beside"][mutant["file"]][:0]
    assert [test for test in named if not (ROOT / test.partition("::")[0]).is_file()] == []
