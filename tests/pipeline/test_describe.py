"""A pipeline's file: every key is checked, all problems are told, commands are the real ones."""

from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

import penstock
from penstock.cli import app, chat, produce, sync, tokenizer
from penstock.cli.command import each_input_named
from penstock.errors import BadConfig
from penstock.pipeline.describe import read_pipeline
from penstock.pipeline.run import choose_stages
from penstock.supply.run_file import read_run

FULL: Final = """
[source.cpp]
inputs = ["src", "more.tar.gz"]
[source.py]
inputs = ["py.jsonl"]
[source.py.filter]
preset = "none"
min_words = 3
minified = true
max_top_ngrams = [0.1, 0.2, 0.3]
[source.raw]
kind = "lines"
inputs = ["raw.jsonl"]
[source.talk]
kind = "conversations"
inputs = ["talk.jsonl"]
[read]
suffixes = [".h", ".cc"]
text_field = "content"
max_document_bytes = "1MB"
[process]
names = ["mine:Upper"]
[filter]
preset = "code"
secrets = "redact"
rules = ["one", "two"]
[decontaminate]
files = ["held.jsonl"]
[dedup]
kind = "near"
[chunk]
max_tokens = 512
language = "cpp"
[chat]
max_length = 1024
ignore = ["id"]
[shards]
parquet_dir = "sets"
rows_per_file = 10
bytes_per_file = "4MB"
val_fraction = 0.1
[follow]
complete = true
until_idle_s = "9s"
wait_for_input_s = 8
max_rejects = 0.5
[work]
workers = 2
max_memory_bytes = "1GB"
plugins = ["mine"]
max_rejects = 0.25
[tokenizer]
path = "tok"
inputs = ["some"]
[tokenizer.train]
vocab_size = 999
special_tokens = ["<|a|>", "<|b|>"]
[push]
url = "s3://bucket/sets"
connections = 3
stall_s = 77
[pull]
dir = "local"
max_disk_bytes = "1GB"
only = "tokens"
give_up_s = "5m"
[loader]
path = {cpp = "local/cpp", py = "local/py"}
tokenizer = "tok"
chunk_size = 512
[train]
command = "python 'my train.py' --fast"
log = "train.jsonl"
"""
COMMANDS: Final[Any] = typer.main.get_command(app)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def put(text: str) -> Path:
        path = tmp_path / "pipeline.toml"
        path.write_text(text)
        return path

    return put


def parsed(command: tuple[str, ...]) -> dict[str, Any]:
    """What the real command line makes of a stage."""
    group, words = COMMANDS, list(command[1:])
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    return dict(
        group.make_context("x", each_input_named(words), **COMMANDS.context_settings).params
    )


def test_every_stage_is_a_command_that_parses_to_what_the_file_says(write: Any) -> None:
    pipeline = read_pipeline(write(FULL))
    stages = {stage.name: stage for stage in pipeline.stages}
    makers = ["chunk cpp", "chunk py", "shard raw", "conversations talk"]
    movers = [f"{job} {name}" for name in ("cpp", "py", "raw", "talk") for job in ("push", "pull")]
    assert list(stages) == ["tokenizer", *makers, *movers, "train"]
    cpp = parsed(stages["chunk cpp"].command)
    assert cpp["inputs"] == ["src", "more.tar.gz"]
    assert cpp["parquet_dir"] == "sets/cpp"
    assert (cpp["tokenizer"], cpp["tokens"], cpp["dedup"]) == ("tok", True, "near")
    assert (cpp["benchmark"], cpp["processor"]) == (["held.jsonl"], ["mine:Upper"])
    configs = produce.chunk.configs  # type: ignore[attr-defined]
    made = {name: fields.make(cpp_typed(cpp, fields)) for name, fields in configs.items()}
    assert made["chunk"] == penstock.ChunkConfig(max_tokens=512, language="cpp")
    assert made["read"] == penstock.ReadConfig(
        suffixes=frozenset({".h", ".cc"}), text_field="content", max_document_bytes=1 << 20
    )
    assert made["config"] == penstock.ShardConfig(
        rows_per_file=10, bytes_per_file=4 << 20, val_fraction=0.1
    )
    assert made["run"] == penstock.RunConfig(
        workers=2, max_memory_bytes=1 << 30, plugins=("mine",), max_rejects=0.25
    )
    assert made["filter"] == penstock.FilterConfig(
        preset="code", secrets="redact", rules=("one", "two")
    )
    assert parsed(stages["tokenizer"].command)["plugin"] == ["mine"], "what it reads may need it"
    py = parsed(stages["chunk py"].command)
    assert py["filter"] == "none"
    assert [*py["thresholds"]] == ["min_words=3", "minified=true", "max_top_ngrams=0.1,0.2,0.3"]
    raw = parsed(stages["shard raw"].command)
    follow = produce.shard.configs["follow"]  # type: ignore[attr-defined]
    assert follow.make(cpp_typed(raw, follow)) == penstock.FollowConfig(
        complete=True, until_idle_s=9.0, wait_for_input_s=8.0, max_rejects=0.5
    )
    assert raw["text_field"] == "content"
    talk = parsed(stages["conversations talk"].command)
    said = chat.conversations.configs["chat"]  # type: ignore[attr-defined]
    assert said.make(cpp_typed(talk, said)) == penstock.ChatConfig(max_length=1024, ignore=("id",))
    push, pull = parsed(stages["push cpp"].command), parsed(stages["pull cpp"].command)
    assert (push["source"], push["target"]) == ("sets/cpp", "s3://bucket/sets/cpp")
    assert (pull["source"], pull["target"]) == ("s3://bucket/sets/cpp", "local/cpp")
    for found, command, expected in (
        (push, sync.push, penstock.SyncConfig(connections=3, stall_s=77)),
        (
            pull,
            sync.pull,
            penstock.SyncConfig(max_disk_bytes=1 << 30, only="tokens", give_up_s=300),
        ),
    ):
        fields = command.configs["config"]  # type: ignore[attr-defined]
        assert fields.make(cpp_typed(found, fields)) == expected
    trained = parsed(stages["tokenizer"].command)
    fields = tokenizer.train.configs["config"]  # type: ignore[attr-defined]
    assert (trained["inputs"], trained["output"]) == (["some"], "tok")
    assert fields.make(cpp_typed(trained, fields)) == penstock.TrainConfig(
        vocab_size=999, special_tokens=("<|a|>", "<|b|>")
    )
    assert stages["train"].command == ("python", "my train.py", "--fast")
    assert stages["pull cpp"].bounded


def cpp_typed(found: dict[str, Any], fields: Any) -> dict[str, Any]:
    return {option.name: found[option.name] for option in fields.options}


def test_the_file_is_a_run_s_description_too(write: Any) -> None:
    path = write(FULL)
    options = read_run(path)
    assert options["chunk_size"] == 512
    assert options["path"] == {"cpp": f"{path.parent}/local/cpp", "py": f"{path.parent}/local/py"}


def test_all_that_is_wrong_is_told_at_once(write: Any) -> None:
    text = """
[sauce.cpp]
inputs = ["src"]
[source.cpp]
inputs = "src"
[source.py]
inputs = ["a"]
kind = "document"
[source.go]
inputs = ["a"]
flter = 1
[source.go.chunk]
max_tokens = "many"
[chunk]
max_tokns = 5
[filter]
preset = "cude"
secrets = "eat"
min_word = 5
[dedup]
kind = "nera"
[shards]
bytes_per_file = "much"
[tokenizer]
path = 7
[push]
connections = 0
url = "x"
[work]
workers = 2.5
[read]
suffixes = ".h"
[follow]
complete = 1
[loader]
pth = "x"
[train]
log = ["a"]
"""
    with pytest.raises(BadConfig) as caught:
        read_pipeline(write(text))
    lines = caught.value.why.splitlines()
    for expected in (
        "the file: [sauce] is not a table: did you mean source?",
        "[source.cpp]: inputs is not a list of paths",
        "[source.py]: kind is 'document': did you mean documents?",
        "[source.go]: 'flter' is not a key here: did you mean filter?",
        "[source.go.chunk]: max_tokens is 'many': write a whole number",
        "[chunk]: 'max_tokns' is not a key here: did you mean max_tokens?",
        "[filter]: secrets is 'eat': choose keep or reject or redact",
        "[filter]: 'min_word' is not a key here: did you mean min_words?",
        "[filter]: ",
        "[dedup]: kind is 'nera': did you mean near?",
        "[shards]: bytes_per_file is 'much': write it as 64MB or 1GB",
        "[tokenizer]: path is 7: write a text",
        "[push]: connections is 0: choose 1 or more",
        "[work]: workers is 2.5: write a whole number",
        "[read]: suffixes is '.h': write a list of texts",
        "[follow]: complete is 1: write true or false",
        "[loader]: 'pth' is not an option of the loader; did you mean path?",
        "[train]: log is ['a']: write a text",
    ):
        assert any(line.startswith(expected) for line in lines), (expected, lines)
    assert caught.value.what.startswith(f"{len(lines)} things are wrong in ")
    assert caught.value.do == "fix all of them and run the same command again"


LINES: Final = "\n[source.a]\ninputs=['x']\nkind='lines'\n"
DOCUMENTS: Final = "[tokenizer]\npath='t'\n[source.a]\ninputs=['x']\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file: there is nothing to run"),
        ('[source.a]\ninputs=["x"]', "[tokenizer]: a counts tokens: write path"),
        ("[tokenizer]\npath='t'\n[tokenizer.train]", "[tokenizer]: inputs is missing"),
        ("[tokenizer]\ninputs=['x']\n[tokenizer.train]", "[tokenizer]: path is missing"),
        ("[shards]\nparquet_dir=3" + LINES, "[shards]: parquet_dir is 3: write a text"),
        ("[source.a]\ninputs=['x']\nkind=['a']", "[source.a]: kind is ['a']: choose from"),
        (DOCUMENTS + "[dedup]\nkind=['a']", "[dedup]: kind is ['a']: write a text"),
        ('[train]\ncommand="python \'x"', '[train]: command is "python \'x": No closing'),
        ("[train]\ncommand=' '", "[train]: command is missing"),
        ("[train]\ncommand=[]", "[train]: command is missing"),
        (LINES + "[source.a.chunk]\nmax_tokens=99", "[source.a.chunk]: penstock shard, which"),
        (LINES + "[source.a.read]\nsuffixes=['.h']", "[source.a.read]: penstock shard has no"),
        (LINES + "[chunk]\nmax_tokens=99", "[chunk]: no source is made with it: take it out"),
        (LINES + "[read]\nsuffixes=['.h']", "[read]: no source is made with suffixes: take it"),
        (DOCUMENTS + "[read]\nsuffixes=['.h,.c']", "[read]: suffixes has '.h,.c': the command"),
        ("[push]\nurl='x'", "[push]: it needs url"),
        ("[pull]\nurl='x'", "[pull]: dir is missing"),
        ("[pull]\ndir='x'", "[pull]: url is missing"),
        ("[train]\nlog='x'", "[train]: command is missing"),
        ("[train]\ncommand='A_1=0 x'", "[train]: command begins with 'A_1=0', and no shell runs:"),
        ("[train]\ncommand='x > log'", "[train]: command has '>', and no shell runs: write [\"sh"),
        (LINES + "[pull]\nurl='x'\ndir='./data/'", "[pull]: dir is where a is made, data/a"),
        (LINES + "[push]\nurl='data'", "[push]: url is where a is made, data/a"),
        (LINES + "[push]\nurl='b'\n[pull]\ndir='c/../b'", "[pull]: dir is 'c/../b', which is"),
        ("[source]\na=1", "source: it is not a table by name"),
        ("chunk=1", "[chunk]: it is 1, and not a table"),
        ("[source.'a b']\ninputs=['x']", "[source.a b]: a source is called by letters"),
        (
            "[tokenizer]\npath='t'\n[source.a]\ninputs=['x']\n[source.a.shards]\nparquet_dir='y'",
            "[source.a.shards]: parquet_dir is that of all",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_told(write: Any, text: str, told: str) -> None:
    with pytest.raises(BadConfig) as caught:
        read_pipeline(write(text))
    assert caught.value.why.startswith(told)
    assert caught.value.what.startswith("1 thing is wrong in ")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "'data/aa'",
            ["[loader]: data/aa is not there, and no stage makes it: did you mean data/a?"],
        ),
        (
            "{x='loc/a', y=['lok/a']}",
            ["[loader]: lok/a is not there, and no stage makes it: did you"],
        ),
        ("'./data/a/'", []),
        ("'data/a/_gen/00002'", []),
        ("'../'", []),
        ("'s3://b/x'", []),
    ],
)
def test_a_dataset_that_nobody_makes_is_doubted(write: Any, path: str, told: list[str]) -> None:
    text = f"{LINES}[pull]\nurl='b'\ndir='loc'\n[loader]\nchunk_size=8\npath={path}\n"
    doubts = read_pipeline(write(text)).doubts
    assert len(doubts) == len(told)
    for doubt, begin in zip(doubts, told, strict=True):
        assert doubt.startswith(begin)


def test_a_file_that_is_none(write: Any, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="there is no pipeline") as caught:
        read_pipeline(tmp_path / "nothing.toml")
    assert caught.value.do == "name its file; penstock init writes one"
    with pytest.raises(BadConfig, match="is not TOML"):
        read_pipeline(write("[source"))


def test_stages_are_chosen_by_job_or_name(write: Any) -> None:
    pipeline = read_pipeline(write(FULL))
    found = [stage.name for stage in choose_stages(pipeline, ["push cpp", "train"])]
    assert found == ["push cpp", "train"]
    with pytest.raises(BadConfig, match="no stage is called 'trian'") as caught:
        choose_stages(pipeline, ["trian"])
    assert caught.value.do.startswith("did you mean train?")


def test_a_training_machine_pulls_and_trains(write: Any) -> None:
    text = "[pull]\nurl='s3://b/cpp'\ndir='local'\n[train]\ncommand=['python','x y.py']\n"
    stages = read_pipeline(write(text)).stages
    assert [str(stage) for stage in stages] == [
        "penstock pull s3://b/cpp local", "python 'x y.py'",
    ]  # fmt: skip
