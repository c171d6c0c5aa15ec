"""The family as a `ModelAdapter`: prelude, D recurrences with injection, coda and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from looped_spec.adapter import (
    KVPlane,
    LoopGeometry,
    LoopState,
    ModelAdapter,
    StageContext,
    WeightTarget,
    loop_planes,
)
from looped_spec.errors import check_number
from looped_spec.layers.exit_scores import convergence_score
from looped_spec.layers.initial_state import truncated_normal
from torch import Tensor

from looped_spec_retrofit.config import read_config, unsupported_reason
from looped_spec_retrofit.model import RetrofitModel, official_name
from looped_spec_retrofit.plugin import CAPABILITIES

# The paper evaluates each model at up to 32 recurrences, whatever it was trained with, and finds
# nothing gained beyond about 8 (table 5). One trained deeper may run as deep as four times that.
_EVALUATED_LOOPS = 32
_DEPTHS_BEYOND_MEAN = 4

# The end marks of the model whose code is borrowed, which conversions carry on in config.json and
# generation_config.json. In a Llama vocabulary these are ordinary words.
_FOREIGN_STOP_TOKEN_IDS = (65505, 65508)


class RetrofitAdapter(ModelAdapter):
    """Llama models that were converted to recurrent depth and trained on.

    The state is a pair: the recurrent state, and the prelude's output that every loop injects. The
    recurrence starts from noise, as the models were trained. That noise is a function of the
    request's seed and the token's position, which makes greedy decoding repeatable; the option
    `init_scale` multiplies it, and 0 starts from zeros.
    """

    options: ClassVar[Mapping[str, Any]] = {"init_scale": 1.0}

    default_speculation = None
    speculation_note = (
        "no acceptance rate of this family is published; the accuracy of the published models "
        "hardly grows beyond 4 to 8 loops, so with 16 loops or more try num_speculative_tokens=4 "
        "draft_loops=4, and keep it if the draft acceptance rate is well above draft_loops / "
        "full_loops, or speculative_adaptive=True, which chooses by what it measures"
    )
    ignored_stop_token_ids = _FOREIGN_STOP_TOKEN_IDS

    def __init__(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.config = c = read_config(config)
        self.init_scale = options.get("init_scale", self.options["init_scale"])
        check_number("init_scale", self.init_scale, 0)
        self.module: RetrofitModel = RetrofitModel(c)
        self.capabilities = CAPABILITIES
        self.geometry = LoopGeometry(
            default_full_loops=c.mean_recurrence,
            max_full_loops=max(_EVALUATED_LOOPS, _DEPTHS_BEYOND_MEAN * c.mean_recurrence),
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            max_model_len=c.max_position_embeddings,
        )

    @classmethod
    def unsupported_reason(cls, config: Mapping[str, Any]) -> str | None:
        """Refuse what no published conversion has, by the name of the field."""
        return unsupported_reason(config)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """Prelude, coda, then one plane per (loop, core block): no index depends on the depth."""
        c = self.config
        sizes = (c.num_kv_heads, c.head_dim)
        prelude = (KVPlane("prelude", *sizes),) * c.num_prelude
        coda = (KVPlane("readout", *sizes),) * c.num_coda
        return prelude + coda + loop_planes(full_loops, c.num_core, *sizes)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        """Return the initial state and the prelude's output, each [B, T, E]."""
        stack = self.module.transformer
        embedded = self.module.run(stack.prelude, stack.wte(tokens), 0, ctx)
        return self.initial_state(embedded, ctx), embedded

    def initial_state(self, embedded: Tensor, ctx: StageContext) -> Tensor:
        """Return what the recurrence starts from: shape and dtype of `embedded` ([B, T, E])."""
        scale = self.init_scale * self.config.init_std
        if scale == 0:
            return torch.zeros_like(embedded)

        def draw(positions: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
            noise = truncated_normal(seeds, positions, self.config.hidden_size)
            return ((noise * scale).to(embedded.dtype),)

        return ctx.per_row("initial_state", draw)[0]

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        """Inject the prelude's output, then run the core blocks; there is no norm between loops."""
        hidden, embedded = state
        c = self.config
        first_plane = c.num_prelude + c.num_coda + index * c.num_core
        hidden = self.module.inject(hidden, embedded)
        core = self.module.transformer.core_block
        return self.module.run(core, hidden, first_plane, ctx), embedded

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

        All but `latent-diff` read out two neighbouring depths, at the cost of a coda and a head
        each. That writes the coda's KV planes at the rows of this call, which the readout after the
        last loop overwrites.
        """
        return convergence_score(
            criterion,
            state,
            previous,
            previous_score,
            lambda each: self._head(self._coda(each, ctx)).float().log_softmax(dim=-1),
        )

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        """Published names; query, key and value are one tensor there too, and so are gate and
        up."""
        return {official_name(name): WeightTarget(name) for name in self.module.state_dict()}

    def optional_checkpoint_tensors(self) -> frozenset[str]:
        """A tied head need not be stored."""
        return frozenset({"lm_head.weight"} if self.config.tie_embeddings else ())

    def _coda(self, state: LoopState, ctx: StageContext) -> Tensor:
        return self.module.run(self.module.transformer.coda, state[0], self.config.num_prelude, ctx)

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.lm_head(self.module.transformer.ln_f(hidden))
        return logits[..., : self.config.vocab_size]
