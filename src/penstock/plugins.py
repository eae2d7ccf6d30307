"""Register and find formats, processors, caches, partitions, filters and advantages by name.

In:    functions or classes under a kind and a name, ours and those of others
Out:   the one that is asked for, and what its author said about it
Keeps: one thing per name; others arrive by the entry points of the group "penstock"
Never: takes the second of two for the first, imports what nobody asks for

    @register("format", "warc", suffixes=(".warc",))
    def read_warc(file: BinaryIO) -> Iterator[tuple[str | bytes, str]]: ...
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from penstock.errors import BadConfig
from penstock.options import suggest

KINDS: Final = ("format", "processor", "cache", "partition", "filter", "advantage")
GROUP: Final = "penstock"

_Made = TypeVar("_Made", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Plugin:
    """What stands under a name."""

    kind: str
    name: str
    make: Callable[..., Any]
    about: Mapping[str, Any]


_known: dict[str, dict[str, Plugin]] = {kind: {} for kind in KINDS}
_loaded: set[str] = set()  # the entry points that were loaded; "" once all were


def register(kind: str, name: str, **about: Any) -> Callable[[_Made], _Made]:
    """Put what follows under `name`; `about` is for whoever chooses among them."""
    _check_kind(kind)
    if not name or not name.isprintable() or name != name.strip():
        raise BadConfig(f"{name!r} is not a name for a {kind}", do="choose a plain word")

    def put(made: _Made) -> _Made:
        there = _known[kind].get(name)
        if there is not None:
            raise BadConfig(
                f"there are two {kind}s called {name!r}",
                where=f"{origin(there.make)} and {origin(made)}",
                do="rename one of them, or uninstall its package",
            )
        _known[kind][name] = Plugin(kind, name, made, MappingProxyType(dict(about)))
        return made

    return put


def find(kind: str, name: str) -> Plugin:
    """What was registered under a name; others' plugins are loaded when first asked."""
    _check_kind(kind)
    if name not in _known[kind]:
        _load_others()
    if name not in _known[kind]:
        raise BadConfig(
            f"there is no {kind} called {name!r}", do=suggest(name, sorted(_known[kind]))
        )
    return _known[kind][name]


def names(kind: str) -> list[str]:
    """All names of a kind, sorted."""
    _check_kind(kind)
    _load_others()
    return sorted(_known[kind])


def load(modules: Iterable[str]) -> None:
    """Import these: what they register is known from then on."""
    for module in modules:
        try:
            importlib.import_module(module)
        except BadConfig:
            raise
        except Exception as error:  # code of others: whatever it raises
            raise BadConfig(
                f"the plugin {module!r} cannot be imported",
                why=f"{type(error).__name__}: {error}",
                do="name a module that is installed, or on PYTHONPATH",
            ) from error


def _load_others() -> None:
    if "" in _loaded:
        return
    for entry in importlib.metadata.entry_points(group=GROUP):
        label = f"{entry.name} = {entry.value}"
        if label in _loaded:
            continue
        _loaded.add(label)  # also one that fails: it is told once, not at every look
        try:
            entry.load()
        except BadConfig:
            raise
        except Exception as error:  # code of others: whatever it raises
            raise BadConfig(
                f"the plugin {entry.name!r} cannot be loaded",
                where=label,
                why=f"{type(error).__name__}: {error}",
                do="fix or uninstall the package that brings it",
            ) from error
    _loaded.add("")


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise BadConfig(
            f"there is no kind of plugin called {kind!r}", do=suggest(kind, sorted(KINDS))
        )


def origin(made: Callable[..., Any]) -> str:
    """Where a plugin was written."""
    return f"{made.__module__}.{getattr(made, '__qualname__', '?')}"
