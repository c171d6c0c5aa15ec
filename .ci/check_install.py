"""Import every module of installed packages, so that a missing dependency shows.

Usage: check_install.py FOLDER PACKAGE...; no package may come from FOLDER, the source tree.
"""

from __future__ import annotations

import importlib
import importlib.resources
import pkgutil
import sys
from pathlib import Path

# What needs more than the packages' own requirements, and what it may miss.
OPTIONAL = {
    "looped_spec.demos": {"tokenizers"},
    "looped_spec.layers.fused.triton_kernels": {"triton"},
    "looped_spec.runtime.attention.triton_kernel": {"triton"},
    "looped_spec.serve.replica": {"ray"},
    "looped_spec.serve": {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client"},
}


def import_or_miss(name: str) -> bool:
    """Import a module; return False if it lacks only what is optional for it."""
    missable = [names for part, names in OPTIONAL.items() if f"{name}.".startswith(f"{part}.")]
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not any(error.name in names for names in missable):
            raise
        return False
    return True


def main(clone: str, *packages: str) -> None:
    """Raise for a module that cannot be imported, or that comes from the source tree."""
    count = 0
    for name in packages:
        package = importlib.import_module(name)
        home = Path(package.__path__[0]).resolve()
        assert not home.is_relative_to(Path(clone).resolve()), f"{name} comes from {home}"
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            # The kit of plugin authors is the one part that needs pytest, which they bring.
            if not module.name.endswith("__main__") and ".conformance" not in module.name:
                count += import_or_miss(module.name)
        if name != "looped_spec":
            presets = importlib.resources.files(name) / "presets"
            assert presets.is_dir() and list(presets.iterdir()), f"{name} has no presets"
    print(f"{count} modules of {', '.join(packages)} can be imported")


if __name__ == "__main__":
    main(*sys.argv[1:])
