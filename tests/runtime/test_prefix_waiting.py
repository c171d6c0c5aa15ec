"""A prompt waits for another that is computing most of it, and nobody overtakes it for that."""

from __future__ import annotations

from test_prefix_cache import BLOCK, GREEDY, PREFIX, engine_of
from toys import WatchedToy, assert_all_free, like, oracle_text, run_to_end

from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import run_all


def test_prompts_that_come_together_are_computed_once() -> None:
    toy = like(WatchedToy)
    engine = engine_of(toy, max_num_seqs=8)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    ends = (20, 21, 22, 23)
    requests = run_all(engine, [[*PREFIX, end, 30] for end in ends], params)
    assert [request.num_cached_tokens for request in requests] == [0, 12, 12, 12]
    rows = sum(call.positions.numel() for call in toy.calls if call.stage == "prelude")
    assert rows == 14 + 3 * 2
    for end, request in zip(ends, requests, strict=True):
        assert request.output_token_ids == oracle_text([*PREFIX, end, 30], params)
    assert_all_free(engine)


def test_who_shares_less_than_most_of_what_is_missing_does_not_wait() -> None:
    engine = engine_of(max_num_seqs=8)
    long = list(range(40, 60))
    requests = [engine.add_request(p, GREEDY) for p in ([*PREFIX, 20], [*PREFIX, *long])]
    engine.step()
    assert [len(request.output_token_ids) for request in requests] == [1, 1]
    run_to_end(engine)


def test_who_waits_for_a_prompt_is_overtaken_only_where_there_is_room_for_both() -> None:
    engine = engine_of(max_num_seqs=2)
    first, same, other = (engine.add_request(p, GREEDY) for p in (PREFIX, PREFIX, [50, 51]))
    engine.step()
    assert (first.row >= 0, same.row >= 0, other.row >= 0) == (True, False, False)
    engine.step()
    assert (same.row >= 0, other.row >= 0) == (True, False)
    run_to_end(engine)
    engine = engine_of(max_num_seqs=3)
    first, same, other = (engine.add_request(p, GREEDY) for p in (PREFIX, PREFIX, [50, 51]))
    engine.step()
    assert (first.row >= 0, same.row >= 0, other.row >= 0) == (True, False, True)
    run_to_end(engine)
    assert_all_free(engine)


def test_who_waits_for_a_prompt_computes_it_when_the_other_is_gone() -> None:
    engine = engine_of(max_num_batched_tokens=BLOCK)
    first, same = (engine.add_request(PREFIX, GREEDY) for _ in range(2))
    engine.step()
    engine.abort(first)
    run_to_end(engine)
    assert same.num_cached_tokens == BLOCK
    assert same.output_token_ids == oracle_text(PREFIX, GREEDY)
    assert_all_free(engine)


def test_who_was_preempted_with_output_looks_no_further_than_its_prompt() -> None:
    engine = engine_of(max_num_seqs=8)
    short, long = [*PREFIX], [*PREFIX, *range(40, 60)]
    params = SamplingParams(temperature=0.0, max_tokens=3 * BLOCK)
    requests = [engine.add_request(prompt, params) for prompt in (long, short)]
    while requests[1].num_tokens <= len(short) + BLOCK:
        engine.step()
    scheduler = engine.scheduler
    for request in reversed(requests):
        scheduler._preempt(request)
    scheduler.forget_prefixes()  # as if others had taken their blocks meanwhile
    run_to_end(engine)
    for request in requests:
        assert request.output_token_ids == oracle_text(request.prompt_token_ids, params)
    assert_all_free(engine)
