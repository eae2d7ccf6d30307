"""Fine-tuning: conversations that a seed makes, a model that calls tools after it, kills between.

In:    examples/make_tool_calls.py, base_train.py and sft_train.py, as a user runs them
Out:   the log of every step, and measured.json
Keeps: a run that was killed has the losses of one that was not; more well-formed calls than before

make check: one run to the end, one killed. make faults: a rank of two killed, again and again; two
ranks that measure; torch.compile.
"""

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest

from penstock import (
    ChatConfig,
    ConversationDataLoader,
    FollowConfig,
    LoaderRun,
    ShardConfig,
    Tokenizer,
    TrainConfig,
    shard_conversations,
    train_tokenizer,
)
from penstock.errors import BadConfig

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ROWS, LENGTH, SAVE_EVERY, KILLED_STEPS = 4, 640, 7, 18
COUNT, HELD, TOOLS = 440, 30, 3


def load(name: str) -> Any:
    """An example as a module; sft_train imports base_train from beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


@dataclass(frozen=True, slots=True)
class Setting:
    """Conversations, held ones, a tokenizer, and a base model that knows neither."""

    folder: Path
    tokenizer: Path
    base: Path

    def command(self, folder: Path, *more: str, ranks: int = 1) -> list[str]:
        start = [*TORCHRUN, "--nproc_per_node", str(ranks)] if ranks > 1 else [sys.executable]
        return [
            *(*start, str(EXAMPLES / "sft_train.py"), "--data", str(self.folder / "calls.jsonl")),
            *("--epochs", "3", "--batch_size", str(ROWS), "--lr", "4e-3", "--kernel", "current"),
            *("--save_every", str(SAVE_EVERY), "--no_compile", "--base", str(self.base)),
            *("--tokenizer", str(self.tokenizer), "--max_length", str(LENGTH)),
            *("--cache_dir", str(folder / "cache"), "--checkpoint_dir", str(folder / "sft")),
            *("--log_file", str(folder / "log.jsonl"), *more),
        ]


def run(command: list[str], folder: Path) -> None:
    code = start(command, folder).wait(timeout=240)
    assert code == 0, (folder / "errors").read_text()[-3000:]


def start(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "errors").open("a") as errors:
        return subprocess.Popen(command, env=environment, text=True, stdout=errors, stderr=errors)


def penstock_preset(name: str) -> str:
    """What `penstock audit-template NAME --jinja` prints."""
    command = [sys.executable, "-m", "penstock.cli", "audit-template", name, "--jinja"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("sft")
    calls = load("make_tool_calls")
    calls.write_rows(folder / "calls.jsonl", seed=0, count=COUNT, tools=TOOLS)
    calls.write_rows(folder / "held.jsonl", seed=1, count=2 * HELD, tools=TOOLS)
    # the base model reads what tools do, and has never seen a call
    texts = [
        tool.tells.format(**tool.arguments(rng), **tool.result(rng))
        for rng in map(calls.random.Random, range(60))
        for tool in list(calls.TOOLS.values())[:TOOLS]
    ]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "base.jsonl").write_text(lines)
    # the tokenizer reads as the model will: without the backslashes of JSON, with the template
    shown = (folder / "calls.jsonl").read_text().replace('\\"', '"')
    template = penstock_preset("chatml").replace("\\n", "\n")
    (folder / "corpus.txt").write_text(lines + shown + template * 200)
    train_tokenizer(
        [folder / "corpus.txt"], folder / "tokenizer",
        TrainConfig(vocab_size=1000, special_tokens=SPECIAL),
    )  # fmt: skip
    trainer = load("base_train")
    args = trainer.parse_flags(
        [
            *("--data_dir", str(folder / "base.jsonl"), "--tokenizer", str(folder / "tokenizer")),
            *("--max_seq_len", "128", "--depth", "2", "--dim", "64", "--num_steps", "10"),
            *("--checkpoint_dir", str(folder / "base"), "--streaming_data"),
        ]
    )
    with contextlib.redirect_stdout(None), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))  # where a raw file becomes a dataset
        trainer.train(args, trainer.Ranks())
    return Setting(folder, folder / "tokenizer", folder / "base")


def read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve(folder: Path) -> dict[int, tuple[str, int, float]]:
    """Batch, targets and loss of each step; a step that was done again gave the same."""
    found: dict[int, tuple[str, int, float]] = {}
    for line in read_log(folder):
        one = line["batch"], line["tokens"], line["loss"]
        assert found.setdefault(line["step"], one)[:2] == one[:2]
        found[line["step"]] = one
    return found


@pytest.fixture(scope="module")
def whole(setting: Setting) -> Path:
    """A run that nobody disturbs."""
    held = str(setting.folder / "held.jsonl")
    run(
        setting.command(setting.folder, "--held", held, "--held_count", str(HELD),
                        "--max_new_tokens", "96"),
        setting.folder,
    )  # fmt: skip
    return setting.folder


def test_it_calls_tools_more_often_than_before(whole: Path) -> None:
    told = json.loads((whole / "sft" / "measured.json").read_text())
    before, after = told["before"], told["after"]
    losses = [line["loss"] for line in read_log(whole)]
    assert (before["step"], after["step"]) == (0, len(losses))
    assert before["due"] == after["due"] > HELD / 3
    assert before["due"] + before["not_due"] == HELD
    assert before["share_well_formed"] == 0
    assert after["share_well_formed"] > 0.1
    assert after["well_formed"] >= after["right_tools"] >= after["exact"]
    assert after["share_well_formed"] == round(after["well_formed"] / after["due"], 4)
    assert np.mean(losses[-10:]) < losses[0] / 3
    lines = (whole / "errors").read_text().splitlines()
    assert json.dumps({"after": after}) in lines


def kill_and_go_on(setting: Setting, folder: Path, steps: int, kills: list[int], rank: int) -> None:
    """Kill a rank whenever so many lines are written, and go on; `steps` in all."""
    ranks = 1 if rank < 0 else 2
    command = setting.command(folder, "--resume", "--num_steps", str(steps), ranks=ranks)
    for lines in kills:
        running = start(command, folder)
        deadline = time.monotonic() + 90
        while len(read_log(folder)) < lines:
            assert running.poll() is None, (folder / "errors").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        victim = psutil.Process(running.pid)
        if ranks > 1:
            (victim,) = (
                child for child in victim.children() if child.environ().get("RANK") == str(rank)
            )
        victim.send_signal(signal.SIGKILL)
        assert running.wait(timeout=60) != 0, "it was done before it was killed"
    run(command, folder)


def test_killed_and_gone_on_with(setting: Setting, whole: Path, tmp_path: Path) -> None:
    kill_and_go_on(setting, tmp_path, KILLED_STEPS, [SAVE_EVERY + 3], rank=-1)
    steps = [line["step"] for line in read_log(tmp_path)]
    assert SAVE_EVERY + 1 in steps[SAVE_EVERY + 1 :], "it went on from its checkpoint"
    true = curve(whole)
    assert curve(tmp_path) == {step: true[step] for step in range(1, KILLED_STEPS + 1)}


@pytest.mark.faults
def test_a_rank_of_two_is_killed(setting: Setting, whole: Path, tmp_path: Path) -> None:
    """To the end of both epochs, with the losses of one rank."""
    true = curve(whole)
    kill_and_go_on(setting, tmp_path, 10**6, [9, 30, 60], rank=1)
    found = curve(tmp_path)
    assert {line["ranks"] for line in read_log(tmp_path)} == {2}
    assert found.keys() == true.keys()
    for step, (batch, targets, loss) in true.items():
        assert found[step][:2] == (batch, targets)
        # two ranks add up in another order, and what that changes grows with the steps
        assert found[step][2] == pytest.approx(loss, abs=1e-4 if step < 20 else 0.3)


@pytest.mark.faults
def test_two_ranks_measure_what_one_measures(setting: Setting, whole: Path, tmp_path: Path) -> None:
    held = str(setting.folder / "held.jsonl")
    flags = ("--held", held, "--held_count", str(HELD), "--max_new_tokens", "96", "--resume")
    command = setting.command(tmp_path, *flags, ranks=2)
    command[command.index("--checkpoint_dir") + 1] = str(whole / "sft")
    command[command.index("--cache_dir") + 1] = str(whole / "cache")
    command += ["--measure_file", str(tmp_path / "measured.json")]
    run(command, tmp_path)
    told = json.loads((tmp_path / "measured.json").read_text())
    after = json.loads((whole / "sft" / "measured.json").read_text())["after"]
    assert told == {"before": after, "after": after}
    assert read_log(tmp_path) == [], "nothing was left to train"


@pytest.mark.faults
def test_compiled_it_has_the_same_losses(setting: Setting, whole: Path, tmp_path: Path) -> None:
    held = str(setting.folder / "held.jsonl")
    command = setting.command(tmp_path, "--num_steps", "6", "--held", held, "--held_count", "2")
    command.remove("--no_compile")
    run(command, tmp_path)
    true, found = curve(whole), curve(tmp_path)
    for step in range(1, 7):
        assert found[step][2] == pytest.approx(true[step][2], abs=1e-3)


def test_a_step_is_the_mean_over_conversations_alone(setting: Setting, tmp_path: Path) -> None:
    import torch

    trainer, sft = load("base_train"), load("sft_train")
    tokenizer = Tokenizer.load(setting.tokenizer)
    with ConversationDataLoader(
        str(setting.folder / "held.jsonl"), tokenizer, LENGTH, batch_size=4,
        run=LoaderRun(cache_dir=str(tmp_path / "cache")),
    ) as loader:  # fmt: skip
        batch = next(loader.get_iterator())
        segments = batch.segments.tolist()
    assert len(segments) > 4, "rows hold several conversations"
    losses = {}
    for kernel in ("current", "plain"):
        args = sft.parse_flags(["--data", "x", "--batch_size", "4", "--kernel", kernel])
        torch.manual_seed(1)
        model = trainer.GPT(tokenizer.vocab_size, 2, 64, kernel=sft.open_kernel(args.kernel, [0]))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        tensors = batch.to("cpu")
        alone, at = 0.0, [0] * 4
        for row, *_, count in segments:
            here = slice(at[row], at[row] + count)
            parts = (tensors.input_ids, tensors.position_ids, tensors.labels)
            alone += model(*(part[row : row + 1, here] for part in parts)).item()
            at[row] += count
        optimizer = trainer.new_optimizer(args, model)
        loss, targets, _ = trainer.train_step(
            args, trainer.Ranks(), model, optimizer, batch, batch.num_loss_tokens
        )
        assert targets == batch.num_loss_tokens == int(batch.loss_mask.sum())
        assert loss == pytest.approx(alone / targets, rel=1e-4)
        losses[kernel] = loss
    assert losses["plain"] == pytest.approx(losses["current"], rel=1e-5)


@pytest.mark.parametrize("windows", [[0, 0], [5, 0]])
def test_generated_tokens_are_the_likeliest(windows: list[int]) -> None:
    import torch

    trainer, sft = load("base_train"), load("sft_train")
    torch.manual_seed(2)
    model = trainer.GPT(40, 2, 64, windows)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    prompt = torch.randint(0, 40, (9,)).tolist()
    found = sft.generate(model, prompt, stop=-1, most=12)
    assert len(found) == 12
    ids, places = torch.tensor([prompt + found]), torch.arange(21)[None]
    x = model.read(ids, places, model.kernel(places, model.windows))
    assert model.predict(x)[0, 8:-1].argmax(dim=-1).tolist() == found
    assert sft.generate(model, prompt, stop=found[3], most=12) == found[: found.index(found[3]) + 1]


def test_calls_are_parsed_as_the_template_writes_them() -> None:
    sft = load("sft_train")
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    good = call % ("add", '{"a": "x\\ny"}')
    assert sft.calls_in(good) == [{"name": "add", "arguments": {"a": "x\ny"}}]
    assert len(sft.calls_in(good + "\n" + good)) == 2
    bad = [
        *("", "Hello.", "Hello.\n" + good, good + "\n", good + good, good[:-1]),
        *(
            call % ("add", "[]"),
            call % ("add", '"{}"'),
            call % ("add", "{"),
            call % ("", "{}") + "!",
        ),
        *(good.replace('"name"', '"nam"'), "<tool_call>\n[1]\n</tool_call>"),
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
    ]
    for text in bad:
        assert sft.calls_in(text) is None, text
    counts, gold = sft.Counts(), sft.calls_in(good)
    prompt, silent = (sft.Prompt([], {"add"}, calls, 0) for calls in (gold, None))
    for said in (good, call % ("add", "{}"), call % ("sub", "{}"), None):
        sft.score(counts, prompt, said, started=True)
    for started in (True, False, False):
        sft.score(counts, silent, "Hello.", started=started)
    assert counts == sft.Counts(
        due=4, well_formed=2, right_tools=2, exact=1, not_due=3, not_called=2
    )


def test_wrong_flags_are_named(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft = load("sft_train")
    with pytest.raises(SystemExit):
        sft.parse_flags(["--data", "a", "--kernel", "newest"])
    told = capsys.readouterr().err
    assert "argument --kernel: invalid choice: 'newest'" in told
    assert all(name in told for name in ("current", "plain", "xla"))
    train_tokenizer(
        [setting.folder / "base.jsonl"], tmp_path / "other",
        TrainConfig(vocab_size=1000, special_tokens=SPECIAL),
    )  # fmt: skip
    calls = str(setting.folder / "calls.jsonl")
    here = (
        *("--data", calls, "--checkpoint_dir", str(tmp_path / "sft"), "--no_compile"),
        *("--cache_dir", str(tmp_path / "cache"), "--num_steps", "0"),
    )
    own = ("--tokenizer", str(setting.tokenizer))
    for flags, words in (
        ((*own, "--base", str(tmp_path)), "there is no checkpoint of base_train.py in"),
        (
            ("--base", str(setting.base), "--tokenizer", str(tmp_path / "other")),
            "another tokenizer",
        ),
        ((*own, "--base", str(setting.base), "--kernel", "xla"), "--kernel xla needs torch_xla"),
        (
            (*own, "--from_scratch", "--held", calls, "--chat_template", "plain"),
            "calls of 'plain' are not measured",
        ),
    ):
        with pytest.raises(BadConfig, match=words):
            sft.train(sft.parse_flags([*here, *flags]), sft.Ranks())


def test_a_new_model_is_trained_and_a_checkpoint_is_a_base(
    setting: Setting, tmp_path: Path
) -> None:
    sft = load("sft_train")
    flags = (
        *("--data", str(setting.folder / "held.jsonl"), "--tokenizer", str(setting.tokenizer)),
        *("--cache_dir", str(tmp_path / "cache"), "--max_length", str(LENGTH), "--no_compile"),
        *("--num_steps", "1"),
    )
    first = ("--from_scratch", "--depth", "3", "--dim", "32", "--window_pattern", "SL")
    sft.train(
        sft.parse_flags([*flags, *first, "--checkpoint_dir", str(tmp_path / "one")]), sft.Ranks()
    )
    again = [*flags, "--checkpoint_dir", str(tmp_path / "one")]
    with pytest.raises(BadConfig, match="there is a checkpoint"):
        sft.train(sft.parse_flags([*again, "--base", str(setting.base)]), sft.Ranks())
    second = ("--base", str(tmp_path / "one"), "--checkpoint_dir", str(tmp_path / "two"))
    sft.train(sft.parse_flags([*flags, *second]), sft.Ranks())
    one, two = (
        json.loads((tmp_path / name / "step_00000001" / "model.json").read_text())
        for name in ("one", "two")
    )
    assert one == two
    assert {name: one[name] for name in ("depth", "dim", "windows")} == {
        "depth": 3, "dim": 32, "windows": [LENGTH // 2, 0, 0],
    }  # fmt: skip


# --- the conversations ---------------------------------------------------------------------------


def all_calls(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for message in row["messages"]:
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"], call["function"]["arguments"]


@pytest.mark.parametrize("tools", [3, 9])
def test_five_strategies_each_of_its_own_shape(tools: int) -> None:
    calls = load("make_tool_calls")
    assert len(calls.STRATEGIES) == 5
    kinds, names = set(), set()
    for number, row in enumerate(itertools.islice(calls.make_rows(3, 10**12, tools), 500)):
        strategy = list(calls.STRATEGIES)[number % 5]
        roles = [message["role"] for message in row["messages"]]
        sizes = [len(message.get("tool_calls", ())) for message in row["messages"]]
        offered = {tool["function"]["name"]: tool["function"] for tool in row["tools"]}
        assert len(offered) == len(row["tools"]) > 0
        for name, arguments in all_calls(row):
            kinds.add(type(arguments))
            names.add(name)
            known = json.loads(arguments) if isinstance(arguments, str) else arguments
            about = offered[name]["parameters"]["properties"]
            assert known.keys() == about.keys()
            for key, value in known.items():
                kind = {"integer": int, "number": float, "string": str}[about[key]["type"]]
                assert type(value) is kind
        if strategy == "single":
            assert (roles, sizes) == (["user", "assistant"], [0, 1])
        elif strategy == "parallel":
            assert sizes[1] in (2, 3)
            assert roles == ["user", "assistant", *["tool"] * sizes[1], "assistant"]
        elif strategy == "chain":
            assert (roles[1:], sizes[1:]) == (
                ["assistant", "tool"] * 2 + ["assistant"],
                [1, 0, 1, 0, 0],
            )
            (_, _), (_, second) = all_calls(row)
            second = json.loads(second) if isinstance(second, str) else second
            found = json.loads(row["messages"][2]["content"])
            assert found.items() & second.items(), "the second call has a result of the first"
        elif strategy == "clarify":
            assert (roles, sizes) == (["user", "assistant"] * 2, [0, 0, 0, 1])
            ((_, known),) = all_calls(row)
            known = json.loads(known) if isinstance(known, str) else known
            assert row["messages"][2]["content"] in map(str, known.values())
        else:
            assert (roles, sizes) == (["user", "assistant"], [0, 0])
            asks = {
                tool.name for tool in calls.TOOLS.values() for ask in tool.asks
                if row["messages"][0]["content"].startswith(ask.partition("{")[0])
            }  # fmt: skip
            assert not asks & offered.keys(), "no tool on offer can do it"
    assert kinds == {str, dict}
    assert len(names) == tools


def test_a_seed_makes_the_same_bytes_a_row_at_a_time(tmp_path: Path) -> None:
    script = str(EXAMPLES / "make_tool_calls.py")
    flags = ("--count", "40", "--seed", "7", "--output", str(tmp_path / "new" / "a.jsonl"))
    done = subprocess.run(
        [sys.executable, script, *flags], capture_output=True, text=True, check=True
    )
    assert "40 rows" in done.stdout
    made = (tmp_path / "new" / "a.jsonl").read_bytes()
    # of this machine and of any other
    assert hashlib.sha256(made).hexdigest()[:16] == "e238180e1fc31c14"
    calls = load("make_tool_calls")
    calls.write_rows(tmp_path / "b.jsonl", seed=7, count=50)
    assert (tmp_path / "b.jsonl").read_bytes().startswith(made), "more rows are the same and others"
    tracemalloc.start()
    calls.write_rows(tmp_path / "c.jsonl", seed=0, count=2000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (tmp_path / "c.jsonl").stat().st_size / 10
    prompts = [
        {
            json.dumps([row["tools"], row["messages"][0]])
            for row in calls.make_rows(seed, count)
            if row["messages"][1].get("tool_calls")
        }
        for seed, count in ((0, 2000), (1, 100))
    ]
    assert len(prompts[1]) == 60
    assert len(prompts[0] & prompts[1]) <= 1, "held prompts that a call answers are others"
    for wrong in (["--count", "0"], ["--tools", "2"]):
        with pytest.raises(SystemExit):
            calls.parse_flags(wrong)


def test_penstock_takes_every_row(setting: Setting, tmp_path: Path) -> None:
    done = shard_conversations(
        [setting.folder / "calls.jsonl"], tmp_path / "chats", ChatConfig(max_length=LENGTH),
        ShardConfig(rows_per_file=300), FollowConfig(complete=True, max_rejects=0.0),
        tokenizer=str(setting.tokenizer),
    )  # fmt: skip
    state = done.state
    assert sum(file.rows for split in ("train", "val") for file in state.split(split)) == COUNT
