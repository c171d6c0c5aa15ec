"""Toy adapters with one fault each, and the checks of the kit that must notice it."""

from __future__ import annotations

from broken import checkpoints, flags, planes, records, rows, state
from broken.case import BrokenToy

FAULTS: dict[str, type[BrokenToy]] = {
    kind.__name__: kind
    for module in (planes, rows, state, flags, records, checkpoints)
    for kind in module.FAULTS
}
