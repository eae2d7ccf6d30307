"""An input that was edited and kept its size is noticed: nothing old is mixed with anything new."""

import io
import json
import os
import random
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import InputReplaced
from penstock.ingest.formats import ReadConfig
from penstock.ingest.inputs import open_input
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import BatchDedup, Step
from penstock.produce import producer as produce
from penstock.produce.dataset import Outcome, prepare_dataset
from penstock.produce.guards import check_input
from penstock.produce.writer import ShardConfig
from penstock.store.log import InputState, Log
from penstock.work.events import Event, Events
from penstock.work.run import RunConfig

CONFIG: Final = ShardConfig(rows_per_file=12, val_fraction=0.1)
HERE: Final = RunConfig(workers=1)
PIECES: Final = ReadConfig(piece_bytes=30_000)
COUNT: Final = 60
EDITED: Final = COUNT // 2


def texts(edited: int | None = None) -> list[str]:
    """Documents of 5 KB; one of them may have another word, as long as the old one."""
    made = []
    for k in range(COUNT):
        words = random.Random(k).choices(["river", "water", "stone", "light"], k=900)
        if k == edited:
            words[450] = "night" if words[450] != "night" else "light"
        made.append(f"document {k:03d}: " + " ".join(words) + ".\n")
    return made


def write_tree(path: Path, made: list[str]) -> None:
    path.mkdir(exist_ok=True)
    for k, text in enumerate(made):
        if not (path / f"{k:03d}.txt").exists() or (path / f"{k:03d}.txt").read_text() != text:
            (path / f"{k:03d}.txt").write_text(text)


def write_lines(path: Path, made: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in made))


def write_parquet(path: Path, made: list[str]) -> None:
    table = pa.table({"text": made})
    pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=20)


def write_tar(path: Path, made: list[str]) -> None:
    with tarfile.open(path, "w") as tar:
        for k, text in enumerate(made):
            info = tarfile.TarInfo(f"{k:03d}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


def write_zip(path: Path, made: list[str]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for k, text in enumerate(made):
            archive.writestr(zipfile.ZipInfo(f"{k:03d}.txt"), text)


KINDS: Final[dict[str, Callable[[Path, list[str]], None]]] = {
    "tree": write_tree,
    "in.jsonl": write_lines,
    "in.parquet": write_parquet,
    "in.tar": write_tar,
    "in.zip": write_zip,
}


def times(path: Path) -> dict[Path, int]:
    return {one: one.stat().st_mtime_ns for one in [path, *path.rglob("*")] if one.is_file()}


def put_back(was: dict[Path, int]) -> None:
    for path, time_ns in was.items():
        os.utime(path, ns=(time_ns, time_ns))


def later(path: Path) -> None:
    """As if it was written a second from now: times of files are as coarse as 4 ms."""
    put_back({one: was + 1_000_000_000 for one, was in times(path).items()})


def run(inputs: list[Path], dataset: Path, steps: list[Step] | None = None, **more: Any) -> Outcome:
    options = {"config": CONFIG, "run": HERE, "read": PIECES, **more}
    return prepare_dataset(inputs, dataset, steps or [], **options)


def stop_after(
    monkeypatch: pytest.MonkeyPatch, commits: int, path: Path, dataset: Path, *steps: Step,
    **more: Any,
) -> None:  # fmt: skip
    made: list[produce.Producer] = []
    real = produce.Producer.run
    seen = 0

    def keep(producer: produce.Producer) -> bool:
        made.append(producer)
        return real(producer)

    def note(event: Event) -> None:
        nonlocal seen
        seen += event["kind"] == "commit"
        if seen == commits:
            made[-1].stopped_by = 15

    events = Events("chunk")
    events.listen(note)
    with monkeypatch.context() as patch:
        patch.setattr(produce.Producer, "run", keep)
        assert not run([path], dataset, [*steps], events=events, **more).sealed


@pytest.mark.parametrize("kind", KINDS)
def test_a_sealed_dataset_notices_an_edit_that_keeps_the_size(tmp_path: Path, kind: str) -> None:
    path, dataset = tmp_path / kind, tmp_path / "data"
    KINDS[kind](path, texts())
    assert run([path], dataset).sealed
    sizes = {one: one.stat().st_size for one in times(path)}
    later(path)
    assert run([path], dataset).sealed  # written again, and the same
    KINDS[kind](path, texts(EDITED))
    later(path)
    assert {one: one.stat().st_size for one in times(path)} == sizes
    with pytest.raises(InputReplaced, match="is not what was read before") as caught:
        run([path], dataset)
    assert caught.value.where == str(path)
    if kind != "in.zip":  # its end holds checksums of all members
        assert caught.value.why.endswith("and the text is not")
    assert caught.value.do == "bring the old one back, or write the new one into another dataset"
    KINDS[kind](path, texts())
    assert run([path], dataset).sealed


def test_an_edit_in_a_tree_says_which_file_was_changed_last(tmp_path: Path) -> None:
    path, dataset = tmp_path / "tree", tmp_path / "data"
    write_tree(path, texts())
    run([path], dataset)
    write_tree(path, texts(EDITED))
    later(path / f"{EDITED:03d}.txt")
    with pytest.raises(InputReplaced) as caught:
        run([path], dataset)
    assert caught.value.why == (
        f"up to members {COUNT}: names and sizes are the same ({EDITED:03d}.txt was changed last), "
        "and the text is not"
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "in.zip"])
def test_a_generation_does_not_mix_old_verdicts_with_new_text(
    tmp_path: Path, kind: str, tokenizer_folder: Path
) -> None:
    path, dataset = tmp_path / kind, tmp_path / "data"
    KINDS[kind](path, texts())
    was = times(path)

    def make(max_tokens: int) -> Outcome:
        steps: list[Step] = [FilterConfig(preset="none"), ChunkConfig(max_tokens=max_tokens)]
        return run([path], dataset, steps, tokenizer=tokenizer_folder)

    assert make(512).sealed
    assert make(256).sealed
    KINDS[kind](path, texts(EDITED))
    later(path)
    with pytest.raises(InputReplaced, match="is not what was read before"):
        make(128)
    assert not list((dataset / "_gen" / "00003").rglob("*.parquet"))
    put_back(was)  # it looks as it did, and what is read tells
    assert run([path], tmp_path / "other").sealed
    with pytest.raises(InputReplaced) as caught:
        make(128)
    assert caught.value.do == "remove this generation, and write to a new directory"
    assert Log.open(dataset / "_gen" / "00003").state.sealed is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_before_a_stop_is_proved_again(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dataset = tmp_path / kind, tmp_path / "data"
    KINDS[kind](path, texts())
    stop_after(monkeypatch, 3, path, dataset)
    (known,) = Log.open(dataset).state.inputs.values()
    assert known.end is None
    KINDS[kind](path, texts(edited=14))  # in what was read, and neither at its start nor its end
    later(path)
    with pytest.raises(InputReplaced, match="is not what was read before"):
        run([path], dataset)
    KINDS[kind](path, texts())
    later(path)
    assert run([path], dataset).sealed
    assert run([path], tmp_path / "fresh").sealed
    found = [Log.open(one).state.inputs[str(path)].proof for one in (dataset, tmp_path / "fresh")]
    assert found[0] == found[1]


def test_lines_that_were_added_are_no_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, dataset = tmp_path / "in.jsonl", tmp_path / "data"
    write_lines(path, texts())
    stop_after(monkeypatch, 3, path, dataset)
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')
    later(path)
    assert run([path], dataset).sealed
    assert Log.open(dataset).state.inputs[str(path)].read == COUNT + 1


def test_batch_dedup_does_not_take_old_verdicts_for_new_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dataset = tmp_path / "tree", tmp_path / "data"
    same = texts()
    same[-1] = same[2]  # a duplicate, in what is not read before the stop
    write_tree(path, same)
    by_path = replace(PIECES, order="path")  # so that the last one is read last
    stop_after(monkeypatch, 2, path, dataset, BatchDedup(), read=by_path)
    write_tree(path, texts())
    later(path / f"{COUNT - 1:03d}.txt")
    assert run([path], dataset, [BatchDedup()], read=by_path).sealed
    (known,) = Log.open(dataset).state.inputs.values()
    assert (known.kept, known.dropped) == (COUNT, {})


def test_an_older_dataset_is_known_by_what_it_noted(tmp_path: Path) -> None:
    """Proofs without content and versions: names and sizes, as before, and by path."""
    path, by_path = tmp_path / "tree", replace(PIECES, order="path")
    write_tree(path, texts())
    known = InputState()
    known.to = COUNT
    proof = open_input(str(path), 0, by_path).prove(COUNT)
    known.proof = {key: proof[key] for key in ("names", "bytes", "last")}
    write_tree(path, texts(EDITED))
    check_input(open_input(str(path), 0, by_path), known)
    (path / "000.txt").write_text("shorter")
    with pytest.raises(InputReplaced):
        check_input(open_input(str(path), 0, by_path), known)


def test_configs_that_differ_prove_the_same_content(tmp_path: Path) -> None:
    """The sum goes by documents, not by pieces, shards or workers."""
    path = tmp_path / "tree"
    write_tree(path, texts())
    found = set()
    for number, (piece_bytes, rows, workers) in enumerate([(9000, 7, 1), (1 << 20, 50, 2)]):
        run(
            [path], tmp_path / str(number), config=replace(CONFIG, rows_per_file=rows),
            read=ReadConfig(piece_bytes=piece_bytes), run=replace(HERE, workers=workers),
        )  # fmt: skip
        found.add(Log.open(tmp_path / str(number)).state.inputs[str(path)].proof["content"])
    assert len(found) == 1
