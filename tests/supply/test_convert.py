"""Raw files as sources: any field, errors at once, states that fit the same file anywhere."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import PretrainDataLoader, Tokenizer
from penstock.errors import (
    BadConfig,
    BadInput,
    Fenced,
    InputMissing,
    InputReplaced,
    ProducerStalled,
    StateMismatch,
    TooManyRejects,
)
from penstock.supply.sources import raw as convert

from .datasets import made_dataset
from .test_sources import TEXTS, load, texts_of, tokenizer

__all__ = ["tokenizer"]


def write_lines(path: Path, field: str = "text", texts: list[str] = TEXTS) -> str:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def raw(path: Any, tokenizer: Tokenizer, cache: Path, **options: Any) -> PretrainDataLoader:
    return load(path, tokenizer, cache_dir=str(cache), **options)


def test_the_field_of_the_text_can_be_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_lines(tmp_path / "a.jsonl", "content")
    found = texts_of(raw(path, tokenizer, tmp_path / "cache", text_field="content"))
    held = texts_of(raw(path, tokenizer, tmp_path / "cache", text_field="content", split="val"))
    assert sorted(found + held) == sorted(TEXTS)
    spans = (loader := raw(path, tokenizer, tmp_path / "cache", text_field="content")).explain(
        next(iter(loader))
    )
    assert spans[0].document["source"].startswith(path)


def test_a_corpus_is_trained_on_as_it_stands(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Document 001's first example: a directory, while streaming; a list of files is one source."""
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    half = len(TEXTS) // 2
    write_lines(folder / "a.jsonl", texts=TEXTS[:half])
    paths = [write_lines(tmp_path / "x.jsonl", texts=TEXTS[:half])]
    paths.append(write_lines(tmp_path / "y.jsonl", texts=TEXTS[half:]))
    for number, text in enumerate(TEXTS[half:]):
        (folder / "deep" / f"{number}.txt").write_text(text)
    for path in (paths, {"all": paths}):
        found = [
            text
            for split in ("train", "val")
            for text in texts_of(raw(path, tokenizer, tmp_path / "cache", split=split))
        ]
        assert sorted(found) == sorted(TEXTS)
    loader = raw(str(folder), tokenizer, tmp_path / "cache", streaming=True)
    names = {span.document["source"] for batch in loader for span in loader.explain(batch)}
    assert {Path(name.partition("#")[0]).suffix for name in names} == {".jsonl", ".txt"}
    two = raw(paths, tokenizer, tmp_path / "cache", weights=[1, 3])
    assert [source.name for source in two.sources] == ["x.jsonl", "y.jsonl"]
    two.close()
    with pytest.raises(BadConfig, match="is not a raw file"):
        raw(
            {"all": [paths[0], str(tmp_path / "cache" / "datasets")]}, tokenizer, tmp_path / "cache"
        )
    with pytest.raises(InputMissing, match="there is nothing at"):
        raw({"all": [paths[0], str(tmp_path / "z")]}, tokenizer, tmp_path / "cache")


@pytest.mark.parametrize("kind", ["tree", "glob", "tar", "zip"])
def test_whatever_chunk_reads_is_a_source(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    folder = tmp_path / "tree"
    (folder / "deep").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / ("deep" if number % 2 else "") / f"{number}.txt").write_text(text)
    (folder / "logo.png").write_bytes(b"\x89PNG\0\0")
    path = {"tree": str(folder), "glob": f"{tmp_path}/tr*"}.get(kind)
    if path is None:
        path = shutil.make_archive(str(tmp_path / "packed"), kind, folder)
    found = [
        text
        for split in ("train", "val")
        for text in texts_of(raw(path, tokenizer, tmp_path / "cache", split=split, streaming=False))
    ]
    assert sorted(found) == sorted(TEXTS)


def test_a_tree_that_changes_is_not_taken_for_the_same(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    loader = raw(str(folder), tokenizer, tmp_path / "cache", streaming=False)
    (folder / "more.txt").write_text("more")
    with pytest.raises(InputReplaced, match="tree has changed while it was read"):
        list(loader)


def test_what_goes_wrong_while_it_is_made_is_raised(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, begin = write_lines(tmp_path / "a.jsonl", "content"), time.monotonic()
    with pytest.raises(TooManyRejects, match="120 of 120 documents were refused") as caught:
        list(raw(path, tokenizer, tmp_path / "cache", stall_s=100))
    assert time.monotonic() - begin < 50
    assert "name the field that holds the text with text_field" in caught.value.do
    assert "no_text: 120" in caught.value.why
    assert "a.jsonl became a dataset" in caught.value.__notes__[0]


def test_one_that_is_overtaken_follows(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes the same dataset: that is no error, unless it never comes."""
    path = write_lines(tmp_path / "a.jsonl")
    made = texts_of(raw(path, tokenizer, tmp_path / "cache"))

    def overtaken(*_: Any, **__: Any) -> None:
        raise Fenced("another writer has taken this dataset over")

    monkeypatch.setattr(convert, "prepare_dataset", overtaken)
    assert texts_of(raw(path, tokenizer, tmp_path / "cache")) == made
    log = next((tmp_path / "cache/datasets").iterdir()) / "_log"
    newest = max(log.rglob("*.json"))
    newest.unlink()  # the seal: it died before
    (log.parent / "_COMPLETE").unlink()
    with pytest.raises(ProducerStalled, match=r"nothing new was made of .*a.jsonl for 0.7 s"):
        list(raw(path, tokenizer, tmp_path / "cache", stall_s=0.7))


def test_a_state_fits_the_file_wherever_it_was_made(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    whole = [batch.input_ids.tobytes() for batch in raw(path, tokenizer, tmp_path / "one")]
    loader = raw(path, tokenizer, tmp_path / "one")
    begun = [next(iter(loader)).input_ids.tobytes() for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    os.utime(path, (1, 1))
    for cache in ("two", "three"):
        again = raw(path, tokenizer, tmp_path / cache)
        again.load_state_dict(state)
        assert begun + [batch.input_ids.tobytes() for batch in again] == whole
    validation = raw(path, tokenizer, tmp_path / "two", split="val")
    with pytest.raises(StateMismatch, match="split: the state has train, this source val"):
        validation.load_state_dict(state)
    other = raw(write_lines(tmp_path / "a.jsonl", texts=TEXTS[::-1]), tokenizer, tmp_path / "two")
    with pytest.raises(StateMismatch, match=r"shards made of .*a.jsonl are others: the file has"):
        other.load_state_dict(state)
    fewer = raw(path, tokenizer, tmp_path / "two")
    (source,), (seen,) = fewer.sources, state["sources"]
    wrong = source.check_identity({**seen, "made": 7})
    assert wrong == "the state saw 7 shards of the file, it gives 1"
    assert source.check_identity({"files": 1}) == "the state is not of a raw file"


@pytest.mark.parametrize("when", ["at once", "in the middle", "at the end", "in the second pass"])
def test_a_file_that_grows_is_not_taken_for_a_finished_one(
    tmp_path: Path, tokenizer: Tokenizer, when: str
) -> None:
    """Half of the lines are there when the loader opens it: the rest must not be lost silently."""
    path = Path(write_lines(tmp_path / "a.jsonl", texts=TEXTS[:60]))
    loader = raw(str(path), tokenizer, tmp_path / "cache", epochs=2)
    more = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[60:])
    batches = iter(loader)
    if when != "at once":
        next(batches)
    if when == "at the end":
        loader.skip(3)
    if when == "in the second pass":  # both passes are planned by then
        loader.skip(len(list(raw(str(path), tokenizer, tmp_path / "cache", epochs=2))) - 2)
    with path.open("a") as file:
        file.write(more)
    with pytest.raises(InputReplaced, match=r"a\.jsonl has changed while it was read") as caught:
        list(batches)
    assert "penstock shard --input" in caught.value.do
    loader.close()
    found = texts_of(raw(str(path), tokenizer, tmp_path / "cache"))
    found += texts_of(raw(str(path), tokenizer, tmp_path / "cache", split="val"))
    assert sorted(found) == sorted(TEXTS)


def test_a_file_that_says_that_it_is_not_complete_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = Path(write_lines(tmp_path / "chunks.jsonl"))
    (tmp_path / "chunks.jsonl.progress").write_text("{}")  # as penstock chunk --output leaves it
    with pytest.raises(InputReplaced, match=r"chunks\.jsonl is not complete") as caught:
        raw(str(path), tokenizer, tmp_path / "cache")
    assert "chunks.jsonl.progress is there" in caught.value.why
    size = path.stat().st_size
    (tmp_path / "chunks.jsonl.done").write_text(json.dumps({"bytes": size + 1}))
    with pytest.raises(InputReplaced, match=r"chunks\.jsonl is not complete") as caught:
        raw(str(path), tokenizer, tmp_path / "cache")
    assert f"promises {size + 1:,} bytes" in caught.value.why
    (tmp_path / "chunks.jsonl.done").write_text(json.dumps({"bytes": size}))
    assert texts_of(raw(str(path), tokenizer, tmp_path / "cache"))


def test_a_cache_that_is_made_for_a_raw_file_is_private(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    before = os.umask(0o002)
    try:
        for _ in range(2):
            assert texts_of(raw(path, tokenizer, tmp_path / "cache"))
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_raw_files_by_name_are_weighed_by_their_bytes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The same before they are made into shards and after."""
    sizes = {}
    for name, texts in (("a", TEXTS[:50]), ("b", TEXTS[50:])):
        sizes[name] = os.path.getsize(write_lines(tmp_path / f"{name}.jsonl", texts=texts))
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in sizes}
    first = raw(paths, tokenizer, tmp_path / "cache")
    assert first._engine.mix.weights == [float(size) for size in sizes.values()]
    ids = [batch.input_ids.tolist() for batch in first]
    again = raw(paths, tokenizer, tmp_path / "cache")
    assert again._engine.mix.weights == first._engine.mix.weights
    assert [batch.input_ids.tolist() for batch in again] == ids


def test_raw_files_beside_a_dataset_need_weights(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made_dataset(tmp_path / "d", shards=2)
    write_lines(tmp_path / "a.jsonl")
    paths = {"made": str(tmp_path / "d"), "raw": str(tmp_path / "a.jsonl")}
    for _ in range(2):  # also when its dataset was made before
        with pytest.raises(BadConfig, match="source 'raw' needs a weight") as caught:
            load(paths, None, cache_dir=str(tmp_path / "cache"))
        assert "become shards while they are trained on" in caught.value.why
        assert "give weights" in caught.value.do
        list(raw(str(tmp_path / "a.jsonl"), tokenizer, tmp_path / "cache"))


@pytest.mark.parametrize("named", [False, True])
def test_files_of_a_list_may_be_yet_to_come(
    tmp_path: Path, tokenizer: Tokenizer, named: bool
) -> None:
    half = len(TEXTS) // 2
    paths = [write_lines(tmp_path / "x.jsonl", texts=TEXTS[:half]), str(tmp_path / "y.jsonl")]

    def write() -> None:
        os.replace(write_lines(tmp_path / "made", texts=TEXTS[half:]), paths[1])

    later = threading.Timer(0.5, write)
    later.start()
    found = raw({"all": paths} if named else paths, tokenizer, tmp_path / "cache", wait_s=60)
    assert len(found.sources) == 1
    later.join()
    held = raw(paths, tokenizer, tmp_path / "cache", split="val")
    assert sorted(texts_of(found) + texts_of(held)) == sorted(TEXTS)
    with pytest.raises(ProducerStalled, match=r"nothing has come to .*z\.jsonl for 0.2 s"):
        raw([paths[0], str(tmp_path / "z.jsonl")], tokenizer, tmp_path / "cache", wait_s=0.2)


def test_files_of_which_nothing_is_kept_are_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Zero batches and no word would look like a training that is over."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(999))
    found = raw(str(tmp_path / "pictures"), tokenizer, tmp_path / "cache")
    with pytest.raises(BadInput, match="nothing to train on") as bad:
        next(iter(found))
    assert "binary 1" in bad.value.why
