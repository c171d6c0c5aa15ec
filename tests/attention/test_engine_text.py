"""The engine writes the same text and replays the same trace over every backend.

flash-attention and torch's varlen_attn are stand-ins that compute in fp32; the Triton kernel is
interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import backend_or_skip
from fake_flash import FlashRecord
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from looped_spec.runtime.attention import (
    AttentionBackend,
    AttentionNeeds,
    PagedContext,
    PagedRows,
)
from looped_spec.runtime.attention.flash_attn import FLASH_2, FLASH_3, FLASH_4, FlashAttnBackend
from looped_spec.runtime.attention.varlen import VarlenBackend
from looped_spec.runtime.kv_cache import KVPool
from looped_spec.runtime.round import speculative_round
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_generate
from looped_spec.testing.toy import ToyAdapter, make_toy

FP32 = torch.float32
STAND_INS = {"2": FLASH_2, "3": FLASH_3, "4": FLASH_4}
BLOCK_SIZES = {"2": 256, "3": 3, "4": 3, "varlen": 256, "triton": 3}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13]]


def make(name: str, *, read_values: bool = True) -> AttentionBackend:
    record = FlashRecord((FP32,), read_values=read_values)
    if name == "triton":
        asked = AttentionNeeds(torch.device("cpu"), FP32, frozenset({8}), num_splits=1)
        return backend_or_skip("triton", asked)
    if name == "varlen":
        return VarlenBackend(record.varlen_attn)
    return FlashAttnBackend(STAND_INS[name], record.function(int(name)), 0)


def check_text(
    name: str, adapter: ToyAdapter, k: int, d: int, prompts: list[list[int]], params: SamplingParams
) -> None:
    """Compare what an engine writes, in chunks and with preemption, with the slow oracle."""
    loops = adapter.geometry.default_full_loops
    engine = make_engine(
        adapter,
        num_speculative_tokens=k,
        draft_loops=d,
        block_size=BLOCK_SIZES[name],
        num_blocks={3: 14, 256: 2}[BLOCK_SIZES[name]],
        max_model_len=32,
        max_num_batched_tokens=5,
    )
    engine.runner.backend = make(name)
    requests = run_all(engine, prompts, params)
    for prompt, request in zip(prompts, requests, strict=True):
        expected = dense_generate(
            adapter, prompt, params.max_tokens, full_loops=loops, params=params, seed=0
        )
        assert request.output_token_ids == expected


@pytest.mark.parametrize(("k", "d"), [(0, 0), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", [*STAND_INS, "varlen"])
def test_the_text_over_flash_attention_is_that_of_the_oracle(name: str, k: int, d: int) -> None:
    params = SamplingParams(temperature=0.8, top_k=20, max_tokens=12, seed=0, ignore_eos=True)
    check_text(name, make_toy(), k, d, PROMPTS, params)


@pytest.mark.slow
def test_the_text_over_the_interpreted_triton_kernel_is_that_of_the_oracle() -> None:
    adapter = make_toy(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, full_loops=2)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    check_text("triton", adapter, 2, 1, PROMPTS[1:], params)


LOOPS, WIDTH, NUM_BLOCKS = 2, 3, 6


def round_over(name: str, adapter: ToyAdapter) -> Callable[..., tuple[Tensor, ...]]:
    """A greedy round as a function of tensors alone, see tests/runtime/test_tracing.py."""
    backend = make(name, read_values=False)

    def run(
        tokens: Tensor, positions: Tensor, tables: Tensor, limits: Tensor, *pages: Tensor
    ) -> tuple[Tensor, ...]:
        pool = KVPool((), NUM_BLOCKS, BLOCK_SIZES[name], FP32, torch.device("cpu"))
        pool.planes = list(zip(pages[::2], pages[1::2], strict=True))
        zeros = torch.zeros_like(tokens)
        nothing = torch.zeros(len(tokens))
        rows = PagedRows(tables, limits, zeros)
        out = speculative_round(
            adapter,
            lambda where, loops: PagedContext(pool, backend, rows, where, loops),
            tokens,
            positions,
            SamplingTensors(zeros, nothing, zeros, nothing + 1, nothing),
            num_speculative_tokens=2,
            draft_loops=1,
            full_loops=LOOPS,
            mode=SamplingMode.GREEDY,
        )
        return out.tokens, out.accepted, out.next_token, out.next_position

    return run


def round_arguments(name: str, adapter: ToyAdapter, seed: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    block_size = BLOCK_SIZES[name]
    positions = torch.randint(1, WIDTH * block_size - 3, (2,), generator=dice)
    tables = torch.randperm(NUM_BLOCKS, generator=dice).view(2, WIDTH) + 1
    pages: list[Tensor] = []
    for plane in adapter.kv_planes(LOOPS):
        size = (NUM_BLOCKS + 1, block_size, plane.num_kv_heads, plane.head_dim)
        pages += [torch.randn(size, generator=dice) for _ in range(2)]
    tokens = torch.randint(0, adapter.geometry.vocab_size, (2,), generator=dice)
    return [tokens, positions, tables, positions + torch.tensor([1, 3]), *pages]


@pytest.mark.parametrize(
    "name", [*STAND_INS, "varlen", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_a_trace_of_a_round_replays_at_other_positions_and_tables(name: str) -> None:
    adapter = make_toy(num_layers=1, num_heads=2, num_kv_heads=1, full_loops=LOOPS)
    run = round_over(name, adapter)
    outputs = set()
    with torch.no_grad():
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            traced: Any = make_fx(run)(*round_arguments(name, adapter, 0))
        for seed in (1, 2):
            eager, replay = (round_arguments(name, adapter, seed) for _ in range(2))
            want, got = run(*eager), traced(*replay)
            for one, other in zip((*want, *eager), (*got, *replay), strict=True):
                assert torch.equal(one, other)
            outputs.add(tuple(want[0].flatten().tolist()))
    assert len(outputs) == 2, "the arguments must matter"
