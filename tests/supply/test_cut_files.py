"""A file of tokens that somebody cuts, rewrites, removes or replaces while a loader has it mapped.

A process that reads mapped memory whose file was cut is ended by SIGBUS: readers are in another.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.supply.sources.dataset import DatasetSource, SourceConfig
from penstock.supply.verified import _is_there

from .datasets import made_dataset

READER = """
import json, os, shutil, sys
from pathlib import Path
from penstock import LoaderRun, PretrainDataLoader
from penstock.errors import ShardMismatch
from penstock.supply import fetch

fetch.CHECK_S = 0.0


def read(loader, control):
    # another number of rows each time: what was filled ahead is not used
    for count in range(2, 40):
        try:
            found = loader.get_batch(count)
        except ShardMismatch as error:
            return str(error)
        assert (found.input_ids == control.get_batch(count).input_ids).all()
    return ""


for folder, cache, damage, repair in json.loads(sys.argv[1]):
    file, copy = f"{folder}/shard_00001.tokens.arrow", f"{folder}/../copy"
    of_cache = [str(path) for path in Path(cache or "none").rglob("*") if path.is_file()]
    loader = PretrainDataLoader(folder, None, 64, epochs=None, run=LoaderRun(cache_dir=cache))
    control = PretrainDataLoader(f"{folder}/../control", None, 64, epochs=None)
    said = [read(loader, control)]
    for change in (damage, repair):
        exec(change)
        said.append(read(loader, control))
    loader.close()
    control.close()
    print(json.dumps(said), flush=True)
"""

IN_PLACE = "shutil.copyfile(copy, file)"
REPLACE = "shutil.copyfile(copy, file + '.new'); os.rename(file + '.new', file)"
OTHER = "data = bytearray(Path(copy).read_bytes()); data[len(data) // 2] ^= 1; "
DAMAGE = [
    ("os.truncate(file, 0)", IN_PLACE, "is not what was written"),
    ("os.truncate(file, 5000)", REPLACE, "5,000 bytes"),
    ("os.truncate(file, 5000); os.unlink(file)", REPLACE, "is missing"),
    (OTHER + "Path(file).write_bytes(data)", REPLACE, "is not what was written"),
]
HARMLESS = [
    "os.utime(file)",
    "os.unlink(file)",
    "os.link(file, file + '.link'); os.chmod(file, 0o400)",
    "os.truncate(file, 0); " + REPLACE,
    OTHER + "Path(file + '.new').write_bytes(data); os.rename(file + '.new', file)",
]
CACHED = "for one in of_cache: os.truncate(one, min(100, os.stat(one).st_size))"
Said = dict[str, list[str]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What loaders say at first, after some damage and after its repair, by the damage."""
    home = tmp_path_factory.mktemp("cut")
    made_dataset(home / "control", shards=3, rows=2000)
    shutil.copyfile(home / "control" / "shard_00001.tokens.arrow", home / "copy")
    changes = [(damage, repair) for damage, repair, _ in DAMAGE] + [(one, "") for one in HARMLESS]
    cases: list[tuple[str, str | None, str, str]] = []
    for k, (damage, repair) in enumerate(changes):
        shutil.copytree(home / "control", home / f"d{k}")
        cases.append((str(home / f"d{k}"), None, damage, repair))
    made_dataset(home / "column", shards=3, rows=2000, column=True)
    cache = str(home / "cache")
    cases.append((str(home / "column"), cache, "", ""))  # fills the cache
    cases.append((str(home / "column"), cache, CACHED, ""))
    done = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(cases)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-2000:])
    assert len(os.listdir(cache)) > 2
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {damage: line for (_, _, damage, _), line in zip(cases, lines, strict=True)}


@pytest.mark.parametrize(("damage", "says"), [(damage, says) for damage, _, says in DAMAGE])
def test_a_file_that_is_cut_or_rewritten_is_an_error_that_names_it(
    said: Said, damage: str, says: str
) -> None:
    before, first, then = said[damage]
    assert before == then == ""
    assert "/shard_00001.tokens.arrow" in first
    assert says in first
    assert "restore" in first


@pytest.mark.parametrize("harmless", HARMLESS)
def test_what_leaves_the_mapped_file_as_it_was_is_harmless(said: Said, harmless: str) -> None:
    assert said[harmless] == ["", "", ""]


def test_a_cached_file_that_is_cut_is_made_again(said: Said) -> None:
    assert said[CACHED] == ["", "", ""]


def test_a_table_of_tokens_outlives_its_file(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=1)
    tokens = DatasetSource(str(tmp_path / "d"), SourceConfig()).read_table(0, ["tokens"]).column(0)
    os.truncate(tmp_path / "d" / "shard_00000.tokens.arrow", 0)
    for chunk in tokens.chunks:
        for array in (chunk, chunk.values):
            assert _is_there(memoryview(array.buffers()[1])[-1:])
