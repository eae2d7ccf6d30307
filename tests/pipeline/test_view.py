"""What is shown of stages: a table in a terminal, lines elsewhere; rubbish in a file is no harm."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.pipeline.describe import Pipeline, Stage, TrainCommand, read_pipeline
from penstock.pipeline.view import View, read_lines
from pipeline.made import MakeSources, write_pipeline


def stage(job: str) -> Stage:
    return Stage(name=job, job=job, command=(job,), source="cpp")


def told(path: Path, **event: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), "stage": "x", **event}) + "\n")


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read_lines(path, 0) == ([], 0)
    path.write_text('{"a": 1}\nrubbish\n[1]\n{"b"')
    found, at = read_lines(path, 0)
    assert found == [{"a": 1}]
    assert at == 21
    with path.open("a") as file:
        file.write(": 2}\n")
    assert read_lines(path, at) == ([{"b": 2}], 30)


def test_each_stage_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = Pipeline(
        path=tmp_path / "p.toml", sources=(), stages=(), train=TrainCommand(log="train.jsonl")
    )
    stages = [stage("tokenizer"), stage("chunk"), stage("push"), stage("train")]
    with View(pipeline, stages) as view:
        for one in stages:
            view.begin(one, os.getpid(), tmp_path / one.job, 0)
        told(tmp_path / "tokenizer", kind="merge", at=10, size=20)
        reasons = {"blob": 3, "minified": 5}
        told(tmp_path / "chunk", kind="progress", at=0, size=4_000_000, files=2)
        told(
            tmp_path / "chunk", kind="progress", at=2_000_000, size=4_000_000, read=100, refused=8,
            reasons=reasons, files=9, time=time.time() + 2,
        )  # fmt: skip
        told(tmp_path / "push", kind="progress", at=1_000_000, size=2_000_000, files=4)
        told(tmp_path / "push", kind="progress", at="x", files=None, reasons=7)
        told(tmp_path / "push", kind="warn", message="slow\x1b[2J")
        told(tmp_path / "train.jsonl", step=7, loss=2.5, took_s=1.0, waited_s=0.25)
        told(tmp_path / "train.jsonl", step="x", time=None)
        (tmp_path / "train").write_text("")
        events = view.look()
        assert [event["source"] for event in events] == ["cpp"] * 6
        for one in stages:
            view.end(one, "done")
        view.tell_end()
    err = capsys.readouterr().err
    assert "tokenizer: done after 0." in err
    assert "10/20 merges" in err
    assert re.search(r"chunk: done .*; 2\.0/4\.0 MB, 9 files, refused 8 of 100 \(minified 5\)", err)
    assert re.search(r"push: done .*; 1\.0/2\.0 MB, 4 files\n", err)
    assert "push: slow\\x1b[2J" in err
    assert re.search(r"train: done .*; step 7, loss 2\.500, 0\.2 s for data", err)
    assert re.search(r"first batch after -?0\.\d s", err)
    assert "train: 1 steps, the last is 7, 0.2 s of them waiting for data" in err


RUBBISH: Final = (
    '{"step": 8, "loss": "2.31", "took_s": null, "waited_s": null}', '{"step": 9, "loss": NaN}',
    '{"step": 10, "time": Infinity}', '{"step": 1' + "0" * 400 + "}", "[" * 100_000, "\ud800",
    '{"step": 11, "loss": 1' + "0" * 400 + ', "took_s": "x", "waited_s": [1]}',
)  # fmt: skip


def test_rubbish_of_a_trainer_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = Pipeline(
        path=tmp_path / "p.toml", sources=(), stages=(), train=TrainCommand(log="train.jsonl")
    )
    events = '{"kind": "merge", "at": 1, "size": "x"}\n{"kind": "progress", "at": NaN}\n{}\n'
    (tmp_path / "events").write_text(events)
    with View(pipeline, [stage("train")]) as view:
        view.begin(stage("train"), os.getpid(), tmp_path / "events", 0)
        log = tmp_path / "train.jsonl"
        log.write_bytes("\n".join([*RUBBISH, ""]).encode("utf-8", "surrogatepass"))
        assert len(view.look()) == 3
        log.write_text('{"step": 3, "loss": 1.5}\n')  # begun anew, and shorter
        view.end(stage("train"), "done")
        view.tell_end()
    assert "train: 1 steps, the last is 3" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "pipe", "none", "odd"])
def test_a_log_that_cannot_be_read_has_no_lines(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("log\0" if kind == "odd" else "log")
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    before = len(os.listdir("/proc/self/fd"))
    assert read_lines(path, 7) in (([], 7), ([], 0))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_terminal_has_a_table(
    tmp_path: Path, sources: MakeSources, tokenizer_folder: Path
) -> None:
    path = write_pipeline(tmp_path, tokenizer_folder, sources(5, 30))
    read_pipeline(path)
    master, slave = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    environment.pop("TQDM_DISABLE", None)
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", path.name],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=slave, env=environment,
    ) as process:  # fmt: skip
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(master, 1 << 16):
                shown += data
        os.close(master)
        assert process.wait(60) == 0, shown.decode()
    text = shown.decode()
    for word in ("stage", "before it", "refused", "memory", "chunk", "push", "pull", "train"):
        assert word in text
    assert "first batch after " in text
    assert "done" in text
