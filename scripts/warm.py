"""Compile every kernel into the cache, so that no command waits for it."""

import contextlib
import importlib
import pkgutil
import time

import penstock
from penstock import kernels
from penstock.errors import PenstockError

began = time.monotonic()
for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if not module.name.endswith(("_kernel", ".simd")):
        with contextlib.suppress(PenstockError):  # what needs an extra that is not installed
            importlib.import_module(module.name)
for kernel in kernels.known:
    kernel.prepare()
print(f"{len(kernels.known)} kernels ready in {time.monotonic() - began:.1f} s")
