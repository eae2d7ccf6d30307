"""`penstock init` and `--dry-run`: a pipeline for what is there, and what it will make."""

import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import BadConfig, BadInput, StageFailed
from penstock.ingest.find import expand_inputs
from penstock.pipeline.begin import write_pipeline
from penstock.pipeline.describe import read_pipeline
from penstock.pipeline.estimate import estimate
from penstock.store.log import Log
from pipeline.made import MakeSources, ended, processes_in, run


@pytest.fixture
def mixed(tmp_path: Path, sources: MakeSources) -> Path:
    """One of each kind of input that is found."""
    texts = [raw.decode() for raw in sources(3, 60).values()]
    for k, text in enumerate(texts):
        path = tmp_path / "tree" / f"{k}.cpp"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "tree" / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "top.py").write_text("x = 1\n" * 30)
    (tmp_path / "notes.md").write_text("# Notes\n" * 30)
    with tarfile.open(tmp_path / "old.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "tree" / "0.cpp", "0.cpp")
    rows = [json.dumps({"raw text": text, "id": "x"}) for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (tmp_path / "numbers.jsonl").write_text('{"n": 1}\n')
    pq.write_table(pa.table({"n": [1] * 60, "content": texts[:60]}), tmp_path / "t.parquet")
    return tmp_path


def test_each_kind_of_input_becomes_a_source(mixed: Path) -> None:
    path, told = write_pipeline(mixed)
    pipeline = read_pipeline(path)
    found = {one.name: (one.kind, one.inputs) for one in pipeline.sources}
    assert found == {
        "archives": ("documents", ("old.tar.gz",)),
        "chat": ("conversations", ("talk.jsonl",)),
        "code": ("documents", ("*.py", "tree")),
        "lines": ("documents", ("more.jsonl.gz",)),
        "lines_raw_text": ("documents", ("rows.jsonl",)),
        "prose": ("documents", ("*.md",)),
        "tables_content": ("documents", ("t.parquet",)),
    }
    tables = {one.name: one.tables for one in pipeline.sources}
    assert tables["lines_raw_text"]["read"] == {"text_field": "raw text"}
    assert tables["tables_content"]["read"] == {"text_field": "content"}
    assert tables["code"]["filter"] == {"preset": "code"}
    assert tables["code"]["read"] == {"suffixes": frozenset({".cpp", ".py"})}
    assert told[2].startswith("code: 61 files, 0.")
    assert told[-2:] == [
        "left out: 1 files whose first row has no text: numbers.jsonl",
        "left out: 1 files of other kinds: .png",
    ]
    command = next(stage for stage in pipeline.stages if stage.job == "tokenizer").command
    assert command[4:9] == ("old.tar.gz", "*.py", "tree", "more.jsonl.gz", "*.md")
    assert pipeline.has_loader
    with pytest.raises(BadConfig, match="is there already") as caught:
        write_pipeline(mixed)
    assert caught.value.do == "edit it, or move it away and run this again"


def test_many_files_become_a_glob(tmp_path: Path) -> None:
    for k in range(20):
        path = tmp_path / "in" / f"{k}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"text": "a text"}\n')
    (source,) = read_pipeline(write_pipeline(tmp_path)[0]).sources
    assert source.inputs == ("in/*.jsonl",)


def test_a_glob_takes_no_file_of_another_source(tmp_path: Path) -> None:
    for k in range(10):
        (tmp_path / f"a{k}.jsonl").write_text('{"text": "a text"}\n')
        (tmp_path / f"b{k}.jsonl").write_text('{"content": "a text"}\n')
        (tmp_path / f"c{k}.json.jsonl").write_text("[]\n")
    (tmp_path / "a.CPP").write_text("int a;\n")
    for name in ("a b.py", "\udcff.py"):
        (tmp_path / name).write_text("a = 1\n")
    path, told = write_pipeline(tmp_path)
    found = {one.name: one.inputs for one in read_pipeline(path).sources}
    assert found == {
        "code": ("*.CPP", "a b.py"),
        "lines": tuple(f"a{k}.jsonl" for k in range(10)),
        "lines_content": tuple(f"b{k}.jsonl" for k in range(10)),
    }
    for inputs in found.values():
        assert expand_inputs([str(tmp_path / name) for name in inputs])
    assert (
        "left out: 10 files whose first row has no text: c0.json.jsonl, c1.json.jsonl" in told[-1]
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a long question", "chosen": "yes", "rejected": "no"},
        {"prompt": "a long question", "completion": "yes"},
        {"instruction": "add", "response": "2"},
    ],
)
def test_rows_of_questions_and_answers_are_conversations(tmp_path: Path, row: Any) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    path, told = write_pipeline(tmp_path)
    pipeline = read_pipeline(path)
    assert [(one.kind, one.inputs) for one in pipeline.sources] == [("conversations", ("a.jsonl",))]
    alone = "tokenizer: none is there, and conversations train none: name the model's own"
    assert told[-1] == alone
    (doubt,) = pipeline.doubts
    assert doubt == (
        "[tokenizer]: tokenizer is not there, and no stage trains it: name one that is, or write "
        "[tokenizer.train]"
    )
    (tmp_path / "tokenizer").mkdir()
    assert not read_pipeline(path).doubts


def test_what_the_tokenizer_does_not_learn_from_is_told(tmp_path: Path) -> None:
    for name in ("content", "text", "body"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({name: "a text"}) + "\n")
    path, told = write_pipeline(tmp_path)
    others = "lines_body, lines_content: another field has those"
    assert told[-1] == f"tokenizer: learns nothing from {others}"
    assert f"# It learns nothing from {others} texts.\n" in path.read_text()
    os.unlink(path)
    os.unlink(tmp_path / "text.jsonl")
    path, told = write_pipeline(tmp_path)
    assert told[-1] == "tokenizer: learns nothing from lines_content: another field has those"
    assert 'text_field = "body"' in path.read_text()


def test_names_that_begin_like_an_option(tmp_path: Path) -> None:
    (tmp_path / "-f.jsonl").write_text('{"text": "a text"}\n')
    pipeline = read_pipeline(write_pipeline(tmp_path)[0])
    for stage in pipeline.stages[:2]:
        assert stage.command[stage.command.index("--inputs") + 1] == "./-f.jsonl"
    told = pipeline.path.read_text().replace('"-f.jsonl"', '"src"')
    pipeline.path.write_text(told.replace("[tokenizer]", '[tokenizer]\ninputs = ["-f.jsonl"]'))
    assert read_pipeline(pipeline.path).stages[0].command[4] == "./-f.jsonl"


def test_odd_names_are_left_out_and_told(tmp_path: Path) -> None:
    row = '{"text": "a text"}\n'
    for name in ("a\nb.jsonl", "c\x7f.jsonl", "\udcff.jsonl", "é.jsonl"):
        (tmp_path / name).write_text(row)
    for number, field in enumerate(("änd", "önd", "😀", "a\u0001")):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({field: "a text"}) + "\n")
    path, told = write_pipeline(tmp_path)
    found = {one.name: (one.inputs, one.tables.get("read")) for one in read_pipeline(path).sources}
    assert found == {
        "lines": (("é.jsonl",), None),
        "lines__nd": (("0.jsonl",), {"text_field": "änd"}),
        "lines__nd_2": (("1.jsonl",), {"text_field": "önd"}),
        "lines__": (("2.jsonl",), {"text_field": "😀"}),
    }
    assert told[-1] == "left out: 4 files whose names, or whose fields, are no plain text"


def test_nothing_to_find(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can be read") as caught:
        write_pipeline(tmp_path)
    assert caught.value.why == "there are no source files, JSONL, parquet files or archives"
    with pytest.raises(BadInput, match="nothing is no directory"):
        write_pipeline(tmp_path / "nothing")


def test_what_is_written_runs_and_comes_near_its_estimate(
    tmp_path: Path, sources: MakeSources
) -> None:
    for name, raw in sources(3, 200).items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    path, _ = write_pipeline(tmp_path)
    code, out, err = run(path, "--dry-run")
    assert code == 0, err
    assert "chunk code\n  $ penstock chunk --inputs tree --parquet_dir data/code" in out
    assert "Estimates, from a sample of " in out
    assert "--inputs tree --output tokenizer" in out
    assert not (tmp_path / "data").exists()
    code, _, err = run(path)
    assert code == 0, err
    again = run(path, "--only", "tokenizer")
    assert again[0] == 0
    assert "tokenizer: tokenizer was trained by this command already" in again[2]
    path.write_text(path.read_text().replace("vocab_size = 2048", "vocab_size = 1024"))
    assert "trained by this command already" not in run(path, "--only", "tokenizer")[2]
    state = Log.open(tmp_path / "data" / "code").state
    files = [*state.split("train"), *state.split("val")]
    rows = sum(file.rows for file in files)
    assert f" in {rows:,} chunks, " in out  # all of it fits into the sample


def test_a_sample_stands_for_the_whole(
    tmp_path: Path, sources: MakeSources, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.estimate.SAMPLE_BYTES", 1 << 16)
    monkeypatch.setattr("penstock.pipeline.estimate._PIECE_BYTES", 1 << 14)
    texts = [raw.decode() for raw in sources(3, 400).values()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    path = tmp_path / "pipeline.toml"
    path.write_text(
        '[source.a]\ninputs = ["a.jsonl"]\n[chunk]\nmax_tokens = 64\n'
        f"[tokenizer]\npath = {json.dumps(str(tokenizer_folder))}\n"
    )
    pipeline = read_pipeline(path)
    lines = [*estimate(pipeline, pipeline.stages)]
    about = _numbers(lines[2])
    assert run(path)[0] == 0
    state = Log.open(tmp_path / "data" / "a").state
    tokens = sum(file.tokens or 0 for file in [*state.split("train"), *state.split("val")])
    assert 0.7 * tokens < about < 1.4 * tokens
    assert lines[-1].startswith("Estimates, from a sample of 0.")


def _numbers(line: str) -> float:
    found: Any = line.split()[1].replace(",", "")
    return float(found) * (1000 if "thousand tokens" in line else 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_estimate_that_is_stopped_leaves_nothing(
    tmp_path: Path, sources: MakeSources, number: int
) -> None:
    (tmp_path / "in").mkdir()
    path = many_files(tmp_path / "in", sources)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", path.name, "--dry-run"],
        cwd=path.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    with ended(process):
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("penstock-sample-*/tokenizer.events.jsonl")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(30) != 0
    deadline = time.monotonic() + 20
    while processes_in(path.parent):
        assert time.monotonic() < deadline, processes_in(path.parent)
        time.sleep(0.05)
    if number != signal.SIGKILL:
        assert [one.name for one in tmp_path.iterdir()] == ["in"]


def many_files(folder: Path, sources: MakeSources) -> Path:
    for name, raw in sources(2, 400).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(raw)
    return write_pipeline(folder)[0]


def test_inputs_without_a_document_have_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    path = tmp_path / "pipeline.toml"
    given = '[tokenizer]\npath = "tokenizer"\n[tokenizer.train]\nvocab_size = 300\n'
    path.write_text(given + '[source.a]\ninputs = ["a.txt"]\n')
    pipeline = read_pipeline(path)
    told = list(estimate(pipeline, pipeline.stages))
    assert told[0::3][:2] == ["tokenizer", "chunk"]
    assert told[2::3][:2] == ["  no estimate: its inputs hold no document"] * 2


def test_a_sample_that_fails_says_so(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "pipeline.toml"
    path.write_text(
        '[source.a]\ninputs = ["a.jsonl"]\n[filter]\nmin_bytes = 5\n'
        f"[tokenizer]\npath = {json.dumps(str(tokenizer_folder))}\n"
    )
    pipeline = read_pipeline(path)
    with pytest.raises(StageFailed, match="fails on a sample") as caught:
        [*estimate(pipeline, pipeline.stages)]
    assert "nothing was kept" in caught.value.why
    assert caught.value.do == "fix that: the whole would fail in the same way"
