"""A graph backend for tests: it keeps the function and calls it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from looped_spec.runtime.graphs import GraphBackend


class Recorded(GraphBackend):
    """Counts what is captured and replayed; every capture takes `cost` bytes of `free`."""

    name = "recorded"

    def __init__(self, free: int | None = None, cost: int = 0) -> None:
        self.free, self.cost = free, cost
        self.captures = self.replays = self.releases = 0
        self.error: Exception | None = None
        self.fails_at = -1

    def capture(
        self, function: Callable[[], object], tensors: Sequence[Tensor]
    ) -> Callable[[], None]:
        if self.captures == self.fails_at:
            self.fails_at = -1
            assert self.error is not None
            raise self.error
        function()
        self.captures += 1
        if self.free is not None:
            self.free -= self.cost

        def replay() -> None:
            self.replays += 1
            function()

        return replay

    def free_bytes(self) -> int | None:
        return self.free

    def release(self) -> None:
        self.releases += 1


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory")
