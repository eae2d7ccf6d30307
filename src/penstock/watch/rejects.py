"""Browse what a dataset refused: reasons, samples, and duplicates beside what they repeat.

In:    a dataset's log, its files of rejects and of signatures; its inputs, if they are here
Out:   pages of rejects; of a duplicate its own text and that of the kept document
Keeps: bounded work: a page ends after PAGE lines or LOOK_S
Never: opens a file that the log does not name, writes

A duplicate's line says which kept document it repeats, counted in the order of keeping. Signatures
lie beside each shard in that order: the one that is meant has the hash of the document's text, by
which the document is found among the rows of the shard, whatever they were shuffled and cut to.
"""

import itertools
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from penstock.errors import PenstockError
from penstock.ingest.inputs import kind_of
from penstock.prepare.dedup import DedupConfig, Signatures
from penstock.store.log import Log
from penstock.store.record import Add
from penstock.work.events import parse_line

Json = dict[str, Any]

PAGE: Final = 25
LOOK_S: Final = 2.0
MOST_TEXT: Final = 16_000
"""Characters of a text that are shown."""
MOST_FILE_BYTES: Final = 64 << 20
_REPEATS: Final = re.compile(r"repeats kept document (\d+)")


def reasons(log: Log) -> Json:
    """How many documents went, and why."""
    counts: dict[str, int] = {}
    read = kept = 0
    for known in log.state.inputs.values():
        read, kept = read + known.read, kept + known.kept
        for reason, count in known.dropped.items():
            counts[reason] = counts.get(reason, 0) + count
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return {"read": read, "kept": kept, "reasons": [list(one) for one in ranked]}


def page(log: Log, reason: str = "", file: int = 0, byte: int = 0) -> Json:
    """Rejects of a reason, or of all, from a place in the files of rejects on."""
    found: list[Json] = []
    deadline = time.monotonic() + LOOK_S
    files = log.state.split("rejects")
    at: tuple[int, int] | None = None
    for number in range(file, len(files)):
        start = byte if number == file else 0
        for place, line in _lines(log, files[number], start):
            if len(found) >= PAGE or time.monotonic() > deadline:
                at = number, place
                break
            if reason and line.get("reason") != reason:
                continue
            found.append({**_shown(line), "file_number": number, "byte": place})
        if at is not None:
            break
    return {"rejects": found, "next": None if at is None else list(at)}


def pair(log: Log, file: int, byte: int, inside: str | None = None) -> Json:
    """A reject with its text, and what it repeats, where that can be found. Inputs are read that
    lie `inside` a directory, if one is given."""
    files = log.state.split("rejects")
    line = next((line for _, line in _lines(log, files[file], byte)), None) if (
        0 <= file < len(files)
    ) else None  # fmt: skip
    if line is None:
        return {"reject": None, "text": None, "kept": None}
    text, why = _input_text(log, line, inside)
    kept: Json | None = None
    if match := _REPEATS.match(str(line.get("sample", ""))):
        kept = _kept(log, int(match[1]))
    return {"reject": _shown(line), "text": text, "text_missing": why, "kept": kept}


def _lines(log: Log, file: Add, start: int) -> Iterator[tuple[int, Json]]:
    """The lines of a file of rejects from a byte on, each with where it begins."""
    with log.store.open(file.name) as opened:
        if start >= file.bytes:
            return
        opened.seek(start)
        data = opened.read()
    at = start
    for line in bytes(data).splitlines(keepends=True):
        if (found := parse_line(line)) is not None:
            yield at, found
        at += len(line)


def _shown(line: Json) -> Json:
    return {
        **{key: line.get(key) for key in ("input", "source", "start", "end", "reason", "at")},
        "sample": str(line.get("sample", ""))[:2000],
        "more": {
            key: str(value)[:500]
            for key, value in line.items()
            if key not in ("input", "source", "start", "end", "reason", "at", "sample")
        },
        "repeats": bool(_REPEATS.match(str(line.get("sample", "")))),
    }


def _open_input(path: str, inside: str | None) -> IO[bytes]:
    """A file to read: no pipe or device, which could be waited for, and none that lies outside."""
    real = os.path.realpath(path)
    if inside is not None:
        root = os.path.realpath(inside)
        if os.path.commonpath([root, real]) != root:
            raise PermissionError("it lies outside the directory that is served to other machines")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(real, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return os.fdopen(descriptor, "rb")


def _input_text(log: Log, line: Json, inside: str | None = None) -> tuple[str | None, str]:
    """The text of a refused document from its input; or why it cannot be shown."""
    name, source = str(line.get("input", "")), str(line.get("source", ""))
    if name not in log.state.inputs:  # only what the log names is opened
        return None, "the log does not name its input"
    kind, packed = kind_of(name)
    start, end = line.get("start"), line.get("end")
    try:
        if kind == "jsonl" and not packed and isinstance(start, int) and isinstance(end, int):
            if not 0 <= start <= end:
                return None, f"its place is from byte {start} to {end}"
            with _open_input(name, inside) as file:
                file.seek(start)
                record = parse_line(file.read(min(end - start, MOST_FILE_BYTES)))
            opened = log.state.opened
            field = (opened.config if opened else {}).get("text_field") or "text"
            text = record.get(field) if record is not None else None
            return (str(text)[:MOST_TEXT], "") if text is not None else (None, "it has no text")
        path = source or name
        real = os.path.realpath(name)
        is_of_input = os.path.commonpath([os.path.realpath(path), real]) == real
        if kind == "files" and is_of_input and os.path.isfile(path):
            with _open_input(path, inside) as file:
                return file.read(4 * MOST_TEXT).decode("utf-8", "replace")[:MOST_TEXT], ""
    except (OSError, ValueError, OverflowError) as error:
        return None, f"{type(error).__name__}: {error}"
    return None, "its input is packed or is not on this machine"


def _kept(log: Log, number: int) -> Json | None:
    """The document that was kept as the `number`-th."""
    config = _dedup_config(log)
    if config is None or not config.exact:
        return None
    shards: list[Add] = []
    before, deadline = 0, time.monotonic() + LOOK_S
    for file in log.state.files.values():
        if file.split in ("train", "val"):
            shards = [*shards[-3:], file]
        if file.split != "about" or not file.name.startswith("_dedup/"):
            continue
        if number >= before + file.rows:
            before += file.rows
            continue
        try:
            found = Signatures.from_bytes(log.store.read(file.name), config, file.name)
        except (PenstockError, FileNotFoundError):
            return None
        at = number - before
        wanted = found.raw[2 * at : 2 * at + 2].tolist()
        # a document for validation stands in the shard that is published at the seal
        for shard in [*reversed(shards), *log.state.split("val")]:
            if (kept := _document(log, shard, wanted)) is not None:
                return kept
            if time.monotonic() > deadline:
                break
        return None
    return None


def _dedup_config(log: Log) -> DedupConfig | None:
    opened = log.state.opened
    prepare = (opened.config.get("prepare") if opened else None) or {}
    for step in prepare.get("steps") or []:
        if step.get("step") == "dedup":
            known = {key: value for key, value in step.items() if key in DedupConfig.__slots__}
            return DedupConfig(**known)
    return None


def _document(log: Log, shard: Add, wanted: list[int]) -> Json | None:
    """The document of a shard whose text has this hash."""
    columns = ["text", "source", "start", "end", "doc_id", "part"]
    try:
        with log.store.open(shard.name) as opened:
            table = pq.ParquetFile(opened).read(columns)
    except (OSError, pa.ArrowException, PenstockError):
        return None
    order = table.sort_by([("doc_id", "ascending"), ("source", "ascending"), ("part", "ascending")])
    rows = zip(*(order.column(name).to_pylist() for name in columns), strict=True)
    for _, parts in itertools.groupby(rows, key=lambda row: (row[4], row[1])):
        pieces = list(parts)
        text = "".join(piece[0] for piece in pieces)
        hashed = xxhash.xxh3_128_intdigest(text.encode())
        if [hashed >> 64, hashed & (1 << 64) - 1] == wanted:
            _, source, start, _, doc_id, _ = pieces[0]
            return {
                "text": text[:MOST_TEXT], "file": source, "start": start, "end": pieces[-1][3],
                "doc_id": str(doc_id), "shard": shard.name, "parts": len(pieces),
            }  # fmt: skip
    return None
