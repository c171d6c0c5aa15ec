"""Which requests run: order, memory, budget, preemption; nothing leaks, nothing starves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import GREEDY, assert_all_free, oracle_text, run_to_end, shared_toy

from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import CapacityError
from looped_spec.runtime.attention import SdpaBackend
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.kv_cache import TRASH_BLOCK, blocks_for
from looped_spec.runtime.request import Request, Status
from looped_spec.runtime.round_result import RoundResult
from looped_spec.runtime.scheduler import PrefillChunk, Scheduler
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine

TINY = {
    "hidden_size": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "num_layers": 1,
    "full_loops": 2,
}


class FakeRunner:
    """A runner without a model: the text of a request counts up; drafts are accepted by dice.

    It holds the scheduler to what a real model would need: tables that name each request's blocks,
    memory for every position that is committed, prompts computed in order.
    """

    def __init__(self, block_size: int, max_num_seqs: int, seed: int) -> None:
        self.block_size, self.max_num_seqs = block_size, max_num_seqs
        self.tables: dict[int, list[int]] = {}
        self.backend = SdpaBackend()  # it says which context a round is as dear as
        self.dice = random.Random(seed)
        self.largest_prefill = self.largest_step = 0
        self.chunks: list[list[PrefillChunk]] = []
        self.rounds: list[list[Request]] = []
        self.lengths: list[int] = []

    def prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            known = self.tables.get(request.row, [])[: request.num_table_blocks]
            self.tables[request.row] = [*known, *request.blocks[request.num_table_blocks :]]
            request.num_table_blocks = len(request.blocks)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[int | None]:
        self.chunks.append(list(chunks))
        for chunk in chunks:
            assert chunk.request.num_computed == chunk.start < chunk.stop
            self._check_memory(chunk.request, chunk.stop)
        return [c.request.num_tokens if c.ends_prompt else None for c in chunks]

    def round(
        self,
        requests: Sequence[Request],
        candidate: Candidate,
        shadow_depths: Sequence[int] = (),
        between_passes: Callable[[], None] | None = None,
    ) -> RoundResult:
        k = candidate.num_speculative_tokens
        self.rounds.append(list(requests))
        self.lengths.append(k)
        tokens, accepted = [], []
        for request in requests:
            assert request.num_computed == request.num_tokens - 1
            self._check_memory(request, request.num_tokens)
            tokens.append([request.num_tokens + i for i in range(k + 1)])
            accepted.append(self.dice.randint(0, k))
        return RoundResult(tokens, accepted, [1] * len(tokens))

    def _check_memory(self, request: Request, num_tokens: int) -> None:
        table = self.tables[request.row]
        assert table[: len(request.blocks)] == request.blocks
        assert len(request.blocks) * self.block_size >= num_tokens


class StrictScheduler(Scheduler):
    """A scheduler that is caught preempting for anything but the next token of a request."""

    def _preempt(self, request: Request) -> None:
        needed = [blocks_for(r.num_tokens, self.block_size) for r in self.running]
        assert sum(needed) > self.allocator.num_blocks, "preempted for the sake of drafts"
        super()._preempt(request)


def fake_engine(
    *,
    num_blocks: int,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    k: int = 0,
    seed: int = 0,
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(block_size, max_num_seqs, seed)
    engine = Engine(
        runner,  # type: ignore[arg-type]
        StrictScheduler(num_blocks, block_size, max_num_seqs, max_num_batched_tokens),
        StaticPolicy(Candidate(k, 1 if k else 0)),
        max_model_len=num_blocks * block_size + 1,
    )
    return engine, runner


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def check_ownership(engine: Engine, requests: Sequence[Request]) -> None:
    """No block or row is owned twice, by a stopped request, or by nobody."""
    scheduler = engine.scheduler
    owned = [block for request in requests for block in request.blocks]
    assert len(set(owned)) == len(owned)
    assert TRASH_BLOCK not in owned
    assert len(owned) + scheduler.allocator.num_free == scheduler.allocator.num_blocks
    rows = [request.row for request in requests if request.row >= 0]
    assert len(set(rows)) == len(rows) == len(scheduler.running)
    for request in requests:
        running = request.status in (Status.PREFILLING, Status.DECODING)
        assert (request in scheduler.running) == running == (request.row >= 0)
        assert (request in scheduler.waiting) == (request.status is Status.WAITING)
        if not running:
            assert not request.blocks
        else:
            held = len(request.blocks) * scheduler.block_size
            assert request.num_computed <= held, "a token was committed that has no memory"
    order = [r.request_id for r in [*scheduler.running, *scheduler.waiting]]
    assert order == sorted(order), "a later request overtook an earlier one"


def test_requests_start_in_the_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    engine, runner = fake_engine(num_blocks=6)
    first = engine.add_request([1] * 12, params(4))  # 3 blocks, and one for its first round
    large = engine.add_request([1] * 14, params(6))  # 4 blocks, which are not free yet
    small = engine.add_request([1], params(2))
    engine.step()
    assert [c.request for c in runner.chunks[0]] == [first]
    assert large.status is small.status is Status.WAITING
    run_to_end(engine)
    starts = [c.request for chunks in runner.chunks for c in chunks if c.start == 0]
    assert starts == [first, large, small]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine, _ = fake_engine(num_blocks=5)
    engine.max_model_len = 100
    fits = engine.add_request([1] * 15, params(6))  # the 21st token is never fed back
    with pytest.raises(CapacityError) as caught:
        engine.add_request([1] * 15, params(7))
    for number in ("15 prompt tokens", "7 new", "6 blocks of 4 tokens", "has 5"):
        assert number in str(caught.value)
    run_to_end(engine)
    assert len(fits.output_token_ids) == 6
    assert_all_free_of_fake(engine, 4)


def assert_all_free_of_fake(engine: Engine, rows: int) -> None:
    scheduler = engine.scheduler
    assert scheduler.allocator.num_free == scheduler.allocator.num_blocks
    assert sorted(scheduler._free_rows) == list(range(rows))
    assert not scheduler.running and not scheduler.waiting


def test_preemption_takes_the_newest_and_the_oldest_never_stops() -> None:
    engine, runner = fake_engine(num_blocks=9, k=2)
    requests = [engine.add_request([1] * 7, params(22)) for _ in range(3)]
    while engine.has_work:
        engine.step()
        check_ownership(engine, requests)
        if runner.rounds and requests[0].finish_reason is None:
            assert requests[0] in runner.rounds[-1]
    counts = [request.metrics.num_preemptions for request in requests]
    assert counts[0] == 0 < counts[2]
    assert counts == sorted(counts)
    assert engine.scheduler.num_preemptions == sum(counts)


def test_what_a_preemption_freed_is_not_given_back_in_the_same_step() -> None:
    engine, runner = fake_engine(num_blocks=4, max_num_seqs=2)
    requests = [engine.add_request([1] * 7, params(9)) for _ in range(2)]
    while engine.has_work:
        before = engine.scheduler.num_preemptions
        chunks = len(runner.chunks)
        engine.step()
        if engine.scheduler.num_preemptions > before:
            assert len(runner.chunks) == chunks
    # One preemption each time the older needs a block, not one a step.
    assert engine.scheduler.num_preemptions == 1
    assert all(len(request.output_token_ids) == 9 for request in requests)


def test_drafts_take_what_is_free_and_give_it_back_before_anyone_is_preempted() -> None:
    # Two requests of three blocks each in the end, and one block beside them.
    engine, runner = fake_engine(num_blocks=7, block_size=4, max_num_seqs=2, k=8)
    requests = [engine.add_request([1] * 3, params(10)) for _ in range(2)]
    engine.step()
    engine.step()
    assert runner.lengths == [8]
    assert engine.scheduler.allocator.num_free < 3, "drafts got memory"
    while engine.has_work:
        engine.step()
        check_ownership(engine, requests)
    assert engine.scheduler.num_preemptions == 0
    assert all(len(request.output_token_ids) == 10 for request in requests)


@pytest.mark.parametrize("k", [0, 3])
def test_a_request_waits_until_there_is_room_for_its_first_round(k: int) -> None:
    engine, _ = fake_engine(num_blocks=3, k=k)
    first = engine.add_request([1] * 4, params(9))
    second = engine.add_request([1] * 8, params(4))  # its prompt alone would fit beside the first
    engine.step()
    assert (first.status, second.status) == (Status.DECODING, Status.WAITING)
    run_to_end(engine)
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("max_num_batched_tokens", [1, 3, 8, 40])
@pytest.mark.parametrize("k", [0, 4])
def test_a_full_decode_batch_does_not_starve_prefill(max_num_batched_tokens: int, k: int) -> None:
    engine, _ = fake_engine(
        num_blocks=1000, max_num_seqs=9, max_num_batched_tokens=max_num_batched_tokens, k=k
    )
    for _ in range(8):
        engine.add_request([1], params(200))
    while any(r.status is not Status.DECODING for r in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.step()
    late = engine.add_request([1] * 20, params(2))
    least = min(4, max_num_batched_tokens)
    for _ in range(-(-20 // least)):
        engine.step()
    assert late.output_token_ids


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 4), st.integers(1, 9), st.integers(0, 99))
def test_the_budget_of_a_step_is_kept(budget: int, k: int, block_size: int, seed: int) -> None:
    dice = random.Random(seed)
    engine, runner = fake_engine(
        num_blocks=60, block_size=block_size, max_num_batched_tokens=budget, k=k, seed=seed
    )
    for _ in range(6):
        engine.add_request([1] * dice.randint(1, 25), params(dice.randint(1, 20)))
    while engine.has_work:
        chunks, rounds = len(runner.chunks), len(runner.rounds)
        engine.step()
        prefill = sum(c.stop - c.start for part in runner.chunks[chunks:] for c in part)
        decode = sum(
            (length + 1) * len(requests)
            for length, requests in zip(
                runner.lengths[rounds:], runner.rounds[rounds:], strict=True
            )
        )
        # A full decode batch leaves a block for prefill all the same.
        assert prefill + decode <= max(budget, decode + min(block_size, budget))
        if not decode:
            assert prefill <= budget


PLANS = st.fixed_dictionaries(
    {
        "spare_blocks": st.integers(0, 6),
        "block_size": st.sampled_from([1, 3, 4, 16]),
        "max_num_seqs": st.integers(1, 4),
        "budget": st.sampled_from([1, 2, 5, 64]),
        "k": st.sampled_from([0, 1, 2, 4, 8]),
        "requests": st.lists(
            st.tuples(
                st.integers(0, 12),  # step of arrival
                st.integers(1, 14),  # prompt tokens
                st.integers(1, 12),  # new tokens
                st.none() | st.integers(0, 12),  # steps until it is aborted
            ),
            min_size=1,
            max_size=7,
        ),
        "seed": st.integers(0, 2**16),
    }
)


def play(engine: Engine, plan: dict) -> list[tuple[Request, bool]]:  # type: ignore[type-arg]
    """Let requests arrive and be aborted as planned; check ownership all along."""
    arrivals = sorted(plan["requests"], key=lambda request: request[0])
    live: list[tuple[Request, int | None]] = []
    work = sum(prompt + new for _, prompt, new, _ in arrivals)
    for step in range(20 + 20 * work):
        while arrivals and arrivals[0][0] <= step:
            _, prompt, new, patience = arrivals.pop(0)
            tokens = [(7 * prompt + i) % 50 for i in range(prompt)]
            request = engine.add_request(tokens, params(new))
            live.append((request, None if patience is None else step + patience))
        for request, deadline in live:
            if deadline == step:
                engine.abort(request)
                check_ownership(engine, [r for r, _ in live])
        if not arrivals and not engine.has_work:
            break
        engine.step()
        check_ownership(engine, [r for r, _ in live])
    assert not engine.has_work and not arrivals, "no end: the scheduler runs in circles"
    return [(request, request.finish_reason == "abort") for request, _ in live]


def blocks_needed(plan: dict) -> int:  # type: ignore[type-arg]
    most = max(prompt + new - 1 for _, prompt, new, _ in plan["requests"])
    return -(-most // plan["block_size"])


@settings(max_examples=150, deadline=None)
@given(PLANS)
def test_any_arrivals_and_aborts_end_with_all_memory_free(plan: dict) -> None:  # type: ignore[type-arg]
    engine, _ = fake_engine(
        num_blocks=blocks_needed(plan) + plan["spare_blocks"],
        block_size=plan["block_size"],
        max_num_seqs=plan["max_num_seqs"],
        max_num_batched_tokens=plan["budget"],
        k=plan["k"],
        seed=plan["seed"],
    )
    engine.max_model_len = 100
    for request, aborted in play(engine, plan):
        length = len(request.prompt_token_ids)
        got = request.output_token_ids
        assert got == list(range(length, length + len(got)))
        assert aborted or len(got) == request.params.max_tokens
    assert_all_free_of_fake(engine, plan["max_num_seqs"])


@settings(max_examples=15, deadline=None)
@given(PLANS)
def test_every_request_of_a_random_crowd_equals_its_lone_run(plan: dict) -> None:  # type: ignore[type-arg]
    engine = make_engine(
        shared_toy(**TINY),
        num_speculative_tokens=plan["k"],
        draft_loops=1 if plan["k"] else 0,
        num_blocks=blocks_needed(plan) + plan["spare_blocks"],
        block_size=plan["block_size"],
        max_num_seqs=plan["max_num_seqs"],
        max_num_batched_tokens=plan["budget"],
    )
    for request, aborted in play(engine, plan):
        want = oracle_text(request.prompt_token_ids, params(12), **TINY)
        got = request.output_token_ids
        assert got == want[: len(got)]
        assert aborted or len(got) == request.params.max_tokens
    assert_all_free(engine)


@pytest.mark.parametrize("steps", range(6))
def test_aborting_in_any_status_frees_all(steps: int) -> None:
    engine = make_engine(
        shared_toy(),
        num_speculative_tokens=2,
        draft_loops=1,
        max_num_batched_tokens=3,
        max_num_seqs=2,
        num_blocks=12,
    )
    requests = [engine.add_request([1, 2, 3, 4, 5], GREEDY) for _ in range(4)]
    for _ in range(steps):
        engine.step()
    for request in reversed(requests):
        engine.abort(request)
        check_ownership(engine, requests)
    assert_all_free(engine)
    assert not engine.step()


def test_a_step_without_work_does_nothing() -> None:
    engine, runner = fake_engine(num_blocks=3)
    assert engine.step() == []
    assert not runner.chunks and not runner.rounds
