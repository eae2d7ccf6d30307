"""A run as a file: strict; explained and resumed as it began, whatever was banned since."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import PretrainDataLoader
from penstock.cli import app, main
from penstock.errors import BadConfig, StateMismatch
from penstock.supply import run_file
from penstock.supply.run_file import add_ban, explain, find_document, read_run

from .datasets import GrowingDataset, made_dataset, made_documents

LOADER = '[loader]\npath = "d"\nchunk_size = 64\nbatch_size = 4\n'
PLAN = "[loader.plan]\npool_size = 90\nrefill_threshold = 60\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made_dataset(tmp_path / "d")
    (tmp_path / "run.toml").write_text(LOADER + PLAN)
    return tmp_path / "run.toml"


def told(spans: list[Any]) -> list[tuple[int, tuple[int, int]]]:
    return [(span.document["doc_id"], span.tokens) for span in spans]


def test_a_run_that_has_begun_is_explained_as_it_began(run: Path) -> None:
    before = told(explain(run, 12))
    with PretrainDataLoader(**read_run(run)) as loader:
        begun = [next(iter(loader)).input_ids.tobytes() for _ in range(3)]
        rest = loader.state_dict()
        whole = begun + [batch.input_ids.tobytes() for batch in loader]
    state = json.loads(json.dumps(rest))
    first = explain(run, 1)[0].document["doc_id"]
    add_ban(run, first)
    assert told(explain(run, 12, state=state)) == before
    assert told(explain(run, 12, bans=0)) == before
    after = told(explain(run, 12, bans=1))
    assert after != before
    with pytest.raises(BadConfig, match="not said which bans the run began with") as caught:
        explain(run, 12)
    assert "0 for one that began before any, 1 for the next one" in caught.value.do
    with pytest.raises(BadConfig, match="bans is 2"):
        explain(run, 12, bans=2)

    with PretrainDataLoader(**read_run(run, state=state)) as loader:
        loader.load_state_dict(state)
        assert begun + [batch.input_ids.tobytes() for batch in loader] == whole
    with PretrainDataLoader(**read_run(run)) as loader:  # the next run has the ban
        with pytest.raises(StateMismatch, match="ban: the state has"):
            loader.load_state_dict(state)
        next(iter(loader))
        second = loader.state_dict()
        assert first not in [doc_id for b in loader for doc_id, _ in told(loader.explain(b))]
    add_ban(run, before[0][0])
    assert told(explain(run, 12, state=second)) == after == told(explain(run, 12, bans=1))
    with pytest.raises(BadConfig, match="not a state of a loader"):
        read_run(run, state={"config": {}})


def test_paths_are_relative_to_the_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = told(explain(run, 3))
    monkeypatch.chdir(run.parent)
    assert told(explain("run.toml", 3)) == here
    (run.parent / "else").mkdir()
    monkeypatch.chdir("else")
    assert told(explain(os.path.join("..", "run.toml"), 3)) == here
    text = LOADER.replace('"d"', f'{{a = "d", b = "{run.parent}/d", c = "s3://bucket/d"}}')
    run.write_text(text + 'run.cache_dir = "cache"\ntokenizer = "tokenizer"\n')
    found = read_run(run)
    folder = str(run.parent)
    assert found["path"] == {"a": f"{folder}/d", "b": f"{folder}/d", "c": "s3://bucket/d"}
    assert found["run"].cache_dir == f"{folder}/cache"
    assert found["tokenizer"] == f"{folder}/tokenizer"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[loader]\nchunk_size = 64\n", "[loader] has no path"),
        (LOADER.replace("64", '"64"'), "loader.chunk_size is '64'"),
        (LOADER.replace("64", "true"), "loader.chunk_size is True"),
        (LOADER.replace('"d"', "7"), "loader.path is 7"),
        (LOADER + "documents.ban = 5\n", "loader.documents.ban is 5"),
        (LOADER + 'documents.ban = "5"\n', "loader.documents.ban is '5'"),
        (LOADER + "documents.ban = [1.5]\n", "loader.documents.ban is [1.5]"),
        (LOADER + 'weights = {d = "1"}\n', "loader.weights is {'d': '1'}"),
        (LOADER + "plan.weight_schedule = {x = [1]}\n", "'x' in weight_schedule is not a step"),
        (LOADER + "plan.weight_schedule = [1]\n", "loader.plan.weight_schedule is [1]"),
        (
            LOADER + 'plan.weight_schedule = {1 = ["a"]}\n',
            "loader.plan.weight_schedule is {1: ['a']}",
        ),
        (LOADER + "plan = 3\n", "loader.plan is 3"),
        (LOADER + '[loader.plan]\npool_size = "3"\n', "loader.plan.pool_size is '3'"),
        (LOADER + '[loader.plan]\nramp = "no"\n', "loader.plan.ramp is 'no'"),
    ],
)
def test_values_of_the_wrong_kind_are_named(run: Path, text: str, words: str) -> None:
    run.write_text(text)
    with pytest.raises(BadConfig) as caught:
        read_run(run)
    assert words in caught.value.what
    assert caught.value.where == str(run)
    assert caught.value.do


def test_a_dataset_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_dataset(tmp_path / "my d", max_tokens=96)
    (tmp_path / "empty").mkdir()
    for name, length in (("my d", 96), ("empty", 2048)):
        path = str(tmp_path / name)
        with pytest.raises(BadConfig, match="is not a run's description") as caught:
            explain(path, 3)
        printf = re.search(r"printf .* > run\.toml", caught.value.do)
        assert printf is not None
        subprocess.run(["sh", "-c", printf[0]], cwd=tmp_path, check=True)
        written = tomllib.loads((tmp_path / "run.toml").read_text())
        assert written["loader"] == {
            "path": path, "tokenizer": "tokenizer", "chunk_size": length, "batch_size": 8,
        }  # fmt: skip
        code, text = command(capsys, "--config", path, "--batch", "3")
        assert (code, text.startswith("BadConfig: ")) == (1, True)
    # the description is one that can be read
    assert read_run(tmp_path / "run.toml")["chunk_size"] == 2048


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        main(lambda: app(["explain", *arguments], standalone_mode=False))
    except SystemExit as stopped:
        out = capsys.readouterr()
        return int(str(stopped.code)), out.out + out.err
    return 0, capsys.readouterr().out


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def explain(*arguments: str) -> tuple[int, str]:
        return command(capsys, "--config", str(run), *arguments)

    for arguments, words in (
        (("--batch", "-1"), "batch is -1"),
        (("--ban", "-1"), "--ban is '-1'"),
        (("--ban", str(1 << 64)), f"--ban is '{1 << 64}'"),
        (("--ban", "99999"), "no document of the run has doc_id 99999"),
        ((), "--batch is not given"),
        (("--batch", "1", "--state", str(run)), "is not JSON"),
        (("--batch", "1", "--state", str(run) + "x"), "there is no"),
    ):
        code, text = explain(*arguments)
        assert (code, words in text) == (1, True), text
    assert not run.with_suffix(".ban").exists()
    with PretrainDataLoader(**read_run(run)) as loader:
        state = run.with_name("loader.json")
        state.write_text(json.dumps(loader.state_dict()))
    code, before = explain("--batch", "12")
    assert (code, "doc_id" in before) == (0, True)
    code, text = explain("--ban", "7")
    assert (code, "7 is banned from the next run on; it is in " in text) == (0, True)
    assert "shard_00000.parquet" in text
    assert explain("--batch", "12", "--state", str(state)) == (0, before)
    assert explain("--batch", "12", "--bans", "0") == (0, before)
    assert explain("--batch", "12", "--bans", "1") != (0, before)
    assert explain("--batch", "12")[0] == 1


def test_a_document_that_may_still_come_can_be_banned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = GrowingDataset(tmp_path / "d")
    growing.add(made_documents(np.random.default_rng(0), 10))
    run = tmp_path / "run.toml"
    run.write_text(LOADER)
    assert find_document(run, 3).endswith("shard_00000.parquet")
    code, text = command(capsys, "--config", str(run), "--ban", "12345")
    assert (code, "no shard was seen that has it" in text) == (0, True)
    growing.add(made_documents(np.random.default_rng(0), 10))
    growing.seal()
    with pytest.raises(BadConfig, match="no document of the run has doc_id 12345"):
        find_document(run, 12345)
    monkeypatch.setattr(run_file, "LOOK_S", -1.0)
    assert find_document(run, 12345) == ""


def test_bans_have_64_bits(run: Path) -> None:
    for number in (-1, 1 << 64):
        with pytest.raises(BadConfig, match=f"{number} is not a doc_id"):
            add_ban(run, number)
    run.with_suffix(".ban").write_text(f"{1 << 64}\n")
    with pytest.raises(BadConfig, match="is not a doc_id"):
        read_run(run)


def files_in(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_who_looks_at_a_run_leaves_no_trace(run: Path) -> None:
    run.write_text(LOADER + PLAN + '[loader.run]\nrun_dir = "r"\nreader = "me"\n')
    before = files_in(run.parent)
    with run_file.open_run(run) as loader:
        found = loader.explain_next()
    assert files_in(run.parent) == before
    assert found == explain(run, 0)
    assert files_in(run.parent) == before


def test_who_looks_at_a_run_takes_its_choices(tmp_path: Path) -> None:
    growing = GrowingDataset(tmp_path / "d")
    random = np.random.default_rng(0)
    growing.add(made_documents(random, 60))
    path = tmp_path / "run.toml"
    path.write_text(LOADER + PLAN + '[loader.run]\nrun_dir = "r"\n')
    options = read_run(path)
    with PretrainDataLoader(**options) as loader:  # the run begins while the data grows: a ramp
        begun = next(iter(loader)).input_ids.tobytes()
    for k in range(5):
        growing.add(made_documents(random, 60, first=60 * (k + 1)))
    growing.seal()
    (tmp_path / "run.choices").unlink()  # its directory remembers the choice too
    with run_file.open_run(path) as loader:
        assert loader.config.ramp is True
        assert loader.get_batch(4).input_ids.tobytes() == begun
    (tmp_path / "r" / "_choices" / "ramp.json").unlink()
    with run_file.open_run(path) as loader:
        assert loader.config.ramp is False
    assert not (tmp_path / "r" / "_choices" / "ramp.json").exists()


def test_who_looks_at_a_run_decides_nothing_for_it(run: Path) -> None:
    run.write_text(LOADER + PLAN + 'behind = "repeat"\n[loader.run]\nrun_dir = "r"\n')
    with pytest.raises(BadConfig, match="the batches of this run cannot be shown") as caught:
        run_file.open_run(run)
    assert "who looks ahead of the run would decide for it" in caught.value.why
    assert not (run.parent / "r").exists()


def test_who_looks_at_a_run_makes_no_dataset_of_raw_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("water falls\n")
    (tmp_path / "run.toml").write_text(LOADER)
    with pytest.raises(BadConfig, match="the run reads raw files") as caught:
        run_file.open_run(tmp_path / "run.toml")
    assert "who only looks makes nothing" in caught.value.why
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "run.toml"]
