"""Shards that penstock did not write: a directory of parquet files, a glob, a single file.

In:    names of parquet files
Out:   a source for the plan, like a dataset
Keeps: an order that only grows: while files still come, they must be numbered from 0 on
Never: takes a quiet directory for a finished one; uses a file whose end is not written yet, or
       one that is not any more what it was when it was first looked at

A directory is finished when it holds `_COMPLETE`, when its files are numbered like 00002-of-00003
and all are there, or when the loader is told streaming=False.
"""

import glob
import hashlib
import logging
import os
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import BadConfig, NoDataset, ProducerStalled, ShardMismatch
from penstock.supply.sources.dataset import ShardFile, ShardSource, SourceConfig

COMPLETE: Final = "_COMPLETE"
TELL_S: Final = 2.0
"""Whoever waits so long says what for."""
_NUMBERED: Final = re.compile(r"(.*?)(\d+)(?:-of-(\d+))?\.parquet")
_VALIDATION: Final = re.compile(r"val(idation)?([-_.].*)?")
_LINES: Final = re.compile(r"[^._].*\.(jsonl|ndjson)(\.(gz|zst|bz2|xz|lz4))?")
_MAGIC: Final = b"PAR1"

_log = logging.getLogger(__name__)


def is_folder(path: str) -> bool:
    """Whether a path is a directory without a log, a glob, or a parquet file."""
    if path.endswith(".parquet") or glob.has_magic(path):
        return True
    folder = Path(path)
    return folder.is_dir() and not (folder / "_log").is_dir()


def split_of(name: str) -> str:
    """What a file is for, by its name.

    >>> [split_of(n) for n in ("val_shard.parquet", "validation-0.parquet", "values-0.parquet")]
    ['val', 'val', 'train']
    """
    return "val" if _VALIDATION.fullmatch(name) else "train"


def by_number(path: str) -> list[tuple[int, str]]:
    """Sorts names by the numbers in them: s_2 before s_10.

    >>> sorted(["s_10.parquet", "s_2.parquet"], key=by_number)
    ['s_2.parquet', 's_10.parquet']
    """
    parts = re.split(r"(\d+)", path)
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in parts]


def some_of(names: Sequence[str]) -> str:
    """Names for a message.

    >>> some_of(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class FolderSource(ShardSource):
    """Parquet files in a directory, in the order of their numbers and names."""

    unit = "directory"

    def __init__(self, url: str, config: SourceConfig) -> None:
        super().__init__(url, config)
        self._is_folder = os.path.isdir(url)
        self._complete = not self._is_folder or not config.streaming
        self._footers: dict[str, str] = {}
        self._unused = ""
        """Which files are there and not used, and why."""
        self._refresh()
        if not self._files and self._complete:
            raise NoDataset(
                f"there is nothing to train on at {url}",
                why=self._unused or "no parquet file, and no log of a dataset",
                do="check the path, or make a dataset with penstock chunk or penstock shard",
            )

    @property
    def is_sealed(self) -> bool:
        return self._complete

    @property
    def how_to_finish(self) -> str:
        """What to do about a directory that is waited for in vain."""
        marker = shlex.quote(os.path.join(self.url, COMPLETE))
        return f"if all files are there, give streaming=False or: touch {marker}"

    def _refresh(self) -> None:
        # first the sentinel, then the files: whatever came before it is in the list
        complete = self._complete or os.path.exists(os.path.join(self.url, COMPLETE))
        paths, are_all = self._paths(), complete
        known = [file.name for file in self._files]
        if paths[: len(known)] != known:
            wrong = next((a for a, b in zip(paths, known, strict=False) if a != b), "one of them")
            raise ShardMismatch(
                f"the files at {self.url} are not those seen before",
                where=str(wrong),
                why="a file came before, or vanished from, those that are in use",
                do="give files names that sort in the order in which they come, and keep them",
            )
        if not complete:
            paths, are_all = self._numbered(paths)
        for path in paths[len(known) :]:
            file = self._look_at(path, complete=complete)
            if file is None:
                self._unused = f"{os.path.basename(path)} is not written to its end"
                return
            self._files.append(file)
        self._complete = are_all

    def _paths(self) -> list[str]:
        """The files of our split."""
        if self._is_folder:
            found = [os.path.join(self.url, name) for name in os.listdir(self.url)]
        elif glob.has_magic(self.url):
            found = glob.glob(self.url)
            self._refuse_datasets(found)
        else:
            return [self.url]
        self._refuse_lines(found)
        found = [
            path
            for path in sorted(found, key=by_number)
            if path.endswith(".parquet") and not os.path.basename(path).startswith((".", "_"))
        ]
        wanted = [p for p in found if split_of(os.path.basename(p)) == self.config.split]
        if found and not wanted:
            names = some_of([os.path.basename(path) for path in found])
            self._unused = f"{names}: by their names not of split {self.config.split!r}"
        return wanted

    def _refuse_lines(self, paths: Sequence[str]) -> None:
        """Parquet files alone are read: JSON lines beside them would be left out unseen."""
        names = sorted(os.path.basename(path) for path in paths)
        lines = [name for name in names if _LINES.fullmatch(name)]
        if lines and any(name.endswith(".parquet") for name in names):
            inside = self.url if self._is_folder else os.path.dirname(self.url)
            raise BadConfig(
                f"{self.url} has parquet files and JSON lines",
                where=os.path.abspath(inside),
                why=f"{some_of(lines)}: a source is one of the two",
                do=f'give "{os.path.join(inside, "*.parquet")}" for the parquet files alone, or '
                "both as sources of their own",
            )

    def _refuse_datasets(self, paths: Sequence[str]) -> None:
        """A dataset is more than its files: its log says which count, and for what."""
        for folder in sorted({os.path.dirname(path) for path in paths}):
            if os.path.isdir(os.path.join(folder, "_log")):
                raise BadConfig(
                    f"{self.url} names files of a dataset",
                    where=folder,
                    why="its log says which files belong to it, and which are for validation",
                    do=f"give the directory, {folder or '.'}; shard_ranges chooses some shards",
                )

    def _numbered(self, paths: list[str]) -> tuple[list[str], bool]:
        """While files still come: those before the first gap in their numbers, from 0 on; and
        whether their names say that these are all."""
        found: list[str] = []
        totals: set[str | None] = set()
        self._unused = "" if paths else self._unused
        for path in paths:
            name = os.path.basename(path)
            match = _NUMBERED.fullmatch(name)
            if match is None:
                raise BadConfig(
                    f"{name} has no number",
                    where=self.url,
                    why="the directory has no _COMPLETE, and what comes next must be known",
                    do=f"{self.how_to_finish}, or number them",
                )
            if (number := int(match[2])) < len(found):
                raise BadConfig(
                    f"two files have number {number}: {os.path.basename(found[number])}, {name}",
                    where=self.url,
                    why="the directory has no _COMPLETE, and what comes next must be known",
                    do=f'give one kind of them, "{os.path.join(self.url, match[1])}*.parquet", or, '
                    f"{self.how_to_finish}",
                )
            if number > len(found):  # one before it is still to come
                rest = [os.path.basename(path) for path in paths[len(found) :]]
                self._unused = f"{some_of(rest)}: file number {len(found)} must come first"
                break
            found.append(path)
            totals.add(match[3])
        total = totals.pop() if len(totals) == 1 else None
        return found, total is not None and len(found) == len(paths) == int(total)

    def _look_at(self, path: str, *, complete: bool) -> ShardFile | None:
        """Its rows; None while it is still being written."""
        try:
            with open(path, "rb") as file:
                size, footer = _footer(file)
            if not footer and not complete:
                return None
            opened = pq.ParquetFile(path)
        except FileNotFoundError:
            raise NoDataset(
                f"there is nothing at {path}", do="check the path, or wait until it is written"
            ) from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ShardMismatch(
                f"{os.path.basename(path)} is not a parquet file that can be read",
                where=path,
                why=str(error).splitlines()[0][:200],
                do="write it again, or take it away",
            ) from None
        names = opened.schema_arrow.names
        if self.config.text_field and self.config.text_field not in names:
            raise ShardMismatch(
                f"{os.path.basename(path)} has no column {self.config.text_field!r}",
                where=path,
                why=f"its columns are {', '.join(names)}",
                do="name the column of the text with text_field",
            )
        self._footers[path] = footer
        return ShardFile(path, opened.metadata.num_rows, size, None, None)

    def _wait(self) -> None:
        known, begin, pause_s = len(self._files), time.monotonic(), 0.02
        told = False
        while len(self._files) == known and not self._complete:
            waited_s = time.monotonic() - begin
            why = f"{known} files were read" + (f"; {self._unused}" if self._unused else "")
            if waited_s >= self.config.stall_s:
                raise ProducerStalled(
                    f"no new file for {self.config.stall_s:g} s, and no {COMPLETE}",
                    where=self.url,
                    why=f"{why}; silence is not the end",
                    do=f"{self.how_to_finish}; else start what writes them",
                )
            if waited_s >= TELL_S and not told:
                told = True
                _log.warning(
                    "%s: waiting for file number %d, or for a file %s, which says that all have "
                    "come; %s; %s",
                    self.url, known, COMPLETE, why, self.how_to_finish,
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(1.0, 1.3 * pause_s)
            self._refresh()

    def _open(self, name: str) -> Any:
        with open(name, "rb") as file:
            self._refuse_changed(name, *_footer(file))
        return pa.OSFile(name)

    def _read(self, name: str) -> bytes:
        data = Path(name).read_bytes()
        with pa.BufferReader(data) as file:
            self._refuse_changed(name, *_footer(file))
        return data

    def _refuse_changed(self, name: str, size: int, footer: str) -> None:
        if footer != self._footers.get(name, footer):
            raise ShardMismatch(
                f"{os.path.basename(name)} is not the file that it was",
                where=f'source "{self.name}", {name}',
                why=f"its {size:,} bytes end otherwise than when it was first looked at",
                do="put it back, or start the training anew on the new files",
            )

    def content_key(self, shard: int) -> str:
        file = self.file(shard)
        return f"{os.path.abspath(file.name)} {self._footers[file.name]}"

    def _cache_key(self, file: ShardFile) -> str:
        """Nobody has hashed the file, so that it is known again for a run and no longer."""
        if not getattr(self.config.cache, "is_of_run", False):
            return ""
        try:
            about = os.stat(file.name)
        except OSError:
            return ""
        seen = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        made_by = f"{self._fingerprint} {self.config.text_field}"
        return f"file 1 {seen} {self._footers.get(file.name)} {made_by}"

    def place(self, file: ShardFile) -> str:
        return file.name

    def _gone(self, file: ShardFile) -> ShardMismatch:
        return ShardMismatch(
            f"{os.path.basename(file.name)} is missing",
            where=f'source "{self.name}", {file.name}',
            why="it was there when the directory was looked at",
            do="put it back",
        )

    def _checked(
        self, opened: pq.ParquetFile, file: ShardFile, columns: Sequence[str]
    ) -> pq.ParquetFile:
        names = opened.schema_arrow.names
        for name in columns:
            if name in names:
                continue
            bans = name == "doc_id" and bool(self.config.banned)
            raise ShardMismatch(
                f"{os.path.basename(file.name)} has no column {name!r}",
                where=f'source "{self.name}", {file.name}',
                why=f"its columns are {', '.join(names)}",
                do="bans name documents by doc_id: add that column, or leave ban out"
                if bans
                else "write it again with that column, or choose others",
            )
        return opened

    def identity(self) -> dict[str, str | int]:
        return {
            "files": len(self._files),
            "digest": self._digest(len(self._files)),
            "shards": self.ranged.text,
        }

    def _digest(self, count: int) -> str:
        lines = [
            f"{os.path.basename(file.name)} {file.bytes} {file.rows} {self._footers[file.name]}\n"
            for file in self._files[:count]
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_identity(self, seen: dict[str, str | int]) -> str:
        count = seen.get("files")
        if not isinstance(count, int):
            return "the state is of a dataset with a log"
        if seen.get("shards") != self.ranged.text:
            return f"shard_ranges: the state has {seen.get('shards')}, this {self.ranged.text}"
        while count > len(self._files) and not self.is_sealed:  # a copy may lag behind
            self._wait()
        if count > len(self._files):
            return f"the state saw {count} files, {len(self._files)} are there"
        if self._digest(count) != seen.get("digest"):
            return f"the first {count} files are not those that the state saw"
        return ""


def _footer(file: BinaryIO | pa.NativeFile) -> tuple[int, str]:
    """The size of a parquet file and a hash of it and of its end, which says where each column's
    pages are, how large they are and what their least and greatest values; empty if it has none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    tail = file.read(8)
    if len(tail) < 8 or tail[4:] != _MAGIC:
        return size, ""
    length = min(size, int.from_bytes(tail[:4], "little") + 8)
    file.seek(size - length)
    return size, hashlib.sha256(b"%d " % size + file.read(length)).hexdigest()
