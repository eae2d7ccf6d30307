"""Text into token ids and back, a column at a time.

In:    a tokenizer (file, directory, object); Arrow columns of text
Out:   Arrow columns of uint16 or uint32 lists; byte offsets of tokens; text
Keeps: the ids of the reference engine; special tokens in content as content, unless allowed
Never: makes a Python object for a document or a token on the fast path
"""

import functools
import os
import threading
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays import Bytes, Int64s, end_to_end, offsets_of
from penstock.cache.disk import Cache
from penstock.cache.open import open_cache
from penstock.errors import BadConfig, BadDocument, BadInput, BadTokenizer
from penstock.kernels import byte_buffer
from penstock.options import checked_path
from penstock.tokenize.bpe import byte_alphabet
from penstock.tokenize.engines import (
    Engine,
    Ids,
    Reference,
    UserObject,
    encode_named,
    fast_engine,
    probe_texts,
)
from penstock.tokenize.patterns import find_pattern
from penstock.tokenize.save import check_json, fingerprint, has_shared_ids, read_tokenizer

BATCH_BYTES: Final = 16 << 20
"""Text handed to an engine at once: its output is then cut down to uint16 while it is warm."""


_making = threading.RLock()
"""Held by a thread that makes an engine."""


def _unlock() -> None:
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_unlock)  # the thread that held it stayed behind


def _made_again(
    content: dict[str, Any] | None, user_object: Any, engine: str, parallel: bool
) -> "Tokenizer":
    return Tokenizer(
        content, user_object=user_object, engine=engine, parallel=parallel, ready=False
    )


class Tokenizer:
    """Encodes and decodes. Make one with `Tokenizer.load`."""

    def __init__(
        self,
        content: dict[str, Any] | None,
        *,
        user_object: Any = None,
        engine: str = "auto",
        parallel: bool = True,
        ready: bool = True,
    ) -> None:
        if engine not in ("auto", "gigatoken", "tokenizers"):
            raise BadConfig(
                f"there is no engine {engine!r}", do="choose from auto, gigatoken, tokenizers"
            )
        self._content = content
        self._user_object = user_object
        self._wanted = engine
        self._parallel = parallel
        self._engines: dict[frozenset[str], Engine] = {}
        self._references: dict[frozenset[str], Reference] = {}
        self.slow_because = ""
        """Why the reference engine is used where a faster one was wanted."""
        if content is None:
            self._init_object()
        else:
            try:
                self._init_content(content)
            except (TypeError, AttributeError, KeyError, ValueError, OverflowError, IndexError,
                    MemoryError) as error:  # fmt: skip
                raise BadTokenizer(
                    "the tokenizer is damaged",
                    why=f"{type(error).__name__}: {error}"[:200],
                    do="fetch it again, or train it again: penstock tokenizer train",
                ) from None
        if ready:
            self._engine(frozenset())

    def __reduce__(self) -> Any:
        """A copy in another process makes engines of its own."""
        return _made_again, (self._content, self._user_object, self._wanted, self._parallel)

    @classmethod
    def load(
        cls,
        source: Any,
        *,
        pattern: str | None = None,
        special_tokens: dict[str, int] | None = None,
        engine: str = "auto",
        parallel: bool = True,
        ready: bool = True,
    ) -> "Tokenizer":
        """From a tokenizer.json, a .tiktoken file, a directory with one, the `content` of another
        one, a tokenizer of the tokenizers or transformers library, or any object with `encode`.

        `pattern` and `special_tokens` are for .tiktoken files, which carry neither. `engine` is
        "auto" (the fastest that agrees with the reference), "gigatoken" or "tokenizers". Without
        `ready` the engine is not made before the first text comes.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, dict):
            return cls(source, engine=engine, parallel=parallel, ready=ready)
        if isinstance(source, str | os.PathLike):
            content = read_tokenizer(
                Path(checked_path("the tokenizer", source)), pattern, special_tokens
            )
            return cls(content, engine=engine, parallel=parallel, ready=ready)
        inner = getattr(source, "backend_tokenizer", source)
        if hasattr(inner, "to_str"):
            content = check_json(inner.to_str(), type(source).__name__)
            return cls(content, engine=engine, parallel=parallel)
        if callable(getattr(source, "encode", None)):
            return cls(None, user_object=source, engine=engine, parallel=parallel)
        raise BadTokenizer(
            f"{type(source).__name__} is not a tokenizer",
            do="give a path, a tokenizer of tokenizers or transformers, or an object with encode",
        )

    @property
    def content(self) -> dict[str, Any]:
        """The parsed tokenizer.json, of which another process makes the same tokenizer."""
        if self._content is None:
            raise BadConfig(
                f"{type(self._user_object).__name__} cannot be sent to other processes",
                why="it is a Python object, not a tokenizer.json",
                do="run with workers=1, or give a path or a tokenizer of the tokenizers library",
            )
        return self._content

    @property
    def engine(self) -> str:
        """The engine in use."""
        return self._engine(frozenset()).name

    @property
    def dtype(self) -> npt.DTypeLike:
        """The narrowest type that holds every id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode(self, text: str | bytes, *, allowed_special: Collection[str] = ()) -> Ids:
        """The ids of one text. Special tokens in it are content, but for the allowed ones."""
        raw = _valid_utf8(text)
        data = np.frombuffer(raw, np.uint8)
        engine = self._engine(self._allowed(allowed_special))
        ids, _ = encode_named(engine, data, np.array([0, len(raw)], np.int64))
        self._check_object(ids)
        return ids

    def encode_rows(
        self, data: Bytes, at: Int64s, *, allowed_special: Collection[str] = ()
    ) -> tuple[Ids, Int64s]:
        """The ids of the texts data[at[k]:at[k + 1]] end to end, and where each text's begin.

        For texts that are known to be UTF-8: it is not checked again.
        """
        ids, ends = encode_named(self._engine(self._allowed(allowed_special)), data, at)
        self._check_object(ids)
        return ids, ends

    @property
    def pattern_name(self) -> str:
        """The name of the pattern that cuts text before merging, if it is a known one and
        nothing but the pattern decides where tokens end."""
        content = self._content or {}
        step: dict[str, Any] = content.get("pre_tokenizer") or {}
        listed = step.get("pretokenizers") or []
        steps: list[dict[str, Any]] = listed if step.get("type") == "Sequence" else [step]
        if any(not token["special"] for token in content.get("added_tokens") or []):
            return ""
        if [s.get("type") for s in steps] == ["ByteLevel"]:
            return "gpt2" if steps[0].get("use_regex", True) else ""
        if [s.get("type") for s in steps] != ["Split", "ByteLevel"] or steps[1].get("use_regex"):
            return ""
        regex = (steps[0].get("pattern") or {}).get("Regex")
        isolated = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        if not isolated or not isinstance(regex, str) or regex.isidentifier():
            return ""
        found = find_pattern(regex)
        return found.name if found.is_scanned else ""

    def encode_column(
        self,
        column: pa.Array | pa.ChunkedArray,
        *,
        allowed_special: Collection[str] = (),
        cache: Cache | str | os.PathLike[str] | None = None,
    ) -> pa.ChunkedArray:
        """A column of texts as a column of token lists; a null stays a null.

        What was encoded before comes from the cache, if one is given or its address.
        """
        if isinstance(cache, str | os.PathLike):
            cache = _opened_cache(os.fspath(cache))
        engine = self._engine(self._allowed(allowed_special))
        kind = pa.list_(pa.uint16() if self.vocab_size <= 1 << 16 else pa.uint32())
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        about = f"{self.fingerprint} {sorted(allowed_special)}"
        found = []
        for chunk in chunks:
            for part in _batches(chunk):
                key = _cache_key(part, about) if cache is not None else ""
                held = cache.get(key) if cache is not None else None
                if (
                    held is not None
                    and (tokens := _unpack(held, part, kind, self.vocab_size)) is not None
                ):
                    found.append(tokens)
                    continue
                try:
                    tokens = self._encode_part(engine, part, kind)
                except BadDocument as error:
                    error.row += sum(map(len, found))
                    raise
                if cache is not None:
                    cache.put(key, _pack(tokens))
                found.append(tokens)
        return pa.chunked_array(found, kind)

    def token_bytes(self, ids: npt.ArrayLike) -> Int64s:
        """How many bytes of text each token stands for."""
        numbers = np.asarray(ids)
        if self._content is None:
            raise BadTokenizer(
                "this tokenizer does not say what its tokens are", do="give a tokenizer.json"
            )
        numbers = numbers.astype(np.int64) if numbers.size == 0 else numbers
        self._check_ids(numbers)
        lengths: Int64s = self._lengths[numbers]
        return lengths

    def offsets(self, text: str | bytes) -> tuple[Ids, Int64s]:
        """Ids of a text and the byte at which each begins, and at the end the text's size."""
        raw = _valid_utf8(text)
        ids = self.encode(raw)
        if self.is_lossless:
            return ids, offsets_of(self._lengths[ids])
        if self._content is None:
            raise BadTokenizer(
                "this tokenizer does not say where its tokens come from",
                do="give a tokenizer.json for offsets",
            )
        found = self._reference(frozenset()).tokenizer.encode(
            raw.decode(), add_special_tokens=False
        )
        widths = np.cumsum([0, *(len(letter.encode()) for letter in raw.decode())])
        starts = [widths[start] for start, _ in found.offsets]
        return ids, np.array([*starts, len(raw)], np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The bytes of ids: for a byte-level tokenizer exactly those that were encoded."""
        numbers = np.asarray(ids, np.int64).ravel()
        if self._content is None:
            decoded = self._user_object.decode(numbers.tolist())
            return decoded if isinstance(decoded, bytes) else str(decoded).encode()
        self._check_ids(numbers)
        if self.is_lossless:
            return b"".join([self._bytes[number] for number in numbers.tolist()])
        text: str = self._reference(frozenset()).tokenizer.decode(
            numbers.tolist(), skip_special_tokens=False
        )
        return text.encode()

    def _init_content(self, content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        names: dict[str, int] = (
            dict(vocabulary)
            if isinstance(vocabulary, dict)
            else {entry[0]: number for number, entry in enumerate(vocabulary)}
        )
        added = content.get("added_tokens") or []
        try:
            self.special_tokens = {
                str(token["content"]): int(token["id"]) for token in added if token["special"]
            }
            if not all(isinstance(token["content"], str) for token in added):
                raise TypeError("an added token is no text")
            names.update((str(token["content"]), int(token["id"])) for token in added)
        except (KeyError, TypeError, ValueError) as error:
            raise BadTokenizer(
                "the tokenizer's added tokens are damaged", why=str(error), do="fetch it again"
            ) from None
        if not names:
            raise BadTokenizer("the tokenizer has no tokens", do="train it again")
        self.vocab_size = max(names.values()) + 1
        self.fingerprint = fingerprint(content)
        self.is_lossless = _is_byte_level(content) and not has_shared_ids(content)
        self._names = names
        self._written = frozenset(str(token["content"]) for token in added)

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        """What each token stands for."""
        letters = frozenset(byte_alphabet())
        to_bytes = {ord(letter): byte for byte, letter in enumerate(byte_alphabet())}
        found = [b""] * self.vocab_size
        for name, number in self._names.items():
            if self.is_lossless and name not in self._written and letters.issuperset(name):
                found[number] = name.translate(to_bytes).encode("latin-1")
            else:
                found[number] = name.encode("utf-8", "surrogatepass")
        return found

    @functools.cached_property
    def _lengths(self) -> Int64s:
        """How many bytes each token stands for."""
        return np.array([len(text) for text in self._bytes], np.int64)

    def _init_object(self) -> None:
        import hashlib

        tokenizer = self._user_object
        size = getattr(tokenizer, "vocab_size", None) or getattr(tokenizer, "n_vocab", None)
        if callable(size):
            size = size()
        self.vocab_size = int(size) if size else 1 << 32
        self.special_tokens = {}
        self.is_lossless = False
        told = getattr(tokenizer, "fingerprint", None)
        if isinstance(told, str):
            self.fingerprint = told
            return
        ids, at = UserObject(tokenizer).encode_rows(
            *end_to_end([text.encode() for text in probe_texts({})])
        )
        seen = f"{type(tokenizer).__qualname__} {self.vocab_size} ".encode()
        self.fingerprint = hashlib.sha256(seen + ids.tobytes() + at.tobytes()).hexdigest()

    def _allowed(self, allowed_special: Collection[str]) -> frozenset[str]:
        if isinstance(allowed_special, str):
            raise BadConfig("allowed_special is one text", do='give a set, e.g. {"<|endoftext|>"}')
        unknown = sorted(set(allowed_special) - set(self.special_tokens))
        if unknown:
            raise BadConfig(
                f"{unknown[0]!r} is not a special token of this tokenizer",
                do=f"choose from {', '.join(self.special_tokens) or 'none: it has none'}",
            )
        return frozenset(allowed_special)

    def _engine(self, allowed: frozenset[str]) -> Engine:
        if allowed in self._engines:
            return self._engines[allowed]
        if self._content is None:
            self._engines[allowed] = UserObject(self._user_object)
            return self._engines[allowed]
        with _making:  # one thread makes it, others wait
            return self._engines.get(allowed) or self._make_engine(allowed)

    def _make_engine(self, allowed: frozenset[str]) -> Engine:
        reference = self._reference(allowed)
        engine: Engine = reference
        if self._wanted != "tokenizers":
            content = self._content_with(allowed)
            engine, why = fast_engine(content, reference, parallel=self._parallel)
            if why and self._wanted == "gigatoken":
                raise BadTokenizer(why, do='use engine="auto": the reference encodes it, slower')
            if why and not self.slow_because:
                self.slow_because = why
                warnings.warn(f"penstock encodes slowly: {why}", stacklevel=3)
        self._engines[allowed] = engine
        return engine

    def _reference(self, allowed: frozenset[str]) -> Reference:
        if allowed not in self._references:
            self._references[allowed] = Reference(self._content_with(allowed))
        return self._references[allowed]

    def _content_with(self, allowed: frozenset[str]) -> dict[str, Any]:
        """The tokenizer without its special tokens, but for these: what is not there is content."""
        assert self._content is not None
        added = self._content.get("added_tokens") or []
        kept = [token for token in added if not token["special"] or token["content"] in allowed]
        # templates would add special tokens of their own, and name some that are gone; what is
        # said there of the length of model inputs is not about text
        without = dict.fromkeys(("post_processor", "truncation", "padding"))
        return {**self._content, "added_tokens": kept, **without}

    def _encode_part(self, engine: Engine, part: pa.Array, kind: pa.DataType) -> pa.Array:
        data, at = _text_of(pc.fill_null(part, "") if part.null_count else part)
        ids, ends = encode_named(engine, data, at)
        if len(ids) >= 1 << 31:
            raise BadInput("a text has more than 2^31 tokens", do="cut it into documents first")
        self._check_object(ids)
        values = _narrowed(ids, kind.value_type.to_pandas_dtype())
        offsets = ends.astype(np.int32)
        content = pa.Array.from_buffers(kind.value_type, len(values), [None, pa.py_buffer(values)])
        valid = None
        if part.null_count:
            valid = pa.py_buffer(np.packbits(part.is_valid().to_numpy(False), bitorder="little"))
        return pa.ListArray.from_buffers(
            kind, len(part), [valid, pa.py_buffer(offsets)], part.null_count, children=[content]
        )

    def _check_object(self, ids: Ids) -> None:
        if self._content is None and len(ids) and int(ids.max()) >= self.vocab_size:
            raise BadTokenizer(
                f"the tokenizer gave id {int(ids.max())}",
                why=f"it says that it has {self.vocab_size} tokens",
                do="fix its vocab_size",
            )

    def _check_ids(self, numbers: npt.NDArray[Any]) -> None:
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.vocab_size):
            wrong = numbers.min() if numbers.min() < 0 else numbers.max()
            raise BadInput(
                f"id {int(wrong)} is not in the vocabulary",
                why=f"ids go from 0 to {self.vocab_size - 1}",
                do="was this encoded with another tokenizer?",
            )


def _is_byte_level(content: dict[str, Any]) -> bool:
    """Whether a token's bytes are the text's, so that lengths add up to offsets."""
    pre: dict[str, Any] = content.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers") or [pre]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    added = content.get("added_tokens") or []
    return (
        content["model"].get("type", "BPE") == "BPE"
        and all(letter in content["model"]["vocab"] for letter in byte_alphabet())
        and not any(token.get("lstrip") or token.get("rstrip") for token in added)
        and not content.get("normalizer")
        and len(levels) == 1
        and not levels[0].get("add_prefix_space")
        and not content["model"].get("continuing_subword_prefix")
        and not content["model"].get("end_of_word_suffix")
        and not any(
            step.get("behavior") == "Removed"
            or step.get("type") not in ("Split", "ByteLevel", "Digits")
            for step in steps
        )
    )


def _narrowed(ids: Ids, dtype: Any) -> npt.NDArray[Any]:
    """The ids in a narrower type, on huge pages, which are touched faster than small ones."""
    if ids.dtype == dtype or len(ids) < 1 << 16:
        return ids.astype(dtype, copy=False)
    size = len(ids) * np.dtype(dtype).itemsize
    narrow: npt.NDArray[Any] = byte_buffer(size)[:size].view(dtype)
    narrow[:] = ids
    return narrow


def _batches(chunk: pa.Array) -> Iterator[pa.Array]:
    """A chunk in slices of about BATCH_BYTES of text; what is not text is refused."""
    kind = chunk.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise BadInput(f"a column of {kind} is not text", do="give a column of strings")
    if chunk.null_count:
        chunk = pc.if_else(chunk.is_valid(), chunk, None)  # what lies under a null is nothing
    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid as error:
        raise BadInput(
            "the column holds text that is not UTF-8",
            why=str(error),
            do="decode it with errors='replace' first",
        ) from None
    _, at = _text_of(chunk)
    first = 0
    while first < len(chunk):
        last = int(np.searchsorted(at, at[first] + BATCH_BYTES, side="right")) - 1
        last = min(max(last, first + 1), len(chunk))
        yield chunk.slice(first, last - first)
        first = last


def _text_of(chunk: pa.Array) -> tuple[Bytes, Int64s]:
    """The bytes of a string array and where each row begins in them, without a copy."""
    _, offsets, values = chunk.buffers()
    width = np.int64 if pa.types.is_large_string(chunk.type) else np.int32
    if offsets is None or len(chunk) == 0:
        return np.zeros(0, np.uint8), np.zeros(len(chunk) + 1, np.int64)
    at = np.frombuffer(offsets, width)[chunk.offset : chunk.offset + len(chunk) + 1]
    first, last = int(at[0]), int(at[-1])
    data = np.frombuffer(values, np.uint8) if values is not None else np.zeros(0, np.uint8)
    return data[first:last], at.astype(np.int64) - first


def _valid_utf8(text: str | bytes) -> bytes:
    try:
        if isinstance(text, str):
            return text.encode()
        text.decode()
        return text
    except UnicodeError as error:
        raise BadInput(
            "the text is not UTF-8", why=str(error), do="decode it with errors='replace' first"
        ) from None


# The token cache: a column's tokens as bytes


@functools.lru_cache(maxsize=8)
def _opened_cache(address: str) -> Cache:
    return open_cache(address)


def _cache_key(part: pa.Array, about: str) -> str:
    import xxhash

    data, at = _text_of(pc.fill_null(part, "") if part.null_count else part)
    digest = xxhash.xxh3_128(about.encode())
    digest.update(data.data)
    digest.update(at.data)
    if part.null_count:
        digest.update(repr(part.is_null().to_pylist()).encode())
    return "tokens-" + digest.hexdigest()


def _pack(tokens: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([tokens], ["tokens"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _unpack(held: bytes, part: pa.Array, kind: pa.DataType, vocab_size: int) -> pa.Array | None:
    """What `_pack` wrote, or None if it is anything else: a cache is never believed."""
    try:
        tokens = pa.ipc.open_stream(held).read_next_batch().column(0)
        if tokens.type != kind or len(tokens) != len(part):
            return None
        tokens.validate(full=True)  # offsets that fall or leave the values would be followed
        ids = tokens.flatten()
        if ids.null_count or not tokens.is_null().equals(part.is_null()):
            return None
        highest = pc.max(ids).as_py()
    except (pa.ArrowException, StopIteration, OSError, IndexError, ValueError):
        return None
    return tokens if highest is None or highest < vocab_size else None
