"""Faults between rows: what a token gets from other tokens, or from its place in a chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from broken.case import BrokenToy
from looped_spec.adapter import Capabilities, LoopState, StageContext


class StateOfTheBatch(BrokenToy):
    """The state is centred over the requests of a batch."""

    caught_by = ("test_logits_do_not_depend_on_other_rows", "test_speculation_changes_no_token")

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        hidden, embedded = super().loop(state, index, ctx)
        return hidden - 0.5 * hidden.mean(dim=0, keepdim=True), embedded


class HeadOverRows(BrokenToy):
    """The head centres the rows of a chunk, padding included."""

    caught_by = (
        "test_chunks_give_the_logits_of_the_whole",
        "test_logits_do_not_depend_on_padding",
        "test_verification_continues_from_drafted_states",
    )

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        hidden = self.module.norm(self.module.coda(state[0], 1, ctx))
        hidden = hidden - 0.5 * hidden.mean(dim=1, keepdim=True)
        return ctx.logit_rows(hidden) @ self.module.embed.weight.T


class PositionsFromZero(BrokenToy):
    """An absolute position embedding counts from the start of the chunk."""

    caught_by = (
        "test_chunks_give_the_logits_of_the_whole",
        "test_a_state_depends_on_seed_and_position_alone",
        "test_verification_continues_from_drafted_states",
        "test_plain_decoding_gives_the_text_of_the_oracle",
    )

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        hidden, embedded = super().prelude(tokens, ctx)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return hidden, embedded + 0.3 * place[None, :, None].float().sin()


class PositionTable(BrokenToy):
    """A table of positions ends at the longest text; rejected drafts may lie behind it."""

    caught_by = ("test_a_text_may_reach_the_longest_length",)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        hidden, embedded = super().prelude(tokens, ctx)
        table = torch.zeros(self.geometry.max_model_len, embedded.shape[-1])
        return hidden, embedded + table[ctx.positions]


class AllLogits(BrokenToy):
    """The readout never asks which rows are wanted."""

    caught_by = (
        "test_prefill_reads_out_the_last_row_of_each_prompt",
        "test_plain_decoding_gives_the_text_of_the_oracle",
    )

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        return self.module.norm(self.module.coda(state[0], 1, ctx)) @ self.module.embed.weight.T


class SeedsAfterAll(BrokenToy):
    """The initial state is drawn by the seed, although nothing is said to depend on it."""

    caught_by = ("test_a_seed_free_model_gives_the_same_logits_for_every_seed",)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        hidden, embedded = super().prelude(tokens, ctx)
        return hidden + ctx.seeds[:, None, None] % 7, embedded


class RunAnewAndStillWrong(HeadOverRows):
    """The same, where verification runs from the prelude."""

    caught_by = ("test_verification_starts_anew_where_a_model_is_not_resumable",)
    can = Capabilities(resumable=False)


class StateWithoutRows(BrokenToy):
    """A number for the whole batch is handed on beside the rows."""

    caught_by = ("test_states_are_tensors_of_rows",)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        return (*super().loop(state[:2], index, ctx), torch.tensor(float(index)))


class InPlace(BrokenToy):
    """The readout norms the state that was to be kept for verification, in place."""

    caught_by = (
        "test_a_stage_leaves_its_inputs_as_they_are",
        "test_verification_continues_from_drafted_states",
    )

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        state[0].copy_(self.module.norm(state[0]))
        return super().readout(state, ctx)


class ReadsOnTheHost(BrokenToy):
    """A special case for the first token of a request is decided on the host."""

    caught_by = ("test_a_round_reads_no_tensor_on_the_host",)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        hidden, embedded = super().prelude(tokens, ctx)
        if bool((ctx.positions == 0).any()):
            hidden = hidden + 0.0
        return hidden, embedded


class KeysInFullPrecision(BrokenToy):
    """An angle in fp32 makes keys of fp32 whatever the weights are."""

    caught_by = ("test_half_precision_runs_through_every_stage",)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        embedded = self.module.embed(tokens).float()
        hidden = self.module.prelude(embedded, 0, ctx)
        return torch.zeros_like(hidden), hidden


FAULTS = (
    StateOfTheBatch,
    HeadOverRows,
    PositionsFromZero,
    PositionTable,
    AllLogits,
    SeedsAfterAll,
    RunAnewAndStillWrong,
    StateWithoutRows,
    InPlace,
    ReadsOnTheHost,
    KeysInFullPrecision,
)
