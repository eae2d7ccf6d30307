"""What a loader is asked for: which sources, with which weights, between which tokens.

In:    paths, names, weights and tokens as a user writes them
Out:   open sources, lists in the order of the sources, ids
Never: guesses between two meanings: it says what it was given and what it knows
"""

import glob
import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.cache.disk import Cache
from penstock.errors import BadConfig, InputMissing, NoDataset, ProducerStalled
from penstock.options import checked_path, nearest, whole
from penstock.store.record import record_name
from penstock.store.store import open_store
from penstock.stream.plan import PlanConfig
from penstock.supply.engine import Mix
from penstock.supply.settings import DocumentConfig, LoaderRun
from penstock.supply.sources.dataset import DatasetSource, ShardSource, SourceConfig
from penstock.supply.sources.dataset import Recipe as Recipe
from penstock.supply.sources.folder import COMPLETE, TELL_S, FolderSource, is_folder
from penstock.supply.sources.raw import ConvertedSource, is_raw
from penstock.supply.verified import join_run
from penstock.tokenize.tokenizer import Tokenizer

_URLS: Final = ("s3://", "gs://", "az://", "file://")

_TO_COME: Final = (
    "run=LoaderRun(wait_s=…), or base_train.py --streaming_data, waits for one that is yet to come"
)

_log = logging.getLogger(__name__)


def open_source(
    url: "Opened",
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
    if isinstance(url, list):
        for one in url:
            if config.streaming and config.wait_s:
                _await_path(one, config)
            if not is_raw(checked_path("path", one)):
                raise (
                    BadConfig(
                        f"{one} is not a raw file",
                        why="a list of paths under one name is of raw files",
                        do="give datasets and directories of parquet files names of their own",
                    )
                    if os.path.exists(one)
                    else _nothing_at(one)
                )
        return ConvertedSource([Path(one) for one in url], config, cache_dir, makes=makes)
    checked_path("path", url)
    if DatasetSource.is_first(url):
        return _filled(DatasetSource.newest(url, config))
    if url.startswith(_URLS):
        if config.streaming:
            _await_record(url, config.wait_s, config.patience_s)
        return _filled(DatasetSource.newest(url, config))
    if config.streaming:
        await_first(url, config.wait_s, config.stall_s)
    if os.path.isdir(os.path.join(url, "_log")):
        return _filled(DatasetSource.newest(url, config))
    if is_raw(url):
        return ConvertedSource([Path(url)], config, cache_dir, makes=makes)
    if is_folder(url):
        return FolderSource(url, config)
    if not os.path.exists(url):
        raise _nothing_at(url)
    return _filled(DatasetSource(url, config))


def _what_is_there(path: str) -> str:
    """What stands where a source was expected."""
    if os.path.isdir(path):
        return "the directory is empty"
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        return f"there is no directory {parent}"
    near = nearest(os.path.basename(os.path.abspath(path)), os.listdir(parent))
    return "there is no such path" + (f"; there is {near}" if near else "")


def _nothing_at(path: str) -> InputMissing:
    """The error for a path at which there is nothing."""
    return InputMissing(
        f"there is nothing at {path}",
        where=os.path.abspath(path),
        why=_what_is_there(path),
        do=f"check the path; {_TO_COME}",
    )


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


def _await_record(url: str, wait_s: float, patience_s: float | None) -> None:
    """Wait for a dataset in a bucket to begin, where only a log can show that."""
    store, begin, told = open_store(url, patience_s=patience_s), time.monotonic(), False
    while store.size(record_name(0)) is None:
        waited_s = time.monotonic() - begin
        if waited_s >= wait_s:
            raise InputMissing(
                f"there is no dataset at {url}"
                + (f", nor has one begun in {wait_s:g} s" if wait_s else ""),
                where=f"{url}/{record_name(0)}",
                do="check the address, and start what makes or pushes the dataset "
                f"(penstock push); {_TO_COME}",
            )
        if waited_s >= TELL_S and not told:
            told = True
            _log.warning("%s: waiting for a dataset to begin", url)
        time.sleep(0.2)


def await_first(path: str, wait_s: float, stall_s: float) -> None:
    """A trainer may start before its data: wait until a path shows what it will be. One at which
    there is nothing is waited for if that was asked for; an empty directory is, by itself."""
    begin, told = time.monotonic(), False
    while not _shows_what_it_is(path):
        waited_s = time.monotonic() - begin
        is_there = os.path.isdir(path)
        limit_s = max(stall_s, wait_s) if is_there else wait_s
        if waited_s >= limit_s and not (is_there or wait_s):
            raise _nothing_at(path)
        if waited_s >= limit_s:
            raise ProducerStalled(
                f"nothing has come to {path} for {limit_s:g} s",
                where=os.path.abspath(path),
                why=_what_is_there(path),
                do="start what makes the dataset (penstock chunk, shard or pull), check the path, "
                "or give streaming=False if nothing is to be waited for",
            )
        if waited_s >= TELL_S and not told:
            told = True
            _log.warning("%s: waiting for a dataset or files; %s", path, _what_is_there(path))
        time.sleep(0.05)


def _await_path(path: str, config: SourceConfig) -> None:
    """The same for one of a list, which may be an address too."""
    if not path.startswith(_URLS) and not DatasetSource.is_first(path):
        await_first(path, config.wait_s, config.stall_s)


def _shows_what_it_is(path: str) -> bool:
    """Whether a path has what a source is made of: a record, files, a file, what a glob finds."""
    if glob.has_magic(path) and not os.path.exists(path):
        return bool(glob.glob(path, recursive=True))
    if not os.path.isdir(path):
        return os.path.exists(path) and not os.path.isdir(path)  # made between the two looks
    if os.path.isdir(os.path.join(path, "_log")):
        return os.path.exists(os.path.join(path, record_name(0)))
    names = os.listdir(path)
    return COMPLETE in names or any(not name.startswith((".", "_")) for name in names)


Address = str | os.PathLike[str]
Opened = str | ShardSource | list[str]
"""What one source is opened from; a list is of raw files."""
Paths = Address | Sequence[Address] | Mapping[str, Address | ShardSource | Sequence[Address]]


def open_sources(
    path: Paths,
    documents: DocumentConfig,
    run: LoaderRun,
    *,
    tokenizer: Tokenizer | None = None,
    streaming: bool = True,
    seq_len: int | None = None,
    extra_tokens: int = 0,
    cache: Cache | None = None,
    recipe: Recipe | None = None,
    weighted: bool = True,
) -> list[ShardSource]:
    """All sources, open, each with its name and its shards; rows of `seq_len` are to be made.

    Raw files in a list without weights are one source, as they are for `penstock chunk`."""
    paths: Paths = path
    if isinstance(path, list | tuple):
        listed = [str(one) for one in path]
        if streaming and run.wait_s:  # what they are is seen when they are there
            for one in listed:
                _await_path(one, SourceConfig(**run.waiting_limits()))
        is_one = len(listed) > 1 and not weighted and all(is_raw(one) for one in listed)
        paths = {"files": listed} if is_one else listed
    count = len(paths) if isinstance(paths, list | Mapping) else 1
    ranges = documents.ranges(count)
    rank, ranks = run.found_rank()
    marks = join_run(ranks, run.run_dir)
    found = []
    for (name, url), chosen in zip(_named(paths, ranges), ranges, strict=True):
        config = SourceConfig(
            name=name, tokenizer=tokenizer, shards=chosen, banned=documents.ban,
            split=documents.split, extra_tokens=extra_tokens, text_field=documents.text_field,
            streaming=streaming, cache=cache, marks=marks, recipe=recipe,
            seq_len=None if documents.other_length else seq_len,
            **run.waiting_limits(),
        )  # fmt: skip
        source = open_source(url, config, cache_dir=run.cache_dir, makes=rank == 0)
        if not streaming and not source.is_closed:
            raise BadConfig(
                "the dataset is not sealed",
                where=source.url,
                do="give streaming=True (base_train.py: --streaming_data) to train while it grows, "
                f"or let its producer end: penstock show {shlex.quote(source.url)} says how far it "
                "is, and penstock shard --complete seals what is made of a finished file",
            )
        if seq_len is not None and not documents.other_length:
            _check_length(source, seq_len)
        if source.ranged.size is not None and source.is_sealed:
            source.has_shard(source.ranged.size - 1)  # says so, if there is no such shard
        found.append(source)
    return found


def _named(path: Paths, ranges: Sequence[str]) -> list[tuple[str, Opened]]:
    """Sources with names; without names they are called by the last part of their paths.

    >>> _named(["data/cpp", "s3://bucket/prose"], ["all", "all"])
    [('cpp', 'data/cpp'), ('prose', 's3://bucket/prose')]
    >>> _named(["data/cpp", "data/cpp"], ["0-9", "20-29"])
    [('cpp 0-9', 'data/cpp'), ('cpp 20-29', 'data/cpp')]
    """
    if isinstance(path, Mapping):
        named: list[tuple[str, Opened]] = [
            (
                str(name),
                url
                if isinstance(url, ShardSource)
                else [str(one) for one in url]
                if isinstance(url, list | tuple)
                else str(url),
            )
            for name, url in path.items()
        ]
    else:
        urls = [str(url) for url in ([path] if isinstance(path, str | os.PathLike) else path)]
        if len(set(zip(urls, ranges, strict=True))) < len(urls):
            raise BadConfig("a source is given twice", do="give each path once, with its weight")
        # by their last part: a state must fit the same data under another root
        names = [url.rstrip("/").rpartition("/")[2] for url in urls]
        if len(set(urls)) < len(urls):
            names = [f"{name} {chosen}" for name, chosen in zip(names, ranges, strict=True)]
        if len(set(names)) < len(names):
            names = urls
        named = list(zip(names, urls, strict=True))
    if not named:
        raise BadConfig("there is no source", do="give a path")
    return named


def mix_sources(sources: Sequence[ShardSource], config: PlanConfig, batch_rows: int) -> Mix:
    """The mixture of some sources, as a plan's settings say; a batch has `batch_rows` rows."""
    names = [source.name for source in sources]
    limits = {
        name: whole(f"source_epochs of {name!r}", limit, 1)
        for name, limit in (config.source_epochs or {}).items()
    }
    if unknown := sorted(set(limits) - set(names)):
        raise unknown_source(unknown[0], names)
    weights = [1.0]
    if config.weights is not None:
        weights = listed_weights(config.weights, names)
    elif len(names) > 1:
        weights = _count_shards(sources)
    stages = [
        (whole("a step of weight_schedule", step, 0) * batch_rows, listed_weights(shares, names))
        for step, shares in sorted((config.weight_schedule or {}).items())
    ]
    epochs = [limits.get(name, config.epochs) for name in names]
    return Mix(config, names, weights, stages, epochs)


def listed_weights(weights: Mapping[str, float] | Sequence[float], names: list[str]) -> list[float]:
    """Weights in the order of the sources."""
    if not isinstance(weights, Mapping):
        return [float(weight) for weight in weights]
    if unknown := sorted(set(weights) - set(names)):
        raise unknown_source(unknown[0], names)
    if missing := [name for name in names if name not in weights]:
        raise BadConfig(f"source {missing[0]!r} has no weight", do="give a weight for each source")
    return [float(weights[name]) for name in names]


def _count_shards(sources: Sequence[ShardSource]) -> list[float]:
    """Weights where none are given: how many shards of each source are used. Raw files become
    shards while they are trained on: among themselves they are weighed by their bytes."""
    raw = [source for source in sources if isinstance(source, ConvertedSource)]
    if len(raw) == len(sources) and all(source.ranged.size is None for source in raw):
        return [float(max(1, source.num_bytes)) for source in raw]
    counts = []
    for source in sources:
        if isinstance(source, ConvertedSource) and source.ranged.size is None:
            raise BadConfig(
                f"source {source.name!r} needs a weight",
                where=str(source.paths[0]),
                why="weights are numbers of shards where none are given, and it is made of raw "
                "files, which become shards while they are trained on",
                do="give weights, or make a dataset of the files: penstock shard, penstock chunk",
            )
        size = source.ranged.size
        if size is None and not source.is_closed:
            why, do = "it is still growing", "give weights, or a bounded range of shards"
            if isinstance(source, FolderSource):
                why, do = f"it has no {COMPLETE}: more may come", f"{do}; {source.how_to_finish}"
            raise BadConfig(
                f"source {source.name!r} needs a weight",
                where=source.url,
                why=f"{why}, and all of its shards are used: a share of a growing number is not a "
                "plan",
                do=do,
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


def _check_length(source: ShardSource, chunk_size: int) -> None:
    """Rows must be as long as the chunks were allowed to be, or somebody mixed up two numbers."""
    if isinstance(source, DatasetSource):
        made_for = source.chunk_length
        if made_for is not None and made_for != chunk_size:
            raise BadConfig(
                f"rows of {chunk_size:,} tokens from a dataset of chunks of {made_for:,}",
                where=source.url,
                why="penstock chunk was told --max_tokens "
                f"{made_for}, which must match the trainer's --max_seq_len",
                do=f"train with {made_for:,} (chunk_size, or base_train.py --max_seq_len "
                f"{made_for}), chunk again with penstock chunk --max_tokens {chunk_size}, "
                "or give documents=DocumentConfig(other_length=True) if this is meant"
                + "".join(f"\nthere is {url}: {told}" for url, told in source.others.items()),
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


def refuse_repeats(shards: Sequence[ShardSource]) -> None:
    """Refuse ranges of one directory that share a shard: its rows would come twice in a pass."""
    for k, source in enumerate(shards):
        for earlier in shards[:k]:
            if earlier.url == source.url and earlier.ranged.shares(source.ranged):
                raise BadConfig(
                    f"the shard ranges {earlier.ranged.text!r} and {source.ranged.text!r} overlap",
                    where=source.url,
                    why="they are of one directory: what both hold would come twice in a pass",
                    do="give ranges that share no shard; weights say how often a source is drawn",
                )
