"""The model that the CPU benchmarks run, what it reads per token, and its stages one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from looped_spec_ouro.adapter import OuroAdapter
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.runtime.attention import (
    AttentionBackend,
    PagedContext,
    PagedRows,
    SdpaBackend,
)
from looped_spec.runtime.kv_cache import KVPool, blocks_for

CONFIG: dict[str, Any] = {
    "model_type": "ouro",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "total_ut_steps": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
}
BLOCK_SIZE = 16


def random_model(config: dict[str, Any], *, as_bf16: bool) -> OuroAdapter:
    """Return a model with random fp32 weights, `as_bf16` with numbers that bf16 holds, as in a
    bf16 checkpoint that is run in fp32."""
    generator = torch.Generator().manual_seed(0)
    adapter = OuroAdapter(config, {})
    for parameter in adapter.module.requires_grad_(False).parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        if as_bf16:
            parameter.copy_(parameter.bfloat16().float())
    return adapter


def bytes_per_token(adapter: OuroAdapter) -> int:
    """Return the bytes of fp32 weights that plain decoding reads for a token: every layer once a
    loop, and the head."""
    sizes = {name: 4 * p.numel() for name, p in adapter.module.named_parameters()}
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    return adapter.config.total_loops * layers + sizes["lm_head.weight"]


def read_bandwidth(num_bytes: int, repeats: int = 7) -> float:
    """Return the bytes per second at which the threads of torch read so many bytes again and
    again, best of some tries."""
    numbers = torch.ones(num_bytes // 4)
    numbers.sum()
    return num_bytes / min(timed(numbers.sum, repeats))


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each of some calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class StageTimes:
    """Median times of the stages over some rows, in seconds unless it is said otherwise."""

    prelude: float
    loop: float
    readout: float

    def milliseconds(self) -> dict[str, float]:
        """Return the same in milliseconds, by name."""
        return {name: 1e3 * seconds for name, seconds in asdict(self).items()}

    @classmethod
    def median(cls, times: Sequence[StageTimes]) -> StageTimes:
        """Return the medians of several measurements."""
        return cls(
            statistics.median(each.prelude for each in times),
            statistics.median(each.loop for each in times),
            statistics.median(each.readout for each in times),
        )


class Stages:
    """The stages of a model over rows of requests that have some context behind them."""

    def __init__(
        self,
        adapter: ModelAdapter,
        full_loops: int,
        context: int,
        most: int,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Make a cache for up to `most` requests with `context` positions and a few more."""
        self._adapter, self._loops, self._context = adapter, full_loops, context
        self._attention = attention or SdpaBackend()
        self._width = blocks_for(context + 32, BLOCK_SIZE)
        self._pool = KVPool(
            adapter.kv_planes(full_loops),
            most * self._width,
            BLOCK_SIZE,
            torch.float32,
            torch.device("cpu"),
        )

    @torch.inference_mode()
    def times(self, batch_size: int, rows: int, repeats: int) -> StageTimes:
        """Time each stage for `batch_size` requests of `rows` rows each, one behind the other as
        in a round: each finds in the caches what the others left there."""
        ctx, tokens = self._inputs(batch_size, rows)
        found: list[StageTimes] = []
        for _ in range(repeats + 1):
            ends = [time.perf_counter()]
            state = self._adapter.prelude(tokens, ctx)
            ends.append(time.perf_counter())
            for index in range(self._loops):
                state = self._adapter.loop(state, index, ctx)
            ends.append(time.perf_counter())
            self._adapter.readout(state, ctx)
            ends.append(time.perf_counter())
            prelude, loops, readout = (b - a for a, b in pairwise(ends))
            found.append(StageTimes(prelude, loops / self._loops, readout))
        return StageTimes.median(found[1:])  # the first computes what rows share

    def _inputs(self, batch_size: int, rows: int) -> tuple[PagedContext, Tensor]:
        tables = 1 + torch.arange(batch_size * self._width).view(batch_size, -1)
        width = blocks_for(self._context + rows, BLOCK_SIZE)
        limits = torch.full((batch_size,), self._width * BLOCK_SIZE)
        paged = PagedRows(tables[:, :width], limits, torch.arange(batch_size))
        positions = (self._context + torch.arange(rows)).expand(batch_size, -1)
        ctx = PagedContext(self._pool, self._attention, paged, positions, self._loops)
        return ctx, torch.ones(batch_size, rows, dtype=torch.int64)
