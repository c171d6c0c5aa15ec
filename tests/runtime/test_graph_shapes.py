"""What is captured is what can be run, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.graphs import padded_sizes, reachable_shapes
from looped_spec.runtime.graphs.shapes import CAPTURED_MODES, pad
from looped_spec.runtime.round_program import RoundShape
from looped_spec.runtime.sampler import SamplingMode

GREEDY = (SamplingMode.GREEDY,)


@pytest.mark.parametrize(
    ("most", "given_sizes", "sizes"),
    [
        (1, (), (1,)),
        (3, (), (1, 2, 3)),
        (8, (), (1, 2, 4, 8)),
        (20, (), (1, 2, 4, 8, 16, 20)),
        (32, (), (1, 2, 4, 8, 16, 24, 32)),
        (32, (1, 12), (1, 12)),
        (6, (4, 16, 64), (4, 6)),
    ],
)
def test_sizes_are_those_given_or_rise_by_8(
    most: int, given_sizes: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert padded_sizes(most, given_sizes) == sizes


@pytest.mark.parametrize(("batch", "size"), [(1, 1), (2, 4), (4, 4), (5, 6), (6, 6), (7, None)])
def test_a_batch_is_padded_to_the_next_size(batch: int, size: int | None) -> None:
    assert pad(batch, (1, 4, 6)) == size


def test_shapes_come_largest_first_with_plain_decoding_at_every_size() -> None:
    config = AdaptiveSpecConfig.pinned(Candidate(3, 1), 4, 2)
    shapes = reachable_shapes(config, (1, 2), GREEDY)
    assert shapes == [
        RoundShape.of(size, candidate, SamplingMode.GREEDY)
        for size, candidate in ((2, Candidate(3, 1)), (1, Candidate(3, 1)), (2, PLAIN), (1, PLAIN))
    ]


def test_candidates_of_one_bucket_are_not_captured_at_the_sizes_of_another() -> None:
    low = BatchBucket(1, 2, (Candidate(4, 2),))
    high = BatchBucket(3, 32, (Candidate(1, 1),))
    config = AdaptiveSpecConfig(4, (low, high))
    shapes = reachable_shapes(config, padded_sizes(32), GREEDY)
    pairs = {(s.batch_size, s.num_speculative_tokens) for s in shapes}
    assert {size for size, k in pairs if k == 4} == {1, 2}
    # A batch that shrank stays with its bucket for a while, one below the edge.
    assert {size for size, k in pairs if k == 1} == {2, 4, 8, 16, 24, 32}
    assert {size for size, k in pairs if k == 0} == {1, 2, 4, 8, 16, 24, 32}


class Ending:
    """A request that may get so many tokens yet; all that `Engine._fitting` asks."""

    def __init__(self, remaining_tokens: int) -> None:
        self.remaining_tokens = remaining_tokens


@given(st.integers(0, 2**16), st.sampled_from(["goodput", "ema", "static"]))
def test_no_round_of_a_controller_is_outside_of_what_is_captured(seed: int, policy: str) -> None:
    dice = random.Random(seed)
    most = dice.choice([1, 3, 9, 24])
    config = AdaptiveSpecConfig.default(4, most, policy=policy)
    sizes = padded_sizes(most)
    shapes = set(reachable_shapes(config, sizes, GREEDY))
    controller = AdaptiveController(config)
    engine: Any = Engine.__new__(Engine)
    engine.candidates = frozenset(config.candidates)
    batch = 1
    for _ in range(60):
        batch = min(max(batch + dice.choice([-9, -1, -1, 0, 0, 1, 1, 5]), 1), most)
        plan = controller.plan(batch, context_tokens=50)
        ending: Any = [Ending(dice.randrange(1, 12)) for _ in range(batch)]
        unread = dice.randrange(2) if min(r.remaining_tokens for r in ending) > 1 else 0
        candidate = engine._fitting(plan.candidate, ending, num_unread=unread)
        size = pad(batch, sizes)
        assert size is not None
        assert RoundShape.of(size, candidate, SamplingMode.GREEDY) in shapes
        k = plan.candidate.num_speculative_tokens
        accepted = tuple(dice.randrange(k + 1) for _ in range(batch))
        controller.observe(RoundFeedback(plan.plan_id, (k,) * batch, accepted, 0.01))


def test_every_batch_finds_a_captured_mode_that_suffices_for_it() -> None:
    for mode in SamplingMode:
        assert any(captured.value >= mode.value for captured in CAPTURED_MODES)
    assert SamplingMode.GREEDY in CAPTURED_MODES, "most batches, and by far the cheapest"
