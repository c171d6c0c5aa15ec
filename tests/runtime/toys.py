"""Toy models with eyes and strings, and cached oracle texts, for the tests of the runtime."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looped_spec.adapter import LoopState, StageContext
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.oracle import dense_generate
from looped_spec.testing.toy import TOY_CONFIG, ToyAdapter, make_toy

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13])
VOCAB = TOY_CONFIG["vocab_size"]
READOUT_PLANE = 1

Pool = list[tuple[Tensor, Tensor]]


def like(kind: type[ToyAdapter], seed: int = 0, **changes: Any) -> Any:
    """A toy of class `kind` with the weights of `make_toy(seed, **changes)`."""
    adapter = kind({**TOY_CONFIG, **changes}, {})
    adapter.module.load_state_dict(make_toy(seed, **changes).module.state_dict())
    return adapter


@functools.cache
def shared_toy(**changes: Any) -> ToyAdapter:
    """One toy per set of changes, for tests that do not touch it."""
    return make_toy(**changes)


@functools.cache
def _text(prompt: tuple[int, ...], params: SamplingParams, **changes: Any) -> list[int]:
    adapter = shared_toy(**changes)
    return dense_generate(
        adapter,
        prompt,
        params.max_tokens,
        full_loops=adapter.geometry.default_full_loops,
        params=params,
        seed=params.seed or 0,
    )


def oracle_text(prompt: Sequence[int], params: SamplingParams, **changes: Any) -> list[int]:
    """What the slow oracle generates from the toy with these changes."""
    return list(_text(tuple(prompt), params, **changes))


def run_to_end(engine: Engine, limit: int = 2000) -> None:
    """Step until nothing is left to do, but not for ever."""
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError(f"work left after {limit} steps")


def assert_all_free(engine: Engine) -> None:
    """Every block and every row is back."""
    scheduler = engine.scheduler
    assert scheduler.allocator.num_free == scheduler.allocator.num_blocks
    assert len(scheduler._free_rows) == engine.runner.state.padding_row
    assert not scheduler.running and not scheduler.waiting


class ScriptedToy(ToyAdapter):
    """A toy whose drafts are dictated: `script` maps an absolute position to the drafted token."""

    script: dict[int, int]

    def draft_readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        logits = self.readout(state, ctx)
        forced = torch.zeros_like(logits)
        for row in range(logits.shape[0]):
            for column in range(logits.shape[1]):
                token = self.script.get(int(ctx.positions[row, column]) + 1)
                if token is None:
                    forced[row, column] = logits[row, column]
                else:
                    forced[row, column, token] = 1e6
        return forced


class BareToy(ToyAdapter):
    """A toy of loops alone: its readout has no plane, so that it can be read at any depth."""

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.capabilities = dataclasses.replace(self.capabilities, shadow_depths=True)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        embedded = self.module.embed(tokens)
        return torch.zeros_like(embedded), embedded

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        return ctx.logit_rows(self.module.norm(state[0])) @ self.module.embed.weight.T


@dataclass(frozen=True)
class Call:
    """One call of a stage: the loop index (None for the others) and the positions of its rows."""

    stage: str
    index: int | None
    positions: Tensor


class WatchedToy(ToyAdapter):
    """A toy that writes down every call of a stage, and the logits of full depth."""

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.calls: list[Call] = []
        self.target_logits: list[tuple[Tensor, Tensor]] = []

    def _note(self, stage: str, index: int | None, ctx: StageContext) -> None:
        self.calls.append(Call(stage, index, ctx.positions.clone()))

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        self._note("prelude", None, ctx)
        return super().prelude(tokens, ctx)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        self._note("loop", index, ctx)
        return super().loop(state, index, ctx)

    def draft_readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        self._note("draft_readout", None, ctx)
        return super().readout(state, ctx)

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        self._note("readout", None, ctx)
        logits = super().readout(state, ctx)
        self.target_logits.append((ctx.positions.clone(), logits.clone()))
        return logits


def slots_of(request: Request, positions: Sequence[int], block_size: int) -> Tensor:
    """Where the keys and values of `positions` lie, as flat slots."""
    return torch.tensor(
        [request.blocks[p // block_size] * block_size + p % block_size for p in positions],
        dtype=torch.int64,
    )


def flat(pages: Tensor) -> Tensor:
    """Pages as [slots, kv_heads, head_dim], sharing memory."""
    return pages.view(-1, *pages.shape[2:])


def chi_square(observed: Tensor, probability: Tensor) -> tuple[float, float]:
    """Pearson's statistic, rare cells taken together, and its 99.99 % quantile.

    The quantile is that of Wilson and Hilferty.
    """
    expected = probability.double() * observed.sum()
    rare = expected < 5
    cells = [(observed[~rare].double(), expected[~rare])]
    if expected[rare].sum() >= 5:
        cells.append((observed[rare].sum().double()[None], expected[rare].sum()[None]))
    got, want = (torch.cat(parts) for parts in zip(*cells, strict=True))
    freedom = len(want) - 1
    z, scale = 3.719, 2 / (9 * freedom)
    return float(((got - want) ** 2 / want).sum()), freedom * (1 - scale + z * scale**0.5) ** 3
