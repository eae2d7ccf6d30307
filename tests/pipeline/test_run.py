"""`penstock run`: stages side by side; failures, signals and kills; the same command resumes."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.errors import StageFailed
from penstock.pipeline.describe import Stage, read_pipeline
from penstock.pipeline.run import LEASH, run_pipeline
from penstock.pipeline.view import memory_of, read_lines
from pipeline.made import (
    MakeSources,
    ended,
    files_of,
    processes_in,
    run,
    start,
    stream_of,
    write_pipeline,
)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(
    tmp_path_factory: pytest.TempPathFactory, sources: MakeSources, tokenizer_folder: Path
) -> Make:
    """A new directory with the same pipeline, or with changes to it."""
    files = sources(5, 70)

    def made(**options: Any) -> Path:
        return write_pipeline(tmp_path_factory.mktemp("run"), tokenizer_folder, files, **options)

    return made


@pytest.fixture(scope="module")
def finished(make: Make) -> Path:
    """A pipeline that ran without a fault."""
    path = make()
    code, _, err = run(path)
    assert code == 0, err
    return path


def wait_for(is_there: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_all_stages_run_and_the_same_command_has_nothing_left_to_do(finished: Path) -> None:
    folder = finished.parent
    assert files_of(folder / "data" / "cpp") == files_of(folder / "local" / "cpp")
    steps = stream_of(folder)
    assert [*steps] == [*range(1, len(steps) + 1)]
    assert len(steps) > 20
    code, _, err = run(finished)
    assert code == 0
    assert "chunk: done" in err
    assert stream_of(folder) == steps
    events, _ = read_lines(folder / "pipeline.run" / "_events.jsonl", 0)
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "start"
    assert kinds.count("stage") == kinds.count("stage_end") == 8
    assert {event["how"] for event in events if event["kind"] == "stage_end"} == {"done"}
    ends = [event["first_batch_s"] for event in events if event["kind"] == "end"]
    assert ends[0] > 0
    for name in ("chunk", "push", "pull"):
        told, _ = read_lines(folder / "pipeline.run" / f"{name}.events.jsonl", 0)
        assert {event["stage"] for event in told} == {name}
    assert ends[1] is None


def test_a_stage_that_dies_is_named_and_the_others_stop(make: Make) -> None:
    path = make(rows_per_file=5)
    path.write_text(path.read_text().replace("[train]\ncommand = ", '[train]\ncommand = "false"#'))
    code, _, err = run(path)
    assert code == 1
    assert "StageFailed: stage train failed: exit code 1" in err
    assert "  where: false\n" in err
    assert "it printed nothing" in err
    assert "  do:    fix that and run the same command again: it resumes. All output: " in err
    assert processes_in(path.parent) == []


def test_the_last_words_of_a_stage_are_told(make: Make) -> None:
    path = make()
    path.write_text(path.read_text().replace('inputs = ["src"]', 'inputs = ["srk"]'))
    pipeline = read_pipeline(path)
    with pytest.raises(StageFailed) as caught:
        run_pipeline(pipeline, pipeline.stages)
    assert caught.value.what == "stage chunk failed: exit code 1"
    assert "InputMissing: srk is not there" in caught.value.why
    assert "did you mean src?" in caught.value.why


def test_a_command_that_is_not_there(make: Make) -> None:
    path = make()
    path.write_text(path.read_text().replace("[train]\ncommand = ", '[train]\ncommand = "nope"#'))
    code, _, err = run(path)
    assert code == 1
    assert "nope cannot be run: No such file or directory" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_and_the_same_command_resumes(
    make: Make, finished: Path, number: int
) -> None:
    path = make(pause_s=0.02)
    with ended(start(path)) as process:
        wait_for(lambda: (path.parent / "train.jsonl").exists())
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "stopped by a signal; the same command resumes from here" in err
    assert processes_in(path.parent) == []
    assert run(path)[0] == 0
    assert stream_of(path.parent) == stream_of(finished.parent)


def test_a_second_run_of_the_same_pipeline_is_refused(make: Make) -> None:
    path = make(pause_s=0.5)
    with ended(start(path)) as process:
        wait_for(lambda: (path.parent / "train.jsonl").exists())
        code, _, err = run(path)
        assert code == 1
        assert "pipeline.toml is running already" in err
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert run(path, "--only", "chunk")[0] == 0


def test_no_process_outlives_a_conductor_that_is_killed(make: Make) -> None:
    path = make(pause_s=0.02)
    inner = "import subprocess, sys, time; subprocess.Popen(['sleep', '99']); time.sleep(99)"
    text = path.read_text().replace(
        "[train]\ncommand = ", f"[train]\ncommand = {json.dumps(['python', '-c', inner])}#"
    )
    path.write_text(text)
    with ended(start(path)) as process:
        wait_for(lambda: len(processes_in(path.parent)) >= 5)
        assert memory_of(process.pid) > memory_of(os.getpid()) / 1000
        process.kill()
        process.wait()
        wait_for(lambda: processes_in(path.parent) == [], 10)


def test_a_pull_with_a_limit_ends_with_a_trainer_that_has_enough(make: Make) -> None:
    path = make(rows_per_file=10)
    text = path.read_text().replace('dir = "local"', 'dir = "local"\nmax_disk_bytes = "80KB"')
    text = text.replace("ramp = true", "ramp = true\nbuffer_pieces = 16")
    inner = (
        "from penstock import PretrainDataLoader, read_run\n"
        "with PretrainDataLoader(**read_run('pipeline.toml')) as loader:\n"
        "    while loader.step < 3: next(iter(loader))\n"
    )
    command = json.dumps([sys.executable, "-c", inner])
    path.write_text(text.replace("[train]\ncommand = ", f"[train]\ncommand = {command}#"))
    code, _, err = run(path)
    assert code == 0, err
    assert "pull: stopped after" in err
    assert "train: done after" in err
    assert processes_in(path.parent) == []


def test_a_new_generation_is_told_with_what_differs(make: Make) -> None:
    path = make()
    code, _, err = run(path)
    assert code == 0, err
    text = path.read_text()
    path.write_text(text.replace("max_tokens = 64", "max_tokens = 96"))
    code, _, err = run(path, "--only", "chunk,push,pull")
    assert code == 0, err
    assert "cpp: generation 2 of the dataset: data/cpp/_gen/00002" in err
    assert "chunk.max_tokens: 64 before, 96 now" in err
    assert 'name path = "local/cpp/_gen/00002" in [loader]' in err
    again = path.parent / "local" / "cpp" / "_gen" / "00002"
    assert files_of(again) == files_of(path.parent / "data" / "cpp" / "_gen" / "00002")
    for folder in ("local", "bucket"):
        shutil.rmtree(path.parent / folder / "cpp" / "_gen")
    for job, of in (("push", "data/cpp"), ("pull", "bucket/cpp")):
        code, _, err = run(path, "--only", job)
        assert code == 0, err
        assert f"{job}: generation 2 of {of} is the newest, and is taken" in err
    assert files_of(again) == files_of(path.parent / "data" / "cpp" / "_gen" / "00002")
    path.write_text(text)
    code, _, err = run(path)
    assert code == 0, err
    assert "generation 2" not in err


def test_the_trainer_begins_after_the_generation_that_is_made_for_it(make: Make) -> None:
    path = make()
    code, _, err = run(path, "--only", "chunk,push,pull")
    assert code == 0, err
    text = path.read_text().replace("max_tokens = 64", "max_tokens = 96")
    first = "local/cpp/_gen/00002/_log/" + "0" * 20 + ".json"
    sees = f"import os, sys; sys.exit(not os.path.exists('{first}'))"
    command = f"command = {json.dumps([sys.executable, '-c', sees])}"
    path.write_text(re.sub("(?m)^command = .*$", lambda _: command, text))
    code, _, err = run(path)
    assert code == 0, err
    assert "train: done" in err


DEAF: Final = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"


def test_a_tokenizer_that_is_there_is_kept(tmp_path: Path, sources: MakeSources) -> None:
    for name, raw in sources(2, 30).items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_bytes(raw)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("mine")
    path = tmp_path / "pipeline.toml"

    def train(vocab_size: int) -> str:
        table = f"[tokenizer.train]\nvocab_size = {vocab_size}\n"
        path.write_text(f'[tokenizer]\npath = "tokenizer"\ninputs = ["src"]\n{table}')
        code, _, err = run(path)
        assert code == 0, err
        return err

    assert "is kept as tokenizer.old-1; what was made with it needs it" in train(280)
    assert (tmp_path / "tokenizer.old-1" / "tokenizer.json").read_text() == "mine"
    first = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
    assert "trained by this command already" in train(280)
    assert "kept as tokenizer.old-2" in train(290)
    assert (tmp_path / "tokenizer.old-2" / "tokenizer.json").read_bytes() == first
    # a training that was killed is no reason to keep what it left, nor to take it as done
    os.rename(tmp_path / "pipeline.run" / "tokenizer.done", tmp_path / "done")
    assert "is kept as" not in train(290)
    assert (tmp_path / "done").read_bytes() == (
        tmp_path / "pipeline.run" / "tokenizer.done"
    ).read_bytes()
    assert not (tmp_path / "tokenizer.old-3").exists()


def test_a_training_that_was_begun_is_not_done(tmp_path: Path) -> None:
    """Options change, the training fails, the options of before come back."""
    (tmp_path / "a.txt").write_text("some words\n" * 90)
    path = tmp_path / "pipeline.toml"
    given = '[tokenizer]\npath = "tokenizer"\ninputs = ["a.txt"]\n[tokenizer.train]\n'
    path.write_text(given + "vocab_size = 260\n")
    assert run(path)[0] == 0
    path.write_text((given + "vocab_size = 260\n").replace("a.txt", "gone.txt"))
    assert run(path)[0] == 1
    assert not (tmp_path / "pipeline.run" / "tokenizer.done").exists()
    assert (tmp_path / "tokenizer.old-1" / "tokenizer.json").exists()
    path.write_text(given + "vocab_size = 260\n")
    code, _, err = run(path)
    assert code == 0
    assert "trained by this command already" not in err


def test_closed_output_stops_all(make: Make) -> None:
    path = make(pause_s=0.05)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", path.name],
        cwd=path.parent, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with ended(process):
        assert process.stderr is not None
        wait_for(lambda: (path.parent / "train.jsonl").exists())
        process.stderr.close()
        process.stderr = None
        assert process.wait(60) != 0
    assert processes_in(path.parent) == []
    events, _ = read_lines(path.parent / "pipeline.run" / "_events.jsonl", 0)
    assert events[-1]["kind"] == "end"
    assert run(path)[0] == 0


def test_what_does_not_stop_after_the_trainer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text("[train]\ncommand = 'true'\n")
    train = Stage(
        name="train", job="train", command=(sys.executable, "-c", "import time; time.sleep(.5)")
    )
    deaf = Stage(name="pull", job="pull", command=(sys.executable, "-c", DEAF), bounded=True)
    began = time.monotonic()
    assert run_pipeline(read_pipeline(path), [deaf, train], stop_s=0.5) is None
    assert time.monotonic() - began < 10
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_in_other_sessions_end_too(tmp_path: Path, is_killed: bool) -> None:
    deaf = ["setsid", sys.executable, "-c", DEAF]
    seconds = 600 if is_killed else 1
    inner = f"import subprocess, time; subprocess.Popen({deaf!r}); time.sleep({seconds})"
    path = tmp_path / "pipeline.toml"
    path.write_text(f"[train]\ncommand = {json.dumps([sys.executable, '-c', inner])}\n")
    with ended(start(path)) as process:
        wait_for(lambda: len(processes_in(tmp_path)) >= 4)
        if is_killed:
            process.kill()
        assert process.wait(20) == (-signal.SIGKILL if is_killed else 0)
        wait_for(lambda: processes_in(tmp_path) == [], 10)


def test_the_lock_is_held_while_a_stage_lives(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        told = f"import os; print(os.path.samestat(os.fstat({descriptor}), os.stat('lock')))"
        with subprocess.Popen(
            [sys.executable, "-I", str(LEASH), sys.executable, "-c", told], cwd=tmp_path,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[descriptor],
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.read() == "True\n"
    finally:
        os.close(descriptor)


def kill_at_random(path: Path, seed: int, kills: int) -> None:
    """Run again and again; kill some process of it, or all of them, at a random moment."""
    rng = random.Random(seed)
    for _ in range(kills):
        with ended(start(path)) as process:
            time.sleep(rng.uniform(0.3, 3.5))
            victims = [one for one in processes_in(path.parent) if one != process.pid]
            if rng.random() < 0.3:
                victims.append(process.pid)  # the conductor, too
            elif rng.random() < 0.5 and victims:
                victims = [rng.choice(victims)]
            for one in victims:
                try:
                    os.kill(one, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.communicate(timeout=90)
        wait_for(lambda: processes_in(path.parent) == [], 15)
    code, _, err = run(path)
    assert code == 0, err


def expect_the_same(path: Path, finished: Path) -> None:
    for dataset in ("data", "bucket", "local"):
        assert files_of(path.parent / dataset / "cpp") == files_of(finished.parent / "data" / "cpp")
    assert stream_of(path.parent) == stream_of(finished.parent)


def test_kills_change_neither_the_dataset_nor_the_training_stream(
    make: Make, finished: Path
) -> None:
    path = make(pause_s=0.01)
    kill_at_random(path, 1, 2)
    expect_the_same(path, finished)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10))
def test_50_kills_change_neither_the_dataset_nor_the_training_stream(
    make: Make, finished: Path, seed: int
) -> None:
    path = make(pause_s=0.02)
    kill_at_random(path, seed, 5)
    expect_the_same(path, finished)
