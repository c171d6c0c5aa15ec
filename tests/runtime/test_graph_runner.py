"""Rounds run as captured where their shape was, and eagerly, counted, where it was not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from recorded_graphs import Recorded, out_of_memory
from toys import PROMPTS, assert_all_free, oracle_text, run_to_end, shared_toy

from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.static import StaticPolicy
from looped_spec.runtime.graphs import GraphRunner
from looped_spec.runtime.round_program import RoundShape
from looped_spec.runtime.sampler import SamplingMode
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.rounds import everything, make_program, randomize

LOOPS = 3
ROWS = 4
GREEDY, RANDOM, FILTERED = SamplingMode.GREEDY, SamplingMode.RANDOM, SamplingMode.FILTERED
DRAFTING = Candidate(2, 1)
SHAPES = [
    RoundShape.of(size, candidate, mode)
    for size in (2, 4)
    for candidate in (PLAIN, DRAFTING)
    for mode in (GREEDY, FILTERED)
]


def runner_with(backend: Recorded, **options: Any) -> GraphRunner:
    program = make_program(shared_toy(full_loops=LOOPS), LOOPS)
    return GraphRunner(program, backend, sizes=(2, 4), **options)


def capture(runner: GraphRunner, shapes: list[RoundShape] = SHAPES) -> None:
    runner.capture(shapes, show_progress=False)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", [GREEDY, RANDOM, FILTERED])
@torch.inference_mode()
def test_a_round_is_padded_and_replayed(size: int, mode: SamplingMode) -> None:
    backend = Recorded()
    runner = runner_with(backend)
    capture(runner)
    plain = make_program(shared_toy(full_loops=LOOPS), LOOPS)
    for program in (runner.program, plain):
        randomize(program, size, seed=1)
    shape = RoundShape.of(size, DRAFTING, mode)
    assert runner.covers(shape)
    got, want = runner.run(shape), plain(shape, has_padding=False)
    if mode is not RANDOM:  # rows of a batch of that mode have no filters, but these have
        assert torch.equal(got, want)
    assert got.shape == (size, DRAFTING.num_speculative_tokens + 2)
    assert backend.replays == runner.stats.replays == 1 and not runner.stats.eager_rounds


@pytest.mark.parametrize(
    "shape",
    [
        RoundShape.of(2, Candidate(3, 1), GREEDY),
        RoundShape.of(2, Candidate(2, 2), GREEDY),
        RoundShape(5, 0, 0, GREEDY),
    ],
)
def test_what_was_not_captured_is_not_captured_when_it_is_asked_for(shape: RoundShape) -> None:
    backend = Recorded()
    runner = runner_with(backend)
    capture(runner)
    assert not runner.covers(shape)
    if shape.batch_size <= ROWS:
        randomize(runner.program, shape.batch_size, seed=2)
        with torch.inference_mode():
            runner.run(shape)
        assert runner.stats.eager_rounds == {"not captured": 1}
    assert backend.captures == len(SHAPES) and backend.replays == 0


def test_shapes_are_captured_once_and_largest_first() -> None:
    order: list[int] = []

    class Ordered(Recorded):
        def capture(self, function: Any, tensors: Any) -> Any:
            batch = runner.program.state.batch
            assert torch.all(batch == runner.program.state.padding_row), "a warm-up does no harm"
            replay = super().capture(function, tensors)
            order.append(len(runner.captured_shapes))
            return replay

    runner = runner_with(Ordered())
    capture(runner)
    assert order == list(range(len(SHAPES)))
    before = [runner._captured[shape] for shape in SHAPES]
    capture(runner, [*SHAPES, RoundShape.of(4, Candidate(3, 1), GREEDY)])
    assert len(order) == len(SHAPES) + 1
    assert [runner._captured[shape] for shape in SHAPES] == before
    sizes = [shape.num_rows for shape in runner._captured]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)


@torch.inference_mode()
def test_capturing_touches_nothing_but_the_trash_block() -> None:
    runner = runner_with(Recorded())
    randomize(runner.program, 3, seed=4)
    runner.program.state.empty_batch()
    before = everything(runner.program)
    capture(runner)
    for old, new in zip(before, everything(runner.program), strict=True):
        assert torch.equal(old, new)


def test_over_the_limit_shapes_are_given_up_named_and_run_eagerly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Recorded(free=1000, cost=100)
    runner = runner_with(backend, memory_limit=250)
    with caplog.at_level(logging.WARNING):
        capture(runner)
    stats = runner.stats.as_dict()
    assert stats["captured"] == 3 and stats["num_bytes"] == 300
    assert len(stats["given_up"]) == len(SHAPES) - 3
    assert stats["given_up"][-1] == "B=2 K=0 greedy"
    assert "5 of 8 rounds were not captured" in caplog.text and "B=2 K=0 greedy" in caplog.text
    randomize(runner.program, 2, seed=2)
    with torch.inference_mode():
        runner.run(RoundShape.of(2, PLAIN, GREEDY))
    assert runner.stats.eager_rounds == {"not captured": 1}


def test_half_of_the_free_memory_is_the_limit_where_none_is_given() -> None:
    runner = runner_with(Recorded(free=1000, cost=250))
    capture(runner)
    assert runner.stats.captured == 2


def test_running_out_of_memory_gives_up_the_shape_and_the_rest() -> None:
    backend = Recorded()
    backend.error, backend.fails_at = out_of_memory(), 2
    runner = runner_with(backend)
    capture(runner)
    assert runner.stats.captured == 2 and len(runner.stats.given_up) == 6
    assert runner.stats.failure is None and backend.releases == 1


def test_another_error_is_raised_or_leaves_all_rounds_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for may_fail in (False, True):
        backend = Recorded()
        backend.error, backend.fails_at = RuntimeError("operation not permitted"), 0
        runner = runner_with(backend, may_fail=may_fail)
        if not may_fail:
            with pytest.raises(RuntimeError, match="not permitted"):
                capture(runner)
            continue
        capture(runner)
        assert not runner.is_active and not runner.captured_shapes
        assert runner.stats.failure == "RuntimeError: operation not permitted"
        assert "enforce_eager=True" in caplog.text
        capture(runner)
        assert backend.captures == 0, "it is not tried again"


@pytest.mark.parametrize("may_fail", [False, True])
def test_a_capture_that_breaks_off_behind_others_leaves_those(
    may_fail: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that runs out inside a capture may be told of as an invalid capture."""
    backend = Recorded()
    backend.error, backend.fails_at = RuntimeError("CUDA error: capture invalidated"), 2
    runner = runner_with(backend, may_fail=may_fail)
    capture(runner)
    assert runner.is_active and len(runner.captured_shapes) == 2
    assert len(runner.stats.given_up) == 6 and runner.stats.failure is None
    assert "6 of 8 rounds were not captured" in caplog.text
    assert "RuntimeError: CUDA error: capture invalidated" in caplog.text


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=18),
    SamplingParams(temperature=0.9, seed=5, max_tokens=11),
    SamplingParams(temperature=0.8, top_p=0.8, top_k=20, seed=6, max_tokens=15),
]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("k", "d"), [(0, 0), (2, 1), (4, 3)])
def test_requests_that_come_and_go_get_their_text_over_captured_rounds(
    k: int, d: int, async_scheduling: bool
) -> None:
    backend = Recorded()
    engine = make_engine(
        shared_toy(),
        num_speculative_tokens=k,
        draft_loops=d,
        graph_backend=backend,
        max_num_seqs=3,
        async_scheduling=async_scheduling,
    )
    captures = backend.captures
    requests = []
    for prompt, params in [*zip(PROMPTS, PARAMS, strict=True), (PROMPTS[0], PARAMS[2])]:
        requests.append((engine.add_request(prompt, params), prompt, params))
        for _ in range(3):
            engine.step()
    run_to_end(engine)
    for request, prompt, params in requests:
        assert request.output_token_ids == oracle_text(prompt, params)
    assert_all_free(engine)
    stats = engine.runner.graphs.stats
    assert stats.replays == backend.replays > 10 and not stats.eager_rounds
    assert backend.captures == captures, "never while a request runs"


def test_a_smaller_candidate_runs_over_buffers_of_the_largest() -> None:
    engine = make_engine(
        shared_toy(), num_speculative_tokens=6, draft_loops=2, graph_backend=Recorded()
    )
    small = Candidate(2, 1)
    engine.runner.capture([RoundShape.of(4, small, FILTERED)], show_progress=False)
    engine.policy = StaticPolicy(small)
    requests = [engine.add_request(p, one) for p, one in zip(PROMPTS, PARAMS, strict=True)]
    run_to_end(engine)
    for request, prompt, params in zip(requests, PROMPTS, PARAMS, strict=True):
        assert request.output_token_ids == oracle_text(prompt, params)
    assert engine.runner.graphs.stats.replays > 0


class InTurn:
    """Plans a captured and an uncaptured candidate in turn."""

    def __init__(self, *candidates: Candidate) -> None:
        self.candidates = candidates
        self.num_plans = 0

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        self.num_plans += 1
        number = self.num_plans
        return SpeculationPlan(number, self.candidates[number // 2 % len(self.candidates)])

    def observe(self, feedback: RoundFeedback) -> None: ...


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_captured_and_eager_rounds_go_on_where_the_other_kind_has_left_the_rows(
    async_scheduling: bool,
) -> None:
    engine = make_engine(
        shared_toy(),
        num_speculative_tokens=2,
        draft_loops=1,
        graph_backend=Recorded(),
        max_num_seqs=3,
        async_scheduling=async_scheduling,
    )
    engine.policy = InTurn(Candidate(2, 1), Candidate(1, 2), PLAIN)
    engine.candidates = frozenset({Candidate(2, 1), Candidate(1, 2), PLAIN})
    requests = []
    for prompt, params in [*zip(PROMPTS, PARAMS, strict=True), (PROMPTS[0], PARAMS[2])]:
        requests.append((engine.add_request(prompt, params), prompt, params))
        for _ in range(2):
            engine.step()
    run_to_end(engine)
    for request, prompt, params in requests:
        assert request.output_token_ids == oracle_text(prompt, params)
    stats = engine.runner.graphs.stats
    assert stats.replays > 5 and stats.eager_rounds["not captured"] > 3
