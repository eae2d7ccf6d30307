"""A dataset is made, pushed, pulled and trained on, all at once, by processes of their own."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.ingest.lines import mark_done
from penstock.stream.plan import PlanConfig
from penstock.supply.pretrain import PretrainDataLoader
from services.servers import Server, clouds, use

TRAIN = """
import hashlib, json, sys
from penstock import LoaderRun, PlanConfig, PretrainDataLoader

url, tokenizer, cache = sys.argv[1:]
digest, batches = hashlib.sha256(), 0
loader = PretrainDataLoader(url, tokenizer, 64, batch_size=4, seed=3, plan=PlanConfig(ramp=True),
                            run=LoaderRun(cache_dir=cache or None, wait_s=120))
for batch in loader:
    if batches == 0:
        print("sealed" if loader.sources[0].is_sealed else "begun", flush=True)
    digest.update(batch.input_ids.tobytes())
    digest.update(batch.position_ids.tobytes())
    batches += 1
print(json.dumps([digest.hexdigest(), batches]))
"""
"""Says when it has its first batch, and in the end what it was trained on."""

DOCUMENTS = 3000
LIMIT_S = 120


def write(path: Path, first: int, last: int) -> None:
    """As a producer does: some lines, a pause, some more."""
    with path.open("a") as file:
        for number in range(first, last):
            text = f"int function_{number}(int x) {{ return x * {number} + {number * number}; }}"
            file.write(json.dumps({"text": text}) + "\n")
            if number % 250 == 249:
                file.flush()
                time.sleep(0.1)


def test_made_pushed_pulled_and_trained_on_at_once(
    moto: Server, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = clouds()["moto"](moto)
    use(monkeypatch, cloud.environment(moto.port))
    url = cloud.new_url("data/set")
    live, pulled, source = tmp_path / "live", tmp_path / "pulled", tmp_path / "in.jsonl"
    source.touch()

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )

    tokenizer = str(tokenizer_folder)
    penstock = ("-m", "penstock.cli")
    work = [
        start(*penstock, "shard", "--input", str(source), "--parquet_dir", str(live),
              "--rows_per_file", "150", "--tokenizer", tokenizer, "--tokens"),
        start(*penstock, "push", str(live), url),
        start(*penstock, "pull", url, str(pulled)),
    ]  # fmt: skip
    trainers = {
        "pulled": start("-c", TRAIN, str(pulled), tokenizer, ""),
        "bucket": start("-c", TRAIN, url, tokenizer, str(tmp_path / "cache")),
    }
    try:
        write(source, 0, DOCUMENTS // 2)
        for name, process in trainers.items():  # the rest is not there when these train
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n", name
        write(source, DOCUMENTS // 2, DOCUMENTS)
        mark_done(source)
        for process in work:
            process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0
        found = {
            name: json.loads(process.communicate(timeout=LIMIT_S)[0])
            for name, process in trainers.items()
        }
    finally:
        for process in [*work, *trainers.values()]:
            if process.poll() is None:
                process.kill()
                process.communicate()
    digest, batches = hashlib.sha256(), 0
    documents: list[int] = []
    plan = PlanConfig(ramp=True)
    with PretrainDataLoader(str(live), tokenizer, 64, batch_size=4, seed=3, plan=plan) as loader:
        for batch in loader:
            digest.update(batch.input_ids.tobytes())
            digest.update(batch.position_ids.tobytes())
            documents += (batch.segments[:, 3] * 1_000_000 + batch.segments[:, 4]).tolist()
            batches += 1
        rows = sum(loader.sources[0].rows(k) for k in range(loader.sources[0].num_known))
    assert len(np.unique(documents)) == rows > 0.9 * DOCUMENTS
    for name, told in found.items():
        assert told == [digest.hexdigest(), batches], name
