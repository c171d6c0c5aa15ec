"""What the checks of whole texts share: requests, an oracle, and a comparison that knows
rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.request import Request
from looped_spec.runtime.sampler import gumbel_noise
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.conformance.base import ConformanceBase
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_generate, dense_logits

NEW_TOKENS = 6
_MAX_MODEL_LEN = 24
PARAMS = (
    SamplingParams(temperature=0.0, seed=11, max_tokens=NEW_TOKENS),
    SamplingParams(temperature=0.9, seed=12, max_tokens=NEW_TOKENS),
    SamplingParams(temperature=0.0, seed=13, max_tokens=NEW_TOKENS),
)
PROMPT_LENGTHS = (7, 1, 3)


class TextChecks(ConformanceBase):
    """Three requests of different lengths, two greedy and one seeded, known by their number."""

    def prompt(self, adapter: ModelAdapter, number: int) -> list[int]:
        """Return prompt `number`, of its own length."""
        tokens: list[int] = self.sample_tokens(adapter, 3, max(PROMPT_LENGTHS))[number].tolist()
        return tokens[: PROMPT_LENGTHS[number]]

    def oracle(
        self, adapter: ModelAdapter, number: int, params: SamplingParams | None = None
    ) -> list[int]:
        """Return the text of request `number` from whole sequences without a cache."""
        return self.oracle_text(adapter, self.prompt(adapter, number), params or PARAMS[number])

    def oracle_text(
        self, adapter: ModelAdapter, prompt: list[int], params: SamplingParams
    ) -> list[int]:
        """Return the text that follows any prompt, as `oracle` does."""
        with torch.no_grad():
            return dense_generate(
                adapter,
                prompt,
                params.max_tokens,
                full_loops=adapter.geometry.default_full_loops,
                params=params,
                seed=params.seed or 0,
            )

    def run(self, adapter: ModelAdapter, engine: Engine, numbers: Sequence[int]) -> list[Request]:
        prompts = [self.prompt(adapter, number) for number in numbers]
        return run_all(engine, prompts, [PARAMS[number] for number in numbers])

    def assert_lossless(
        self, adapter: ModelAdapter, engine: Engine, numbers: Sequence[int]
    ) -> None:
        """Compare the texts of some of the requests with those of the oracle."""
        for number, request in zip(numbers, self.run(adapter, engine, numbers), strict=True):
            expected = self.oracle(adapter, number)
            prompt = self.prompt(adapter, number)
            self.assert_text(adapter, prompt, request.output_token_ids, expected, PARAMS[number])

    def assert_text(
        self,
        adapter: ModelAdapter,
        prompt: list[int],
        got: list[int],
        expected: list[int],
        params: SamplingParams,
    ) -> None:
        """Compare texts up to a token that rounding alone could have decided."""
        if got == expected:
            return
        pairs = zip(got, expected, strict=False)
        where = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert where is not None, f"texts of {len(got)} and {len(expected)} tokens"
        known = [*prompt, *expected[:where]]
        depth = adapter.geometry.default_full_loops
        seed = params.seed or 0
        scores = dense_logits(adapter, known, depth, seed=seed)[-1]
        allowed = 2 * self.tolerance * max(1.0, float(scores.abs().max()))
        if params.temperature > 0:
            noise = gumbel_noise(torch.tensor(seed), torch.tensor(len(known)), len(scores))
            scores = scores / params.temperature + noise
            allowed /= params.temperature
        gap = float((scores[got[where]] - scores[expected[where]]).abs())
        assert gap <= allowed, (
            f"token {where} is {got[where]}, the oracle says {expected[where]} by {gap:.1e} "
            f"(text {got}, oracle {expected})"
        )


def some_drafts(adapter: ModelAdapter) -> tuple[int, int]:
    """Return a (K, d) that fits the model; none where it cannot draft."""
    full = adapter.geometry.default_full_loops
    return (2, full // 2) if full > 1 else (0, 0)


def small_engine(
    adapter: ModelAdapter,
    num_speculative_tokens: int = 0,
    draft_loops: int = 0,
    *,
    max_num_seqs: int = 3,
    eos_token_ids: Sequence[int] = (),
    exit_rule: ExitRule | None = None,
) -> Engine:
    """Return an engine with room for the three requests."""
    return make_engine(
        adapter,
        num_speculative_tokens=num_speculative_tokens,
        draft_loops=draft_loops,
        max_num_seqs=max_num_seqs,
        max_model_len=min(_MAX_MODEL_LEN, adapter.geometry.max_model_len),
        eos_token_ids=eos_token_ids,
        exit_rule=exit_rule,
    )
