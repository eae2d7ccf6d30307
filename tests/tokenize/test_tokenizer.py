"""Ids, offsets and text of a tokenizer, whichever engine; special tokens only where allowed."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
import regex
import tiktoken
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from penstock.errors import BadConfig, BadInput, BadTokenizer
from penstock.tokenize import bpe as bpe_module
from penstock.tokenize import tokenizer as tokenizer_module
from penstock.tokenize.bpe import learn_merges
from penstock.tokenize.counts import PretokenCounts
from penstock.tokenize.engines import Gigatoken
from penstock.tokenize.patterns import PATTERNS
from penstock.tokenize.save import as_json
from penstock.tokenize.tokenizer import Tokenizer

TEXT: Final = (
    Path(bpe_module.__file__).read_text() + "Straße 漢字 退 they've IT'S 12345 ½ 😀\r\n\t  é"
)
SPECIALS: Final = ("<|endoftext|>", "<|end|>", "<|end|>>", "<|", "|>", "中文")

TEXTS: Final = st.text(max_size=60) | st.lists(
    st.sampled_from(
        [*SPECIALS, "<|endoftext|", " ", "\n", "a", "the", "'s", "12", "é", "漢", "\0"]
    ),
    max_size=20,
).map("".join)


def made(
    pattern: str = "cl100k", specials: Sequence[str] = SPECIALS, vocab_size: int = 900, **more: Any
) -> dict[str, Any]:
    cut = PATTERNS[pattern]
    counts = Counter(found.group().encode() for found in regex.finditer(cut.regex, TEXT))
    learned = learn_merges(PretokenCounts.of(counts), vocab_size, specials, **more)
    return json.loads(json.dumps(as_json(learned, cut)))  # type: ignore[no-any-return]


CONTENT: Final = made()


@pytest.fixture(scope="module", params=["gigatoken", "tokenizers"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    loaded = Tokenizer(CONTENT, engine=request.param)
    assert loaded.engine == request.param
    return loaded


@pytest.fixture(scope="module")
def reference() -> Any:
    """tokenizers' own, with no special token but those of the content."""
    return tokenizers.Tokenizer.from_str(json.dumps({**CONTENT, "added_tokens": []}))


# Text to ids and back.


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text="")
@example(text="<|endoftext|>")
@example(text="a" * 1000)
def test_there_and_back(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert ids.tolist() == reference.encode(text).ids
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert not set(ids.tolist()) & set(tokenizer.special_tokens.values())


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_offsets_tile_the_text(tokenizer: Tokenizer, text: str) -> None:
    raw = text.encode()
    ids, at = tokenizer.offsets(text)
    assert ids.tolist() == tokenizer.encode(text).tolist()
    assert (at[0], at[-1], len(at)) == (0, len(raw), len(ids) + 1)
    pieces = [raw[a:b] for a, b in itertools.pairwise(at.tolist())]
    assert pieces == [tokenizer.decode_bytes([number]) for number in ids]
    assert np.array_equal(np.diff(at), tokenizer.token_bytes(ids))


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, allowed=st.sets(st.sampled_from(SPECIALS)))
@example(text="<|end|>>><|end|><|endoftext|><|endoftext|>|><<||", allowed=set(SPECIALS))
def test_only_allowed_special_tokens_are_special(
    tokenizer: Tokenizer, text: str, allowed: set[str]
) -> None:
    """Of those that begin at one place the longest is meant, as in Hugging Face's library."""
    expected: list[int] = []
    longest = sorted(allowed, key=len, reverse=True)
    for part in (
        re.split("(" + "|".join(map(re.escape, longest)) + ")", text) if allowed else [text]
    ):
        if part in allowed:
            expected.append(tokenizer.special_tokens[part])
        else:
            expected += tokenizer.encode(part).tolist()
    ids = tokenizer.encode(text, allowed_special=allowed)
    assert ids.tolist() == expected
    assert tokenizer.decode(ids) == text
    column = tokenizer.encode_column(pa.array([text]), allowed_special=allowed)
    assert column.to_pylist() == [expected]


def test_a_special_token_in_the_text_many_times(tokenizer: Tokenizer) -> None:
    text = "<|endoftext|>" * 500
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) > 500
    assert tokenizer.encode(text, allowed_special={"<|endoftext|>"}).tolist() == [0] * 500


def test_allowed_special_tokens_must_be_known(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadConfig) as caught:
        tokenizer.encode("x", allowed_special={"<|eot|>"})
    assert caught.value.what == "'<|eot|>' is not a special token of this tokenizer"
    assert caught.value.do == f"choose from {', '.join(SPECIALS)}"
    with pytest.raises(BadConfig, match="allowed_special is one text") as refused:
        tokenizer.encode_column(pa.array(["x"]), allowed_special="<|endoftext|>")
    assert refused.value.do == 'give a set, e.g. {"<|endoftext|>"}'
    with pytest.raises(BadConfig) as none:
        Tokenizer(made(specials=())).encode("x", allowed_special={"y"})
    assert none.value.do == "choose from none: it has none"


def test_text_that_is_not_utf8(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match="the text is not UTF-8") as caught:
        tokenizer.encode(b"a\xffb")
    assert "position 1" in caught.value.why
    assert caught.value.do == "decode it with errors='replace' first"
    with pytest.raises(BadInput, match="the text is not UTF-8"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(BadInput, match="the text is not UTF-8"):
        tokenizer.offsets("a\ud800b")


@pytest.mark.parametrize(
    ("ids", "bad"),
    [([900], 900), ([-1], -1), ([-1, 5], -1), ([5, -7, 899], -7), ([0, 1000, 5], 1000)],
)
def test_ids_that_are_not_there(tokenizer: Tokenizer, ids: list[int], bad: int) -> None:
    for ask in (tokenizer.decode, tokenizer.decode_bytes, tokenizer.token_bytes):
        with pytest.raises(BadInput) as caught:
            ask(ids)
        assert caught.value.what == f"id {bad} is not in the vocabulary"
        assert caught.value.why == "ids go from 0 to 899"
        assert caught.value.do == "was this encoded with another tokenizer?"


def test_ids_in_any_shape(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a text of some words")
    for given_ids in (ids.tolist(), tuple(ids), ids.astype(np.uint16), ids.astype(np.int64)):
        assert tokenizer.decode(given_ids) == "a text of some words"
        assert tokenizer.token_bytes(given_ids).sum() == 20
    assert tokenizer.decode([]) == ""
    assert tokenizer.token_bytes([]).tolist() == []


def test_half_a_character_is_replaced(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("😀").tolist()[:1]
    assert tokenizer.decode(first) == "�"
    assert tokenizer.decode_bytes(first) == "😀".encode()[: tokenizer.token_bytes(first)[0]]


# Columns.


ROWS: Final[list[str | None]] = [
    "the first", None, "", "漢字 😀", "<|endoftext|>", "", None, "x" * 300, " last\n", None, "é",
]  # fmt: skip


def expected_rows(tokenizer: Tokenizer, rows: Sequence[str | None]) -> list[list[int] | None]:
    return [None if row is None else tokenizer.encode(row).tolist() for row in rows]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("batch_bytes", [1, 7, 300, 1 << 24])
def test_columns_of_every_kind(
    tokenizer: Tokenizer, kind: Any, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "BATCH_BYTES", batch_bytes)
    column = pa.array(ROWS, kind)
    expected = expected_rows(tokenizer, ROWS)
    for given_column, rows in (
        (column, expected),
        (column.slice(1), expected[1:]),
        (column.slice(3, 4), expected[3:7]),
        (column.slice(9, 1), expected[9:10]),
        (column.slice(4, 0), []),
        (pa.chunked_array([column, column.slice(2, 5), column[:0]]), expected + expected[2:7]),
        (pa.chunked_array([], kind), []),
        (pa.array([], kind), []),
        (pa.array([None, None], kind), [None, None]),
        (pa.array(["", ""], kind), [[], []]),
    ):
        encoded = tokenizer.encode_column(given_column)
        encoded.validate(full=True)
        assert encoded.type == pa.list_(pa.uint16())
        assert encoded.to_pylist() == rows
        assert encoded.null_count == sum(row is None for row in rows)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.none() | TEXTS, max_size=12), cut=st.integers(0, 12))
def test_a_column_is_its_rows(tokenizer: Tokenizer, rows: list[str | None], cut: int) -> None:
    column = pa.array(rows, pa.string())
    parts = pa.chunked_array([column[:cut], column[cut:]], pa.string())
    assert tokenizer.encode_column(parts).to_pylist() == expected_rows(tokenizer, rows)


def string_array(data: bytes, offsets: list[int], valid: int) -> Any:
    return pa.StringArray.from_buffers(
        len(offsets) - 1,
        pa.py_buffer(np.array(offsets, np.int32)),
        pa.py_buffer(data),
        pa.py_buffer(bytes([valid])),
    )


def test_what_lies_under_a_null_is_nothing(tokenizer: Tokenizer) -> None:
    """Arrow does not say what a null's bytes are; they need not even be UTF-8."""
    for under in (b"hidden", b"\xff\xfe", "漢".encode()[:2]):
        data = b"a" + under + b"b"
        column = string_array(data, [0, 1, 1 + len(under), len(data)], 0b101)
        encoded = tokenizer.encode_column(column)
        assert encoded.to_pylist() == expected_rows(tokenizer, ["a", None, "b"])
        assert sum(len(chunk.values) for chunk in encoded.chunks) == 2


def test_a_column_that_is_not_utf8(tokenizer: Tokenizer) -> None:
    for data, offsets in ((b"a\xff\xfeb", [0, 1, 3, 4]), ("é".encode(), [0, 1, 2, 2])):
        with pytest.raises(BadInput) as caught:
            tokenizer.encode_column(string_array(data, offsets, 0b111))
        assert caught.value.what == "the column holds text that is not UTF-8"
        assert caught.value.why
        assert caught.value.do == "decode it with errors='replace' first"


@pytest.mark.parametrize(
    "column",
    [pa.array([1, 2]), pa.array([b"x"]), pa.array([None]), pa.array(["x"]).dictionary_encode()],
    ids=lambda column: str(column.type),
)
def test_a_column_that_is_not_text(tokenizer: Tokenizer, column: Any) -> None:
    with pytest.raises(BadInput) as caught:
        tokenizer.encode_column(column)
    assert caught.value.what == f"a column of {column.type} is not text"
    assert caught.value.do == "give a column of strings"


def test_the_narrowest_type_that_holds_every_id() -> None:
    for last, narrow, kind in ((65_535, np.uint16, pa.uint16()), (65_536, np.uint32, pa.uint32())):
        content = made()
        content["added_tokens"].append({**content["added_tokens"][0], "id": last, "content": "Z~"})
        content["model"]["vocab"]["Z~"] = last
        loaded = Tokenizer(content)
        assert loaded.vocab_size == last + 1
        assert loaded.dtype == narrow
        encoded = loaded.encode_column(pa.array(["Z~"]), allowed_special={"Z~"})
        assert encoded.type == pa.list_(kind)
        assert encoded.to_pylist() == [[last]]


# Engines.


class Wrong(Gigatoken):
    """Changes the ids of one probe text."""

    def encode_rows(self, data: Any, at: Any) -> Any:
        ids, ends = super().encode_rows(data, at)
        ids = ids.copy()
        ids[3] += 1
        return ids, ends


def test_an_engine_that_differs_in_one_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Tokenizer(CONTENT, engine="tokenizers")
    monkeypatch.setattr("penstock.tokenize.engines.Gigatoken", Wrong)
    with pytest.warns(UserWarning, match="penstock encodes slowly: gigatoken gives other") as seen:
        loaded = Tokenizer(CONTENT)
    probe = true.encode("The quick brown fox").tolist()
    assert f"[{probe[3] + 1}, {probe[4]}, " in str(seen[0].message)
    assert f"instead of [{probe[3]}, {probe[4]}, " in str(seen[0].message)
    assert 'at token 3 of "The quick' in str(seen[0].message)
    assert len(seen) == 1
    assert loaded.engine == "tokenizers"
    assert loaded.slow_because in str(seen[0].message)
    assert loaded.encode(TEXT).tolist() == true.encode(TEXT).tolist()
    with pytest.raises(BadTokenizer, match="gigatoken gives other ids than tokenizers") as caught:
        Tokenizer(CONTENT, engine="gigatoken")
    assert caught.value.do == 'use engine="auto": the reference encodes it, slower'


@pytest.mark.parametrize("message", ["no such thing\nat all", ""])
def test_an_engine_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError(message)

    monkeypatch.setattr(Gigatoken, "__init__", fail)
    with pytest.warns(UserWarning, match="gigatoken does not take this tokenizer"):
        assert Tokenizer(CONTENT).engine == "tokenizers"


def test_an_unknown_engine() -> None:
    with pytest.raises(BadConfig, match="there is no engine 'fast'") as caught:
        Tokenizer(CONTENT, engine="fast")
    assert caught.value.do == "choose from auto, gigatoken, tokenizers"


def test_one_thread_or_many() -> None:
    rows = pa.array(TEXT.splitlines() * 20)
    parallel, serial = Tokenizer(CONTENT), Tokenizer(CONTENT, parallel=False)
    assert parallel.encode_column(rows).equals(serial.encode_column(rows))


def revealing(name: str) -> dict[str, Any]:
    """A vocabulary that shows every cut: a byte beside a code point, and its first or last byte,
    are one token unless they are cut apart."""
    plain, leads, trails = b" a1'\nA!bs2", range(0xC2, 0xF5), range(0x80, 0xC0)
    words = {bytes([x, lead]): 3 for x in plain for lead in leads}
    words |= {bytes([trail, x]): 2 for x in (*plain, *leads) for trail in trails}
    words[b"'s"] = 1
    learned = learn_merges(PretokenCounts.of(words), 256 + len(words))
    return as_json(learned, PATTERNS[name])


def code_points(step: int, first: int = 0) -> list[str]:
    return [chr(k) for k in range(first, 0x110000, step) if not 0xD800 <= k < 0xE000]


def different(name: str, letters: Sequence[str]) -> list[str]:
    """The code points around which the fast engine cuts otherwise than the reference."""
    content = revealing(name)
    fast, true = (Tokenizer(content, engine=engine) for engine in ("gigatoken", "tokenizers"))
    found = []
    for first in range(0, len(letters), 50_000):
        some = letters[first : first + 50_000]
        rows = pa.array(["a_b 1_2 _ __\n_'s !_!\n_ A_A'_".replace("_", k) for k in some])
        mine, theirs = (t.encode_column(rows).combine_chunks() for t in (fast, true))
        if not mine.equals(theirs):
            pairs = zip(some, mine.to_pylist(), theirs.to_pylist(), strict=True)
            found += [f"U+{ord(letter):04X}" for letter, a, b in pairs if a != b]
    return found


FAST: Final = ("gpt2", "cl100k", "o200k", "qwen2")


@pytest.mark.parametrize("name", FAST)
def test_engines_agree_on_every_32nd_code_point(name: str) -> None:
    """Each pattern begins elsewhere, so that together they see every eighth."""
    assert different(name, code_points(32, 8 * FAST.index(name))) == []


@pytest.mark.faults
@pytest.mark.parametrize("name", FAST)
def test_engines_agree_on_every_code_point(name: str) -> None:
    assert different(name, code_points(1)) == []


# What others make.


def test_objects_of_tokenizers(tmp_path: Path) -> None:
    ours = Tokenizer(CONTENT)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(CONTENT))
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    fast: Any = transformers.PreTrainedTokenizerFast
    wrapped = fast(tokenizer_object=theirs)
    for source in (theirs, wrapped, path, str(path), tmp_path, ours):
        loaded = Tokenizer.load(source)
        assert loaded.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
        assert loaded.special_tokens == ours.special_tokens
        assert loaded.fingerprint == ours.fingerprint
        assert loaded.is_lossless
    assert Tokenizer.load(ours) is ours


def ranks() -> dict[bytes, int]:
    return {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" the": 258}


def test_an_encoding_of_tiktoken() -> None:
    encoding = tiktoken.Encoding(
        "x",
        pat_str=PATTERNS["gpt2"].regex,
        mergeable_ranks=ranks(),
        special_tokens={"<|endoftext|>": 259},
    )
    loaded = Tokenizer.load(encoding)
    assert loaded.engine == "object"
    assert loaded.vocab_size == 260
    assert loaded.encode("the cat").tolist() == encoding.encode("the cat")
    assert loaded.encode_column(pa.array(["the", None, ""])).to_pylist() == [[257], None, []]
    assert loaded.decode(loaded.encode("the cat é")) == "the cat é"
    # special tokens in content are content
    text = "a<|endoftext|>b"
    assert loaded.encode(text).tolist() == encoding.encode_ordinary(text)
    assert loaded.decode(loaded.encode(text)) == text


class Letters:
    """A user's own: one id for each character."""

    def __init__(self, size: int | None = 1 << 21) -> None:
        if size is not None:
            self.vocab_size = size

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_an_object_with_encode() -> None:
    loaded = Tokenizer.load(Letters())
    assert loaded.engine == "object"
    assert loaded.encode("aé").tolist() == [97, 233]
    assert loaded.decode([97, 233]) == "aé"
    assert loaded.dtype == np.uint32
    encoded = loaded.encode_column(pa.array(["aé", None, ""]))
    assert encoded.type == pa.list_(pa.uint32())
    assert encoded.to_pylist() == [[97, 233], None, []]
    assert Tokenizer.load(Letters()).fingerprint == loaded.fingerprint
    assert Tokenizer.load(Letters(1 << 22)).fingerprint != loaded.fingerprint
    assert Tokenizer.load(Letters(None)).dtype == np.uint32
    with pytest.raises(BadTokenizer, match="does not say where its tokens come from") as caught:
        loaded.offsets("a")
    assert caught.value.do == "give a tokenizer.json for offsets"
    with pytest.raises(BadTokenizer):
        loaded.token_bytes([97])
    with pytest.raises(BadConfig, match="is not a special token"):
        loaded.encode("a", allowed_special={"a"})


def test_an_object_that_gives_ids_it_does_not_have() -> None:
    loaded = Tokenizer.load(Letters(1 << 21))
    loaded.vocab_size = 200
    with pytest.raises(
        BadTokenizer, match="the tokenizer gave id 233\n  why:   it says that it has 200"
    ):
        loaded.encode_column(pa.array(["aé"]))
    with pytest.raises(
        BadTokenizer, match="the tokenizer gave id 233\n  why:   it says that it has 200"
    ):
        loaded.encode("aé")


def test_an_object_says_its_own_fingerprint() -> None:
    class Named(Letters):
        fingerprint = "mine"

    assert Tokenizer.load(Named()).fingerprint == "mine"


@pytest.mark.parametrize("source", [5, None, object(), ["a"]])
def test_what_is_no_tokenizer(source: Any) -> None:
    with pytest.raises(BadTokenizer, match=f"{type(source).__name__} is not a tokenizer") as caught:
        Tokenizer.load(source)
    assert caught.value.do.startswith("give a path, a tokenizer of tokenizers or transformers")


# Tokenizers that are not byte for byte.


def with_added(**options: Any) -> dict[str, Any]:
    content = made()
    token = {**content["added_tokens"][0], "id": 900, "content": "FOO", "special": False}
    content["added_tokens"].append({**token, **options})
    content["model"]["vocab"]["FOO"] = 900
    return content


def tiles(loaded: Tokenizer, text: str) -> None:
    ids, at = loaded.offsets(text)
    assert (at[0], at[-1], len(at)) == (0, len(text.encode()), len(ids) + 1)
    assert (np.diff(at) >= 0).all()
    if loaded.is_lossless:
        assert loaded.decode(ids) == text


def test_an_added_token_that_is_not_special_is_always_itself() -> None:
    loaded = Tokenizer(with_added())
    assert 900 in loaded.encode("a FOO b").tolist()
    assert "FOO" not in loaded.special_tokens
    tiles(loaded, "a  FOO  b FOOFOO")


@pytest.mark.filterwarnings("ignore:penstock encodes slowly")
@pytest.mark.parametrize("options", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_an_added_token_that_takes_the_spaces_around_it(options: dict[str, Any]) -> None:
    tiles(Tokenizer(with_added(**options)), "a  FOO  b FOOFOO xFOO FOO")


@pytest.mark.filterwarnings("ignore:penstock encodes slowly")
def test_a_vocabulary_without_all_bytes_is_not_lossless() -> None:
    """As a plain BpeTrainer makes it: letters that it has not seen are dropped."""
    theirs = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.pre_tokenizer = level
    theirs.train_from_iterator(
        ["hello world"], trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    loaded = Tokenizer.load(theirs)
    tiles(loaded, "hello world")
    tiles(loaded, "Qhello QQ world!")
    assert not loaded.is_lossless


@pytest.mark.filterwarnings("ignore:penstock encodes slowly")
def test_a_normalizer() -> None:
    theirs = tokenizers.Tokenizer.from_str(json.dumps(CONTENT))
    theirs.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    loaded = Tokenizer.load(theirs)
    assert not loaded.is_lossless
    assert loaded.encode("ÉA").tolist() == theirs.encode("ÉA", add_special_tokens=False).ids
    tiles(loaded, "ÉA Straße É 漢 😀 x")
    assert loaded.decode(loaded.encode("ABC")) == "abc"


@pytest.mark.filterwarnings("ignore:penstock encodes slowly")
@pytest.mark.parametrize("what", ["truncation", "padding"])
def test_what_the_file_says_of_model_inputs_changes_no_text(what: str) -> None:
    """Files of published models often carry both; text must be neither cut nor filled."""
    theirs = tokenizers.Tokenizer.from_str(json.dumps(CONTENT))
    if what == "truncation":
        theirs.enable_truncation(3)
    else:
        theirs.enable_padding(pad_id=0, pad_token="<|endoftext|>")
    loaded, plain = Tokenizer.load(theirs), Tokenizer(CONTENT)
    assert loaded.engine == "gigatoken"
    rows = pa.array(["a", "hello world, this is long"])
    assert loaded.encode_column(rows).equals(plain.encode_column(rows))
    slow = Tokenizer.load(theirs, engine="tokenizers")
    assert slow.encode_column(rows).equals(plain.encode_column(rows))


@pytest.mark.filterwarnings("ignore:penstock encodes slowly")
def test_a_tokenizer_that_is_no_bpe() -> None:
    model = models.WordPiece({"[UNK]": 0, "hello": 1, "##s": 2, "wörld": 3}, unk_token="[UNK]")
    theirs = tokenizers.Tokenizer(model)
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    loaded = Tokenizer.load(theirs)
    assert not loaded.is_lossless
    assert loaded.encode("hellos wörld zzz").tolist() == [1, 2, 3, 0]
    ids, at = loaded.offsets("hellos wörld zzz")
    assert ids.tolist() == [1, 2, 3, 0]
    assert at.tolist() == [0, 5, 7, 14, 17]
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0))
    assert Tokenizer.load(unigram).encode("ab").tolist() == [1, 2]
    with pytest.raises(BadTokenizer, match="gigatoken does not take this tokenizer"):
        Tokenizer.load(theirs, engine="gigatoken")


def test_a_post_processor_adds_nothing() -> None:
    content = made()
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    assert Tokenizer(content).encode("a b").tolist() == Tokenizer(CONTENT).encode("a b").tolist()
