"""Every package that is installed for development is pinned in constraints.txt, at that version.

What only PyTorch brings goes with its own pin, and is left out.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

_NOT_LOCKED = re.compile(
    r"(looped-spec.*|pip|setuptools|wheel|torch|triton|mpmath|networkx|sympy|(nvidia|cuda)-.*)"
)


def normal(name: str) -> str:
    """Return the name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(lock_file: str) -> int:
    """Return 1 if a package is not pinned, or installed at another version."""
    pins = {}
    for line in Path(lock_file).read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[normal(name)] = version
    wrong = 0
    for distribution in distributions():
        name = normal(distribution.metadata["Name"])
        pin = pins.get(name)
        if _NOT_LOCKED.fullmatch(name) or pin == distribution.version:
            continue
        wrong += 1
        print(f"{name} {distribution.version} is installed, {lock_file} has {pin or 'none'}")
    print(f"{len(pins)} packages are pinned, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
