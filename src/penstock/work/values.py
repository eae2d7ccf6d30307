"""Values as people type them, numbers and paths as programs give them, names as they are shown."""

import dataclasses
import math
import operator
import os
import re
import typing
from typing import Any, Final

from penstock.errors import BadConfig

MOST: Final = (1 << 63) - 1
MOST_SEED: Final = (1 << 64) - 1


def whole(name: str, value: Any, least: int = -MOST, most: int = MOST) -> int:
    """A whole number of whatever type, as int.

    >>> whole("batch_size", 16, 1)
    16
    """
    try:
        found = int(operator.index(value))
    except TypeError:
        raise BadConfig(f"{name} is {value!r}", do="choose a whole number") from None
    if isinstance(value, bool):
        raise BadConfig(f"{name} is {value!r}", do="choose a whole number")
    if found < least:
        raise BadConfig(f"{name} is {found}", do=f"choose {least} or more")
    if found > most:
        raise BadConfig(f"{name} is {found}", do=f"choose {most:,} or less")
    return found


def number(name: str, value: Any) -> float:
    """A number of whatever type, as float; it may be infinite.

    >>> number("stall_s", 7)
    7.0
    """
    try:
        found = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if math.isnan(found):
        raise BadConfig(f"{name} is {value!r}", do="choose a number")
    return found


def check_numbers(config: Any, prefix: str = "") -> None:
    """Let the numbers of a dataclass be plain ones: no nan, no text, nothing beyond 64 bits.

    Seeds have all 64 of them.
    """
    for about in dataclasses.fields(config):
        kinds = typing.get_args(about.type) or (about.type,)
        value = getattr(config, about.name)
        if value is None and type(None) in kinds:
            continue
        name = prefix + about.name
        if int in kinds:
            value = whole(name, value, most=MOST_SEED if about.name == "seed" else MOST)
        elif float in kinds:
            value = number(name, value)
        object.__setattr__(config, about.name, value)


def checked_path(name: str, path: Any) -> str:
    """A path or an address as text.

    >>> checked_path("--input", "data/a.jsonl")
    'data/a.jsonl'
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise BadConfig(f"{name} is {path!r}", do="give a path or an address, without NUL")
    return text


_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal obeys and does not show: controls, and what turns the direction of text."""


def printable(text: str) -> str:
    """Text for a terminal: names from data must not move its cursor or hide what they are.

    >>> print(printable("\x1b[2Jinnocent"), printable("two\\nlines") == "two\\nlines")
    \\x1b[2Jinnocent True
    """
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_name(name: str) -> str:
    """A name for a terminal, in one line.

    >>> print(printable_name("a\\nb"))
    a\\nb
    """
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def parse_seconds(text: str, option: str) -> float:
    """A duration as people type it.

    >>> parse_seconds("60s", "--until_idle"), parse_seconds("2m", "--until_idle")
    (60.0, 120.0)
    """
    units = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    return _parse_quantity(text, units, option, "60s, 5m or 1h")


def parse_bytes(text: str, option: str) -> int:
    """A size as people type it; the units are powers of 1024.

    >>> parse_bytes("64MB", "--max_line_bytes")
    67108864
    """
    units = {"": 1.0, "B": 1.0, "KB": 2.0**10, "MB": 2.0**20, "GB": 2.0**30}
    return int(_parse_quantity(text, units, option, "64MB or 1GB"))


def _parse_quantity(text: str, units: dict[str, float], option: str, example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = found and next((u for u in units if u.lower() == found[2].lower()), None)
    value = float(found[1]) * units[unit] if found and unit is not None else math.inf
    if not math.isfinite(value):
        raise BadConfig(f"{option} is {text!r}", do=f"write it as {example}")
    return value
