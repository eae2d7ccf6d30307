"""Shards that penstock did not write: a directory of parquet files, a glob, a single file.

In:    names of parquet files
Out:   a source for the plan, like a dataset
Keeps: an order that only grows: while files still come, they must be numbered from 0 on
Never: takes a quiet directory for a finished one; uses a file whose end is not written yet

A directory is finished when it holds `_COMPLETE`, or when the loader is told streaming=False.
"""

import glob
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import BadConfig, NoDataset, ProducerStalled, ShardMismatch
from penstock.supply.shards import ShardFile, ShardSource, SourceConfig

COMPLETE: Final = "_COMPLETE"
_NUMBERED: Final = re.compile(r"(.*?)(\d+)\.parquet")
_MAGIC: Final = b"PAR1"


def is_folder(path: str) -> bool:
    """Whether a path is a directory without a log, a glob, or a parquet file."""
    if path.endswith(".parquet") or glob.has_magic(path):
        return True
    folder = Path(path)
    return folder.is_dir() and not (folder / "_log").is_dir()


class FolderSource(ShardSource):
    """Parquet files in a directory, in the order of their names."""

    unit = "directory"

    def __init__(self, url: str, config: SourceConfig) -> None:
        super().__init__(url, config)
        self._is_folder = os.path.isdir(url)
        self._complete = not self._is_folder or not config.streaming
        self._refresh()
        if not self._files and self._complete:
            raise NoDataset(
                f"there is nothing to train on at {url}",
                why="no parquet file, and no log of a dataset",
                do="check the path, or make a dataset with penstock chunk or penstock shard",
            )

    @property
    def is_sealed(self) -> bool:
        return self._complete

    def _refresh(self) -> None:
        # first the sentinel, then the files: whatever came before it is in the list
        complete = self._complete or os.path.exists(os.path.join(self.url, COMPLETE))
        paths = self._paths()
        if not complete:
            paths = self._numbered(paths)
        known = [file.name for file in self._files]
        if paths[: len(known)] != known:
            wrong = next((a for a, b in zip(paths, known, strict=False) if a != b), "one of them")
            raise ShardMismatch(
                f"the files at {self.url} are not those seen before",
                where=str(wrong),
                why="a file came before, or vanished from, those that are in use",
                do="give files names that sort in the order in which they come, and keep them",
            )
        for path in paths[len(known) :]:
            file = self._look_at(path, complete=complete)
            if file is None:
                return
            self._files.append(file)
        self._complete = complete

    def _paths(self) -> list[str]:
        if not self._is_folder:
            return sorted(glob.glob(self.url)) if glob.has_magic(self.url) else [self.url]
        wanted = "val" if self.config.split == "val" else "train"
        return [
            os.path.join(self.url, name)
            for name in sorted(os.listdir(self.url))
            if name.endswith(".parquet")
            and not name.startswith((".", "_"))
            and (name.startswith("val") == (wanted == "val"))
        ]

    def _numbered(self, paths: list[str]) -> list[str]:
        """While files still come: those before the first gap in their numbers, from 0 on."""
        found: list[str] = []
        for path in paths:
            match = _NUMBERED.fullmatch(os.path.basename(path))
            if match is None:
                raise BadConfig(
                    f"{os.path.basename(path)} has no number",
                    where=self.url,
                    why="the directory has no _COMPLETE, and what comes next must be known",
                    do="give streaming=False if all files are there, or number them",
                )
            if int(match[2]) != len(found):  # one before it is still to come
                break
            found.append(path)
        return found

    def _look_at(self, path: str, *, complete: bool) -> ShardFile | None:
        """Its rows; None while it is still being written."""
        try:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 4))
                whole = file.read() == _MAGIC
            if not whole and not complete:
                return None
            opened = pq.ParquetFile(path)
        except FileNotFoundError:
            raise NoDataset(
                f"there is nothing at {path}", do="check the path, or wait until it is written"
            ) from None
        except (OSError, pa.ArrowException) as error:
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
        return ShardFile(path, opened.metadata.num_rows, size, None, None)

    def _wait(self) -> None:
        known, deadline, pause_s = len(self._files), time.monotonic() + self.config.stall_s, 0.02
        while len(self._files) == known and not self._complete:
            if time.monotonic() >= deadline:
                raise ProducerStalled(
                    f"no new file for {self.config.stall_s:g} s, and no {COMPLETE}",
                    where=self.url,
                    why=f"{known} files were read; silence is not the end",
                    do=f"make an empty file {COMPLETE} there if all files have come, "
                    "or start what writes them",
                )
            time.sleep(pause_s)
            pause_s = min(1.0, 1.3 * pause_s)
            self._refresh()

    def _open(self, name: str) -> Any:
        return pa.OSFile(name)

    def _read(self, name: str) -> bytes:
        return Path(name).read_bytes()

    def identity(self) -> dict[str, str | int]:
        return {
            "files": len(self._files),
            "digest": self._digest(len(self._files)),
            "shards": self.ranged.text,
        }

    def _digest(self, count: int) -> str:
        lines = [f"{os.path.basename(f.name)} {f.bytes} {f.rows}\n" for f in self._files[:count]]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_identity(self, seen: dict[str, str | int]) -> str:
        count = seen.get("files")
        if not isinstance(count, int):
            return "the state is of a dataset with a log"
        if seen.get("shards") != self.ranged.text:
            return f"shard_ranges: the state has {seen.get('shards')}, this {self.ranged.text}"
        if count > len(self._files):
            return f"the state saw {count} files, {len(self._files)} are there"
        if self._digest(count) != seen.get("digest"):
            return f"the first {count} files are not those that the state saw"
        return ""
