"""A dataset as a person and as a program is told of it."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadInput, NoDataset, PenstockError
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.writer import ShardConfig
from penstock.store.log import Log
from penstock.watch.show import describe, render
from penstock.work.events import Events, progress_bar

CONFIG = ShardConfig(rows_per_file=10, val_fraction=0.2)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show")
    path = folder / "in.jsonl"
    lines = [json.dumps({"text": f"{k} é " + "x" * 300}) for k in range(100)]
    path.write_text("\n".join([*lines, "{}", "[]", "{}", ""]))
    shard_jsonl([path], folder / "out", CONFIG, FollowConfig(complete=True, max_rejects=0.1))
    return folder / "out"


def test_what_a_program_is_told(sealed: Path) -> None:
    log = Log.open(sealed)
    about: dict[str, Any] = json.loads(json.dumps(describe(log)))
    source = str(sealed.parent / "in.jsonl")
    assert about["dataset"] == str(sealed)
    assert about["sealed"] is True
    assert about["records"] == log.state.n + 1
    assert about["config"]["rows_per_file"] == 10
    assert about["train"]["rows"] + about["val"]["rows"] == 100
    assert about["train"]["files"] == len(about["shards"])
    assert about["train"]["bytes"] == sum(shard["bytes"] for shard in about["shards"])
    assert about["train"]["tokens"] is None
    assert about["val"]["files"] == 1
    assert about["rejects"] == {"no_text": 2, "not_an_object": 1}
    assert about["inputs"] == {
        source: {
            "bytes_read": (sealed.parent / "in.jsonl").stat().st_size,
            "read": 103,
            "kept": 100,
            "dropped": {"no_text": 2, "not_an_object": 1},
            "blank": 0,
            "ended": "complete: told so",
        }
    }
    assert len(about["sample"]) == 3
    for row in about["sample"]:
        assert len(row["text"]) == 201
        assert row["text"].endswith("…")
        assert row["source"] == source


@pytest.mark.parametrize(("rows", "expected"), [(0, 0), (-1, 0), (1, 1), (10, 10), (1000, 10)])
def test_as_many_rows_as_asked_for(sealed: Path, rows: int, expected: int) -> None:
    assert len(describe(Log.open(sealed), sample_rows=rows)["sample"]) == expected


def test_what_a_person_is_told(sealed: Path) -> None:
    about = describe(Log.open(sealed))
    text = render(about)
    lines = text.splitlines()
    source = sealed.parent / "in.jsonl"
    assert lines[0] == f"{sealed}: sealed"
    assert lines[1].startswith(f"  train   {about['train']['files']} files, ")
    assert "tokens not counted" in lines[1]
    assert f"  input   {source}: read to {source.stat().st_size:,}, 103 read = 100 kept" in text
    assert "3 refused, ended (complete: told so)" in text
    assert "  refused 2 no_text\n  refused 1 not_an_object\n" in text
    assert "  shard   shard_00000.parquet: 10 rows, " in text
    assert f"          and {about['train']['files'] - 5} more" in text
    assert sum(line.startswith("  row     ") for line in lines) == 3


def test_a_live_dataset(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 25)
    path.with_name("in.jsonl.done").write_text('{"bytes": 10000}')
    with pytest.raises(BadInput):
        shard_jsonl([path], tmp_path / "out", CONFIG)
    about = describe(Log.open(tmp_path / "out"))
    assert about["sealed"] is False
    assert about["sample"] == []
    assert render(about).startswith(f"{tmp_path / 'out'}: live, last record 2")


def test_tokens_are_summed_when_all_are_known(sealed: Path) -> None:
    log = Log.open(sealed)
    for name, file in log.state.files.items():
        log.state.files[name] = type(file)(
            file.name, file.sha256, file.bytes, file.rows, 7, file.split
        )
    about = describe(log)
    assert about["train"]["tokens"] == 7 * about["train"]["files"]
    assert "tokens 7" in render(about)


def test_an_empty_dataset(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"")
    shard_jsonl([path], tmp_path / "out", CONFIG, FollowConfig(complete=True))
    about = describe(Log.open(tmp_path / "out"))
    assert about["train"] == {"files": 0, "rows": 0, "bytes": 0, "tokens": None}
    assert about["sample"] == []
    assert render(about).splitlines()[1] == "  train   0 files, 0 rows, 0 bytes, tokens not counted"


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(NoDataset, match="there is no dataset at") as caught:
        Log.open(tmp_path)
    assert "penstock shard" in caught.value.do


def test_a_missing_shard_only_costs_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    config = ShardConfig(val_fraction=0)
    shard_jsonl([path], tmp_path / "out", config, FollowConfig(complete=True))
    (tmp_path / "out" / "shard_00000.parquet").unlink()
    about = describe(Log.open(tmp_path / "out"))
    assert about["sample"] == []
    assert about["train"]["rows"] == 2


@pytest.mark.parametrize("spoil", [b"", b"PAR1 not really PAR1"])
def test_a_damaged_shard_is_no_crash(tmp_path: Path, spoil: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n')
    config = ShardConfig(val_fraction=0)
    shard_jsonl([path], tmp_path / "out", config, FollowConfig(complete=True))
    (tmp_path / "out" / "shard_00000.parquet").write_bytes(spoil)
    try:
        assert describe(Log.open(tmp_path / "out"))["sample"] == []
    except PenstockError:
        pass


# Names come from data: a terminal must not obey them.

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj\r\nfault"


def told(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60)
    return (done.stdout + done.stderr).decode()


def test_a_terminal_does_not_obey_names(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 3 + "{}\n")
    config = FollowConfig(complete=True, max_rejects=1.0)
    shard_jsonl([path], tmp_path / EVIL, CONFIG, config)
    shown = told("show", EVIL, folder=tmp_path)
    assert "\\x1b[2J\\x9b31m\\u202egpj\\r\\nfault" in shown
    assert json.loads(told("show", "--json", EVIL, folder=tmp_path))["dataset"] == EVIL
    (next((tmp_path / EVIL).glob("*.parquet"))).unlink()
    faults = told("verify", EVIL, folder=tmp_path)
    missing = told("show", EVIL + "x", folder=tmp_path)
    wrong = told("shard", "--input", EVIL, "--parquet_dir", "out", folder=tmp_path)
    assert "FAULTY" in faults
    assert "NoDataset" in missing
    for text in (shown, faults, missing, wrong):
        assert "gpj" in text
        assert not set(text) & set("\x1b\x07\x9b\u202e\r")
    assert not [line for line in shown.splitlines() if line.startswith("fault")]


def test_what_a_log_names_is_printable(sealed: Path) -> None:
    """Whoever made a dataset chose what its log says."""
    about = describe(Log.open(sealed))
    (known,) = about["inputs"].values()
    about["inputs"] = {EVIL: {**known, "ended": EVIL}}
    about["rejects"] = {EVIL: 1}
    about["shards"][0]["name"] = EVIL
    about["last_record"], about["sealed"] = EVIL, False
    about["sample"][0]["source"] = EVIL
    text = render(about)
    assert text.count("gpj") == 6
    assert not set(text) & set("\x1b\x07\x9b\u202e\r")
    assert not [line for line in text.splitlines()[1:] if not line.startswith("  ")]


def test_notices_are_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    events = Events("shard")
    with progress_bar(events, "shard"):
        events.emit("warn", message=f"{EVIL} is odd")
    assert out.getvalue().endswith("fault is odd\n")
    assert not set(out.getvalue()) & set("\x1b\x07\x9b\u202e\r")


def test_a_bar_is_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm")
    events = Events("shard")
    with progress_bar(events, "shard"):
        events.emit("progress", input=EVIL, at=1, size=2)
        events.emit("wait", message=EVIL)
    assert "\\x1b]0;title" in out.getvalue()
    assert "\x1b]0;title" not in out.getvalue()
    assert "\x07" not in out.getvalue()
