"""Checks of early exit: what is declared can be computed, and computing it disturbs nothing."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.errors import UnsupportedError
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.testing.conformance.base import criteria
from looped_spec.testing.conformance.texts import TextChecks, small_engine
from looped_spec.testing.stages import StageBench

_TOKENS = 6
_SEEDS = (1, 2)
_ROUNDING = 1e-6
"""By how much a probability near 0 may fall when it is kept as its complement."""


class ExitChecks(TextChecks):
    """`exit_score` keeps what `Capabilities.early_exit` promises."""

    def test_exit_scores_are_one_fp32_number_a_row(self, adapter: ModelAdapter) -> None:
        for criterion in criteria(adapter):
            for score in _scores(adapter, criterion.name, self.sample_tokens(adapter, 2, _TOKENS)):
                assert score.shape == (2, _TOKENS)
                assert score.dtype == torch.float32
                assert not bool(score.isnan().any())

    def test_monotone_scores_never_fall(self, adapter: ModelAdapter) -> None:
        monotone = [criterion.name for criterion in criteria(adapter) if criterion.monotone]
        if not monotone:
            pytest.skip("capability early_exit: no criterion is declared monotone")
        for name in monotone:
            scores = _scores(adapter, name, self.sample_tokens(adapter, 2, _TOKENS))
            for before, after in pairwise(scores):
                assert bool((after >= before - _ROUNDING).all()), f"{name} falls"

    def test_exit_scores_do_not_depend_on_other_rows(self, adapter: ModelAdapter) -> None:
        tokens = self.sample_tokens(adapter, 2, _TOKENS)
        for criterion in criteria(adapter):
            together = _scores(adapter, criterion.name, tokens)
            for row, seed in enumerate(_SEEDS):
                alone = _scores(adapter, criterion.name, tokens[row : row + 1], seeds=(seed,))
                for pair, single in zip(together, alone, strict=True):
                    assert torch.equal(pair[row].isfinite(), single[0].isfinite())
                    self.assert_close(
                        pair[row].nan_to_num(posinf=0.0, neginf=0.0),
                        single[0].nan_to_num(posinf=0.0, neginf=0.0),
                        f"scores of {criterion.name} in a batch and alone",
                    )

    def test_scoring_changes_no_logits(self, adapter: ModelAdapter) -> None:
        tokens = self.sample_tokens(adapter, 2, _TOKENS)
        expected = StageBench(adapter, seeds=_SEEDS).logits(tokens, [4, 1, 1])
        for criterion in criteria(adapter):
            bench = StageBench(adapter, seeds=_SEEDS)
            parts = []
            for start, stop in ((0, 4), (4, 5), (5, 6)):
                ctx = bench.context(start, stop - start)
                state, score = bench.prelude(tokens[:, start:stop], ctx), None
                for index in range(bench.full_loops):
                    before = copy.deepcopy(state)
                    state = bench.loop(state, index, ctx)
                    score = bench.exit_score(criterion.name, state, before, score, index, ctx)
                parts.append(bench.readout(state, ctx))
            self.assert_close(torch.cat(parts, dim=1), expected, f"logits with {criterion.name}")

    def test_scoring_writes_readout_planes_at_most(self, adapter: ModelAdapter) -> None:
        planes = adapter.kv_planes(adapter.geometry.default_full_loops)
        allowed = set() if adapter.capabilities.shadow_depths else {"readout"}
        for criterion in criteria(adapter):
            bench = StageBench(adapter, seeds=_SEEDS)
            _scores_on(bench, criterion.name, self.sample_tokens(adapter, 2, _TOKENS))
            scored = [write for write in bench.writes if write.stage == "exit_score"]
            assert {planes[write.plane].kind for write in scored} <= allowed, criterion.name

    def test_an_exit_that_is_never_reached_changes_no_text(self, adapter: ModelAdapter) -> None:
        depth = adapter.geometry.default_full_loops
        for criterion in criteria(adapter):
            rule = ExitRule(criterion.name, math.inf, 1, depth)
            self.assert_lossless(adapter, small_engine(adapter, exit_rule=rule), (0, 1, 2))

    def test_texts_with_early_exit_do_not_depend_on_the_batch(self, adapter: ModelAdapter) -> None:
        depth = adapter.geometry.default_full_loops
        for criterion in criteria(adapter):
            scores = _scores(adapter, criterion.name, self.sample_tokens(adapter, 2, _TOKENS))
            middle = [score.median().item() for score in scores[:-1]][depth // 3 : depth // 3 + 1]
            threshold = next(filter(math.isfinite, middle), criterion.default_threshold)
            rule = ExitRule(criterion.name, threshold, 1, depth)
            together = self.run(adapter, small_engine(adapter, exit_rule=rule), (0, 1, 2))
            for number, request in enumerate(together):
                (alone,) = self.run(adapter, small_engine(adapter, exit_rule=rule), (number,))
                assert request.output_token_ids == alone.output_token_ids, criterion.name

    def test_an_unknown_criterion_is_refused(self, adapter: ModelAdapter) -> None:
        with pytest.raises(UnsupportedError):
            _scores(adapter, "no such criterion", self.sample_tokens(adapter, 2, _TOKENS))

    def test_what_is_not_declared_cannot_be_scored(self, adapter: ModelAdapter) -> None:
        if adapter.capabilities.early_exit:
            pytest.skip("capability early_exit: declared")
        for name in ("", "gate", "kl"):
            with pytest.raises(UnsupportedError):
                _scores(adapter, name, self.sample_tokens(adapter, 2, _TOKENS))


def _scores(
    adapter: ModelAdapter, criterion: str, tokens: Tensor, seeds: tuple[int, ...] = _SEEDS
) -> list[Tensor]:
    """Return the scores [B, T] after every loop."""
    return _scores_on(StageBench(adapter, seeds=seeds), criterion, tokens)


def _scores_on(bench: StageBench, criterion: str, tokens: Tensor) -> list[Tensor]:
    ctx = bench.context(0, tokens.shape[1])
    state = bench.prelude(tokens, ctx)
    scores: list[Tensor] = []
    for index in range(bench.full_loops):
        before, state = state, bench.loop(state, index, ctx)
        last = scores[-1] if scores else None
        scores.append(bench.exit_score(criterion, state, before, last, index, ctx))
    return scores
