"""Counts against a plain regex, whatever the chunks, buffers, formats, threads and memory."""

import gc
import gzip
import itertools
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig, BadInput, InputDamaged, InputMissing, InputReplaced
from penstock.ingest.formats import Piece, ReadConfig
from penstock.tokenize import chunks as chunks_module
from penstock.tokenize import counts
from penstock.tokenize import pretokenize as module
from penstock.tokenize.chunks import SpecialTokens, chunk_boundaries, optimal_chunk_bytes
from penstock.tokenize.corpus import Corpus, Tally, TextRange
from penstock.tokenize.counts import CountTable, PretokenCounts, Spill, combine
from penstock.tokenize.patterns import PATTERNS, find_pattern
from penstock.tokenize.pretokenize import pretokenize, stream_stories_from_chunk
from penstock.work.events import Event, Events

MARK: Final = "\ufffd".encode()
END: Final = "<|endoftext|>"
TINY_GB: Final = 1e-6
"""So little that every table has the least share, which holds about 5,000 pretokens."""

WORDS: Final = r"\p{L}+|\p{N}+|\s+|[^\s\p{L}\p{N}]+"
"""A pattern without a scanner."""

NASTY: Final = (
    "It's   a\n\n  WE'LL\r\n"
    + END
    + "x²34567 née 日本語! "
    + " " * 40
    + "\t\n"
    + "…/" * 12
    + "\n/A\u0301BCd'S\u3000\n"
    + END
    + END
    + "?é"
).encode() + b"\xff \xe2\x82x\xf0\x9f\x98\n7\xc3"


# What is expected, from `re` and `regex` alone.


def plain_counts(
    raw: bytes, specials: Sequence[str] = (), pattern: str = "cl100k"
) -> tuple[Counter[bytes], dict[str, int]]:
    """The counts of one text, and those of its special tokens."""
    text = raw.decode("utf-8", "replace")
    parts = [text]
    if specials:
        longest_first = sorted(specials, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    found = Counter(parts[1::2])
    scanner = regex.compile(PATTERNS[pattern].regex if pattern in PATTERNS else pattern)
    counts = Counter(
        match.group().encode() for part in parts[::2] for match in scanner.finditer(part)
    )
    del counts[b""]
    return counts, {special: found[special] for special in specials}


def invalid(raw: bytes) -> int:
    return raw.decode("utf-8", "replace").encode().count(MARK) - raw.count(MARK)


def check(
    path: Path, texts: Sequence[bytes], specials: Sequence[str] = (), **options: Any
) -> PretokenCounts:
    """The counts of `path` are those of `texts`, each on its own."""
    expected: Counter[bytes] = Counter()
    expected_specials: Counter[str] = Counter()
    for text in texts:
        counts, found = plain_counts(text, specials, options.get("pattern", "cl100k"))
        expected += counts
        expected_specials.update(found)
    options.setdefault("num_processes", 1)
    counted = pretokenize(path, specials, **options)
    assert dict(counted) == expected, options
    stats = counted.stats
    assert stats["special_tokens"] == {text: expected_specials[text] for text in specials}, options
    assert stats["pretokens"] == expected.total() == counted.total
    assert stats["distinct"] == len(expected) == len(counted)
    return counted


STREAM: Final = ReadConfig(max_document_bytes=1)
"""Every text of two bytes or more is too long for a document."""


def as_document(raw: bytes) -> bytes:
    """The text of a file without a NUL, by the rule of decoding: UTF-8, or else Latin-1."""
    try:
        raw.decode()
        return raw
    except UnicodeDecodeError:
        return raw.decode("latin-1").encode()


def check_text(
    path: Path, raw: bytes, specials: Sequence[str] = (), **options: Any
) -> PretokenCounts:
    """The counts of a text file: as a document, and as a stream if it were too long for one."""
    document = as_document(raw)
    counted = check(path, [document], specials, **options)
    assert counted.stats["invalid_utf8"] == 0
    assert counted.stats["decoded"] == {"utf-8" if document == raw else "latin-1": 1}
    if len(raw) > 1:
        counted = check(path, [raw], specials, read=STREAM, **options)
        assert counted.stats["invalid_utf8"] == invalid(raw)
        assert counted.stats["text_bytes"] == len(raw)
    return counted


def check_refused(path: Path, raw: bytes) -> None:
    """An empty text, or one with a NUL, is no document, however long it is."""
    for read in (None, STREAM):
        with pytest.raises(BadInput) as caught:
            pretokenize(path, [], 1, read=read)
        assert caught.value.what == f"{path.name} holds no document"
        assert caught.value.where == str(path)
        assert caught.value.why == f"refused: {'binary' if raw else 'empty_text'} 1 ({path})"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pretokenize")


def write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


# Chunks and buffers


@pytest.mark.parametrize("pattern", [*PATTERNS, WORDS])
def test_every_buffer_size(tmp_path: Path, pattern: str) -> None:
    path = write(tmp_path / "a.txt", NASTY)
    for size in [*range(1, 70), len(NASTY) - 1, len(NASTY), len(NASTY) + 1]:
        counted = check_text(path, NASTY, [END], pattern=pattern, buffer_bytes=size)
        assert counted.stats["invalid_utf8"] == invalid(NASTY) == 4
        assert counted.stats["text_bytes"] == len(NASTY)


@pytest.mark.parametrize("pattern", [*PATTERNS, WORDS])
def test_every_chunk_size(tmp_path: Path, pattern: str) -> None:
    path = write(tmp_path / "a.txt", NASTY)
    chunks = set()
    for size in range(1, len(NASTY) + 2, 3):
        counted = check_text(path, NASTY, [END], pattern=pattern, chunk_bytes=size, num_processes=2)
        assert counted.stats["invalid_utf8"] == invalid(NASTY)
        chunks.add(counted.stats["chunks"])
    assert len(chunks) > 2


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_chunk_size_without_a_split_token(tmp_path: Path, pattern: str) -> None:
    raw = b"a\nb\r\nc \n1\n\n2\n \n3!\n4\n!\n5?\n\n6'\ns\n\xff\n7 \t\n8\r9\n\ra/\nb//\n\nc" * 2
    path = write(tmp_path / "a.txt", raw)
    most = 0
    for size in range(1, len(raw) + 1, 2):
        counted = check_text(path, raw, pattern=pattern, chunk_bytes=size, buffer_bytes=7)
        most = max(most, counted.stats["chunks"])
    assert most > 5


SPECIALS: Final = {
    "prefixes": (["<", "<<", "<<<x"], b"a<b<<c<<<d<<<x<<<<x<<<<<<x <"),
    "overlap itself": (["<<"], b"<<<a<<<<b<\n<c<<<<<\nd<<"),
    "overlap each other": (["ab", "bc", "cab"], b"abc\nabcab\nbcabcabab\ncaabbcc\nab"),
    "inside another": (["abc", "b"], b"abc\nb ab bc aabcc\nabcb\nbab"),
    "newlines": (["\n\n", "a\nb", "\r"], b"x\n\n\ny a\nb\na\r\nb\n\na\nbb\n\n\n\n z"),
    "beyond ASCII": (["é", "→x", "日本"], "né→→x日日本語\ne\u0301é日\nx→".encode() + b"\xc3\n\xa9"),
    "a replacement": (["\ufffd"], "a\ufffdb\nc".encode() + b"\xffd\xe2\x82e\nf\xc3"),
    "with a replacement": (["<\ufffd>"], b"a<\xff>b\nc<\xef\xbf\xbd>d<\xe2\x82>\n<\xff\xff>e<\xf0"),
    "in words": (["e", " t"], b"the tree\n tee the e  t\ntt e"),
    "a space": ([" "], b"a  b\n c \n\n d"),
    "an apostrophe": (["'", "'s"], b"it's 's'S ''s\n's"),
    "long": (["=" * 50, "=" * 49 + "-"], b"=" * 99 + b"-\n" + b"=" * 120 + b"\nx" + b"=" * 49),
    "never there": (["<|nowhere|>"], b"a b\nc <|nowhere|\nd <|nowhere|"),
}


@pytest.mark.parametrize("name", SPECIALS)
def test_special_tokens(tmp_path: Path, name: str) -> None:
    specials, raw = SPECIALS[name]
    path = write(tmp_path / "a.txt", raw)
    for order in (specials, specials[::-1]):
        check_text(path, raw, order)
        for size in range(1, 30):
            check_text(path, raw, order, buffer_bytes=size)
            check_text(path, raw, order, chunk_bytes=size, buffer_bytes=5)
    check_text(path, raw, specials, pattern="gpt2", chunk_bytes=2)
    check_text(path, raw, specials, pattern="o200k", chunk_bytes=2, buffer_bytes=3)


@pytest.mark.parametrize("name", SPECIALS)
def test_special_tokens_with_a_pattern_without_scanner(tmp_path: Path, name: str) -> None:
    specials, raw = SPECIALS[name]
    path = write(tmp_path / "a.txt", raw)
    for size in (1, 2, 3, 5, 8, 1000):
        check_text(path, raw, specials, pattern=WORDS, buffer_bytes=size, chunk_bytes=size)


@settings(max_examples=400, deadline=None)
@given(
    raw=st.one_of(
        st.text(st.sampled_from("ab<\n\r '1!/é"), max_size=60).map(str.encode),
        st.lists(st.sampled_from([b"a", b"A", b"\n", b" ", b"<", b"\xff", b"\xe2", b"\x82", b"'",
                                  b"s", b"1", "\u0301".encode(), "中".encode()]),
                 max_size=60).map(b"".join),
    ),
    specials=st.lists(
        st.text(st.sampled_from("ab<\n é\ufffd"), min_size=1, max_size=3), max_size=3, unique=True
    ),
    chunk=st.integers(1, 30),
    buffer=st.integers(1, 30),
    pattern=st.sampled_from([*PATTERNS, *PATTERNS, WORDS]),
)  # fmt: skip
@example(raw=b"\na", specials=[], chunk=1, buffer=1, pattern="cl100k")
def test_anything(
    folder: Path, raw: bytes, specials: list[str], chunk: int, buffer: int, pattern: str
) -> None:
    path = write(folder / "anything.txt", raw)
    if not raw:
        check_refused(path, raw)
        return
    check_text(path, raw, specials, pattern=pattern, chunk_bytes=chunk, buffer_bytes=buffer)


def test_several_threads_and_files(tmp_path: Path) -> None:
    dice = random.Random(3)
    raws = []
    for number in range(5):
        letters = dice.choices("ab c\n1'é<|x>", k=20_000)
        raws.append("".join(letters).encode() + END.encode() * number)
        write(tmp_path / f"{number}.txt", raws[-1])
    for threads in (1, 2, 4, 7):
        counted = check(
            tmp_path, raws, [END, "<|"], num_processes=threads, chunk_bytes=3000, buffer_bytes=512
        )
        assert counted.stats["threads"] == threads
        assert counted.stats["files"] == 5
        assert counted.stats["chunks"] >= 5
        assert counted.stats["text_bytes"] == sum(map(len, raws))


# Shapes of text


@pytest.mark.parametrize("pattern", [*PATTERNS, WORDS])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        bytes(5000),
        b"x" * 5000,
        b" " * 5000,
        b"\r\n" * 2500,
        b"7" * 5000,
        b"/" * 5000 + b"\n" * 50,
        "中".encode() * 2000,
        "A\u0301".encode() * 1500 + b"'s",
        b"\xff" * 3000,
        b"one long line " * 400,
        b"\xef\xbb\xbfa BOM",
    ],
    ids=lambda raw: repr(raw[:6]),
)
def test_shapes_of_text(tmp_path: Path, raw: bytes, pattern: str) -> None:
    # most are one pretoken much longer than the buffer
    path = write(tmp_path / "a.txt", raw)
    if not raw or 0 in raw:
        check_refused(path, raw)
        return
    check_text(path, raw, pattern=pattern)
    check_text(path, raw, [END], pattern=pattern, buffer_bytes=64, chunk_bytes=100)
    check_text(path, raw, [END, "\n"], pattern=pattern, buffer_bytes=37)


def test_a_long_pretoken_is_not_scanned_anew_for_every_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 64 MB of one letter took 4.2 s, 32 MB 1.1 s: a GB would take a quarter of an hour
    scanned = 0
    count_text = counts._count_text

    def counting(*arguments: Any) -> Any:
        nonlocal scanned
        scanned += arguments[2] - arguments[1]
        return count_text(*arguments)

    monkeypatch.setattr(counts, "_count_text", counting)
    raw = b"x" * (256 << 10)
    check(write(tmp_path / "a.txt", raw), [raw], buffer_bytes=1 << 10, chunk_bytes=1 << 10)
    assert scanned < 10 * len(raw)


def run_of(path: Path, **options: Any) -> Any:
    """A run on inputs that are known, and not yet read."""
    config = module._Config(
        **{
            "pattern": find_pattern("cl100k"),
            "specials": SpecialTokens([]),
            "workers": 1,
            "buffer_bytes": 1 << 20,
            "max_bytes": 1 << 30,
            "chunk_bytes": None,
            **options,
        }
    )
    corpus = Corpus([path], ReadConfig(piece_bytes=config.piece_bytes), cut=config.cut)
    return module._Run(config, corpus, None, Events("pretokenize"))


def test_a_file_that_changes_after_it_was_found_is_noticed(tmp_path: Path) -> None:
    for later in (b"one", b"one two three four"):
        path = write(tmp_path / "a.txt", b"one two three")
        run = run_of(path)
        path.write_bytes(later)
        with pytest.raises(InputReplaced, match=r"a\.txt is not as long as it was"):
            run.run()


@pytest.mark.parametrize("later", [b"one two three four", b"one", b"One two\xff"])
def test_a_long_text_that_changes_after_it_was_looked_at_is_noticed(
    tmp_path: Path, later: bytes
) -> None:
    path = write(tmp_path / "a.txt", b"one two three")
    os.utime(path, (1, 1))
    run = run_of(path, chunk_bytes=8)
    look = run._corpus._look

    def change(text: Any) -> Any:
        found = look(text)
        path.write_bytes(later)
        return found

    run._corpus._look = change
    with pytest.raises(InputReplaced, match=r"a\.txt (has changed|is not the file)"):
        run.run()


def test_a_stream_that_grows_is_read_as_it_was_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one two thr")
    corpus = Corpus([path], STREAM)
    (text,) = corpus.work(corpus.inputs[0])
    assert isinstance(text, TextRange)
    path.write_bytes(b"one two three four")
    with text.open() as reader:
        buffer = bytearray(100)
        assert bytes(buffer[: reader.read_into(memoryview(buffer))]) == b"one two thr"
    text.check()


# Patterns without a scanner


@pytest.mark.parametrize("pattern", ["x*", "", r"(?<=a)b|c", r"(\w)(\w)?", r"(?i)A+|(?s:.)", r"\b"])
def test_a_pattern_of_ones_own(tmp_path: Path, pattern: str) -> None:
    raw = b"xxab cAbbx\xffxa\nabc<ab><ab>b\xc3"
    path = write(tmp_path / "a.txt", raw)
    for size in (1, 3, 100):
        check_text(path, raw, ["<ab>"], pattern=pattern, buffer_bytes=size)
        counted = check_text(path, raw, pattern=pattern, buffer_bytes=size, chunk_bytes=size)
        assert counted.stats["invalid_utf8"] == 2


def test_the_regex_of_a_scanner_gives_the_same_through_the_regex_module(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", NASTY)
    for name, pattern in PATTERNS.items():
        by_kernel = pretokenize(path, [END], 1, pattern=name)
        by_regex = pretokenize(path, [END], 1, pattern=f"(?:{pattern.regex})")
        assert not find_pattern(f"(?:{pattern.regex})").is_scanned
        assert by_kernel == by_regex
        for key in ("special_tokens", "invalid_utf8", "pretokens", "distinct", "text_bytes"):
            assert by_kernel.stats[key] == by_regex.stats[key], key


# Formats


@pytest.mark.parametrize("pattern", ["cl100k", "gpt2", WORDS])
def test_gzip_and_zstd(tmp_path: Path, pattern: str) -> None:
    half = len(NASTY) // 2
    write(tmp_path / "a.txt.gz", gzip.compress(NASTY[:half]) + gzip.compress(NASTY[half:]))
    write(tmp_path / "b.zst", zstandard.compress(NASTY))
    for name in ("a.txt.gz", "b.zst"):
        for size in (1, 10, 1 << 20):
            path = tmp_path / name
            counted = check_text(path, NASTY, [END], pattern=pattern, buffer_bytes=size)
            assert counted.stats["chunks"] == 1
            check_text(path, NASTY, [END], pattern=pattern, buffer_bytes=size, chunk_bytes=9)


def json_texts(raw: bytes, field: str = "text") -> tuple[list[bytes], Counter[str]]:
    """The texts of JSON lines, and why the others are none."""
    texts, rejected = [], Counter[str]()
    lines = raw.split(b"\n")
    for number, line in enumerate(lines):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            rejected["invalid_utf8" if line.startswith(b"{") else "invalid_json"] += 1
            continue
        if number == 0:
            text = text.removeprefix("\ufeff")
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            rejected["half_line" if number == len(lines) - 1 else "invalid_json"] += 1
            continue
        if not isinstance(value, dict):
            rejected["not_an_object"] += 1
        elif field not in value:
            rejected["no_text"] += 1
        elif not isinstance(value[field], str):
            rejected["text_not_a_string"] += 1
        elif not value[field]:
            rejected["empty_text"] += 1
        else:
            texts.append(value[field].encode())
    return texts, rejected


LINES: Final = (
    b'{"text":"Hello  world\\n\\n it\\u0027s \\ud83d\\ude00 12345"}\n'
    b'{"id":1, "text": "a <|endoftext|>b<|endof" }\r\n'
    b"\n"
    b"not json\n"
    b"[1]\n"
    b'{"txt":"x"}\n'
    b'{"text":7}\n'
    b'{"text":""}\n'
    b'{"text":"bad \xff\xe2\x82 utf-8\xc3"}\n'
    b'{"text":"text|>\\ufffd"}\n'
    b'\xff{"text":"no"}\n'
    b'{"text":"'
    + b"long line " * 600
    + b'"}\n'
    + "\ufeff".encode()
    + b'{"text":"a BOM where none may be"}\n'
    + b'{"text":"\xe6\x97\xa5\xe6\x9c\xac last"}'
)


@pytest.mark.parametrize("pattern", ["cl100k", "o200k", WORDS])
def test_jsonl(tmp_path: Path, pattern: str) -> None:
    for raw in (LINES, b"\xef\xbb\xbf" + LINES, LINES + b"\n", LINES + b'\n{"text":"ha'):
        path = write(tmp_path / "a.jsonl", raw)
        texts, rejected = json_texts(raw)
        for chunk in (None, 1, 40, 100, 300, 1000, 7000):
            for size in (1, 5000, 1 << 20):
                counted = check(
                    path, texts, [END], pattern=pattern, chunk_bytes=chunk, buffer_bytes=size
                )
                assert counted.stats["rejected"] == rejected, (chunk, size)
                assert counted.stats["rows"] == counted.stats["documents"] == len(texts)
                assert counted.stats["invalid_utf8"] == 0


def test_jsonl_at_every_chunk_size(tmp_path: Path) -> None:
    raw = b'{"text":"a b"}\n\n{"text":"c"}\n{"t":1}\n{"text":"d\xff"}\n{"text":"e'
    path = write(tmp_path / "a.ndjson", raw)
    texts, rejected = json_texts(raw)
    for chunk in range(1, len(raw) + 2):
        counted = check(path, texts, chunk_bytes=chunk, num_processes=2)
        assert (
            counted.stats["rejected"]
            == rejected
            == {"no_text": 1, "invalid_utf8": 1, "half_line": 1}
        )


def test_jsonl_rows_are_texts_of_their_own(tmp_path: Path) -> None:
    # neither a pretoken nor a special token goes from one row into the next
    raw = b'{"text":"ab"}\n{"text":"cd <|endof"}\n{"text":"text|> "}\n{"text":" x"}\n'
    path = write(tmp_path / "a.jsonl", raw)
    counted = check(path, [b"ab", b"cd <|endof", b"text|> ", b" x"], [END])
    assert counted.stats["special_tokens"] == {END: 0}


def test_jsonl_many_small_rows_and_another_field(tmp_path: Path) -> None:
    texts = [f"row {k} it's\n".encode() for k in range(5000)]
    raw = b"".join(
        json.dumps({"body": text.decode(), "text": 1}).encode() + b"\n" for text in texts
    )
    write(tmp_path / "a.jsonl", raw)
    write(tmp_path / "b.jsonl.gz", gzip.compress(raw))
    write(tmp_path / "c.jsonl.zst", zstandard.compress(raw))
    counted = check(tmp_path, texts * 3, text_field="body", buffer_bytes=10_000, num_processes=2)
    assert counted.stats["rows"] == 15_000
    with pytest.raises(BadInput, match="holds no document") as caught:
        pretokenize(tmp_path, [], 1)
    why = f"refused: text_not_a_string 15,000 ({tmp_path}/a.jsonl, 0)"
    assert caught.value.why == f"{why}; the first row has 'body', 'text'"
    assert caught.value.do == "name the field that holds the text: --text_field body"


def test_jsonl_lines_that_are_too_long_are_counted_once(tmp_path: Path) -> None:
    read = ReadConfig(max_document_bytes=10_000)
    long = b'{"text":"' + b"no " * 10_000 + b'"}\n'
    kept = b'{"text":"' + b"yes " * 2000 + b'"}\n'
    for raw in (long + kept + long + long + kept + kept, kept + long, kept + long[:-1]):
        path = write(tmp_path / "a.jsonl", raw)
        texts = [b"yes " * 2000] * raw.count(kept)
        for chunk in (None, 1, 9_000, 20_000, 40_000):
            for size in (1, 1 << 13, 1 << 16):
                counted = check(
                    path, texts, chunk_bytes=chunk, buffer_bytes=size, num_processes=2, read=read
                )
                assert counted.stats["rejected"] == {"line_too_long": raw.count(b"no no") // 5000}


def test_jsonl_cut_short_after_it_was_planned_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text":"a"}\n{"text":"b"}\n')
    corpus = Corpus([path], ReadConfig())
    (piece,) = corpus.work(corpus.inputs[0])
    assert isinstance(piece, Piece)
    path.write_bytes(b'{"text":"a"}\n')
    with pytest.raises(InputReplaced):
        list(corpus.read(piece, Tally()))


BAD: Final = b"a\xff b\xe2\x82"


def unchecked_strings(texts: Sequence[bytes | None], kind: Any) -> Any:
    """A string column, with bytes that need not be UTF-8."""
    binary = pa.large_binary() if kind == pa.large_string() else pa.binary()
    array = pa.array(texts, binary)
    return pa.Array.from_buffers(kind, len(array), array.buffers(), array.null_count)


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary"])
@pytest.mark.parametrize("pattern", ["cl100k", WORDS])
def test_parquet(tmp_path: Path, kind: str, pattern: str) -> None:
    texts = [
        b"it's  a",
        None,
        b"",
        "日本 12".encode(),
        BAD,
        None,
        b"x " + END.encode() + b"\n",
        MARK,
    ]
    texts = [*texts, *(f"row {k}".encode() for k in range(2500))]
    dtype = getattr(pa, kind)()
    array = unchecked_strings(texts, dtype) if "string" in kind else pa.array(texts, dtype)
    path = tmp_path / "a.parquet"
    for rows in (1, 100, 10_000) if pattern == "cl100k" else (2000,):
        size = 7 if rows == 1 else len(array)
        expected = [as_document(text) for text in texts[:size] if text]
        table = pa.table({"id": pa.array(range(size)), "text": array[:size]})
        pq.write_table(table, path, row_group_size=rows)
        counted = check(path, expected, [END], pattern=pattern, num_processes=2)
        assert counted.stats["rejected"] == {"no_text": 2, "empty_text": 1}
        assert counted.stats["rows"] == len(expected)
        assert counted.stats["decoded"]["latin-1"] == 1


@pytest.mark.parametrize(
    "texts", [[], [None], [None] * 2000, [""], ["", None, ""], [None, "a"], ["a" * 100_000]],
    ids=lambda texts: f"{len(texts)} {str(texts)[:12]}",
)  # fmt: skip
@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_parquet_with_little_in_it(tmp_path: Path, texts: list[str | None], kind: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(texts, getattr(pa, kind)())}), path)
    kept = [text.encode() for text in texts if text]
    refused = {"no_text": texts.count(None), "empty_text": texts.count("")}
    if not kept:
        with pytest.raises(BadInput, match=r"a\.parquet holds no document") as caught:
            pretokenize(path, [], 1)
        assert caught.value.why is not None
        for reason, count in refused.items():
            assert (f"{reason} {count:,} (" in caught.value.why) == bool(count)
        return
    counted = check(path, kept)
    assert counted.stats["rejected"] == {key: count for key, count in refused.items() if count}
    assert counted.stats["rows"] == len(kept)


@pytest.mark.parametrize("order", [["text", "text.x", "x"], ["text.x", "x", "text"]])
def test_parquet_reads_the_column_of_that_name(tmp_path: Path, order: list[str]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: [f"this is {name}"] for name in order}), path)
    check(path, [b"this is text"])
    check(path, [b"this is text.x"], text_field="text.x")


def test_a_directory_is_read_as_chunk_reads_it(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    lines = write(tmp_path / "deep" / "b.jsonl", b'{"text":"two"}\n')
    table = tmp_path / "deep" / "d.parquet"
    pq.write_table(pa.table({"text": ["four"]}), table)
    # nothing but shards: their documents
    check(tmp_path / "deep", [b"two", b"four"])
    # a tree of files: each is a document, and what is binary is refused
    write(tmp_path / "a.txt", b"one")
    write(tmp_path / "deep" / "er" / "c.txt.gz", gzip.compress(b"three"))
    write(tmp_path / "deep" / "_d.txt", b"five")
    write(tmp_path / "deep" / ".hidden", b"no")
    counted = check(tmp_path, [b"one", lines.read_bytes(), b"three", b"five"])
    assert counted.stats["files"] == 5
    assert counted.stats["rejected"] == {"parquet": 1}
    paths: list[str | Path] = [tmp_path / "a.txt", str(lines), table]
    assert dict(pretokenize(paths, [], 2)) == {b"one": 1, b"two": 1, b"four": 1}
    with pytest.raises(BadConfig, match="the same input is given twice"):
        pretokenize([tmp_path / "a.txt"] * 2, [], 2)


def test_a_directory_without_the_markers_of_producers(tmp_path: Path) -> None:
    # `mark_done` puts them beside what they mark; they are no text
    write(tmp_path / "a.jsonl", b'{"text":"one"}\n')
    write(tmp_path / "a.jsonl.done", b'{"bytes": 15}\n')
    assert dict(pretokenize(tmp_path, [], 1)) == {b"one": 1}


def test_text_bytes_are_those_of_the_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["abc", None, "de"]}), tmp_path / "a.parquet")
    assert pretokenize(tmp_path, [], 1).stats["text_bytes"] == 5


# Memory


def many_words(count: int, seed: int) -> bytes:
    """Text of `count` words of many lengths, most of them there once."""
    dice = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyzé中"
    words = ("".join(dice.choices(letters, k=dice.randint(2, 30))) for _ in range(count))
    return " ".join(words).encode()


@pytest.fixture(scope="module")
def wordy(folder: Path) -> tuple[Path, bytes]:
    raw = many_words(30_000, 5)
    raw += b" " + raw[: len(raw) // 3].rpartition(b" ")[0]
    return write(folder / "wordy.txt", raw), raw


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("buffer_bytes", [1 << 12, 1 << 16, module.BUFFER_BYTES])
def test_counts_that_spill_are_the_same(
    wordy: tuple[Path, bytes], tmp_path: Path, threads: int, buffer_bytes: int
) -> None:
    path, raw = wordy
    counted = check(
        path, [raw], [END, "aa"], num_processes=threads, max_memory_gb=TINY_GB,
        buffer_bytes=buffer_bytes, spill_dir=tmp_path, chunk_bytes=len(raw) // 4,
    )  # fmt: skip
    assert counted.stats["spills"] > 1
    assert len(list(tmp_path.iterdir())) == 1
    common = counted.most_common(20)
    assert common == sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:20]
    twice = counted.at_least(2)
    assert dict(twice) == {key: times for key, times in counted.items() if times >= 2}
    del counted
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert twice.total == sum(twice.values())  # it has its own arrays


def test_rows_that_spill_are_counted_the_same(wordy: tuple[Path, bytes], tmp_path: Path) -> None:
    _, raw = wordy
    text = raw.decode()
    path = write(tmp_path / "a.jsonl", json.dumps({"text": text}).encode() + b"\n")
    assert check(path, [raw], max_memory_gb=TINY_GB).stats["spills"] > 1
    pq.write_table(pa.table({"text": [text]}), tmp_path / "a.parquet")
    assert check(tmp_path / "a.parquet", [raw], max_memory_gb=TINY_GB).stats["spills"] > 1


def test_a_pattern_of_ones_own_spills_too(wordy: tuple[Path, bytes]) -> None:
    path, raw = wordy
    assert check(path, [raw], pattern=WORDS, max_memory_gb=TINY_GB).stats["spills"] > 1


def test_only_a_pretoken_that_is_too_long_is_too_long(tmp_path: Path) -> None:
    raw = b"a" * 700_000
    path = write(tmp_path / "a.txt", raw)
    with pytest.raises(BadInput) as caught:
        pretokenize(path, [], 1, TINY_GB)
    assert caught.value.what == "a pretoken of 700,000 bytes or more does not fit the memory limit"
    assert caught.value.do == "leave that input out, or give more with max_memory_gb"
    raw = b"a" * 300_000 + b" " + b"b" * 400_000
    check(write(path, raw), [raw], max_memory_gb=TINY_GB)


def test_an_error_leaves_no_spill_folder_behind(wordy: tuple[Path, bytes], tmp_path: Path) -> None:
    path, raw = wordy
    broken = write(tmp_path / "z.gz", gzip.compress(raw)[:-20])
    spill_dir = tmp_path / "spill"
    spill_dir.mkdir()
    seen = []
    events = Events("pretokenize")
    events.listen(lambda event: seen.append(len(list(spill_dir.iterdir()))))
    with pytest.raises(BadInput, match=r"z\.gz ends early or is corrupt"):
        pretokenize(
            [path, broken], [], 1, TINY_GB, buffer_bytes=4096, spill_dir=spill_dir, events=events
        )
    gc.collect()
    assert list(spill_dir.iterdir()) == []
    assert 1 in seen


def random_counts(count: int, seed: int) -> Counter[bytes]:
    dice = random.Random(seed)
    counts: Counter[bytes] = Counter()
    for _ in range(count):
        size = dice.choice([1, 2, 7, 8, 9, 14, 15, 16, 17, 31, 32, 33, 100])
        key = bytes(dice.choices(b"\0a\xff" if dice.random() < 0.3 else range(256), k=size))
        counts[key] += dice.choice([1, 1, 2, 1 << 40])
    return counts


@pytest.mark.parametrize("max_bytes", [1, 1 << 14, 1 << 17, 1 << 19, 1 << 22, 1 << 30])
def test_a_table_of_any_size_counts_the_same(max_bytes: int, tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    tables = [CountTable(max_bytes, spill) for _ in range(3)]
    expected: Counter[bytes] = Counter()
    for seed in range(9):
        counts = random_counts(3000, seed)
        expected += counts
        tables[seed % 3].add(counts)
        tables[seed % 3].add({})
    counted = combine(tables, spill)
    assert dict(counted) == expected
    assert bool(spill.files) == (max_bytes < 1 << 30)
    del counted, tables, spill
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_table_keeps_to_its_bytes(tmp_path: Path) -> None:
    for max_bytes in (1 << 20, 1 << 22, 1 << 24):
        table = CountTable(max_bytes, Spill(tmp_path))
        for seed in range(6):
            table.add(random_counts(10_000, seed))
            assert table.held_bytes <= max_bytes


def test_tables_that_only_spill_when_they_are_combined() -> None:
    spill = Spill(None)
    tables = [CountTable(1 << 20, spill) for _ in range(3)]
    expected: Counter[bytes] = Counter()
    for seed, table in enumerate(tables):
        counts = Counter({f"{seed}-{k}".encode(): k + 1 for k in range(4000)})
        expected += counts
        table.add(counts)
    assert spill.files == 0
    counted = combine(tables, spill)
    assert spill.files > 0
    assert dict(counted) == expected
    folder = spill.folder()
    assert folder.exists()
    spill.close()
    assert not folder.exists()


def test_a_spill_that_never_was_can_be_closed() -> None:
    Spill(None).close()


# The result


def test_counts_are_a_mapping() -> None:
    plain = {b"the": 3, b" cat": 1, b"": 2, b"a" * 100: 3, b"\xff\0": 1}
    counts = PretokenCounts.of(plain)
    assert counts == plain
    assert (len(counts), counts.total) == (5, 10)
    assert list(counts) == list(plain)
    assert list(counts.values()) == list(plain.values())
    assert counts.items() == list(plain.items())
    assert counts[b"a" * 100] == 3
    assert b"the" in counts
    assert b"dog" not in counts
    assert counts.get(b"dog", 0) == 0
    with pytest.raises(KeyError):
        counts[b"dog"]
    assert PretokenCounts.of({}) == {}
    assert PretokenCounts.of({}).total == 0


def test_most_common_is_that_of_a_counter_with_ties_in_order() -> None:
    plain = Counter(random_counts(300, 1))
    counts = PretokenCounts.of(plain)
    expected = sorted(plain.items(), key=lambda item: (-item[1], item[0]))
    assert counts.most_common() == expected
    for count in (1, 2, 10, len(plain) - 1, len(plain), len(plain) + 1):
        assert counts.most_common(count) == expected[:count]


@pytest.mark.parametrize("count", [0, -1])
def test_most_common_of_none_is_empty(count: int) -> None:
    assert PretokenCounts.of({b"a": 1, b"b": 2}).most_common(count) == []


def test_at_least_keeps_what_is_that_frequent() -> None:
    plain = random_counts(500, 2)
    counts = PretokenCounts.of(plain)
    counts.stats["pretokens"] = 7
    for least in (0, 1, 2, 3, 1 << 40, 1 << 60):
        kept = counts.at_least(least)
        assert dict(kept) == {key: times for key, times in plain.items() if times >= least}
        assert kept.stats == counts.stats


def test_more_pretokens_than_one_stride_of_iteration(tmp_path: Path) -> None:
    plain = {f"{k:x}".encode(): k for k in range(1, 140_000)}
    table = CountTable(1 << 30, spill := Spill(tmp_path))
    table.add(plain)
    counted = combine([table], spill)
    assert dict(counted) == plain
    assert counted[b"fff"] == 0xFFF


def test_stats_and_events(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"a b " + END.encode() + b"c\nd\n" * 100)
    write(tmp_path / "b.jsonl", b'{"text":"x y"}\n{}\nno\n')
    write(tmp_path / "c.txt.gz", gzip.compress(b"z"))
    pq.write_table(pa.table({"text": ["q", None]}), tmp_path / "d.parquet", row_group_size=1)
    heard: list[Event] = []
    events = Events("pretokenize")
    events.listen(heard.append)
    paths = sorted(tmp_path.iterdir())
    stats = pretokenize(paths, [END, "@@"], 2, chunk_bytes=50, events=events).stats
    assert stats["files"] == 4
    assert stats["rows"] == 3 - 1 + 1 - 1 + 0
    assert stats["rejected"] == {"no_text": 2, "invalid_json": 1}
    assert stats["special_tokens"] == {END: 1, "@@": 0}
    assert stats["invalid_utf8"] == 0
    assert stats["documents"] == 4
    assert stats["decoded"] == {"utf-8": 4}
    assert stats["threads"] == 2
    assert stats["spills"] == 0
    assert stats["chunks"] > 6
    assert stats["seconds"] > 0
    assert stats["mb_per_s"] > 0
    assert stats["peak_memory_bytes"] > 1 << 20
    assert [event["kind"] for event in heard][-3:] == ["progress", "warn", "end"]
    assert heard[-3]["at"] == heard[-3]["size"] == sum(path.stat().st_size for path in paths)
    told = heard[-2]["message"]
    assert (
        told
        == f"refused: no_text 2 ({tmp_path}/b.jsonl, 15), invalid_json 1 ({tmp_path}/b.jsonl, 18)"
    )
    assert heard[-1]["pretokens"] == stats["pretokens"]


def test_too_little_memory_is_said_once(tmp_path: Path) -> None:
    heard: list[Event] = []
    events = Events("pretokenize")
    events.listen(heard.append)
    pretokenize(write(tmp_path / "a.txt", b"a"), [], 1, TINY_GB, events=events)
    warnings = [event["message"] for event in heard if event["kind"] == "warn"]
    assert len(warnings) == 1
    assert re.fullmatch(r"pretokenize holds [\d,]+ MB, more than the limit of 0 MB", warnings[0])


def test_an_interrupt_stops_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(self: Any, piece: Any) -> None:
        end = time.monotonic() + 5
        while not self.stopped and time.monotonic() < end:
            time.sleep(0.01)

    def report(self: Any, *, is_end: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Worker, "_count_piece", work)
    monkeypatch.setattr(module._Run, "_report", report)
    path = write(tmp_path / "a.txt", b"a")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pretokenize(path, [], 1)
    assert time.monotonic() - began < 3


# Stories


STORIES: Final = (
    "Once upon é time.\n<|endoftext|>\nTwo <|endof text|>é<|endoftext|><|endoftext|>日本"
    "<|endoftext|><|endoftextthree<|endoftext|>"
).encode() + b"bad \xff\xe2\x82<|endoftext|>\xc3"


def plain_stories(raw: bytes, token: str) -> list[str]:
    parts = raw.split(token.encode()) if token else [raw]
    return [part.decode("utf-8", "replace") for part in parts if part]


def stories(path: Path, cuts: Sequence[int], token: str, size: int) -> Iterator[str]:
    for start, end in itertools.pairwise(cuts):
        yield from stream_stories_from_chunk(path, start, end, token, buffer_bytes=size)


@pytest.mark.parametrize("token", [END, "<", "é", "\n", "<|endoftext|>\n", "nowhere", ""])
def test_stories_at_every_buffer_size(tmp_path: Path, token: str) -> None:
    path = write(tmp_path / "a.txt", STORIES)
    for size in range(1, len(STORIES) + 2):
        found = list(stories(path, [0, len(STORIES)], token, size))
        assert found == plain_stories(STORIES, token)


@pytest.mark.parametrize("token", [END, "<", "é", "\n", "<|endoftext|>\n", "nowhere"])
def test_stories_at_every_chunk_size(tmp_path: Path, token: str) -> None:
    path = write(tmp_path / "a.txt", STORIES)
    for chunk in range(1, len(STORIES) + 2):
        cuts = chunk_boundaries(path, chunk, token)
        assert cuts[0] == 0
        assert cuts[-1] == len(STORIES)
        assert all(later - earlier >= chunk for earlier, later in itertools.pairwise(cuts[:-1]))
        assert all(STORIES.startswith(token.encode(), cut) for cut in cuts[1:-1])
        for size in (1, 7, 1000):
            assert list(stories(path, cuts, token, size)) == plain_stories(STORIES, token)


@pytest.mark.parametrize(("token", "raw"), [("\n\n", b"a\n\n\nb\n\n\n\nc"), ("<<", b"a<<<b<<<<<c")])
def test_stories_are_the_same_where_a_token_can_overlap_itself(
    tmp_path: Path, token: str, raw: bytes
) -> None:
    path = write(tmp_path / "a.txt", raw)
    for chunk in range(1, len(raw) + 1):
        cuts = chunk_boundaries(path, chunk, token)
        assert list(stories(path, cuts, token, 100)) == plain_stories(raw, token), cuts


def test_boundaries_where_no_window_may_miss_one(tmp_path: Path) -> None:
    # the search goes a megabyte at a time; a token across the edge of that is found
    for shift in range(-len(END) - 2, 3):
        at = (1 << 20) + 5 + shift
        path = write(tmp_path / "a.txt", b"x" * at + END.encode() + b"y" * 100)
        assert chunk_boundaries(path, 5, END) == [0, at, at + len(END) + 100]


def test_an_empty_split_token_cuts_no_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "é日本".encode() * 5)
    for chunk in range(1, 30):
        found = "".join(stories(path, chunk_boundaries(path, chunk, ""), "", 7))
        assert found == "é日本" * 5, chunk


def test_boundaries_of_an_empty_file(tmp_path: Path) -> None:
    assert chunk_boundaries(write(tmp_path / "a.txt", b""), 10, END) == [0, 0]


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_boundaries_need_a_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    path = write(tmp_path / "a.txt", STORIES)
    find_cut, calls = chunks_module._find_cut, 0

    def counting(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        assert calls < 1000, "it goes on for ever"
        return int(find_cut(*arguments))

    monkeypatch.setattr(chunks_module, "_find_cut", counting)
    with pytest.raises(BadConfig, match=f"chunk_bytes is {chunk_bytes}"):
        chunk_boundaries(path, chunk_bytes, END)


def test_stories_need_a_buffer(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="buffer_bytes is 0"):
        list(stream_stories_from_chunk(write(tmp_path / "a", b"a"), 0, 1, END, buffer_bytes=0))


def test_optimal_chunk_bytes() -> None:
    assert optimal_chunk_bytes(0, 4, 1.0) == 1 << 20
    assert optimal_chunk_bytes(100 << 20, 4, 1.0) == 25 << 20
    assert optimal_chunk_bytes(100 << 30, 1, 2.0) == 1 << 30


# Errors


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        ({"num_processes": 0}, "num_processes is 0", "give at least 1"),
        ({"num_processes": -3}, "num_processes is -3", "give at least 1"),
        ({"buffer_bytes": 0}, "buffer_bytes is 0", "give at least 1"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0", "give at least 1"),
        ({"max_memory_gb": 0}, "max_memory_gb is 0", "give a number above 0"),
        ({"max_memory_gb": -1.5}, "max_memory_gb is -1.5", "give a number above 0"),
        ({"max_memory_gb": float("nan")}, "max_memory_gb is nan", "choose a number"),
        (
            {"special_tokens": END},
            "special_tokens is one text",
            'give a list, e.g. ["<|endoftext|>"]',
        ),
        ({"special_tokens": ["a", ""]}, "a special token is empty", "leave it out"),
        ({"special_tokens": ["\ud800"]}, "a special token is not UTF-8", ""),
        (
            {"pattern": "gpt5"},
            "there is no pattern 'gpt5'",
            "did you mean gpt2? choose from gpt2, cl100k, o200k, qwen2, nanochat, or give a regex",
        ),
    ],
    ids=str,
)
def test_options_that_are_wrong(
    tmp_path: Path, options: dict[str, Any], what: str, do: str
) -> None:
    path = write(tmp_path / "a.txt", b"a")
    with pytest.raises(BadConfig) as caught:
        pretokenize(path, **{"special_tokens": [], **options})
    assert (caught.value.what, caught.value.do) == (what, do)


def test_memory_without_a_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"a")
    assert dict(pretokenize(path, [], 1, float("inf"))) == {b"a": 1}


def test_a_special_token_given_twice_is_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"a<>b<>")
    assert pretokenize(path, ["<>", "<>"], 1).stats["special_tokens"] == {"<>": 2}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "corpus.txt", b"a")
    with pytest.raises(InputMissing) as caught:
        pretokenize(tmp_path / "corpsu.txt", [])
    assert caught.value.what == "corpsu.txt is not there"
    assert caught.value.do == "did you mean corpus.txt?"
    with pytest.raises(InputMissing, match=r"corpsu\.txt is not there"):
        chunk_boundaries(tmp_path / "corpsu.txt", 10, END)
    with pytest.raises(InputMissing, match=r"corpsu\.txt is not there"):
        list(stream_stories_from_chunk(tmp_path / "corpsu.txt", 0, 10, END))


def test_a_directory_without_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput) as caught:
        pretokenize(tmp_path / "empty", [])
    assert caught.value.what == "empty has no files"
    assert caught.value.do == "name another directory"


def test_a_folder_for_spills_that_is_not_there(wordy: tuple[Path, bytes], tmp_path: Path) -> None:
    with pytest.raises((BadConfig, BadInput), match="nowhere"):
        pretokenize(wordy[0], [], 1, TINY_GB, buffer_bytes=4096, spill_dir=tmp_path / "nowhere")


def test_parquet_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(BadInput) as caught:
        pretokenize(path, [])
    assert caught.value.what == "a.parquet has no column 'text'"
    assert caught.value.do == "choose from id, body"
    with pytest.raises(BadInput) as caught:
        pretokenize(path, [], text_field="id")
    assert caught.value.what == "column 'id' of a.parquet is int64"
    assert caught.value.do == "name a text column"
    with pytest.raises(InputDamaged) as caught:
        pretokenize(write(tmp_path / "b.parquet", b"PAR1 not at all"), [])
    assert caught.value.what == "b.parquet is not a parquet file"
    with pytest.raises(BadInput) as caught:
        pretokenize(write(tmp_path / "c.parquet.gz", gzip.compress(path.read_bytes())), [])
    assert caught.value.what == "c.parquet.gz is a compressed parquet file"
    assert caught.value.do == "decompress it first"


def test_parquet_damaged_in_its_middle(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {k}" for k in range(5000)]}), path)
    raw = bytearray(path.read_bytes())
    raw[10:4000] = b"\xff" * 3990
    path.write_bytes(raw)
    with pytest.raises(InputDamaged, match=r"a\.parquet"):
        pretokenize(path, [], 1)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("chunk_bytes", [None, 100])
def test_compressed_files_that_end_early(
    tmp_path: Path, name: str, chunk_bytes: int | None
) -> None:
    raw = b'{"text":"hello"}\n' * 1000
    packed = gzip.compress(raw) if name.endswith("gz") else zstandard.compress(raw)
    for data, why in ((packed[:-9], "ends early or is corrupt"), (b"", "has no bytes at all")):
        with pytest.raises((InputDamaged, BadInput), match=f"{re.escape(name)} {why}") as caught:
            pretokenize(write(tmp_path / name, data), [], 2, chunk_bytes=chunk_bytes)
        if name == "a.txt.gz":
            assert caught.value.what == "a.txt.gz holds no document"
