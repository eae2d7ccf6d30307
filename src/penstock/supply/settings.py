"""Check what a loader is told, and the states that it is given.

In:    arguments and states as users and files have them
Out:   plain numbers; BadConfig or StateMismatch that names what is wrong
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import xxhash

from penstock.errors import BadConfig, StateMismatch
from penstock.stream.plan import PlanConfig
from penstock.work.values import number, whole

UNSET: Final[Any] = type("Unset", (), {"__repr__": lambda self: "as in plan"})()
"""The default of arguments that `plan` may have too."""


def size_in_bytes(name: str, gigabytes: Any) -> int:
    """So many bytes."""
    found = number(name, gigabytes)
    if found == math.inf:
        return 1 << 62
    if not 0 < found < 1e9:
        raise BadConfig(f"{name} is {gigabytes!r}", do="choose a number above 0, in gigabytes")
    return int(found * 1e9)


def doc_ids(ban: Any) -> list[int]:
    """The documents that are left out, in order."""
    if isinstance(ban, str) or (not isinstance(ban, Sequence) and not hasattr(ban, "__iter__")):
        raise BadConfig(f"ban is {ban!r}", do="give a list of doc_ids")
    return sorted({whole("a doc_id in ban", doc_id, 0, (1 << 64) - 1) for doc_id in ban})


def merged_plan(plan: PlanConfig | None, chunk_size: int, **given: Any) -> PlanConfig:
    """The plan's settings with those that were given beside it; what contradicts is refused."""
    known = plan or PlanConfig()
    given = {name: value for name, value in given.items() if value is not UNSET}
    merged = replace(known, **{"seq_len": chunk_size, **given})
    defaults = {about.name: about.default for about in fields(PlanConfig)}
    for name in ("seq_len", *given):
        mine, theirs = getattr(merged, name), getattr(known, name)
        if theirs not in (mine, defaults[name]):
            told = "chunk_size" if name == "seq_len" else name
            raise BadConfig(
                f"{told} is {mine!r}, and plan says {name}={theirs!r}", do="give one of the two"
            )
    return merged


def seal_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state with a sum of all that it says."""
    return {**state, "sum": _sum(state)}


def check_seal(state: Mapping[str, Any]) -> None:
    """Refuse a state of which something was changed or lost on the way."""
    if not isinstance(state, Mapping) or _sum(state) != state.get("sum"):
        raise StateMismatch(
            "this is not a state as the loader gave it",
            why="its sum does not fit what it says: it was changed, cut, or is something else",
            do="use the state of another checkpoint",
        )


def _sum(state: Mapping[str, Any]) -> str:
    told = {key: value for key, value in state.items() if key != "sum"}
    try:
        text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError):
        return ""
    return xxhash.xxh3_64_hexdigest(text.encode())
