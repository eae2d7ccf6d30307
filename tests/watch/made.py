"""A small workplace for tests and screenshots of the page: datasets, a run, losses, a server."""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock import (
    ChunkConfig,
    DedupConfig,
    FilterConfig,
    FollowConfig,
    RunConfig,
    ShardConfig,
    log_loss,
    prepare_dataset,
    shard_jsonl,
)
from penstock.prepare.steps import Step
from penstock.work.events import Events

EVIL: Final = (
    '<script>document.title = "owned"; window.owned = 1</script>'
    '<img src=x onerror="window.owned = 2"><h1 id="evil">a heading of a document</h1>'
    "<style>body { display: none }</style></main></body> &amp; <b>bold</b> }}{{ ${window.owned=3}"
)
WORDS: Final = (
    *("the", "water", "falls", "through", "a", "pipe", "and", "turns", "wheel", "while", "river"),
    *("keeps", "its", "level", "gate", "opens", "slowly", "under", "high", "pressure", "night"),
)
FUNCTION: Final = """\
/// Returns the {a} of a {b}, at least {n}.
int {a}_{b}_{k}(int {c}) {{
    int total = {n};
    for (int i = 0; i < {c}; ++i) {{
        total += i * {k} % {m};
    }}
    return total;
}}

"""


def make_tree(folder: Path, files: int = 60, *, seed: int = 5) -> Path:
    """C++ files in folders, some of which nearly repeat another."""
    dice = random.Random(seed)
    parts = ("gate", "wheel", "valve", "pump", "basin")
    before = ""
    for number in range(files):
        text = "".join(
            FUNCTION.format(
                a=dice.choice(WORDS), b=dice.choice(WORDS), c=dice.choice(WORDS),
                k=dice.randrange(10**6), n=dice.randrange(1000), m=dice.randrange(2, 99),
            )
            for _ in range(dice.randrange(3, 12))
        )  # fmt: skip
        if number % 10 == 9:  # all but a line of the file before
            text = before.replace("int total = ", "int total = 1 + ", 1)
        path = folder / parts[number * 5 // files] / f"part_{number:03d}.cpp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        before = text
    return folder


def make_prose(path: Path, lines: int = 120, *, seed: int = 6, evil: bool = True) -> Path:
    """JSON lines of prose; one of the texts is HTML and script, and some lines are no records."""
    dice = random.Random(seed)
    rows = []
    for number in range(lines):
        words = [dice.choice(WORDS) for _ in range(dice.randrange(40, 200))]
        rows.append(json.dumps({"text": f"Chapter {number}. {' '.join(words)}."}))
    if evil:
        rows[3] = json.dumps({"text": EVIL + " needle-in-the-river"})
    rows[7] = "{}"
    path.write_text("\n".join(rows) + "\n")
    return path


def make_shop(
    folder: Path, tokenizer: Path, *, files: int = 60, lines: int = 120, rows_per_file: int = 40,
    steps: int = 40,
) -> Path:  # fmt: skip
    """A directory with two datasets, a run of both, and losses with a spike."""
    folder.mkdir(exist_ok=True)
    tree = make_tree(folder / "tree", files)
    prepare: list[Step] = [
        FilterConfig(preset="none", min_bytes=20), DedupConfig(), ChunkConfig(max_tokens=128),
    ]  # fmt: skip
    events = Events("chunk", path=folder / "cpp" / "_events.jsonl")
    prepare_dataset(
        [tree], folder / "cpp", prepare,
        ShardConfig(rows_per_file=rows_per_file, val_fraction=0.02),
        RunConfig(workers=1, max_rejects=0.9), tokenizer=str(tokenizer), tokens=True, events=events,
    )  # fmt: skip
    events.close()
    prose = make_prose(folder / "prose.jsonl", lines)
    events = Events("shard", path=folder / "prose" / "_events.jsonl")
    shard_jsonl(
        [prose], folder / "prose", ShardConfig(rows_per_file=rows_per_file // 2, val_fraction=0.02),
        FollowConfig(complete=True, max_rejects=0.5), tokenizer=str(tokenizer), tokens=True,
        events=events,
    )  # fmt: skip
    events.close()
    (folder / "run.toml").write_text(
        f"[loader]\npath = {{ cpp = 'cpp', prose = 'prose' }}\ntokenizer = '{tokenizer}'\n"
        "chunk_size = 256\nbatch_size = 4\nseed = 3\n"
        "[loader.plan]\nweights = { cpp = 3.0, prose = 1.0 }\nepochs = 2\n"
        "[loader.documents]\nother_length = true\n"
    )
    dice = random.Random(0)
    for step in range(1, steps + 1):
        fallen = 4.0 * 0.93 ** (40 * step / steps)
        loss = 2.0 + fallen + dice.random() / 20 + (1.7 if step == steps * 3 // 5 else 0.0)
        waited = 0.01 + 0.02 * dice.random() + 0.2 * (step < steps // 8)
        log_loss(step, loss, run_dir=folder, waited_s=waited, took_s=0.4)
    return folder


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """The page of a directory, by the real command; its address without the last slash."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "watch", str(folder), *options],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "error"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.match(r"(http://\S+)/ ", line)
        assert found, line
        yield found[1]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
