"""Imports of thousands of objects that stay, without a search for garbage among them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Keep Python's garbage collector from what is made inside, now and later.

    Modules, classes and functions are no garbage as long as the process lives. Looking at them
    again and again is a tenth of the time that importing torch takes, and later each full
    collection would hold up a server while it looks at 350,000 objects instead of 35,000.
    `gc.unfreeze` undoes it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
