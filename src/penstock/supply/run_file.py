"""A run as a file: what its loader is made of, and which documents it must not see.

In:    run.toml with a table [loader]; beside it run.ban, a document's number on each line, and
       run.choices, what the run chose by itself when it began
Out:   the arguments of `PretrainDataLoader`
Keeps: strictness: a key that no loader has is an error that lists those it has
Never: guesses which bans a run began with: its state says so, or whoever asks

Paths in the file are relative to its directory.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import shlex
import time
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.disk import open_own
from penstock.errors import BadConfig, PenstockError
from penstock.options import checked_path, refuse_unknown, whole
from penstock.store.log import Log, chunk_length, generations
from penstock.store.store import open_store
from penstock.stream.plan import PlanConfig
from penstock.supply.agree import RAMP, read_record, recorded_ramp
from penstock.supply.explain import Span
from penstock.supply.pretrain import PretrainDataLoader, all_rows
from penstock.supply.settings import DocumentConfig, LoaderRun
from penstock.supply.sources.raw import is_raw
from penstock.work.events import Events

LOOK_S: Final = 30.0
"""A document is looked for in the shards for so long, before it is banned unseen."""


def read_run(
    path: str | os.PathLike[str],
    *,
    state: Mapping[str, Any] | None = None,
    bans: int | None = None,
) -> dict[str, Any]:
    """The arguments of a loader from a run's description, a TOML file with a table [loader].

    They are those of the next run, with all bans. With the `state` of a loader they are those of
    the run that it is of, with the bans that this one began with; with `bans`, those of a run that
    began when run.ban had so many.
    """
    _refuse_dataset(os.fspath(path))
    try:
        content = tomllib.loads(Path(checked_path("the run", path)).read_text())
    except FileNotFoundError:
        raise BadConfig(f"there is no {path}", do="name the run's description") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not TOML", why=str(error), do="fix it") from None
    loader = content.get("loader")
    if not isinstance(loader, dict):
        raise BadConfig(f"{path} has no table [loader]", do="write one: path, tokenizer, …")
    known = dict(inspect.signature(PretrainDataLoader).parameters)
    refuse_unknown(loader, known, "the loader", str(path))
    for name, value in loader.items():
        if name in _TABLES:
            loader[name] = _table(name, value, path)
        elif name != "tokenizer":
            _check_type(f"loader.{name}", value, known[name].annotation, path)
    if "path" not in loader:
        raise BadConfig("[loader] has no path", where=str(path), do='write one: path = "data"')
    folder = os.path.dirname(path)
    for name in ("path", "tokenizer"):
        if name in loader:
            loader[name] = _placed(loader[name], folder)
    run = loader.get("run", LoaderRun())
    moved = {name: _placed(getattr(run, name), folder) for name in ("cache_dir", "run_dir")}
    record = run.record and _placed(run.record, folder)
    moved["record"] = record or str(Path(path).with_suffix(".choices"))
    loader["run"] = dataclasses.replace(run, **moved)
    documents = loader.get("documents", DocumentConfig())
    if state is not None:
        bans_now: Sequence[int] = _bans_of(state)
        plan = loader.get("plan", PlanConfig())
        if plan.ramp is None:
            loader["plan"] = dataclasses.replace(plan, ramp=recorded_ramp(state))
    else:
        bans_now = [*documents.ban, *read_bans(_ban_file(path))[:bans]]
    loader["documents"] = dataclasses.replace(documents, ban=bans_now)
    return loader


def _refuse_dataset(path: str) -> None:
    """A dataset is no run; say how a description of one is written."""
    if not os.path.isdir(path) and "://" not in path:
        return
    length = _CHUNK_SIZE
    with contextlib.suppress(PenstockError):
        length = chunk_length(Log.open(generations(path)[0]).state) or length
    place = path if "://" in path else os.path.abspath(path)
    lines = [
        "[loader]", f"path = {json.dumps(place)}", 'tokenizer = "tokenizer"',
        f"chunk_size = {length}", "batch_size = 8",
    ]  # fmt: skip
    raise BadConfig(
        f"{path} is not a run's description",
        why="what is in a batch depends on the loader too: the length and number of its rows, its "
        "seed, its tokenizer",
        do="write one, with what the loader was given in place of these: "
        f"printf '%s\\n' {' '.join(map(shlex.quote, lines))} > run.toml, and give "
        "--config run.toml",
    )


_CHUNK_SIZE: Final = inspect.signature(PretrainDataLoader).parameters["chunk_size"].default
_TABLES: Final = {"plan": PlanConfig, "documents": DocumentConfig, "run": LoaderRun}
"""Arguments of a loader that are tables of the file."""


def _table(table: str, given: Any, path: str | os.PathLike[str]) -> Any:
    """A table of a run's description as the dataclass that it is."""
    kind = _TABLES[table]
    _check_type(f"loader.{table}", given, Mapping[str, Any], path)
    hints = typing.get_type_hints(kind)
    options = sorted(name for name, hint in hints.items() if hint != Events | None)
    refuse_unknown(given, options, f"the {table}", str(path))
    if "weight_schedule" in given:
        given = {**given, "weight_schedule": _by_step(given["weight_schedule"], path)}
    for name, value in given.items():
        _check_type(f"loader.{table}.{name}", value, hints[name], path)
    return kind(**given)


def _by_step(given: Any, path: str | os.PathLike[str]) -> Any:
    """A schedule with numbers for keys, which TOML has not."""
    if not isinstance(given, dict):
        return given
    for key in given:
        if not key.isdecimal():
            raise BadConfig(
                f"{key!r} in weight_schedule is not a step",
                where=str(path),
                do="write numbers of steps: weight_schedule = {20 = {cpp = 1.0, text = 1.0}}",
            )
    return {int(key): value for key, value in given.items()}


def _check_type(name: str, value: Any, wanted: Any, path: str | os.PathLike[str]) -> None:
    if not fits(value, wanted):
        told = wanted.__name__ if isinstance(wanted, type) else str(wanted)
        raise BadConfig(
            f"{name} is {value!r}",
            where=str(path),
            do=f"write {told.replace('collections.abc.', '').replace(' | None', '')}",
        )


def fits(value: Any, wanted: Any) -> bool:
    """Whether a value of a TOML file is of an annotated type.

    >>> fits([1, 2], Sequence[int]), fits("12", Sequence[int]), fits(True, int), fits(1, float)
    (True, False, False, True)
    >>> fits("a", str | Sequence[str]), fits("c", typing.Literal["a", "b"])
    (True, False)
    """
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is not None and issubclass(origin, Mapping):
        keys_fit = isinstance(value, Mapping) and all(fits(key, inner[0]) for key in value)
        return keys_fit and all(fits(one, inner[1]) for one in value.values())
    if origin is not None:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if wanted is Any or not isinstance(wanted, type):
        return True
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, (int, float) if wanted is float else wanted)


def _placed(value: Any, folder: str) -> Any:
    """Paths as seen from where the run's description is.

    >>> _placed({"a": "data", "b": "/data", "c": "s3://bucket/data"}, "runs")
    {'a': 'runs/data', 'b': '/data', 'c': 's3://bucket/data'}
    """
    if isinstance(value, Mapping):
        return {name: _placed(one, folder) for name, one in value.items()}
    if isinstance(value, list):
        return [_placed(one, folder) for one in value]
    return os.path.join(folder, value) if isinstance(value, str) and "://" not in value else value


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state of a loader from a file of JSON, such as a checkpoint's loader.json."""
    try:
        state = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise BadConfig(f"there is no {path}", do="name the loader's state") from None
    except ValueError as error:
        raise BadConfig(f"{path} is not JSON", why=str(error), do="name a state") from None
    _bans_of(state)
    return dict(state)


def _bans_of(state: Mapping[str, Any]) -> list[int]:
    settings = state.get("config") if isinstance(state, Mapping) else None
    bans = settings.get("ban") if isinstance(settings, Mapping) else None
    if not fits(bans, Sequence[int]):
        raise BadConfig("this is not a state of a loader", do="give what state_dict() gave")
    return list(bans or ())


def _ban_file(path: str | os.PathLike[str]) -> Path:
    return Path(checked_path("the run", path)).with_suffix(".ban")


def read_bans(path: Path) -> list[int]:
    """The documents of a file of bans, in the order in which they were banned."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text and not (text.isdecimal() and int(text) < 1 << 64):
            raise BadConfig(
                f"{text!r} is not a doc_id",
                where=f"{path}:{number}",
                do="write one number of 64 bits a line",
            )
        if text:
            found.append(int(text))
    return found


def add_ban(path: str | os.PathLike[str], doc_id: int) -> Path:
    """Record beside a run's description that its next run must not see a document."""
    if not 0 <= doc_id < 1 << 64:
        raise BadConfig(f"{doc_id} is not a doc_id", do="give a number of 64 bits")
    bans = _ban_file(path)
    if doc_id not in read_bans(bans):
        with os.fdopen(open_own(bans, append=True), "ab") as file:
            file.write(b"%d\n" % doc_id)
    return bans


def find_document(path: str | os.PathLike[str], doc_id: int) -> str:
    """The shard of a run's data that has a document; empty if none has it so far, or none that
    could be looked at in time. An error if it is certain that none has it."""
    deadline = time.monotonic() + LOOK_S
    with PretrainDataLoader(**for_one_process(read_run(path, bans=0))) as loader:
        for source in loader.sources:
            for shard in range(source.num_known):
                numbers = source.provenance(shard, ["doc_id"]).column(0).to_numpy()
                if (numbers == np.uint64(doc_id)).any():
                    return source.place(source.file(shard))
                if time.monotonic() > deadline:
                    return ""
        if all(source.is_closed for source in loader.sources):
            raise BadConfig(
                f"no document of the run has doc_id {doc_id}",
                where=str(path),
                do="take the number from penstock explain --batch",
            )
    return ""


def open_run(
    path: str | os.PathLike[str], *, bans: int | None = None, wait_s: float = 0.0
) -> PretrainDataLoader:
    """The loader of a run, for one who looks at its batches and leaves no trace in its directory;
    one that asks for more than the data has so far is told after `wait_s` (ProducerStalled)."""
    options = read_run(path, bans=bans)
    plan: PlanConfig = options.get("plan", PlanConfig())
    if plan.behind != "wait":
        raise BadConfig(
            "the batches of this run cannot be shown",
            where=str(path),
            why=f"with behind = {plan.behind!r} they depend on when shards came, and who looks "
            "ahead of the run would decide for it",
            do="explain a batch that was trained, by the loader's own explain()",
        )
    refuse_raw(options, path)
    options = for_one_process(options)
    options["run"] = dataclasses.replace(options["run"], stall_s=wait_s)
    return PretrainDataLoader(**options)


def refuse_raw(options: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuse to look at a run of which the data would have to be made."""
    if any(is_raw(one) for one in _each_path(options["path"])):
        raise BadConfig(
            "the run reads raw files",
            where=str(path),
            why="a loader makes a dataset of them first, and who only looks makes nothing",
            do="make the dataset with penstock chunk or shard, and let path name it",
        )


def _each_path(value: Any) -> list[str]:
    """All paths of a loader.

    >>> _each_path({"a": ["x", "y"], "b": "z"})
    ['x', 'y', 'z']
    """
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value
    return [path for one in inner for path in _each_path(one)]


def for_one_process(options: dict[str, Any]) -> dict[str, Any]:
    """The same batches, for one process that is not the run: it chooses nothing for it, and leaves
    no trace in its directory or beside its data."""
    run: LoaderRun = options["run"]
    plan: PlanConfig = options.get("plan", PlanConfig())
    if plan.ramp is None:
        ramp = read_record(run.record)
        if ramp is None and run.run_dir:
            with contextlib.suppress(FileNotFoundError, PenstockError):
                ramp = open_store(run.run_dir).read(RAMP) == b"true"
        options["plan"] = dataclasses.replace(plan, ramp=ramp)
    given = options.pop("batch_size", None), options.get("global_batch_size")
    options["global_batch_size"] = all_rows(*given, run.world_size or 1)
    alone = dataclasses.replace(
        run, rank=0, world_size=1, record=None, run_dir=None, reader=None, events=None
    )
    return {**options, "run": alone}


def explain_choices(run: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> str:
    """What a run was told or chose when it began, beside the numbers in its file."""
    options = read_run(run, state=state, bans=None if state else 0)
    ramp = options.get("plan", PlanConfig()).ramp
    if ramp is None:
        ramp = read_record(options["run"].record)
    if ramp is None:
        return "ramp: not chosen yet; by default only if a source still grows when the run begins"
    return "ramp: yes, from the first shard on" if ramp else "ramp: no, a full pool from the start"


def explain(
    run: str | os.PathLike[str],
    batch: int,
    *,
    state: Mapping[str, Any] | None = None,
    bans: int | None = None,
) -> list[Span]:
    """What was in batch number `batch` of a run, over all ranks; `run` is its TOML file.

    Where documents were banned, the run's `state` must be given, or the number of `bans` that
    there were when it began. A loader has this too, for a batch that it gave: `loader.explain`.
    """
    whole("batch", batch, 0)
    banned = read_bans(_ban_file(run))
    if bans is not None and not 0 <= bans <= len(banned):
        raise BadConfig(f"bans is {bans}", do=f"choose from 0 to {len(banned)}, as {run} has them")
    if banned and state is None and bans is None:
        raise BadConfig(
            "it is not said which bans the run began with",
            where=str(_ban_file(run)),
            why=f"{len(banned)} documents are banned; a run that began before goes on without that",
            do="give --state with the loader's state in a checkpoint of the run, or --bans: 0 for "
            f"one that began before any, {len(banned)} for the next one",
        )
    options = read_run(run, state=state, bans=bans)
    run_dir, plan = options["run"].run_dir, options.get("plan", PlanConfig())
    options = for_one_process(options)
    if plan.behind != "wait":  # the answers that the run was given are there
        options["run"] = dataclasses.replace(options["run"], run_dir=run_dir)
    with PretrainDataLoader(**options) as loader:
        for source, seen in zip(loader.sources, (state or {}).get("sources", ()), strict=False):
            source.turn_to(seen)
        loader.skip(batch)
        found = loader.explain_next()
        if found is None:
            raise BadConfig(
                f"there is no batch {batch}",
                where=str(run),
                why=f"the run has {loader.get_num_batches():,} batches",
                do="choose a number below",
            )
        return found
