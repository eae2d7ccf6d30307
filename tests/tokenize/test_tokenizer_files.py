"""Saved tokenizers load elsewhere and give the same ids; a damaged one is told, never guessed."""

import base64
import copy
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken.load
import tokenizers
import transformers

from penstock.errors import BadTokenizer, InputMissing, PenstockError
from penstock.tokenize import bpe as bpe_module
from penstock.tokenize.bpe import Bpe, learn_merges
from penstock.tokenize.counts import PretokenCounts
from penstock.tokenize.patterns import PATTERNS, find_pattern
from penstock.tokenize.save import (
    as_json,
    check_json,
    fingerprint,
    read_tokenizer,
    save_tokenizer,
)
from penstock.tokenize.tokenizer import Tokenizer

CODE: Final = Path(bpe_module.__file__).read_text()
TEXT: Final = CODE + "Straße 漢字 退 they've IT'S 12345 ½ 😀\r\n\t  <|endoftext|> the é §"
SPECIALS: Final = ("<|endoftext|>", "<|bos|>", "<|漢|>")


def learn(specials: Sequence[str] = SPECIALS, pattern: str = "cl100k", order: str = "hf") -> Bpe:
    cut = find_pattern(pattern).regex
    counts = Counter(found.group().encode() for found in regex.finditer(cut, TEXT))
    return learn_merges(PretokenCounts.of(counts), 800, specials, order=order)


def save(folder: Path, pattern: str = "cl100k", **options: Any) -> Path:
    save_tokenizer(learn(pattern=pattern, **options), find_pattern(pattern), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken keeps what it has read by its path, and the next test may have the same."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")


@pytest.fixture(
    params=[(p, o) for p in [*PATTERNS, r"\w+|\s+|[^\w\s]+"] for o in ("hf", "rustbpe")]
)
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    pattern, order = request.param
    return save(tmp_path, pattern=pattern, order=order), find_pattern(pattern).regex


# What was saved, read by others.


@pytest.mark.filterwarnings("ignore:penstock encodes slowly")
def test_others_give_the_same_ids(saved: tuple[Path, str]) -> None:
    folder, pattern = saved
    ours = Tokenizer.load(folder)
    content = TEXT.replace("<|endoftext|>", "")
    expected = ours.encode(content).tolist()
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert theirs.encode(content).ids == expected
    assert theirs.decode(expected) == content
    ranks = tiktoken.load.load_tiktoken_bpe(str(folder / "tokenizer.tiktoken"))
    encoding = tiktoken.Encoding(
        "x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=ours.special_tokens
    )
    assert encoding.encode_ordinary(TEXT) == ours.encode(TEXT).tolist()
    with_special = ours.encode(TEXT, allowed_special=set(SPECIALS)).tolist()
    assert encoding.encode(TEXT, allowed_special="all") == with_special
    assert theirs.encode(TEXT).ids == with_special
    assert encoding.n_vocab == ours.vocab_size == theirs.get_vocab_size() == 800


@pytest.mark.filterwarnings("ignore")
def test_transformers_give_the_same_ids(folder: Path) -> None:
    expected = Tokenizer.load(folder).encode(TEXT, allowed_special=set(SPECIALS)).tolist()
    fast: Any = transformers.PreTrainedTokenizerFast
    for loaded in (
        transformers.AutoTokenizer.from_pretrained(folder),
        fast(tokenizer_file=str(folder / "tokenizer.json")),
        fast.from_pretrained(folder),
    ):
        assert loaded.encode(TEXT) == expected
        assert loaded.decode(expected) == TEXT
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert auto.eos_token == "<|endoftext|>"
    assert auto.bos_token == "<|bos|>"
    assert auto.eos_token_id == 0


def test_ranks_make_the_same_tokenizer(saved: tuple[Path, str]) -> None:
    folder, _ = saved
    from_ranks = read_tokenizer(folder / "tokenizer.tiktoken")
    assert fingerprint(from_ranks) == fingerprint(read_tokenizer(folder))
    assert from_ranks == read_tokenizer(folder)


@pytest.mark.parametrize("order", ["hf", "rustbpe"])
@pytest.mark.filterwarnings("ignore:penstock encodes slowly")
@pytest.mark.parametrize("special", ["the", "self", "a", "é", "§", "Ġself", "漢"])
def test_a_special_token_that_is_written_like_a_token(
    tmp_path: Path, special: str, order: str
) -> None:
    """All files mean the same; and text stays what it is, with and without the special token."""
    try:
        save(tmp_path, specials=[special], order=order)
    except PenstockError:  # refused: better than a text that changes
        assert special != "漢"
        return
    ours = Tokenizer.load(tmp_path)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    number = ours.special_tokens[special]
    assert ours.encode(f"x{special}x", allowed_special={special}).tolist()[1] == number
    assert ours.decode([number]) == special
    ranks = tiktoken.load.load_tiktoken_bpe(str(tmp_path / "tokenizer.tiktoken"))
    encoding = tiktoken.Encoding(
        "x", pat_str=PATTERNS["cl100k"].regex, mergeable_ranks=ranks, special_tokens={}
    )
    assert encoding.encode_ordinary(TEXT) == ours.encode(TEXT).tolist()


def test_the_fingerprint_is_that_of_the_ids(folder: Path, tmp_path: Path) -> None:
    content = read_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    expected = fingerprint(content)
    written = tokenizers.Tokenizer.from_file(path).to_str()
    assert fingerprint(json.loads(written)) == expected
    older = copy.deepcopy(content)
    older["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    assert fingerprint(older) == expected
    longer = {**content, "truncation": {"max_length": 3}, "padding": {}, "decoder": None}
    assert fingerprint(longer) == expected
    for change in (
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFC"}},
        {"added_tokens": content["added_tokens"][1:]},
        {"model": {**content["model"], "merges": content["model"]["merges"][1:]}},
        {"model": {**content["model"], "merges": content["model"]["merges"][::-1]}},
        {"model": {**content["model"], "ignore_merges": True}},
    ):
        assert fingerprint({**content, **change}) != expected


def test_files_are_whole(folder: Path) -> None:
    names = ["tokenizer.json", "tokenizer.tiktoken", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


# Rank files of others.


def test_a_rank_file_needs_a_pattern(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "foreign.tiktoken"
    path.write_bytes((folder / "tokenizer.tiktoken").read_bytes())
    with pytest.raises(BadTokenizer) as caught:
        read_tokenizer(path)
    assert caught.value.what == "foreign.tiktoken does not say how to cut text"
    assert caught.value.where == str(path)
    assert "neither its pattern nor its special tokens" in caught.value.why
    assert "give pattern=, one of gpt2, cl100k" in caught.value.do
    specials = Tokenizer.load(folder).special_tokens
    content = read_tokenizer(path, "cl100k", specials)
    assert fingerprint(content) == fingerprint(read_tokenizer(folder))
    assert Tokenizer.load(path, pattern="cl100k").special_tokens == {}


def test_another_tools_configuration_says_nothing(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "foreign.tiktoken"
    path.write_bytes((folder / "tokenizer.tiktoken").read_bytes())
    for config in (b"{}", b"[]", b"null", b"\xff", b'{"penstock": 3}', b'{"penstock": {}}'):
        (tmp_path / "tokenizer_config.json").write_bytes(config)
        with pytest.raises(BadTokenizer, match="does not say how to cut text"):
            read_tokenizer(path)


def rank_lines() -> list[bytes]:
    return [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]


def test_published_names_are_known(tmp_path: Path) -> None:
    path = tmp_path / "cl100k_base.tiktoken"
    path.write_bytes(b"\n".join([*rank_lines(), b"dGhl 256"]))
    loaded = Tokenizer.load(path)
    assert loaded.special_tokens["<|endofprompt|>"] == 100276
    assert loaded.vocab_size == 100277
    assert loaded.encode("<|endoftext|>", allowed_special={"<|endoftext|>"}).tolist() == [100257]
    assert loaded.encode("ab").tolist() == list(b"ab")


def test_ids_that_no_token_has_are_no_token(tmp_path: Path) -> None:
    """Published ranks have holes: cl100k has no 100256, and none from 100261 to 100275."""
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"\n".join([*rank_lines(), b"YWI= 300"]))
    content = read_tokenizer(path, "cl100k", {"<|x|>": 310})
    assert set(content["model"]["vocab"].values()) == {*range(256), 300, 310}
    assert Tokenizer(content).encode("ab<|x|>", allowed_special={"<|x|>"}).tolist() == [300, 310]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not base64 at all", "it is b'not base64 at all', not a token in base64 and its rank"),
        (b"YWI", "it is b'YWI', not"),
        (b"YWI 256", "it is b'YWI 256', not"),
        (b"YW!= 256", "it is b'YW!= 256', not"),
        (b"YWI= x", "it is b'YWI= x', not"),
        (b"YWI= -1", "it is b'YWI= -1', not"),
    ],
)
def test_a_line_that_is_no_rank(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"\n".join([*rank_lines(), line]))
    with pytest.raises(BadTokenizer) as caught:
        read_tokenizer(path, "cl100k")
    assert caught.value.what == "x.tiktoken is not a rank file"
    assert caught.value.where == f"{path}, line 257"
    assert caught.value.why.startswith(why)
    assert caught.value.do == "fetch it again"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (rank_lines()[:-1], "byte 255 has no token"),
        ([], "byte 0 has no token"),
        ([*rank_lines(), b"YWI= 7"], "two tokens have one rank"),
        ([*rank_lines(), b"YWI= 256", b"YWI= 257"], "one token has two ranks"),
        ([*rank_lines(), b"YWI= 99999999999999"], ""),
    ],
    ids=["a byte", "empty", "one rank", "two ranks", "a huge rank"],
)
def test_ranks_that_cannot_be(tmp_path: Path, lines: list[bytes], why: str) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadTokenizer) as caught:
        read_tokenizer(path, "cl100k")
    assert caught.value.what == "x.tiktoken is damaged"
    assert why in caught.value.why


@pytest.mark.parametrize("number", [5, -1, 1 << 60])
def test_a_special_token_cannot_have_the_id_of_another(tmp_path: Path, number: int) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"\n".join(rank_lines()))
    with pytest.raises(PenstockError):
        read_tokenizer(path, "cl100k", {"<|x|>": number})


def test_long_tokens_load_in_reasonable_time(tmp_path: Path) -> None:
    """Runs of one letter give tokens of kilobytes; their merges are found again from the ranks."""
    learned = learn_merges(PretokenCounts.of({b"=" * 4096: 1}), 300)
    save_tokenizer(learned, PATTERNS["cl100k"], tmp_path)
    assert max(map(len, learned.tokens)) == 4096
    began = time.process_time()
    from_ranks = read_tokenizer(tmp_path / "tokenizer.tiktoken")
    assert time.process_time() - began < 2
    assert from_ranks == read_tokenizer(tmp_path)


# What is damaged.


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputMissing) as caught:
        read_tokenizer(tmp_path / "no.json")
    assert str(tmp_path / "no.json") in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadTokenizer) as refused:
        read_tokenizer(tmp_path / "empty")
    assert refused.value.what == "empty holds no tokenizer"
    assert refused.value.where == str(tmp_path / "empty")
    assert refused.value.do == "name a directory with tokenizer.json or a .tiktoken file"


def test_a_directory_with_ranks_alone(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.tiktoken", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert fingerprint(read_tokenizer(tmp_path)) == fingerprint(read_tokenizer(folder))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"5", b"[]", b"{}", b'{"model": null}', b'{"model": {"vocab": 5}}',
        b'{"model": {"vocab": {}}, "added_tokens": 5}', b"\xff\xfe", b"[" * 100_000,
    ],
    ids=lambda data: repr(data[:40]),
)  # fmt: skip
def test_a_damaged_tokenizer_json(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(BadTokenizer) as caught:
        Tokenizer.load(path)
    assert caught.value.what == "the tokenizer is damaged"
    assert caught.value.where == str(path)
    assert caught.value.do.startswith("fetch it again, or train it again: penstock tokenizer")


def test_a_truncated_tokenizer_json(folder: Path, tmp_path: Path) -> None:
    data = (folder / "tokenizer.json").read_bytes()
    path = tmp_path / "tokenizer.json"
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(BadTokenizer, match="the tokenizer is damaged"):
            Tokenizer.load(path)


def tiny() -> dict[str, Any]:
    return as_json(
        learn_merges(PretokenCounts.of({b"abab": 2, b"the": 1}), 261, ["<|x|>"]),
        PATTERNS["cl100k"],
    )


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a parsed tokenizer.json; of long lists the first and last."""
    if path:
        yield path
    inside = (
        list(node.items() if isinstance(node, dict) else enumerate(node))
        if isinstance(node, dict | list)
        else []
    )
    for key, value in inside if len(inside) < 20 else (inside[0], inside[-1]):
        yield from places(value, (*path, key))


JUNK: Final[tuple[Any, ...]] = (None, 5, -1, 1 << 70, 1.5, "x", "", [], [5], {}, {"x": 5}, True)


@pytest.mark.filterwarnings("ignore:penstock encodes slowly")
@pytest.mark.parametrize("place", list(places(tiny())), ids=str)
def test_junk_anywhere_in_a_tokenizer_json_is_told(place: tuple[Any, ...]) -> None:
    """Either it still is a tokenizer, or it is an error of ours, never a bare one."""
    bare = []
    for junk in JUNK:
        content = tiny()
        node = content
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = junk
        try:
            loaded = Tokenizer(check_json(json.dumps(content), "here"), engine="tokenizers")
            ids = loaded.encode("abab the")
            assert len(ids) == 0 or int(np.max(ids)) < loaded.vocab_size
        except PenstockError:
            pass
        except Exception as error:
            bare.append(f"{junk!r}: {type(error).__name__}: {error}"[:120])
    assert not bare
