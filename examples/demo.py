"""The main job end to end, on text that is there already: from raw files to a model that learns.

1. One process writes the Python library as JSON lines, in uneven pieces that stop in the middle of
   lines. Beside it, `penstock shard` turns what is there into shards, while the file still grows.
2. A tokenizer is trained on C++ headers that come with pyarrow.
3. A trainer waits for data. `penstock chunk` filters, deduplicates and cuts those headers; the
   trainer begins with the first shards, while the others are made. It is killed, and goes on.
4. The account: every batch once, every token somewhere, the loss against the entropy of the tokens.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow

from penstock import Log, mark_done
from penstock.errors import NoDataset

OUT: Final = Path("demo_out")
PIECE_BYTES: Final = 700_001  # not a whole number of lines, on purpose
TRAINER: Final = Path(__file__).with_name("base_train.py")
HEADERS: Final = ("acero", "array", "compute", "dataset", "io", "util")  # 1.7 MB of pyarrow's
SEQ_LEN, ROWS, KILLED_AT = 512, 8, 40
PAUSE_S: Final = 1.0
BEGAN: Final = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def penstock(*command: str) -> list[str]:
    print(f"\n$ penstock {' '.join(command)}", flush=True)
    return [sys.executable, "-m", "penstock.cli", *command]


def run(*command: str) -> None:
    subprocess.run(penstock(*command), check=True)


def shards_of(dataset: Path) -> tuple[list[str], bool]:
    """The shards that the log has by now, and whether it is sealed."""
    try:
        state = Log.open(dataset).state
    except NoDataset:
        return [], False
    return [str(dataset / shard.name) for shard in state.split("train")], state.sealed is not None


# --- 1 and 2: shards of a growing file, a tokenizer ----------------------------------------------


def produce(path: Path) -> None:
    """Write the standard library as JSONL over a few seconds, then say that it is complete."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in library.rglob("*.py") if "site-packages" not in p.parts)
    lines = (
        json.dumps({"text": file.read_text("utf-8", "replace"), "path": file.name}) + "\n"
        for file in files
        if file.stat().st_size
    )
    data = "".join(lines).encode()
    with path.open("wb", buffering=0) as out:
        for start in range(0, len(data), PIECE_BYTES):
            out.write(data[start : start + PIECE_BYTES])
            time.sleep(0.05)
    mark_done(path)


def shard_what_grows() -> None:
    raw, dataset = OUT / "raw.jsonl", OUT / "python"
    producer = multiprocessing.get_context("spawn").Process(target=produce, args=(raw,))
    producer.start()
    sharder = subprocess.Popen(
        penstock("shard", "--input", str(raw), "--parquet_dir", str(dataset),
                 "--rows_per_file", "300"),
    )  # fmt: skip
    seen = 0
    while sharder.poll() is None:
        shards, _ = shards_of(dataset)
        if len(shards) > seen:
            ended = Path(f"{raw}.done").exists()
            written = "is complete" if ended else "is still being written"
            say(f"{len(shards)} shards published; {raw} {written}")
        seen = len(shards)
        time.sleep(0.3)
    producer.join()
    run("verify", str(dataset), "--full")
    run("show", str(dataset), "--rows", "1")


# --- 3: a trainer beside its producer ------------------------------------------------------------


def start_trainer(chunks: Path, tokenizer: Path) -> "subprocess.Popen[bytes]":
    command = [
        *(str(TRAINER), "--data_dir", f"cpp={chunks}", "--tokenizer", str(tokenizer)),
        *("--streaming_data", "--max_seq_len", str(SEQ_LEN), "--total_batch_size", str(ROWS)),
        *("--device_batch_size", str(ROWS), "--depth", "2", "--dim", "128", "--lr", "4e-3"),
        *("--plan", "buffer_pieces=64,ramp=true", "--checkpoint_dir", str(OUT / "checkpoints")),
        *("--save_every", "25", "--resume", "--log_file", str(OUT / "train.jsonl")),
        *("--ledger", str(OUT / "ledger.json")),
    ]
    if not (OUT / "train.jsonl").exists():
        print(f"\n$ python {' '.join(command)}", flush=True)
    # threads that spin while they wait make a step eight times as long where a core is busy
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=environment)


def read_steps() -> list[dict[str, Any]]:
    path = OUT / "train.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def hold_back(process: "subprocess.Popen[bytes]", dataset: Path) -> None:
    """Stop a producer for a second after each shard: these few files would take it two seconds,
    and a real job takes hours."""
    seen = 0
    while process.poll() is None:
        shards, sealed = shards_of(dataset)
        if len(shards) > seen and not sealed:
            process.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            process.send_signal(signal.SIGCONT)
        seen = len(shards)
        time.sleep(0.04)


def train_while_chunking(headers: Path, chunks: Path, tokenizer: Path) -> None:
    """Watch both; print a line when there is news."""
    trainer = start_trainer(chunks, tokenizer)
    say("the trainer waits: there is no dataset yet")
    chunker = subprocess.Popen(
        penstock("chunk", "--inputs", str(headers), "--parquet_dir", str(chunks),
                 "--max_tokens", str(SEQ_LEN), "--rows_per_file", "40", "--workers", "1",
                 "--tokenizer", str(tokenizer), "--tokens", "--filter", "code", "--dedup", "near"),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    threading.Thread(target=hold_back, args=(chunker, chunks), daemon=True).start()
    told, was_sealed, killed = 0.0, False, False
    while trainer.poll() is None:
        time.sleep(0.25)
        (shards, sealed), steps = shards_of(chunks), read_steps()
        done = steps[-1]["step"] if steps else 0
        if sealed and not was_sealed:
            was_sealed = True
            say(f"the dataset is sealed: {len(shards)} shards; {done} steps were trained before")
        if done >= KILLED_AT and not killed:
            killed = True
            trainer.kill()
            trainer.wait()
            say(f"the trainer is killed after step {done}, and the same command started again")
            trainer = start_trainer(chunks, tokenizer)
        elif shards and time.monotonic() - told > (8 if sealed else 4):
            told = time.monotonic()
            loss = f"loss {steps[-1]['loss']:.3f}" if steps else "no loss yet"
            state = "sealed" if sealed else "more to come"
            say(f"{len(shards):3} shards, {state}; step {done}, {loss}")
    if trainer.returncode or chunker.wait():
        sys.exit("the trainer or its producer failed")


# --- 4: the account ------------------------------------------------------------------------------


def account(chunks: Path, tokenizer: Path) -> bool:
    """Compare what was trained with what there was to train on."""
    from base_train import joint_hash, row_hashes

    from penstock import LoaderRun, PlanConfig, PretrainDataLoader

    trained = {line["step"]: line for line in read_steps()}
    with PretrainDataLoader(
        {"cpp": str(chunks)}, str(tokenizer), SEQ_LEN, batch_size=ROWS,
        plan=PlanConfig(buffer_pieces=64, ramp=True), run=LoaderRun(rank=0, world_size=1),
    ) as loader:  # fmt: skip
        batches = list(loader)
        expected = [joint_hash(row_hashes(batch.input_ids)) for batch in batches]
        middle = len(batches) // 2
        span = loader.explain(batches[middle])[0]
    same = [line["batch"] for line in trained.values()] == expected
    (ledger,) = json.loads((OUT / "ledger.json").read_text())
    counts = np.zeros(1 << 16, np.int64)
    for shard in shards_of(chunks)[0]:
        tokens = pyarrow.ipc.open_file(shard.replace(".parquet", ".tokens.arrow")).get_batch(0)
        counts += np.bincount(tokens.column("tokens").values.to_numpy(), minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    entropy = float(-(shares * np.log(shares)).sum())
    losses = [line["loss"] for line in trained.values()]
    loss = float(np.mean(losses[-20:]))
    print(f"""
batches   {len(trained)} trained, {len(expected)} in the finished dataset: \
{"the same, in the same order" if same else "NOT THE SAME"}
ledger    {ledger["documents"]:,} documents, {ledger["read"]:,} tokens read = \
{ledger["trained"]:,} trained + {ledger["context"]:,} context + {ledger["cropped"]:,} cropped + \
{ledger["skipped"]:,} skipped
explain   batch {middle} begins with {span.document["source"]}, bytes {span.file_bytes}
loss      {losses[0]:.3f} at first, {loss:.3f} at the end (mean of 20 steps, on new text)
entropy   {entropy:.3f}, of the tokens by their frequency: \
{"the model knows more than that" if loss < entropy else "THE MODEL DOES NOT BEAT IT"}
""")
    return same and loss < entropy


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    shard_what_grows()
    headers, tokenizer, chunks = OUT / "headers", OUT / "tokenizer", OUT / "cpp"
    for name in HEADERS:
        shutil.copytree(Path(pyarrow.get_include()) / "arrow" / name, headers / name)
    run("tokenizer", "train", "--inputs", str(headers), "--vocab_size", "2048",
        "--output", str(tokenizer))  # fmt: skip
    train_while_chunking(headers, chunks, tokenizer)
    run("verify", str(chunks), "--full")
    proven = account(chunks, tokenizer)
    say(f"raw files to a model that has learned from them: {OUT}")
    sys.exit(0 if proven else 1)


if __name__ == "__main__":
    main()
