"""Whether a saved state is built like one's own: a document may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looped_spec.control.goodput_settings import check_number

_MOST = 1e150
"""No number of a controller reaches this, not even evidence, whose weight grows up to 1e100."""


def check_alike(state: Any, own: Any, where: str = "learnt") -> None:
    """Raise `ValueError` unless `state` has the parts of `own`, of their kinds and lengths.

    What is empty in `own` may hold anything of that kind, and a number may be None.
    """
    if isinstance(own, Mapping):
        if not isinstance(state, Mapping):
            raise ValueError(f"{where} must be an object")
        for name, part in own.items():
            check_alike(state[name], part, f"{where}.{name}")
    elif isinstance(own, list):
        if not isinstance(state, list) or (own and len(state) != len(own)):
            raise ValueError(f"{where} must be a list of {len(own)}")
        for index, part in enumerate(own):
            check_alike(state[index], part, f"{where}[{index}]")
    elif isinstance(own, bool | str):
        if not isinstance(state, type(own)):
            raise ValueError(f"{where} must be of type {type(own).__name__}")
    elif state is not None:
        check_number(where, state, -_MOST, _MOST)
