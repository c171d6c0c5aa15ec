"""Closed loads on the toy: they are what they say, and their times are those of the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.load import Phase, Profile
from looped_spec.offline.load_record import request_hash, run_record, timeline
from looped_spec.offline.load_run import LoadRun, Served, Step, drive
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.toy import make_toy

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


def ticking() -> Callable[[], float]:
    """Return a clock that goes on by a second whenever it is read."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    return clock


def watched(engine: Engine) -> list[int]:
    """Return a list that gets the number of requests of each step."""
    sizes: list[int] = []
    step = engine.step

    def counted() -> Any:
        done = step()
        sizes.append(len(done))
        return done

    engine.step = counted  # type: ignore[method-assign,assignment]
    return sizes


def test_a_load_keeps_as_many_requests_running_as_each_phase_says() -> None:
    engine = make_engine(make_toy(), max_num_seqs=8, num_speculative_tokens=2, draft_loops=1)
    load = Profile("up and down", "ramp", (Phase(1, 2), Phase(5, 10), Phase(2, 4)))
    prompts = [[1 + i, 2] for i in range(16)]
    sizes = watched(engine)
    run = drive(engine, load, prompts, PARAMS)
    assert sizes[0] == 1 and max(sizes) == 5
    top = [place for place, size in enumerate(sizes) if size == 5]
    assert len(top) > 3 and set(sizes[: top[0]]) == {1}
    alone = run_all(make_engine(make_toy(), max_num_seqs=1), prompts, PARAMS)
    assert run.token_ids == [request.output_token_ids for request in alone]
    assert len(run.phase_seconds) == 3
    assert sum(run.phase_seconds) == pytest.approx(run.seconds, abs=1e-3)
    assert not engine.has_work


def test_a_load_that_drains_ends_every_request_of_a_phase_first() -> None:
    up = (Phase(1, 1), Phase(3, 3))
    prompts = [[1 + i] for i in range(4)]
    engine = make_engine(make_toy(), max_num_seqs=4)
    overlapping = drive(engine, Profile("x", "ramp", up), prompts, PARAMS)
    draining = drive(engine, Profile("x", "ramp", up, True), prompts, PARAMS)
    assert overlapping.served[1].added < overlapping.served[0].last
    assert draining.served[1].added > draining.served[0].last
    assert overlapping.token_ids == draining.token_ids


def test_what_fails_in_the_middle_leaves_the_engine_empty() -> None:
    engine = make_engine(make_toy(), max_num_seqs=4)
    step, steps = engine.step, []

    def interrupted() -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step()

    engine.step = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        drive(engine, Profile.parse("fixed:3", 2), [[1], [2], [3]] * 2, PARAMS)
    engine.step = step  # type: ignore[method-assign]
    assert not engine.has_work
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks
    again = drive(engine, Profile.parse("fixed:3"), [[1], [2], [3]], PARAMS)
    alone = run_all(make_engine(make_toy()), [[1], [2], [3]], PARAMS)
    assert again.token_ids == [request.output_token_ids for request in alone]


def test_times_are_those_of_the_clock() -> None:
    run = drive(
        make_engine(make_toy()), Profile.parse("fixed:1"), [[5, 6]], PARAMS, clock=ticking()
    )
    # The clock is read for the phase, the request, and after each step: the prompt, then 5 tokens.
    assert [step.end for step in run.steps] == [3, 4, 5, 6, 7, 8]
    assert [step.batch_size for step in run.steps] == [0, 1, 1, 1, 1, 1]
    assert [step.num_tokens for step in run.steps] == [1] * 6
    record = run_record(run, 0, None)
    assert (record["duration"], record["total_input"], record["total_output"]) == (6, 2, 6)
    assert record["output_throughput"] == 1 and record["total_token_throughput"] == 8 / 6
    assert record["median_ttft_ms"] == 1000 and record["median_itl_ms"] == 1000
    assert record["median_tpot_ms"] == 1000 and record["mean_e2el_ms"] == 6000
    assert record["off_share"] == 1.0 and record["mean_acceptance_length"] == 1.0


def test_a_record_counts_the_requests_that_differ_from_plain_decoding() -> None:
    run = LoadRun(
        0.0,
        [0.0],
        [Step(2.0, Candidate(2, 1), 2, 4)],
        [Served(0.0, 1.0, 2.0, 2), Served(0.0, 1.0, 2.0, 2)],
        SpeculationMetrics(),
        [[1, 2], [3, 4]],
        7,
    )
    expected = [request_hash([1, 2]), request_hash([3, 5])]
    assert run_record(run, 3, expected)["identical_requests"] == 1
    assert run_record(run, 3, expected)["switches"] == 3
    assert run_record(run, 3, None)["identical_requests"] == 2
    assert request_hash([1, 23]) != request_hash([12, 3])


def test_off_time_is_the_share_of_rounds_that_did_not_draft() -> None:
    steps = [
        Step(1.0, PLAIN, 0, 1),  # only a prompt: no round
        Step(2.0, PLAIN, 1, 1),
        Step(5.0, Candidate(2, 1), 1, 3),
    ]
    run = LoadRun(0.0, [0.0], steps, [], SpeculationMetrics(), [[1]], 1)
    assert run.off_share() == pytest.approx(0.25)


def test_time_by_a_table_is_that_of_the_rounds_alone() -> None:
    drafted = Step(5.0, Candidate(2, 1), 3, 3, 7)
    steps = [Step(1.0, PLAIN, 0, 1, 5), Step(2.0, PLAIN, 1, 1, 9), drafted]
    run = LoadRun(0.0, [0.0], steps, [], SpeculationMetrics(), [[1]], 1)
    table = {(1, 9, PLAIN): 4.0, (3, 7, Candidate(2, 1)): 7.0}
    assert run.table_seconds(lambda *shape: table[shape]) == pytest.approx(0.011)
    assert run_record(run, 0, None)["table_seconds"] is None


def test_steps_hold_the_context_that_their_round_was_chosen_for() -> None:
    engine = make_engine(make_toy(), max_num_seqs=2)
    run = drive(engine, Profile.parse("fixed:2"), [[5] * 4, [6] * 9], PARAMS, clock=ticking())
    assert [s.context_tokens for s in run.steps if s.batch_size == 2] == [10, 11, 12, 13, 14]


def test_a_step_holds_the_candidate_that_ran_where_a_round_is_cut_short() -> None:
    engine = make_engine(make_toy(), num_speculative_tokens=5, draft_loops=1)
    engine.candidates = frozenset({Candidate(5, 1), Candidate(1, 1), PLAIN})
    run = drive(engine, Profile.parse("fixed:1"), [[5, 6]], PARAMS)
    left, ran = PARAMS.max_tokens - 1, []
    for step in run.steps[1:]:
        longest = Candidate(5, 1) if left - 1 > 1 else Candidate(1, 1) if left == 2 else PLAIN
        ran.append(step.ran == longest)
        left -= step.num_tokens
    assert ran and all(ran)
    assert {step.candidate for step in run.steps[1:]} == {Candidate(5, 1)}
    assert {step.ran for step in run.steps[1:]} != {Candidate(5, 1)}


def test_a_timeline_spreads_tokens_over_the_rounds_that_gave_them() -> None:
    steps = [Step(1.0, PLAIN, 0, 2), Step(2.0, Candidate(2, 1), 3, 4)]
    steps += [Step(3.0, PLAIN, 1, 1), Step(4.0, PLAIN, 1, 1)]
    run = LoadRun(0.0, [0.0], steps, [], SpeculationMetrics(), [[1]], 1)
    line = timeline(run, bins=4)
    assert line["seconds"] == [0.5, 1.5, 2.5, 3.5]
    assert line["output_throughput"] == pytest.approx([2, 4, 1, 1])
    assert line["num_speculative_tokens"][0] is None
    assert line["batch_size"][2:] == [1, 1]
    assert line["draft_loops"][3] is None and line["draft_loops"][1] == 1
