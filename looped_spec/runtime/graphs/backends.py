"""Ways to record a round once and run it again: CUDA graphs, and their twin on any device."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

Replay = Callable[[], object]

_ONE_AT_A_TIME = threading.Lock()
"""Held while a round is captured: what another engine's thread submitted to the stream that all
share would become part of it."""


class GraphBackend(ABC):
    """Records functions of static tensors; all recordings share their memory, so the outputs of
    one hold only until the next runs."""

    name: ClassVar[str]

    @abstractmethod
    def capture(self, function: Callable[[], object], tensors: Sequence[Tensor]) -> Replay:
        """Record what `function` does to `tensors`; it is called, and must do no harm then.

        What is returned does the same again to what the tensors hold by then.
        """

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the device memory that is free now, None where nobody can tell."""

    @abstractmethod
    def release(self) -> None:
        """Give back memory that only capturing needed."""


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all captures of this process on a device run on: PyTorch has 32
    streams and deals them out in turns, so that with one for each engine two would share one with
    whatever else asked for a stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaGraphs(GraphBackend):
    """`torch.cuda.CUDAGraph`, all in one memory pool, captured on a stream of their own."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._broken_off: list[torch.cuda.CUDAGraph] = []

    def capture(self, function: Callable[[], object], tensors: Sequence[Tensor]) -> Replay:
        """Run once, so that kernels are compiled and chosen, then capture."""
        with _ONE_AT_A_TIME, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may talk to the device meanwhile, a server's for instance.
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    function()
            except RuntimeError:  # also one of memory
                # Its end would free what cuBLAS works in on this stream, with which the graphs
                # before it run (pytorch/pytorch#193402).
                self._broken_off.append(graph)
                raise
        return graph.replay

    def free_bytes(self) -> int:
        """Ask the driver, which also knows what graphs take outside PyTorch's pools."""
        return torch.cuda.mem_get_info(self._device)[0]

    def release(self) -> None:
        """Empty the allocator's cache: warm-up runs filled it beside the pool."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class TracedGraphs(GraphBackend):
    """Traces of `make_fx`, which bake numbers and shapes and fail on a host read, as capture does.

    Not for speed: for checking on a CPU what a GPU would run.
    """

    name = "traced"

    def capture(self, function: Callable[[], object], tensors: Sequence[Tensor]) -> Replay:
        """Run once, so that what is computed on first use is there, then trace."""
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        function()

        def run(*_: Tensor) -> None:
            function()

        # Each node of a trace is described by a fake tensor; one mode for all halves the time.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            traced = make_fx(run)(*tensors)
        kept = tuple(tensors)
        return lambda: traced(*kept)

    def free_bytes(self) -> None:
        """Return None: nothing is kept but Python objects."""
        return

    def release(self) -> None:
        """Do nothing."""
