"""A small pipeline in a directory, its runs, and what they leave."""

import contextlib
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.store.log import Log

TRAINER: Final = Path(__file__).with_name("trainer.py")
MakeSources = Callable[[int, int], dict[str, bytes]]


def write_pipeline(
    folder: Path, tokenizer: Path, files: Mapping[str, bytes], *, more: str = "",
    pause_s: float = 0.0, rows_per_file: int = 20,
) -> Path:  # fmt: skip
    """A tree, a tokenizer, and pipeline.toml from them to a trainer through a directory bucket."""
    for name, raw in files.items():
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    command = shlex.join([sys.executable, str(TRAINER), "pipeline.toml", str(pause_s)])
    path = folder / "pipeline.toml"
    path.write_text(f"""
[source.cpp]
inputs = ["src"]
[tokenizer]
path = {json.dumps(str(tokenizer))}
[dedup]
kind = "near"
[chunk]
max_tokens = 64
[shards]
rows_per_file = {rows_per_file}
[work]
workers = 1
[push]
url = "bucket"
[pull]
dir = "local"
[loader]
path = "local/cpp"
tokenizer = {json.dumps(str(tokenizer))}
chunk_size = 64
batch_size = 4
[loader.run]
wait_s = 60
[loader.plan]
ramp = true
[train]
command = {json.dumps(command)}
log = "train.jsonl"
{more}""")
    return path


def start(path: Path, *options: str) -> "subprocess.Popen[str]":
    """`penstock run`, as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", path.name, *options],
        cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(path: Path, *options: str, timeout_s: float = 120) -> tuple[int, str, str]:
    with ended(start(path, *options)) as process:
        out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


@contextlib.contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stream_of(folder: Path) -> dict[int, str]:
    """The batch of each step; an error if two runs saw another one at the same step."""
    found: dict[int, str] = {}
    for line in (folder / "train.jsonl").read_text().splitlines():
        about: dict[str, Any] = json.loads(line)
        assert found.setdefault(about["step"], about["batch"]) == about["batch"], about["step"]
    return found


def files_of(dataset: Path) -> dict[str, str]:
    """The shards of a sealed dataset, by their hashes."""
    state = Log.open(dataset).state
    assert state.sealed is not None
    return {
        name: hashlib.sha256((dataset / name).read_bytes()).hexdigest()
        for name in state.files
        if name.startswith(("shard", "val"))
    }


def processes_in(folder: Path) -> list[int]:
    """Processes whose directory this is."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.readlink(f"/proc/{name}/cwd") == str(folder):
                found.append(int(name))
    return found
