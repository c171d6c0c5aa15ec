"""What early exit costs in loss on a given text: the running mode, fed with that text.

A row is a text: a prompt that runs at full depth, as in the engine, and tokens that each leave
when they may. Later tokens see the keys and values that the running mode left of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.adapter import KVPlane, LoopState, ModelAdapter, StageContext
from looped_spec.runtime.early_exit import ExitRule, exit_round
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors
from looped_spec.testing.stages import StageBench


class Listening(ModelAdapter):
    """An adapter that keeps the logits of its last readout."""

    def __init__(self, inner: ModelAdapter) -> None:
        self.inner = inner
        self.module = inner.module
        self.geometry = inner.geometry
        self.capabilities = inner.capabilities
        self.logits = torch.empty(0)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """See `ModelAdapter`."""
        return self.inner.kv_planes(full_loops)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        """See `ModelAdapter`."""
        return self.inner.prelude(tokens, ctx)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        """See `ModelAdapter`."""
        return self.inner.loop(state, index, ctx)

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Return what the inner adapter does, and keep it."""
        self.logits = self.inner.readout(state, ctx)
        return self.logits

    def exit_score(
        self,
        criterion: str,
        state: LoopState,
        previous: LoopState,
        previous_score: Tensor | None,
        index: int,
        ctx: StageContext,
    ) -> Tensor:
        """See `ModelAdapter`."""
        return self.inner.exit_score(criterion, state, previous, previous_score, index, ctx)


@dataclass(frozen=True)
class Quality:
    """Over `tokens` tokens: mean loss in nats, mean loops, how many left after each loop, and the
    share whose greedy choice is that of full depth."""

    tokens: int
    loss: float
    mean_loops: float
    left_after: tuple[int, ...]
    agreement: float


@torch.no_grad()
def follow(
    adapter: ModelAdapter,
    rows: Tensor,
    prompt_tokens: int,
    rule: ExitRule,
    progress: Callable[[], object] = lambda: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Feed rows [B, T] to the running mode; return losses (nats), loops and greedy choices, each
    [B, T - prompt_tokens - 1], of the tokens behind the prompt that have one behind them.

    The first prediction is the prompt's own and not counted: it is always at full depth.
    """
    batch, length = rows.shape
    seeds = list(range(batch))
    bench = StageBench(adapter, seeds=seeds, full_loops=rule.max_loops, num_tokens=length)
    ctx = bench.context(0, prompt_tokens)
    states = bench.states(rows[:, :prompt_tokens], ctx)
    bench.readout(states[-1], ctx)  # a readout may have planes of its own
    listening = Listening(adapter)
    one, none = torch.ones(batch), torch.zeros(batch, dtype=torch.int64)
    greedy = SamplingTensors(torch.tensor(seeds), 0 * one, none, one, 0 * one)
    losses, loops, choices = [], [], []
    for position in range(prompt_tokens, length - 1):
        out = exit_round(
            listening,
            bench.context(position, 1),
            bench.pool,
            rows[:, position],
            greedy,
            rule=rule,
            mode=SamplingMode.GREEDY,
        )
        logits = listening.logits[:, 0].float()
        losses.append(F.cross_entropy(logits, rows[:, position + 1], reduction="none"))
        loops.append(out.loops)
        choices.append(out.next_token)
        progress()
    return torch.stack(losses, 1), torch.stack(loops, 1), torch.stack(choices, 1)


def summarize(
    parts: Sequence[tuple[Tensor, Tensor, Tensor]], full_choices: Sequence[Tensor], max_loops: int
) -> Quality:
    """Reduce what `follow` returned for several texts, beside the choices of full depth."""
    losses, loops, choices = (torch.cat([part[i].flatten() for part in parts]) for i in range(3))
    expected = torch.cat([each.flatten() for each in full_choices])
    left = torch.bincount(loops, minlength=max_loops + 1)[1:]
    return Quality(
        tokens=len(losses),
        loss=float(losses.double().mean()),
        mean_loops=float(loops.double().mean()),
        left_after=tuple(left.tolist()),
        agreement=float((choices == expected).double().mean()),
    )
