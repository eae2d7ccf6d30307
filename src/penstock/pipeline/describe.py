"""Read a pipeline from its file, and say which commands it stands for.

In:    pipeline.toml: sources, what is done to them, where it goes, a loader, a trainer's command
Out:   stages, each the command that a person would type for it
Keeps: strictness: every wrong key or value of the file is told, all at once, with the nearest name
Never: reads data, runs anything, has an option that the commands have not

The file is a run's description too: its table [loader] is what `penstock explain --config` and
`read_run` read. Paths in it are relative to its directory, where the commands run.

    [source.cpp]  inputs = ["src"]        [tokenizer]  path = "tokenizer"    [push]  url = "s3://…"
    [filter]      preset = "code"         [tokenizer.train]  vocab_size = …  [pull]  dir = "local"
    [chunk]       max_tokens = 2048       [shards]  parquet_dir = "data"     [train] command = "…"
"""

import dataclasses
import os
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import penstock
from penstock.errors import BadConfig, PenstockError
from penstock.ingest.find import is_pattern
from penstock.options import checked_path, parse_bytes, parse_seconds, suggest
from penstock.store.log import split_generation
from penstock.supply.run_file import fits, read_run

_OF_SHELL: Final = frozenset({"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1", "&>"})
_SETTING: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
KINDS: Final = {"documents": "chunk", "lines": "shard", "conversations": "conversations"}
"""What the inputs of a source are, and the command that makes a dataset of them."""
DEDUP: Final = ("none", "exact", "near", "batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One process of a pipeline."""

    name: str
    """What it is called in messages: its command, and its source where there are several."""
    job: str
    """tokenizer, chunk, shard, conversations, push, pull or train."""
    command: tuple[str, ...]
    """What a person would type; `penstock` is the first word of those that are ours."""
    source: str = ""
    dataset: str = ""
    """The directory or address that it writes."""
    bounded: bool = False
    """Whether it waits for the trainer to pass what it has brought."""

    def __str__(self) -> str:
        return shlex.join(self.command)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One weighted origin of documents, with what is done to them."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    tables: Mapping[str, Mapping[str, Any]]
    """Its options: those of all sources, with its own over them."""
    dataset: str
    """The directory or address of its dataset."""

    @property
    def has_texts(self) -> bool:
        """Whether its inputs hold texts as they are, and not messages."""
        return self.kind != "conversations"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCommand:
    """The trainer: any program that reads the loader's datasets."""

    command: str | list[str] = ""
    """What to run, in the file's directory; text is split as a shell would, and no shell runs."""
    log: str = ""
    """A file of JSON lines that it writes, {"step", "loss", "time"}: the live view reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What a file says, checked."""

    path: Path
    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]
    tokenizer: str = ""
    trains_tokenizer: Mapping[str, Any] | None = None
    train: TrainCommand = field(default_factory=TrainCommand)
    has_loader: bool = False
    doubts: tuple[str, ...] = ()
    """What may be meant so, and is told before a run."""

    @property
    def folder(self) -> Path:
        """Where its commands run."""
        return self.path.absolute().parent

    @property
    def run_folder(self) -> Path:
        """Where its locks, events and the output of its stages are."""
        return self.path.absolute().with_suffix(".run")


@dataclass(frozen=True)
class _Table:
    """Fields of a dataclass that a table has, with the flag of each in the commands that take it.

    `more` are keys that no dataclass has: they are checked where they are used.
    """

    config: str
    names: tuple[str, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def flag(self, name: str) -> str:
        return self.flags.get(name) or "--" + name.removesuffix("_s")


_SYNC: Final = ("connections", "stall_s", "give_up_s")
_TABLES: Final = {
    "read": _Table(
        "ReadConfig", ("suffixes", "text_field", "decode", "max_document_bytes", "order")
    ),
    "filter": _Table(
        "FilterConfig", ("preset", "secrets", "pii", "rules"),
        {"preset": "--filter", "rules": "--rule"},
    ),
    "dedup": _Table("", (), {"kind": "--dedup"}, {"kind": str}),
    "decontaminate": _Table("", (), {"files": "--benchmark"}, {"files": Sequence[str]}),
    "process": _Table("", (), {"names": "--processor"}, {"names": Sequence[str]}),
    "chunk": _Table("ChunkConfig", ("max_tokens", "reserve_tokens", "language")),
    "chat": _Table(
        "ChatConfig",
        ("chat_template", "max_length", "train_on", "turns", "overflow", "history", "format",
         "branch", "strip", "date", "ignore"),
        {"ignore": "--ignore"},
    ),
    "shards": _Table(
        "ShardConfig",
        ("rows_per_file", "bytes_per_file", "val_fraction", "seed"),
        more={"parquet_dir": str, "tokens": bool},
    ),
    "follow": _Table(
        "FollowConfig", ("complete", "until_idle_s", "wait_for_input_s", "max_rejects", "threads")
    ),
    "work": _Table(
        "RunConfig", ("workers", "engine", "max_memory_bytes", "max_rejects", "plugins"),
        {"max_memory_bytes": "--max_memory", "plugins": "--plugin"},
    ),
    "tokenizer": _Table("", (), more={"path": str, "inputs": Sequence[str], "train": Mapping}),
    "push": _Table("SyncConfig", _SYNC, {"give_up_s": "--patience"}, {"url": str}),
    "pull": _Table(
        "SyncConfig", (*_SYNC, "max_disk_bytes", "only"),
        {"give_up_s": "--patience", "max_disk_bytes": "--max_disk"}, {"url": str, "dir": str},
    ),
    "train": _Table("", (), more={"command": str | Sequence[str], "log": str}),
}  # fmt: skip
_TRAINED: Final = _Table(
    "TrainConfig",
    ("vocab_size", "special_tokens", "pattern", "order", "min_frequency", "min_count",
     "text_field", "decode", "suffixes"),
)  # fmt: skip
_OF_JOB: Final = {
    "chunk": ("process", "filter", "decontaminate", "dedup", "chunk", "read", "shards", "work"),
    "shard": ("read", "shards", "follow"),
    "conversations": ("chat", "shards", "follow"),
}
"""Tables whose options a command takes."""
_NOT_OF_JOB: Final = {
    ("conversations", "wait_for_input_s"),
    *(("shard", name) for name in ("suffixes", "decode", "max_document_bytes", "order")),
}
"""Options of those tables that a command has not: they are for other sources."""
_OF_SOURCE: Final = tuple(dict.fromkeys(name for names in _OF_JOB.values() for name in names))
"""Tables that a source may have of its own."""
_SOURCE: Final = {"inputs": Sequence[str], "kind": str}


def read_pipeline(path: str | os.PathLike[str]) -> Pipeline:
    """The pipeline of a file. All that is wrong in it is told at once."""
    name = checked_path("the pipeline", path)
    try:
        content = tomllib.loads(Path(name).read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise BadConfig(
            f"there is no pipeline {name}", do="name its file; penstock init writes one"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{name} is not TOML", why=str(error), do="fix it") from None
    return _Reading(name, content).read()


class _Reading:
    """One file, and what is wrong in it so far."""

    def __init__(self, path: str, content: dict[str, Any]) -> None:
        self._path = path
        self._content = content
        self._problems: list[str] = []

    def read(self) -> Pipeline:
        self._check_names("", self._content, [*_TABLES, "source", "loader"])
        tables = {
            name: self._table(f"[{name}]", _TABLES[name], self._content[name])
            for name in _TABLES
            if name in self._content
        }
        trained = None
        if "train" in tables.get("tokenizer", {}):
            given = tables["tokenizer"]["train"]
            trained = self._table("[tokenizer.train]", _TRAINED, given)
        sources = self._sources(tables)
        if "loader" in self._content:
            try:
                read_run(self._path)
            except PenstockError as error:
                told = [error.what, error.why, error.do]
                self._say("[loader]", "; ".join(part for part in told if part))
        if not self._problems:
            self._check_whole(tables, trained, sources)
        if self._problems:
            count = len(self._problems)
            raise BadConfig(
                f"{count} {'thing is' if count == 1 else 'things are'} wrong in {self._path}",
                why="\n".join(self._problems),
                do="fix all of them and run the same command again",
            )
        train = TrainCommand(**tables.get("train", {}))
        return Pipeline(
            path=Path(self._path),
            sources=tuple(sources),
            stages=tuple(_stages(tables, trained, sources, train)),
            tokenizer=tables.get("tokenizer", {}).get("path", ""),
            trains_tokenizer=trained,
            train=train,
            has_loader="loader" in self._content,
            doubts=(*self._missing(tables, trained), *self._doubts(tables, sources)),
        )

    def _missing(
        self, tables: Mapping[str, Mapping[str, Any]], trained: Mapping[str, Any] | None
    ) -> Iterator[str]:
        """A tokenizer that is not there, and that no stage trains."""
        path = tables.get("tokenizer", {}).get("path", "")
        folder = os.path.dirname(os.path.abspath(self._path))
        if path and trained is None and not os.path.lexists(os.path.join(folder, path)):
            yield (
                f"[tokenizer]: {path} is not there, and no stage trains it: name one that is, or "
                "write [tokenizer.train]"
            )

    def _doubts(
        self, tables: Mapping[str, Mapping[str, Any]], sources: Sequence[Source]
    ) -> Iterator[str]:
        """Datasets that the loader would wait for, and that no stage makes."""
        push, pull = (tables.get(name, {}) for name in ("push", "pull"))
        made = [one.dataset for one in sources]
        for end in (push.get("url"), pull.get("dir")):
            made += [os.path.join(end, one.name) for one in sources] if end else []
        if pull.get("dir") and not sources:
            made.append(pull["dir"])
        for path in _texts(self._content.get("loader", {}).get("path")):
            place = split_generation(path)[0]
            if not made or "://" in path or is_pattern(path):
                continue
            if os.path.lexists(os.path.join(os.path.dirname(os.path.abspath(self._path)), path)):
                continue
            if not any(self._is_same(place, one) for one in made):
                told = f"[loader]: {path} is not there, and no stage makes it"
                yield f"{told}: {suggest(place, made)}"

    def _sources(self, tables: dict[str, dict[str, Any]]) -> list[Source]:
        """Those of the file; a table of a source's own is laid over that of all."""
        given = self._content.get("source", {})
        if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
            self._say("source", 'it is not a table by name: write [source.cpp], inputs = ["src"]')
            return []
        folder = tables.get("shards", {}).get("parquet_dir", "data")
        found = []
        for name, about in given.items():
            where = f"[source.{name}]"
            self._check_names(where, about, [*_SOURCE, *_OF_SOURCE])
            if not name.replace("-", "_").isidentifier():
                self._say(where, "a source is called by letters, digits, - and _")
            kind = about.get("kind", "documents")
            if not isinstance(kind, str) or kind not in KINDS:
                self._say(where, f"kind is {kind!r}: {suggest(kind, KINDS)}")
                continue
            inputs = about.get("inputs", [])
            if not inputs or not fits(inputs, Sequence[str]):
                self._say(where, 'inputs is not a list of paths: write inputs = ["src"]')
                continue
            own = {
                part: self._table(f"[source.{name}.{part}]", _TABLES[part], about[part])
                for part in _OF_SOURCE
                if part in about
            }
            for part in own.keys() - {*_OF_JOB[KINDS[kind]]}:
                told = f"penstock {KINDS[kind]}, which makes this source, has none of its options"
                self._say(f"[source.{name}.{part}]", f"{told}: take it out")
            for part, values in own.items():
                for key in values:
                    if (KINDS[kind], key) in _NOT_OF_JOB:
                        why = f"penstock {KINDS[kind]} has no {key}: take it out"
                        self._say(f"[source.{name}.{part}]", why)
            if "parquet_dir" in own.get("shards", {}):
                self._say(f"[source.{name}.shards]", "parquet_dir is that of all: [shards] has it")
            merged = {
                part: {**tables.get(part, {}), **own.get(part, {})}
                for part in _OF_JOB[KINDS[kind]]
                if part in tables or part in own
            }
            found.append(
                Source(
                    name=name, kind=kind, inputs=tuple(map(_word, inputs)), tables=merged,
                    dataset=os.path.join(folder, name),
                )
            )  # fmt: skip
        return found

    def _table(self, where: str, table: _Table, given: Any) -> dict[str, Any]:
        """What a table says, as its dataclass has it, which checks it."""
        if not isinstance(given, dict):
            self._say(where, f"it is {given!r}, and not a table")
            return {}
        is_filter = table.config == "FilterConfig"
        kind = getattr(penstock, table.config) if table.config else None
        about = {one.name: one for one in dataclasses.fields(kind)} if kind else {}
        names = tuple(about) if is_filter else table.names
        self._check_names(where, given, [*names, *table.more])
        values: dict[str, Any] = {}
        more: dict[str, Any] = {}
        for name, value in given.items():
            try:
                if name in names:
                    if name not in table.flags:
                        _check_commas(name, value)
                    values[name] = _typed(name, value, about[name].type)
                elif name in table.more:
                    if not fits(value, table.more[name]):
                        raise BadConfig(f"{name} is {value!r}", do=_wanted(table.more[name]))
                    more[name] = value
            except BadConfig as error:
                self._say(where, f"{error.what}: {error.do}")
                values.pop(name, None)
        if "kind" in more and table is _TABLES["dedup"] and more["kind"] not in DEDUP:
            self._say(where, f"kind is {more['kind']!r}: {suggest(more['kind'], DEDUP)}")
        if kind is not None:
            try:
                kind(**values)
            except BadConfig as error:
                self._say(where, ": ".join(part for part in (error.what, error.do) if part))
        return {**more, **values}

    def _check_whole(
        self, tables: dict[str, dict[str, Any]], trained: Any, sources: list[Source]
    ) -> None:
        """What only shows when all tables are seen together."""
        tokenizer, push, pull = (tables.get(name, {}) for name in ("tokenizer", "push", "pull"))
        needs = [one.name for one in sources if one.kind != "lines"]
        if needs and not tokenizer.get("path"):
            why = f"{', '.join(needs)} counts tokens: write path, and [tokenizer.train] to make it"
            self._say("[tokenizer]", why)
        if trained is not None and not needs and not tokenizer.get("path"):
            self._say("[tokenizer]", "path is missing: where [tokenizer.train] writes")
        if trained is not None and not (tokenizer.get("inputs") or _learned_from(trained, sources)):
            why = (
                "inputs is missing, and no source has texts in the text_field of [tokenizer.train]"
            )
            self._say("[tokenizer]", why)
        if "push" in tables and not (push.get("url") and sources):
            self._say("[push]", "it needs url, a bucket's address or a directory, and a source")
        if "pull" in tables and not pull.get("dir"):
            self._say("[pull]", "dir is missing: the directory to fill")
        if "pull" in tables and not (pull.get("url") or push.get("url")):
            self._say("[pull]", "url is missing, and there is no [push] that has one")
        if "train" in tables:
            self._check_command(tables["train"].get("command", ""))
        if pull.get("dir"):
            for one in sources:
                self._check_apart("[pull]", "dir", one, os.path.join(pull["dir"], one.name))
        if push.get("url"):
            for one in sources:
                self._check_apart("[push]", "url", one, os.path.join(push["url"], one.name))
        start = pull.get("url") or push.get("url")
        if pull.get("dir") and start and self._is_same(pull["dir"], start):
            self._say("[pull]", f"dir is {pull['dir']!r}, which is what it pulls from")
        jobs = {KINDS[one.kind] for one in sources}
        for name in _OF_SOURCE:
            takers = {job for job in jobs if name in _OF_JOB[job]}
            if name in tables and not takers:
                self._say(f"[{name}]", "no source is made with it: take it out")
                continue
            for key in tables.get(name, {}):
                if all((job, key) in _NOT_OF_JOB for job in takers):
                    self._say(f"[{name}]", f"no source is made with {key}: take it out")
        if not ({"push", "pull", "train"} & tables.keys() or sources or trained is not None):
            self._say("the file", 'there is nothing to run: write [source.NAME], inputs = ["…"]')

    def _check_command(self, command: str | Sequence[str]) -> None:
        """Refuse a trainer's command that is none, or that only a shell would understand."""
        try:
            words = _words(command)
        except ValueError as error:
            self._say("[train]", f"command is {command!r}: {error}: close it, or write a list")
            return
        if not any(words[:1]):
            self._say("[train]", "command is missing: what starts the trainer")
        elif isinstance(command, str):
            odd = next((word for word in words if word in _OF_SHELL), "")
            if _SETTING.match(words[0]):
                why = f"command begins with {words[0]!r}, and no shell runs: write env before it"
                self._say("[train]", why)
            elif odd:
                told = f"command has {odd!r}, and no shell runs"
                self._say("[train]", f'{told}: write ["sh", "-c", "…"], or a list of words')

    def _check_apart(self, where: str, key: str, source: Source, place: str) -> None:
        if self._is_same(place, source.dataset):
            told = f"{key} is where {source.name} is made, {source.dataset}: choose another"
            self._say(where, told)

    def _is_same(self, one: str, other: str) -> bool:
        folder = os.path.dirname(os.path.abspath(self._path))
        if "://" in one or "://" in other:
            return one.rstrip("/") == other.rstrip("/")
        return os.path.realpath(os.path.join(folder, one)) == os.path.realpath(
            os.path.join(folder, other)
        )

    def _check_names(self, where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
        for name in sorted(given.keys() - {*known}):
            told = f"{name!r} is not a key here" if where else f"[{name}] is not a table"
            self._say(where or "the file", f"{told}: {suggest(name, known)}")

    def _say(self, where: str, problem: str) -> None:
        self._problems.append(f"{where}: {problem}")


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, in its lists and tables too.

    >>> list(_texts({"a": "x", "b": ["y", 3]}))
    ['x', 'y']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _wanted(kind: Any) -> str:
    """A type in the words of the file.

    >>> _wanted(int | None), _wanted(tuple[str, ...]), _wanted(typing.Literal["a", "b"])
    ('write a whole number', 'write a list of texts', 'choose a or b')
    """
    inner = [one for one in typing.get_args(kind) if one is not type(None)]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind, inner = inner[0], list(typing.get_args(inner[0]))
    if typing.get_origin(kind) is typing.Literal:
        return f"choose {' or '.join(map(str, inner))}"
    if typing.get_origin(kind) is not None:
        return "write a list of numbers" if float in inner else "write a list of texts"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return f"write {words.get(kind, 'a table')}"


def _typed(name: str, value: Any, kind: Any) -> Any:
    """A value as the field has it: sizes and durations may be as people type them."""
    kinds = typing.get_args(kind) or (kind,)
    if int in kinds and "bytes" in name and isinstance(value, str):
        return parse_bytes(value, name)
    if float in kinds and name.endswith("_s") and isinstance(value, str):
        return parse_seconds(value, name)
    if not fits(value, kind):
        raise BadConfig(f"{name} is {value!r}", do=_wanted(kind))
    made = [typing.get_origin(one) or one for one in (kind, *kinds)]
    if isinstance(value, list):
        return frozenset(value) if frozenset in made else tuple(value)
    return value


def _check_commas(name: str, value: Any) -> None:
    """Refuse what would be two values: the command has those of this option in one word."""
    for one in value if isinstance(value, list) else ():
        if isinstance(one, str) and "," in one:
            raise BadConfig(
                f"{name} has {one!r}", do="the command parts values at commas: write one without"
            )


def _words(command: str | Sequence[str]) -> list[str]:
    """The words of a command, parted as a shell does; ValueError for a quote that is left open."""
    return shlex.split(command) if isinstance(command, str) else list(command)


def _options(table: _Table, values: Mapping[str, Any], job: str) -> list[str]:
    """What is typed for the values of a table."""
    found: list[str] = []
    for name, value in values.items():
        if (job, name) in _NOT_OF_JOB or (name in table.more and name not in table.flags):
            continue
        flag = table.flag(name)
        if table.config == "FilterConfig" and name not in table.names:
            listed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            shown = listed.lower() if isinstance(value, bool) else listed
            found += ["--set", f"{name}={shown}"]
        elif isinstance(value, bool):
            found += [flag] if value else []
        elif isinstance(value, frozenset | tuple | list):
            parts = sorted(value) if isinstance(value, frozenset) else list(value)
            repeated = name in table.flags
            found += (
                [part for one in parts for part in (flag, one)]
                if repeated
                else [flag, ",".join(parts)]
            )
        elif "bytes" in name:
            found += [flag, f"{value}B"]
        else:
            found += [flag, f"{value}s" if name.endswith("_s") else str(value)]
    return found


def _stages(
    tables: Mapping[str, Mapping[str, Any]], trained: Mapping[str, Any] | None,
    sources: Sequence[Source], train: TrainCommand,
) -> "list[Stage]":  # fmt: skip
    """The commands, in the order of the data."""
    tokenizer = tables.get("tokenizer", {})
    many, found = len(sources) > 1, []
    if trained is not None:
        inputs = tokenizer.get("inputs") or _learned_from(trained, sources)
        command = ["penstock", "tokenizer", "train", "--inputs", *map(_word, inputs)]
        command += ["--output", tokenizer["path"], *_options(_TRAINED, trained, "tokenizer")]
        modules = [one.tables.get("work", {}).get("plugins", ()) for one in sources]
        for module in dict.fromkeys(chain(*modules)):  # formats of what it learns from
            command += ["--plugin", module]
        found.append(
            Stage(
                name="tokenizer",
                job="tokenizer",
                command=tuple(command),
                dataset=tokenizer["path"],
            )
        )
    push, pull = tables.get("push"), tables.get("pull")
    for source in sources:
        found.append(_make(source, tokenizer.get("path", ""), many))
    moved = [one.name for one in sources] or [""]
    for name in moved:
        label = f" {name}" if many else ""
        url = os.path.join(push["url"], name) if push else ""
        if push is not None:
            made = next(one.dataset for one in sources if one.name == name)
            command = ["penstock", "push", made, url, *_options(_TABLES["push"], push, "push")]
            stage = Stage(
                name=f"push{label}", job="push", command=tuple(command), source=name, dataset=url
            )
            found.append(stage)
        if pull is not None:
            start = os.path.join(pull["url"], name) if pull.get("url") else url
            target = os.path.join(pull["dir"], name)
            options = _options(_TABLES["pull"], pull, "pull")
            command = ["penstock", "pull", start.rstrip("/"), target.rstrip("/"), *options]
            found.append(
                Stage(
                    name=f"pull{label}", job="pull", command=tuple(command), source=name,
                    dataset=target.rstrip("/"), bounded="max_disk_bytes" in pull,
                )
            )  # fmt: skip
    if train.command:
        found.append(Stage(name="train", job="train", command=tuple(_words(train.command))))
    return found


def _learned_from(trained: Mapping[str, Any], sources: Sequence[Source]) -> list[str]:
    """Inputs that a tokenizer can be trained on: texts in the field that its command reads."""
    field_read = trained.get("text_field", "text")
    found = [
        name
        for one in sources
        if one.has_texts and one.tables.get("read", {}).get("text_field", "text") == field_read
        for name in one.inputs
    ]
    return list(dict.fromkeys(found))  # two sources may take other files of one tree


def _word(path: str) -> str:
    """A path as a word that no command takes for an option.

    >>> _word("a.cpp"), _word("-a.cpp")
    ('a.cpp', './-a.cpp')
    """
    return f"./{path}" if path.startswith("-") else path


def _make(source: Source, tokenizer: str, many: bool) -> Stage:
    """The command that makes a source's dataset."""
    job = KINDS[source.kind]
    command = ["penstock", job, "--inputs", *source.inputs, "--parquet_dir", source.dataset]
    if tokenizer:
        command += ["--tokenizer", tokenizer]
        if job != "conversations" and source.tables.get("shards", {}).get("tokens", True):
            command += ["--tokens"]
    for name, values in source.tables.items():
        command += _options(_TABLES[name], values, job)
    name = f"{job} {source.name}" if many else job
    return Stage(
        name=name, job=job, command=tuple(command), source=source.name, dataset=source.dataset
    )
