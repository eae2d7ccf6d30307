"""Learn byte-level BPE merges from counted pretokens.

In:    `PretokenCounts`, a vocabulary size, special tokens
Out:   `Bpe`: tokens by id and merges in order, those of Hugging Face's BpeTrainer to the last
Keeps: all pair counts and, for each pair, the words to visit: a training on 22 MB of distinct
       pretokens held 552 MB in all
Never: depends on the order of the counts

Two orders are known. "hf": special tokens have the first ids, then bytes as the byte-level
alphabet sorts them. "rustbpe": bytes have ids 0 to 255, special tokens come last. Ids decide ties,
so the two learn different merges.

No text becomes a token twice: whatever lies between the ends of a token was merged as it would be
alone, so a pair with the text of an older token would have become that token. Each pair is queued
once, when the younger of its two tokens appears.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int32s
from penstock.disk import open_own, replacing
from penstock.errors import BadConfig, BadInput
from penstock.kernels import Kernel, byte_buffer
from penstock.tokenize.bpe_layout import (
    ARENA,
    ENTRIES,
    HEAD,
    HEAP,
    LEAST_COUNT,
    MERGES,
    NO_PAIR,
    PAIRS,
    STATE,
    TOKENS,
    VOCAB,
    Met,
    Neighbours,
    Queue,
)
from penstock.tokenize.counts import PretokenCounts

_BATCH = 256  # merges between two looks at the clock

_I32, _I64, _U64, _U8 = "int32[::1]", "int64[::1]", "uint64[::1]", "uint8[::1]"
_MODULE = "penstock.tokenize.bpe_kernel"
_begin = Kernel(
    _MODULE,
    "begin",
    f"void({_U8}, {_I64}, {_I64}, {_I32}, {_I32}, {_I64}, {_I64}, {_I32}, Queue, {_I64})",
    Queue,
)
_learn = Kernel(
    _MODULE,
    "learn",
    f"int64(int64, {_I32}, Neighbours, Met, Queue, {_I32}, {_I64}, {_I64})",
    *(Neighbours, Met, Queue),
)
_rehash_pairs = Kernel(_MODULE, "rehash_pairs", f"void({_U64}, {_U64})")


@dataclass(frozen=True, slots=True)
class Bpe:
    """A learned vocabulary. Token k has the bytes tokens[k]; a special token has its text."""

    tokens: list[bytes]
    merges: list[tuple[int, int]]
    """Left and right, the most urgent first."""
    special_tokens: dict[str, int]
    counts: list[int]
    """How often each merged pair occurred when it was merged."""


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in tokenizer.json.

    >>> byte_alphabet()[ord(" ")], byte_alphabet()[ord("A")]
    ('Ġ', 'A')
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(plain)))
    return [letters[byte] for byte in range(256)]


def learn_merges(
    counts: PretokenCounts,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    *,
    order: str = "hf",
    min_frequency: int = 0,
    checkpoint: Path | None = None,
    checkpoint_s: float = 60.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Bpe:
    """Learn until there are `vocab_size` tokens, special ones included, or no pair is left.

    With `checkpoint`, the state is saved there every `checkpoint_s` seconds; a killed call that is
    made again goes on from it. `on_progress` is told how many merges there are, and are to be.
    """
    specials = list(dict.fromkeys(special_tokens))
    most = vocab_size - 256 - len(specials)
    if order not in ("hf", "rustbpe"):
        raise BadConfig(f"there is no order {order!r}", do="choose from hf, rustbpe")
    if vocab_size < 256 + len(specials):
        raise BadConfig(
            f"vocab_size is {vocab_size}",
            why=f"256 bytes and {len(specials)} special tokens need {256 + len(specials)} already",
            do=f"give at least {257 + len(specials)}",
        )
    if vocab_size > 1 << 24:
        raise BadConfig(f"vocab_size is {vocab_size}", do="give at most 16,777,216")
    for text in specials:
        if text in byte_alphabet():
            raise BadConfig(
                f"the special token {text!r} is one letter",
                why="tokenizer.json writes a byte like that, and could not tell the two apart",
                do=f"choose a longer one, such as <|{text}|>",
            )
    if len(counts) and int(counts.counts.min()) < 0:
        raise BadInput("a count is negative", do="count again")
    counts = counts.at_least(1)
    if float(np.sum(counts.counts.astype(np.float64) * np.diff(counts.at))) >= 1 << 62:
        raise BadInput("the counts add up to 2^62 or more", do="train on a part of them")
    learner = _Learner(counts, vocab_size, specials, order, min_frequency)
    if checkpoint is not None:
        learner.load(checkpoint)
    saved = time.monotonic()
    while learner.step():
        if on_progress is not None:
            on_progress(learner.merges, most)
        if checkpoint is not None and time.monotonic() - saved >= checkpoint_s:
            learner.save(checkpoint)
            saved = time.monotonic()
    if on_progress is not None:
        on_progress(learner.merges, most)
    return learner.result()


class _Learner:
    """The arrays of one training, and the kernels over them."""

    def __init__(
        self, counts: PretokenCounts, vocab_size: int, specials: list[str], order: str, least: int
    ) -> None:
        self._specials = specials
        self._order = order
        self._vocab_size = vocab_size
        self._first_id = len(specials) if order == "hf" else 0
        self.state = np.zeros(STATE, np.int64)
        self.state[VOCAB] = vocab_size if order == "hf" else vocab_size - len(specials)
        self.state[LEAST_COUNT] = max(1, least)
        self._byte_id = self._byte_ids()
        keys, at, weights = _words(counts)
        self._fingerprint = self._identity(keys, at, weights)
        self.a: dict[str, npt.NDArray[Any]] = {
            "symbols": _array(HEAD * (len(weights) + 1) + int(at[-1]), np.int32),
            "merges": np.zeros(2 * (vocab_size + 1), np.int32),
            "merge_counts": np.zeros(vocab_size + 1, np.int64),
            "table": np.full(2 << 17, NO_PAIR, np.uint64),
            "heap": np.zeros(1 << 17, np.int32),
            "heap_count": np.zeros(1 << 17, np.int64),
            "entry_pair": np.zeros(1 << 17, np.uint64),
            "entry_at": np.zeros(1 << 17, np.int64),
            "entry_words": np.zeros(1 << 17, np.int32),
            # every symbol is lost to a merge once at most, and then has two neighbours;
            # pages that are never reached are never taken
            "arena": _array(3 * int(at[-1]) + 16, np.int32),
        }
        most = int(at[-1]) // 2 + 16
        near, near_words, far, far_words = (_array(most, np.int32) for _ in range(4))
        self._met = Met(near, near_words, far, far_words, np.zeros(2, np.int64))
        self._beside = Neighbours(
            left=np.zeros(vocab_size + 1, np.int64),
            right=np.zeros(vocab_size + 1, np.int64),
            left_last=np.full(vocab_size + 1, -1, np.int32),
            right_last=np.full(vocab_size + 1, -1, np.int32),
            left_events=np.zeros(vocab_size + 1, np.int64),
            right_events=np.zeros(vocab_size + 1, np.int64),
        )
        self.state[TOKENS] = 256 + self._first_id
        both: list[Any] = [np.zeros(1 << 16, np.int64) for _ in range(2)]
        _begin(
            keys, at, weights, self._byte_id, self.a["symbols"], *both,
            np.full(1 << 16, -1, np.int32), self._queue(), self.state,
        )  # fmt: skip

    def _queue(self) -> Queue:
        return Queue(*(self.a[name] for name in Queue._fields))

    @property
    def tokens(self) -> int:
        return int(self.state[TOKENS])

    @property
    def merges(self) -> int:
        return self.tokens - 256 - self._first_id

    def step(self) -> bool:
        """Learn some merges; whether there are more to learn."""
        a = self.a
        done = _learn(
            _BATCH, a["symbols"], self._beside, self._met, self._queue(), a["merges"],
            a["merge_counts"], self.state,
        )  # fmt: skip
        if self.state[HEAP] == 0 or self.state[TOKENS] >= self.state[VOCAB]:
            return False
        if done < _BATCH:
            self._grow()
        return True

    def _grow(self) -> None:
        """Double what is nearly full."""
        a, room = self.a, 2 * self.tokens + 16
        if 8 * (self.state[PAIRS] + room) > 5 * (len(a["table"]) >> 1):
            larger = _array(2 * len(a["table"]), np.uint64)
            larger[:] = NO_PAIR
            _rehash_pairs(a["table"], larger)
            a["table"] = larger
        for used, names in (
            (int(self.state[ENTRIES]) + room, ("entry_pair", "entry_at", "entry_words")),
            (int(self.state[HEAP]) + room, ("heap", "heap_count")),
        ):
            for name in names:
                if used > len(a[name]):
                    larger = _array(2 * used, a[name].dtype)
                    larger[: len(a[name])] = a[name]
                    a[name] = larger

    def result(self) -> Bpe:
        a, count = self.a, int(self.state[MERGES])
        tokens = [b""] * (256 + self._first_id)
        for byte in range(256):
            tokens[int(self._byte_id[byte])] = bytes([byte])
        merges = [(left, right) for left, right in a["merges"][: 2 * count].reshape(-1, 2).tolist()]
        for left, right in merges:
            tokens.append(tokens[left] + tokens[right])
        self._refuse_doubles(tokens)
        ids = range(len(self._specials))
        if self._order == "hf":
            tokens[: len(ids)] = [text.encode() for text in self._specials]
        else:
            ids = range(len(tokens), len(tokens) + len(ids))
            tokens += [text.encode() for text in self._specials]
        specials = dict(zip(self._specials, ids, strict=True))
        return Bpe(tokens, merges, specials, a["merge_counts"][:count].tolist())

    def _refuse_doubles(self, tokens: list[bytes]) -> None:
        """A special token that is written like one of the others would take its place."""
        letters = {letter: byte for byte, letter in enumerate(byte_alphabet())}
        learned = set(tokens)
        for text in self._specials:
            if all(c in letters for c in text) and bytes(letters[c] for c in text) in learned:
                raise BadConfig(
                    f"the special token {text!r} is also a piece of the text",
                    why="tokenizer.json could not tell the two apart",
                    do=f"choose one that is no word, such as <|{text}|>",
                )

    def save(self, path: Path) -> None:
        """Write the whole state beside `path`, then rename it there."""
        used = {
            "heap": HEAP, "heap_count": HEAP, "entry_pair": ENTRIES, "entry_at": ENTRIES,
            "entry_words": ENTRIES, "arena": ARENA,
        }  # fmt: skip
        parts = {
            name: array[: int(self.state[used[name]])] if name in used else array
            for name, array in self.a.items()
        }
        about = {
            "fingerprint": self._fingerprint,
            "state": self.state.tolist(),
            "parts": {name: [array.dtype.str, len(array)] for name, array in parts.items()},
        }
        digest = hashlib.sha256()
        with replacing(path, sync=True) as file:
            head = json.dumps(about).encode() + b"\n"
            pieces: list[Any] = [head, *(part.data for part in parts.values())]
            for data in pieces:
                digest.update(data)
                file.write(data)
            file.write(digest.digest())

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; one that is damaged, or of other counts, is left alone."""
        try:
            file = os.fdopen(open_own(path, make=False, write=False), "rb")
        except FileNotFoundError:
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            head = file.readline(1 << 20)
            digest = hashlib.sha256(head)
            try:
                about = json.loads(head)
                parts = {name: (np.dtype(kind), n) for name, (kind, n) in about["parts"].items()}
                if about["fingerprint"] != self._fingerprint:
                    return
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return
            bytes_of = sum(kind.itemsize * count for kind, count in parts.values())
            if size != len(head) + bytes_of + 32:
                return
            arrays = {}
            for name, (kind, count) in parts.items():
                arrays[name] = _array(max(count, len(self.a[name])), kind)
                file.readinto(arrays[name][:count].view(np.uint8).data)
                digest.update(arrays[name][:count].data)
            if file.read() != digest.digest():
                return
        for name, array in arrays.items():
            if name in ("table", "merges", "merge_counts"):
                array = array[: parts[name][1]]
            self.a[name] = array
        self.state[:] = about["state"]

    def _byte_ids(self) -> Int32s:
        if self._order != "hf":
            return np.arange(256, dtype=np.int32)
        ids = np.empty(256, np.int32)
        letters = byte_alphabet()
        for place, byte in enumerate(sorted(range(256), key=lambda byte: letters[byte])):
            ids[byte] = self._first_id + place
        return ids

    def _identity(self, *arrays: npt.NDArray[Any]) -> str:
        import xxhash

        digest = xxhash.xxh3_128(repr((self._specials, self._order, self.state.tolist())).encode())
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def _words(counts: PretokenCounts) -> tuple[Any, Any, Any]:
    """Pretokens end to end, where each begins, how often each occurs."""
    if int(counts.at[-1]) + HEAD * (len(counts) + 1) >= 1 << 31:
        raise BadInput(
            f"{len(counts):,} distinct pretokens of {int(counts.at[-1]):,} bytes are too many",
            do="leave out the rare ones: --min_count 2",
        )
    return (
        np.ascontiguousarray(counts.keys_data),
        np.ascontiguousarray(counts.at),
        np.ascontiguousarray(counts.counts, np.int64),
    )


def _array(count: int, dtype: Any) -> npt.NDArray[Any]:
    """Zeros on huge pages, taken as they are touched."""
    kind = np.dtype(dtype)
    return byte_buffer(count * kind.itemsize)[: count * kind.itemsize].view(kind)
