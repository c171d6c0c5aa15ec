"""Huginn as a `ModelAdapter`: prelude, D recurrences with injection, coda and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from looped_spec.adapter import (
    KVPlane,
    LoopGeometry,
    LoopState,
    ModelAdapter,
    StageContext,
    loop_planes,
)
from looped_spec.errors import UnsupportedError, check_number
from looped_spec.layers.exit_scores import convergence_score
from looped_spec.layers.initial_state import truncated_normal
from looped_spec_huginn.config import read_config, unsupported_reason
from looped_spec_huginn.model import HuginnModel
from looped_spec_huginn.plugin import CAPABILITIES

# The official generation loop ends at begin_text, end_text and end_turn, whatever the files name.
_STOP_TOKEN_IDS = (65504, 65505, 65508)

# Training draws the depth of every step around the mean, from a distribution with a long tail
# (paper, section 3.3), so there is no trained maximum; quality saturates at the mean (figure 1).
_DEPTHS_BEYOND_MEAN = 4


class HuginnAdapter(ModelAdapter):
    """huginn-0125 and models of its kind.

    Any depth from 1 to four times the mean of training may be asked for; more has shown no gain,
    and each loop costs as many KV planes as the core has blocks.

    The state is a pair: the recurrent state, and the prelude's output that every loop injects. The
    recurrence starts from noise, as the model was trained. That noise is a function of the
    request's seed and the token's position, which makes greedy decoding repeatable; the option
    `init_scale` multiplies it, and 0 starts from zeros.

    The option `lookup_strategy` bears the name of the official cache's argument, of whose values
    only `full` is computed: a KV plane for every (loop, block).
    """

    options: ClassVar[Mapping[str, Any]] = {"init_scale": 1.0, "lookup_strategy": "full"}

    # The only published run that was faster than plain decoding drafts four tokens with four loops
    # each; below four loops the model card calls results very coarse.
    default_speculation = (4, 4)

    def __init__(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.config = read_config(config)
        self.init_scale = options.get("init_scale", self.options["init_scale"])
        check_number("init_scale", self.init_scale, 0)
        _refuse_shared_planes(options.get("lookup_strategy", "full"))
        self.module: HuginnModel = HuginnModel(self.config)
        self.capabilities = CAPABILITIES
        self.extra_stop_token_ids = tuple(
            token for token in _STOP_TOKEN_IDS if token < self.config.vocab_size
        )
        self.geometry = LoopGeometry(
            default_full_loops=self.config.mean_recurrence,
            max_full_loops=_DEPTHS_BEYOND_MEAN * self.config.mean_recurrence,
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.n_embd,
            max_model_len=self.config.block_size,
        )

    @classmethod
    def unsupported_reason(cls, config: Mapping[str, Any]) -> str | None:
        """Refuse other injections, initial states, blocks, norms and scales than the published."""
        return unsupported_reason(config)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """Prelude, coda, then one plane per (loop, core block): no index depends on the depth."""
        c = self.config
        sizes = (c.n_heads, c.head_dim)
        prelude = (KVPlane("prelude", *sizes),) * c.n_layers_in_prelude
        coda = (KVPlane("readout", *sizes),) * c.n_layers_in_coda
        core = loop_planes(full_loops, c.n_layers_in_recurrent_block, *sizes)
        return prelude + coda + core

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        """Return the initial state and the prelude's output, each [B, T, E]."""
        stack = self.module.transformer
        embedded = stack.wte(tokens) * self.config.embed_scale
        embedded = self.module.run(stack.prelude, embedded, 0, ctx)
        return self.initial_state(embedded, ctx), embedded

    def initial_state(self, embedded: Tensor, ctx: StageContext) -> Tensor:
        """Return what the recurrence starts from: shape and dtype of `embedded` ([B, T, E])."""
        if self.init_scale == 0.0:
            return torch.zeros_like(embedded)
        c = self.config
        scale = self.init_scale * c.init_std * c.embed_scale

        def draw(positions: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
            noise = truncated_normal(seeds, positions, c.n_embd)
            return ((noise * scale).to(embedded.dtype),)

        return ctx.per_row("initial_state", draw)[0]

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        """Inject the prelude's output, then run the core blocks; there is no norm between loops."""
        hidden, embedded = state
        c = self.config
        first_plane = c.n_layers_in_prelude + c.n_layers_in_coda
        first_plane += index * c.n_layers_in_recurrent_block
        hidden = self.module.inject(hidden, embedded)
        return self.module.run(
            self.module.transformer.core_block, hidden, first_plane, ctx
        ), embedded

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Return logits [B, T', V] of the coda's output; rows that only pad the vocabulary are cut.

        The coda runs over all rows, since later ones attend to its keys and values.
        """
        return self._head(ctx.logit_rows(self._coda(state, ctx)))

    def exit_score(
        self,
        criterion: str,
        state: LoopState,
        previous: LoopState,
        previous_score: Tensor | None,
        index: int,
        ctx: StageContext,
    ) -> Tensor:
        """Score one of four criteria; see `convergence_score`. [B, T] fp32.

        Thresholds are those of the official code, negated for the first three: `latent-diff` -0.03,
        `entropy-diff` -1e-3, `kl` -1e-3 and `argmax-stability` 5.

        All but `latent-diff` compare what two neighbouring depths read out, at the cost of a coda
        and a head each. The coda writes its KV planes at the rows of this call, and at no others;
        the readout that follows the last loop overwrites them, so no later token ever sees them.
        """
        return convergence_score(
            criterion, state, previous, previous_score, lambda each: self._log_probs(each, ctx)
        )

    def optional_checkpoint_tensors(self) -> frozenset[str]:
        """A tied head need not be stored; the stored table of rotary angles is computed here."""
        tied = {"lm_head.weight"} if self.config.tie_embeddings else set()
        return frozenset({"freqs_cis", *tied})

    def _coda(self, state: LoopState, ctx: StageContext) -> Tensor:
        stack = self.module.transformer
        first_plane = self.config.n_layers_in_prelude
        return self.module.run(stack.coda, stack.ln_f(state[0]), first_plane, ctx)

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.lm_head(self.module.transformer.ln_f(hidden))
        return logits[..., : self.config.vocab_size]

    def _log_probs(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Return log probabilities [B, T, V] fp32 of every row, in prefill too."""
        return self._head(self._coda(state, ctx)).float().log_softmax(dim=-1)


def _refuse_shared_planes(lookup_strategy: object) -> None:
    """Raise for a policy by which loops read or write each other's keys and values."""
    if lookup_strategy != "full":
        raise UnsupportedError(
            f"lookup_strategy {lookup_strategy!r} is not implemented (only 'full', keys and values "
            "of its own for every loop): where loops share them, tokens that are verified in one "
            "pass see other keys than tokens that are decoded one by one, so that speculation "
            "would change the text"
        )
