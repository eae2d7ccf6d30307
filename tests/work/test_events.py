"""Progress on standard error only: a bar where somebody sees it, plain notices elsewhere."""

import io
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import TrainConfig, log_loss, pretokenize, train_tokenizer
from penstock.tokenize.evaluate import compare
from penstock.work.events import Events, progress_bar, shown


def emit_all(events: Events) -> None:
    events.emit("start", inputs=["a.jsonl"])
    events.emit("progress", input="a.jsonl", at=512, size=1024, read=1234, refused=5, files=6)
    events.emit("wait", input="a.jsonl", message="a.jsonl has not grown for [10] s")
    events.emit("progress", at=7, size=None, files=6, faults=1)
    events.emit("end", sealed=True)


def test_without_a_terminal_only_notices(capsys: pytest.CaptureFixture[str]) -> None:
    events = Events("shard")
    with progress_bar(events, "shard"):
        emit_all(events)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "a.jsonl has not grown for [10] s\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What was drawn, without colours."""
        return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\r", self.getvalue()))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """Makes standard error a terminal of some width."""

    def make(columns: int = 200) -> Terminal:
        made = Terminal()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return make


def test_on_a_terminal_a_bar(
    terminal: Callable[..., Terminal], capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = terminal()
    events = Events("shard")
    with progress_bar(events, "shard"):
        emit_all(events)
    assert "a.jsonl has not grown for [10] s" in drawn.getvalue()
    assert "6 files, 1 faults" in drawn.getvalue()
    assert capsys.readouterr().out == ""


def test_80_columns_hold_what_matters(terminal: Callable[..., Terminal]) -> None:
    drawn = terminal(80)
    events = Events("chunk")
    with progress_bar(events, "chunk"):
        for step in range(1, 4):
            events.emit(
                "progress", input="/some/where/far/away/a_long_name_000.jsonl", at=step * 10**9,
                size=40 * 10**9, read=123_456, refused=789, reasons={"blob": 700, "binary": 89},
            )  # fmt: skip
    last = next(line for line in reversed(drawn.lines()) if "chunk" in line)
    assert re.search(r"chunk …000\.jsonl .* 3,000\.0/40,000\.0 MB .*/s \d+:\d\d:\d\d 123,", last)
    assert len(last.rstrip()) <= 80


def test_reasons_are_told_where_there_is_room(terminal: Callable[..., Terminal]) -> None:
    drawn = terminal()
    events = Events("chunk")
    with progress_bar(events, "chunk"):
        reasons = {"blob": 7, "binary": 89, "too_small": 2, "minified": 1}
        events.emit("progress", at=1, size=2, read=900, refused=99, reasons=reasons)
    assert "900 read, 99 refused (binary 89, blob 7, too_small 2)" in drawn.getvalue()


def test_merges_are_counted_as_merges(
    terminal: Callable[..., Terminal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tokenize.bpe._BATCH", 10)
    text = tmp_path / "a.txt"
    text.write_text("the first token of the table is the last token of the record " * 30)
    drawn = terminal()
    train_tokenizer([text], tmp_path / "tokenizer", TrainConfig(vocab_size=277))
    told = [line for line in drawn.lines() if "tokenizer, merging" in line]
    assert "20/20 merges" in told[-1]
    assert "MB" not in told[-1]


def jobs(folder: Path) -> dict[str, Callable[[], Any]]:
    text = folder / "a.txt"
    text.write_text("the first token of the table is the last token of the record\n" * 3000)
    config = TrainConfig(vocab_size=270)
    train_tokenizer([text], folder / "t", config)
    return {
        "pretokenize": lambda: pretokenize(text, []),
        "train": lambda: train_tokenizer([text], folder / "tokenizer", config),
        "eval": lambda: compare({"t": folder / "t"}, [text]),
    }


@pytest.mark.parametrize("job", ["pretokenize", "train", "eval"])
def test_tokenizer_calls_show_progress_by_themselves(
    terminal: Callable[..., Terminal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    monkeypatch.setattr("penstock.tokenize.evaluate._TELL_S", 0.0)
    run = jobs(tmp_path)[job]
    drawn = terminal()
    run()
    assert re.search(r"0\.2/0\.2 MB", drawn.getvalue())
    monkeypatch.setenv("TQDM_DISABLE", "1")
    drawn = terminal()
    run()
    assert drawn.getvalue() == ""


def test_too_much_memory_is_told_without_asking(
    terminal: Callable[..., Terminal],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a b c")
    told = "more than the limit of 9 MB"
    drawn = terminal()
    pretokenize(text, [], max_memory_gb=0.009)
    assert told in drawn.getvalue()
    assert "GB of memory" in drawn.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    pretokenize(text, [], max_memory_gb=0.009)
    assert told in caplog.text


def test_a_notebook_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By tqdm's convention: a kernel is told by its application."""
    drawn: list[Any] = []
    for application, expected in (("TerminalIPythonApp", False), ("IPKernelApp", True)):
        shell = types.SimpleNamespace(config={application: {}})
        fake = types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", fake)
        drawn.clear()
        monkeypatch.setattr("rich.progress.Progress.update", lambda *_, **told: drawn.append(told))
        with shown(None, "pretokenize") as events:
            events.emit("progress", at=1, size=2)
        assert bool(drawn) == expected


def test_events_that_were_given_are_those_that_are_told() -> None:
    given = Events("x")
    assert not given.is_heard
    with shown(given, "pretokenize") as events:
        assert events is given
    given.listen(lambda event: None)
    assert given.is_heard


def test_losses_are_lines_of_their_own(tmp_path: Path) -> None:
    for step in (1, 2):
        log_loss(step, 3.0 / step, run_dir=tmp_path / "new" / "run", waited_s=0.5)
    lines = (tmp_path / "new" / "run" / "loss.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [(one["step"], one["loss"], one["waited_s"]) for one in found] == [
        (1, 3.0, 0.5), (2, 1.5, 0.5),
    ]  # fmt: skip
    assert found[0]["time"] <= found[1]["time"]


def test_losses_follow_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loss.jsonl").symlink_to(tmp_path / "elsewhere")
    log_loss(1, 3.0, run_dir=tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    assert "symbolic link" in capsys.readouterr().err


def test_losses_that_cannot_be_written_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("")
    for step in (1, 2):
        log_loss(step, 3.0, run_dir=tmp_path / "run")
    told = capsys.readouterr().err
    assert told == f"penstock: step 1 is not in {tmp_path}/run/loss.jsonl: File exists\n"
    (tmp_path / "run").unlink()
    log_loss(3, 3.0, run_dir=tmp_path / "run", time=0.0)
    assert json.loads((tmp_path / "run" / "loss.jsonl").read_text())["time"] > 0.0
