"""A model or a detokenizer that raises leaves an engine that can be cleared and used again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from toys import GREEDY, PROMPTS, assert_all_free, like, oracle_text, run_to_end

from looped_spec.adapter import LoopState, StageContext
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.toy import ToyAdapter, make_toy


class BrokenError(Exception):
    """What the broken parts raise."""


class BreakingToy(ToyAdapter):
    """A toy that raises in its `fail_at`-th loop from now, once."""

    fail_at: int | None = None

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise BrokenError
        return super().loop(state, index, ctx)


class BreakingDetokenizer:
    """Raises at its `fail_at`-th token, and when it is asked to flush."""

    def __init__(self, fail_at: int, fail_flush: bool = False) -> None:
        self.fail_at, self.fail_flush = fail_at, fail_flush

    def append(self, token_id: int) -> str:
        self.fail_at -= 1
        if self.fail_at < 0:
            raise BrokenError
        return "x"

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join([self.append(token_id) for token_id in token_ids])

    def flush(self) -> str:
        if self.fail_flush:
            raise BrokenError
        return ""


def engine_of(adapter: ToyAdapter, **setup: Any) -> Any:
    return make_engine(
        adapter, num_speculative_tokens=2, draft_loops=1, max_num_batched_tokens=8, **setup
    )


@pytest.mark.parametrize("fail_at", range(0, 60, 3))
def test_aborting_after_a_failure_anywhere_frees_all_and_the_engine_goes_on(fail_at: int) -> None:
    adapter = like(BreakingToy)
    engine = engine_of(adapter, num_blocks=14)
    requests = [engine.add_request(p, GREEDY) for p in PROMPTS]
    adapter.fail_at = fail_at
    with pytest.raises(BrokenError):
        run_to_end(engine)
    for request in requests:
        if request.finish_reason is None:
            engine.abort(request)
    assert_all_free(engine)

    again = [engine.add_request(p, GREEDY) for p in PROMPTS]
    run_to_end(engine)
    assert [r.output_token_ids for r in again] == [oracle_text(p, GREEDY) for p in PROMPTS]


@pytest.mark.parametrize("fail_at", range(1, 60, 5))
def test_a_step_that_failed_may_be_tried_again(fail_at: int) -> None:
    adapter = like(BreakingToy)
    engine = engine_of(adapter, num_blocks=14)
    requests = [engine.add_request(p, GREEDY) for p in PROMPTS]
    adapter.fail_at = fail_at
    with pytest.raises(BrokenError):
        run_to_end(engine)
    run_to_end(engine)
    assert [r.output_token_ids for r in requests] == [oracle_text(p, GREEDY) for p in PROMPTS]
    assert_all_free(engine)


def test_a_request_that_ends_in_a_step_that_fails_later_holds_nothing() -> None:
    adapter = like(BreakingToy)
    engine = engine_of(adapter)
    running = engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    short = engine.add_request(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=1))
    adapter.fail_at = 4  # behind the prefill of `short`, in the round of `running`
    with pytest.raises(BrokenError):
        engine.step()
    assert short.finish_reason == "length"
    assert short.row == -1 and not short.blocks
    engine.abort(running)
    assert_all_free(engine)


@pytest.mark.parametrize("fail_at", [0, 1, 3, 4])
@pytest.mark.parametrize("fail_flush", [False, True])
def test_a_detokenizer_that_fails_leaks_nothing(fail_at: int, fail_flush: bool) -> None:
    engine = engine_of(like(BreakingToy))
    good = engine.add_request(PROMPTS[0], GREEDY)
    # With a stop string the text is looked at after every token.
    params = dataclasses.replace(GREEDY, stop="never")
    bad = engine.add_request(
        PROMPTS[1], params, detokenizer=BreakingDetokenizer(fail_at, fail_flush)
    )
    with pytest.raises(BrokenError):
        run_to_end(engine)
    if fail_flush:
        with pytest.raises(BrokenError):
            engine.abort(bad)
    else:
        engine.abort(bad)
    assert bad.finish_reason == "abort"
    run_to_end(engine)
    assert good.output_token_ids == oracle_text(PROMPTS[0], GREEDY)
    assert_all_free(engine)


def test_text_that_cannot_be_made_at_the_end_of_a_request_leaks_nothing() -> None:
    engine = engine_of(like(BreakingToy))
    good = engine.add_request(PROMPTS[0], GREEDY)
    bad = engine.add_request(PROMPTS[1], GREEDY, detokenizer=BreakingDetokenizer(3))
    with pytest.raises(BrokenError):
        run_to_end(engine)
    assert bad.finish_reason == "length" and len(bad.output_token_ids) == 16
    run_to_end(engine)
    assert good.output_token_ids == oracle_text(PROMPTS[0], GREEDY)
    assert_all_free(engine)


def test_a_flush_that_fails_at_the_end_of_a_request_leaks_nothing() -> None:
    engine = engine_of(like(BreakingToy))
    params = SamplingParams(temperature=0.0, max_tokens=4)
    request = engine.add_request(PROMPTS[0], params, detokenizer=BreakingDetokenizer(99, True))
    with pytest.raises(BrokenError):
        run_to_end(engine)
    assert request.finish_reason == "length"
    assert_all_free(engine)


@pytest.mark.parametrize("fail", ["raise", "nothing"])
def test_an_allocator_that_fails_sometimes_only_delays(
    fail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(like(BreakingToy))
    requests = [engine.add_request(p, GREEDY) for p in PROMPTS]
    allocator = engine.scheduler.allocator
    allocate = allocator.allocate
    calls = itertools.count()

    def sometimes(count: int, near: int = 0) -> list[int] | None:
        if next(calls) % 2:
            return allocate(count, near)
        if fail == "raise":
            raise BrokenError
        return None

    monkeypatch.setattr(allocator, "allocate", sometimes)
    for _ in range(500):
        with contextlib.suppress(BrokenError):
            engine.step()
    assert not engine.has_work
    assert [r.output_token_ids for r in requests] == [oracle_text(p, GREEDY) for p in PROMPTS]
    assert_all_free(engine)


def test_a_policy_that_fails_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(like(BreakingToy))
    request = engine.add_request(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=2))

    def fail(feedback: object) -> None:
        raise BrokenError

    monkeypatch.setattr(engine.policy, "observe", fail)
    with pytest.raises(BrokenError):
        run_to_end(engine)
    assert request.finish_reason == "length"
    assert_all_free(engine)


@pytest.mark.parametrize("part", ["write_tables", "_restore_cache"])
def test_a_failure_while_tables_or_caches_are_set_up_is_made_good_by_the_next_step(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = ExitRule("gate", 1.0, 1, 4) if part == "_restore_cache" else None
    engine = make_engine(make_toy(), exit_rule=rule, num_blocks=9)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    working = getattr(engine.runner, part)
    calls = itertools.count()

    def sometimes(*args: Any) -> None:
        if next(calls) % 3 == 0:
            raise BrokenError
        working(*args)

    monkeypatch.setattr(engine.runner, part, sometimes)
    failures = 0
    for _ in range(500):
        if not engine.has_work:
            break
        try:
            engine.step()
        except BrokenError:
            failures += 1
    assert failures > 0
    assert [r.output_token_ids for r in requests] == [oracle_text(p, GREEDY) for p in PROMPTS]
    assert_all_free(engine)
