"""The trainer: to the end, beside its producer, killed and gone on with, on other ranks.

In:    JSON lines, sharded with their tokens; examples/base_train.py in processes of its own
Out:   the hash of every batch it trained on, from its log
Keeps: the batches of a run that was disturbed are those of the loader on the finished dataset

make check: a kill, and a killed rank of two with one rank after it. make faults: many kills of
either, and two ranks to the end.
"""

import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest

from penstock import (
    ChunkConfig,
    FollowConfig,
    PlanConfig,
    PretrainDataLoader,
    ShardConfig,
    Tokenizer,
    prepare_dataset,
    shard_jsonl,
)
from penstock.errors import BadConfig
from penstock.ingest.lines import mark_done
from supply.nested import nested

MakeSources = Callable[[int, int], dict[str, bytes]]
TRAINER: Final = Path(__file__).parents[2] / "examples" / "base_train.py"
PLAN: Final[dict[str, Any]] = {
    "pool_size": 60, "refill_threshold": 45, "buffer_pieces": 8, "ramp": True,
}  # fmt: skip
SEQ_LEN, ROWS, SAVE_EVERY, SHARD_ROWS = 64, 6, 7, 20
TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@dataclass(frozen=True, slots=True)
class Setting:
    """A finished dataset, the lines it is made of, and the batches that it gives."""

    lines: list[bytes]
    dataset: Path
    tokenizer: Path
    documents: int
    batches: list[str]

    def command(self, folder: Path, dataset: Path, *more: str, ranks: int = 1) -> list[str]:
        start = [*TORCHRUN, "--nproc_per_node", str(ranks)] if ranks > 1 else [sys.executable]
        plan = ",".join(f"{name}={json.dumps(value)}" for name, value in PLAN.items())
        return [
            *(*start, str(TRAINER), "--data_dir", f"code={dataset}", "--plan", plan),
            *("--tokenizer", str(self.tokenizer), "--max_seq_len", str(SEQ_LEN)),
            *("--total_batch_size", str(ROWS), "--device_batch_size", "4"),
            *("--depth", "1", "--dim", "32", "--checkpoint_dir", str(folder / "checkpoints")),
            *("--save_every", str(SAVE_EVERY), "--log_file", str(folder / "log.jsonl")),
            *("--ledger", str(folder / "ledger.json"), "--stall_s", "60", *more),
        ]


def write_dataset(lines: Path, dataset: Path, tokenizer: Path) -> None:
    shard_jsonl(
        [str(lines)], str(dataset), ShardConfig(rows_per_file=SHARD_ROWS),
        FollowConfig(complete=True), tokenizer=Tokenizer.load(tokenizer), tokens=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def setting(
    tmp_path_factory: pytest.TempPathFactory, sources: MakeSources, tokenizer_folder: Path
) -> Setting:
    folder = tmp_path_factory.mktemp("trainer")
    lines = [
        json.dumps({"text": text.decode()}).encode() + b"\n" for text in sources(5, 200).values()
    ]
    (folder / "lines.jsonl").write_bytes(b"".join(lines))
    write_dataset(folder / "lines.jsonl", folder / "dataset", tokenizer_folder)
    with PretrainDataLoader(
        {"code": str(folder / "dataset")}, str(tokenizer_folder), SEQ_LEN,
        **nested(global_batch_size=ROWS, plan=PlanConfig(**PLAN), rank=0, world_size=1),
    ) as loader:  # fmt: skip
        batches = [hash_of(batch.input_ids) for batch in loader]
        (line,) = loader.ledger()
    assert len(batches) > 60
    return Setting(lines, folder / "dataset", tokenizer_folder, line.documents, batches)


def hash_of(input_ids: Any) -> str:
    """What the trainer writes of a batch."""
    rows = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in input_ids]
    return hashlib.sha256(b"".join(rows)).hexdigest()[:16]


def read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "errors").open("a") as errors:
        return subprocess.Popen(command, env=environment, text=True, stdout=errors, stderr=errors)


def run(command: list[str], folder: Path) -> None:
    code = start(command, folder).wait(timeout=120)
    assert code == 0, (folder / "errors").read_text()[-3000:]


def wait_for_steps(folder: Path, steps: int, running: "subprocess.Popen[str]") -> None:
    """Until its log has so many lines."""
    deadline = time.monotonic() + 60
    while not (folder / "log.jsonl").exists() or (
        (folder / "log.jsonl").read_bytes().count(b"\n") < steps
    ):
        assert running.poll() is None, (folder / "errors").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def check_whole(folder: Path, setting: Setting) -> None:
    """Every batch was trained on, in order; what was done again after a kill was the same."""
    lines = read_log(folder)
    found: dict[int, str] = {}
    for line in lines:
        assert found.setdefault(line["step"], line["batch"]) == line["batch"]
        assert math.isfinite(line["loss"])
    assert list(found) == list(range(1, len(setting.batches) + 1))
    assert list(found.values()) == setting.batches
    for before, after in itertools.pairwise(lines):
        if after["step"] != before["step"] + 1:  # a restart, from the newest whole checkpoint
            assert after["step"] % SAVE_EVERY == 1
            assert 0 <= before["step"] + 1 - after["step"] <= SAVE_EVERY
    (ledger,) = json.loads((folder / "ledger.json").read_text())
    assert ledger["documents"] == setting.documents
    told = {line["step"]: line["tokens"] for line in lines}
    assert ledger["trained"] == sum(told.values()) > 0
    used = ledger["trained"] + ledger["context"]
    assert ledger["read"] == used
    assert used + ledger["padded"] == len(setting.batches) * ROWS * SEQ_LEN


def load_trainer() -> Any:
    spec = importlib.util.spec_from_file_location("base_train", TRAINER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_do_not_see_each_other_and_padding_is_no_nan() -> None:
    import torch

    trainer = load_trainer()
    torch.manual_seed(0)
    model = trainer.GPT(vocab_size=50, depth=2, dim=32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(0, 50, (1, 12))
    positions = torch.tensor([[*range(5), *range(7)]])
    labels = ids.clone()
    labels[0, :6] = -100  # of the first document, and of the second one's first token
    loss = model(ids, positions, labels)
    alone = model(ids[:, 5:], positions[:, 5:], labels[:, 5:])
    assert torch.allclose(loss, alone, rtol=1e-4)
    joined = model(ids, torch.arange(12)[None], labels)
    assert not torch.allclose(loss, joined, rtol=1e-4)
    nothing = model(ids, positions, torch.full_like(ids, -100))
    nothing.backward()
    assert nothing.item() == 0.0
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_layers_see_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    trainer = load_trainer()
    assert trainer.layer_windows("sL", 4, 8) == [4, 0, 4, 0]
    assert trainer.layer_windows("S", 1, 8) == [0]
    torch.manual_seed(0)
    model = trainer.GPT(50, 2, 32, trainer.layer_windows("S", 2, 8))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids, positions = torch.randint(0, 50, (1, 8)), torch.arange(8)[None]
    labels = torch.full_like(ids, -100)
    labels[0, 7] = 3
    losses = {}
    for windows in ([3, 3], [3, 0]):
        model.windows = windows
        losses[windows[1]] = [
            model(ids.clone().index_fill_(1, torch.tensor([0]), token), positions, labels).item()
            for token in (1, 2)
        ]
    # two layers of three tokens each reach back over four: the first of seven is out of sight
    assert losses[3][0] == losses[3][1]
    assert losses[0][0] != losses[0][1]
    for flags, words in (
        (["--window_pattern", "LX"], "--window_pattern is 'LX'"),
        (["--xla_flash_attn"], "--xla_flash_attn needs torch_xla"),
    ):
        args = trainer.parse_flags(["--data_dir", "a", "--vocab_size", "9", *flags])
        with pytest.raises(BadConfig, match=words):
            trainer.train(args, trainer.Ranks())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--save_every", "0"), "0 is not 1 or more"),
        (("--warmup_steps", "-1"), "-1 is not 0 or more"),
        (("--device_batch_size", "0"), "0 is not 1 or more"),
        (("--depth", "x"), "invalid whole number value: 'x'"),
        (("--dim", "33"), "33 is not 32 or more, a multiple of 32"),
        (("--plan", "pol_size=3"), "'pol_size' is unknown; choose from batch_tokens, behind"),
        (("--plan", "pool_size=few"), "pool_size is 'few', no int"),
        (("--plan", "ramp=3"), "ramp is 3, no bool"),
        (("--plan", "seed=3"), "seed is given with --seed"),
        (("--weights", "A"), "'A' is not of the form name=value"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_trainer().parse_flags(["--data_dir", "a", *flags])
    assert caught.value.code == 2
    assert f"argument {flags[0]}: {words}" in capsys.readouterr().err


def test_without_a_warm_up(setting: Setting, tmp_path: Path) -> None:
    trainer, log = load_trainer(), tmp_path / "log.jsonl"
    command = setting.command(tmp_path, setting.dataset, "--warmup_steps", "0", "--num_steps", "2")
    args = trainer.parse_flags([*command[2:], "--plan", "ramp=false"])
    assert args.plan == {"ramp": False}
    trainer.train(args, trainer.Ranks())
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]


def test_the_last_line_says_why_it_ended_and_what_was_trained(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, dataset = load_trainer(), tmp_path / "dataset"
    (tmp_path / "lines.jsonl").write_bytes(b"".join(setting.lines[:12]))
    write_dataset(tmp_path / "lines.jsonl", dataset, setting.tokenizer)
    command = setting.command(tmp_path, dataset, "--resume", "--print_every", "1000")[2:]
    last = []
    for more in (["--num_steps", "3"], ["--num_steps", "3"], [], []):
        trainer.train(trainer.parse_flags([*command, *more]), trainer.Ranks())
        last.append(capsys.readouterr().out.splitlines()[-1])
    lines = read_log(tmp_path)
    whole = len(lines)
    assert 3 < whole < len(setting.batches)
    tokens = [sum(line["tokens"] for line in lines[:steps]) for steps in (3, whole)]
    folder = tmp_path / "checkpoints"
    few, all_of_it = (
        f"{count:,} tokens trained in all; checkpoint {folder / f'step_{step:08d}'}"
        for count, step in zip(tokens, (3, whole), strict=True)
    )
    losses = [f"last loss {lines[steps - 1]['loss']:.3f}" for steps in (3, whole)]
    assert last == [
        f"done at step 3: --num_steps 3 is reached; {losses[0]}, {few}",
        f"done at step 3: --num_steps 3 is reached; nothing was left to do, {few}",
        f"done at step {whole}: the data has ended; {losses[1]}, {all_of_it}",
        f"done at step {whole}: the data has ended; nothing was left to do, {all_of_it}",
    ]


def test_a_model_of_another_shape_is_refused(setting: Setting, tmp_path: Path) -> None:
    trainer = load_trainer()
    command = setting.command(tmp_path, setting.dataset, "--num_steps", "1")[2:]
    trainer.train(trainer.parse_flags(command), trainer.Ranks())
    for flags, words in (
        (("--depth", "2"), "--depth is 2"),
        (("--dim", "64"), "--dim is 64"),
        (("--depth", "3", "--dim", "64"), "--depth is 3, --dim is 64"),
    ):
        args = trainer.parse_flags([*command, "--resume", *flags])
        with pytest.raises(BadConfig, match=words) as caught:
            trainer.train(args, trainer.Ranks())
        assert str(tmp_path / "checkpoints" / "step_00000001") in caught.value.where
    assert caught.value.why == "it was saved with depth 1, dim 32"


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(
    setting: Setting, tmp_path: Path
) -> None:
    trainer = load_trainer()
    (tmp_path / "checkpoints").write_text("a file")
    args = trainer.parse_flags(setting.command(tmp_path, setting.dataset)[2:])
    with pytest.raises(BadConfig, match=r"no checkpoint can be written to .*checkpoints") as caught:
        trainer.train(args, trainer.Ranks())
    assert "--checkpoint_dir" in caught.value.do
    assert not (tmp_path / "log.jsonl").exists()
    # what is tried leaves nothing behind
    trainer.Checkpoints(tmp_path / "new").check_writable()
    assert list((tmp_path / "new").iterdir()) == []


def test_rows_are_as_long_as_the_chunks(setting: Setting, tmp_path: Path) -> None:
    trainer = load_trainer()
    (tmp_path / "lines.jsonl").write_bytes(b"".join(setting.lines[:20]))

    def found_for(dataset: Path, *flags: str) -> int:
        flags = ("--data_dir", str(dataset), *flags)
        length: int = trainer.found_length(trainer.parse_flags(list(flags)))
        return length

    def chunk(max_tokens: int) -> None:
        prepare_dataset(
            [str(tmp_path / "lines.jsonl")], str(tmp_path / "data"),
            [ChunkConfig(max_tokens=max_tokens)], tokenizer=Tokenizer.load(setting.tokenizer),
        )  # fmt: skip

    assert found_for(tmp_path / "data") == found_for(setting.dataset) == 1024
    began = threading.Timer(0.3, chunk, [96])
    began.start()
    assert found_for(tmp_path / "data", "--streaming_data") == 96
    began.join()
    assert found_for(tmp_path / "data") == 96
    command = setting.command(tmp_path, tmp_path / "data", "--num_steps", "1")[2:]
    at = command.index("--max_seq_len")
    args = trainer.parse_flags([*command[:at], *command[at + 2 :]])
    trainer.train(args, trainer.Ranks())
    assert args.max_seq_len == 96


def test_to_the_end_of_a_sealed_dataset(setting: Setting, tmp_path: Path) -> None:
    run(setting.command(tmp_path, setting.dataset), tmp_path)
    check_whole(tmp_path, setting)
    losses = [line["loss"] for line in read_log(tmp_path)]
    assert np.mean(losses[-10:]) < losses[0] - 0.5
    # begun again it is refused; gone on with, it has nothing left to do
    checkpoints = load_trainer().Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(BadConfig, match="there is a checkpoint"):
        checkpoints.restore(None, None, None, resume=False)
    run(setting.command(tmp_path, setting.dataset, "--resume"), tmp_path)
    check_whole(tmp_path, setting)


def test_beside_its_producer(setting: Setting, tmp_path: Path) -> None:
    dataset, growing = tmp_path / "live", tmp_path / "growing.jsonl"
    trainer = start(setting.command(tmp_path, dataset, "--streaming_data"), tmp_path)
    half = len(setting.lines) // 2
    growing.write_bytes(b"".join(setting.lines[:half]) + setting.lines[half][:10])
    shard = start(
        [
            *(sys.executable, "-m", "penstock.cli", "shard", "--input", str(growing)),
            *("--parquet_dir", str(dataset), "--rows_per_file", str(SHARD_ROWS)),
            *("--tokenizer", str(setting.tokenizer), "--tokens"),
        ],
        tmp_path,
    )
    wait_for_steps(tmp_path, 5, trainer)  # half of the documents are not even written yet
    with growing.open("ab") as file:
        file.write(setting.lines[half][10:] + b"".join(setting.lines[half + 1 :]))
    mark_done(growing)
    assert shard.wait(timeout=60) == 0, (tmp_path / "errors").read_text()[-3000:]
    assert trainer.wait(timeout=60) == 0, (tmp_path / "errors").read_text()[-3000:]
    check_whole(tmp_path, setting)


def kill_and_go_on(
    setting: Setting, folder: Path, chance: random.Random, kills: int, ranks: list[int]
) -> None:
    """Kill the trainer, or one of its ranks, so often; then let it end."""
    for kill in range(kills):
        count = ranks[kill % len(ranks)]
        began = len(read_log(folder))
        running = start(setting.command(folder, setting.dataset, "--resume", ranks=count), folder)
        share = len(setting.batches) // (kills + 1)
        wait_for_steps(folder, began + chance.randint(SAVE_EVERY + 1, max(share, 9)), running)
        victim = psutil.Process(running.pid)
        if count > 1:
            rank = str(chance.randrange(count))
            found = (child for child in victim.children() if child.environ().get("RANK") == rank)
            (victim,) = found
        victim.send_signal(signal.SIGKILL)
        assert running.wait(timeout=60) != 0, "it was done before it was killed"
    last = ranks[kills % len(ranks)]
    run(setting.command(folder, setting.dataset, "--resume", ranks=last), folder)
    check_whole(folder, setting)
    assert {line["ranks"] for line in read_log(folder)} == set(ranks)


def test_killed_and_gone_on_with(setting: Setting, tmp_path: Path) -> None:
    kill_and_go_on(setting, tmp_path, random.Random(time.time_ns()), 1, [1])


def test_a_rank_of_two_is_killed_and_one_goes_on(setting: Setting, tmp_path: Path) -> None:
    kill_and_go_on(setting, tmp_path, random.Random(time.time_ns()), 1, [2, 1])


@pytest.mark.faults
@pytest.mark.parametrize("number", range(3))
def test_many_kills_on_changing_ranks(setting: Setting, tmp_path: Path, number: int) -> None:
    kill_and_go_on(setting, tmp_path, random.Random(number), 4, [1, 2, 3])


@pytest.mark.faults
def test_a_kill_does_no_harm_to_what_was_learned(setting: Setting, tmp_path: Path) -> None:
    for name, kills in (("whole", 0), ("killed", 3)):
        (tmp_path / name).mkdir()
        kill_and_go_on(setting, tmp_path / name, random.Random(1), kills, [1])
    whole, killed = (
        {line["step"]: line["loss"] for line in read_log(tmp_path / name)}
        for name in ("whole", "killed")
    )
    assert killed == pytest.approx(whole, abs=1e-3)


@pytest.mark.faults
def test_two_ranks_to_the_end(setting: Setting, tmp_path: Path) -> None:
    run(setting.command(tmp_path, setting.dataset, ranks=2), tmp_path)
    check_whole(tmp_path, setting)
