"""What the commands share: options made from dataclasses, a progress bar, what is printed.

In:    functions whose parameters are options, some of them whole dataclasses of `penstock`
Out:   commands; the default, the check and the help of an option are the field's
Never: imports what a command works with before that command is run, or its help is asked for

    @options(config=Fields("ShardConfig", "rows_per_file", "seed"))
    def shard(parquet_dir: Dataset, *, config: "penstock.ShardConfig") -> None: ...
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TextIO, TypeVar

import typer
import typer.core
import typer.main

import penstock
from penstock.errors import BadInput
from penstock.options import parse_bytes, parse_seconds, printable, show_bytes, show_seconds
from penstock.work.events import Event, Events, progress_bar

Dataset = Annotated[str, typer.Argument(help="A dataset's directory or address.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="A module to import first, which registers formats; repeatable."),
]
_Command = TypeVar("_Command", bound=Callable[..., None])
STOPPED: Final = "stopped by a signal; the same command resumes from here"
INPUTS: Final = ("--inputs", "--input")
"""Two spellings of one option, in every command that reads something."""
Inputs = Annotated[
    list[str],
    typer.Option(*INPUTS, help="Files, globs, directories, addresses; more may follow it."),
]


class Fields:
    """Which fields of a dataclass are options of a command.

    A field's option has its name, without the unit of seconds, unless `flags` gives it another:
    `Fields("SyncConfig", "once", "stall_s", give_up_s="--patience --give_up")`.
    """

    def __init__(self, config: str, *names: str, **flags: str) -> None:
        self._config = config
        self._flags = {name: ["--" + name.removesuffix("_s")] for name in names}
        self._flags |= {name: text.split() for name, text in flags.items()}

    @functools.cached_property
    def options(self) -> "list[_Option]":
        """Those of a command, found when they are first needed."""
        kind = getattr(penstock, self._config)
        known = {field.name: field for field in dataclasses.fields(kind)}
        texts = texts_of_fields(kind)
        return [_Option(known[name], flags, texts[name]) for name, flags in self._flags.items()]

    def make(self, typed: dict[str, Any]) -> Any:
        """The dataclass, from what was typed for each option."""
        values = {option.field.name: option.value(typed[option.name]) for option in self.options}
        return getattr(penstock, self._config)(**values)


class _Option:
    """A field as an option: sizes and durations as people type them, lists by commas or by an
    option for each.

    A list whose option has another name, `--plugin` for `plugins`, has an option for each alone.
    """

    def __init__(self, field: "dataclasses.Field[Any]", flags: list[str], text: str) -> None:
        self.field = field
        self.name = flags[0].removeprefix("--")
        self._flags = flags
        self._text = text

    def _ways(self) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
        """The type that is typed; how a value becomes that, and that a value."""
        is_union = isinstance(self.field.type, types.UnionType)
        kind = typing.get_args(self.field.type)[0] if is_union else self.field.type
        made, flag = typing.get_origin(kind), self._flags[0]
        if kind is int and "bytes" in self.field.name:
            return str, show_bytes, lambda text: parse_bytes(text, flag)
        if kind is float and self.field.name.endswith("_s"):
            return str, show_seconds, lambda text: parse_seconds(text, flag)
        if made in (tuple, frozenset) and self.name == self.field.name:
            return (
                list[str],
                list,
                lambda typed: made(part for text in typed for part in text.split(",") if part),
            )
        if made in (tuple, frozenset):
            return list[str], list, made
        return kind if kind in (int, float, bool) else str, lambda value: value, lambda value: value

    def parameter(self) -> inspect.Parameter:
        kind, show, _ = self._ways()
        default = self.field.default
        if self.field.default_factory is not dataclasses.MISSING:
            default = self.field.default_factory()
        about = typer.Option(*self._flags, help=self._text)
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default if default is None else show(default),
            annotation=Annotated[kind if default is not None else kind | None, about],
        )

    def value(self, typed: Any) -> Any:
        if self.field.default is None and typed in (None, "", (), [], [""]):
            return None
        return self._ways()[2](typed)


def texts_of_fields(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass, in one line."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    texts = {}
    for field, below in itertools.pairwise(getattr(made, "body", [])):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return texts


def options(**configs: Fields) -> Callable[[_Command], _Command]:
    """Let parameters of a command be dataclasses; their fields are its options."""

    def put(function: _Command) -> _Command:
        vars(function)["configs"] = configs
        return function

    return put


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Make a function a command, whose options are found when they are first needed."""

    class Lazy(typer.core.TyperCommand):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            del self.params, self.callback

        @functools.cached_property
        def _built(self) -> Any:
            app = typer.Typer(add_completion=False)
            app.command()(_spread(function))
            built = typer.main.get_command(app)
            for parameter in built.params:
                vars(parameter)["help"] = _plain(vars(parameter).get("help") or "")
            return built

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, each_input_named(args))

        def __getattr__(self, wanted: str) -> Any:
            if wanted not in ("params", "callback"):
                raise AttributeError(wanted)
            setattr(self, wanted, getattr(self._built, wanted))
            return getattr(self, wanted)

    def stub() -> None: ...

    told = _plain(inspect.getdoc(function) or "")
    app.command(name or function.__name__, cls=Lazy, help=told)(stub)


def _plain(text: str) -> str:
    r"""Help without markup, and without the line breaks of the source within a paragraph.

    >>> _plain("A file with\na table [loader].\n\nMore.")
    'A file with a table \\[loader].\n\nMore.'
    """
    paragraphs = text.replace("[", "\\[").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def each_input_named(arguments: list[str]) -> list[str]:
    """Arguments in which every input has its option: more of them may follow the first.

    >>> each_input_named(["--inputs", "a", "b", "--output", "c"])
    ['--inputs', 'a', '--inputs', 'b', '--output', 'c']
    """
    found: list[str] = []
    takes = 0  # 2 before the value of the option, 1 where more may follow
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, _ = argument.partition("=")
            takes = (1 if equals else 2) if name in INPUTS else 0
        elif takes == 1:
            found.append(INPUTS[0])
        else:
            takes = takes and 1
        found.append(argument)
    return found


def _spread(function: Callable[..., None]) -> Callable[..., None]:
    """The same function with an option for each field, where it has a dataclass.

    A dataclass that has a default is made only if one of its options is given.
    """
    configs: dict[str, Fields] = vars(function).get("configs", {})
    own = inspect.signature(function).parameters
    parameters: dict[str, list[inspect.Parameter]] = {
        name: [option.parameter() for option in configs[name].options]
        if name in configs
        else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        for name, parameter in own.items()
    }

    def run(**given: Any) -> None:
        for name, fields in configs.items():
            typed = {option.name: given.pop(option.name) for option in parameters[name]}
            defaults = {option.name: option.default for option in parameters[name]}
            if own[name].default is inspect.Parameter.empty or typed != defaults:
                given[name] = fields.make(typed)
        function(**given)

    vars(run)["__signature__"] = inspect.Signature([*itertools.chain(*parameters.values())])
    return run


class _Heard:
    """Events of a command once more, in a file that somebody named: a conductor of stages."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Events | None = None

    def open(self, path: str) -> None:
        self._path = Path(path)

    def begin(self, label: str) -> None:
        """What comes next is of this stage."""
        if self._path is not None:
            self._file = Events(label, path=self._path)

    def write(self, event: Event) -> None:
        if self._file is not None:
            self._file.emit(**{name: event[name] for name in event if name not in _OF_FILE})

    def made(self, outcome: "penstock.Outcome") -> None:
        """Say which dataset a command has made, or found made already."""
        files = len(outcome.state.files)
        self.write(
            {"kind": "made", "dataset": outcome.url, "sealed": outcome.sealed, "files": files}
        )


_OF_FILE: Final = ("time", "stage")
heard: Final = _Heard()


@contextlib.contextmanager
def watched(label: str, folder: str | None = None) -> Iterator[Events]:
    """Events of a command, with a bar; a directory of this machine keeps them."""
    path = None if folder is None or "://" in folder else Path(folder) / "_events.jsonl"
    with contextlib.closing(Events(label, path=path)) as events, progress_bar(events, label):
        heard.begin(label)
        events.listen(heard.write)
        yield events


def say(text: str, file: TextIO | None = None) -> None:
    """Print what may hold names from data, which must not reach a terminal as they are."""
    print(printable(text), file=file or sys.stdout)


def exit_if_stopped(outcome: "penstock.Outcome") -> None:
    """Exit as a signal asks, if one ended the run before its dataset was complete."""
    if outcome.stopped_by is not None and not outcome.sealed:
        say(STOPPED, file=sys.stderr)
        raise typer.Exit(128 + outcome.stopped_by)


def dropped_of(outcome: "penstock.Outcome") -> Counter[str]:
    """Why documents were let go of, and how many."""
    dropped: Counter[str] = Counter()
    for known in outcome.documents.values():
        dropped.update(known.dropped)
    return dropped


def refuse_nothing(outcome: "penstock.Outcome", kept: int, flags: str) -> None:
    """An empty result is not a success, however it came about; `flags` are those that refuse."""
    if kept or not outcome.sealed:
        return
    dropped = dropped_of(outcome)
    told = ", ".join(f"{reason} {count:,}" for reason, count in dropped.most_common())
    raise BadInput(
        "nothing was kept",
        where=outcome.url,
        why=f"all {dropped.total():,} documents were refused: {told}"
        if dropped
        else "the inputs hold no document",
        do="look at the rejects beside the output, then change the options that refuse them "
        f"({flags})"
        if dropped
        else "check the inputs",
    )
