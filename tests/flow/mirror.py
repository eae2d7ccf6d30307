"""A dataset that grows again, record by record, and the oracle of its mirrors.

In:    templates: finished datasets, with every file that was ever in them
Out:   the same dataset growing in a new directory; every way in which a mirror is not exactly it
Keeps: the oracle outside: it reads logs with `json`, buckets with plain requests to the server
       behind the proxy, and asks nothing of penstock but `verify --full`
Never: asks the one that is tested what it has done
"""

import hashlib
import http.client
import json
import os
import random
import re
import shutil
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.local import LocalStore
from penstock.store.store import open_store
from services.servers import AZURE_ACCOUNT, Cloud, azure_token

MARKER: Final = "_COMPLETE"


@dataclass(slots=True)
class Template:
    """A finished dataset."""

    folder: Path
    records: list[bytes]
    retired: set[str]
    """Files that were merged into later ones: a mirror need not have them."""
    hashes: dict[str, str]
    """sha256 of every file that the log ever named, by name."""

    @classmethod
    def make(
        cls, folder: Path, *, documents: int, text_bytes: int, rows_per_file: int
    ) -> "Template":
        chance = random.Random(documents)
        source = folder.with_suffix(".jsonl")
        with source.open("w") as file:
            for number in range(documents):
                text = chance.randbytes(text_bytes // 2).hex()
                file.write(json.dumps({"text": f"document {number} {text}"}) + "\n")
            file.write("no json\n")
        config = ShardConfig(rows_per_file=rows_per_file, val_fraction=0.2, bytes_per_file=1 << 24)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStore, "remove", lambda self, name: None)  # what it would clear away
            follow = FollowConfig(complete=True, threads=1, max_rejects=0.5)
            shard_jsonl([source], folder, config, follow)
        records: list[bytes] = []
        retired: set[str] = set()
        hashes: dict[str, str] = {}
        while (path := folder / "_log" / f"{len(records):020d}.json").exists():
            records.append(path.read_bytes())
            for op in json.loads(records[-1])["ops"]:
                if op["type"] == "add":
                    hashes[op["name"]] = op["sha256"]
                elif op["type"] == "retire":
                    retired.add(op["name"])
        assert json.loads(records[-1])["ops"][-1]["type"] == "seal"
        return cls(folder, records, retired, hashes)

    def added(self, n: int) -> Iterator[dict[str, Any]]:
        """The files that record n names."""
        for op in json.loads(self.records[n])["ops"]:
            if op["type"] == "add":
                yield op

    def final(self) -> dict[str, str]:
        """sha256 of every object of a finished mirror, by name."""
        found = {name: sha for name, sha in self.hashes.items() if name not in self.retired}
        found |= {
            f"_log/{n:020d}.json": hashlib.sha256(data).hexdigest()
            for n, data in enumerate(self.records)
        }
        return {**found, MARKER: hashlib.sha256(self.records[-1]).hexdigest()}

    def grow(self, live: Path, chance: random.Random, pause_s: float) -> None:
        """Write it again: files, then their record, one after the other."""
        for n in range(len(self.records)):
            for op in self.added(n):
                place(self.folder / op["name"], live / op["name"])
            place(self.folder / "_log" / f"{n:020d}.json", live / "_log" / f"{n:020d}.json")
            if pause_s:
                threading.Event().wait(chance.uniform(0, pause_s))
        place(self.folder / MARKER, live / MARKER)
        for name in self.retired:
            os.unlink(live / name)


def place(source: Path, target: Path) -> None:
    """Let a whole file appear under its name, once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        temporary = target.with_name(f".tmp-0-{target.name}")
        shutil.copyfile(source, temporary)
        os.rename(temporary, target)


@dataclass(slots=True)
class BucketView:
    """What the server has under a prefix, asked for without penstock, obstore or the proxy."""

    cloud: Cloud
    url: str

    def _ask(self, name: str, **query: str) -> http.client.HTTPResponse:
        place = urllib.parse.urlsplit(self.url)
        asked, headers = urllib.parse.urlencode(query), {}
        path = f"{place.netloc}/{name}" if name else place.netloc
        if self.cloud.scheme == "az":
            path, asked = f"{AZURE_ACCOUNT}/{path}", f"{asked}&{azure_token()}"
        else:  # neither moto nor SeaweedFS checks the signature
            key = "AWS4-HMAC-SHA256 Credential=test/20240101/us-east-1/s3/x"
            headers = {} if self.cloud.name == "seaweedfs" else {"Authorization": key}
        request = urllib.request.Request(f"{self.cloud.server.url}/{path}?{asked}", headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        answer: http.client.HTTPResponse = opener.open(request, timeout=30)
        return answer

    @property
    def _prefix(self) -> str:
        return urllib.parse.urlsplit(self.url).path.strip("/")

    def read(self, name: str) -> bytes | None:
        try:
            with self._ask(f"{self._prefix}/{name}") as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 404:
                    raise
            return None

    def names(self) -> list[str]:
        tag, query = "Key", {"list-type": "2"}
        if self.cloud.scheme == "az":
            tag, query = "Name", {"restype": "container", "comp": "list"}
        with self._ask("", prefix=self._prefix + "/", **query) as answer:
            text = answer.read().decode()
        assert "<IsTruncated>true" not in text
        assert not re.search("<NextMarker>.", text)
        return [found.removeprefix(self._prefix + "/")
                for found in re.findall(f"<{tag}>(.*?)</{tag}>", text)]  # fmt: skip


@dataclass(slots=True)
class FolderView:
    """What a directory has that a reader could see."""

    folder: Path

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        found = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*")
                 if path.is_file())  # fmt: skip
        aside = (".parts/", "_events.jsonl")  # what is told of the pull is no part of the dataset
        return [name for name in found if not name.startswith(aside)]


View = BucketView | FolderView


def wrong_at(template: Template, view: View, n: int) -> list[str]:
    """What is wrong with the files of record n, which is about to be visible, or is."""
    found = []
    for op in template.added(n):
        data = view.read(op["name"])
        if data is None:
            if op["name"] not in template.retired:
                found.append(f"record {n} is visible and {op['name']} is not there")
        elif hashlib.sha256(data).hexdigest() != op["sha256"]:
            found.append(f"record {n} is visible and {op['name']} has wrong bytes")
    return found


def wrong_beginning(template: Template, view: View) -> list[str]:
    """Every way in which a mirror, perhaps unfinished, is not a beginning of the dataset."""
    found = []
    n = 0
    while (data := view.read(f"_log/{n:020d}.json")) is not None:
        if n >= len(template.records) or data != template.records[n]:
            found.append(f"record {n} has wrong bytes")
            break
        found += wrong_at(template, view, n)
        n += 1
    if view.read(MARKER) is not None and n < len(template.records):
        found.append(f"{MARKER} is there after {n} of {len(template.records)} records")
    return found


def wrong_end(template: Template, view: View) -> list[str]:
    """Every way in which a finished mirror is not exactly the dataset.

    In a bucket a put that was long on its way may bring back a file that was merged away, or the
    list of them: nobody waits for it any more, and no reader looks for it (seed 53).
    """
    wanted = template.final()
    names = [name for name in view.names() if not name.startswith("_probe/")]
    if isinstance(view, BucketView):
        names = [name for name in names if name != "_merged.json"]
    found = [
        f"{name} is extra"
        for name in names
        if name not in wanted and not (isinstance(view, BucketView) and name in template.retired)
    ]
    for name, sha256 in wanted.items():
        data = view.read(name)
        if data is None:
            found.append(f"{name} is missing")
        elif hashlib.sha256(data).hexdigest() != sha256:
            found.append(f"{name} has wrong bytes")
    if isinstance(view, FolderView):
        if (view.folder / ".parts").exists():
            found.append(".parts is left")
        verdict = verify(open_store(view.folder), full=True)
        found += [f"verify: {fault}" for fault in verdict.faults]
    return found


class Watcher:
    """Looks at a directory all the time: a record that can be seen has its files."""

    def __init__(self, template: Template, view: FolderView) -> None:
        self.found: list[str] = []
        self._template, self._view = template, view
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        n = 0
        while not self._done.wait(0.003):
            while (data := self._view.read(f"_log/{n:020d}.json")) is not None:
                if data != self._template.records[n]:
                    self.found.append(f"record {n} has wrong bytes")
                self.found += wrong_at(self._template, self._view, n)
                n += 1

    def close(self) -> list[str]:
        self._done.set()
        self._thread.join(30)
        return self.found
