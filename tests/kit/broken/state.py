"""Faults in what is kept: between loops, between draft and verification, between requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from broken.case import BrokenToy
from looped_spec.adapter import Capabilities, LoopState, StageContext


class DepthConditioned(BrokenToy):
    """The loops condition on the depth of the run, yet a shallow run is declared a prefix."""

    caught_by = ("test_a_shallow_run_is_a_prefix_of_a_deep_run",)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        hidden, embedded = state
        return super().loop((hidden + 0.3 * ctx.total_loops, embedded), index, ctx)


class CountsItsLoops(BrokenToy):
    """The adapter counts its loops itself instead of taking the index, from each prelude on."""

    caught_by = (
        "test_verification_continues_from_drafted_states",
        "test_speculation_changes_no_token",
    )
    done = 0

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        self.done = 0
        return super().prelude(tokens, ctx)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        hidden, embedded = state
        self.done += 1 if ctx.positions.shape[1] == 1 else 2
        return super().loop((hidden + 0.2 * self.done, embedded), index, ctx)


class ReadoutKeptFromTheDraft(BrokenToy):
    """What was read out once for a token is not computed again when the token is verified."""

    caught_by = (
        "test_verification_continues_from_drafted_states",
        "test_verification_overwrites_the_planes_that_it_may_not_keep",
        "test_rejected_rows_leave_no_trace",
        "test_a_text_of_rejected_drafts_alone_is_unchanged",
        "test_a_text_of_accepted_drafts_is_unchanged",
    )

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.known: dict[tuple[int, int], Tensor] = {}

    def draft_readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        logits = super().readout(state, ctx)
        for row, position in zip(state[0], ctx.positions[:, 0].tolist(), strict=True):
            self.known[position, len(self.known)] = row
        return logits

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        rows = {position: row for (position, _), row in self.known.items()}
        hidden = state[0].clone()
        for column, position in enumerate(ctx.positions[0].tolist()):
            hidden[0, column] = rows.get(position, hidden[:1, column])[0]
        self.known.clear()
        return super().readout((hidden, *state[1:]), ctx)


class RemembersTheLastRequest(BrokenToy):
    """The prelude starts from what the last loop of the call before left behind."""

    caught_by = (
        "test_nothing_leaks_from_a_request_to_the_next",
        "test_two_runs_are_identical",
        "test_plain_decoding_gives_the_text_of_the_oracle",
    )

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.memory = torch.zeros(())

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        hidden, embedded = super().prelude(tokens, ctx)
        return hidden + self.memory, embedded

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        hidden, embedded = super().loop(state, index, ctx)
        self.memory = 2 * hidden.detach().mean()
        return hidden, embedded


class SeedsOfTheLastPrelude(BrokenToy):
    """The loops take the seeds that the prelude has seen, which may be those of another prompt."""

    caught_by = ("test_a_prompt_in_the_middle_of_a_round_changes_no_token",)
    can = Capabilities()

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        self.seeds = ctx.seeds
        return super().prelude(tokens, ctx)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        hidden, embedded = super().loop(state, index, ctx)
        return hidden + self.seeds[:, None, None] % 7, embedded


class FreshNoise(BrokenToy):
    """The initial state is drawn anew at every call."""

    caught_by = (
        "test_two_runs_are_identical",
        "test_a_state_depends_on_seed_and_position_alone",
    )

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        hidden, embedded = super().prelude(tokens, ctx)
        return torch.randn_like(hidden), embedded


class NoiseOfTheChunk(BrokenToy):
    """The initial state is the same noise at every call, by its place in the chunk."""

    caught_by = (
        "test_a_state_depends_on_seed_and_position_alone",
        "test_chunks_give_the_logits_of_the_whole",
    )

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        hidden, embedded = super().prelude(tokens, ctx)
        return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)), embedded


class StateBesideThePlanes(BrokenToy):
    """The model declares a state that cannot be rolled back."""

    caught_by = ("test_no_state_is_kept_beside_the_planes",)
    can = Capabilities(non_kv_state="convolution state")


FAULTS = (
    StateBesideThePlanes,
    DepthConditioned,
    CountsItsLoops,
    ReadoutKeptFromTheDraft,
    RemembersTheLastRequest,
    SeedsOfTheLastPrelude,
    FreshNoise,
    NoiseOfTheChunk,
)
