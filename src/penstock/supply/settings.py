"""Check what a loader is told, and the states that it is given.

In:    arguments and states as users and files have them
Out:   plain numbers; BadConfig or StateMismatch that names what is wrong
"""

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import xxhash

from penstock.errors import BadConfig, StateMismatch
from penstock.stream.plan import PlanConfig

UNSET: Final[Any] = type("Unset", (), {"__repr__": lambda self: "as in plan"})()
"""The default of arguments that `plan` may have too."""


def whole(name: str, value: Any, least: int) -> int:
    """A whole number of whatever type, as int."""
    try:
        found = int(operator.index(value))
    except TypeError:
        raise BadConfig(f"{name} is {value!r}", do="choose a whole number") from None
    if found < least:
        raise BadConfig(f"{name} is {found}", do=f"choose {least} or more")
    return found


def size_in_bytes(name: str, gigabytes: Any) -> int:
    """So many bytes."""
    if not isinstance(gigabytes, int | float) or not 0 < gigabytes < math.inf:
        raise BadConfig(f"{name} is {gigabytes!r}", do="choose a number above 0")
    return int(gigabytes * 1e9)


def doc_ids(ban: Any) -> list[int]:
    """The documents that are left out, in order."""
    if isinstance(ban, str) or (not isinstance(ban, Sequence) and not hasattr(ban, "__iter__")):
        raise BadConfig(f"ban is {ban!r}", do="give a list of doc_ids")
    found = sorted({whole("a doc_id in ban", number, 0) for number in ban})
    if found and found[-1] >= 1 << 64:
        raise BadConfig(f"a doc_id in ban is {found[-1]}", do="doc_ids have 64 bits")
    return found


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
