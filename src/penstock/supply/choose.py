"""What a loader is asked for: which sources, with which weights, between which tokens.

In:    paths, names, weights and tokens as a user writes them
Out:   open sources, lists in the order of the sources, ids
Never: guesses between two meanings: it says what it was given and what it knows
"""

import difflib
import glob
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.errors import BadConfig, InputMissing, NoDataset, ProducerStalled, StateMismatch
from penstock.store.backends import open_store
from penstock.store.record import record_name
from penstock.stream.source import Source
from penstock.supply.convert import ConvertedSource
from penstock.supply.folders import COMPLETE, TELL_S, FolderSource, is_folder, some_of
from penstock.supply.shards import DatasetSource, ShardSource, SourceConfig
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.values import checked_path

_URLS: Final = ("s3://", "gs://", "az://", "file://")
SPLITS: Final = ("train", "val")

_log = logging.getLogger(__name__)


def open_source(
    url: str | ShardSource,
    config: SourceConfig,
    *,
    cache_dir: str | None = None,
    makes: bool = True,
) -> ShardSource:
    """The source at a path: a dataset, parquet files, or raw files, which become a dataset.

    Of several ranks one `makes` that dataset; the others follow it. A source that is one already
    stays as it is.
    """
    if isinstance(url, ShardSource):
        return url
    checked_path("path", url)
    if config.split not in SPLITS:
        raise BadConfig(f"split is {config.split!r}", do=f"choose from {', '.join(SPLITS)}")
    if config.streaming and url.startswith(_URLS):
        _await_record(url, config.stall_s, config.patience_s)
    elif config.streaming and (os.path.isdir(url) or _is_to_come(url)):
        _await_first(url, config.stall_s)
    if url.startswith(_URLS) or os.path.isdir(os.path.join(url, "_log")):
        return _filled(DatasetSource(url, config))
    if os.path.isfile(url) and not url.endswith(".parquet"):
        return ConvertedSource(Path(url), config, cache_dir, makes=makes)
    if is_folder(url):
        return FolderSource(url, config)
    if not os.path.exists(url):
        raise InputMissing(
            f"there is nothing at {url}", where=os.path.abspath(url), do="check the path"
        )
    return _filled(DatasetSource(url, config))


def _filled(source: DatasetSource) -> DatasetSource:
    """A dataset, unless it is known that nothing will ever come of it."""
    if source.is_sealed and source.ranged.size is None and not source.num_shards:
        split = source.config.split
        raise NoDataset(
            f"the dataset has no shards of split {split!r}",
            where=source.url,
            why="it is sealed: none will come",
            do="make it with --val_fraction above 0 and more documents"
            if split == "val"
            else "check its inputs: penstock show says what became of them",
        )
    return source


def _is_to_come(url: str) -> bool:
    """Whether a path names a directory that somebody may be about to make."""
    parent = os.path.dirname(os.path.abspath(url))
    plain = not url.startswith(_URLS) and not os.path.splitext(url)[1] and not glob.has_magic(url)
    return plain and not os.path.lexists(url) and os.path.isdir(parent)


def _await_record(url: str, stall_s: float, patience_s: float | None) -> None:
    """The same for a bucket, where only a log can show that a dataset begins."""
    store, begin, told = open_store(url, patience_s=patience_s), time.monotonic(), False
    while store.size(record_name(0)) is None:
        waited_s = time.monotonic() - begin
        if waited_s >= stall_s:
            raise ProducerStalled(
                f"no dataset has begun at {url} in {stall_s:g} s",
                where=f"{url}/{record_name(0)}",
                do="start what makes or pushes the dataset, check the address, "
                "or give streaming=False if nothing is to be waited for",
            )
        if waited_s >= TELL_S and not told:
            told = True
            _log.warning("%s: waiting for a dataset to begin", url)
        time.sleep(0.2)


def _await_first(folder: str, stall_s: float) -> None:
    """A trainer may start before its data: wait until a directory shows what it will be."""
    begin, told = time.monotonic(), False
    while not (
        os.path.exists(os.path.join(folder, record_name(0)))
        or os.path.exists(os.path.join(folder, COMPLETE))
        or (os.path.isdir(folder) and any(name.endswith(".parquet") for name in os.listdir(folder)))
    ):
        waited_s = time.monotonic() - begin
        if waited_s >= stall_s:
            raise ProducerStalled(
                f"nothing has come to {folder} for {stall_s:g} s",
                where=os.path.abspath(folder),
                why=_what_is_there(folder),
                do="start what makes the dataset, check the path, "
                "or give streaming=False if nothing is to be waited for",
            )
        if waited_s >= TELL_S and not told:
            told = True
            _log.warning(
                "%s: waiting for a dataset or for parquet files; %s", folder, _what_is_there(folder)
            )
        time.sleep(0.05)


def _what_is_there(folder: str) -> str:
    """What stands where a dataset was expected."""
    if not os.path.isdir(folder):
        parent = os.path.dirname(os.path.abspath(folder))
        near = difflib.get_close_matches(
            os.path.basename(os.path.abspath(folder)), os.listdir(parent)
        )
        return "there is no such directory yet" + (f"; there is {', '.join(near)}" if near else "")
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if not names:
        return "the directory is empty"
    one = os.path.join(folder, names[0])
    return (
        f"there is {some_of(names)}, no parquet file and no log; "
        f"penstock shard --input {one} --parquet_dir … makes a dataset of such files"
    )


def name_sources(
    path: str | Sequence[str] | Mapping[str, str | ShardSource],
) -> dict[str, str | ShardSource]:
    """Sources by name; without names they are called by the last part of their paths.

    >>> name_sources(["data/cpp", "s3://bucket/prose"])
    {'cpp': 'data/cpp', 'prose': 's3://bucket/prose'}
    """
    named: dict[str, str | ShardSource]
    if isinstance(path, Mapping):
        named = {
            str(name): url if isinstance(url, ShardSource) else str(url)
            for name, url in path.items()
        }
    else:
        urls = [path] if isinstance(path, str) or hasattr(path, "__fspath__") else list(path)
        if len({str(url) for url in urls}) < len(urls):
            raise BadConfig("a source is given twice", do="give each path once, with its weight")
        # by their last part: a state must fit the same data under another root
        short = [str(url).rstrip("/").rpartition("/")[2] for url in urls]
        alike = len(set(short)) < len(short)
        named = {
            str(url) if alike else name: str(url) for name, url in zip(short, urls, strict=True)
        }
    if not named:
        raise BadConfig("there is no source", do="give a path")
    return named


def listed_weights(weights: Mapping[str, float] | Sequence[float], names: list[str]) -> list[float]:
    """Weights in the order of the sources."""
    if not isinstance(weights, Mapping):
        return [float(weight) for weight in weights]
    if unknown := sorted(set(weights) - set(names)):
        raise unknown_source(unknown[0], names)
    if missing := [name for name in names if name not in weights]:
        raise BadConfig(f"source {missing[0]!r} has no weight", do="give a weight for each source")
    return [float(weights[name]) for name in names]


def count_shards(sources: Sequence[ShardSource]) -> list[float]:
    """Weights where none are given: how many shards of each source are used."""
    counts = []
    for source in sources:
        size = source.ranged.size
        if size is None and not source.is_closed:
            raise BadConfig(
                f"source {source.name!r} needs a weight",
                where=source.url,
                why="it is still growing and all of its shards are used: "
                "a share of a growing number is not a plan",
                do="give weights, or a bounded range of shards",
            )
        counts.append(float(size if size is not None else source.num_shards))
    return counts


def unknown_source(name: str, names: list[str]) -> BadConfig:
    """The error for a name that no source has."""
    return BadConfig(f"there is no source {name!r}", do=f"choose from {', '.join(names)}")


_BOS: Final = ("<|bos|>", "<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
_EOS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
_PAD: Final = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>")


def find_boundaries(
    tokenizer: Tokenizer | None, bos: str | None, eos: str | None
) -> tuple[int, int, int]:
    """Ids of the tokens before a document, after it, and of padding; -1 for none.

    With "auto" a document has one of the two: the first if the tokenizer has such a token.
    """
    known = {} if tokenizer is None else tokenizer.special_tokens

    def find(asked: str | None, names: tuple[str, ...], option: str) -> int:
        if not asked:
            return -1
        if asked == "auto":
            return next((known[name] for name in names if name in known), -1)
        if asked not in known:
            raise BadConfig(
                f"{option} {asked!r} is not a special token of the tokenizer",
                do=f"choose from {', '.join(known) or 'none: it has none'}, or None",
            )
        return known[asked]

    first = find(bos, _BOS, "bos")
    after = -1 if eos == "auto" and first >= 0 else find(eos, _EOS, "eos")
    pad = find("auto", _PAD, "pad")
    return first, after, pad if pad >= 0 else max(after, first, 0)


def check_length(source: ShardSource, chunk_size: int) -> None:
    """Rows must be as long as the chunks were allowed to be, or somebody mixed up two numbers."""
    for step in source.steps if isinstance(source, DatasetSource) else []:
        made_for = step.get("max_tokens") if step.get("step") == "chunk" else None
        if made_for is not None and made_for != chunk_size:
            raise BadConfig(
                f"rows of {chunk_size:,} tokens from a dataset of chunks of {made_for:,}",
                where=source.url,
                why="penstock chunk was told --max_tokens "
                f"{made_for}, which must match the trainer's --max_seq_len",
                do=f"train with {made_for:,}, chunk again with --max_tokens {chunk_size}, "
                "or say other_length=True if this is meant",
            )


def check_tokenizers(sources: Sequence[ShardSource]) -> None:
    """Refuse to mix tokens of different tokenizers: the same number would mean different text."""
    made = [source for source in sources if source.made_with]
    for source in made[1:]:
        if source.made_with != made[0].made_with:
            raise BadConfig(
                "the sources were made with different tokenizers",
                where=f"{made[0].url}, {source.url}",
                why=f"{made[0].name}: {made[0].made_with[:12]}…, "
                f"{source.name}: {source.made_with[:12]}…",
                do="make them with one tokenizer: penstock shard --tokenizer",
            )


def check_state(
    state: Mapping[str, Any], reads: int, saved: Mapping[str, Any], mine: Mapping[str, Any],
    sources: Sequence[Source], *, who: str = "loader", do: str,
) -> None:  # fmt: skip
    """Refuse a state of another format, other settings or other data, and say what differs."""
    if state.get("format") != reads:
        raise StateMismatch(
            f"the state is of format {state.get('format')}",
            why=f"this penstock reads format {reads}",
            do="use the penstock that made it",
        )
    differences = [
        f"{key}: the state has {saved.get(key)!r}, this {who} {value!r}"
        for key, value in mine.items()
        if saved.get(key) != value
    ]
    for source, seen in zip(sources, state["sources"], strict=False):
        if wrong := source.check_identity(seen):
            differences.append(f'source "{source.name}": {wrong}')
    if differences:
        raise StateMismatch(
            "the state was made under other data or settings",
            why="\n".join(differences),
            do=do,
        )
