"""Values as people type them, numbers and paths as programs give them, names as they are shown."""

import dataclasses
import difflib
import math
import operator
import os
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.errors import BadConfig

C = typing.TypeVar("C")
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


def config_of(name: str, given: C | None, kind: type[C]) -> C:
    """The config that was given under a name, or the default one of its kind."""
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given
    options = "…"
    if isinstance(given, Mapping) and dataclasses.is_dataclass(kind):  # as it is to be written
        known = [about.name for about in dataclasses.fields(kind)]
        refuse_unknown(map(str, given), known, kind.__name__, where=name)
        options = ", ".join(f"{key}={value!r}" for key, value in given.items())
    raise BadConfig(f"{name} is {given!r:.80}", do=f"give {name}={kind.__name__}({options})")


def gigabytes(name: str, value: Any) -> int:
    """A number of gigabytes in bytes, 10^9 each; infinity is more than there can be.

    >>> gigabytes("cache_gb", 1.5)
    1500000000
    """
    found = number(name, value)
    if found == math.inf:
        return 1 << 62
    if not 0 < found < 1e9:
        raise BadConfig(f"{name} is {value!r}", do="choose a number above 0, in gigabytes")
    return int(found * 1e9)


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known name that is meant most likely; empty if none is that alike.

    >>> nearest("jsnl", ["jsonl", "tar"]), nearest("warc", ["jsonl", "tar"])
    ('jsonl', '')
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1, likeness)), "")


def suggest(name: object, known: Iterable[str]) -> str:
    """What to do about a name that nobody knows.

    >>> suggest("jsnl", ["jsonl", "tar"]), suggest("x", [])
    ('did you mean jsonl? choose from jsonl, tar', 'there is none to choose from')
    """
    names = list(known)
    choose = f"choose from {', '.join(names)}" if names else "there is none to choose from"
    near = nearest(str(name), names)
    return f"did you mean {near}? {choose}" if near else choose


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str, where: str = "") -> None:
    """Refuse options that nobody knows, the first by name."""
    names = list(known)
    for name in sorted({*given} - {*names}):
        raise BadConfig(
            f"{name!r} is not an option of {what}", where=where, do=suggest(name, names)
        )


def differences(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    within: str = "",
    *,
    told: str = "{!r} before, {!r} now",
) -> list[str]:
    """What differs between two sets of options, each by itself.

    >>> plans = [{"prepare": {"steps": [{"step": "chunk", "max_tokens": n}]}} for n in (96, 64)]
    >>> differences(*plans)
    ['chunk.max_tokens: 96 before, 64 now']
    """
    found: list[str] = []
    for name in sorted({*before, *now}):
        one, two = before.get(name), now.get(name)
        label = within + name
        if name in ("prepare", "steps"):  # the words of the layout say nothing to a user
            label = within.rstrip(".")
        if name == "steps" and isinstance(one, list) and isinstance(two, list):
            names = [[step["step"] for step in steps] for steps in (one, two)]
            if names[0] == names[1]:
                for step, other in zip(one, two, strict=True):
                    found += differences(step, other, f"{step['step']}.", told=told)
            else:
                found.append(f"steps: {', '.join(names[0])} before, {', '.join(names[1])} now")
        elif isinstance(one, dict) and isinstance(two, dict):
            found += differences(one, two, f"{label}." if label else "", told=told)
        elif one != two:
            found.append(f"{within + name}: {told.format(one, two)}")
    return found


def checked_path(name: str, path: Any) -> str:
    """A path or an address as text.

    >>> checked_path("--input", "data/a.jsonl")
    'data/a.jsonl'
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise BadConfig(f"{name} is {path!r}", do="give a path or an address, without NUL")
    if not text:
        raise BadConfig(f"{name} is empty", do='give a path or an address, "." for this directory')
    if found := _NO_BUCKET.fullmatch(text):
        raise BadConfig(
            f"{name} is {text}, which names no bucket",
            do=f"write it as {found[1]}://bucket/prefix",
        )
    return text


_NO_BUCKET: Final = re.compile("(s3|gs|az):/*")
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


_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES: Final = {"": 1.0, "B": 1.0, "KB": 2.0**10, "MB": 2.0**20, "GB": 2.0**30}


def parse_seconds(text: str, option: str) -> float:
    """A duration as people type it.

    >>> parse_seconds("60s", "--until_idle"), parse_seconds("2m", "--until_idle")
    (60.0, 120.0)
    """
    return _parse_quantity(text, _SECONDS, option, "60s, 5m or 1h")


def show_seconds(seconds: float) -> str:
    """The same duration as people type it.

    >>> show_seconds(90.0), show_seconds(300.0), show_seconds(0.25)
    ('90s', '5m', '0.25s')
    """
    unit = next((unit for unit in "hm" if seconds % _SECONDS[unit] == 0), "s")
    return str(seconds / _SECONDS[unit]).removesuffix(".0") + unit


def parse_bytes(text: str, option: str) -> int:
    """A size as people type it; the units are powers of 1024.

    >>> parse_bytes("64MB", "--max_line_bytes")
    67108864
    """
    return int(_parse_quantity(text, _BYTES, option, "64MB or 1GB"))


def show_bytes(size: int) -> str:
    """The same size as people type it.

    >>> show_bytes(128 << 20), show_bytes(1000)
    ('128MB', '1000B')
    """
    unit = next((unit for unit in ("GB", "MB", "KB") if size % _BYTES[unit] == 0), "B")
    return f"{size / _BYTES[unit]:.0f}{unit}"


def _parse_quantity(text: str, units: dict[str, float], option: str, example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = found and next((u for u in units if u.lower() == found[2].lower()), None)
    value = float(found[1]) * units[unit] if found and unit is not None else math.inf
    if not math.isfinite(value):
        raise BadConfig(f"{option} is {text!r}", do=f"write it as {example}")
    return value
