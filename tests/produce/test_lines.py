"""Chunks as JSON lines: the same bytes after any interruption, for whoever follows them."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any, Final

import pyarrow.parquet as pq
import pytest

from penstock.errors import BadConfig, Fenced, InputMissing, InputReplaced
from penstock.ingest.formats import ReadConfig
from penstock.ingest.lines import mark_done, read_done
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.dedup import DedupConfig
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import Process, Step, make_steps
from penstock.produce import dataset as dataset_module
from penstock.produce import lines as lines_module
from penstock.produce import producer as produce
from penstock.produce.columns import ShardRows
from penstock.produce.dataset import FollowConfig, Outcome, prepare_dataset, shard_jsonl
from penstock.produce.lines import LinesWriter
from penstock.produce.verify import verify
from penstock.produce.writer import Batch, ShardConfig
from penstock.store.log import Log
from penstock.store.store import open_store
from penstock.supply.pretrain import PretrainDataLoader
from penstock.tokenize.tokenizer import Tokenizer
from penstock.tokenize.train import TrainConfig, train_tokenizer
from penstock.work.events import Event, Events
from penstock.work.run import RunConfig
from store.dataset_rows import read_rows

STEPS: Final[list[Step]] = [FilterConfig(preset="code"), DedupConfig(), ChunkConfig(max_tokens=96)]
SMALL: Final = ShardConfig(rows_per_file=25, val_fraction=0.2, seed=3)
HERE: Final = RunConfig(workers=1, max_rejects=0.2)
PIECES: Final = ReadConfig(piece_bytes=2000)
MakeSources = Callable[[int, int], dict[str, bytes]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, sources: MakeSources) -> list[Path]:
    """A tree with copies in it, and JSON lines that repeat some of the tree."""
    root = tmp_path_factory.mktemp("tree")
    files = sources(11, 60)
    names = list(files)
    files |= {f"zz/copy{k}.cpp": files[name] for k, name in enumerate(names[:6])}
    for name, raw in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    texts = [raw.decode() for raw in [*sources(12, 30).values(), *list(files.values())[:4]]]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "{}\n")
    return [root, path]


@pytest.fixture
def write(inputs: list[Path], tokenizer_folder: Path) -> Callable[..., Outcome]:
    def run(output: Path, parquet_dir: Path | None = None, **options: Any) -> Outcome:
        steps = options.pop("steps", STEPS)
        config = options.pop("config", SMALL)
        options = {"run": HERE, "read": PIECES, "tokenizer": tokenizer_folder, **options}
        return prepare_dataset(inputs, parquet_dir, steps, config, output=output, **options)

    return run


@pytest.fixture(scope="module")
def undisturbed(
    inputs: list[Path], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "out.jsonl"
    prepare_dataset(
        inputs, None, STEPS, SMALL, HERE, read=PIECES, tokenizer=tokenizer_folder, output=output
    )
    return output


def beside(output: Path) -> dict[str, bytes]:
    """OUTPUT and all that stands beside it."""
    return {path.name: path.read_bytes() for path in output.parent.glob(output.name + "*")}


def told(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def interrupt(monkeypatch: pytest.MonkeyPatch, batches: int) -> Events:
    """Ask a run to end after that many batches, as a signal would."""
    made: list[produce.Producer] = []
    real_run, real_submit = produce.Producer.run, LinesWriter.submit
    count = 0

    def run(producer: produce.Producer) -> bool:
        made.append(producer)
        return real_run(producer)

    def submit(writer: LinesWriter, batch: Batch) -> None:
        nonlocal count
        real_submit(writer, batch)
        count += 1
        if count == batches:
            made[-1].stopped_by = 15

    monkeypatch.setattr(produce.Producer, "run", run)
    monkeypatch.setattr(LinesWriter, "submit", submit)
    return Events("chunk")


def test_lines_tile_their_sources(undisturbed: Path, inputs: list[Path]) -> None:
    found = defaultdict(list)
    for row in told(undisturbed):
        assert list(row) == ["text", "source", "start", "end", "part", "parts", "doc_id"]
        is_line = row["source"] == str(inputs[1])  # its place is that of the line
        found[row["source"], row["start"] if is_line else 0].append(row)
    for (source, start), rows in found.items():
        assert [row["part"] for row in rows] == list(range(rows[0]["parts"]))
        assert len({row["doc_id"] for row in rows}) == 1
        text = "".join(row["text"] for row in rows)
        raw = Path(source).read_bytes()
        if source == str(inputs[1]):
            (end,) = {row["end"] for row in rows}
            assert json.loads(raw[start:end]) == {"text": text}
            continue
        assert text == raw.decode()
        assert [row["start"] for row in rows[1:]] == [row["end"] for row in rows[:-1]]
    assert len(found) > 60
    assert read_done(undisturbed) == undisturbed.stat().st_size
    rejects = undisturbed.with_name("out.jsonl.rejects.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in rejects]
    assert reasons.count("exact_duplicate") == 10
    assert reasons.count("no_text") == 1


def test_a_path_that_is_text_is_marked_as_done(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    mark_done(str(path))
    assert read_done(path) == 3


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_interrupted_and_gone_on_with(
    write: Callable[..., Outcome], undisturbed: Path, tmp_path: Path, batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        outcome = write(output, events=interrupt(patch, batches))
    assert not outcome.sealed
    assert read_done(output) is None
    so_far = output.read_bytes()
    assert 0 < len(so_far) < undisturbed.stat().st_size
    assert write(output).sealed
    assert output.read_bytes().startswith(so_far)
    assert beside(output) == beside(undisturbed)


def test_what_a_kill_left_is_written_over_with_the_same(
    write: Callable[..., Outcome], undisturbed: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A kill within a batch leaves lines beyond the last progress; none of them is taken away."""
    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        write(output, events=interrupt(patch, 2))
    whole = undisturbed.read_bytes()
    output.write_bytes(whole[: output.stat().st_size + 700])
    longest = output.stat().st_size
    real = LinesWriter._append

    def append(writer: LinesWriter, name: str, data: bytes) -> None:
        real(writer, name, data)
        assert output.stat().st_size >= longest

    monkeypatch.setattr(LinesWriter, "_append", append)
    assert write(output).sealed
    assert beside(output) == beside(undisturbed)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Die where `name` would begin, the first time."""
    real = getattr(owner, name)

    def die(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, die)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(lines_module, "mark_done"), (LinesWriter, "_advance"), (LinesWriter, "seal")],
)
def test_killed_at_a_bad_moment(
    write: Callable[..., Outcome], undisturbed: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str,
) -> None:  # fmt: skip
    output = tmp_path / "out.jsonl"
    fail_once(monkeypatch, owner, name)
    with pytest.raises(KeyboardInterrupt):
        write(output)
    assert read_done(output) is None
    assert write(output).sealed
    assert beside(output) == beside(undisturbed)


def test_killed_between_the_marker_and_the_last_progress(
    write: Callable[..., Outcome], undisturbed: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    output = tmp_path / "out.jsonl"
    real = LinesWriter._save

    def save(writer: LinesWriter) -> None:
        if writer._kept.sealed:
            monkeypatch.setattr(LinesWriter, "_save", real)
            raise KeyboardInterrupt
        real(writer)

    monkeypatch.setattr(LinesWriter, "_save", save)
    with pytest.raises(KeyboardInterrupt):
        write(output)
    assert write(output).sealed
    assert beside(output) == beside(undisturbed)


def test_again_there_is_nothing_to_do(
    write: Callable[..., Outcome], undisturbed: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    write(output)
    before = output.stat()
    assert write(output).sealed
    assert output.stat().st_mtime_ns == before.st_mtime_ns
    assert beside(output) == beside(undisturbed)


def test_the_number_of_workers_changes_nothing(
    write: Callable[..., Outcome], undisturbed: Path, tmp_path: Path
) -> None:
    write(tmp_path / "out.jsonl", run=replace(HERE, workers=2))
    assert beside(tmp_path / "out.jsonl") == beside(undisturbed)


# What cannot be done.


def test_two_at_once(write: Callable[..., Outcome], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    lock = os.open(f"{output}.progress.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(Fenced, match=r"another process is writing out\.jsonl") as caught:
        write(output)
    assert caught.value.do == "wait for it, or name another --output"
    os.close(lock)
    assert write(output).sealed


def test_two_processes_at_once(inputs: list[Path], tokenizer_folder: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "penstock.cli", "chunk", "--inputs", *map(str, inputs)),
        *("--output", str(tmp_path / "out.jsonl"), "--max_tokens", "96", "--workers", "1"),
        *("--tokenizer", str(tokenizer_folder), "--max_rejects", "0.1"),
    ]
    both = [
        subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    ends = []
    for process in both:
        _, err = process.communicate(timeout=120)
        ends.append((process.returncode, err))
    assert (0, "") in ends
    ends.remove((0, ""))
    code, err = ends[0]
    assert code == 0 or (code == 1 and err.startswith("Fenced: another process is writing"))


def test_a_file_of_another_program(write: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("{}\n")
    for _ in range(2):  # the lock does not stay
        with pytest.raises(BadConfig, match=r"no out\.jsonl\.progress beside it"):
            write(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "{}\n"
    assert [path.name for path in tmp_path.glob("out*")] == ["out.jsonl"]


def test_other_options(
    write: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        write(output, events=interrupt(patch, 1))
    with pytest.raises(BadConfig, match="begun with other options or inputs") as caught:
        write(output, steps=[*STEPS[:2], ChunkConfig(max_tokens=64)])
    assert caught.value.why == "chunk.max_tokens: 96 before, 64 now"
    assert not list(tmp_path.glob("*.lock"))
    assert write(output).sealed


def test_lines_that_became_fewer(
    write: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        write(output, events=interrupt(patch, 1))
    os.truncate(output, 10)
    with pytest.raises(InputReplaced, match="is shorter than it was"):
        write(output)


def test_an_error_before_the_work_keeps_no_lock(
    write: Callable[..., Outcome], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(BadConfig, match="there is no processor"):
        write(output, steps=[Process(name="no.such:Thing"), *STEPS])
    assert write(output).sealed


def test_batch_dedup_works_or_is_refused(tmp_path: Path) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"text": "the same text again"}\n' * 50)
    try:
        outcome = prepare_dataset(
            [path], None, make_steps(dedup="batch"), SMALL, HERE, output=output
        )
    except BadConfig:
        return
    assert outcome.state.inputs[str(path)].kept == 1
    assert len(told(output)) == 1


# Lines into shards.


def rows(dataset: Path) -> list[dict[str, Any]]:
    return read_rows(dataset, "train", "val")


def check_sharded(dataset: Path, output: Path) -> None:
    """The dataset holds the lines, each once, no document on both sides, and is sealed."""
    assert verify(open_store(dataset), full=True).faults == []
    columns = ("text", "source", "start", "end", "part", "parts", "doc_id")
    found = sorted(tuple(row[name] for name in columns) for row in rows(dataset))
    assert found == sorted(tuple(row[name] for name in columns) for row in told(output))
    state = Log.open(dataset).state
    assert state.sealed is not None
    sides = [
        {
            number
            for file in state.split(split)
            for number in pq.read_table(dataset / file.name)["doc_id"].to_pylist()
        }
        for split in ("train", "val")
    ]
    assert all(sides)
    assert not sides[0] & sides[1]


def test_without_a_follower_shards_are_made_at_the_end(
    write: Callable[..., Outcome], undisturbed: Path, tmp_path: Path, tokenizer_folder: Path,
    inputs: list[Path],
) -> None:  # fmt: skip
    output, dataset = tmp_path / "out.jsonl", tmp_path / "shards"
    outcome = write(output, dataset, tokens=True)
    assert outcome.sealed
    assert output.read_bytes() == undisturbed.read_bytes()
    check_sharded(dataset, output)
    tokenizer = Tokenizer.load(tokenizer_folder)
    for row in rows(dataset):
        assert row["tokens"] == tokenizer.encode(row["text"]).tolist()
        assert row["n_tokens"] == len(row["tokens"]) < 96
    prepare_dataset(
        inputs, tmp_path / "direct", STEPS, SMALL, HERE, read=PIECES, tokenizer=tokenizer_folder
    )
    check_sharded(tmp_path / "direct", output)  # by whichever way: the same rows and documents
    before = Log.open(dataset).state.n
    assert write(output, dataset, tokens=True).sealed
    assert Log.open(dataset).state.n == before


def test_a_dataset_of_lines_knows_its_documents_and_how_long_its_chunks_are(
    write: Callable[..., Outcome], undisturbed: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    output, dataset = tmp_path / "out.jsonl", tmp_path / "shards"
    outcome = write(output, dataset, tokens=True)
    alone = write(undisturbed)
    told = [(known.read, known.kept, known.rows) for known in outcome.documents.values()]
    assert told == [(k.read, k.kept, k.rows) for k in alone.documents.values()]
    assert sum(read for read, _, _ in told) == 101
    assert sum(rows for _, _, rows in told) == outcome.state.sealed.rows  # type: ignore[union-attr]
    with pytest.raises(BadConfig, match="rows of 128 tokens from a dataset of chunks of 96"):
        PretrainDataLoader(str(dataset), str(tokenizer_folder), chunk_size=128, batch_size=2)
    PretrainDataLoader(str(dataset), str(tokenizer_folder), chunk_size=96, batch_size=2).close()


def test_a_dataset_of_lines_that_an_earlier_penstock_made_is_left_alone(
    write: Callable[..., Outcome], tmp_path: Path, tokenizer_folder: Path
) -> None:
    """It did not note the steps: that is no reason to make another generation."""
    output, dataset = tmp_path / "out.jsonl", tmp_path / "shards"
    write(output)
    tokenizer = Tokenizer.load(tokenizer_folder)
    noted, aside = tmp_path / "out.jsonl.progress", tmp_path / "aside"
    noted.rename(aside)
    shard_jsonl([output], dataset, SMALL, FollowConfig(complete=True), tokenizer=tokenizer)
    aside.rename(noted)
    assert write(output, dataset).sealed
    again = shard_jsonl([output], dataset, SMALL, tokenizer=tokenizer)
    assert again.sealed
    assert again.state.opened is not None
    assert again.state.opened.config["prepare"] == {}
    assert not (dataset / "_gen").exists()


def data(dataset: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in dataset.glob("*.[pa]*")}


@pytest.mark.parametrize("tokens", [False, True])
def test_whoever_makes_shards_of_the_lines_makes_the_same(
    write: Callable[..., Outcome], tmp_path: Path, tokenizer_folder: Path, tokens: bool
) -> None:
    """The lines say how they were cut, and with which tokenizer they were counted."""
    output = tmp_path / "out.jsonl"
    write(output, tmp_path / "chunk", tokens=tokens)
    outcome = shard_jsonl([output], tmp_path / "shard", SMALL)
    assert data(tmp_path / "shard") == data(tmp_path / "chunk")
    assert len(data(tmp_path / "shard")) > 5
    configs = [Log.open(tmp_path / name).state.opened for name in ("chunk", "shard")]
    assert configs[0] is not None
    assert configs[1] is not None
    assert configs[0].config == configs[1].config
    assert configs[0].config["tokenizer"] == Tokenizer.load(tokenizer_folder).fingerprint
    ends = [Log.open(tmp_path / name).state.inputs for name in ("chunk", "shard")]
    assert [known.end for known in ends[0].values()] == [known.end for known in ends[1].values()]
    assert outcome.sealed
    with pytest.raises(BadConfig, match="rows of 128 tokens from a dataset of chunks of 96"):
        PretrainDataLoader(str(tmp_path / "shard"), str(tokenizer_folder), chunk_size=128)


def test_the_tokenizer_of_the_lines(
    write: Callable[..., Outcome], tmp_path: Path, tokenizer_folder: Path
) -> None:
    output, own = tmp_path / "out.jsonl", tmp_path / "own"
    shutil.copytree(tokenizer_folder, own)
    write(output, tokenizer=own)
    other = tmp_path / "other"
    train_tokenizer([output], other, TrainConfig(vocab_size=300))
    with pytest.raises(BadConfig, match=r"out\.jsonl was cut with another tokenizer") as caught:
        shard_jsonl([output], tmp_path / "data", SMALL, tokenizer=other)
    assert caught.value.do == "name it with --tokenizer"
    with pytest.raises(InputMissing):
        shard_jsonl([output], tmp_path / "data", SMALL, tokenizer=tmp_path / "nowhere")
    shutil.rmtree(own)
    with pytest.raises(BadConfig, match=r"counted the tokens of out\.jsonl is not there") as caught:
        shard_jsonl([output], tmp_path / "data", SMALL)
    assert caught.value.where == str(own)
    assert not (tmp_path / "data").exists()
    assert shard_jsonl([output], tmp_path / "data", SMALL, tokenizer=tokenizer_folder).sealed


def test_lines_that_were_not_counted_need_no_tokenizer(
    write: Callable[..., Outcome], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    write(output, tmp_path / "chunk", steps=[], tokenizer=None)
    assert shard_jsonl([output], tmp_path / "shard", SMALL).sealed
    assert data(tmp_path / "shard") == data(tmp_path / "chunk")


@pytest.mark.parametrize("content", [b"", b"[]", b"55%", b'{"config": 1}'])
def test_the_progress_file_of_another_program(tmp_path: Path, content: bytes) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"text": "a"}\n')
    (tmp_path / "in.jsonl.progress").write_bytes(content)
    assert shard_jsonl([lines], tmp_path / "data", SMALL, FollowConfig(complete=True)).sealed


def test_shards_of_the_lines_are_gone_on_with(
    write: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, dataset = tmp_path / "out.jsonl", tmp_path / "shards"
    seen = 0

    def die(event: Event) -> None:
        nonlocal seen
        seen += event["kind"] == "commit"
        if seen == 2:
            raise KeyboardInterrupt

    events = Events("chunk")
    events.listen(die)
    with pytest.raises(KeyboardInterrupt):
        write(output, dataset, events=events)
    assert read_done(output) is not None
    assert write(output, dataset).sealed
    check_sharded(dataset, output)


@pytest.mark.parametrize("dies", [False, True], ids=["seals", "dies"])
def test_one_process_at_a_time_makes_shards_of_the_lines(
    write: Callable[..., Outcome], tmp_path: Path, dies: bool
) -> None:
    """The other waits for the seal, or for the end of the one that is at it."""
    output, dataset = tmp_path / "out.jsonl", tmp_path / "shards"
    write(output)
    said: Queue[str] = Queue()
    events = Events("chunk")
    events.listen(lambda event: said.put(event["message"]) if event["kind"] == "wait" else None)
    with ThreadPoolExecutor(1) as pool:
        with lines_module.claimed(output, str(dataset)) as is_ours:
            assert is_ours
            with lines_module.claimed(output, str(tmp_path / "elsewhere")) as is_other:
                assert is_other
            waiting = pool.submit(write, output, dataset, events=events)
            told = said.get(timeout=60)
            assert told == f"{dataset} is made by another process: waiting for its seal"
            if not dies:
                with pytest.MonkeyPatch.context() as patch:
                    this = threading.current_thread()
                    is_this = lambda *_: nullcontext(threading.current_thread() is this)  # noqa: E731
                    patch.setattr(dataset_module, "claimed", is_this)
                    assert shard_jsonl([output], dataset, SMALL).sealed
                assert waiting.result(timeout=60).sealed
        outcome = waiting.result(timeout=60)
    assert outcome.sealed
    assert outcome.url == str(dataset)
    assert sum(known.rows for known in outcome.documents.values()) == outcome.state.sealed.rows  # type: ignore[union-attr]
    assert outcome.state.epoch == 1
    check_sharded(dataset, output)


def test_waiting_ends_with_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    events = Events("shard")
    said: list[str] = []

    def interrupt(event: Event) -> None:
        said.append(event["message"])
        signal.raise_signal(signal.SIGTERM)

    events.listen(interrupt)
    Path("in.json").touch()
    outcome = shard_jsonl(["in.jsonl"], "data", SMALL, events=events)
    assert (outcome.sealed, outcome.stopped_by) == (False, signal.SIGTERM)
    assert said == ["in.jsonl is not there yet: waiting for it; did you mean in.json?"]
    assert not Path("data").exists()


def test_a_dataset_of_something_else_is_refused_before_the_work(
    write: Callable[..., Outcome], tmp_path: Path
) -> None:
    output, dataset = tmp_path / "out.jsonl", tmp_path / "shards"
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "a"}\n{"text": "b"}\n')
    shard_jsonl([other], dataset, SMALL, FollowConfig(complete=True))
    with pytest.raises(BadConfig) as caught:
        write(output, dataset)
    assert caught.value.what == f"{dataset} is not made of out.jsonl"
    assert caught.value.do == "name another --parquet_dir"
    assert not output.exists()


def test_who_follows_sees_the_lines_come(
    write: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps, however long shards are to be; and that they have begun, at once."""
    monkeypatch.setattr(produce, "_LINES_ROWS", 7)
    output = tmp_path / "out.jsonl"
    sizes: list[int] = []
    submitted = LinesWriter.submit

    def submit(self: LinesWriter, batch: Batch) -> None:
        sizes.append(output.stat().st_size)
        submitted(self, batch)

    monkeypatch.setattr(LinesWriter, "submit", submit)
    write(output, config=replace(SMALL, rows_per_file=50_000))
    assert sizes[0] == 0
    assert len({*sizes}) > 15


def test_progress_is_that_of_the_batches(tmp_path: Path) -> None:
    """An empty output is complete, too."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n\n")
    output = tmp_path / "out.jsonl"
    assert prepare_dataset([path], None, (), SMALL, HERE, output=output).sealed
    assert output.read_bytes() == b""
    assert read_done(output) == 0
    kept = json.loads((tmp_path / "out.jsonl.progress").read_bytes())
    assert kept["sealed"] is True
    assert [op["input"] for op in kept["progress"]] == [str(path)]
    assert ShardRows().rows == 0
