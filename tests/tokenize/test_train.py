"""From files to a tokenizer; killed anywhere, the same command goes on to the same bytes."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex

from penstock.cli import app, main
from penstock.errors import BadConfig, BadInput, InputMissing, PenstockError
from penstock.tokenize import evaluate
from penstock.tokenize import train as train_module
from penstock.tokenize.bpe import learn_merges
from penstock.tokenize.counts import PretokenCounts
from penstock.tokenize.evaluate import compare, language_of
from penstock.tokenize.patterns import PATTERNS
from penstock.tokenize.save import save_tokenizer
from penstock.tokenize.tokenizer import Tokenizer
from penstock.tokenize.train import TrainConfig, train_tokenizer
from penstock.work.events import Events

SPECIAL: Final = "<|endoftext|>"
CONFIG: Final = TrainConfig(vocab_size=700)


def some_text(seed: int, lines: int = 400) -> str:
    """Lines of made-up words, with more than ASCII, and texts that end with a special token."""
    chance = random.Random(seed)
    words = [
        "".join(chance.choices("etaoinshrdluéß漢", k=chance.randint(1, 9))) for _ in range(300)
    ]
    return "".join(
        " ".join(chance.choices(words, k=8)) + chance.choice([".\n", f"{SPECIAL}\n", "  it's 12\n"])
        for _ in range(lines)
    )


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def train(inputs: Iterable[Path | str], output: Path, **options: Any) -> dict[str, bytes]:
    train_tokenizer(list(inputs), output, TrainConfig(**{"vocab_size": 700, **options}))
    assert sorted(os.listdir(output)) == [
        "tokenizer.json", "tokenizer.tiktoken", "tokenizer_config.json",
    ]  # fmt: skip
    return files_in(output)


def directly(texts: Iterable[str], folder: Path, config: TrainConfig = CONFIG) -> dict[str, bytes]:
    """The same, from counts that `regex` makes of the texts between special tokens."""
    pattern = PATTERNS["cl100k"]
    counts = Counter(
        found.group().encode()
        for text in texts
        for part in text.split(SPECIAL)
        for found in regex.finditer(pattern.regex, part)
    )
    kept = {key: count for key, count in counts.items() if count >= config.min_count}
    learned = learn_merges(
        PretokenCounts.of(kept),
        config.vocab_size,
        config.special_tokens,
        order=config.order,
        min_frequency=config.min_frequency,
    )
    save_tokenizer(learned, pattern, folder)
    return files_in(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process, as `penstock ...` would."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        code: Any = 0
        try:
            main(lambda: app([str(argument) for argument in arguments]))
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run_command


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text(some_text(0))
    return path


# From files to a tokenizer.


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[list[Path], list[str]]:
    """Five files of as many kinds, and the texts that are in them."""
    texts = [some_text(seed, 60) for seed in range(5)]
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    plain, packed, table = folder / "a.txt", folder / "b.txt.gz", folder / "deep" / "c.parquet"
    plain.write_text(texts[0])
    packed.write_bytes(gzip.compress(texts[1].encode()))
    rows = texts[2].splitlines(keepends=True)
    pq.write_table(pa.table({"body": rows, "n": range(len(rows))}), table, row_group_size=7)
    documents = [text.splitlines(keepends=True) for text in texts[3:]]
    lines, packed_lines = folder / "d.jsonl", folder / "e.jsonl.gz"
    data = [b"".join(json.dumps({"body": r}).encode() + b"\n" for r in d) for d in documents]
    lines.write_bytes(data[0])
    packed_lines.write_bytes(gzip.compress(data[1]))
    found = [texts[0], texts[1], *rows, *documents[0], *documents[1]]
    return [plain, packed, table, lines, packed_lines], found


@pytest.mark.parametrize(
    "options", [{}, {"order": "rustbpe"}, {"min_count": 2, "min_frequency": 9}]
)
def test_files_of_every_kind(
    corpus: tuple[list[Path], list[str]], tmp_path: Path, options: dict[str, Any]
) -> None:
    paths, texts = corpus
    expected = directly(texts, tmp_path / "expected", TrainConfig(vocab_size=700, **options))
    assert train(paths, tmp_path / "one", text_field="body", **options) == expected
    all_files = f"{paths[0].parent}/**/*.*"
    assert train([all_files], tmp_path / "two", text_field="body", **options) == expected
    assert train(paths[::-1], tmp_path / "two", text_field="body", **options) == expected


def test_the_commands(
    corpus: tuple[list[Path], list[str]], tmp_path: Path, run: Callable[..., Any]
) -> None:
    paths, texts = corpus
    output = tmp_path / "tokenizer"
    code, out, err = run(
        "tokenizer", "train", "--inputs", *paths, "--output", output, "--vocab-size", 700,
        "--text_field", "body", "--num_processes", 2, "--max_memory_gb", 16,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.startswith(f"{output}: 700 tokens from ")
    assert files_in(output) == directly(texts, tmp_path / "expected")

    small = tmp_path / "small"
    repeated = [part for path in paths for part in ("--inputs", path)]
    code, out, err = run(
        "tokenizer", "train", *repeated, "--output", small, "--vocab_size", 400,
        "--special_tokens", f"{SPECIAL},<|bos|>", "--text_field", "body", "--pattern", "gpt2",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert Tokenizer.load(small).special_tokens == {SPECIAL: 0, "<|bos|>": 1}

    code, out, err = run(
        "tokenizer", "eval", output, small, "--inputs", paths[0], "--inputs", paths[1]
    )
    assert (code, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split() == ["language", "tokenizer", "MB", "bytes/token", "tokens/word", "MB/s"]
    assert [row.split()[:2] for row in rows] == [
        ["a", str(output)], ["a", str(small)], ["b", str(output)], ["b", str(small)],
    ]  # fmt: skip
    code, out, err = run("tokenizer", "eval", output, "--inputs", paths[0], "--json")
    (score,) = json.loads(out)
    text = paths[0].read_text()
    tokens = len(Tokenizer.load(output).encode(text))
    assert (score["language"], score["text_bytes"], score["tokens"]) == (
        "a", len(text.encode()), tokens,
    )  # fmt: skip
    assert score["bytes_per_token"] == round(len(text.encode()) / tokens, 4)
    assert score["fertility"] == round(tokens / len(text.split()), 4)


def test_text_is_as_long_in_every_format(tmp_path: Path) -> None:
    rows = ["é漢\n" * 10] * 50
    plain, lines, table = (tmp_path / name for name in ("a.txt", "b.jsonl", "c.parquet"))
    plain.write_text("".join(rows))
    lines.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    pq.write_table(pa.table({"text": rows}), table)
    sizes = {
        path.name: train_tokenizer([path], tmp_path / "out").stats["text_bytes"]
        for path in (plain, table, lines)
    }
    assert set(sizes.values()) == {len("".join(rows).encode())}, sizes


def test_a_vocabulary_that_the_text_does_not_fill(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("ab ab")
    events = Events("tokenizer")
    seen: list[dict[str, Any]] = []
    events.listen(seen.append)
    trained = train_tokenizer([tmp_path / "in.txt"], tmp_path / "out", events=events)
    assert len(trained.bpe.tokens) == 259
    (warning,) = [event["message"] for event in seen if event["kind"] == "warn"]
    assert warning == "the inputs give only 259 tokens of the 65,536 that --vocab_size asks for"


# What cannot be.


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        ({"vocab_size": 257}, "--vocab_size is 257", "choose from 258 to 16,777,216"),
        ({"vocab_size": 1 << 25}, "--vocab_size is 33554432", "choose from 258 to 16,777,216"),
        ({"vocab_size": -1}, "--vocab_size is -1", "choose from 258 to"),
        ({"special_tokens": ("a|", "")}, "a special token is empty", "leave it out"),
        ({"special_tokens": "<|x|>"}, "special_tokens is one text", 'e.g. ["<|endoftext|>"]'),
        ({"special_tokens": ("\ud800",)}, "a special token is not UTF-8", ""),
        ({"pattern": "gpt5"}, "there is no pattern 'gpt5'", "choose from gpt2, cl100k"),
        ({"pattern": "(a"}, "the pattern does not compile", "fix it, or choose from gpt2"),
        ({"pattern": r"(?V1)[\w--\d]+|."}, "the pattern does not compile", ""),
        ({"order": "gpt"}, "--order is 'gpt'", "choose from hf, rustbpe"),
        ({"min_count": -1}, "--min_count is -1", "give 0 or more"),
        ({"min_frequency": -1}, "--min_frequency is -1", "give 0 or more"),
    ],
)
def test_options_check_themselves(options: dict[str, Any], what: str, do: str) -> None:
    """A pattern must compile for tokenizers too: else nobody could load what was trained."""
    with pytest.raises(BadConfig) as caught:
        TrainConfig(**options)
    assert caught.value.what == what
    assert do in caught.value.do


def test_options_on_the_command_line(
    text_file: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    base = ("tokenizer", "train", "--inputs", text_file, "--output", tmp_path / "out")
    for more, message in (
        (("--vocab_size", 257), "BadConfig: --vocab_size is 257\n"),
        (("--pattern", "(a"), "BadConfig: the pattern does not compile\n  where: (a\n"),
        (("--order", "x"), "BadConfig: --order is 'x'\n"),
    ):
        code, out, err = run(*base, *more)
        assert (code, out) == (1, "")
        assert err.startswith(message)
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no inputs were given") as none:
        train_tokenizer([], tmp_path / "out")
    assert none.value.do == "name files or directories with --inputs"
    with pytest.raises(InputMissing, match=r"no\.txt"):
        train_tokenizer([tmp_path / "no.txt"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="empty has no files"):
        train_tokenizer([tmp_path / "empty"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", SPECIAL * 3])
def test_nothing_to_learn_from(tmp_path: Path, content: str) -> None:
    path = tmp_path / "in.txt"
    path.write_text(content)
    with pytest.raises(BadInput) as caught:
        train_tokenizer([path], tmp_path / "out")
    what = "there is nothing to learn from" if content else "in.txt holds no document"
    why = "the inputs hold no text" if content else f"refused: empty_text 1 ({path})"
    assert caught.value.what == what
    assert caught.value.where == str(path)
    assert caught.value.why == why
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("field", "who", "said"),
    [("messages", "role", "content"), ("conversations", "from", "value"),
     ("conversations", "role", "content")],
)  # fmt: skip
def test_conversations_say_how_to_learn_from_them(
    tmp_path: Path, suffix: str, field: str, who: str, said: str
) -> None:
    turns = [{who: "user", said: "two\nlines"}, {who: "assistant", said: None}]
    data = json.dumps({field: turns}).encode() + b"\n"
    path = tmp_path / f"my chat.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    with pytest.raises(BadInput, match="holds no document") as caught:
        train_tokenizer([path], tmp_path / "out")
    assert caught.value.why == f"refused: no_text 1 ({path}, 0); the first row has '{field}'"
    reads = "gzip -dc" if suffix else "cat"
    jq = f'{{text: [.{field}[].{said} | strings] | join("\\n")}}'
    assert f"take them out with {reads} '{path}' | jq -c '{jq}' > texts.jsonl" in caught.value.do


def test_rows_without_any_text(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for line, do in (
        ('{"a": 1}', "leave it out, or say what to read in it: --text_field, --suffixes"),
        ('{"a": "x", "b": "y"}', "name the field that holds the text: --text_field a (or b)"),
        ("[1]", "leave it out, or say what to read in it: --text_field, --suffixes"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(BadInput, match="holds no document") as caught:
            train_tokenizer([path], tmp_path / "out")
        assert caught.value.do == do


def test_all_too_rare(text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is nothing to learn from") as caught:
        train_tokenizer([text_file], tmp_path / "out", TrainConfig(min_count=10**9))
    assert caught.value.why != "the inputs hold no text"


# Killed, and started again.

DRIVER: Final = """
import os, shutil, signal, sys
from penstock.tokenize import bpe
from penstock.tokenize.train import TrainConfig, train_tokenizer
from penstock.work.events import Events

path, output, what, left = *sys.argv[1:4], int(sys.argv[4])

def seen(kind):
    global left
    if kind == what:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

def watched(module, name):
    real = getattr(module, name)
    def call(*arguments, **options):
        seen(name)
        return real(*arguments, **options)
    setattr(module, name, call)

watched(os, "fsync")
watched(os, "replace")
watched(shutil, "rmtree")
bpe._BATCH = 20
events = Events("tokenizer")
events.listen(lambda event: seen(event["kind"]))
train_tokenizer([path], output, TrainConfig(vocab_size=700), checkpoint_s=0, events=events)
"""


def killed(path: Path, output: Path, what: str, times: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, str(path), str(output), what, str(times)], timeout=60
    )
    assert ended.returncode == -signal.SIGKILL, f"there is no {what} {times}"


POINTS: Final = [
    ("progress", 0),
    ("fsync", 0),  # the counts
    ("replace", 0),
    ("replace", 1),  # the first checkpoint
    ("merge", 7),
    ("fsync", 9),
    ("merge", 20),
    ("replace", 24),  # the three files are the last
    ("rmtree", 1),  # the first removes the work of another training
]


@pytest.mark.parametrize(("what", "times"), POINTS)
def test_killed_it_goes_on_to_the_same_bytes(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, times: int
) -> None:
    output = tmp_path / "out"
    killed(text_file, output, what, times)
    counted = (output / "_work" / "counts").exists()
    if counted:  # then they are not counted again
        monkeypatch.setattr(train_module, "pretokenize", None)
    assert train([text_file], output) == directly([text_file.read_text()], tmp_path / "expected")
    assert counted == ((what, times) not in POINTS[:3])


def test_killed_at_any_time(text_file: Path, tmp_path: Path) -> None:
    """By another process, that knows nothing of what it is doing."""
    expected = directly([text_file.read_text()], tmp_path / "expected")
    output = tmp_path / "out"
    for wait_for in ("out", "out/_work/counts", "out/_work/merges", "out/tokenizer.tiktoken"):
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(text_file), str(output), "never", "0"]
        )
        while process.poll() is None and not (tmp_path / wait_for).exists():
            os.sched_yield()
        process.kill()
        process.wait(60)
    assert train([text_file], output) == expected


def interrupted(path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left when a training stops after its counts and some merges."""

    class Stopped(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "merge" and event["at"] > 400:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("penstock.tokenize.bpe._BATCH", 20)
        events = Events("tokenizer")
        events.listen(stop)
        with pytest.raises(Stopped):
            train_tokenizer([path], output, CONFIG, checkpoint_s=0, events=events)
    assert sorted(os.listdir(output / "_work")) == ["counts", "merges"]


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 600},
        {"order": "rustbpe"},
        {"min_frequency": 5},
        {"min_count": 3},
        {"special_tokens": (SPECIAL, "<|bos|>")},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options_begin_anew(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    interrupted(text_file, tmp_path / "out", monkeypatch)
    config = TrainConfig(**{"vocab_size": 700, **options})
    expected = directly([text_file.read_text()], tmp_path / "expected", config)
    assert train([text_file], tmp_path / "out", **options) == expected


def test_another_pattern_begins_anew(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(text_file, tmp_path / "out", monkeypatch)
    for pattern in ("gpt2", r"\w+|\W+"):
        expected = train([text_file], tmp_path / "fresh", pattern=pattern)
        assert train([text_file], tmp_path / "out", pattern=pattern) == expected


def test_a_changed_input_begins_anew(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(text_file, tmp_path / "out", monkeypatch)
    changed = some_text(1)[: text_file.stat().st_size]
    text_file.write_text(changed)
    assert train([text_file], tmp_path / "out") == directly([changed], tmp_path / "expected")


def test_another_input_begins_anew(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(text_file, tmp_path / "out", monkeypatch)
    second = tmp_path / "second.txt"
    second.write_text(some_text(2))
    expected = directly([text_file.read_text(), second.read_text()], tmp_path / "expected")
    assert train([text_file, second], tmp_path / "out") == expected


@pytest.mark.parametrize("name", ["counts", "merges"])
def test_damaged_work_is_not_used(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = directly([text_file.read_text()], tmp_path / "expected")
    output = tmp_path / "out"
    for damage in (
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
        lambda data: b"[" * 100_000 + b"\n",
    ):
        interrupted(text_file, output, monkeypatch)
        path = output / "_work" / name
        path.write_bytes(damage(path.read_bytes()))
        assert train([text_file], output) == expected


def test_the_output_may_lie_among_the_inputs(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then neither the work of a killed training nor its result is text to learn from."""
    data = tmp_path / "data"
    data.mkdir()
    text_file.rename(data / "in.txt")
    expected = directly([(data / "in.txt").read_text()], tmp_path / "expected")
    interrupted(data, data / "out", monkeypatch)
    assert train([data], data / "out") == expected
    assert train([data], data / "out") == expected


# Comparing tokenizers.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "in.txt").write_text(some_text(0))
    train_tokenizer([folder / "in.txt"], folder / "out", CONFIG)
    return folder / "out"


@pytest.mark.parametrize("block", [5, 1000, 1 << 22])
@pytest.mark.parametrize("text", ["漢字é" * 300, "漢 é\n" * 300, "\n\n\n", "x" * 50 + "\n漢"])
def test_every_byte_is_counted_once(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, block: int
) -> None:
    """A character is never cut by a block, whether there are lines or not."""
    monkeypatch.setattr(evaluate, "_BLOCK_BYTES", block)
    path = tmp_path / "in.txt"
    path.write_text(text)
    (score,) = compare({"x": Tokenizer.load(tokenizer)}, [path])
    assert score.text_bytes == len(text.encode())


def test_no_more_of_a_file_than_asked_for(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("漢" * 100)
    for most in (3, 100, 298, 300, 1000):
        (score,) = compare({"x": Tokenizer.load(tokenizer)}, [path], max_bytes_per_file=most)
        assert score.text_bytes == min(most, 300) // 3 * 3


def test_languages_by_name() -> None:
    names = ("a.h", "b.PY", "c.rs.gz", "x/german.txt", "y")
    languages = ["C and C++", "Python", "Rust", "german", "other"]
    assert [language_of(Path(name)) for name in names] == languages


def test_nothing_to_compare_on(tokenizer: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for source, path in ((tokenizer, tmp_path / "no.txt"), (tmp_path / "no", empty)):
        code, out, err = run("tokenizer", "eval", source, "--inputs", path)
        assert (code, out) == (1, "")
        assert err.startswith("InputMissing: ")
    code, _, err = run("tokenizer", "eval", tokenizer, "--inputs", empty)
    assert code == 0 or err.startswith("BadInput: ")


def test_a_parquet_file_is_not_read_as_text(tokenizer: Path, tmp_path: Path) -> None:
    """Its text is, or it is refused: its bytes say nothing of a tokenizer."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["the cat", "sat"]}), path)
    try:
        (score,) = compare({"x": Tokenizer.load(tokenizer)}, [path])
    except PenstockError:
        return
    assert score.text_bytes == len("the cat") + len("sat")
