"""The whole story on text that is there already: from raw files to a model that learns.

1. A pipeline is written: C++ and Python sources of the packages that penstock's tests need, and
   conversations with tool calls that a seed makes.
2. `penstock run` runs it, all stages at once: a tokenizer is trained; sources are filtered,
   deduplicated and cut; shards are pushed to a bucket (a directory) and pulled from it; a small GPT
   trains on what has arrived, while the rest is still being made. All of it is killed once, with
   SIGKILL, and the same command resumes.
3. The model is fine-tuned on the conversations for a few steps.
4. The account: every batch is the one that the finished dataset gives; how many steps were trained
   before it was sealed; the loss against the entropy of the tokens. A claim that is false fails.
5. The pictures: the loss curve, and where a Chromium is installed the page of `penstock watch`.
"""

import contextlib
import importlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow

from penstock import Log, PretrainDataLoader, read_run
from penstock.errors import NoDataset

OUT: Final = Path("demo_out")
EXAMPLES: Final = Path(__file__).parent.absolute()
SEQ_LEN, ROWS, STEPS, KILLED_AT, SFT_STEPS = 512, 4, 120, 20, 20
SFT_LEN: Final = 1024
MIDDLE: Final = STEPS // 2 - 1
"""The batch that is looked into."""
PYTHON: Final = ("torch", "sympy", "networkx")
"""Packages with Python sources: what is cut by a grammar takes the longest to make."""
BEGAN: Final = time.monotonic()
PICTURES_S: Final = 60
STYLE: Final = (
    "text{font:11px system-ui,sans-serif;fill:#24292f}"
    ".page{fill:#fff}.live{fill:#e8f1ea}.axis,.rule,polyline{fill:none}"
    ".axis{stroke:#57606a}.rule{stroke:#8c959f;stroke-dasharray:4 4}"
    ".pretrain{stroke:#0b6e4f;stroke-width:1.5}.tune{stroke:#8a3ffc;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}.live{fill:#12261e}"
    ".axis{stroke:#9da7b3}.pretrain{stroke:#3fb68b}.tune{stroke:#b794f6}}"
)
ENVIRONMENT: Final = {
    **os.environ,
    # threads that spin while they wait make a step eight times as long where a core is busy
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",  # the other core makes the data
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
}

PIPELINE: Final = """# Written by examples/demo.py.
[source.code]
inputs = {inputs}
[source.code.read]
suffixes = [".h", ".hpp", ".cuh", ".py"]
[source.code.filter]
preset = "code"

[source.talk]
kind = "conversations"
inputs = ["talk.jsonl"]

[tokenizer]
path = "tokenizer"
inputs = {learned}
[tokenizer.train]
vocab_size = 2048
suffixes = [".h"]
special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

[dedup]
kind = "near"
[chunk]
max_tokens = {seq_len}
[chat]
max_length = {sft_len}
[shards]
rows_per_file = 400
[follow]
complete = true
[work]
workers = 1
max_memory_bytes = "512MB"  # less is read of each input before the first shard

[push]
url = "bucket"
[pull]
dir = "local"

[loader]
path = {{ code = "local/code" }}
tokenizer = "tokenizer"
chunk_size = {seq_len}
batch_size = {rows}
[loader.plan]
buffer_pieces = 64
ramp = true

[train]
command = {command}
log = "train.jsonl"
"""


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def run(*command: str) -> None:
    """Run a command to its end, in the demo's directory."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    subprocess.run(command, check=True, cwd=OUT, env=ENVIRONMENT)


def read_steps(name: str) -> list[dict[str, Any]]:
    path = OUT / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shards_of(dataset: Path) -> tuple[int, bool]:
    """How many shards the log has by now, and whether it is sealed."""
    try:
        state = Log.open(dataset).state
    except NoDataset:
        return 0, False
    return len(state.split("train")), state.sealed is not None


# --- 1: a pipeline -------------------------------------------------------------------------------


def write_pipeline() -> None:
    packages = {name: Path(importlib.import_module(name).__file__ or "").parent for name in PYTHON}
    headers = [packages["torch"] / "include", Path(pyarrow.get_include()) / "arrow"]
    inputs = [*map(str, headers), *(str(packages[name]) for name in PYTHON if name != "torch")]
    inputs += [  # one of its folders holds the headers
        str(folder)
        for folder in sorted(packages["torch"].iterdir())
        if folder != headers[0] and folder.is_dir() and any(folder.rglob("*.py"))
    ]
    command = [
        *(sys.executable, str(EXAMPLES / "base_train.py"), "--data_dir", "code=local/code"),
        *("--tokenizer", "tokenizer", "--streaming_data", "--max_seq_len", str(SEQ_LEN)),
        *("--total_batch_size", str(ROWS), "--device_batch_size", str(ROWS)),
        *("--depth", "2", "--dim", "128", "--lr", "4e-3", "--num_steps", str(STEPS)),
        *("--plan", "buffer_pieces=64,ramp=true", "--checkpoint_dir", "checkpoints"),
        *("--save_every", "10", "--resume", "--log_file", "train.jsonl"),
    ]
    text = PIPELINE.format(
        inputs=json.dumps(inputs), learned=json.dumps([str(headers[1])]), seq_len=SEQ_LEN,
        sft_len=SFT_LEN, rows=ROWS, command=json.dumps(shlex.join(command)),
    )  # fmt: skip
    (OUT / "pipeline.toml").write_text(text)


# --- 2: all stages at once, killed once ----------------------------------------------------------


def start() -> "subprocess.Popen[bytes]":
    command = ["penstock", "run", "pipeline.toml"]
    print(f"\n$ {shlex.join(command)}", flush=True)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *command[1:]], cwd=OUT, env=ENVIRONMENT,
        stderr=None if sys.stderr.isatty() else subprocess.DEVNULL,
    )  # fmt: skip


def stages_of(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have, where /proc tells."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *stages_of(child)]
    return found


def run_killed_once() -> int:
    """Watch the pipeline, print a line when there is news, and kill it all once: after which
    step."""
    conductor = start()
    told, was_sealed, killed = 0.0, False, 0
    while conductor.poll() is None:
        time.sleep(0.25)
        (shards, sealed), steps = shards_of(OUT / "data" / "code"), read_steps("train.jsonl")
        done = steps[-1]["step"] if steps else 0
        if sealed and not was_sealed:
            was_sealed = True
            say(f"the dataset is sealed: {shards} shards; the trainer is at step {done}")
        if done >= KILLED_AT and not killed:
            killed = done
            stages = stages_of(conductor.pid)
            conductor.send_signal(signal.SIGKILL)
            conductor.wait()
            deadline = time.monotonic() + 10
            while left := [pid for pid in stages if Path(f"/proc/{pid}").exists()]:
                if time.monotonic() > deadline:
                    sys.exit(f"stages outlive penstock run: {left}")
                time.sleep(0.05)
            say(
                f"penstock run and its {len(stages)} processes are killed after step {done}; again:"
            )
            conductor = start()
        elif time.monotonic() - told > 5:
            told = time.monotonic()
            loss = f"step {done}, loss {steps[-1]['loss']:.3f}" if steps else "no step yet"
            say(f"{shards:3} shards made, {'sealed' if sealed else 'more to come'}; {loss}")
    if conductor.returncode:
        sys.exit("the pipeline failed: see its output above, and demo_out/pipeline.run")
    return killed


# --- 4: the account ------------------------------------------------------------------------------


def batches_of_finished() -> tuple[list[str], float, str]:
    """From the finished dataset, by the pipeline's own [loader]: the hash of each batch that was to
    be trained, the entropy of their tokens by frequency, and what the middle one begins with."""
    sys.path.insert(0, str(EXAMPLES))
    from base_train import joint_hash, row_hashes

    hashes, counts, first = [], np.zeros(1 << 16, np.int64), ""
    with PretrainDataLoader(**read_run(OUT / "pipeline.toml")) as loader:
        for batch in loader:
            hashes.append(joint_hash(row_hashes(batch.input_ids)))
            trained = batch.labels[batch.loss_mask.astype(bool)]
            counts += np.bincount(trained[trained >= 0], minlength=len(counts))
            if len(hashes) == MIDDLE + 1:
                span = loader.explain(batch)[0]
                first = f"{span.document['source']}, bytes {span.file_bytes}"
            if len(hashes) == STEPS:
                break
    shares = counts[counts > 0] / counts.sum()
    return hashes, float(-(shares * np.log(shares)).sum()), first


def sealed_at() -> float:
    """When the producer sealed the dataset, by its own events."""
    events = (OUT / "data" / "code" / "_events.jsonl").read_text().splitlines()
    ends = [one for one in map(json.loads, events) if one["kind"] == "end" and one["sealed"]]
    return float(ends[0]["time"])


def account(killed: int) -> list[str]:
    """Compare what was trained with what there was to train on; the claims that are false."""
    lines = read_steps("train.jsonl")
    trained = {line["step"]: line for line in lines}
    hashes, entropy, first = batches_of_finished()
    seal, losses = sealed_at(), [trained[step]["loss"] for step in sorted(trained)]
    before = sum(line["time"] < seal for line in trained.values())
    sft = [line["loss"] for line in read_steps("sft.jsonl")]
    loss = float(np.mean(losses[-20:]))
    state = Log.open(OUT / "data" / "code").state
    tokens = sum(file.tokens or 0 for file in state.split("train"))
    taught = float(np.mean(sft[-5:]))
    took = time.monotonic() - BEGAN
    claims = {
        f"batches   {len(trained)} trained, each the one that the finished dataset gives, in order;"
        f" {len(lines) - len(trained)} of them twice, after the kill": (
            [trained[step]["batch"] for step in sorted(trained)] == hashes
            and sorted(trained) == list(range(1, STEPS + 1))
        ),
        f"live      {before} of {len(trained)} steps were trained before the dataset was sealed: "
        f"at least a third": 3 * before >= len(trained),
        f"loss      {losses[0]:.3f} at first, {loss:.3f} at the end, over 20 steps of new text: "
        f"below the entropy of the tokens, {entropy:.3f}": loss < entropy,
        f"tuned     {len(sft)} steps on conversations: loss {sft[0]:.3f} at first, {taught:.3f} at "
        "the end": len(sft) == SFT_STEPS and taught < sft[0],
    }
    print()
    for claim, holds in claims.items():
        print(claim if holds else f"FALSE     {claim}")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"time      {took:.0f} s in all, {spent.ru_utime + spent.ru_stime:.0f} of CPU but for what "
        f"was killed; the load was {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    )
    print(f"made      {len(state.split('train'))} shards, {tokens:,} tokens")
    print(f"explain   batch {MIDDLE} begins with {first}")
    draw_losses(losses, sft, entropy, before, killed)
    return [claim for claim, holds in claims.items() if not holds]


def draw_losses(
    losses: list[float], sft: list[float], entropy: float, before: int, killed: int
) -> None:
    """The loss of each step as an SVG, readable in light and dark mode."""
    width, height, left, top = 720, 320, 56, 24
    both = [*losses, *sft]
    most, wide, high = max(*both, entropy) * 1.05, width - left - 16, height - top - 48

    def x(step: float) -> float:
        return left + wide * step / len(both)

    def y(loss: float) -> float:
        return top + high * (1 - loss / most)

    def line(values: list[float], first: int, kind: str) -> str:
        points = " ".join(f"{x(first + k):.1f},{y(v):.1f}" for k, v in enumerate(values, 1))
        return f'<polyline class="{kind}" points="{points}"/>'

    def text(at: tuple[float, float], words: str, anchor: str = "start") -> str:
        return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}">{words}</text>'

    ticks = [text((left - 6, y(v) + 4), str(v), "end") for v in range(int(most) + 1)]
    steps = range(0, len(both) + 1, 25)
    ticks += [text((x(step), height - 30), str(step), "middle") for step in steps]
    parts = [
        f'<rect class="live" x="{left}" y="{top}" width="{x(before) - left:.1f}" '
        f'height="{high}"/>',
        text((left + 6, y(0) - 8), f"{before} steps before the seal"),
        f'<path class="rule" d="M{x(killed):.1f} {top}V{y(0) - 20:.1f}"/>',
        text((x(killed) + 5, y(0) - 26), "all of it killed, and resumed"),
        f'<path class="rule" d="M{left} {y(entropy):.1f}H{left + wide}"/>',
        text((left + wide, y(entropy) - 5), f"entropy of the tokens, {entropy:.2f}", "end"),
        f'<path class="axis" d="M{left} {top}V{top + high}H{left + wide}"/>',
        line(losses, 0, "pretrain"), line(sft, len(losses), "tune"),
        text((x(len(losses)) + 5, y(0) - 8), "conversations"),
        text((left + wide / 2, height - 10), "step", "middle"),
        text((left, 14), "loss"), *ticks,
    ]  # fmt: skip
    (OUT / "loss.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="The loss of each step"><style>{STYLE}</style>'
        f'<rect class="page" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


# --- 5: the pictures -----------------------------------------------------------------------------


def take_pictures() -> str:
    """Pictures of the page over all of this; why there are none, where there are none."""
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        return "there is no chromium here; scripts/tools installs one"
    root = EXAMPLES.parent
    paths = [str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    taking = subprocess.Popen(
        [sys.executable, str(root / "scripts" / "screenshots.py"), "--of", str(OUT),
         "--batch", str(MIDDLE)],
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        told, _ = taking.communicate(timeout=PICTURES_S)
    except subprocess.TimeoutExpired:
        return f"the browser has not answered for {PICTURES_S} s"
    finally:
        if taking.poll() is None:
            os.killpg(taking.pid, signal.SIGKILL)  # with the page's server
            taking.communicate()
    return (told.strip().splitlines() or ["no word of it"])[-1] if taking.returncode else ""


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    run(sys.executable, str(EXAMPLES / "make_tool_calls.py"), "--count", "400", "--output",
        "talk.jsonl")  # fmt: skip
    write_pipeline()
    say(f"the pipeline is {OUT / 'pipeline.toml'}")
    killed = run_killed_once()
    run(sys.executable, str(EXAMPLES / "sft_train.py"), "--data", "talk=local/talk",
        "--tokenizer", "tokenizer", "--base", "checkpoints", "--max_length", str(SFT_LEN),
        "--num_steps", str(SFT_STEPS), "--batch_size", "4", "--lr", "1e-3", "--no_compile",
        "--warmup_steps", "2", "--log_file", "sft.jsonl", "--print_every", "5")  # fmt: skip
    for name in ("code", "talk"):
        run("penstock", "verify", f"local/{name}")
    false = account(killed)
    missing = take_pictures()
    if missing:
        print(f"pictures  of the page: none, {missing}")
    else:
        print(f"pictures  {OUT}/watch_pipeline.png and {OUT}/watch_batch.png")
    print(f"""
look at   {OUT}/loss.svg                       the loss of each step
          {OUT}/pipeline.toml                  what was run
          {OUT}/pipeline.run                   events and output of each stage
          penstock show {OUT}/data/code        what is in the dataset
          penstock watch {OUT}                 all of it as a page, down to a token
          penstock explain --config {OUT}/pipeline.toml --batch {MIDDLE}
""")
    if false:
        sys.exit(f"{len(false)} claims above are false")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
