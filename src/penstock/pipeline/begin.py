"""Write a pipeline for the files that are there, with a comment at each choice.

In:    a directory
Out:   the text of a pipeline.toml: a source for each kind of input that was found
Keeps: what it found is said: how many files, how many bytes, which field holds the text
Never: reads more than the beginning of a few files, writes over a file
"""

import contextlib
import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from penstock.chat.formats import sniff_format
from penstock.disk import create
from penstock.errors import BadConfig, BadInput, PenstockError
from penstock.ingest.find import glob, is_packed, suffix_of, walk_folder
from penstock.ingest.inputs import kind_of
from penstock.ingest.open import inflate
from penstock.options import printable_name
from penstock.pipeline.describe import read_pipeline

NAME: Final = "pipeline.toml"
_HEAD_BYTES: Final = 1 << 20
_MOST_FILES: Final = 200_000
_NAMED: Final = 8
"""Inputs that are listed one by one; more become a glob, if it matches no other file."""
_TEXT: Final = ("text", "content", "code", "body", "document", "raw_content")
_CHAT: Final = ("messages", "conversations", "instruction")
_CODE: Final = frozenset({
    ".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".inl", ".cu", ".py", ".js", ".ts",
    ".java", ".go", ".rs", ".rb", ".cs", ".swift", ".kt", ".scala", ".php", ".lua", ".sh", ".sql",
    ".r", ".jl", ".hs", ".ml", ".zig",
})  # fmt: skip
_PROSE: Final = frozenset({".txt", ".md", ".rst", ".html", ".tex", ".org", ".adoc"})
_OURS: Final = frozenset({"data", "local", "bucket", "tokenizer", "checkpoints"})


@dataclass
class _Found:
    """Inputs of one kind."""

    names: list[str] = field(default_factory=list)
    """Directories, and files that are in none of them."""
    bytes: int = 0
    files: int = 0
    text_field: str = ""
    suffixes: "Counter[str]" = field(default_factory=Counter)


@dataclass
class _Left:
    """Files that become no input."""

    odd: int = 0
    """By their names."""
    rows: list[str] = field(default_factory=list)
    """By their first row."""
    others: "Counter[str]" = field(default_factory=Counter)
    """By what their names end in."""

    def told(self) -> Iterator[str]:
        if self.odd:
            yield f"{self.odd:,} files whose names, or whose fields, are no plain text"
        if self.rows:
            named = ", ".join(self.rows[:_NAMED])
            more = ", …" if len(self.rows) > _NAMED else ""
            yield f"{len(self.rows):,} files whose first row has no text: {named}{more}"
        if self.others:
            kinds = ", ".join(suffix or "no suffix" for suffix, _ in self.others.most_common(5))
            yield f"{self.others.total():,} files of other kinds: {kinds}"


def write_pipeline(folder: str | os.PathLike[str] = ".") -> tuple[Path, list[str]]:
    """Write pipeline.toml into a directory; its path, and what was found, a line for each."""
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"{root} is no directory", do="name the directory that holds the inputs")
    path = root / NAME
    text, told = describe_folder(root)
    with tempfile.TemporaryDirectory() as elsewhere:  # what is written can be read
        with os.fdopen(create(Path(elsewhere) / NAME), "wb") as file:
            file.write(text.encode())
        read_pipeline(Path(elsewhere) / NAME)
    try:
        with os.fdopen(create(path), "wb") as file:
            file.write(text.encode())
    except FileExistsError:
        raise BadConfig(
            f"{path} is there already", do="edit it, or move it away and run this again"
        ) from None
    return path, told


def describe_folder(root: Path) -> tuple[str, list[str]]:
    """The text of a pipeline for the files below a directory, and what was found."""
    found, left = _look(root)
    if not found:
        raise BadInput(
            f"nothing in {root} can be read",
            where=str(root.absolute()),
            why="there are no source files, JSONL, parquet files or archives",
            do="name the directory that holds the inputs",
        )
    for about in found.values():
        about.names = _shorter(root, about)
    told = [f"{name}: {_amount(about)}: {_inputs(about)}" for name, about in found.items()]
    has_tokenizer = (root / "tokenizer" / "tokenizer.json").is_file()
    if not has_tokenizer and found.keys() == {"chat"}:
        told.append("tokenizer: none is there, and conversations train none: name the model's own")
    elif not has_tokenizer and (others := _not_learned_from(found)):
        told.append(f"tokenizer: learns nothing from {', '.join(others)}: another field has those")
    told += [f"left out: {line}" for line in left.told()]
    if has_tokenizer:
        told.append("tokenizer: the one that is there is used, and none is trained")
    text = [*_head(), *_sources(found), *_rest(found, has_tokenizer=has_tokenizer)]
    return "\n".join(text) + "\n", told


def _learned_field(found: dict[str, _Found]) -> str:
    """The field of the texts that the tokenizer learns from."""
    fields = {about.text_field or "text" for name, about in found.items() if name != "chat"}
    return "text" if "text" in fields or not fields else sorted(fields)[0]


def _not_learned_from(found: dict[str, _Found]) -> list[str]:
    """Sources whose texts are in another field."""
    field = _learned_field(found)
    return [n for n, one in found.items() if n != "chat" and (one.text_field or "text") != field]


def _is_odd(name: str) -> bool:
    """Whether a name cannot stand in a file of text: control characters, bytes that are no UTF-8.

    >>> _is_odd("a b/é"), _is_odd("a\\nb"), _is_odd("\\udcff")
    (False, True, True)
    """
    return any(letter < " " or "\x7f" <= letter < "\xa0" or "\ud800" <= letter <= "\udfff"
               for letter in name)  # fmt: skip


def _look(root: Path) -> tuple[dict[str, _Found], _Left]:
    """Inputs by the source that they become; what is left out."""
    found: dict[str, _Found] = defaultdict(_Found)
    left = _Left()
    for number, (relative, size, flaw, _) in enumerate(walk_folder(str(root))):
        if number >= _MOST_FILES:
            break
        top, _, below = relative.partition("/")
        left.odd += flaw == "bad_name"
        if flaw or not size or top in _OURS or top.endswith((".run", ".toml")):
            continue
        kind, suffix = kind_of(relative)[0], suffix_of(relative)
        name, meant, text_field = _source_of(root / relative, kind, suffix)
        if not name and kind in ("jsonl", "parquet"):
            left.rows.append(printable_name(relative))
            continue
        if not name:
            left.others[printable_name(suffix)] += 1
            continue
        meant = top if meant == "tree" and below else relative
        if _is_odd(meant) or _is_odd(text_field):
            left.odd += 1
            continue
        first, number = name, 2
        while name in found and found[name].text_field != text_field:  # another field's name
            name, number = f"{first}_{number}", number + 1
        about = found[name]
        about.text_field = text_field
        about.files += 1
        about.bytes += size
        about.suffixes[suffix] += size
        if meant not in about.names:
            about.names.append(meant)
    return dict(sorted(found.items())), left


def _source_of(path: Path, kind: str, suffix: str) -> tuple[str, str, str]:
    """The source that a file belongs to, whether it is one of a tree, the field of its text."""
    if kind in ("jsonl", "parquet"):
        text_field = _text_field(path) if kind == "jsonl" else _parquet_field(path)
        if text_field is None:
            return "chat", "file", ""
        name = "lines" if kind == "jsonl" else "tables"
        if text_field != "text":
            name = f"{name}_{_plain(text_field)}" if text_field else ""
        return name, "file", text_field
    if kind in ("tar", "zip"):
        return "archives", "file", ""
    name = "code" if suffix in _CODE else "prose" if suffix in _PROSE else ""
    return name, "tree", ""


def _plain(name: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)


def _first_row(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, PenstockError), open(path, "rb") as file:
        packed = kind_of(path.name)[1]
        head = _inflated(file, path.name, packed) if packed else file.read(_HEAD_BYTES)
        row = json.loads(head.splitlines()[0]) if head else {}
        return row if isinstance(row, dict) else {}
    return {}


def _inflated(file: IO[bytes], name: str, packed: str) -> bytes:
    buffer, filled = bytearray(_HEAD_BYTES), 0
    with contextlib.closing(inflate(file, name, packed)) as reader:
        while b"\n" not in buffer[:filled] and filled < len(buffer):
            got = reader.read_into(memoryview(buffer)[filled:])
            if not got:
                break
            filled += got
    return bytes(buffer[:filled])


def _text_field(path: Path) -> str | None:
    """The field of JSON lines that holds the text; None for conversations, empty for neither."""
    row = _first_row(path)
    if "text" not in row and (sniff_format(row) or any(name in row for name in _CHAT)):
        return None
    texts = {name: len(value) for name, value in row.items() if isinstance(value, str)}
    known = next((name for name in _TEXT if name in texts), "")
    return known or max(texts, key=lambda name: texts[name], default="")


def _parquet_field(path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException):
        return ""
    texts = [one.name for one in schema if pa.types.is_string(one.type)
             or pa.types.is_large_string(one.type)]  # fmt: skip
    return next((name for name in _TEXT if name in texts), texts[0] if texts else "")


def _shorter(root: Path, about: _Found) -> list[str]:
    """The names of a source with a glob for many files, where it matches these files alone."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    names = []
    for name in about.names:
        if (root / name).is_dir():
            names.append(name)
        else:
            stem, end = os.path.splitext(name)
            packed = end if is_packed(name) else ""
            end = os.path.splitext(stem)[1] + packed if packed else end
            groups[os.path.dirname(name), end].append(name)
    listed = sum(map(len, groups.values())) <= _NAMED
    for (folder, end), files in groups.items():
        pattern = os.path.join(folder, f"*{end}")
        is_tree = suffix_of(files[0]) in _CODE | _PROSE
        if (listed and not is_tree) or not _is_alone(root, pattern, files):
            names += files
        else:
            names.append(pattern)
    return sorted(names)


def _is_alone(root: Path, pattern: str, files: list[str]) -> bool:
    """Whether a glob matches these files, and no other that is not empty."""
    matched = {
        name
        for name in glob(f"{root}/", pattern.split("/"))
        if not os.path.isfile(name) or os.path.getsize(name)
    }
    return matched == {f"{root}/{name}" for name in files}


def _amount(about: _Found) -> str:
    files = "1 file" if about.files == 1 else f"{about.files:,} files"
    return f"{files}, {about.bytes / 1e6:,.1f} MB"


def _inputs(about: _Found) -> str:
    return json.dumps(about.names, ensure_ascii=False)


def _head() -> list[str]:
    return [
        "# A pipeline from the files that penstock init found here: raw files to the trainer.",
        "#   penstock run pipeline.toml --dry-run   the stages as commands, with an estimate",
        "#   penstock run pipeline.toml             run them, all at once; again: it resumes",
        "# Paths are relative to this file. Keys are the options of the commands; see docs/run.md.",
        "",
    ]


def _sources(found: dict[str, _Found]) -> Iterator[str]:
    for name, about in found.items():
        yield f"[source.{name}]  # {_amount(about)}"
        if name == "chat":
            yield 'kind = "conversations"'
        yield f"inputs = {_inputs(about)}"
        if name in ("code", "prose"):
            suffixes = sorted(
                s for s in about.suffixes if s in (_CODE if name == "code" else _PROSE)
            )
            yield f"[source.{name}.read]"
            yield f"suffixes = {json.dumps(suffixes)}  # other files of the trees are left out"
        if name.startswith(("lines_", "tables_")):
            yield f"[source.{name}.read]"
            yield f"text_field = {json.dumps(about.text_field, ensure_ascii=False)}"
        if name == "code":
            yield f"[source.{name}.filter]"
            yield 'preset = "code"  # refuses generated and minified files, data, blobs'
        yield ""


def _rest(found: dict[str, _Found], *, has_tokenizer: bool) -> Iterator[str]:
    documents = {name: about for name, about in found.items() if name != "chat"}
    size = sum(about.bytes for about in found.values())
    vocab = 65536 if size > 100e6 else 16384 if size > 5e6 else 2048
    yield "[tokenizer]"
    if documents or has_tokenizer:
        yield 'path = "tokenizer"'
    else:
        yield 'path = "tokenizer"  # none is there yet: name that of the model, or copy it here'
    if documents and not has_tokenizer:
        yield "[tokenizer.train]  # leave this table out to use one that is there already"
        yield f"vocab_size = {vocab}"
        if others := _not_learned_from(found):
            yield f"# It learns nothing from {', '.join(others)}: another field has those texts."
        if (text_field := _learned_field(found)) != "text":
            yield f"text_field = {json.dumps(text_field, ensure_ascii=False)}"
    if documents and "chat" in found and not has_tokenizer:
        yield 'special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]'
    yield ""
    if documents:
        yield "[dedup]"
        yield 'kind = "near"  # none, exact, near, or batch for what exceeds memory'
        yield "[chunk]"
        yield "max_tokens = 2048  # of a chunk; a loader's rows have as many"
    yield "[shards]"
    yield 'parquet_dir = "data"  # the dataset of source NAME is data/NAME'
    rows = 50_000 if size > 1e9 else 1_000
    yield f"rows_per_file = {rows}  # fewer: the trainer begins earlier; more: better mixed"
    if "chat" in found:
        yield "[follow]"
        yield "complete = true  # the conversations are all there; false follows files that grow"
    yield ""
    yield '# [push]\n# url = "s3://bucket/prefix"  # or gs://, az://, a directory'
    yield '# [pull]\n# dir = "local"  # then [loader] path is local/NAME'
    yield ""
    if documents:
        yield "[loader]  # penstock explain --config pipeline.toml --batch 7 reads this"
        paths = ", ".join(f'{name} = "data/{name}"' for name in documents)
        yield f"path = {{ {paths} }}"
        if len(documents) > 1:
            total = sum(about.bytes for about in documents.values())
            shares = ", ".join(
                f"{name} = {max(0.01, about.bytes / total):.2f}"
                for name, about in documents.items()
            )
            yield f"weights = {{ {shares} }}  # by bytes; choose your own"
        yield 'tokenizer = "tokenizer"'
        yield "chunk_size = 2048"
        yield "batch_size = 8"
        yield "[loader.run]"
        yield "wait_s = 600  # for the first shard"
        yield ""
    yield "# [train]"
    yield "# its loader: PretrainDataLoader(**penstock.read_run('pipeline.toml'))"
    yield '# command = "python train.py"'
    yield '# log = "train.jsonl"  # JSON lines with step, loss, time, which the live view shows'
