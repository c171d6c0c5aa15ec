"""Exit criteria of Huginn: their values and thresholds, and that they leave the cache in order."""

from __future__ import annotations

import pytest
import torch
from golden import golden_prompts
from huginn_contexts import BLOCK_SIZE, make_pool, paged
from huginn_models import FOLDERS, continuation, load
from looped_spec_huginn.adapter import HuginnAdapter
from looped_spec_huginn.plugin import CAPABILITIES
from torch import Tensor

from looped_spec import SamplingParams
from looped_spec.adapter import LoopState, StageContext
from looped_spec.errors import UnsupportedError
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits

CRITERIA = [criterion.name for criterion in CAPABILITIES.early_exit]
TOKENS = golden_prompts(FOLDERS[0])[0].sequence("greedy_full_depth_zero_init")[:12]
LOOPS = 8


@pytest.fixture(scope="module")
def adapter() -> HuginnAdapter:
    """A golden checkpoint that starts from zeros."""
    return load()


@torch.no_grad()
def scores_of(adapter: HuginnAdapter, criterion: str) -> tuple[Tensor, list[Tensor]]:
    """Return scores [LOOPS, T], and the states [T, E] before the first and after each loop."""
    ctx = DenseContext(1, len(TOKENS), LOOPS)
    state = adapter.prelude(torch.tensor([TOKENS]), ctx)
    states, scores = [state[0][0]], []
    score = None
    for index in range(LOOPS):
        previous, state = state, adapter.loop(state, index, ctx)
        score = adapter.exit_score(criterion, state, previous, score, index, ctx)
        assert score.dtype == torch.float32
        assert score.shape == (1, len(TOKENS))
        scores.append(score[0])
        states.append(state[0][0])
    return torch.stack(scores), states


def distributions(adapter: HuginnAdapter) -> Tensor:
    """Return what each depth predicts, float64 [LOOPS, T, V], from whole runs of that depth."""
    logits = [dense_logits(adapter, TOKENS, loops) for loops in range(1, LOOPS + 1)]
    return torch.stack(logits).double().softmax(dim=-1)


def test_default_thresholds_are_the_official_ones_negated_where_small_means_ready() -> None:
    thresholds = {c.name: c.default_threshold for c in CAPABILITIES.early_exit}
    assert thresholds == {
        "latent-diff": -0.03,
        "entropy-diff": -1e-3,
        "kl": -1e-3,
        "argmax-stability": 5.0,
    }
    assert not CAPABILITIES.shadow_depths


def test_latent_diff_is_the_relative_step_of_the_state(adapter: HuginnAdapter) -> None:
    scores, states = scores_of(adapter, "latent-diff")
    for index in range(LOOPS):
        before, now = states[index].double(), states[index + 1].double()
        expected = -(now - before).norm(dim=-1) / now.norm(dim=-1)
        torch.testing.assert_close(scores[index].double(), expected, atol=1e-6, rtol=0)
    assert bool((scores[0] == -1.0).all()), "from zeros the first step is the whole state"


def test_entropy_diff_is_the_change_of_entropy(adapter: HuginnAdapter) -> None:
    scores, _ = scores_of(adapter, "entropy-diff")
    entropy = torch.special.entr(distributions(adapter)).sum(dim=-1)
    expected = -(entropy[1:] - entropy[:-1]).abs()
    torch.testing.assert_close(scores[1:].double(), expected, atol=1e-5, rtol=0)
    assert bool(torch.isneginf(scores[0]).all())


def test_kl_is_measured_from_the_previous_to_the_present_prediction(
    adapter: HuginnAdapter,
) -> None:
    scores, _ = scores_of(adapter, "kl")
    p = distributions(adapter)
    expected = -(p[:-1] * (p[:-1] / p[1:]).log()).sum(dim=-1)
    torch.testing.assert_close(scores[1:].double(), expected, atol=1e-5, rtol=0)
    assert bool(torch.isneginf(scores[0]).all())


def test_argmax_stability_counts_comparisons_without_a_change(adapter: HuginnAdapter) -> None:
    scores, _ = scores_of(adapter, "argmax-stability")
    tops = distributions(adapter).argmax(dim=-1)
    count = torch.zeros(len(TOKENS))
    for index in range(LOOPS):
        if index:
            count = torch.where(tops[index] == tops[index - 1], count + 1, 0.0)
        assert torch.equal(scores[index], count)
    assert float(scores[-1].max()) > 0
    assert float(scores[1:].min()) == 0, "a case where nothing changes shows nothing"


@pytest.mark.parametrize("criterion", CRITERIA)
@torch.no_grad()
def test_scoring_writes_no_plane_but_the_codas_and_no_rows_but_its_own(
    adapter: HuginnAdapter, criterion: str
) -> None:
    pool = make_pool(adapter, LOOPS)
    for start, stop in ((0, 9), (9, 12)):
        ctx = paged(pool, start, stop, LOOPS)
        state = adapter.prelude(torch.tensor([TOKENS[start:stop]]), ctx)
        score = None
        for index in range(LOOPS):
            previous, state = state, adapter.loop(state, index, ctx)
            before = [[t.clone() for t in pair] for pair in pool.planes]
            score = adapter.exit_score(criterion, state, previous, score, index, ctx)
            for plane, (old, new) in enumerate(zip(before, pool.planes, strict=True)):
                for was, now in zip(old, new, strict=True):
                    changed = (was != now).flatten(2).any(dim=-1).flatten()
                    slots = (changed.nonzero().flatten() - BLOCK_SIZE).tolist()  # less the trash
                    if adapter.kv_planes(LOOPS)[plane].kind == "readout" and index:
                        assert set(slots) <= set(range(start, stop))
                        assert bool(slots) == (criterion != "latent-diff")
                    else:
                        assert slots == []
        logits = adapter.readout(state, ctx)[0]
        expected = dense_logits(adapter, TOKENS[:stop], LOOPS)[start:]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_scoring_after_every_loop_changes_no_text(criterion: str) -> None:
    class Scored(HuginnAdapter):
        def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
            after = super().loop(state, index, ctx)
            score = torch.ones(state[0].shape[:2]) if index else None
            self.exit_score(criterion, after, state, score, index, ctx)
            return after

    case = golden_prompts(FOLDERS[1])[0]
    engine = make_engine(
        load(FOLDERS[1], adapter_class=Scored), num_speculative_tokens=2, draft_loops=2
    )
    params = SamplingParams(temperature=0.0, max_tokens=len(continuation(case)))
    assert run_all(engine, [case.prompt], params)[0].output_token_ids == continuation(case)


def test_an_unknown_criterion_is_refused_with_the_nearest(adapter: HuginnAdapter) -> None:
    ctx = DenseContext(1, 1, 1)
    state = (torch.zeros(1, 1, 64), torch.zeros(1, 1, 64))
    with pytest.raises(UnsupportedError, match=r"latent-diff, .* got 'latent_diff' \(did you mean"):
        adapter.exit_score("latent_diff", state, state, None, 0, ctx)
