"""A capture that memory breaks off, as far as that can be seen without a CUDA device."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from looped_spec.runtime.graphs import CudaGraphs, backends


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    made: ClassVar[list[weakref.ref[Graph]]] = []

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))

    def replay(self) -> None:
        """Do nothing."""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaGraphs:
    """Captures on a device that is not there."""
    stream = SimpleNamespace(wait_stream=lambda _: None)

    def nothing(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(backends, "_capture_stream", functools.cache(lambda _: stream))
    for name, stand_in in {
        "current_stream": lambda: stream,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "device": nothing,
        "stream": nothing,
        "graph": nothing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return CudaGraphs(torch.device("cuda", 0))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("capture invalidated")],
    ids=["memory", "invalid"],
)
def test_a_graph_that_memory_broke_off_lives_as_long_as_those_before_it(
    error: RuntimeError, backend: CudaGraphs
) -> None:
    """When it ends, PyTorch frees what cuBLAS works in on its stream; the others use that."""
    replay = backend.capture(lambda: None, [])
    warmed_up: list[bool] = []

    def runs_out_when_captured() -> None:
        if warmed_up:
            raise error
        warmed_up.append(True)

    with contextlib.suppress(RuntimeError):
        backend.capture(runs_out_when_captured, [])
    gc.collect()
    assert warmed_up and [graph() is not None for graph in Graph.made] == [True, True]
    replay()


def test_two_engines_do_not_capture_at_the_same_time(backend: CudaGraphs) -> None:
    """They share a stream: one would record what the other submits."""
    inside, most = [0], [0]

    def function() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1

    threads = [threading.Thread(target=backend.capture, args=(function, [])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Graph.made) == 3 and most == [1]


def test_all_captures_on_a_device_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch deals out 32 in turns: the 33rd would be the first again, or another's."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    backends._capture_stream.cache_clear()
    for index in (0, 1, 0, 1):
        CudaGraphs(torch.device("cuda", index))
    backends._capture_stream.cache_clear()
    assert made == [torch.device("cuda", 0), torch.device("cuda", 1)]
