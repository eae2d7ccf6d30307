"""Document 000's four terminals, in any order of starting: one dataset, and true last lines."""

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from penstock.cli import app
from penstock.errors import BadConfig
from penstock.produce.verify import verify
from penstock.store.log import Log
from penstock.supply.pretrain import PretrainDataLoader

COMMANDS: Final = {
    "chunk": "chunk --inputs data/a.jsonl data/b.jsonl --output data/all.jsonl "
    "--parquet_dir data/parquet --max_tokens 96 --rows_per_file 40 --workers 1",
    "shard": "shard --input data/all.jsonl --parquet_dir data/parquet --rows_per_file 40",
    "push": "push data/parquet bucket/chunked",
    "pull": "pull bucket/chunked local/parquet",
}
"""As they are typed, with shards of 40 rows for 50,000."""
LIMIT_S: Final = 120
ORDERS: Final = list(itertools.permutations(COMMANDS))
MakeSources = Callable[[int, int], dict[str, bytes]]


@pytest.fixture
def workshop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: MakeSources, tokenizer_folder: Path
) -> Path:
    """A directory with two inputs and ./tokenizer, to stand in."""
    (tmp_path / "data").mkdir()
    for name, seed in (("a.jsonl", 61), ("b.jsonl", 62)):
        lines = [json.dumps({"text": raw.decode()}) for raw in sources(seed, 60).values()]
        (tmp_path / "data" / name).write_text("\n".join(lines) + "\n")
    shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *COMMANDS[name].split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_all(order: tuple[str, ...], pauses: list[float]) -> dict[str, str]:
    """What each terminal shows in the end, all of them begun in this order."""
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, pause in zip(order, pauses, strict=True):
            running[name] = start(name)
            time.sleep(pause)
        shown = {}
        for name, process in running.items():
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"{name}: {err}"
            shown[name] = out
        return shown
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def files(dataset: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in dataset.glob("*.parquet")}


def check(order: tuple[str, ...], pauses: list[float]) -> None:
    expected = alone()
    shown = run_all(order, pauses)
    made = Path("data/parquet")
    state = Log.open(made).state
    assert state.sealed is not None
    shards, rows = len(state.split("train")), state.sealed.rows
    assert shown["chunk"].splitlines()[0] == (
        f"data/parquet: sealed, 120 documents read, 120 kept as {rows} chunks in {shards} shards"
    )
    assert (
        shown["shard"] == f"data/parquet: sealed, {shards} shards, {rows} chunks kept, 0 refused\n"
    )
    for name in ("push", "pull"):
        assert re.fullmatch(rf"{name}: [\d,]+ files, .* records; sealed\n", shown[name])
    for dataset in (made, Path("bucket/chunked"), Path("local/parquet")):
        assert files(dataset) == expected
    assert len(expected) > 4
    assert verify("local/parquet", full=True).faults == []


def alone() -> dict[str, bytes]:
    """The dataset of the first command, if nobody starts another."""
    app(COMMANDS["chunk"].split(), standalone_mode=False)
    found = files(Path("data/parquet"))
    shutil.rmtree("data/parquet")
    for path in Path("data").glob("all.jsonl*"):
        path.unlink()
    return found


def test_four_terminals(workshop: Path) -> None:
    check(("pull", "push", "shard", "chunk"), [0.0, 0.0, 0.3, 0.0])
    # the log of the mirror knows how long chunks may be, and who counted
    with pytest.raises(BadConfig, match="rows of 128 tokens from a dataset of chunks of 96"):
        PretrainDataLoader("local/parquet", "tokenizer", chunk_size=128)


@pytest.mark.faults
def test_a_trainer_refuses_another_length(workshop: Path) -> None:
    check(("chunk", "shard", "push", "pull"), [0.0] * 4)
    trainer = Path(__file__).parents[2] / "examples" / "base_train.py"
    command = "--data_dir=local/parquet --streaming_data --tokenizer=tokenizer --max_seq_len=128"
    ended = subprocess.run(
        [sys.executable, trainer, *command.split()], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("BadConfig: rows of 128 tokens from a dataset of chunks of 96\n")


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_four_terminals_in_any_order(workshop: Path, order: tuple[str, ...], seed: int) -> None:
    chance = random.Random(f"{order} {seed}")
    check(order, [chance.choice([0.0, 0.3, 1.0, 2.0, 4.0]) for _ in order])
