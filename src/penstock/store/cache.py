"""Keep what can be made again: token columns, decoded indexes.

In:    a key (a hash of all that decides the value), bytes
Out:   the same bytes later, or nothing
Keeps: at most `max_bytes`, the least recently used go first
Never: is the truth: a value that is missing, cut or changed is a miss, and a full disk is no error
"""

import contextlib
import mmap
import os
import secrets
import time
from pathlib import Path
from typing import Protocol

import xxhash

from penstock.errors import BadConfig

_HASH_BYTES = 16


class Cache(Protocol):
    """Where values are kept by key."""

    def get(self, key: str) -> bytes | None:
        """The value, or None."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Keep a value, if that can be done."""
        ...


class DiskCache:
    """A directory of values, one file each."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int = 10 << 30) -> None:
        if max_bytes < 0:
            raise BadConfig(f"max_bytes is {max_bytes}", do="give 0 or more")
        self._folder = Path(folder)
        self._max_bytes = max_bytes

    def get(self, key: str) -> bytes | None:
        held = self.map(key)
        return None if held is None else bytes(held)

    def map(self, key: str) -> memoryview | None:
        """The value as mapped memory: processes share it, and it stays when it is evicted."""
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError:
            return None
        mapped = memoryview(held)
        value = mapped[_HASH_BYTES:]
        hasher = xxhash.xxh3_128(key.encode())
        hasher.update(value)
        if hasher.digest() != mapped[:_HASH_BYTES]:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), time.time_ns()))
        return value

    def put(self, key: str, value: bytes) -> None:
        size = len(value) + _HASH_BYTES
        if size > self._max_bytes:
            return
        path = self._path(key)
        temporary = self._folder / f".{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(xxhash.xxh3_128_digest(key.encode() + value) + value)
            os.utime(temporary, ns=(time.time_ns(), time.time_ns()))  # finer than the disk's clock
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        self._evict(path)

    def _path(self, key: str) -> Path:
        name = xxhash.xxh3_128_hexdigest(key.encode())
        return self._folder / name[:2] / name

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each was last used, its size, its path; also what killed processes left."""
        found = []
        for path in (*self._folder.glob("??/*"), *self._folder.glob(".*")):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return sorted(found)

    def _evict(self, just_put: Path) -> None:
        """Remove the least recently used while all of them, other processes' too, are too much."""
        files = self._files()
        held = sum(size for _, size, _ in files)
        for _, size, path in files:
            if held <= self._max_bytes:
                break
            if path != just_put:
                with contextlib.suppress(OSError):
                    path.unlink()
                held -= size
