"""Compile every kernel into numba's cache, so that no command waits for it."""

import tempfile
import time
from pathlib import Path

from penstock.shard.follow import FollowConfig, shard_jsonl
from penstock.shard.verify import verify
from penstock.store.backends import open_store

began = time.monotonic()
with tempfile.TemporaryDirectory() as folder:
    lines = Path(folder) / "lines.jsonl"
    lines.write_text('{"text": "warm"}\n')
    shard_jsonl([lines], Path(folder) / "dataset", follow=FollowConfig(complete=True))
    assert not verify(open_store(Path(folder) / "dataset"), full=True).faults
print(f"kernels compiled in {time.monotonic() - began:.1f} s")
