"""Memory goes by what inputs become, not by what they are: small files that inflate."""

import contextlib
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import zstandard

from penstock.ingest import formats
from penstock.ingest.formats import Piece, Read, ReadConfig
from penstock.prepare import task
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.steps import BatchDedup, Step
from penstock.produce.dataset import prepare_dataset
from penstock.produce.writer import ShardConfig
from penstock.work.run import RunConfig

PIECE: Final = 64 << 10
READ: Final = ReadConfig(piece_bytes=PIECE, order="path")
CONFIG: Final = ShardConfig(rows_per_file=60, bytes_per_file=900_000, val_fraction=0.1)
HERE: Final = RunConfig(workers=1)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 files of 300 KB that take a few KB each, among small ones."""
    root = tmp_path_factory.mktemp("tree")
    for k in range(24):
        # 20 KB would hold them all if they were what they take on the disk
        line = f"int value_{k} = {k}; // {random.Random(k).random()}\n".encode()
        text = line * (300_000 // len(line))
        (root / f"{k:02d}.c.zst").write_bytes(zstandard.compress(text))
        (root / f"{k:02d}.small.c").write_bytes(line)
    return root


def data(dataset: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(dataset)): path for path in dataset.rglob("*") if path.is_file()}
    aside = ("_log/", "_fold/", "_COMPLETE", "_events", "_batch")
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(aside)}


def test_a_piece_holds_no_more_than_it_was_planned_for(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path
) -> None:
    sizes: list[int] = []

    def read_piece(piece: Piece, config: ReadConfig, name: str) -> Read:
        found = formats.read_piece(piece, config, name)
        sizes.append(int(found.documents.at[-1]))
        return found

    monkeypatch.setattr(task, "read_piece", read_piece)
    prepare_dataset(
        [tree], tmp_path / "data", [ChunkConfig(max_tokens=512)], CONFIG, HERE, read=READ,
        tokenizer=tokenizer_folder,
    )  # fmt: skip
    assert sum(sizes) > 24 * 299_000
    assert max(sizes) <= 300_000 + PIECE


@pytest.mark.parametrize("steps", [[], [BatchDedup()]], ids=["alone", "batch"])
def test_rests_change_nothing(tree: Path, tmp_path: Path, steps: list[Step]) -> None:
    made = []
    for number, (piece_bytes, workers) in enumerate([(1 << 30, 1), (PIECE, 1), (PIECE, 2)]):
        read, run = replace(READ, piece_bytes=piece_bytes), replace(HERE, workers=workers)
        dataset = tmp_path / str(number)
        assert prepare_dataset([tree], dataset, steps, CONFIG, run, read=read).sealed
        made.append(data(dataset))
    assert made[0] == made[1] == made[2]
    assert len(made[0]) >= 10


def pss(pid: int) -> int:
    """Bytes of a process and all that it started, with its files in memory, mapped or not."""
    total = 0
    for file in files_of(pid):
        with contextlib.suppress(OSError):  # closed by now
            if "memfd:penstock" in os.readlink(file):
                total += os.stat(file).st_blocks * 512
    for name in (f"/proc/{pid}/smaps_rollup", f"/proc/{pid}/task/{pid}/children"):
        try:
            text = Path(name).read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return total
        if name.endswith("children"):
            return total + sum(pss(int(child)) for child in text.split())
        total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if "Pss:" in line[:5])
    return total


def files_of(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


@pytest.mark.faults
@pytest.mark.parametrize("workers", [1, 2])
def test_24_files_of_100_mb_in_2_gb(tmp_path: Path, tokenizer_folder: Path, workers: int) -> None:
    """They took 11 GB, and ended in `Negative offsets`."""
    line = b"int value = 1; // the same again, so that it takes 9 KB\n"
    packed = zstandard.compress(line * (100_000_000 // len(line)))
    root = tmp_path / "tree"
    root.mkdir()
    for k in range(24):
        (root / f"{k:02d}.c.zst").write_bytes(packed)
    command = [
        sys.executable, "-m", "penstock.cli", "chunk", "--inputs", root, "--parquet_dir",
        tmp_path / "data", "--tokenizer", tokenizer_folder, "--max_memory", "2GB",
        "--workers", str(workers),
    ]  # fmt: skip
    peak = 0
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, pss(process.pid))
            time.sleep(0.05)
    print(f"peak {peak / 1e9:.2f} GB with {workers} workers")
    assert process.returncode == 0
    assert peak < 2 << 30
