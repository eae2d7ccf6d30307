"""Merges and vocabulary are those of Hugging Face and of rustbpe; a stopped training goes on."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from penstock.errors import BadConfig, BadInput
from penstock.tokenize import bpe as bpe_module
from penstock.tokenize import bpe_layout
from penstock.tokenize.bpe import Bpe, byte_alphabet, learn_merges
from penstock.tokenize.counts import PretokenCounts
from penstock.tokenize.patterns import PATTERNS
from penstock.tokenize.save import as_json

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]

SOURCES: Final = sorted(Path(bpe_module.__file__).parent.glob("*.py"))

WORDS: Final = st.dictionaries(
    st.text(st.sampled_from("ab"), min_size=1, max_size=30)
    | st.text(st.sampled_from("abc é"), min_size=1, max_size=12)
    | st.builds(str.__mul__, st.sampled_from(["a", "ab", "aab", "aba", "é"]), st.integers(1, 40)),
    st.integers(1, 4),
    min_size=1,
    max_size=12,
)
SPECIALS: Final = st.lists(
    st.sampled_from(
        ["ab", "abab", "aa", "aaaa", "ba", "the", "<|endoftext|>", "é é", "漢", "ĠĠ", "Ã©", "aé"]
    ),
    max_size=3,
)


def hf(
    texts: Sequence[str],
    vocab_size: int,
    specials: Sequence[str] = (),
    min_frequency: int = 0,
    pattern: str | None = None,
) -> tuple[Vocabulary, Merges]:
    """What BpeTrainer learns; without a pattern each text is one pretoken."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = level
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def repeated(words: Mapping[str, int]) -> list[str]:
    return [word for word, count in words.items() for _ in range(count)]


def counts_of(words: Mapping[str, int] | Mapping[bytes, int]) -> PretokenCounts:
    return PretokenCounts.of(
        {w.encode() if isinstance(w, str) else w: count for w, count in words.items()}
    )


def written(bpe: Bpe) -> tuple[Vocabulary, Merges]:
    """A learned vocabulary as tokenizer.json has it; no token may be lost on the way."""
    model = as_json(bpe, PATTERNS["gpt2"])["model"]
    assert sorted(model["vocab"].values()) == list(range(len(bpe.tokens)))
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def same_as_hf(
    words: Mapping[str, int], vocab_size: int, specials: Sequence[str] = (), least: int = 0
) -> Bpe | None:
    """None where a special token is written like a token: that must be refused."""
    vocabulary, merges = hf(repeated(words), vocab_size, specials, least)
    if not {*byte_alphabet(), *map("".join, merges)}.isdisjoint(specials):
        with pytest.raises(BadConfig, match=r"is one letter|is also a piece of the text"):
            learn_merges(counts_of(words), vocab_size, specials, min_frequency=least)
        return None
    learned = learn_merges(counts_of(words), vocab_size, specials, min_frequency=least)
    assert written(learned) == (vocabulary, merges)
    return learned


# Hugging Face's order.


@settings(max_examples=200, deadline=None)
@given(WORDS, SPECIALS, st.sampled_from([1, 2, 5, 20, 500]), st.integers(0, 3))
@example({"aaaa": 1}, [], 500, 0)
@example({"aaaaaaa": 2, "aaa": 1}, ["aaa"], 500, 0)
@example({"abababab": 1, "baba": 2}, ["ab", "abab"], 500, 0)
@example({"aabaab": 1, "baabaa": 1}, [], 500, 0)
def test_few_letters_and_many_ties(
    words: dict[str, int], specials: list[str], more: int, least: int
) -> None:
    vocab_size = 256 + len(set(specials)) + more
    learned = same_as_hf(words, vocab_size, specials, least)
    # Inside a token's text nothing that crosses its ends was merged before it, so whatever stands
    # around it, it comes from one pair; were it not so, Hugging Face's heap could hold one pair
    # twice, and its result would depend on which comes out first.
    if learned is not None:
        texts = [learned.tokens[left] + learned.tokens[right] for left, right in learned.merges]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.sampled_from("aab e  's'll\n\r\t12é漢字ßA!/_"), max_size=200),
    more=st.sampled_from([3, 20, 500]),
)
def test_texts_cut_by_each_pattern(name: str, text: str, more: int) -> None:
    pattern = PATTERNS[name].regex
    specials = ["<|endoftext|>", "漢字"]
    counts = Counter(found.group().encode() for found in regex.finditer(pattern, text))
    learned = learn_merges(PretokenCounts.of(counts), 258 + more, specials)
    assert written(learned) == hf([text], 258 + more, specials, pattern=pattern)


@pytest.mark.parametrize("seed", range(4))
def test_until_no_pair_is_left(seed: int) -> None:
    chance = random.Random(seed)
    letters = ["ab", "abcdefgh", "aé漢", "etaoin shrdlu"][seed]
    words = Counter("".join(chance.choices(letters, k=chance.randint(1, 25))) for _ in range(1000))
    learned = same_as_hf(words, 100_000)
    assert learned is not None
    assert {word.encode() for word in words} <= set(learned.tokens)
    assert learned.counts == sorted(learned.counts, reverse=True)


def test_source_code() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    pattern = PATTERNS["cl100k"].regex
    counts = Counter(found.group().encode() for found in regex.finditer(pattern, text))
    for vocab_size in (1000, 60_000):
        learned = learn_merges(PretokenCounts.of(counts), vocab_size, ["<|endoftext|>"])
        assert written(learned) == hf([text], vocab_size, ["<|endoftext|>"], pattern=pattern)


@pytest.mark.parametrize(
    "specials",
    [
        ["ab"],
        ["the", "ab", "the"],
        ["abab", "ab"],
        ["Ġthe", "Ã©"],
        ["漢", "é é", " ", "  "],
        ["a"],
        ["b", "a"],
        ["é"],
        ["Ġ"],
        ["ab", "é", "b", "<|endoftext|>"],
    ],
)
def test_special_tokens_that_are_also_merges_or_letters(specials: list[str]) -> None:
    words = {"ababab": 3, "the": 4, " the": 3, "é": 4, "cab the é": 2, "bbbb": 2, "退": 2}
    for more in (0, 1, 2, 7, 500):
        same_as_hf(words, 256 + len(set(specials)) + more, specials)


@settings(max_examples=50, deadline=None)
@given(WORDS, st.sampled_from(["hf", "rustbpe"]), st.randoms(use_true_random=False))
def test_the_order_of_the_counts_decides_nothing(
    words: dict[str, int], order: str, chance: random.Random
) -> None:
    shuffled = list(words.items())
    chance.shuffle(shuffled)
    expected = learn_merges(counts_of(words), 300, order=order)
    assert learn_merges(counts_of(dict(shuffled)), 300, order=order) == expected


def test_a_pretoken_that_never_occurs_decides_nothing() -> None:
    words = {"xy1": 5, "xy2": 5, "xy3": 5, "xyxy": 4}
    expected = learn_merges(counts_of(words), 300)
    for absent in ("ab", "zz", "abab", "yx", "xyxyxy"):
        assert learn_merges(counts_of({absent: 0, **words}), 300) == expected
        assert learn_merges(counts_of({**words, absent: 0}), 300) == expected


def test_the_alphabet_is_that_of_hugging_face() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("\0 aé漢😀\n", "".join(map(chr, range(0x800)))):
        ((found, _),) = level.pre_tokenize_str(text)
        assert found == "".join(byte_alphabet()[byte] for byte in text.encode())


# The order of rustbpe: https://github.com/karpathy/rustbpe, counted anew after each merge.


def rustbpe(words: Mapping[bytes, int], merges: int) -> list[tuple[int, int]]:
    """The pair that occurs most, of equals the smallest; it becomes the next id."""
    texts = [(list(word), count) for word, count in words.items()]
    found: list[tuple[int, int]] = []
    while len(found) < merges:
        pairs: Counter[tuple[int, int]] = Counter()
        for ids, count in texts:
            for pair, times in Counter(itertools.pairwise(ids)).items():
                pairs[pair] += times * count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        texts = [(merged(ids, best, 256 + len(found)), count) for ids, count in texts]
        found.append(best)
    return found


def merged(ids: list[int], merge: tuple[int, int], new: int) -> list[int]:
    left, right = merge
    out = []
    at = 0
    while at < len(ids):
        if ids[at] == left and at + 1 < len(ids) and ids[at + 1] == right:
            out.append(new)
            at += 2
        else:
            out.append(ids[at])
            at += 1
    return out


def tokens_of(merges: Sequence[tuple[int, int]]) -> list[bytes]:
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in merges:
        tokens.append(tokens[left] + tokens[right])
    return tokens


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=12)
        | st.lists(st.sampled_from(b"ab"), min_size=1, max_size=30).map(bytes),
        st.integers(1, 4),
        max_size=10,
    ),
    st.lists(st.sampled_from(["<|x|>", "<|y|>", "漢"]), unique=True, max_size=3),
    st.sampled_from([0, 1, 5, 30, 300]),
)
@example({b"aaaaa": 2, b"aaa": 1}, [], 30)
def test_rustbpe(words: dict[bytes, int], specials: list[str], more: int) -> None:
    expected = rustbpe(words, more)
    learned = learn_merges(
        PretokenCounts.of(words), 256 + len(specials) + more, specials, order="rustbpe"
    )
    assert learned.merges == expected
    assert learned.tokens == tokens_of(expected) + [text.encode() for text in specials]
    first = 256 + len(expected)
    assert learned.special_tokens == {text: first + k for k, text in enumerate(specials)}


@pytest.mark.parametrize("special", ["ab", "é", "a", "Ġthe"])
def test_rustbpe_gives_a_special_token_an_id_of_its_own(special: str) -> None:
    """So tokenizer.json must not lose the token that is written the same, or it is refused."""
    words = {b"ab": 5, " the é 退".encode(): 3, b" the": 5}
    try:
        learned = learn_merges(PretokenCounts.of(words), 400, [special], order="rustbpe")
    except BadConfig:
        return
    vocabulary, merges = written(learned)
    assert len(vocabulary) == len(learned.tokens)
    assert len(merges) == len(learned.merges)


@pytest.mark.parametrize(
    "word",
    [
        b"a" * 100_000,
        b"ab" * 50_000,
        random.Random(1).randbytes(100_000),
        bytes(random.Random(2).choices(b"ab", k=100_000)),
    ],
    ids=["a", "ab", "bytes", "letters"],
)
def test_a_pretoken_of_100_kb(word: bytes) -> None:
    words = {word: 2, word[:1000]: 1, b"a": 3}
    learned = learn_merges(PretokenCounts.of(words), 276, order="rustbpe")
    assert learned.merges == rustbpe(words, 20)


def test_a_long_pretoken_as_hugging_face_learns_it() -> None:
    chance = random.Random(3)
    for word in ("a" * 5000, "aab" * 1500, "".join(chance.choices("abc", k=5000))):
        same_as_hf({word: 1}, 100_000 if len(set(word)) < 3 else 600)


# Limits.


def test_min_frequency() -> None:
    words = counts_of({"ab": 3, "cd": 2, "ef": 1})
    for order in ("hf", "rustbpe"):
        for least, expected in ((0, [3, 2, 1]), (1, [3, 2, 1]), (2, [3, 2]), (3, [3]), (4, [])):
            learned = learn_merges(words, 300, order=order, min_frequency=least)
            assert learned.counts == expected


def test_nothing_to_merge() -> None:
    for words in ({}, {b"a": 3}, {b"": 1, b"b": 1}):
        for order in ("hf", "rustbpe"):
            learned = learn_merges(PretokenCounts.of(words), 1000, ["<x>"], order=order)
            assert len(learned.tokens) == 257
            assert learned.merges == []


def test_exactly_the_bytes_and_special_tokens() -> None:
    assert len(learn_merges(counts_of({"ab": 1}), 258, ["<x>", "<y>", "<x>"]).tokens) == 258


def test_a_vocabulary_that_is_too_small() -> None:
    with pytest.raises(BadConfig) as caught:
        learn_merges(counts_of({"ab": 1}), 257, ["<x>", "<y>"])
    assert caught.value.what == "vocab_size is 257"
    assert caught.value.why == "256 bytes and 2 special tokens need 258 already"
    assert caught.value.do == "give at least 259"


def test_a_vocabulary_that_is_too_large() -> None:
    with pytest.raises(BadConfig, match="vocab_size is 16777217") as caught:
        learn_merges(counts_of({"ab": 1}), (1 << 24) + 1)
    assert caught.value.do == "give at most 16,777,216"


def test_an_unknown_order() -> None:
    with pytest.raises(BadConfig, match="there is no order 'gpt'") as caught:
        learn_merges(counts_of({"ab": 1}), 300, order="gpt")
    assert caught.value.do == "choose from hf, rustbpe"


@pytest.mark.parametrize(
    "words",
    [
        {"ab": -1},
        {"ab": (1 << 62) + 1},
        {"ab": 1 << 62, "cd": 1},
        {"ab": 1 << 62, "cd": 1 << 62},
        {"ab" * 100: 1 << 61},
    ],
    ids=["negative", "large", "sum", "sum wraps", "pairs wrap"],
)
def test_counts_that_do_not_fit(words: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=r"the counts add up to|a count is negative"):
        learn_merges(counts_of(words), 300)


# Arrays that grow.


class Cramped(bpe_module._Learner):
    """Begins with arrays that are just large enough for what they hold, so that all must grow."""

    grown: list[str]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        state = self.state
        entries, heap = int(state[bpe_layout.ENTRIES]), int(state[bpe_layout.HEAP])
        used = {
            "entry_pair": entries, "entry_at": entries, "entry_words": entries,
            "heap": heap, "heap_count": heap,
        }  # fmt: skip
        for name, size in used.items():
            self.a[name] = self.a[name][:size].copy()
        table = np.full(2 << int(state[bpe_layout.PAIRS]).bit_length(), 2**64 - 1, np.uint64)
        bpe_module._rehash_pairs(self.a["table"], table)
        self.a["table"] = table

    def _grow(self) -> None:
        before = {name: len(array) for name, array in self.a.items()}
        super()._grow()
        self.grown += [name for name, size in before.items() if len(self.a[name]) > size]


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    grown: list[str] = []
    monkeypatch.setattr(Cramped, "grown", grown, raising=False)
    monkeypatch.setattr(bpe_module, "_Learner", Cramped)
    return grown


GROWING: Final = {"table", "heap", "heap_count", "entry_pair", "entry_at", "entry_words"}


def test_every_array_grows(cramped: list[str]) -> None:
    chance = random.Random(5)
    words = Counter("".join(chance.choices("abcde", k=chance.randint(1, 300))) for _ in range(60))
    same_as_hf(words, 20_000)
    assert set(cramped) == GROWING


def test_a_large_vocabulary() -> None:
    """Every array outgrows its real first size, but for the merges, of which no more can be."""
    chance = random.Random(6)
    letters = "abcdefghijklmnopqrstuvwxyzäöüß"
    words = Counter("".join(chance.choices(letters, k=9)) for _ in range(12_000))
    learned = same_as_hf(words, 1 << 20)
    assert learned is not None
    assert len(learned.tokens) > 40_000


# Checkpoints.


class Stopped(Exception):
    pass


def stop_at(step: int) -> Callable[[int, int], None]:
    left = [step]

    def on_progress(at: int, size: int) -> None:
        assert 0 <= at <= size < 900
        left[0] -= 1
        if left[0] == 0:
            raise Stopped

    return on_progress


def noted(steps: list[int]) -> Callable[[int, int], None]:
    return lambda at, size: steps.append(at)


def some_words(seed: int = 7) -> PretokenCounts:
    chance = random.Random(seed)
    return counts_of(
        Counter("".join(chance.choices("abcdef ", k=chance.randint(1, 40))) for _ in range(80))
    )


@pytest.mark.parametrize("order", ["hf", "rustbpe"])
@pytest.mark.parametrize("small", [False, True], ids=["as it is", "cramped"])
def test_stopped_at_any_step_it_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    small: bool,
    request: pytest.FixtureRequest,
) -> None:
    if small:
        request.getfixturevalue("cramped")
    monkeypatch.setattr(bpe_module, "_BATCH", 20)
    counts = some_words()
    options: dict[str, Any] = {"order": order, "checkpoint_s": 0.0}
    arguments: tuple[Any, ...] = (counts, 700, ["<|endoftext|>", "漢"])
    seen: list[int] = []
    expected = learn_merges(*arguments, order=order, on_progress=noted(seen))
    assert len(seen) > 15
    for step in (1, 2, 3, 7, len(seen) - 1, len(seen)):
        path = tmp_path / f"{step}"
        with pytest.raises(Stopped):
            learn_merges(*arguments, **options, checkpoint=path, on_progress=stop_at(step))
        assert path.exists() == (step > 1)
        rest: list[int] = []
        learned = learn_merges(*arguments, **options, checkpoint=path, on_progress=noted(rest))
        assert learned == expected
        if not small:
            assert rest == seen[step - 1 :]


def test_stopped_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe_module, "_BATCH", 30)
    counts = some_words()
    expected = learn_merges(counts, 900)
    path = tmp_path / "merges"
    stops = 0
    while True:
        try:
            learned = learn_merges(
                counts, 900, checkpoint=path, checkpoint_s=0, on_progress=stop_at(2)
            )
            break
        except Stopped:
            stops += 1
    assert learned == expected
    assert stops > 10


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a stopped training of `some_words` to 700 tokens left."""
    monkeypatch.setattr(bpe_module, "_BATCH", 20)
    path = tmp_path / "merges"
    with pytest.raises(Stopped):
        learn_merges(some_words(), 700, checkpoint=path, checkpoint_s=0, on_progress=stop_at(5))
    return path


def begins_anew(path: Path, counts: PretokenCounts, vocab_size: int, **options: Any) -> None:
    expected = learn_merges(counts, vocab_size, **options)
    first: list[int] = []
    learned = learn_merges(
        counts, vocab_size, **options, checkpoint=path, checkpoint_s=1e9,
        on_progress=noted(first),
    )  # fmt: skip
    assert learned == expected
    assert first[0] == bpe_module._BATCH


def test_a_truncated_checkpoint_is_left_alone(checkpoint: Path) -> None:
    data = checkpoint.read_bytes()
    for size in (0, 1, 100, data.index(b"\n") + 1, len(data) // 2, len(data) - 33, len(data) - 1):
        checkpoint.write_bytes(data[:size])
        begins_anew(checkpoint, some_words(), 700)


def test_a_changed_checkpoint_is_left_alone(checkpoint: Path) -> None:
    data = checkpoint.read_bytes()
    chance = random.Random(8)
    head = data.index(b"\n")
    for at in (0, 20, head - 3, head, len(data) - 1, *(chance.randrange(len(data)) for _ in "12")):
        changed = bytearray(data)
        changed[at] ^= 1
        checkpoint.write_bytes(changed)
        begins_anew(checkpoint, some_words(), 700)
    checkpoint.write_bytes(data + b"\0")
    begins_anew(checkpoint, some_words(), 700)


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"5\n",
        b"null\n",
        b"[]\n",
        b'{"parts": {}}\n',
        b'{"parts": [], "fingerprint": ""}\n',
        b'{"parts": {"a": 1}, "fingerprint": ""}\n',
        b'{"parts": {"a": ["(((", 1]}, "fingerprint": ""}\n',
        b"\xff\xfe\0\n" * 100,
        b"[" * 100_000 + b"\n",
        bytes(3 << 20),
    ],
    ids=lambda data: repr(data[:30]),
)
def test_another_file_in_its_place_is_left_alone(checkpoint: Path, data: bytes) -> None:
    checkpoint.write_bytes(data)
    begins_anew(checkpoint, some_words(), 700)


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 701},
        {"order": "rustbpe"},
        {"min_frequency": 2},
        {"special_tokens": ["<x>"]},
        {"counts": some_words(9)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_checkpoint_of_another_training_is_left_alone(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    begins_anew(checkpoint, **{"counts": some_words(), "vocab_size": 700, **options})


def test_a_checkpoint_is_whole_or_not_there(checkpoint: Path) -> None:
    assert [path.name for path in checkpoint.parent.iterdir()] == ["merges"]
    head = json.loads(checkpoint.read_bytes().split(b"\n", 1)[0])
    assert re.fullmatch("[0-9a-f]{32}", head["fingerprint"])


def test_without_a_checkpoint_nothing_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "merges"
    learn_merges(some_words(), 700, checkpoint=path)
    assert not path.exists()
