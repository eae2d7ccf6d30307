"""Find what is meant: paths, globs, directories and addresses become names of inputs.

In:    names as the user gave them
Out:   inputs in a fixed order; the files of a tree or of a prefix, by their paths' bytes
Keeps: a glob stands for what it matches, a directory for its tree
Never: follows a link to a directory, leaves a file out in silence
"""

import contextlib
import errno
import fnmatch
import os
import stat
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from penstock.errors import BadConfig, BadInput, InputMissing
from penstock.ingest.lines import DONE_SUFFIX
from penstock.ingest.open import COMPRESSED, is_object, is_url, list_objects, missing, open_bucket
from penstock.options import nearest
from penstock.store.store import local_path

SHARDS: Final = frozenset({".jsonl", ".ndjson", ".parquet"})
ARCHIVE, PARQUET = "archive", "parquet"
OWN_INPUTS: Final = frozenset({ARCHIVE, PARQUET})
"""Why files within another input are refused that are read where they are named as inputs."""
_PACKED: Final = tuple(sorted(COMPRESSED))
_ARCHIVES: Final = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".tzst", *(
    f".tar{packed}" for packed in sorted(COMPRESSED)
))  # fmt: skip


def expand_inputs(names: Sequence[str]) -> list[str]:
    """The inputs that are meant: a glob stands for what it matches, a directory for its tree.

    A directory of nothing but JSONL or parquet files stands for those files.
    """
    return [name for found in expand_each(names) for name in found]


def expand_each(names: Sequence[str], without: str = "") -> list[list[str]]:
    """What each name stands for; the directory `without` is left out of trees."""
    groups: list[list[str]] = []
    seen: set[str] = set()
    for name in names:
        name = os.fspath(name)
        check_name(name)
        name = local_path(name)
        groups.append(_expand_url(name) if is_url(name) else _expand_path(name, without))
        for found in groups[-1]:
            real = found if is_url(found) else os.path.realpath(found)
            if real in seen:
                raise BadConfig(
                    "the same input is given twice", where=found, do="name each input once"
                )
            seen.add(real)
    if not any(groups):
        raise BadConfig("no input is given", do="name files, directories or addresses")
    return groups


def check_name(name: str) -> None:
    """Refuse the name of an input that no log can hold."""
    if not is_printable(name):
        raise BadConfig(
            f"the name {name!r} cannot be written into the log",
            why="it holds bytes that are not UTF-8, or control characters",
            do="rename the file, or give it through a link with a plain name",
        )


def _expand_path(name: str, without: str) -> list[str]:
    if os.path.isdir(name):
        return expand_folder(name, without)
    if os.path.lexists(name):
        return [name]
    if not is_pattern(name):
        raise missing(Path(name))
    parts = name.split("/")
    fixed = next(k for k, part in enumerate(parts) if is_pattern(part))
    root = "/".join(parts[:fixed]) + "/" if fixed else ""
    found = sorted(set(glob(root, parts[fixed:])), key=os.fsencode)
    if not found:
        near = ""
        with contextlib.suppress(OSError):
            near = nearest(parts[fixed], os.listdir(root or "."), 0.3)
        raise InputMissing(
            f"nothing matches {name}",
            where=os.path.abspath(root),
            do=f"did you mean {root}{near}?" if near else "check the path",
        )
    for match in found:
        check_name(match)
    return [
        name
        for match in found
        for name in (expand_folder(match, without) if os.path.isdir(match) else [match])
    ]


def _expand_url(url: str) -> list[str]:
    key = open_bucket(url)[1]
    root = url.removesuffix("/" + key) if key else url.rstrip("/")
    key = key.rstrip("/")
    parts = key.split("/")
    fixed = next((k for k, part in enumerate(parts) if is_pattern(part)), None)
    prefix = key if fixed is None else "/".join(parts[:fixed])
    found = [
        path
        for path, size, _ in list_objects(url, prefix)
        # what is empty may be the marker of a folder
        if path != prefix and (size or suffix_of(path))
    ]
    if fixed is None and key and not found and is_object(url):
        return [url]
    if fixed is None:
        shards = [path for path in found if not is_aside(path[len(key) :].lstrip("/"))]
        if not shards or not all(suffix_of(path) in SHARDS for path in shards):
            shards = [key] if found else []
    else:
        shards = [path for path in found if matches(path.split("/"), parts)]
    if not shards:
        raise InputMissing(f"nothing is at {url}", where=url, do="check the address")
    return [f"{root}/{path}".rstrip("/") for path in shards]


Found = tuple[str, int, str, str]
"""A file: its path below a root, its bytes, what is wrong with it, what tells its version."""
NAME_BYTES: Final = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
"""How a name becomes bytes: `encode` is a third of `os.fsencode`, which asks for its type."""


def walk_folder(root: str) -> Iterator[Found]:
    """The files of a tree, by their paths' bytes.

    Hidden names are left out. Links to directories are not followed: they could lead round in
    circles. A directory whose name or list cannot be read is told like a file.
    """
    open_folders: list[Iterator[tuple[os.DirEntry[str] | None, str, bool]]]
    open_folders = [iter([(None, "", True)])]
    while open_folders:
        for entry, relative, is_folder in open_folders[-1]:
            if entry is not None and not (entry.name.isprintable() or is_printable(entry.name)):
                yield relative, 0, "bad_name", ""
            elif is_folder:
                try:
                    open_folders.append(_list_folder(root, relative))
                except OSError as error:
                    yield relative, 0, f"unreadable {_errno(error)}", ""
                    continue
                break
            elif entry is not None:
                yield _look(root, entry, relative)
        else:
            open_folders.pop()


def _list_folder(root: str, below: str) -> "Iterator[tuple[os.DirEntry[str] | None, str, bool]]":
    prefix = f"{below}/" if below else ""
    with os.scandir(f"{root}/{below}" if below else root) as listing:
        found = [
            (entry, prefix + entry.name, entry.is_dir(follow_symlinks=False))
            for entry in listing
            if not entry.name.startswith(".")
        ]
    # "a.c" stands before "a/b": a directory sorts with its slash
    found.sort(key=lambda item: item[1].encode(*NAME_BYTES) + (b"/" if item[2] else b""))
    return iter(found)


def _errno(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"


def _look(root: str, entry: "os.DirEntry[str]", relative: str) -> Found:
    """A file's bytes, what is wrong with it, and when it was changed."""
    try:
        status = entry.stat()
    except OSError as error:
        return relative, 0, f"not_a_file {_errno(error)}", ""
    if not stat.S_ISREG(status.st_mode):
        return relative, 0, "not_a_file it is a link to a directory, a pipe or a device", ""
    if entry.is_symlink():
        real, top = os.path.realpath(entry.path), os.path.realpath(root)
        if os.path.commonpath([real, top]) != top:
            return relative, 0, "not_a_file it is a link that leads out of the directory", ""
    return relative, status.st_size, "", str(status.st_mtime_ns)


def expand_folder(name: str, without: str = "") -> list[str]:
    """A directory of shards is its files; any other is one input."""
    root = name.rstrip("/") or "/"
    shards: list[str] = []
    any_file = False
    for relative, _, flaw, _ in walk_folder(root):
        if without and is_below(f"{root}/{relative}", without):
            continue
        any_file = True
        if is_aside(relative):
            continue
        if flaw or suffix_of(relative) not in SHARDS:
            return [root]
        shards.append(f"{root}/{relative}")
    if not any_file:
        raise BadInput(
            f"{os.path.basename(root)} has no files", where=name, do="name another directory"
        )
    return shards or [root]


def is_below(path: str, folder: str) -> bool:
    """Whether a file lies in a directory, however the two are written."""
    return os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)


def is_aside(relative: str) -> bool:
    """Whether a file beside shards is not one of them: a log, a marker."""
    return relative.endswith(DONE_SUFFIX) or any(
        part.startswith("_") for part in relative.split("/")
    )


def is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


def glob(root: str, parts: list[str]) -> Iterator[str]:
    """What matches below `root`. `**` does not follow links: they could lead round in circles."""
    head, rest = parts[0], parts[1:]
    try:
        entries = list(os.scandir(root or "."))
    except OSError:
        return
    if head == "**":
        yield from glob(root, rest or ["*"])
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from glob(f"{root}{entry.name}/", parts)
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not head.startswith(".")
        if hidden or not fnmatch.fnmatchcase(entry.name, head):
            continue
        if not rest:
            yield root + entry.name
        elif entry.is_dir():
            yield from glob(f"{root}{entry.name}/", rest)


def suffix_of(name: str) -> str:
    """What a file's name ends in, in small letters, whatever compressed it.

    >>> suffix_of("src/main.CPP.gz"), suffix_of("Makefile")
    ('.cpp', '')
    """
    stem, suffix = os.path.splitext(name)
    return (os.path.splitext(stem)[1] if suffix in COMPRESSED else suffix).lower()


def is_packed(name: str) -> bool:
    """Whether a file or member is compressed, by its name: see `formats`, which inflates it.

    >>> is_packed("src/main.cpp.gz"), is_packed("main.cpp")
    (True, False)
    """
    # nearly no name is: one call instead of a dozen
    return name.endswith(_PACKED) and os.path.splitext(name)[1] in COMPRESSED


def refused_as(reason: str, name: str) -> str:
    """Why a file or member is refused: not as any binary one, if it would be read where it is
    named as an input.

    >>> refused_as("binary", "src/old.tar.gz"), refused_as("binary", "src/icon.png")
    ('archive', 'binary')
    """
    if reason not in ("binary", "document_too_long"):
        return reason
    if name.lower().endswith(_ARCHIVES):
        return ARCHIVE
    return PARQUET if name.lower().endswith(".parquet") else reason


def is_printable(name: str) -> bool:
    """Whether a name can be written into the log: it is UTF-8, without control characters."""
    return name.isprintable() or all(unicodedata.category(c) not in ("Cc", "Cs") for c in name)


def shown(name: str) -> str:
    """A name that cannot be printed, for people."""
    return name if is_printable(name) else name.encode("unicode_escape").decode()


def matches(path: list[str], parts: list[str]) -> bool:
    if not parts:
        return not path
    if parts[0] == "**":
        rest = parts[1:] or ["*"]
        return any(matches(path[k:], rest) for k in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], parts[0]) and matches(path[1:], parts[1:])


def walk_bucket(url: str) -> Iterator[Found]:
    """The objects under a prefix, by their keys' bytes."""
    key = open_bucket(url)[1].rstrip("/")
    skip = len(key) + 1 if key else 0
    for path, size, version in list_objects(url, key):
        relative = path[skip:]
        if not relative:
            if size:  # else it is the folder's own marker
                yield "", 0, "bad_name its key ends in a slash", version
        elif not any(part.startswith(".") for part in relative.split("/")):
            yield relative, size, "" if is_printable(relative) else "bad_name", version
