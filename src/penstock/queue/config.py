"""The config that `prepare` and `train` share: one file of names and values.

In:    a file of Python, as nanoGPT has them, or of TOML
Out:   its settings, checked; the provider and the trainer that it is for
Keeps: one reading for both sides: what the provider is told, the trainer is told
Never: stops at the first problem: all are said at once

A config of Python, a provider and a trainer are code of the user's, and are run. TOML runs nothing.
"""

import dataclasses
import importlib.util
import inspect
import json
import os
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import BadConfig
from penstock.options import checked_path, nearest, number, whole

PROVIDER_FILE: Final = "prepare_streaming.py"
REQUIRED: Final = ("dataset", "batch_size", "block_size")
DELETES: Final = ("checkpointed", "consumed")
TRAINER: Final = frozenset({
    "out_dir", "eval_interval", "log_interval", "eval_iters", "eval_only", "save_interval",
    "always_save_checkpoint", "init_from", "wandb_log", "wandb_project", "wandb_run_name",
    "gradient_accumulation_steps", "n_layer", "n_head", "n_embd", "dropout", "bias",
    "learning_rate", "max_iters", "weight_decay", "beta1", "beta2", "grad_clip", "decay_lr",
    "warmup_iters", "lr_decay_iters", "min_lr", "backend", "device", "dtype", "compile",
    "num_samples", "sample_steps", "temperature",
})  # fmt: skip
"""Settings of trainers: another value of these changes no batch."""
DIFFUSION: Final = ("noise", "eps", "mask_probability", "ignore_index", "stages")
"""Settings of masked diffusion, as `DiffusionConfig` has them; a provider may read its own into
`stages`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueConfig:
    """The settings that every dataset has."""

    dataset: str
    """The dataset: a folder below `data_dir` that holds prepare_streaming.py."""
    batch_size: int
    """Rows of a batch."""
    block_size: int
    """Tokens of a row."""
    seed: int = 1337
    """With the split and the number of a batch, all that its RNG depends on."""
    data_dir: str = "data"
    """The folder of all datasets."""
    batches_per_file: int = 1
    """Batches that are written together."""
    backlog_batches: int = 16
    """Batches that the provider makes ahead of what consumers have asked for."""
    delete: str = "checkpointed"
    """When files are deleted: `checkpointed`, once the trainer has said that a checkpoint is safe;
    `consumed`, as soon as their last batch was taken, which a crash of the trainer loses."""
    stall_s: float = 120.0
    """For how long a consumer waits for a batch before it says that the provider has stalled."""
    lease_s: float = 30.0
    """After so long without a sign of life a claimed batch is given to another consumer."""
    trainer: str = "train.py"
    """The file whose function `train` is the trainer."""

    def __post_init__(self) -> None:
        for name, problem in _problems_of(dataclasses.asdict(self)):
            raise BadConfig(f"{name} {problem[0]}", do=problem[1])


def _problems_of(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Everything that is wrong with settings that penstock knows: name, what, what to do."""
    checks: dict[str, Callable[[Any], str]] = {
        "dataset": lambda value: (
            ""
            if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", value)
            else "name a folder below data: letters, digits, _ and -"
        ),
        "batch_size": lambda value: _whole(value, 1, 1 << 31),
        "block_size": lambda value: _whole(value, 1, 1 << 31),
        "seed": lambda value: _whole(value, 0, (1 << 64) - 1),
        "data_dir": lambda value: _text(value),
        "batches_per_file": lambda value: _whole(value, 1, 4096),
        "backlog_batches": lambda value: _whole(value, 1, 1 << 31),
        "delete": lambda value: "" if value in DELETES else f"choose from {', '.join(DELETES)}",
        "stall_s": lambda value: _seconds(value),
        "lease_s": lambda value: _seconds(value),
        "trainer": lambda value: _text(value),
        "mask_probability": lambda value: _share(value),
        "ignore_index": lambda value: _whole(value, -(1 << 31), 1 << 31),
    }
    for name, check in checks.items():
        if name in values and (do := check(values[name])):
            yield name, (f"is {values[name]!r}", do)


def _whole(value: Any, least: int, most: int) -> str:
    try:
        whole("", value, least, most)
    except BadConfig as error:
        return error.do
    return ""


def _seconds(value: Any) -> str:
    try:
        return "" if number("", value) > 0 else "choose more than 0 seconds"
    except BadConfig as error:
        return error.do


def _share(value: Any) -> str:
    try:
        return "" if value is None or 0 < number("", value) <= 1 else "choose a share, up to 1"
    except BadConfig as error:
        return error.do


def _text(value: Any) -> str:
    try:
        checked_path("", value)
        return ""
    except BadConfig as error:
        return error.do


def check_config(values: Mapping[str, Any]) -> list[str]:
    """Every problem of a shared config, a line for each; none if it is sufficient.

    >>> for line in check_config({"dataset": "char_diffusion", "batchsize": 4, "block_size": 0}):
    ...     print(line)
    batch_size is missing: did you mean that with 'batchsize'?
    block_size is 0: choose 1 or more
    """
    found = []
    known = {*(field.name for field in dataclasses.fields(QueueConfig)), *TRAINER, *DIFFUSION}
    strangers = [name for name in values if name not in known]
    for name in REQUIRED:
        if name not in values:
            near = nearest(name, strangers, 0.8)
            found.append(
                f"{name} is missing"
                + (f": did you mean that with {near!r}?" if near else f": set {name} = …")
            )
    found += [f"{name} {what}: {do}" for name, (what, do) in _problems_of(values)]
    for name in strangers:  # also beside the right name: a second value that nobody would read
        near = nearest(name, known - (set(REQUIRED) - set(values)), 0.85)
        if near:
            found.append(f"{name!r} is not a setting of penstock's: did you mean {near!r}?")
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            found.append(
                f"{name} is {value!r}: use numbers, texts, lists and dicts, or begin the name "
                "with an underscore"
            )
    return found


class SharedConfig(Mapping[str, Any]):
    """A shared config that was read: `config["learning_rate"]`, `config.get("n_layer", 4)`."""

    def __init__(self, values: Mapping[str, Any], *, root: Path = Path(), name: str = "") -> None:
        """`root` is the folder that holds data; `name` the file, as it was given."""
        self.root, self.name = root, name
        if found := check_config(values):
            raise BadConfig(
                f"the config has {len(found)} problem{'s' * (len(found) > 1)}",
                where=name,
                why="\n".join(found),
                do="change them in that file; both prepare and train read it",
            )
        self._values: dict[str, Any] = json.loads(json.dumps(dict(values)))
        known = {field.name for field in dataclasses.fields(QueueConfig)}
        self.queue = QueueConfig(**{k: v for k, v in self._values.items() if k in known})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def folder(self) -> Path:
        """The dataset's folder, data/<dataset>."""
        return self.root / self.queue.data_dir / self.queue.dataset

    def data_settings(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Settings that decide batches: these, or all that are not the trainer's or the queue's."""
        others = {field.name for field in dataclasses.fields(QueueConfig)} - {"block_size"}
        if names is None:
            names = [name for name in self._values if name not in others | TRAINER]
        return {name: self._values.get(name) for name in sorted({*names, "block_size"})}


def read_config(path: str | os.PathLike[str], root: str | os.PathLike[str] = ".") -> SharedConfig:
    """The shared config of a file of Python or TOML."""
    name = checked_path("the config", path)
    place = Path(name)
    if place.suffix not in (".py", ".toml"):
        raise BadConfig(
            f"the config is {name}",
            why="a config of Python is run, and one of TOML is not: its name must say which it is",
            do="name a file that ends in .py or .toml",
        )
    try:
        text = place.read_text("utf-8")
    except FileNotFoundError:
        raise BadConfig(
            f"there is no {name}", do="name a config, such as config/train_char_diffusion.py"
        ) from None
    except UnicodeDecodeError as error:
        raise BadConfig(f"{name} is no text", why=str(error), do="fix it") from None
    values = _toml(text, name) if place.suffix == ".toml" else _python(text, place)
    return SharedConfig(values, root=Path(checked_path("--root", root)), name=name)


def _toml(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{name} is not TOML", why=str(error), do="fix it") from None


def _python(text: str, path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "config", "__file__": str(path)}
    try:
        exec(compile(text, str(path), "exec"), names)
    except (Exception, SystemExit) as error:
        raise _does_not_run(path, error) from error
    passing = (types.ModuleType, types.FunctionType, type)
    return {
        key: value
        for key, value in names.items()
        if not key.startswith("_") and not isinstance(value, passing)
    }


def _does_not_run(path: Path, error: BaseException) -> BadConfig:
    """The error for a file of the user's that raises something, or leaves, while it is run."""
    at, trace = error.lineno if isinstance(error, SyntaxError) else None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            at = trace.tb_lineno
        trace = trace.tb_next
    return BadConfig(
        f"{path} does not run",
        where=f"{path}, line {at}" if at else str(path),
        why=f"{type(error).__name__}: {error}",
        do="fix it",
    )


def load_module(path: Path, values: Mapping[str, Any], root: Path) -> types.ModuleType:
    """Run a file of the user's as a module; it finds the settings among its globals."""
    name = "penstock_" + re.sub(r"\W", "_", str(path.with_suffix("")))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(values)
    where = str(root.resolve())
    if where not in sys.path:
        sys.path.insert(0, where)  # so that it can import its neighbours
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SystemExit):  # with code 0 the command would seem to have worked
            raise _does_not_run(path, error) from error
        raise
    return module


def find_provider(config: SharedConfig) -> type[Any]:
    """The provider of the config's dataset: the symbol `Provider` in its prepare_streaming.py, or
    the only subclass of `DataProviderBase` there."""
    from penstock.queue.provider import DataProviderBase

    path = config.folder / PROVIDER_FILE
    if not path.is_file():
        there = _datasets(config)
        raise BadConfig(
            f"dataset {config.queue.dataset!r} has no provider",
            where=str(path),
            why="there is no such file"
            + (f"; datasets that have one: {', '.join(there)}" if there else ""),
            do="write it, change `dataset` in the config, or run from the folder that holds "
            f"{config.queue.data_dir}",
        )
    module = load_module(path, config, config.root)
    named = vars(module).get("Provider")
    if named is not None:
        if not (isinstance(named, type) and issubclass(named, DataProviderBase)):
            raise BadConfig(
                f"Provider is {named!r}", where=str(path), do="make it a DataProviderBase"
            )
        if inspect.isabstract(named):
            missing = " or ".join(sorted(named.__abstractmethods__))
            raise BadConfig(
                f"Provider is {named.__name__}, which has no {missing}",
                where=str(path),
                do="write a subclass of penstock.DataProviderBase with build_meta and sample_batch",
            )
        return named
    found = {
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, DataProviderBase)
        and one is not DataProviderBase
        and not inspect.isabstract(one)
    }
    own = {one for one in found if one.__module__ == module.__name__} or found
    if len(own) != 1:
        names = ", ".join(sorted(one.__name__ for one in own))
        raise BadConfig(
            f"{PROVIDER_FILE} has {len(own)} providers" + (f": {names}" if own else ""),
            where=str(path),
            do="call the one that is meant Provider: Provider = …"
            if own
            else "write a subclass of penstock.DataProviderBase with build_meta and sample_batch",
        )
    return own.pop()


def _datasets(config: SharedConfig) -> list[str]:
    folder = config.folder.parent
    return sorted(path.parent.name for path in folder.glob(f"*/{PROVIDER_FILE}"))


def find_trainer(config: SharedConfig) -> Callable[..., None]:
    """The function `train(config, consumer)` of the config's trainer."""
    path = config.root / config.queue.trainer
    if not path.is_file():
        raise BadConfig(
            "there is no trainer",
            where=str(path),
            do="write train(config, consumer) there, as in examples/nano, or name another file: "
            "trainer = …",
        )
    train = vars(load_module(path, {}, config.root)).get("train")
    if not callable(train):
        raise BadConfig(
            f"{path.name} has no function train",
            where=str(path),
            do="write def train(config, consumer): …",
        )
    found: Callable[..., None] = train
    return found
