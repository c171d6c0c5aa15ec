"""Triton's interpreter, where there is no CUDA device."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreter_that_takes_numpy_2() -> None:
    """Mend Triton's interpreter up to 3.7, which makes loop bounds by `int` of an array of one
    axis: an error since NumPy 2.4."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        index = lambda self: self.handle.data.item()  # noqa: E731
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patch
