"""The command line: options, messages, exit codes, signals."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from typer.testing import CliRunner

import penstock
from penstock import cli
from penstock.cli import app, main, produce, sync, tokenizer
from penstock.cli.command import each_input_named, texts_of_fields
from penstock.errors import BadConfig, PenstockError
from penstock.ingest.lines import mark_done
from penstock.options import parse_bytes, parse_seconds, show_bytes, show_seconds
from penstock.prepare.filters import FilterConfig
from penstock.store.log import Log
from penstock.tokenize.tokenizer import Tokenizer

COMMAND: Final = typer.main.get_command(app)
COMMANDS: Final[dict[str, Any]] = COMMAND.commands  # type: ignore[attr-defined]


class Ran:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in this process, as `penstock ...` would."""

    def run_command(*arguments: object) -> Ran:
        code: Any = 0
        try:
            main(lambda: app([str(argument) for argument in arguments]))
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Ran(code, out, err)

    return run_command


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"text": "{k}"}}\n' for k in range(100)))
    return path


# Options.

OPTIONS: Final = [
    (name, option)
    for name, command in COMMANDS.items()
    for parameter in command.params
    for option in parameter.opts
    if option.startswith("--") and parameter.name != "help"
]


def spelled(option: str, how: str) -> str:
    return "--" + option.removeprefix("--").replace("_", how)


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_option_may_have_dashes_or_underscores(command: str, option: str) -> None:
    found = []
    needed = {
        "shard": ["--input", "a", "--parquet_dir", "b"],
        "chunk": ["--inputs", "a"],
        "conversations": ["--inputs", "a", "--parquet_dir", "b"],
        "explain": ["--config", "a"],
        "push": ["a", "b"],
        "pull": ["a", "b"],
        "tokenize": ["dataset", "--tokenizer", "t"],
        "warm": [],
    }.get(command, ["dataset"])
    (parameter,) = [p for p in COMMANDS[command].params if option in p.opts]
    value = [] if parameter.is_flag else ["1"]
    for how in ("-", "_"):
        arguments = [*needed, spelled(option, how), *value]
        with COMMANDS[command].make_context(
            command, arguments, **COMMAND.context_settings
        ) as context:
            found.append(context.params)
    assert found[0] == found[1]
    expected: Any = True if parameter.is_flag else "1"
    assert str(expected) in str(found[0][parameter.name])


def test_all_options_in_both_spellings(run: Any, lines: Path, tmp_path: Path) -> None:
    trained = ("--inputs", lines, "--output", tmp_path / "tokenizer", "--vocab-size", 260)
    assert run("tokenizer", "train", *trained).code == 0
    options = {
        "--parquet_dir": tmp_path / "_", "--inputs": lines, "--rows_per_file": 7,
        "--bytes_per_file": "1KB", "--val_fraction": 0.3, "--seed": 5, "--text_field": "text",
        "--max_line_bytes": "1MB", "--until_idle": "60s", "--wait_for_input": "9s",
        "--max_rejects": 0.5, "--threads": 1, "--tokenizer": tmp_path / "tokenizer",
    }  # fmt: skip
    shard_options = {option for command, option in OPTIONS if command == "shard"}
    assert {*options, "--input", "--complete", "--tokens"} == shard_options
    for how in ("_", "-"):
        options["--parquet_dir"] = tmp_path / how
        given = [part for key, value in options.items() for part in (spelled(key, how), value)]
        ran = run("shard", *given, "--complete", "--tokens")
        assert (ran.code, ran.err) == (0, "")
    configs = [Log.open(tmp_path / how).state.opened for how in "_-"]
    assert configs[0] is not None
    assert configs[1] is not None
    assert configs[0].config == configs[1].config
    assert configs[0].config == {
        "rows_per_file": 7, "bytes_per_file": 1024, "val_fraction": 0.3, "seed": 5,
        "text_field": "text", "max_line_bytes": 1 << 20, "token_type": "uint16",
        "tokenizer": Tokenizer.load(tmp_path / "tokenizer").fingerprint, "prepare": {},
    }  # fmt: skip


def test_every_command_and_option_has_help() -> None:
    for name, command in COMMANDS.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, (name, parameter.name)
    for arguments in (["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert "Usage" in result.output


def test_inputs_are_given_in_one_way_everywhere() -> None:
    groups = [COMMANDS, COMMANDS["tokenizer"].commands]
    found = {
        name: parameter.opts
        for group in groups
        for name, command in group.items()
        for parameter in command.params
        if parameter.name == "inputs"
    }
    both = ["--inputs", "--input"]
    names = ("shard", "chunk", "conversations", "train", "eval")
    assert found == dict.fromkeys(names, both)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--input a b --x c", "--input a --inputs b --x c"),
        ("t --inputs=a b c", "t --inputs=a --inputs b --inputs c"),
        ("t u --inputs a --inputs b", "t u --inputs a --inputs b"),
        ("--tokens --inputs a b --tokens c", "--tokens --inputs a --inputs b --tokens c"),
    ],
)
def test_more_inputs_follow_the_option(typed: str, expected: str) -> None:
    assert each_input_named(typed.split()) == expected.split()


def test_help_has_no_markup_and_no_line_breaks_of_the_source() -> None:
    shown = {
        name: " ".join(CliRunner().invoke(app, [name, "--help"]).output.split())
        for name in ("explain", "chunk")
    }
    assert "a TOML file with [loader]." in shown["explain"]
    paragraphs = COMMANDS["chunk"].help.split("\n\n")
    assert len(paragraphs) == 3
    assert not any("\n" in paragraph for paragraph in paragraphs)


CONFIGURED: Final = [
    produce.shard, produce.chunk, sync.push, sync.pull, tokenizer.train, tokenizer.eval,
]  # fmt: skip


@pytest.mark.parametrize("command", CONFIGURED, ids=lambda command: command.__name__)
def test_defaults_and_help_are_those_of_the_dataclasses(command: Any) -> None:
    """What is shown as a default is read back as the field's own."""
    is_group = command in (tokenizer.train, tokenizer.eval)
    group = COMMANDS["tokenizer"].commands if is_group else COMMANDS
    options = {parameter.name: parameter for parameter in group[command.__name__].params}
    for fields in command.configs.values():
        made = fields.make({o.name: options[o.name].default for o in fields.options})
        assert made == type(made)()
        for option in fields.options:
            assert (
                options[option.name].help.replace("\\", "")
                == texts_of_fields(type(made))[option.field.name]
            )


def test_a_dataclass_with_a_default_is_made_when_an_option_is_given(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("penstock.prepare.steps.make_steps", lambda **given: found.append(given))
    monkeypatch.setattr("penstock.prepare_dataset", lambda *_, **__: sys.exit(0), raising=False)
    for given in ([], ["--secrets", "keep"], ["--filter", "none"], ["--rule", "a", "--rule", "b"]):
        run("chunk", "--inputs", "a", "--parquet_dir", "b", "--tokenizer", "c", *given)
    monkeypatch.undo()
    assert [steps["filter"] for steps in found] == [
        None, FilterConfig(secrets="keep"), None, FilterConfig(rules=("a", "b")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "typed",
    [["--ignore", "a,b"], ["--ignore", "a", "--ignore", "b"], ["--ignore", "a,", "--ignore", "b"]],
)
def test_a_list_is_typed_with_commas_or_option_by_option(
    run: Any, chat_folder: Path, tmp_path: Path, typed: list[str]
) -> None:
    row = {"messages": [{"role": "user", "content": "q", "a": 1},
                        {"role": "assistant", "content": "x", "b": 2}]}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    made = run(
        "conversations", "--input", tmp_path / "rows.jsonl", "--parquet_dir", tmp_path / "out",
        "--tokenizer", chat_folder, "--complete", "--val_fraction", "0", *typed,
    )  # fmt: skip
    assert made.code == 0, made.err
    assert "1 kept as 1 samples" in made.out


def test_unknown_options_and_missing_ones(run: Any) -> None:
    assert run("shard").code == 2
    assert run("shard", "--inptu", "a").code == 2
    assert run("sharrd").code == 2
    assert run("verify").code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("17", 17), ("17B", 17), ("1KB", 1024), ("1.5 mb", 3 << 19), ("2GB", 2 << 30),
     (" 64MB ", 64 << 20)],
)  # fmt: skip
def test_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--x") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", 5), ("5s", 5), ("1.5m", 90), ("2h", 7200), ("250 ms", 0.25), ("1M", 60)],
)
def test_seconds(text: str, expected: float) -> None:
    assert parse_seconds(text, "--x") == expected


RUBBISH: Final = ["", "x", "-1", "1e3", "1TB", "1 2", "KB", "0x10", "1,000", "1.", "nan", "inf"]


@pytest.mark.parametrize("value", [1, 90, 120, 1000, 1024, 3600, 5400, 64 << 20, 3 << 29, 2 << 30])
def test_quantities_are_shown_as_they_are_typed(value: int) -> None:
    assert parse_bytes(show_bytes(value), "--x") == value
    assert parse_seconds(show_seconds(value), "--x") == value
    assert parse_seconds(show_seconds(value / 8), "--x") == value / 8


@pytest.mark.parametrize("text", RUBBISH)
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(BadConfig) as caught:
        parse_bytes(text, "--max_line_bytes")
    assert caught.value.what == f"--max_line_bytes is {text!r}"
    assert caught.value.do == "write it as 64MB or 1GB"
    with pytest.raises(BadConfig) as caught:
        parse_seconds(text, "--until_idle")
    assert caught.value.what == f"--until_idle is {text!r}"
    assert caught.value.do == "write it as 60s, 5m or 1h"


def test_a_quantity_beyond_all_numbers() -> None:
    with pytest.raises(BadConfig):
        parse_bytes("9" * 400, "--max_line_bytes")


# Messages.


def test_shard_says_what_it_did(run: Any, lines: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "out"
    ran = run("shard", "--input", lines, "--parquet-dir", dataset, "--complete")
    assert ran.code == 0
    assert ran.out == f"{dataset}: sealed, 1 shards, 100 documents kept, 0 refused\n"
    events = (dataset / "_events.jsonl").read_text()
    kinds = [json.loads(line)["kind"] for line in events.splitlines()]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    again = run("shard", "--input", lines, "--parquet-dir", dataset, "--complete")
    assert (again.code, again.out) == (0, ran.out)


def test_push_and_pull_keep_events_beside_a_dataset(run: Any, lines: Path, tmp_path: Path) -> None:
    data, bucket, copy = tmp_path / "data", tmp_path / "bucket", tmp_path / "copy"
    run("shard", "--input", lines, "--parquet-dir", data, "--complete")
    assert run("push", data, bucket).code == 0
    assert run("pull", bucket, copy).code == 0
    for folder, stage in ((data, "push"), (copy, "pull")):
        told = [json.loads(line) for line in (folder / "_events.jsonl").read_text().splitlines()]
        moved = [one for one in told if one["stage"] == stage and one["kind"] == "progress"]
        assert moved[-1]["at"] == moved[-1]["size"] > 0
    assert not (bucket / "_events.jsonl").exists()


def test_plain_files_are_moved_without_events(run: Any, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.parquet").write_bytes(b"PAR1")
    for name in ("shard_00000.parquet", "_COMPLETE"):
        (tmp_path / "plain" / name).write_bytes(b"")
    run("push", tmp_path / "plain", tmp_path / "bucket", "--once")
    run("pull", tmp_path / "bucket", tmp_path / "copy", "--once")
    assert [*tmp_path.rglob("_events.jsonl")] == []


def test_verify_says_what_to_expect_later(run: Any, lines: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "out"
    assert (
        run(
            "shard", "--input", lines, "--parquet_dir", dataset, "--complete", "--max_rejects", 1
        ).code
        == 0
    )
    state = Log.open(dataset).state
    seen = f"{state.n}:{state.head}"
    assert json.loads(run("verify", dataset, "--json").out)["head"] == seen
    assert f"head {seen}\n" in run("verify", dataset).out
    assert run("verify", dataset, "--expect", seen).code == 0
    ran = run("verify", dataset, "--expect", f"{state.n + 1}:{state.head}")
    assert (ran.code, "FAULTY" in ran.out) == (1, True)
    assert f"fault: the log does not have the expected record {state.n + 1}\n" in ran.out


def expect_error(ran: Ran, name: str, *parts: str) -> None:
    """Name: what / where / why / do, on standard error, and exit code 1."""
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.startswith(f"{name}: ")
    for part in parts:
        assert part in ran.err
    for line in ran.err.splitlines()[1:]:
        assert line.startswith(("  where: ", "  why:   ", "  do:    ", "         "))


def test_errors_are_messages(run: Any, lines: Path, tmp_path: Path) -> None:
    absent = tmp_path / "im.jsonl"
    expect_error(
        run("shard", "--complete", "--parquet-dir", tmp_path / "a", "--input", absent),
        "InputMissing", "im.jsonl is not there\n", f"  where: {tmp_path}/im.jsonl\n",
        "  do:    did you mean in.jsonl?\n",
    )  # fmt: skip
    shard = ("shard", "--complete", "--parquet-dir", tmp_path / "b", "--input")
    expect_error(run(*shard, tmp_path), "BadInput", "is not a regular file", "  why:", "  do:")
    expect_error(run(*shard, lines, "--input", lines), "BadConfig", "the same input is given twice")
    expect_error(run(*shard, lines, "--rows-per-file", 0), "BadConfig", "--rows_per_file is 0")
    expect_error(run(*shard, lines, "--threads", 0), "BadConfig", "--threads is 0")
    expect_error(run(*shard, lines, "--max-rejects", 2), "BadConfig", "--max_rejects is 2.0")
    expect_error(run(*shard, lines, "--until-idle", "soon"), "BadConfig", "--until_idle is 'soon'")
    expect_error(run(*shard, lines, "--until-idle", "0s"), "BadConfig", "longer than 0 s")
    expect_error(run(*shard, lines, "--bytes-per-file", "lots"), "BadConfig", "--bytes_per_file is")
    expect_error(
        run("shard", "--input", lines, "--parquet-dir", "ftp://x"), "BadConfig", "ftp:// is not"
    )
    expect_error(run("verify", tmp_path), "NoDataset", "there is no dataset at", "it has no log")
    expect_error(run("show", tmp_path / "no"), "NoDataset", "there is no dataset at")


def test_the_advice_of_an_error_can_be_followed(run: Any, lines: Path, tmp_path: Path) -> None:
    """Nothing was read and nothing written: there is nothing that other options could spoil."""
    shard = ("shard", "--complete", "--parquet-dir", tmp_path / "out", "--input")
    ran = run(*shard, tmp_path / "im.jsonl")
    expect_error(ran, "InputMissing", "did you mean in.jsonl?")
    assert run(*shard, lines).code == 0


def test_too_many_rejects(run: Any, lines: Path, tmp_path: Path) -> None:
    lines.write_text(lines.read_text() + "{}\n" * 9)
    ran = run("shard", "--complete", "--input", lines, "--parquet-dir", tmp_path / "out")
    expect_error(
        ran, "TooManyRejects", "9 of 109 documents were refused, 8.3%", "--max_rejects allows 1.0%",
        "no_text: 9", "allow more with --max_rejects 0.12",
    )  # fmt: skip


def test_the_four_parts_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise PenstockError("it broke", where="here", why="two\nlines", do="mend it")

    with pytest.raises(SystemExit) as ended:
        main(fail)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "PenstockError: it broke\n  where: here\n  why:   two\n         lines\n  do:    mend it\n"
    )
    error = PenstockError("it broke", where="here", why="so", do="mend it")
    assert (error.what, error.where, error.why, error.do) == ("it broke", "here", "so", "mend it")


def test_an_error_that_is_not_ours_is_not_hidden() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main(fail)


def test_nobody_reads_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`penstock show | head -1` is no error."""

    def fail() -> None:
        raise BrokenPipeError

    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        main(fail)


# verify and show.


def test_verify(run: Any, lines: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "out"
    run("shard", "--input", lines, "--parquet-dir", dataset, "--complete", "--rows-per-file", 40)
    for full in ([], ["--full"]):
        ran = run("verify", dataset, *full)
        assert ran.code == 0
        how = "full" if full else "quick"
        told, head = ran.out.splitlines()
        assert told == f"{dataset}: ok ({how}), 5 records, 4 files, 100 rows, sealed"
        assert head.startswith("head 4:")
        about = json.loads(run("verify", dataset, "--json", *full).out)
        assert about == {
            "dataset": str(dataset), "ok": True, "full": bool(full), "sealed": True,
            "records": 5, "files": 4, "rows": 100, "faults": [], "coming": [], "left_out": [],
            "others": [],
            "head": head.removeprefix("head "),
        }  # fmt: skip
    shard = dataset / "shard_00001.parquet"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    assert run("verify", dataset).code == 0
    ran = run("verify", dataset, "--full")
    assert ran.code == 1
    assert ran.out.startswith(
        f"fault: shard_00001.parquet is not what was written\n  where: {shard}\n  why:   sha256 "
    )
    assert f"{dataset}: FAULTY (full), " in ran.out
    ran = run("verify", dataset, "--full", "--json")
    assert ran.code == 1
    about = json.loads(ran.out)
    assert about["ok"] is False
    (fault,) = about["faults"]
    assert fault["what"] == "shard_00001.parquet is not what was written"
    assert fault["where"] == str(shard)


def test_show(run: Any, lines: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "out"
    run("shard", "--input", lines, "--parquet-dir", dataset, "--complete")
    ran = run("show", dataset)
    assert ran.code == 0
    assert ran.out.startswith(f"{dataset}: sealed\n  train   1 files, ")
    assert ran.out.count("  row     ") == 3
    assert run("show", dataset, "--rows", 5).out.count("  row     ") == 5
    about = json.loads(run("show", dataset, "--json", "--rows", 1).out)
    assert about["sealed"] is True
    assert len(about["sample"]) == 1


# Processes.


def test_help_costs_no_imports() -> None:
    """numba, pyarrow and numpy are for commands that need them."""
    script = (
        "import runpy, sys\n"
        "sys.argv = ['penstock', '--help']\n"
        "try:\n"
        "    runpy.run_module('penstock.cli', run_name='__main__')\n"
        "finally:\n"
        "    heavy = {'numba', 'llvmlite', 'pyarrow', 'numpy', 'obstore', 'torch', 'msgspec'}\n"
        "    print('loaded:', sorted(heavy & {*sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("command", ["shard", "chunk"])
def test_runs_do_not_ask_for_pandas(command: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    """pyarrow imports it, where it is, to make a column of Python's values: 0.3 s of each start."""
    lines = tmp_path / "in.jsonl"
    told = {"source": "a.h", "start": 0, "end": 1, "part": 0, "parts": 1}
    lines.write_text("".join(json.dumps({"text": f"int {k};", **told}) + "\n" for k in range(9)))
    with lines.open("a") as file:
        file.write("\n" + "not JSON\n" + '{"text": "int main() {}"}\n' * 200)
    given = {
        "shard": ["--input", lines, "--complete"],
        "chunk": ["--inputs", lines, "--tokenizer", tokenizer_folder, "--workers", "1"],
    }[command]
    script = (
        "import sys\n"
        "class Asked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name != 'pandas', 'pandas is asked for'\n"
        "sys.meta_path.insert(0, Asked())\n"
        "from penstock.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", script, command, *map(str, given)),
            *("--parquet_dir", str(tmp_path / "out"), "--max_rejects", "0.5"),
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "pandas" in done.stderr) == (0, False), done.stderr[-1000:]


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, which ends with the block whatever happens."""
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shards(dataset: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in dataset.glob("*.parquet")}


def test_sigterm_stops_and_the_same_command_goes_on(run: Any, tmp_path: Path) -> None:
    path, dataset = tmp_path / "in.jsonl", tmp_path / "out"
    content = "".join(f'{{"text": "{k}"}}\n' for k in range(500))
    path.write_text(content[:3001])
    options = ("shard", "--input", path, "--rows-per-file", 30, "--parquet-dir")
    with started(*options, dataset) as process:
        wait_for(dataset / "shard_00002.parquet", process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM == 143
    assert "not sealed" in out
    assert err == "stopped by a signal; the same command resumes from here\n"
    path.write_text(content)
    mark_done(path)
    assert run(*options, dataset).code == 0
    assert run(*options, tmp_path / "finished").code == 0
    assert shards(dataset) == shards(tmp_path / "finished")
    assert len(shards(dataset)) > 10
    assert run("verify", dataset, "--full").code == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_and_started_again_while_it_grows(run: Any, tmp_path: Path, seed: int) -> None:
    """SIGKILL at any time leaves nothing that the next run could stumble over."""
    path, dataset = tmp_path / "in.jsonl", tmp_path / "out"
    content = "".join(f'{{"text": "{k} of {seed}"}}\n' for k in range(2000))
    path.write_text(content[: 7000 + seed])
    options = ("shard", "--input", path, "--rows-per-file", 25, "--parquet-dir")
    with started(*options, dataset) as process:
        wait_for(dataset / f"shard_{5 * seed:05d}.parquet", process)
        process.kill()
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    with path.open("a") as file:
        file.write(content[7000 + seed :])
    mark_done(path)
    assert run(*options, dataset).code == 0
    assert run(*options, tmp_path / "finished").code == 0
    assert shards(dataset) == shards(tmp_path / "finished")
    assert not [*dataset.rglob(".tmp*")]
    assert run("verify", dataset, "--full").code == 0


def test_the_module_is_the_command() -> None:
    assert Path(cli.__file__).parent.name == "cli"
    assert COMMANDS.keys() >= {"shard", "verify", "show"}
    for module in ("penstock", "penstock.cli"):
        command = [sys.executable, "-m", module, "--version"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert (ended.stdout, ended.stderr) == (f"penstock {penstock.__version__}\n", "")


def complete(*words: str) -> list[str]:
    """What a shell is told when TAB is pressed after these words."""
    environment = {
        **os.environ, "_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    code = "import sys; sys.argv = ['penstock']; from penstock.cli import app; app()"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return ended.stdout.split()


def test_a_shell_completes_commands_and_options(run: Any) -> None:
    assert complete("penstock", "to") == ["tokenize", "tokenizer"]
    assert complete("penstock", "tokenizer", "") == ["train", "eval"]
    assert "--max_tokens" in complete("penstock", "chunk", "--max")
    assert "complete -o" in run("--show-completion", "bash").out


# chunk.


@pytest.fixture
def workshop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: Any, tokenizer_folder: Path
) -> Path:
    """A directory with two inputs and ./tokenizer, to stand in."""
    for name, seed in (("a.jsonl", 51), ("b.jsonl", 52)):
        texts = [raw.decode() for raw in sources(seed, 30).values()]
        (tmp_path / name).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_of_document_000(run: Any, workshop: Path) -> None:
    command = "--inputs a.jsonl b.jsonl --output o.jsonl --parquet_dir d --max_tokens 16384"
    ran = run("chunk", *command.split())
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "d: sealed, 60 documents read, 60 kept as 60 chunks in 1 shards\n"
    assert len((workshop / "o.jsonl").read_text().splitlines()) == 60
    assert (workshop / "o.jsonl.done").exists()
    assert {"_COMPLETE", "shard_00000.parquet", "val_shard.parquet"} <= {*os.listdir("d")}
    assert run("verify", "d", "--full").code == 0
    assert run("chunk", *command.split()).out == ran.out


@pytest.mark.parametrize("way", ["chunk", "lines", "shard"])
@pytest.mark.parametrize("content", ["", "{}\n"], ids=["empty", "refused"])
def test_an_empty_result_is_no_success(run: Any, workshop: Path, way: str, content: str) -> None:
    (workshop / "c.jsonl").write_text(content)
    command = {
        "chunk": "chunk --inputs c.jsonl --parquet_dir d --workers 1",
        "lines": "chunk --inputs c.jsonl --output o.jsonl --workers 1",
        "shard": "shard --input c.jsonl --parquet_dir d --complete",
    }[way]
    for _ in range(2):  # the same when it is sealed already
        ran = run(*command.split(), "--max_rejects", 1)
        assert ran.code == 1
        assert ": sealed, " in ran.out
        why = (
            "all 1 documents were refused: no_text 1" if content else "the inputs hold no document"
        )
        assert ran.err.splitlines()[0] == "BadInput: nothing was kept"
        assert f"  why:   {why}\n" in ran.err


def test_chunk_says_what_it_did(run: Any, workshop: Path) -> None:
    (workshop / "c.jsonl").write_text((workshop / "a.jsonl").read_text())
    command = ("chunk", "--inputs", "a.jsonl", "b.jsonl", "--parquet-dir", "d", "--max-tokens", 96,
               "--dedup", "exact", "--workers", 1, "--inputs", "c.jsonl")  # fmt: skip
    ran = run(*command)
    assert (ran.code, ran.err) == (0, "")
    state = Log.open("d").state
    chunks = sum(known.rows for known in state.inputs.values())
    assert chunks > 100
    assert ran.out == (
        f"d: sealed, 90 documents read, 60 kept as {chunks:,} chunks in 1 shards\n"
        "  30 not kept: exact_duplicate\n"
    )
    events = Path("d/_events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    again = run(*command)
    assert (again.code, again.out) == (0, ran.out)
    rows = sum(file.rows for file in [*state.split("train"), *state.split("val")])
    assert json.loads(run("verify", "d", "--json").out)["rows"] == rows == chunks
    assert run("show", "d").out.startswith("d: sealed, chunks of 96 tokens\n")


def test_a_new_generation_says_where_it_is(run: Any, workshop: Path) -> None:
    command = ("chunk", "--inputs", "a.jsonl", "--parquet-dir", "d", "--workers", 1)
    assert run(*command, "--max-tokens", 96).code == 0
    ran = run(*command, "--max-tokens", 64)
    assert ran.code == 0
    assert ran.out.startswith("d/_gen/00002: sealed, 30 documents read")
    assert Log.open("d/_gen/00002").state.sealed is not None
    shown = run("show", "d").out.splitlines()
    assert shown[0] == "d/_gen/00002: sealed, chunks of 64 tokens"
    assert "  beside  d: sealed, chunks of 96 tokens" in shown
    assert json.loads(run("show", "d", "--json").out)["others"] == {
        "d": "sealed, chunks of 96 tokens"
    }
    old = json.loads(run("verify", "d/_gen/00001", "--json").out)
    new = json.loads(run("verify", "d", "--json").out)
    assert (old["dataset"], old["others"]) == ("d", ["d/_gen/00002"])
    assert (new["dataset"], new["others"]) == ("d/_gen/00002", ["d"])
    told = run("verify", "d", "--expect", old["head"])
    assert told.code == 0
    assert told.out.startswith("d: ok (quick)")
    assert told.out.endswith("not looked at: d/_gen/00002, another generation\n")
    absent = run("verify", "d", "--expect", f"1:{'0' * 64}")
    assert absent.code == 1
    assert "d/_gen/00002: FAULTY" in absent.out
    Path("d/_gen/00002/_log/00000000000000000001.json").write_text("rubbish")
    assert "  beside  d/_gen/00002: not readable" in run("show", "d/_gen/00001").out


CHUNK_OPTIONS: Final = {
    "--inputs": "a.jsonl", "--max_tokens": 96, "--parquet_dir": "", "--tokenizer": "tokenizer",
    "--reserve_tokens": 2, "--language": "cpp", "--filter": "code", "--secrets": "reject",
    "--pii": "keep", "--rule": "not_shouting", "--set": "min_alnum=0.2", "--dedup": "near",
    "--benchmark": "b.jsonl",
    "--processor": "chunk_plugin:Same", "--plugin": "chunk_plugin", "--suffixes": ".c,.h",
    "--text_field": "text", "--decode": "reject", "--max_document_bytes": "1MB",
    "--order": "path",
    "--rows_per_file": 30, "--bytes_per_file": "1MB", "--val_fraction": 0.3, "--seed": 5,
    "--workers": 1, "--engine": "local", "--max_memory": "1GB", "--max_rejects": 0.5,
}  # fmt: skip
CHUNK_PLUGIN: Final = """\
from penstock import DataProcessor, register
import pyarrow.compute as pc

@register("filter", "not_shouting")
def rule(texts, measured):
    return pc.invert(pc.utf8_is_upper(texts))

class Same(DataProcessor):
    def process(self, documents):
        return documents.column("text")
"""


def test_all_options_of_chunk_in_both_spellings(
    run: Any, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk_options = {option for command, option in OPTIONS if command == "chunk"}
    assert {*CHUNK_OPTIONS, "--input", "--tokens", "--output"} == chunk_options
    (workshop / "chunk_plugin.py").write_text(CHUNK_PLUGIN)
    monkeypatch.syspath_prepend(workshop)
    configs = []
    for how in ("_", "-"):
        options = {**CHUNK_OPTIONS, "--parquet_dir": f"out{how}"}
        given = [part for key, value in options.items() for part in (spelled(key, how), value)]
        ran = run("chunk", *given, "--tokens")
        assert (ran.code, ran.err) == (0, "")
        opened = Log.open(f"out{how}").state.opened
        assert opened is not None
        configs.append(opened.config)
        given += ["--parquet-dir", f"lines{how}", spelled("--output", how), f"o{how}.jsonl"]
        assert run("chunk", *given).code == 0
    assert configs[0] == configs[1]
    assert configs[0]["token_type"] == "uint16"
    assert configs[0]["rows_per_file"] == 30
    read = configs[0]["prepare"]["read"]
    assert read["decode"] == "reject"
    assert read["suffixes"] == [".c", ".h"]
    steps = {step["step"]: step for step in configs[0]["prepare"]["steps"]}
    assert list(steps) == ["process", "filter", "decontaminate", "dedup", "chunk"]
    assert steps["chunk"]["max_tokens"] == 96
    assert steps["chunk"]["reserve_tokens"] == 2
    assert steps["filter"]["secrets"] == "reject"
    assert steps["filter"]["rules"] == ["not_shouting"]
    assert steps["filter"]["min_alphanumeric"] == 0.2


WRONG: Final = [
    (("--tokenizer", "nothing"), "InputMissing|BadTokenizer|BadConfig", "nothing"),
    (("--max-tokens", 5), "BadConfig", "--max_tokens is 5"),
    (("--max-tokens", -1), "BadConfig", "--max_tokens is -1"),
    (("--reserve-tokens", -1), "BadConfig", "--reserve_tokens is -1"),
    (("--filter", "cude"), "BadConfig", "cude"),
    (("--secrets", "eat"), "BadConfig", "eat"),
    (("--rule", "absent"), "BadConfig", "absent"),
    (("--set", "min_alfanumeric=0.1"), "BadConfig", "did you mean min_alphanumeric?"),
    (("--set", "min_alnum"), "BadConfig", "it has no value"),
    (("--set", "min_alnum=0.1", "--set", "min_alnum=0.2"), "BadConfig", "is given twice"),
    (("--set", "min_alnum=few"), "BadConfig", "give a number"),
    (("--set", "max_bytes=1.5"), "BadConfig", "give a whole number"),
    (("--set", "minified=maybe"), "BadConfig", "give true or false"),
    (("--set", "max_top_ngrams=a"), "BadConfig", "give numbers, by commas"),
    (("--set", "secrets=keep"), "BadConfig", "give --secrets"),
    (("--dedup", "fuzzy"), "BadConfig", "--dedup is 'fuzzy'"),
    (("--language", "pyhton"), "BadConfig", "did you mean python?"),
    (("--engine", "spark"), "BadConfig", "--engine is 'spark'"),
    (("--max-memory", "1MB"), "BadConfig", "give at least 512MB"),
    (("--max-memory", "much"), "BadConfig", "--max_memory is 'much'"),
    (("--workers", 0), "BadConfig", "--workers is 0"),
    (("--suffixes", "c,h"), "BadConfig", "is not a suffix"),
    (("--decode", "ebcdic"), "BadConfig", "--decode is 'ebcdic'"),
    (("--plugin", "no.such"), "BadConfig", "no.such"),
    (("--processor", "no.such:Thing"), "BadConfig", "there is no processor no.such:Thing"),
    (("--benchmark", "absent.jsonl"), "InputMissing", "absent.jsonl"),
    (("--val-fraction", 2), "BadConfig", "--val_fraction is 2.0"),
    (("--inputs", "c.jsonl"), "InputMissing", "c.jsonl is not there"),
    (("--inputs", "*.json"), "InputMissing", "nothing matches *.json"),
    (("--inputs", "a.jsonl"), "BadConfig", "the same input is given twice"),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_errors_of_chunk_are_messages(
    run: Any, workshop: Path, options: tuple[Any, ...], kind: str, text: str
) -> None:
    command = ("chunk", "--inputs", "a.jsonl", "--parquet-dir", "d", "--workers", 1)
    ran = run(*command, *options)
    name = ran.err.partition(":")[0]
    assert re.fullmatch(kind, name), ran.err
    expect_error(ran, name, text)
    # what was wrong has spoilt nothing
    assert run(*command, "--max_tokens", 96).code == 0


def test_chunk_without_what_it_needs(run: Any, workshop: Path) -> None:
    expect_error(run("chunk", "--inputs", "a.jsonl"), "BadConfig", "nothing is to be written")
    assert run("chunk", "--parquet-dir", "d").code == 2
    shutil.rmtree("tokenizer")
    expect_error(
        run("chunk", "--inputs", "a.jsonl", "--parquet-dir", "d"), "BadConfig",
        "there is none in ./tokenizer", "penstock tokenizer train --inputs",
    )  # fmt: skip


def test_sigterm_stops_chunk_and_the_same_command_goes_on(
    run: Any, workshop: Path, sources: Any
) -> None:
    for number in range(40):
        texts = [raw.decode() for raw in sources(100 + number, 10).values()]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (workshop / f"many{number:02d}.jsonl").write_text(lines)
    command = ("chunk", "--inputs", "many*.jsonl", "--max-tokens", 96, "--rows-per-file", 20,
               "--dedup", "near", "--workers", 1, "--parquet-dir")  # fmt: skip
    dataset = workshop / "d"
    with started(*command, "d") as process:
        wait_for(dataset / "shard_00001.parquet", process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "d: not sealed" in out
    assert err == "stopped by a signal; the same command resumes from here\n"
    assert run(*command, "d").code == 0
    assert run(*command, "fresh").code == 0
    assert shards(dataset) == shards(workshop / "fresh")
    assert len(shards(dataset)) > 20
    assert run("verify", "d", "--full").code == 0


def test_tokenizers_are_compared_on_what_chunk_reads(
    run: Any, workshop: Path, sources: Any
) -> None:
    tree = workshop / "tree"
    tree.mkdir()
    for name, raw in sources(7, 5).items():
        (tree / name.replace("/", "_")).write_bytes(raw)
    (tree / "picture.png").write_bytes(b"\x89PNG\0\1" * 100)
    (tree / "notes.py").write_text("x = 1\n" * 50)
    (tree / "vector").write_text("class vector {};\n" * 50)
    ran = run("tokenizer", "eval", "tokenizer", "--input", "tree", "--json")
    assert ran.code == 0
    assert "refused: binary 1 (tree/picture.png)" in ran.err
    assert {"Python", "other"} <= {score["language"] for score in json.loads(ran.out)}
    ran = run("tokenizer", "eval", "tokenizer", "--suffixes", ".py", "--inputs", "tree", "--json")
    assert [score["language"] for score in json.loads(ran.out)] == ["Python"]
    both = ("tokenizer", "eval", "tokenizer", "--json", "--inputs", "a.jsonl", "b.jsonl")
    assert sum(score["text_bytes"] for score in json.loads(run(*both).out)) > 10_000
