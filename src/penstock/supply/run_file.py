"""A run as a file: what its loader is made of, and which documents it must not see.

In:    run.toml with a table [loader]; run.ban beside it, a document's number on each line
Out:   the arguments of `PretrainDataLoader`
Keeps: strictness: a key that no loader has is an error that lists those it has
"""

import dataclasses
import inspect
import os
import tomllib
from pathlib import Path
from typing import Any

from penstock.errors import BadConfig
from penstock.stream.plan import PlanConfig
from penstock.supply.explain import Span
from penstock.supply.loader import PretrainDataLoader


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of a loader from a run's description, a TOML file with a table [loader]."""
    try:
        content = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise BadConfig(f"there is no {path}", do="name the run's description") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not TOML", why=str(error), do="mend it") from None
    loader = content.get("loader")
    if not isinstance(loader, dict):
        raise BadConfig(f"{path} has no table [loader]", do="write one: path, tokenizer, …")
    known = [name for name in inspect.signature(PretrainDataLoader).parameters if name != "self"]
    if unknown := sorted(set(loader) - set(known)):
        raise BadConfig(
            f"{unknown[0]!r} is not an option of the loader",
            where=str(path),
            do=f"choose from {', '.join(known)}",
        )
    if "plan" in loader:
        options = {field.name for field in dataclasses.fields(PlanConfig)}
        if unknown := sorted(set(loader["plan"]) - options):
            raise BadConfig(
                f"{unknown[0]!r} is not an option of the plan",
                where=str(path),
                do=f"choose from {', '.join(sorted(options))}",
            )
        loader["plan"] = PlanConfig(**loader["plan"])
    bans = Path(path).with_suffix(".ban")
    if bans.exists():
        loader["ban"] = [*loader.get("ban", []), *read_bans(bans)]
    if "weight_schedule" in loader:
        loader["weight_schedule"] = {int(k): v for k, v in loader["weight_schedule"].items()}
    return loader


def read_bans(path: Path) -> list[int]:
    """The documents of a file of bans."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text and not text.isdecimal():
            raise BadConfig(
                f"{text!r} is not a doc_id", where=f"{path}:{number}", do="write one number a line"
            )
        if text:
            found.append(int(text))
    return found


def add_ban(path: str | os.PathLike[str], doc_id: int) -> Path:
    """Record beside a run's description that its next run must not see a document."""
    bans = Path(path).with_suffix(".ban")
    known = read_bans(bans) if bans.exists() else []
    if doc_id not in known:
        with bans.open("a") as file:
            file.write(f"{doc_id}\n")
    return bans


def explain_step(path: str | os.PathLike[str], step: int) -> list[Span]:
    """What was in batch `step` of a run, over all ranks."""
    options = read_run(path)
    world_size = int(options.pop("world_size", None) or 1)
    options.pop("rank", None)
    batch_size = options.pop("batch_size", 16)
    options.setdefault("global_batch_size", batch_size * world_size)
    with PretrainDataLoader(rank=0, world_size=1, batch_size=batch_size, **options) as loader:
        loader.skip(step)
        batch = next(loader.get_iterator(), None)
        if batch is None:
            known = loader.get_num_batches()
            raise BadConfig(
                f"there is no batch {step}",
                where=str(path),
                why=f"the run has about {known.known:,} batches",
                do="choose a number below",
            )
        return loader.explain(batch)
