"""Open a cache by its address: a directory, a Redis server, a bucket, or one of a plugin.

In:    a path, file://, redis://, rediss://, s3://, gs://, az://, or a scheme that a plugin knows
Out:   a `Cache`
Keeps: each value goes with an HMAC over its key and bytes, compressed where that pays; a server
       that fails costs a stated time, then is not asked for a while
Never: is the truth: a value that is missing, cut or changed is a miss; a server that is full,
       frozen or away is told once, through logging, and is no error; shows a password; asks a
       server without a key: others may write there, and would decide what is trained on

A plugin registers a cache under the scheme of its addresses:

    @register("cache", "memcached")
    def open_memcached(url: str, max_bytes: int) -> Cache: ...
"""

import abc
import contextlib
import hmac
import logging
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Final

import xxhash

from penstock.cache.disk import MAC_BYTES, Cache, DiskCache, find_secret, is_shared, sign
from penstock.errors import BadConfig
from penstock.options import checked_path, parse_bytes
from penstock.plugins import find, register
from penstock.store.bucket import masked, open_client
from penstock.store.store import local_path

_log = logging.getLogger(__name__)

_HEAD_BYTES: Final = MAC_BYTES + 1 + 8
"""Before each value: an HMAC of all that follows and of its key, how it is stored, its size."""
_PLAIN: Final = b"\0"
_ZSTD: Final = b"\1"
_SAMPLE_BYTES: Final = 1 << 16
_PAYS: Final = 0.9
"""Compressed to more of its size than this, a value is stored as it is."""
_MAX_VALUE_BYTES: Final = 1 << 30
_PART_BYTES: Final = 32 << 20
"""A Redis string: 512 MB at most, and one that is sent within the timeout by a slow network."""
_PAUSE_S: Final = (5.0, 60.0)
"""A server is not asked for this long after its first failure, and after many."""


_forked: list[int] = []
"""Not empty in a process that was forked after obstore was loaded: its threads did not come along,
and the first question would wait for them for ever."""
os.register_at_fork(
    after_in_child=lambda: _forked.append(os.getpid()) if "obstore" in sys.modules else None
)


def open_cache(url: str | os.PathLike[str], max_bytes: int | str = 10 << 30) -> Cache:
    """The cache at an address; `max_bytes` is for directories, servers have their own limits.

    It is a number, or a size as the command line takes it: "5GB".
    """
    text = checked_path("the cache", url)
    limit = parse_bytes(max_bytes, "max_bytes") if isinstance(max_bytes, str) else max_bytes
    scheme, separator, _ = text.partition("://")
    made: Cache = find("cache", scheme if separator else "file").make(text, limit)
    return made


def is_address(url: str | os.PathLike[str]) -> bool:
    """Whether a cache is elsewhere, and not in a directory."""
    scheme, separator, _ = os.fspath(url).partition("://")
    return bool(separator) and scheme != "file"


def is_own(url: str | os.PathLike[str]) -> bool:
    """Whether a cache is a directory that this user alone may write."""
    return not is_address(url) and not is_shared(os.fspath(local_path(os.fspath(url))))


@register("cache", "file")
def open_folder(url: str, max_bytes: int) -> Cache:
    return DiskCache(local_path(url), max_bytes)


@register("cache", "redis")
@register("cache", "rediss")
def open_redis(url: str, max_bytes: int) -> Cache:
    return RedisCache(url)


@register("cache", "s3")
@register("cache", "gs")
@register("cache", "az")
def open_bucket(url: str, max_bytes: int) -> Cache:
    return BucketCache(url)


class RemoteCache(abc.ABC):
    """Values on a server that others may change, and that may go. Subclasses speak to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._secret = find_secret(masked(url), "a server has other users")
        self._client: Any = None
        self._owner = 0
        self._failures = 0
        self._paused_until = 0.0
        self._told: set[str] = set()
        self._making: dict[tuple[int, str], threading.Lock] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url,)

    @abc.abstractmethod
    def _open(self) -> Any:
        """A client, which opens no connection yet."""

    @abc.abstractmethod
    def _load(self, client: Any, name: str) -> bytes | None:
        """What was stored under a name; None if there is nothing."""

    @abc.abstractmethod
    def _save(self, client: Any, name: str, data: bytes) -> None:
        """Store under a name."""

    @abc.abstractmethod
    def _errors(self) -> tuple[type[Exception], ...]:
        """What the client raises for a server that fails."""

    @abc.abstractmethod
    def _is_answer(self, error: Exception) -> bool:
        """Whether the server is well, and only refused: because it is full, for instance."""

    def get(self, key: str) -> bytes | None:
        data = self._ask(lambda client: self._load(client, _name(key)))
        return None if data is None else unsealed(key, data, self._secret)

    def put(self, key: str, value: bytes) -> None:
        if len(value) <= _MAX_VALUE_BYTES and time.monotonic() >= self._paused_until:
            data = sealed(key, value, self._secret)
            self._ask(lambda client: self._save(client, _name(key), data))

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The value, made and kept if it is not there; of a process's threads one makes it."""
        mine = os.getpid(), key  # a lock that was held when the process was forked is not ours
        with self._making.setdefault(mine, threading.Lock()):
            try:
                if (value := self.get(key)) is None:
                    value = make()
                    self.put(key, value)
                return value
            finally:
                self._making.pop(mine, None)

    def _ask(self, question: Callable[[Any], bytes | None]) -> bytes | None:
        """The server's answer; None if it gives none, or gave none a moment ago."""
        if time.monotonic() < self._paused_until:
            return None
        try:
            answer = question(self._client_of_process())
        except self._errors() as error:
            self._failed(error)
            return None
        self._failures = 0
        return answer

    def _client_of_process(self) -> Any:
        """Clients have threads and sockets, which do not outlive a fork."""
        if self._owner != os.getpid():
            self._client, self._owner = self._open(), os.getpid()
        return self._client

    def _failed(self, error: Exception) -> None:
        if not self._is_answer(error):
            first, most = _PAUSE_S
            self._paused_until = time.monotonic() + min(first * 2**self._failures, most)
            self._failures = min(self._failures + 1, 8)
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            why = masked((str(error).splitlines() or [""])[0][:200])
            _log.warning("penstock does without its cache %s: %s: %s", masked(self.url), kind, why)


class RedisCache(RemoteCache):
    """Values in a Redis server, which evicts by its own `maxmemory-policy`.

    The address is that of redis-py: `redis://host:6379/0`, `rediss://` for TLS. User and password
    come from REDIS_USERNAME and REDIS_PASSWORD if the address has none; an address without a host
    stands for REDIS_URL.
    """

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        super().__init__(url)
        self._timeout_s = timeout_s
        self._client_of_process()  # a wrong address is told now; nothing is sent yet

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_redis, (self.url, self._timeout_s)

    def _open(self) -> Any:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise BadConfig(
                "a cache in Redis needs the client of Redis",
                where=masked(self.url),
                do="pip install 'penstock[redis]'",
            ) from None
        url = self.url
        if not urllib.parse.urlsplit(url).netloc:
            url = os.environ.get("REDIS_URL", url)
        parts = urllib.parse.urlsplit(url)
        found = {
            name: os.environ[variable]
            for name, variable, given in (
                ("username", "REDIS_USERNAME", parts.username),
                ("password", "REDIS_PASSWORD", parts.password),
            )
            if not given and os.environ.get(variable)
        }
        try:
            client = redis.Redis.from_url(
                url,
                **found,
                socket_timeout=self._timeout_s,
                socket_connect_timeout=self._timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
            # an address that is shared with others may say that values are text
            client.connection_pool.connection_kwargs["decode_responses"] = False
            return client
        except (ValueError, TypeError) as error:
            raise BadConfig(
                f"{masked(url)} is not an address of Redis",
                why=masked(str(error)),
                do="write redis://host:6379/0, or rediss:// for TLS",
            ) from None

    def _errors(self) -> tuple[type[Exception], ...]:
        import redis

        return (redis.RedisError, OSError)

    def _is_answer(self, error: Exception) -> bool:
        import redis

        return isinstance(error, redis.ResponseError)

    def _load(self, client: Any, name: str) -> bytes | None:
        parts: list[bytes] = []
        while True:
            part = client.get(f"penstock:{name}:{len(parts)}")
            if not isinstance(part, bytes):
                return None
            parts.append(part)
            if len(part) < _PART_BYTES:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            if len(parts) * _PART_BYTES > _MAX_VALUE_BYTES + _HEAD_BYTES:
                return None

    def _save(self, client: Any, name: str, data: bytes) -> None:
        # parts that are full say that another follows, so the last is never full
        for number in range(len(data) // _PART_BYTES + 1):
            part = data[number * _PART_BYTES : (number + 1) * _PART_BYTES]
            client.set(f"penstock:{name}:{number}", part)


def _reopen_redis(url: str, timeout_s: float) -> RedisCache:
    return RedisCache(url, timeout_s=timeout_s)


class BucketCache(RemoteCache):
    """Values under a prefix of an S3, GCS or Azure bucket, which deletes by its own rules.

    Credentials and endpoints come from the usual environment variables.
    """

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        super().__init__(url.rstrip("/"))
        self._timeout_s = timeout_s
        with contextlib.suppress(OSError):
            self._client_of_process()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_bucket, (self.url, self._timeout_s)

    def _open(self) -> Any:
        if _forked:
            raise OSError("clients of buckets do not work in a forked process: spawn it")
        return open_client(self.url, timeout_s=self._timeout_s, retry={"max_retries": 0})

    def _errors(self) -> tuple[type[Exception], ...]:
        if _forked:
            return (OSError,)
        from obstore.exceptions import BaseError

        return (BaseError, OSError)

    def _is_answer(self, error: Exception) -> bool:
        return False

    def _load(self, client: Any, name: str) -> bytes | None:
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            found = obstore.get(client, name)
            if found.meta["size"] > _MAX_VALUE_BYTES + _HEAD_BYTES:
                return None
            return bytes(found.bytes())
        except (NotFoundError, FileNotFoundError):
            return None

    def _save(self, client: Any, name: str, data: bytes) -> None:
        import obstore

        obstore.put(client, name, data)


def _reopen_bucket(url: str, timeout_s: float) -> BucketCache:
    return BucketCache(url, timeout_s=timeout_s)


def _name(key: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(key.encode())
    return f"{digest[:2]}/{digest}"


def sealed(key: str, value: bytes, secret: bytes) -> bytes:
    """A value as it is stored: signed, compressed where that pays.

    >>> len(sealed("key", bytes(100_000), b"s")) < 200, len(sealed("key", bytes(100), b"s"))
    (True, 141)
    """
    body, kind = _compressed(value), _ZSTD
    if body is None:
        body, kind = value, _PLAIN
    about = kind + len(value).to_bytes(8, "little")
    return b"".join((sign(secret, key, about, body), about, body))


def unsealed(key: str, data: bytes, secret: bytes) -> bytes | None:
    """The value that was sealed under this key with this secret; None for anything else.

    >>> stored = sealed("key", b"value", b"s")
    >>> unsealed("key", stored, b"s"), unsealed("another", stored, b"s")
    (b'value', None)
    """
    # nothing is unpacked before it is known who packed it
    if not hmac.compare_digest(sign(secret, key, memoryview(data)[MAC_BYTES:]), data[:MAC_BYTES]):
        return None
    about, value = data[MAC_BYTES:_HEAD_BYTES], data[_HEAD_BYTES:]
    kind, size = about[:1], int.from_bytes(about[1:], "little")
    if kind not in (_PLAIN, _ZSTD) or size > _MAX_VALUE_BYTES:
        return None
    if kind == _ZSTD:
        import pyarrow as pa

        try:
            value = pa.Codec("zstd").decompress(value, size, asbytes=True)
        except (OSError, MemoryError, pa.ArrowException):
            return None
    return value if len(value) == size else None


def _compressed(value: bytes) -> bytes | None:
    """The value compressed; None if a sample of it, or all of it, hardly gets smaller."""
    if len(value) < 256:
        return None
    import pyarrow as pa

    codec = pa.Codec("zstd", compression_level=1)
    if len(value) > 4 * _SAMPLE_BYTES:
        # from four places: the head of a value may be unlike the rest
        piece = _SAMPLE_BYTES // 4
        starts = [k * (len(value) - piece) // 3 for k in range(4)]
        sample = b"".join(value[start : start + piece] for start in starts)
        if len(codec.compress(sample, asbytes=True)) > _PAYS * len(sample):
            return None
    made: bytes = codec.compress(value, asbytes=True)
    return made if len(made) <= _PAYS * len(value) else None
