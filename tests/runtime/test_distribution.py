"""Whole speculative output follows the target's own distribution, drafts of whatever quality."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from toys import chi_square, shared_toy

from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits

SMALL = {"vocab_size": 4, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
PROMPT = [1, 3]
LENGTH = 3  # the first token comes from prefill, the others from rounds
SEEDS = 3000


@functools.cache
def exact_distribution() -> torch.Tensor:
    """Probability of every continuation of LENGTH tokens, by the chain rule over dense logits."""
    adapter = shared_toy(**SMALL, full_loops=2, num_layers=1)
    joint = torch.ones((4,) * LENGTH, dtype=torch.float64)
    for prefix_length in range(LENGTH):
        for prefix in itertools.product(range(4), repeat=prefix_length):
            logits = dense_logits(adapter, [*PROMPT, *prefix], 2)[-1]
            shape = (4, *(1,) * (LENGTH - prefix_length - 1))
            joint[prefix] *= logits.double().softmax(-1).view(shape)
    return joint.flatten()


@pytest.mark.parametrize("k", [0, 2, 3])
def test_the_joint_distribution_of_the_first_tokens_is_exact(k: int) -> None:
    adapter = shared_toy(**SMALL, full_loops=2, num_layers=1)
    engine = make_engine(
        adapter,
        num_speculative_tokens=k,
        draft_loops=1 if k else 0,
        max_num_seqs=500,
        max_num_batched_tokens=4000,
        max_model_len=8,
        seed=k,
    )
    requests = run_all(engine, [PROMPT] * SEEDS, SamplingParams(max_tokens=LENGTH))
    places = torch.tensor([4**i for i in reversed(range(LENGTH))])
    cells = (torch.tensor([r.output_token_ids for r in requests]) * places).sum(-1)
    counts = torch.bincount(cells, minlength=4**LENGTH)
    statistic, quantile = chi_square(counts, exact_distribution())
    assert statistic < quantile
    if k:
        assert 0.1 < engine.metrics.draft_acceptance_rate < 0.95  # type: ignore[operator]


def test_the_check_would_notice_a_wrong_distribution() -> None:
    exact = exact_distribution()
    drawn = torch.multinomial(
        exact.roll(1), SEEDS, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    statistic, quantile = chi_square(torch.bincount(drawn, minlength=4**LENGTH), exact)
    assert statistic > quantile
