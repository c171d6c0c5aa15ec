"""One speculative round, and one prefill pass, as functions of tensors only.

Nothing here reads a tensor on the host or has a shape that depends on data: this is what gets
captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from looped_spec.adapter import LoopState, ModelAdapter, StageContext
from looped_spec.runtime.logprobs import OnTargets
from looped_spec.runtime.sampler import (
    NOT_FINITE,
    SamplingMode,
    SamplingTensors,
    choose_tokens,
    gumbel_noise,
    mark_not_finite,
)


class RoundContext(StageContext, Protocol):
    """A context that can be narrowed to one row of each request."""

    def column(self, index: int, total_loops: int) -> StageContext:
        """Return the context of row `index` of each request, for a run `total_loops` deep."""
        ...


ContextFactory = Callable[[Tensor, int], RoundContext]
"""Makes the context of rows at positions [B, T] int64, for a run that reaches so many loops."""


@dataclass(frozen=True)
class RoundOutput:
    """What a round gives for B requests.

    Attributes:
        tokens: [B, K + 1] int64, the target's own tokens; the first `accepted` + 1 of a row are
            committed.
        accepted: [B] int64, how many drafts agree with the target before the first disagreement,
            0..K.
        next_token: [B] int64, the last committed token, which has no keys and values yet.
        next_position: [B] int64, its position.
        shadow: [B, S] int64, for each shadow depth in how many leading rows a draft of that depth
            agrees with the target, 0..K + 1. Rows behind `accepted` follow a rejected draft and
            tell nothing: whoever counts stops there.
    """

    tokens: Tensor
    accepted: Tensor
    next_token: Tensor
    next_position: Tensor
    shadow: Tensor


def speculative_round(
    adapter: ModelAdapter,
    context: ContextFactory,
    tokens: Tensor,
    positions: Tensor,
    sampling: SamplingTensors,
    *,
    num_speculative_tokens: int,
    draft_loops: int,
    full_loops: int,
    mode: SamplingMode,
    shadow_depths: Sequence[int] = (),
    on_targets: OnTargets | None = None,
    between_passes: Callable[[], None] | None = None,
) -> RoundOutput:
    """Draft K tokens with d loops, verify them with all D loops; K = 0 is plain decoding.

    With K drafts the work is d (K + 1) loop passes over B rows and D - d passes over B (K + 1)
    rows, and each (position, loop) is computed once: verification continues from the drafted
    states. A model whose shallow run is no prefix of its deep run (`resumable` false) is verified
    from its prelude instead.

    A shadow depth asks what drafts of another depth would have been. The states are there already:
    each row passes through that depth on its way to the target, with keys and values that only
    shallower loops wrote, so all it takes is a readout of the K + 1 rows and a choice with the
    same noise. It changes nothing else and writes no plane.

    Args:
        adapter: the model.
        context: makes stage contexts bound to the rows' requests.
        tokens: [B] int64, the token of each request that has no keys and values yet.
        positions: [B] int64, its position s; the round may write positions s..s + K.
        sampling: parameters of the B requests.
        num_speculative_tokens: K, 0 or more.
        draft_loops: d, 1..D - 1 (not used when K is 0).
        full_loops: D.
        mode: what token choice needs at most.
        shadow_depths: other depths than d, each 1..D - 1; only for a model with
            `can_read_shadows`.
        on_targets: gets the target's logits and tokens of all K + 1 rows.
        between_passes: called before each loop pass, not in a round that is captured; it may run
            passes of other requests.
    """
    k = num_speculative_tokens
    resumable = adapter.capabilities.resumable
    assert not shadow_depths or can_read_shadows(adapter)
    assert draft_loops not in shadow_depths, "the drafts themselves tell of their own depth"
    draft_depth = full_loops if resumable else draft_loops
    offsets = torch.arange(k + 1, device=positions.device)
    row_positions = positions[:, None] + offsets

    ctx = context(row_positions, full_loops)
    noise = None
    if mode is not SamplingMode.GREEDY:  # a draft and its check use the same
        vocab_size = adapter.geometry.vocab_size
        noise = gumbel_noise(sampling.seeds[:, None], row_positions + 1, vocab_size)

    inputs = [tokens]
    kept: list[LoopState] = []
    passed: dict[int, list[LoopState]] = {depth: [] for depth in shadow_depths}
    for step in range(k + 1 if resumable and k else k):
        step_ctx = ctx.column(step, draft_depth)
        state = adapter.prelude(inputs[step][:, None], step_ctx)
        for index in range(draft_loops):
            if between_passes is not None:
                between_passes()
            state = adapter.loop(state, index, step_ctx)
            if index + 1 in passed and index + 1 < draft_loops:
                passed[index + 1].append(state)
        kept.append(state)
        if step < k:
            logits = adapter.draft_readout(state, step_ctx)
            here = slice(step, step + 1)
            own = None if noise is None else noise[:, here]
            drafted = choose_tokens(logits, row_positions[:, here] + 1, sampling, mode, own)
            inputs.append(drafted[:, 0])

    if kept and resumable:
        state = _join_rows(kept)
        shallow = draft_loops
    else:
        state = adapter.prelude(torch.stack(inputs, dim=1), ctx)
        shallow = 0
    for index in range(shallow, full_loops):
        if between_passes is not None:
            between_passes()
        state = adapter.loop(state, index, ctx)
        if index + 1 in passed:
            passed[index + 1].append(state)
    logits = adapter.readout(state, ctx)
    targets = choose_tokens(logits, row_positions + 1, sampling, mode, noise)
    targets = mark_not_finite(targets, logits)
    if on_targets is not None:
        on_targets(logits, targets)

    matches = []
    for states in passed.values():
        logits = adapter.draft_readout(_join_rows(states), ctx)
        would_be = choose_tokens(logits, row_positions + 1, sampling, mode, noise)
        matches.append(_leading_matches(would_be, targets))
    shadow = torch.stack(matches, dim=1) if matches else targets[:, :0]

    if k:
        drafts = torch.stack(inputs[1:], dim=1)
        accepted = _leading_matches(drafts, targets[:, :k])
        next_token = targets.gather(1, accepted[:, None])[:, 0]
    else:
        accepted = torch.zeros_like(positions)
        next_token = targets[:, 0]
    return RoundOutput(targets, accepted, next_token, positions + accepted + 1, shadow)


def can_read_shadows(adapter: ModelAdapter) -> bool:
    """Whether a round of this model can tell what drafts of another depth would have been.

    Its readout must make sense at any depth and write no plane, and its shallow run must be a
    prefix of its deep run: otherwise no draft of that depth has the state that is passed through.
    """
    return adapter.capabilities.shadow_depths and adapter.capabilities.resumable


def _join_rows(states: Sequence[LoopState]) -> LoopState:
    """Put the rows of several states side by side, along axis 1."""
    return tuple(torch.cat(parts, dim=1) for parts in zip(*states, strict=True))


def _leading_matches(drafts: Tensor, targets: Tensor) -> Tensor:
    """Return [B] int64: in how many columns of [B, T] tokens the two agree before the first that
    differs."""
    return (drafts == targets).long().cumprod(dim=1).sum(dim=1)


def prefill(
    adapter: ModelAdapter,
    ctx: StageContext,
    tokens: Tensor,
    next_positions: Tensor,
    sampling: SamplingTensors,
    *,
    full_loops: int,
    mode: SamplingMode,
    want_tokens: bool,
    readout_has_planes: bool,
    on_targets: OnTargets | None = None,
) -> Tensor:
    """Run known tokens ([B, T] int64) at full depth; return the next token of each request, [B]
    int64, or `NOT_FINITE`.

    `next_positions` ([B] int64) is where that token will stand. Without `want_tokens` (a chunk that
    does not end its prompt) other tokens mean nothing, and the readout runs only if it has planes
    of its own to fill. `on_targets` is called where tokens are wanted.
    """
    state = adapter.prelude(tokens, ctx)
    for index in range(full_loops):
        state = adapter.loop(state, index, ctx)
    if not want_tokens and not readout_has_planes:
        return _mark_states(state)
    logits = adapter.readout(state, ctx)
    assert logits.shape[1] == 1, "readout must pass its rows through ctx.logit_rows before the head"
    if not want_tokens:
        return _mark_states(state)
    tokens = choose_tokens(logits, next_positions[:, None], sampling, mode)
    tokens = mark_not_finite(tokens, logits)
    if on_targets is not None:
        on_targets(logits, tokens)
    return tokens[:, 0]


def _mark_states(state: LoopState) -> Tensor:
    """Return [B] int64: `NOT_FINITE` for requests with NaN or infinity in a row of their state."""
    finite = torch.stack([part.flatten(1).isfinite().all(dim=1) for part in state]).all(dim=0)
    return torch.where(finite, 0, NOT_FINITE)
