"""For plugin authors and for our own tests: the conformance kit, oracles and a toy model.

Only the kit needs pytest, and is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from looped_spec.testing.conformance import AdapterConformance

__all__ = ["AdapterConformance"]


def __getattr__(name: str) -> object:
    if name == "AdapterConformance":
        from looped_spec.testing.conformance import AdapterConformance

        return AdapterConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
