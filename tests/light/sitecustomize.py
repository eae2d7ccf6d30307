"""Every Python that tests start has this: torch's compiler is imported by whoever asks it for more
than to leave a function alone.

torch's optimizers ask for that, and for nothing else, when they are made. It costs 820 modules and
2 to 4 s of CPU, where torch itself takes 1.2 s, and tests start some 50 trainers.
"""

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class Light(ModuleType):
    """The two functions that optimizers call; at any other name, the real module."""

    @staticmethod
    def disable(fn: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
        return fn if fn is not None else lambda function: function

    @staticmethod
    def graph_break(*_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(real(), name)


class Finder:
    """Finds the light module first, and the real one for whoever needs a part of it."""

    light: Light | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == NAME and self.light is None:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if name.startswith(f"{NAME}.") and isinstance(sys.modules.get(NAME), Light):
            real()
            if name in sys.modules:
                return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]
            return importlib.machinery.PathFinder.find_spec(name, sys.modules[NAME].__path__)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name == NAME:
            self.light = Light(spec.name)
            return self.light
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None: ...


def real() -> ModuleType:
    if isinstance(sys.modules.get(NAME), Light):
        del sys.modules[NAME]
        sys.modules["torch"]._dynamo = importlib.import_module(NAME)
    return sys.modules[NAME]


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
