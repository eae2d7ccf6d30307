"""Progress on standard error only: a bar on a terminal, plain notices elsewhere."""

import io
import sys

import pytest

from penstock.watch.progress import progress_bar
from penstock.work.events import Events


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


def test_on_a_terminal_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    events = Events("shard")
    with progress_bar(events, "shard"):
        emit_all(events)
    shown = terminal.getvalue()
    assert "a.jsonl has not grown for [10] s" in shown
    assert "6 files, 1 faults" in shown
    assert capsys.readouterr().out == ""
