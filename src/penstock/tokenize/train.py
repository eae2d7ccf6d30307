"""Train a tokenizer from files, and go on after a kill; compare tokenizers on files.

In:    files of text, a vocabulary size, special tokens, a pattern
Out:   a directory with tokenizer.json, tokenizer.tiktoken, tokenizer_config.json
Keeps: counts and merges so far in <output>/_work until it is done
Never: goes on from the work of other inputs or options: then it begins anew

    count ─▶ _work/counts ─▶ merge ─▶ _work/merges (every minute) ─▶ tokenizer.json, _work removed
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.disk import make_own_folder, open_own, replacing
from penstock.errors import BadConfig, BadInput
from penstock.kernels import PAD
from penstock.tokenize.bpe import Bpe, learn_merges
from penstock.tokenize.chunks import SpecialTokens, list_files
from penstock.tokenize.counts import PretokenCounts
from penstock.tokenize.files import save_tokenizer
from penstock.tokenize.patterns import Pattern, find_pattern
from penstock.tokenize.pretokenize import pretokenize
from penstock.work.events import Events
from penstock.work.values import check_numbers, checked_path, number

_WORK = "_work"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What decides a tokenizer, beside its inputs."""

    vocab_size: int = 65_536
    """Tokens, special ones included."""

    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Texts that are one token each, and that end a text."""

    pattern: str = "cl100k"
    """A name or a regular expression."""

    order: str = "hf"
    """How ties are decided and ids are given: hf or rustbpe."""

    min_frequency: int = 0
    """A pair that occurs less often is not merged."""

    min_count: int = 1
    """A pretoken that occurs less often is left out: saves memory, changes merges."""

    text_field: str = "text"
    """The field of JSON lines, the column of parquet files."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        pattern = find_pattern(self.pattern)
        if not pattern.is_scanned:
            _check_loadable(pattern)
        least = 256 + len(SpecialTokens(self.special_tokens).texts)
        if not least < self.vocab_size <= 1 << 24:
            raise BadConfig(
                f"--vocab_size is {self.vocab_size}",
                why=f"256 bytes and {least - 256} special tokens need {least} already",
                do=f"choose from {least + 1} to {1 << 24:,}",
            )
        if self.order not in ("hf", "rustbpe"):
            raise BadConfig(f"--order is {self.order!r}", do="choose from hf, rustbpe")
        for name in ("min_frequency", "min_count"):
            if getattr(self, name) < 0:
                raise BadConfig(f"--{name} is {getattr(self, name)}", do="give 0 or more")


def _check_loadable(pattern: Pattern) -> None:
    """A pattern of one's own must also compile where the tokenizer will be used."""
    from tokenizers import Regex

    try:
        Regex(pattern.regex)
    except Exception as error:  # the library raises Exception itself
        raise BadConfig(
            "the pattern does not compile",
            where=pattern.regex,
            why=f"the tokenizers library says: {error}",
            do="write it without what only the `regex` module knows",
        ) from error


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training gave."""

    bpe: Bpe
    stats: dict[str, Any]


def train_tokenizer(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    config: TrainConfig | None = None,
    *,
    num_processes: int | None = None,
    max_memory_gb: float | None = None,
    checkpoint_s: float = 60.0,
    events: Events | None = None,
) -> Trained:
    """Train on files and write the tokenizer into the directory `output`."""
    config = config or TrainConfig()
    number("checkpoint_s", checkpoint_s)
    events = events or Events("tokenizer")
    folder = Path(checked_path("--output", output))
    if not inputs:
        raise BadConfig("no inputs were given", do="name files or directories with --inputs")
    paths = [
        path
        for path in list_files([Path(checked_path("--inputs", path)) for path in inputs])
        if folder.resolve() not in path.resolve().parents  # our own output is no input
    ]
    work = folder / _WORK
    began = time.monotonic()
    identity = _identity(paths, config)
    counts = _load_counts(work, identity)
    if counts is None:
        shutil.rmtree(work, ignore_errors=True)
        counts = pretokenize(
            paths,
            config.special_tokens,
            num_processes,
            max_memory_gb,
            pattern=config.pattern,
            text_field=config.text_field,
            spill_dir=None,
            events=events,
        )
        found = len(counts)
        counts = counts.at_least(config.min_count)
        if not len(counts):
            raise BadInput(
                "there is nothing to learn from",
                where=", ".join(str(path) for path in paths[:3]),
                why=f"no pretoken occurs {config.min_count} times"
                if found
                else "the inputs hold no text",
                do="give a lower --min_count" if found else "name other inputs",
            )
        _save_counts(counts, work, identity)
    counted = time.monotonic()
    bpe = learn_merges(
        counts,
        config.vocab_size,
        config.special_tokens,
        order=config.order,
        min_frequency=config.min_frequency,
        checkpoint=work / "merges",
        checkpoint_s=checkpoint_s,
        on_progress=lambda at, size: events.emit("merge", at=at, size=size),
    )
    stats = {
        **counts.stats,
        "vocab_size": len(bpe.tokens),
        "merges": len(bpe.merges),
        "count_seconds": counted - began,
        "merge_seconds": time.monotonic() - counted,
    }
    if len(bpe.tokens) < config.vocab_size:
        events.emit(
            "warn",
            message=f"the inputs give only {len(bpe.tokens):,} tokens of the "
            f"{config.vocab_size:,} that --vocab_size asks for",
        )
    save_tokenizer(bpe, find_pattern(config.pattern), folder)
    shutil.rmtree(work, ignore_errors=True)
    events.emit("end", **{name: value for name, value in stats.items() if name != "special_tokens"})
    return Trained(bpe, stats)


def _identity(paths: Sequence[Path], config: TrainConfig) -> str:
    """A hash of the options that decide the counts, and of the inputs: names, sizes, times."""
    deciding = {
        name: value
        for name, value in asdict(config).items()
        if name in ("special_tokens", "pattern", "min_count", "text_field")
    }
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps([deciding, files]).encode()).hexdigest()


def _save_counts(counts: PretokenCounts, work: Path, identity: str) -> None:
    """Write the counts; they are there when `_work/counts` is."""
    work.parent.mkdir(parents=True, exist_ok=True)
    make_own_folder(work)
    about = {"identity": identity, "stats": counts.stats, "distinct": len(counts)}
    digest = hashlib.sha256()
    size = int(counts.at[-1])
    with replacing(work / "counts", sync=True) as file:
        parts: list[Any] = [json.dumps(about).encode() + b"\n", counts.at.data]
        parts += [np.ascontiguousarray(counts.counts).data, counts.keys_data[:size].data]
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


def _load_counts(work: Path, identity: str) -> PretokenCounts | None:
    """The counts of a training that was stopped, if they are whole and of the same inputs."""
    try:
        with open(open_own(work / "counts", make=False, write=False), "rb") as file:
            head = file.readline(1 << 20)
            about = json.loads(head)
            if about["identity"] != identity:
                return None
            data = file.read()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    body, digest = memoryview(data)[:-32], data[-32:]
    check = hashlib.sha256(head)
    check.update(body)
    if check.digest() != digest:
        return None
    distinct = int(about["distinct"])
    at = np.frombuffer(body[: 8 * (distinct + 1)], np.int64)
    counts = np.frombuffer(body[8 * (distinct + 1) : 8 * (2 * distinct + 1)], np.int64)
    keys = np.frombuffer(data, np.uint8, offset=8 * (2 * distinct + 1))
    keys = np.concatenate([keys[: int(at[-1])], np.zeros(PAD, np.uint8)])
    found = PretokenCounts(keys, at, counts)
    found.stats = about["stats"]
    return found
