"""A round can be captured: its trace, replayed at other numbers, gives what eager execution gives.

`make_fx` bakes Python numbers and shapes as a captured graph does, and fails on a host read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from toys import BareToy, like, shared_toy

from looped_spec.adapter import ModelAdapter
from looped_spec.runtime.attention import PagedContext, PagedRows, SdpaBackend
from looped_spec.runtime.kv_cache import KVPool
from looped_spec.runtime.round import speculative_round
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors
from looped_spec.testing.toy import ToyAdapter

BLOCK_SIZE, NUM_BLOCKS, WIDTH, BATCH, LOOPS = 4, 24, 6, 2, 3


def round_of(
    adapter: ModelAdapter, k: int, d: int, mode: SamplingMode, shadow_depths: tuple[int, ...] = ()
) -> Callable[..., tuple[Tensor, ...]]:
    """A round as a function of tensors alone; it writes into the pages that it is given."""

    def run(
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        limits: Tensor,
        seeds: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        *pages: Tensor,
    ) -> tuple[Tensor, ...]:
        pool = KVPool((), NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        pool.planes = list(zip(pages[::2], pages[1::2], strict=True))
        rows = PagedRows(tables, limits, seeds)
        backend = SdpaBackend()
        out = speculative_round(
            adapter,
            lambda where, loops: PagedContext(pool, backend, rows, where, loops),
            tokens,
            positions,
            SamplingTensors(seeds, temperature, top_k, top_p, min_p),
            num_speculative_tokens=k,
            draft_loops=d,
            full_loops=LOOPS,
            mode=mode,
            shadow_depths=shadow_depths,
        )
        return out.tokens, out.accepted, out.next_token, out.next_position, out.shadow

    return run


def inputs(adapter: ModelAdapter, seed: int) -> list[Tensor]:
    """Arguments of a round: random tables, lengths, seeds and parameters, random pages."""
    dice = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=dice)

    positions = integers(1, BLOCK_SIZE * WIDTH - 8, BATCH)
    tables = (torch.randperm(NUM_BLOCKS, generator=dice)[: BATCH * WIDTH] + 1).view(BATCH, WIDTH)
    limits = positions + integers(1, 8, BATCH)
    planes = adapter.kv_planes(LOOPS)
    pages = [
        torch.randn(NUM_BLOCKS + 1, BLOCK_SIZE, plane.num_kv_heads, plane.head_dim, generator=dice)
        for plane in planes
        for _ in range(2)
    ]
    return [
        integers(0, adapter.geometry.vocab_size, BATCH),
        positions,
        tables,
        limits,
        integers(-(2**62), 2**62, BATCH),
        torch.tensor([0.0, 0.9])[integers(0, 2, BATCH)],
        integers(0, 30, BATCH),
        torch.rand(BATCH, generator=dice) * 0.9 + 0.1,
        torch.rand(BATCH, generator=dice) * 0.1,
        *pages,
    ]


def trace(run: Callable[..., Any], arguments: Sequence[Tensor]) -> Callable[..., Any]:
    # Each node of a trace is described by a fake tensor; one mode for all of them halves the time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(run)(*arguments)  # type: ignore[no-any-return]


def toy(kind: str) -> ToyAdapter:
    sizes = {"num_layers": 1, "full_loops": LOOPS}
    if kind == "bare":
        return like(BareToy, **sizes)  # type: ignore[no-any-return]
    return shared_toy(depth_conditioned=kind == "conditioned", **sizes)


@pytest.mark.parametrize(
    ("kind", "k", "d", "mode"),
    [("bare", k, d, mode) for k, d in ((0, 0), (2, 1), (3, 2)) for mode in SamplingMode]
    + [
        (kind, k, d, SamplingMode.FILTERED)
        for kind in ("whole", "conditioned")
        for k, d in ((0, 0), (2, 1))
    ],
)
def test_a_trace_replays_bit_for_bit_at_other_positions_tables_and_seeds(
    kind: str, k: int, d: int, mode: SamplingMode
) -> None:
    check_replay(toy(kind), k, d, mode)


@pytest.mark.parametrize(
    ("k", "d", "depths"), [(0, 0, (1, 2)), (2, 1, (2,)), (2, 2, (1,)), (3, 1, (2,))]
)
@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.FILTERED])
def test_a_trace_with_shadow_depths_replays_too(
    k: int, d: int, depths: tuple[int, ...], mode: SamplingMode
) -> None:
    check_replay(toy("bare"), k, d, mode, depths)


def check_replay(
    adapter: ToyAdapter, k: int, d: int, mode: SamplingMode, depths: tuple[int, ...] = ()
) -> None:
    """A trace made at some numbers gives at others what eager execution gives, bit for bit."""
    run = round_of(adapter, k, d, mode, depths)
    outputs = set()
    with torch.no_grad():
        traced = trace(run, inputs(adapter, 0))
        for seed in range(1, 4):
            eager, replay = inputs(adapter, seed), inputs(adapter, seed)
            want, got = run(*eager), traced(*replay)
            for one, other in zip((*want, *eager), (*got, *replay), strict=True):
                assert torch.equal(one, other)
            outputs.add(tuple(want[0].flatten().tolist()))
    assert len(outputs) == 3, "the arguments must matter"


def test_the_check_would_notice_a_host_read() -> None:
    def reads(x: Tensor) -> Tensor:
        return x * int(x.sum().item())

    with pytest.raises(RuntimeError, match="out of a tracing tensor"):
        trace(reads, [torch.arange(3)])
