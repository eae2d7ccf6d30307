"""Train a tokenizer from files, and go on after a kill; compare tokenizers on files.

In:    files, trees, archives, addresses (`corpus`), a vocabulary size, special tokens, a pattern
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.disk import make_own_folder
from penstock.errors import BadConfig, BadInput
from penstock.ingest.formats import ReadConfig
from penstock.options import check_numbers, checked_path, config_of, number
from penstock.tokenize.bpe import Bpe, learn_merges
from penstock.tokenize.chunks import SpecialTokens
from penstock.tokenize.corpus import Corpus
from penstock.tokenize.counts import load_counts, save_counts
from penstock.tokenize.patterns import Pattern, find_pattern
from penstock.tokenize.pretokenize import pretokenize
from penstock.tokenize.save import save_tokenizer
from penstock.work.events import Events, shown

_WORK = "_work"
_COUNTS = "counts"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What decides a tokenizer, beside its inputs."""

    vocab_size: int = 65_536
    """Tokens, special ones included."""

    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Texts that are one token each, and that end a text, such as <|a|>,<|b|>."""

    pattern: str = "cl100k"
    """gpt2, cl100k, o200k, qwen2, nanochat, or a regular expression."""

    order: str = "hf"
    """How ties are decided and ids are given: hf or rustbpe."""

    min_frequency: int = 0
    """A pair that occurs less often is not merged."""

    min_count: int = 1
    """A pretoken that occurs less often is left out: saves memory, changes merges."""

    text_field: str = "text"
    """The field of a JSON line, or the column of a parquet file, that holds the text."""

    decode: str = "latin-1"
    """What to do with bytes that are not UTF-8: take them as Latin-1, or "reject" them."""

    suffixes: frozenset[str] | None = None
    """Suffixes of the files that are read in trees and archives, such as .c,.h; without it, all."""

    def read(self) -> ReadConfig:
        """How inputs become documents."""
        return ReadConfig(text_field=self.text_field, decode=self.decode, suffixes=self.suffixes)

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        self.read()
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
    """Train on files and write the tokenizer into the directory `output`.

    On a terminal and in a notebook a bar shows how far it is; `events` are for those who show it
    themselves.
    """
    config = config_of("config", config, TrainConfig)
    number("checkpoint_s", checkpoint_s)
    folder = Path(checked_path("--output", output))
    if not inputs:
        raise BadConfig("no inputs were given", do="name files or directories with --inputs")
    names = [checked_path("--inputs", path) for path in inputs]
    with shown(events, "tokenizer") as told:
        return _train(names, folder, config, num_processes, max_memory_gb, checkpoint_s, told)


def _train(
    names: list[str], folder: Path, config: TrainConfig, num_processes: int | None,
    max_memory_gb: float | None, checkpoint_s: float, events: Events,
) -> Trained:  # fmt: skip
    """Count, merge, save; what an earlier run of the same has done is not done again."""
    corpus = Corpus(names, config.read(), without=str(folder))  # our own output is no input
    work = folder / _WORK
    began = time.monotonic()
    identity = _identity(corpus, config)
    counts = load_counts(work / _COUNTS, identity)
    if counts is None:
        shutil.rmtree(work, ignore_errors=True)
        counts = pretokenize(
            names,
            config.special_tokens,
            num_processes,
            max_memory_gb,
            pattern=config.pattern,
            read=config.read(),
            without=folder,
            events=events,
        )
        found = len(counts)
        counts = counts.at_least(config.min_count)
        if not len(counts):
            raise BadInput(
                "there is nothing to learn from",
                where=", ".join(names[:3]),
                why=f"no pretoken occurs {config.min_count} times"
                if found
                else "the inputs hold no text",
                do="give a lower --min_count" if found else "name other inputs",
            )
        folder.mkdir(parents=True, exist_ok=True)
        make_own_folder(work)
        save_counts(counts, work / _COUNTS, identity)
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


def _identity(corpus: Corpus, config: TrainConfig) -> str:
    """A hash of the options that decide the counts, and of the inputs."""
    names = ("special_tokens", "pattern", "min_count", "text_field", "decode")
    deciding = [getattr(config, name) for name in names]
    told = json.dumps([*deciding, sorted(config.suffixes or ()), corpus.fingerprint()])
    return hashlib.sha256(told.encode()).hexdigest()
