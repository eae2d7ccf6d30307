"""Read and write tokenizers as the files that others know: tokenizer.json and tiktoken ranks.

In:    a `Bpe` and its pattern; or a tokenizer.json, a .tiktoken file, a directory, an object
Out:   tokenizer.json, tokenizer.tiktoken and tokenizer_config.json; or the parsed tokenizer.json
Keeps: token ids and merges as they are; every file is whole or not there
Never: guesses the pattern of a file that does not name it
"""

import base64
import binascii
import hashlib
import heapq
import json
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.disk import replacing
from penstock.errors import BadTokenizer, InputMissing
from penstock.ingest.open import missing
from penstock.tokenize.bpe import Bpe, byte_alphabet
from penstock.tokenize.patterns import PATTERNS, Pattern, find_pattern

TOKENIZER_JSON: Final = "tokenizer.json"
RANKS: Final = "tokenizer.tiktoken"
MAX_IDS: Final = 1 << 24
"""Ids of a tokenizer at most: tables of them stay below a gigabyte."""

# Rank files that OpenAI publishes carry neither pattern nor special tokens; their names say them.
_PUBLISHED: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "r50k_base": ("gpt2", {"<|endoftext|>": 50256}),
    "cl100k_base": (
        "cl100k",
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": ("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}


def save_tokenizer(bpe: Bpe, pattern: Pattern, folder: Path) -> None:
    """Write a learned tokenizer; tokenizer.json comes last, so where it is, all is."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = set(bpe.special_tokens.values())
    ranks = b"".join(
        base64.b64encode(token) + b" %d\n" % number
        for number, token in enumerate(bpe.tokens)
        if number not in specials
    )
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        "penstock": {"pattern": pattern.regex, "special_tokens": bpe.special_tokens},
    }
    if "<|endoftext|>" in bpe.special_tokens:
        about["eos_token"] = "<|endoftext|>"
    if "<|bos|>" in bpe.special_tokens:
        about["bos_token"] = "<|bos|>"
    content = as_json(bpe, pattern)
    for name, data in (
        (RANKS, ranks),
        ("tokenizer_config.json", json.dumps(about, indent=2, ensure_ascii=False).encode()),
        (TOKENIZER_JSON, json.dumps(content, indent=1, ensure_ascii=False).encode()),
    ):
        _write_whole(folder / name, data)


def as_json(bpe: Bpe, pattern: Pattern) -> dict[str, Any]:
    """The tokenizer.json of a learned vocabulary, as Hugging Face's library writes it."""
    alphabet = byte_alphabet()
    written = {number: text for text, number in bpe.special_tokens.items()}
    names = [
        written.get(number) or "".join([alphabet[byte] for byte in token])
        for number, token in enumerate(bpe.tokens)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, number in bpe.special_tokens.items()
        ],
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(pattern),
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: number for number, name in enumerate(names) if name},
            "merges": [[names[left], names[right]] for left, right in bpe.merges],
        },
    }


def _pre_tokenizer(pattern: Pattern) -> dict[str, Any]:
    level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if pattern is PATTERNS["gpt2"]:
        return {**level, "use_regex": True}  # the pattern that the library has built in
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern.regex},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, {**level, "use_regex": False}]}


def read_tokenizer(
    path: Path, pattern: str | None = None, special_tokens: dict[str, int] | None = None
) -> dict[str, Any]:
    """The parsed tokenizer.json at a path, in a directory, or made from a .tiktoken file."""
    if path.is_dir():
        inside = [path / TOKENIZER_JSON, *sorted(path.glob("*.tiktoken"))]
        found = next((file for file in inside if file.is_file()), None)
        if found is None:
            raise BadTokenizer(
                f"{path.name} holds no tokenizer",
                where=str(path),
                do=f"name a directory with {TOKENIZER_JSON} or a .tiktoken file",
            )
        path = found
    data = _read(path)
    if path.suffix == ".tiktoken":
        pattern, special_tokens = _named(path, pattern, special_tokens)
        return as_json(_from_ranks(path, data, special_tokens), find_pattern(pattern))
    return check_json(data, str(path))


def check_json(data: bytes | str, where: str) -> dict[str, Any]:
    """Parse tokenizer.json and look whether it is one."""
    try:
        parsed = json.loads(data)
        model = parsed["model"]
        if not isinstance(model["vocab"], dict | list):
            raise TypeError("its vocab is neither an object nor a list")
        added = parsed.get("added_tokens") or []
        if not isinstance(added, list):
            raise TypeError("its added_tokens are no list")
        _check_ids(model["vocab"], added)
        _check_prefix(model)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadTokenizer(
            "the tokenizer is damaged",
            where=where,
            why=f"{type(error).__name__}: {error}"[:200],
            do="fetch it again, or train it again: penstock tokenizer train",
        ) from None
    return dict(parsed)


def _check_ids(vocabulary: dict[str, Any] | list[Any], added: list[Any]) -> None:
    """Look at ids before an engine does: it makes tables of as many entries as the highest says,
    and ends the process where there is no room for one of 4e9."""
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    ids = [*vocabulary.values(), *(token["id"] for token in added)]
    wrong = [number for number in ids if type(number) is not int or number < 0]
    if wrong:
        raise ValueError(f"the id {wrong[0]!r} is not a whole number from 0 on")
    highest = max(ids, default=0)
    if highest >= min(MAX_IDS, 4 * len(ids) + (1 << 22)):  # room for ids that are reserved
        raise ValueError(f"the id {highest} is too high for {len(ids)} tokens")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ValueError("two tokens of its vocabulary have one id")


def has_shared_ids(content: dict[str, Any]) -> bool:
    """Whether an added token has the id of another token: its text comes back as the other's."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    added = content.get("added_tokens") or []
    both = {**vocabulary, **{token["content"]: token["id"] for token in added}}
    return len(set(both.values())) != len(both)


def _check_prefix(model: dict[str, Any]) -> None:
    """What is merged must begin with the prefix of continuing pieces: the tokenizers library cuts
    off as many bytes without a look, and ends the process where that leaves half a character."""
    prefix = model.get("continuing_subword_prefix")
    if not prefix or not isinstance(prefix, str):
        return
    for merge in model.get("merges") or []:
        last = merge.rpartition(" ")[2] if isinstance(merge, str) else merge[1]
        if not last.startswith(prefix):
            raise ValueError(f"{last!r} is merged, and does not begin with {prefix!r}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise InputMissing(
            f"{path.name} cannot be read", where=str(path), why=str(error), do="check the path"
        ) from error


def _named(
    path: Path, pattern: str | None, special_tokens: dict[str, int] | None
) -> tuple[str, dict[str, int]]:
    """Pattern and special tokens of a rank file: as given, as its neighbour or its name says."""
    beside = path.with_name("tokenizer_config.json")
    known_pattern, known_specials = _PUBLISHED.get(path.stem, (None, {}))
    if beside.is_file():
        try:
            told = json.loads(beside.read_bytes())["penstock"]
            known_pattern, known_specials = told["pattern"], told["special_tokens"]
        except (ValueError, KeyError, TypeError):
            pass  # another tool's configuration: it says nothing of ours
    if pattern is None:
        pattern = known_pattern
    if pattern is None:
        raise BadTokenizer(
            f"{path.name} does not say how to cut text",
            where=str(path),
            why="a rank file holds neither its pattern nor its special tokens",
            do=f"give pattern=, one of {', '.join(PATTERNS)} or a regular expression",
        )
    return pattern, known_specials if special_tokens is None else special_tokens


def _from_ranks(path: Path, data: bytes, special_tokens: dict[str, int]) -> Bpe:
    """Ranks as tokens and merges: a token's merge is the last that its own encoding takes."""
    ranks: dict[bytes, int] = {}
    why = ""
    for number, line in enumerate(data.splitlines(), 1):
        try:
            written, told = line.split()
            token, rank = base64.b64decode(written, validate=True), int(told)
            if rank < 0 or not token:
                raise ValueError
        except (ValueError, binascii.Error):
            raise BadTokenizer(
                f"{path.name} is not a rank file",
                where=f"{path}, line {number}",
                why=f"it is {line[:40]!r}, not a token in base64 and its rank",
                do="fetch it again",
            ) from None
        if token in ranks:
            why = f"one token has two ranks, in line {number} again"
        ranks[token] = rank
    missing_bytes = [byte for byte in range(256) if bytes([byte]) not in ranks]
    numbers = [*ranks.values(), *special_tokens.values()]
    if missing_bytes:
        why = f"byte {missing_bytes[0]} has no token"
    elif len(set(ranks.values())) != len(ranks):
        why = "two tokens have one rank"
    elif len(set(numbers)) != len(numbers):
        why = "a special token has the id of another token"
    elif min(numbers) < 0 or max(numbers) >= MAX_IDS:
        why = "ids go from 0 to 2^24"
    if why:
        raise BadTokenizer(f"{path.name} is damaged", where=str(path), why=why, do="fetch it again")
    tokens: list[bytes | None] = [None] * (max(numbers) + 1)
    for token, rank in ranks.items():
        tokens[rank] = token
    for text, number in special_tokens.items():
        tokens[number] = text.encode()
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _encode_below(ranks, token, rank)
            if len(parts) == 2:
                merges.append((ranks[parts[0]], ranks[parts[1]]))
    return Bpe([token or b"" for token in tokens], merges, dict(special_tokens), [])


def _encode_below(ranks: dict[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """What a token is cut into when only merges below `limit` are known; two parts are enough."""
    ends = list(range(1, len(token) + 1))  # of the part that begins at each byte
    starts = list(range(len(token)))  # of the part that ends before each byte, by its last byte
    left = len(token)

    def offer(start: int) -> None:
        middle = ends[start]
        if middle < len(token):
            rank = ranks.get(token[start : ends[middle]], limit)
            if rank < limit:
                heapq.heappush(queue, (rank, start, middle, ends[middle]))

    queue: list[tuple[int, int, int, int]] = []
    for start in range(len(token)):
        offer(start)
    while queue and left > 2:
        _, start, middle, end = heapq.heappop(queue)
        if ends[start] != middle or ends[middle] != end:
            continue  # one of the two has grown since
        ends[start], ends[middle] = end, 0
        starts[end - 1] = start
        left -= 1
        offer(start)
        if start > 0:
            offer(starts[start - 1])
    parts, start = [], 0
    while start < len(token):
        parts.append(token[start : ends[start]])
        start = ends[start]
    return parts


def fingerprint(content: dict[str, Any]) -> str:
    """A hash of all that decides which ids a text gets: vocabulary, merges, pattern, specials."""
    model = dict(content["model"])
    merges = model.get("merges") or []
    model["merges"] = [m.split(" ", 1) if isinstance(m, str) else list(m) for m in merges]
    decides = {
        "model": model,
        "normalizer": content.get("normalizer"),
        "pre_tokenizer": content.get("pre_tokenizer"),
        "added_tokens": sorted(content.get("added_tokens") or [], key=lambda token: token["id"]),
    }
    try:  # 0.03 s for 65,536 tokens, where json.dumps takes 0.18
        written = msgspec.json.encode(decides, order="sorted")
    except (TypeError, ValueError):  # half a surrogate pair, which only escapes can hold
        written = json.dumps(decides, sort_keys=True).encode()
    return hashlib.sha256(written).hexdigest()


def _write_whole(path: Path, data: bytes) -> None:
    with replacing(path, sync=True) as file:
        file.write(data)
