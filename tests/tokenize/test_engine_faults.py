"""What engines cannot take: an error of ours that names the document or the file, never a panic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import ChunkConfig, FollowConfig, RunConfig, prepare_dataset, shard_jsonl
from penstock.errors import BadDocument, BadTokenizer, PenstockError
from penstock.tokenize.bpe import byte_alphabet
from penstock.tokenize.engines import Gigatoken
from penstock.tokenize.save import check_json
from penstock.tokenize.tokenizer import Tokenizer

# Tries every way to part a run of q: 40 of them are above the 10 million tries that the reference
# allows for a match, as 12 million blanks are with simpler patterns; then it panics.
ENDLESS = r"(?:q|qq)+[!x]|[\s\S]"
BAD = "a " + "q" * 40


def content(pattern: str = ENDLESS) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = [{**split, "invert": False}, {**level, "trim_offsets": True}]
    return {
        "version": "1.0",
        "added_tokens": [{
            "id": 256, "content": "<|x|>", "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": {letter: number for number, letter in enumerate(byte_alphabet())},
            "merges": [],
        },
    }  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content()))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    texts = ["fine", "also fine", BAD, "fine again"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


pytestmark = pytest.mark.filterwarnings("ignore:penstock encodes slowly")


def test_the_row_that_an_engine_panics_on_is_named(file: Path) -> None:
    tokenizer = Tokenizer.load(file)
    column = pa.chunked_array([["fine", "fine"], ["fine", BAD, "fine"]])
    with pytest.raises(BadDocument, match="cannot encode") as caught:
        tokenizer.encode_column(column)
    assert caught.value.row == 3
    assert "retry-limit" in caught.value.why
    with pytest.raises(BadDocument):
        tokenizer.encode(BAD)
    with pytest.raises(BadDocument):
        tokenizer.offsets(BAD)
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"


def test_shard_names_the_document(file: Path, lines: Path, tmp_path: Path) -> None:
    with pytest.raises(BadDocument) as caught:
        shard_jsonl(
            [lines], tmp_path / "out", follow=FollowConfig(complete=True),
            tokenizer=Tokenizer.load(file),
        )  # fmt: skip
    start = lines.read_bytes().index(b'{"text": "a q')
    assert "in.jsonl" in caught.value.where
    assert f"bytes {start} to {start + len(BAD) + 13}" in caught.value.where


@pytest.mark.parametrize("workers", [1, 2])
def test_chunk_names_the_document(file: Path, lines: Path, tmp_path: Path, workers: int) -> None:
    with pytest.raises(BadDocument) as caught:
        prepare_dataset(
            [lines],
            tmp_path / "out",
            [ChunkConfig()],
            run=RunConfig(workers=workers),
            tokenizer=file,
        )
    start = lines.read_bytes().index(b'{"text": "a q')
    assert f"in.jsonl, bytes {start} to " in caught.value.where


class Panic(BaseException):
    """As Rust's: no Exception."""


Panic.__name__ = "PanicException"


def test_where_the_fast_engine_panics_the_reference_encodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = content()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    kept["pre_tokenizer"] = {**level, "use_regex": True}
    tokenizer = Tokenizer(kept)
    assert tokenizer.engine == "gigatoken"
    expected = tokenizer.encode("some text").tolist()

    def fails(self: Any, data: Any, at: Any) -> Any:
        raise Panic("index out of bounds")

    monkeypatch.setattr(Gigatoken, "encode_rows", fails)
    assert tokenizer.encode("some text").tolist() == expected
    tokenizer = Tokenizer(kept)  # it panics on the probe
    assert tokenizer.engine == "tokenizers"
    assert "index out of bounds" in tokenizer.slow_because


def test_an_interrupt_is_no_fault_of_an_engine(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    tokenizer = Tokenizer.load(file)

    def interrupted(data: Any, at: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer._engine(frozenset()), "encode_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("text")


IDS = [4_000_000_000, 1 << 32, 1 << 70, 1 << 24, -1, 1.0, 1.5, True, None, "7", [7]]


@pytest.mark.parametrize(
    ("number", "place"),
    [(number, place) for number in IDS for place in ("vocabulary", "added", "special")]
    + [(5, "vocabulary")],
)
def test_ids_that_cannot_be(number: Any, place: str) -> None:
    """An id of 4e9 had the reference make a table of 100 GB, which ended the process."""
    made = content()
    if place == "vocabulary":
        made["model"]["vocab"][byte_alphabet()[7]] = number
    else:
        made["added_tokens"][0] |= {"id": number, "special": place == "special"}
    with pytest.raises(BadTokenizer) as caught:
        check_json(json.dumps(made), "here/tokenizer.json")
    assert "id" in caught.value.why
    assert caught.value.where == "here/tokenizer.json"


def test_ids_far_apart_are_refused_and_reserved_ones_are_not() -> None:
    made = content()
    made["added_tokens"][0]["id"] = 100_000
    check_json(json.dumps(made), "here")
    made["added_tokens"][0]["id"] = 10_000_000
    with pytest.raises(BadTokenizer, match="damaged"):
        check_json(json.dumps(made), "here")


def test_an_added_token_may_be_in_the_vocabulary() -> None:
    made = content()
    made["model"]["vocab"]["<|x|>"] = 256
    tokenizer = Tokenizer(check_json(json.dumps(made), "here"), engine="tokenizers")
    assert tokenizer.vocab_size == 257


@pytest.mark.parametrize(
    "merges",
    [[["a", "b"]], [["a"]], [[1, 2]], ["ab"], [None], 5, "ab", {"a": "b"}, [["a", "b" * 100_000]]],
    ids=lambda value: repr(value)[:30],
)
def test_merges_that_cannot_be(merges: Any) -> None:
    made = content()
    made["model"]["merges"] = merges
    with pytest.raises(PenstockError):
        Tokenizer(check_json(json.dumps(made), "here")).encode("abab")


def test_a_list_of_pieces_has_ids_by_number() -> None:
    pieces = [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]
    made = {**content(), "added_tokens": [], "pre_tokenizer": None}
    made["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces}
    tokenizer = Tokenizer(check_json(json.dumps(made), "here"), engine="tokenizers")
    assert np.array_equal(tokenizer.encode("ab"), [1, 2])


def test_what_is_merged_must_begin_with_the_prefix_of_continuing_pieces() -> None:
    """The tokenizers library cuts off so many bytes, and aborts where half a character is left."""
    content = {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "é": 1, "aé": 2},
            "merges": [["a", "é"]],
            "continuing_subword_prefix": "\0",
        }
    }
    with pytest.raises(BadTokenizer, match="damaged") as caught:
        check_json(json.dumps(content), "here")
    assert "does not begin with" in caught.value.why
    content["model"] |= {"continuing_subword_prefix": "##", "vocab": {"a": 0, "##b": 1, "ab": 2}}
    content["model"]["merges"] = ["a ##b"]
    assert check_json(json.dumps(content), "here")


def test_an_added_token_may_take_the_id_of_another() -> None:
    """As Hugging Face has it: a reserved token that was given a name. Text may not come back."""
    made = content()
    made["added_tokens"] = [{**made["added_tokens"][0], "id": 65, "content": "<|renamed|>"}]
    tokenizer = Tokenizer(check_json(json.dumps(made), "here"), engine="tokenizers")
    assert not tokenizer.is_lossless
    made["model"]["vocab"]["two"] = 65
    with pytest.raises(BadTokenizer, match="damaged"):
        check_json(json.dumps(made), "here")
