"""Every stretch of shards is a fair sample of all inputs, and the same for workers and restarts."""

import io
import json
import math
import random
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import pytest
import zstandard
from typer.testing import CliRunner

from penstock.cli import app
from penstock.errors import BadConfig, InputReplaced
from penstock.ingest import order as order_module
from penstock.ingest.formats import ReadConfig
from penstock.prepare.dedup import DedupConfig
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import BatchDedup, Step
from penstock.produce import guards
from penstock.produce import producer as produce
from penstock.produce.dataset import FollowConfig, Outcome, prepare_dataset, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.log import Log, LogState
from penstock.store.store import open_store
from penstock.work.events import Event, Events
from penstock.work.run import RunConfig

SMALL: Final = ShardConfig(rows_per_file=40, val_fraction=0)
HERE: Final = RunConfig(workers=1)
PIECES: Final = ReadConfig(piece_bytes=4000)
BY_PATH: Final = replace(PIECES, order="path")
FOLDERS: Final = 12


def text_of(name: str) -> str:
    """Some text that no other name has; most are short, and a few are long."""
    dice = random.Random(name)
    return f"{name} " * dice.choice((1, 2, 3, 5, 40)) + f"{dice.random()}\n"


def names_of(count: int, first: int = 0) -> list[str]:
    """Names in 12 folders, of which some have three times as many as others."""
    chosen = random.Random(first).choices(range(FOLDERS), weights=[1, 2, 3] * 4, k=count)
    return [f"{first + folder:02d}/{k:04d}.txt" for k, folder in enumerate(chosen)]


def make_tree(path: Path, names: list[str]) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text_of(name))
    return path


def make_tar(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name in sorted(names):
            raw = text_of(name).encode()
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def make_zip(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(names):
            archive.writestr(name, text_of(name))
    return path


def make_lines(path: Path, names: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text_of(name)}) + "\n" for name in names))
    return path


def make_mix(path: Path) -> list[Path]:
    path.mkdir()
    return [
        make_tree(path / "one", names_of(500)),
        make_tree(path / "two", names_of(300, 20)),
        make_lines(path / "three.jsonl", names_of(400, 40)),
    ]


KINDS: Final[dict[str, Callable[[Path], list[Path]]]] = {
    "tree": lambda path: [make_tree(path, names_of(1500))],
    "tar": lambda path: [make_tar(path, names_of(1500))],
    "zip": lambda path: [make_zip(path, names_of(1500))],
    "mix": make_mix,
}


@pytest.fixture(scope="module", params=KINDS)
def inputs(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    kind = request.param
    suffix = f".{kind}" if kind in ("tar", "zip") else ""
    return KINDS[kind](tmp_path_factory.mktemp("in") / f"some{suffix}")


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_mix(tmp_path_factory.mktemp("in") / "mix")


def run(
    given: list[Path], dataset: Path | None, steps: list[Step] | None = None, **more: Any
) -> Outcome:
    options = {"config": SMALL, "run": HERE, "read": PIECES, **more}
    return prepare_dataset(given, dataset, steps or [], **options)


def shards_of(dataset: Path, split: str = "train") -> list[list[str]]:
    """The names of the documents in each shard: their texts begin with them."""
    return [
        [text.split()[0] for text in pq.read_table(dataset / file.name)["text"].to_pylist()]
        for file in Log.open(dataset).state.split(split)
    ]


def all_of(dataset: Path, split: str = "train") -> list[str]:
    return [name for shard in shards_of(dataset, split) for name in shard]


def snapshot(dataset: Path) -> dict[str, bytes]:
    """Every file but those that tell the time."""
    telling = ("_log/", "_fold/", "_COMPLETE", "_events.jsonl", "_gen/", "_batch/")
    found = {str(path.relative_to(dataset)): path for path in dataset.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(telling)}


def same(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    """Fails with names, not with bytes."""
    assert sorted(one) == sorted(other)
    assert not [name for name in one if one[name] != other[name]]


def stopping(monkeypatch: pytest.MonkeyPatch, commits: int) -> Events:
    """Events that ask the run to end after some commits, as a signal would."""
    made: list[produce.Producer] = []
    real = produce.Producer.run
    seen = 0

    def keep(producer: produce.Producer) -> bool:
        made.append(producer)
        return real(producer)

    def note(event: Event) -> None:
        nonlocal seen
        seen += event["kind"] == "commit"
        if seen >= commits:
            made[-1].stopped_by = 15

    monkeypatch.setattr(produce.Producer, "run", keep)
    events = Events("chunk")
    events.listen(note)
    return events


# A fair sample.


def folder_of(name: str) -> str:
    return name[:2]


def input_of(name: str) -> str:
    """Of three that are mixed."""
    return str(int(name[:2]) // 20)


def chi_square(parts: list[list[str]], category: Callable[[str], str]) -> tuple[float, int]:
    """How far the shares of categories in these parts are from those in all, and of how many."""
    cells = [Counter(map(category, part)) for part in parts]
    total = sum(cells, Counter[str]())
    whole, chi = total.total(), 0.0
    for cell in cells:
        for name, count in total.items():
            wanted = count * cell.total() / whole
            chi += (cell[name] - wanted) ** 2 / wanted
    return chi, (len(total) - 1) * (len(parts) - 1)


def critical(degrees: int, z: float = 3.09) -> float:
    """Chi-square that a permutation exceeds with p = 0.001: Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def tenths(dataset: Path) -> list[list[str]]:
    shards = shards_of(dataset)
    assert len(shards) >= 30
    parts: list[list[str]] = [[] for _ in range(10)]
    for number, shard in enumerate(shards):
        parts[number * 10 // len(shards)] += shard
    return parts


@pytest.mark.parametrize("seed", [0, 1])
def test_every_tenth_of_the_shards_is_a_fair_sample(
    inputs: list[Path], tmp_path: Path, seed: int
) -> None:
    run(inputs, tmp_path / "out", config=replace(SMALL, seed=seed))
    parts = tenths(tmp_path / "out")
    chi, degrees = chi_square(parts, folder_of)
    assert degrees == 9 * (FOLDERS * len(inputs) - 1)
    assert chi < critical(degrees)
    if len(inputs) > 1:  # each of them in every shard
        chi, degrees = chi_square(shards_of(tmp_path / "out"), input_of)
        assert chi < critical(degrees)


def test_by_path_it_is_none(inputs: list[Path], tmp_path: Path) -> None:
    """So the measure would tell."""
    run(inputs, tmp_path / "out", read=BY_PATH)
    chi, degrees = chi_square(tenths(tmp_path / "out"), folder_of)
    assert chi > 10 * critical(degrees)


def test_lines_keep_their_order_among_others(mix: list[Path], tmp_path: Path) -> None:
    """And are mixed line by line where lines are made, not shard by shard."""
    run(mix, None, output=tmp_path / "out.jsonl")
    with (tmp_path / "out.jsonl").open() as file:
        found = [json.loads(line)["text"].split()[0] for line in file]
    assert [name for name in found if input_of(name) == "2"] == names_of(400, 40)
    assert len(found) == 1200
    for category, step in ((folder_of, 120), (input_of, 24)):
        parts = [found[k : k + step] for k in range(0, 1200, step)]
        chi, degrees = chi_square(parts, category)
        assert chi < critical(degrees)


def test_by_path_is_the_order_of_names_one_input_after_the_other(
    mix: list[Path], tmp_path: Path
) -> None:
    run(mix, tmp_path / "out", read=BY_PATH)
    wanted = [*sorted(names_of(500)), *sorted(names_of(300, 20)), *names_of(400, 40)]
    for number, shard in enumerate(shards_of(tmp_path / "out")):
        assert sorted(shard) == sorted(wanted[40 * number : 40 * number + 40])


def test_the_split_does_not_depend_on_the_order(mix: list[Path], tmp_path: Path) -> None:
    config = replace(SMALL, val_fraction=0.2)
    found = []
    for number, read in enumerate((PIECES, BY_PATH)):
        run(mix, tmp_path / str(number), config=config, read=read)
        found.append(sorted(all_of(tmp_path / str(number), "val")))
    assert found[0] == found[1]
    assert 180 < len(found[0]) < 300


# The same for workers, pieces and restarts.


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Inputs of every kind, with copies of each other's documents, and damage."""
    root = tmp_path_factory.mktemp("company")
    names = names_of(400)
    tree = make_tree(root / "tree", names[:120])
    for k in range(6):
        long = "".join(f"line {k} {n}\n" for n in range(3000))
        (tree / f"{k}.txt.zst").write_bytes(zstandard.compress(long.encode()))
    (tree / "empty.txt").write_text("")
    lines = make_lines(root / "a.jsonl", names[100:220])
    with lines.open("a") as file:
        file.write("\n{}\n")
    packed = make_lines(root / "b.jsonl", names[220:300])
    (root / "b.jsonl.zst").write_bytes(zstandard.compress(packed.read_bytes()))
    tars = [make_tar(root / f"{k}.tar", names[260 + 20 * k : 300 + 20 * k]) for k in range(3)]
    for path in tars[1:]:
        path.with_suffix(".tar.zst").write_bytes(zstandard.compress(path.read_bytes()))
    return [
        tree, lines, root / "b.jsonl.zst", tars[0], root / "1.tar.zst", root / "2.tar.zst",
        make_zip(root / "c.zip", names[340:]), make_tree(root / "one", ["00/0000.txt"]),
    ]  # fmt: skip


STEPS: Final[dict[str, list[Step]]] = {
    "none": [],
    "near": [FilterConfig(preset="none", min_bytes=40), DedupConfig()],
    "batch": [BatchDedup()],
}
LOOSE: Final = RunConfig(workers=1, max_rejects=0.2)
MIXED: Final = ShardConfig(rows_per_file=30, bytes_per_file=60_000, val_fraction=0.1)


def run_company(company: list[Path], dataset: Path | None, steps: str, **more: Any) -> Outcome:
    options = {"config": MIXED, "run": LOOSE, **more}
    return run(company, dataset, STEPS[steps], **options)


@pytest.fixture(scope="module", params=STEPS)
def undisturbed(
    request: Any, company: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    dataset = tmp_path_factory.mktemp("undisturbed") / "out"
    assert run_company(company, dataset, request.param).sealed
    assert len(shards_of(dataset)) > 9
    return request.param, dataset


def assert_sound(dataset: Path) -> None:
    """It is proven; and at every record, what was read of each input is kept or dropped."""
    assert verify(open_store(dataset), full=True).faults == []
    log, state = Log.open(dataset), LogState()
    for n in range(log.state.n + 1):
        state.apply(log.record(n), "here")
        for known in state.inputs.values():
            assert known.read == known.kept + sum(known.dropped.values())
        rows = sum(known.rows for known in state.inputs.values())
        assert rows == sum(file.rows for file in state.files.values() if file.split in ROWS)


ROWS: Final = ("train", "val")


@pytest.mark.parametrize(("piece_bytes", "workers"), [(1500, 1), (1 << 20, 1), (4000, 2)], ids=str)
def test_workers_and_pieces_change_nothing(
    company: list[Path], undisturbed: tuple[str, Path], tmp_path: Path, piece_bytes: int,
    workers: int,
) -> None:  # fmt: skip
    steps, wanted = undisturbed
    read, at = replace(PIECES, piece_bytes=piece_bytes), replace(LOOSE, workers=workers)
    run_company(company, tmp_path / "out", steps, read=read, run=at)
    same(snapshot(tmp_path / "out"), snapshot(wanted))
    assert_sound(tmp_path / "out")


def test_stopped_after_every_commit(
    company: list[Path], undisturbed: tuple[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With pieces of another size each time: when documents come does not go by them."""
    steps, wanted = undisturbed
    real, runs = ReadConfig.as_json, 0
    with monkeypatch.context() as patch:
        patch.setattr(ReadConfig, "as_json", lambda read: {**real(read), "piece_bytes": 4000})
        while True:
            runs += 1
            read = replace(PIECES, piece_bytes=(4000, 700, 90_000)[runs % 3])
            with monkeypatch.context() as inner:
                events = stopping(inner, 1)
                outcome = run_company(company, tmp_path / "out", steps, read=read, events=events)
            if outcome.sealed:
                break
    assert runs > 3
    same(snapshot(tmp_path / "out"), snapshot(wanted))
    assert_sound(tmp_path / "out")
    proofs = [Log.open(one).state.inputs for one in (tmp_path / "out", wanted)]
    assert {name: known.proof for name, known in proofs[0].items()} == {
        name: known.proof for name, known in proofs[1].items()
    }


def test_more_inputs_than_are_open_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They follow each other, and nothing is lost; files of lines are not all held open."""
    monkeypatch.setattr(order_module, "MOST_OPEN", 3)
    given = [make_lines(tmp_path / f"{k}.jsonl", names_of(30 + 7 * k, k)) for k in range(11)]
    run(given, tmp_path / "out")
    assert len(all_of(tmp_path / "out")) == sum(30 + 7 * k for k in range(11))
    with monkeypatch.context() as patch:
        events = stopping(patch, 2)
        assert not run(given, tmp_path / "again", events=events).sealed
    assert run(given, tmp_path / "again").sealed
    same(snapshot(tmp_path / "again"), snapshot(tmp_path / "out"))


# What the log says.


def test_order_and_seed_are_in_the_log(mix: list[Path], tmp_path: Path) -> None:
    for number, read in enumerate((PIECES, BY_PATH)):
        run(mix, tmp_path / str(number), read=read, config=replace(SMALL, seed=7))
        opened = Log.open(tmp_path / str(number)).state.opened
        assert opened is not None
        assert opened.config["prepare"]["read"]["order"] == read.order
        assert opened.config["seed"] == 7


def test_another_order_is_a_new_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made anew: what an earlier one dropped, it noted by places in another order."""
    steps: list[Step] = [FilterConfig(preset="none", min_bytes=20), DedupConfig()]

    def fail(*_: Any) -> None:
        raise AssertionError("places of another order")

    monkeypatch.setattr(guards, "Verdicts", fail)
    dataset = tmp_path / "out"
    given = [
        make_tree(tmp_path / "tree", names_of(150)),
        make_lines(tmp_path / "a.jsonl", names_of(160)),
    ]
    seeded = replace(SMALL, seed=9)
    ways: list[dict[str, Any]] = [
        {"read": BY_PATH},
        {"read": PIECES},
        {"read": PIECES, "config": seeded},
    ]
    for number, way in enumerate(ways, 1):
        outcome = run(given, dataset, steps, **way)
        where = dataset if number == 1 else dataset / "_gen" / f"{number:05d}"
        assert outcome.sealed
        assert outcome.url == str(where)
        run(given, tmp_path / f"fresh{number}", steps, **way)
        same(snapshot(where), snapshot(tmp_path / f"fresh{number}"))


def test_what_was_begun_in_one_order_is_not_continued_in_another(
    mix: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        assert not run(mix, tmp_path / "out", events=stopping(patch, 2)).sealed
    with pytest.raises(BadConfig, match="begun with other options") as caught:
        run(mix, tmp_path / "out", read=BY_PATH)
    assert caught.value.why == "read.order: 'shuffled' before, 'path' now"
    assert run(mix, tmp_path / "out").sealed


@pytest.mark.parametrize("to_lines", [False, True])
def test_a_dataset_of_an_earlier_penstock_is_by_path(
    mix: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_lines: bool
) -> None:
    """Its log does not say so."""
    way: dict[str, Any] = {"dataset": tmp_path / "out", "read": BY_PATH}
    if to_lines:
        way |= {"dataset": None, "output": tmp_path / "out.jsonl"}
    real = ReadConfig.as_json

    def as_json(self: ReadConfig) -> dict[str, Any]:
        return {key: value for key, value in real(self).items() if key != "order"}

    with monkeypatch.context() as patch:
        patch.setattr(ReadConfig, "as_json", as_json)
        events = stopping(patch, 1 if not to_lines else 10**6)
        outcome = run(mix, steps=[], events=events, **way)
    if to_lines:
        assert outcome.sealed
        assert run(mix, **way).sealed
    else:
        assert not outcome.sealed
    with pytest.raises(BadConfig, match="begun with other options") as caught:
        run(mix, **{**way, "read": PIECES})
    assert caught.value.why == "read.order: 'path' before, 'shuffled' now"
    assert run(mix, **way).sealed


@pytest.mark.parametrize("to_lines", [False, True])
def test_all_inputs_are_known_from_the_beginning(
    mix: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_lines: bool
) -> None:
    way: dict[str, Any] = {"dataset": tmp_path / "out"}
    if to_lines:
        way = {"dataset": None, "output": tmp_path / "out.jsonl"}
        real = produce.Producer._judge

        def judge(self: produce.Producer, **more: Any) -> None:
            if self._read > 500:
                self.stopped_by = 15
            real(self, **more)

        monkeypatch.setattr(produce.Producer, "_judge", judge)
        assert not run(mix, **way).sealed
        monkeypatch.undo()
    else:
        with monkeypatch.context() as patch:
            assert not run(mix, events=stopping(patch, 2), **way).sealed
    more = make_lines(tmp_path / "more.jsonl", names_of(9))
    for given, why in (
        ([*mix, more], f"input 4 is '{more}', and was not given before"),
        (mix[:2], f"input 3 was '{mix[2]}', and is not given now"),
        ([mix[1], mix[0], mix[2]], f"input 1 was '{mix[0]}', and is '{mix[1]}' now"),
    ):
        with pytest.raises(BadConfig, match="begun with other") as caught:
            run(given, **way)
        assert caught.value.why == why
        if not to_lines:
            assert caught.value.do.startswith("give the same inputs in the same order: which")
    assert run(mix, **way).sealed


def test_by_path_new_inputs_may_come_at_the_end(
    mix: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        events = stopping(patch, 2)
        assert not run(mix, tmp_path / "out", read=BY_PATH, events=events).sealed
    more = [*mix, make_lines(tmp_path / "more.jsonl", names_of(9))]
    assert run(more, tmp_path / "out", read=BY_PATH).sealed
    run(more, tmp_path / "fresh", read=BY_PATH)
    same(snapshot(tmp_path / "out"), snapshot(tmp_path / "fresh"))


def test_inputs_that_changed_before_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines may be added to a file that is read alone: beside others they would move them."""
    lines = make_lines(tmp_path / "a.jsonl", names_of(200))
    given = [make_tree(tmp_path / "tree", names_of(200)), lines]
    with monkeypatch.context() as patch:
        assert not run(given, tmp_path / "out", events=stopping(patch, 2)).sealed
    was = lines.read_text()
    with lines.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(InputReplaced, match="not those that the dataset was begun with") as caught:
        run(given, tmp_path / "out")
    assert caught.value.do == "bring the old ones back, or write to a new directory"
    assert str(lines) in caught.value.where
    lines.write_text(was)
    (given[0] / "zz.txt").write_text("more")
    with pytest.raises(InputReplaced, match="tree is not what was read before"):
        run(given, tmp_path / "out")
    (given[0] / "zz.txt").unlink()
    assert run(given, tmp_path / "out").sealed
    run(given, tmp_path / "fresh")
    same(snapshot(tmp_path / "out"), snapshot(tmp_path / "fresh"))


# Who else makes datasets.


def test_shard_keeps_the_order_of_its_files(tmp_path: Path) -> None:
    given = [make_lines(tmp_path / f"{k}.jsonl", names_of(100, 20 * k)) for k in range(3)]
    shard_jsonl(given, tmp_path / "out", SMALL, FollowConfig(complete=True))
    wanted = [name for k in range(3) for name in names_of(100, 20 * k)]
    for number, shard in enumerate(shards_of(tmp_path / "out")):
        assert sorted(shard) == sorted(wanted[40 * number : 40 * number + 40])


@pytest.mark.parametrize("order", [None, "path"])
def test_the_command_shuffles_unless_it_is_told_not_to(
    tmp_path: Path, order: str | None, tokenizer_folder: Path
) -> None:
    tree = make_tree(tmp_path / "tree", names_of(90))
    arguments = [
        "chunk", "--inputs", tree, "--parquet_dir", tmp_path / "out", "--rows_per_file", 30,
        "--val_fraction", 0, "--tokenizer", tokenizer_folder, "--workers", 1,
    ]  # fmt: skip
    arguments += ["--order", order] if order else []
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    first = {*map(folder_of, shards_of(tmp_path / "out")[0])}
    assert (len(first) > FOLDERS // 2) == (order is None)
