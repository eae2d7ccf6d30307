"""Keep named objects under a prefix of an S3, GCS or Azure bucket, by conditional puts.

In:    names relative to the dataset, bytes
Out:   the same bytes; `AlreadyThere` for a name that is taken
Keeps: what a `Store` keeps; credentials and endpoints come from the usual environment variables
Never: believes a reply that did not come: `Unsure` makes the caller read back

What fails for now is tried again: for a few seconds by obstore, then by `Retries`, which says so.
Time is the limit, not the number of tries: obstore's default, 10, is used up in 2 to 7 s where
connections are refused.
"""

import contextlib
import hashlib
import io
import logging
import os
import random
import re
import secrets
import time
import urllib.parse
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO, Any, Final, TypeVar

from penstock.errors import (
    BadConfig,
    NoConditionalPut,
    StoreBusy,
    StoreFailed,
    without_users,
)
from penstock.store.store import (
    AlreadyThere,
    Stored,
    Unsure,
    check_name,
    other_name,
    read_back,
    taken,
    taken_twice,
)

TIMEOUT_S: Final = 60.0
"""For one request with its body. None has more than SINGLE_BYTES: a connection of 1.1 MB/s is fast
enough."""
SILENCE_S: Final = 20.0
"""A reply of which no byte has come for so long is given up."""
RETRY_S: Final = 60.0
"""What fails for now is tried again for so long, then the error is the caller's."""
SOON_S: Final = 5.0
"""For so long obstore tries again by itself, without a word."""
TELL_S: Final = 30.0
"""How often a store that waits says so."""
_PAUSE_S: Final = (0.5, 5.0)
PART_BYTES: Final = 16 << 20
SINGLE_BYTES: Final = 64 << 20
"""What is larger goes up in parts, several at once."""
_CLIENT_OPTIONS: Final = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
    *("http1_only", "http2_only", "http2_keep_alive_interval", "http2_keep_alive_timeout"),
    *("http2_keep_alive_while_idle", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_url"),
    *("proxy_ca_certificate", "proxy_excludes", "randomize_addresses", "read_timeout", "timeout"),
    "user_agent",
)
_REFUSED: Final = re.compile(r"status code: (40[134])\b")
"""In what obstore says of listings: it has no kinds of errors for those."""
_LASTS: Final = re.compile(r"status code: 4(?!08|29)\d\d\b")
"""In what obstore says of requests that no patience makes right."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Retries:
    """Ask a bucket again while it does not answer, for `patience_s`, and say so."""

    def __init__(self, url: str, patience_s: float | None = None) -> None:
        self.patience_s = RETRY_S if patience_s is None else patience_s
        self._url = masked(url)
        self._tell_at = 0.0

    def call(self, ask: Callable[[], T]) -> T:
        began, pause_s, told = time.monotonic(), _PAUSE_S[0], False
        while True:
            try:
                found = ask()
            except (StoreBusy, Unsure) as error:
                now = time.monotonic()
                left_s = began + self.patience_s - now
                if left_s <= 0 or _LASTS.search(str(error)):
                    raise
                # of many threads that wait one says so; a short outage is not worth a word
                if now >= max(self._tell_at, began + SOON_S / 2):
                    self._tell_at, told = now + TELL_S, True
                    self._tell(error, now - began, left_s)
                time.sleep(min(left_s, pause_s * random.random()))
                pause_s = min(2 * pause_s, _PAUSE_S[1])
            else:
                if told:
                    self._tell_at = 0.0
                    waited_s = time.monotonic() - began
                    _log.warning("%s answers again, after %.0f s", self._url, waited_s)
                return found

    def _tell(self, error: Exception, waited_s: float, left_s: float) -> None:
        why = (getattr(error, "why", "") or str(error)).partition("\n")[0]
        _log.warning(
            "%s has not answered for %.0f s; trying again for %.0f s at most: %s",
            self._url, waited_s, left_s, why[:300],
        )  # fmt: skip


def _retry_config(patience_s: float) -> dict[str, Any]:
    """How obstore tries again by itself: by time alone."""
    return {
        "max_retries": 1_000_000,
        "retry_timeout": timedelta(seconds=min(patience_s, SOON_S)),
        "backoff": {"base": 3, "max_backoff": timedelta(seconds=2)},
    }


def open_client(
    url: str, *, timeout_s: float | None = None, retry: Any = None, config: Any = None
) -> Any:
    """obstore's client for a bucket or a prefix of it.

    It forgets what the environment says of connections (AWS_PROXY_URL, AWS_ALLOW_HTTP, …) where
    options are given. They are given on, and count more than ours; only a `timeout_s` that the
    caller promises counts more than they.
    """
    # obstore takes 20 ms to import: only those who name a bucket pay for it
    from obstore.store import from_url

    scheme, _, rest = url.partition("://")
    if wrong := re.search("[#?%]", rest):
        raise BadConfig(
            f"{masked(url)} has {wrong[0]!r} in it",
            why="clients of buckets read it as something else than a part of a name",
            do="choose a prefix without #, ? and %",
        )
    _check_endpoints()
    promised = {}
    if timeout_s is not None:
        promised = {"timeout": f"{timeout_s:g}s", "connect_timeout": f"{min(2.0, timeout_s):g}s"}
    try:
        return from_url(  # type: ignore[call-overload]  # one of the three clouds
            url,
            client_options={
                "allow_http": True,  # where an endpoint is set that has it
                "timeout": f"{TIMEOUT_S:g}s",
                "connect_timeout": "10s",
                "read_timeout": f"{SILENCE_S:g}s",
                **_of_environment(scheme),
                **promised,
            },
            retry_config=_retry_config(RETRY_S) if retry is None else retry,
            **({"config": config} if config else {}),
        )
    except Exception as error:  # obstore, its URL parser and each cloud raise their own
        raise BadConfig(
            f"{masked(url)} cannot be opened",
            why=first_line(error),
            do="check the address, the endpoint and the credentials in the environment",
        ) from None


def _check_endpoints() -> None:
    """Refuse an endpoint that is no address: the client's own parser ends in a panic."""
    for name, value in os.environ.items():
        if not name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or "ENDPOINT" not in name:
            continue
        try:
            parts = urllib.parse.urlsplit(value)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_address = is_address and (parts.port or 1) > 0 and not re.search(r"\s", value)
        except ValueError:
            is_address = False
        if value and not is_address:
            raise BadConfig(
                f"{name} is no address",
                where=masked(value) if "://" in value and "@" not in value else name,
                do="write it like https://host:9000; / and blanks in a password as %2F and %20",
            )


def _of_environment(scheme: str) -> Any:
    """What a cloud's variables say of connections."""
    cloud = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}[scheme]
    found = {name: os.environ.get(f"{cloud}_{name.upper()}", "") for name in _CLIENT_OPTIONS}
    return {name: value for name, value in found.items() if value}


class BucketStore:
    """A dataset under a prefix."""

    def __init__(
        self,
        url: str,
        *,
        probe: bool = False,
        tries_again: bool = True,
        patience_s: float | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.epoch = 0
        self.tag = ""
        self._checks_sums = url.startswith("s3:")
        self._begun: set[str] = set()
        """Objects that were not there before this process sent them: what stands there came from
        here, perhaps changed on its way and with its reply lost."""
        waits_s = RETRY_S if patience_s is None else patience_s
        self._retries = Retries(url, waits_s if tries_again else 0)
        # of S3 the server refuses what did not arrive as it was sent
        checked = {"checksum_algorithm": "SHA256"} if url.startswith("s3:") else {}
        self._bucket = open_client(
            self.url,
            retry=_retry_config(waits_s),
            config=checked,
        )
        if probe:
            self._probe()

    def create(self, name: str, data: bytes) -> None:
        self._create(name, data)
        self._check_arrived(name, hashlib.sha256(data).hexdigest())

    def put(self, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
        buffer = io.BytesIO()
        write(buffer)
        data = buffer.getbuffer()
        sha256 = hashlib.sha256(data).hexdigest()
        shadowed = None
        for candidate in (name, other_name(name, sha256)):
            try:
                self._create(candidate, bytes(data))
            except (AlreadyThere, Unsure):
                there = read_back(self, candidate)
                if hashlib.sha256(there).hexdigest() == sha256:
                    return Stored(candidate, sha256, len(data), shadowed)
                shadowed = name
            else:
                return Stored(candidate, sha256, len(data), shadowed)
        raise taken_twice(name, self.url)

    def read(self, name: str) -> bytes:
        import obstore

        path = check_name(name, self.url)
        return self._ask("read", name, lambda: bytes(obstore.get(self._bucket, path).bytes()))

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        import obstore

        path = check_name(name, self.url)
        data = self._ask(
            "read",
            name,
            lambda: memoryview(obstore.get_range(self._bucket, path, start=start, end=stop)),
        )
        if len(data) != stop - start:
            raise StoreBusy(
                f"a reply was cut: {len(data):,} of {stop - start:,} bytes of {name}",
                where=self.url,
                do="run the same command again: nothing is lost",
            )
        return data

    def names(self, folder: str = "") -> list[tuple[str, int]]:
        import obstore

        found = self._ask(
            "list",
            folder,
            lambda: obstore.list_with_delimiter(self._bucket, folder or None)["objects"],
        )
        return sorted((str(about["path"]), int(about["size"])) for about in found)

    def add(self, name: str, data: memoryview, sha256: str) -> None:
        import obstore

        # parts cannot be put on condition: whoever owns the log has looked first
        looks = len(data) > SINGLE_BYTES or not self._checks_sums
        is_new = looks and self.size(name) is None
        if is_new and not self._checks_sums:
            self._begun.add(name)
        try:
            if len(data) <= SINGLE_BYTES:
                self._create(name, data)
            elif is_new:
                with self.explained("write", name):
                    obstore.put(
                        self._bucket, check_name(name, self.url), data, chunk_size=PART_BYTES,
                        max_concurrency=4,
                    )  # fmt: skip
            else:
                raise AlreadyThere(name)
            self._check_arrived(name, sha256)
            return
        except AlreadyThere:
            pass
        except Unsure as error:
            if self.size(name) is None:
                raise StoreBusy(
                    f"could not write {name}",
                    where=self.url,
                    why=str(error).splitlines()[0],
                    do="run the same command again: nothing committed is lost",
                ) from error
        if name in self._begun:
            self._check_arrived(name, sha256)
        elif self._hash(name) != sha256:
            raise taken(name, self.url)

    def _check_arrived(self, name: str, sha256: str) -> None:
        """S3 has compared what came with the sum that went along; others are asked for it."""
        if self._checks_sums or (found := self._hash(name)) == sha256:
            return
        # asked twice: what is right there, and wrong on its way back, stays
        if (again := self._hash(name)) == sha256:
            return
        if again == found:
            self.remove(name)
        raise StoreBusy(
            f"{name} was changed on its way to the bucket",
            where=self.url,
            do="run the same command again: nothing is lost",
        )

    def _hash(self, name: str) -> str:
        """The sha256 of an object that is there."""
        import obstore

        path = check_name(name, self.url)

        def ask() -> str:
            found = hashlib.sha256()
            for block in obstore.get(self._bucket, path).stream(1 << 20):
                found.update(block)
            return found.hexdigest()

        return self._ask("read", name, ask)

    def open(self, name: str) -> IO[bytes]:
        import pyarrow as pa

        return pa.BufferReader(self.read(name))  # type: ignore[no-any-return]

    def size(self, name: str) -> int | None:
        import obstore

        path = check_name(name, self.url)
        try:
            return self._ask("look at", name, lambda: int(obstore.head(self._bucket, path)["size"]))
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        import obstore

        path = check_name(name, self.url)
        with contextlib.suppress(FileNotFoundError):
            self._ask("remove", name, lambda: obstore.delete(self._bucket, path))

    def settle(self) -> None:
        """A bucket has neither temporary files nor unsynced names."""

    def clear_tagged(self) -> None:
        """A bucket has no temporary files."""

    def _create(self, name: str, data: bytes | memoryview) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError

        path = check_name(name, self.url)

        def ask() -> None:
            try:
                with self.explained("write", name, unless=GenericError):
                    obstore.put(self._bucket, path, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                # perhaps by an earlier try of ours, whose reply was lost: callers read it back
                raise AlreadyThere(name) from None
            except GenericError as error:
                raise Unsure(masked(str(error))) from None

        self._retries.call(ask)

    def _ask(self, doing: str, name: str, call: Callable[[], T]) -> T:
        """What a request gives that may be repeated."""

        def ask() -> T:
            with self.explained(doing, name):
                return call()

        return self._retries.call(ask)

    def _probe(self) -> None:
        """Prove that a second create fails; without that, two writers could not be kept apart."""
        name = f"_probe/{secrets.token_hex(8)}"
        try:
            self._create(name, b"first")
            self._create(name, b"second")
        except AlreadyThere:
            return  # also when the first reply was lost and the client's own retry met our object
        except Unsure as error:
            raise StoreBusy(
                "could not write to the bucket",
                where=self.url,
                why=str(error).splitlines()[0],
                do="check the address, the endpoint and the credentials in the environment",
            ) from error
        finally:
            with contextlib.suppress(StoreFailed):
                self.remove(name)
        raise NoConditionalPut(
            "this store does not create once: a second create of the same name succeeded",
            where=self.url,
            why="it ignores If-None-Match, so two writers would overwrite each other",
            do="use a store with conditional puts (S3, GCS, Azure, MinIO, SeaweedFS, Ceph)",
        )

    @contextlib.contextmanager
    def explained(
        self, doing: str, name: str, unless: type[Exception] | tuple[()] = ()
    ) -> Iterator[None]:
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            GenericError,
            NotFoundError,
            PreconditionError,
        )

        try:
            yield
        except (NotFoundError, FileNotFoundError):
            if doing in ("write", "list"):
                raise self._no_bucket(doing, name) from None
            raise FileNotFoundError(name) from None
        except (AlreadyExistsError, PreconditionError):
            raise
        except BaseError as error:
            if isinstance(error, unless):
                raise
            why = first_line(error)
            refused = _REFUSED.search(why)
            if refused and refused[1] == "404" and doing == "list":
                raise self._no_bucket(doing, name) from None
            passes = isinstance(error, GenericError) and not (refused and refused[1] != "404")
            raise (StoreBusy if passes else StoreFailed)(
                f"could not {doing} {name or 'the bucket'}",
                where=self.url,
                why=why,
                do="check the address, the endpoint and the credentials in the environment",
            ) from None  # obstore's own text may hold a password

    def _no_bucket(self, doing: str, name: str) -> StoreFailed:
        return StoreFailed(
            f"could not {doing} {name or 'the bucket'}",
            where=self.url,
            why="the bucket is not there",
            do="make the bucket, or check its name and the endpoint",
        )


def first_line(error: Exception) -> str:
    """What an error says, without the passwords in it."""
    return masked((str(error).splitlines() or [""])[0])


def masked(text: str) -> str:
    """A text without the users, passwords, keys and signatures of its addresses.

    >>> masked("redis://me:secret@host:6379/0?password=secret&db=1")
    'redis://…@host:6379/0?password=…&db=1'
    """
    secret = "password|secret|token|username|key|sig|credential"
    return re.sub(rf"(?i)((?:{secret})[^=&\s]*=)[^&\s]*", r"\1…", without_users(text))
