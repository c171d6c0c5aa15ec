"""Watches a round for what a captured graph could not do, on any device."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._unsafe_index.Tensor,
}
_READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
_FROM_HOST = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}


class NotCapturableError(AssertionError):
    """A round did something that a captured graph cannot."""


class _Watch(TorchDispatchMode):
    """Refuses operators that read on the host, have shapes by data or bring numbers from it, and
    keeps track of all memory that is allocated."""

    def __init__(self, static: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in static}
        self.made: list[weakref.ref[Tensor]] = []
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num_calls += 1
        inputs = [x for x in tree_flatten((args, kwargs or {}))[0] if isinstance(x, Tensor)]
        tags = set(func.tags)
        if torch.Tag.data_dependent_output in tags:
            raise NotCapturableError(f"{func} reads a tensor on the host")
        if func in _INDEXING:
            if any(x.dtype in (torch.bool, torch.uint8) for x in inputs[1:]):
                raise NotCapturableError(f"{func} with a mask has a shape that depends on data")
        elif torch.Tag.dynamic_output_shape in tags:
            raise NotCapturableError(f"{func} has a shape that depends on data")
        if func in _FROM_HOST:
            raise NotCapturableError(f"{func} brings numbers from the host")
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.made.append(weakref.ref(x))
        return out


def _refuse(name: str) -> Callable[..., None]:
    def read(*_: Any) -> None:
        raise NotCapturableError(f"Tensor.{name} reads a tensor on the host")

    return read


def check_capturable(round_: Callable[[], object], static: Iterable[Tensor]) -> int:
    """Run a round and raise `NotCapturableError` if a graph could not hold it; return the number of
    operators.

    It may write to `static` and to memory of its own, but nothing of its own may outlive it. What a
    model computes once, on first use, has to be there already.
    """
    gc.collect()
    watch = _Watch(static)
    with contextlib.ExitStack() as stack:
        for name in _READS:  # on the CPU some of them call no operator
            stack.enter_context(mock.patch.object(Tensor, name, _refuse(name)))
        stack.enter_context(watch)
        round_()
    gc.collect()
    left = [x for ref in watch.made if (x := ref()) is not None]
    if left:
        raise NotCapturableError(f"{len(left)} tensors outlive the round, such as {left[0].shape}")
    return watch.num_calls
