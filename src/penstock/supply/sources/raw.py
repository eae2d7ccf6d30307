"""Raw files as a source: they become a dataset, which is read while it is made.

In:    what `penstock chunk` reads: files, trees, archives, globs
Out:   a source for the plan, over the dataset that they become
Keeps: a state that fits the same path on any machine: what was made counts, not where and when
Never: hides what went wrong while it was made; makes again what is there
"""

import contextlib
import glob
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock.cache.open import is_own
from penstock.errors import (
    BadInput,
    Fenced,
    InputReplaced,
    NoDataset,
    ProducerStalled,
    TooManyRejects,
)
from penstock.ingest.find import expand_inputs, walk_folder
from penstock.ingest.formats import ReadConfig
from penstock.ingest.inputs import open_input
from penstock.ingest.lines import read_done
from penstock.produce.dataset import prepare_dataset
from penstock.store.log import Log
from penstock.store.store import local_path
from penstock.supply.sources.dataset import DatasetSource, SourceConfig

LOOK_S: Final = 0.5
"""How often one that waits for a shard asks whether it is still being made."""


class Making(threading.Thread):
    """Makes the dataset of a raw file, in the background."""

    def __init__(self, paths: Sequence[Path], folder: Path, config: SourceConfig) -> None:
        super().__init__(name="penstock-convert", daemon=True)
        self._paths, self._folder, self._config = paths, folder, config
        self._failed: BaseException | None = None

    def run(self) -> None:
        read, recipe = ReadConfig(text_field=self._config.text_field), self._config.recipe
        try:
            if recipe is not None:
                recipe.make(expand_inputs([str(path) for path in self._paths]), str(self._folder))
            else:
                prepare_dataset(self._paths, self._folder, read=read)
        except Fenced:  # another process makes the same dataset, and it is followed like ours
            return
        except InputReplaced as error:  # the producer noticed first; the loader's advice is another
            self._failed = _changed(self._paths, error.why)
        except TooManyRejects as error:
            self._failed = TooManyRejects(
                error.what.partition(";")[0],
                where=error.where,
                why=error.why,
                do="name the field that holds the text with text_field, or fix the file; "
                "penstock shard --max_rejects makes a dataset of what is left"
                if recipe is None
                else "fix the file; penstock conversations --max_rejects makes a dataset of what "
                "is left",
            )
        except BaseException as error:
            self._failed = error

    def check(self) -> None:
        """Raise what went wrong."""
        if self._failed is not None:
            self._failed.add_note(f"while {_told(self._paths)} became a dataset at {self._folder}")
            raise self._failed


_FOLLOW: Final = (
    "penstock shard --input {path} --parquet_dir DATASET follows a file that grows: train on "
    "DATASET, live; or start again when the file is complete"
)


def _told(paths: Sequence[Path]) -> str:
    """Paths for a message."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _changed(paths: Sequence[Path], why: str) -> InputReplaced:
    name = paths[0].name if len(paths) == 1 else f"one of {len(paths)} inputs"
    return InputReplaced(
        f"{name} has changed while it was read",
        where=_told(paths),
        why=why,
        do=_FOLLOW.format(path=paths[0]),
    )


def _refuse_unfinished(path: Path) -> None:
    """A file that somebody says is not complete yet is not taken for a finished one."""
    promised, size = read_done(path), path.stat().st_size
    why = ""
    if promised is not None and promised > size:
        why = f"its .done marker promises {promised:,} bytes, and it has {size:,}"
    elif promised is None and path.with_name(path.name + ".progress").exists():
        why = f"{path.name}.progress is there, and no {path.name}.done: it is still being written"
    if why:
        raise InputReplaced(
            f"{path.name} is not complete", where=str(path), why=why, do=_FOLLOW.format(path=path)
        )


def is_raw(path: str) -> bool:
    """Whether a path names what becomes a dataset: a file, a glob, or a tree without parquet."""
    if os.path.isfile(path):
        return not path.endswith(".parquet")
    if glob.has_magic(path) and not os.path.isdir(path):
        found = glob.glob(path, recursive=True)
        return bool(found) and not any(name.endswith(".parquet") for name in found)
    if not os.path.isdir(path) or os.path.isdir(os.path.join(path, "_log")):
        return False
    any_file = False
    for name, *_ in walk_folder(path):
        if name.endswith(".parquet"):
            return False
        any_file = True
    return any_file


def _list_files(paths: Sequence[Path]) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    for number, name in enumerate(expand_inputs([str(path) for path in paths])):
        with contextlib.closing(open_input(name, number, ReadConfig(order="path"))) as opened:
            found += list(opened.files())
    return found


class ConvertedSource(DatasetSource):
    """The dataset that a raw file becomes, beside other things that can be made again.

    It is made while the trainer already reads it: the first shard is enough to begin with.
    """

    def __init__(
        self, paths: Sequence[Path], config: SourceConfig, cache_dir: str | None, *, makes: bool
    ) -> None:
        """Of several ranks one `makes` it; the others follow."""
        for name in expand_inputs([str(path) for path in paths]):
            if os.path.isfile(name):
                _refuse_unfinished(Path(name))
        files = _list_files(paths)
        self.num_bytes = sum(size for _, size, _ in files)
        """Bytes of all files."""
        about = "\n".join(f"{os.path.realpath(name)} {n} {when}" for name, n, when in files)
        # datasets of an earlier penstock were made by path
        made_by = f" {config.text_field} {ReadConfig().order}"
        about += made_by if config.recipe is None else config.recipe.about
        if cache_dir is None or not is_own(cache_dir):  # others could change the dataset
            cache_dir = os.path.expanduser("~/.cache/penstock")
        home = Path(local_path(cache_dir))
        os.makedirs(home, 0o700, exist_ok=True)  # a cache of one's own, whatever the umask is
        folder = home / "datasets" / hashlib.sha256(about.encode()).hexdigest()[:32]
        self.paths = paths
        self._making: Making | None = None
        if makes:
            self._making = Making(paths, folder, config)
            self._making.start()
        self._await_log(folder, config.stall_s)
        # whatever the field was called, the dataset's is text
        super().__init__(str(folder), replace(config, text_field="text"))
        while not (config.streaming or self.is_sealed):  # who does not stream gets all of it
            self._wait()

    @property
    def grows(self) -> bool:
        """The files are finished, however far their dataset is: batches must not depend on that."""
        return False

    def has_shard(self, shard: int) -> bool | None:
        there = super().has_shard(shard)
        if there is False:  # the end of the file as it was: it must be its end now
            self.check_end()
            if self.log.state.is_empty:
                raise self._nothing_kept()
        return there

    def _nothing_kept(self) -> BadInput:
        dropped: Counter[str] = Counter()
        for known in self.log.state.inputs.values():
            dropped.update(known.dropped)
        told = ", ".join(f"{reason} {count:,}" for reason, count in dropped.most_common())
        return BadInput(
            "there is nothing to train on",
            where=", ".join(map(str, self.paths[:3])),
            why=f"all documents were refused: {told}" if told else "the files hold no document",
            do="check the path and text_field; penstock chunk says more of each file",
        )

    def check_end(self) -> None:
        if not all(path.exists() or glob.has_magic(str(path)) for path in self.paths):
            return  # what was made of them is all there
        size = sum(size for _, size, _ in _list_files(self.paths))
        if size != self.num_bytes:
            raise _changed(
                self.paths,
                f"it had {self.num_bytes:,} bytes when the loader opened it, and has {size:,} now",
            )

    def _await_log(self, folder: Path, stall_s: float) -> None:
        deadline = time.monotonic() + stall_s
        while True:
            try:
                Log.open(folder)
            except NoDataset:
                self._check()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def _check(self) -> None:
        if self._making is not None:
            self._making.check()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_making": None}

    def _wait(self) -> None:
        deadline = time.monotonic() + self.config.stall_s
        while True:
            self._check()
            left = max(0.0, deadline - time.monotonic())
            try:
                self.log.wait(stall_s=min(LOOK_S, left))
            except ProducerStalled as error:
                if left > LOOK_S:
                    continue
                raise ProducerStalled(
                    f"nothing new was made of {_told(self.paths)} for {self.config.stall_s:g} s",
                    where=error.where,
                    why="the process that makes its dataset is gone, or is very slow",
                    do="start the run again: it goes on where that process was",
                ) from None
            self._list_files()
            return

    def identity(self) -> dict[str, str | int]:
        return {
            "made": len(self._files),
            "digest": self._digest(len(self._files)),
            "shards": self.ranged.text,
            "split": self.config.split,
        }

    def _digest(self, count: int) -> str:
        lines = [f"{file.name} {file.sha256}\n" for file in self._files[:count]]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_identity(self, seen: dict[str, str | int]) -> str:
        count = seen.get("made")
        if not isinstance(count, int):
            return "the state is not of a raw file"
        mine = self.identity()
        for key, label in (("shards", "shard_ranges"), ("split", "split")):
            if seen.get(key) != mine[key]:
                return f"{label}: the state has {seen.get(key)}, this source {mine[key]}"
        while len(self._files) < count and not self.is_sealed:  # it is being made again
            self._wait()
        if len(self._files) < count:
            return f"the state saw {count} shards of the file, it gives {len(self._files)}"
        if self._digest(count) != seen.get("digest"):
            return (
                f"the first {count} shards made of {_told(self.paths)} are others: the file has "
                "changed, is given by another path, which is part of its documents' source, or was "
                "made into shards by another version of penstock or pyarrow"
            )
        return ""
