"""Values as people type them."""

import math
import re

from penstock.errors import BadConfig


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
