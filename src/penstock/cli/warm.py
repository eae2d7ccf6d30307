"""`penstock warm`."""

import contextlib
import importlib
import json
import pkgutil

import penstock
from penstock.cli.command import AsJson


def warm(as_json: AsJson = False) -> None:
    """Compile every kernel for this machine now, so that no later command waits for it.

    Run it where an image is built. Kernels are of one kind of processor: NUMBA_CPU_NAME and
    NUMBA_CPU_FEATURES, set for the build and for the runs, name one that several kinds contain.

    Example: penstock warm
    """
    from penstock import kernels
    from penstock.errors import BadConfig, PenstockError

    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not module.name.endswith(("_kernel", ".simd", ".__main__")):
            with contextlib.suppress(PenstockError):  # what needs an extra that is not installed
                importlib.import_module(module.name)
    compiled = kernels.compile_missing(kernels.known)
    if compiled.folder is None:
        raise BadConfig(
            f"{compiled.kernels} kernels cannot be kept",
            where=" and ".join(str(folder) for folder in kernels.folders()),
            why="neither folder can be written",
            do="run as the user that installed penstock, or set XDG_CACHE_HOME to a folder that "
            "later commands see too",
        )
    ready = len(kernels.known)
    if as_json:
        print(json.dumps({"kernels": ready, "compiled": compiled.kernels,
                          "folder": str(compiled.folder)}))  # fmt: skip
    else:
        print(f"{ready} kernels ready, {compiled.kernels} compiled now, in {compiled.folder}")
