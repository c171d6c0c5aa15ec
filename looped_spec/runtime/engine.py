"""The engine: asks the policy, schedules, runs, commits. One call of `step` is one round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter

from looped_spec.control.plan import PLAIN, Candidate, SpeculationPlan
from looped_spec.errors import CapacityError, ConfigError
from looped_spec.runtime.in_flight import RoundInFlight
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.runtime.policy import SpeculationPolicy
from looped_spec.runtime.prefiller import Interruption, OnFirstTokens, Prefiller, TakeNewcomers
from looped_spec.runtime.request import Detokenizer, Request
from looped_spec.runtime.round_result import RoundResult
from looped_spec.runtime.runner import ModelRunner
from looped_spec.runtime.scheduler import Scheduler
from looped_spec.runtime.tally import RoundTally, check_finite
from looped_spec.runtime.token_logprobs import TokenLogprobs
from looped_spec.sampling_params import SamplingParams


class Engine:
    """Runs requests to their end by continuous batching."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        policy: SpeculationPolicy,
        *,
        max_model_len: int,
        eos_token_ids: Collection[int] = (),
        seed: int = 0,
        candidates: Collection[Candidate] = (),
        async_scheduling: bool = False,
    ) -> None:
        """Run requests.

        `candidates` are all that the policy may choose, as far as it is known. With
        `async_scheduling` a round is submitted before the one ahead of it is read, where the same
        requests go on and have memory for both; so the device need not wait for the host. The text
        is the same. It has no effect on early exit.
        """
        self.runner = runner
        self.scheduler = scheduler
        self.policy = policy
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.seed = seed
        self.candidates = frozenset(candidates)
        self.newest_candidate: Candidate | None = None
        self.newest_submitted: Candidate | None = None  # shorter where all are about to end
        self.newest_context = 0
        self.metrics = SpeculationMetrics()
        self.async_scheduling = async_scheduling and runner.exit_rule is None
        self.num_discarded_rounds = 0
        self._prefiller = Prefiller(runner, scheduler, self._commit)
        self._in_flight: RoundInFlight | None = None
        self._last_done = 0.0
        self._is_clean = True
        self._num_requests = 0

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> Request:
        """Make a request and queue it; see `make_request`."""
        request = self.make_request(
            prompt_token_ids, params, prompt=prompt, detokenizer=detokenizer
        )
        self.scheduler.add(request)
        return request

    def make_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> Request:
        """Return a request that is not queued yet (`scheduler.add` does that).

        Raises:
            ConfigError: the prompt is empty.
            CapacityError: the request could never run; says so with the numbers.
        """
        length = len(prompt_token_ids)
        if not length:
            raise ConfigError("prompt is empty: give at least one token")
        if length >= self.max_model_len:
            raise CapacityError(
                f"prompt of {length} tokens leaves no room to generate: max_model_len is "
                f"{self.max_model_len} tokens"
            )
        request = Request(
            self._num_requests,
            prompt_token_ids,
            params,
            seed=self._request_seed(params),
            max_total_tokens=min(length + params.max_tokens, self.max_model_len),
            eos_token_ids=self.eos_token_ids,
            detokenizer=detokenizer,
            prompt=prompt,
        )
        self.scheduler.check(request)
        self._num_requests += 1
        return request

    def abort(self, request: Request) -> None:
        """End a request and free its memory at once."""
        try:
            request.abort()
        finally:
            self.scheduler.finish(request)

    def drop(self, requests: Collection[Request]) -> None:
        """End requests after an interruption that may have left them half done."""
        self.scheduler.drop(requests)
        for request in requests:
            request.abort()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def step(
        self,
        on_first_tokens: OnFirstTokens | None = None,
        take_newcomers: TakeNewcomers | None = None,
    ) -> list[Request]:
        """Run one step and return the requests that got tokens; finished ones have left the
        scheduler.

        `on_first_tokens` is called with those that got their first, before the round of the others
        goes on, so that whoever waits for them need not wait for the round too. `take_newcomers` is
        called between the passes of a round that can stand still there: one that is not captured,
        not submitted ahead and without early exit, on the CPU. Whom it adds to the scheduler gets a
        first token at once, as far as rows, memory and the step's budget go, and once a round.

        If the model or a detokenizer raises, what was committed before stays committed, and every
        request that is still open may be aborted or stepped again. Logits that are not finite raise
        `NotFiniteError` before anything of their pass is committed; requests that ran beside the
        one at fault may be affected in that step, but not in one without it.
        """
        # Whatever fails below, a round that was submitted ahead is not read any more.
        current, self._in_flight = self._in_flight, None
        if not self._is_clean:
            self.runner.clean_cache()
            self.scheduler.forget_prefixes()
        self._is_clean = False  # until this step has ended well
        touched: list[Request] = []
        if current is not None and not current.live():
            self.num_discarded_rounds += 1
            current = None
        if current is None:
            current, touched = self._begin(on_first_tokens, take_newcomers)
        is_clean = True
        if current is not None:
            ahead = self._submit_ahead(current) if self.async_scheduling else None
            is_clean = self._finish(current, touched)
            if is_clean:
                self._in_flight = ahead
        self._is_clean = is_clean
        return touched

    def _begin(
        self, on_first_tokens: OnFirstTokens | None, take_newcomers: TakeNewcomers | None
    ) -> tuple[RoundInFlight | None, list[Request]]:
        """Schedule, run what is to be prefilled and submit a round; return it and the requests
        that got their first token."""
        start = time.perf_counter()
        decode = self.scheduler.decode_batch()
        plan = self._plan(decode) if decode else None
        candidate = PLAIN
        if plan is not None:
            candidate = self._fitting(plan.candidate, decode)
            self.newest_candidate = plan.candidate
        schedule = self.scheduler.schedule(decode, candidate.num_speculative_tokens)
        self.runner.prepare([*[chunk.request for chunk in schedule.prefill], *decode])
        touched: list[Request] = []
        if schedule.prefill:
            before = time.perf_counter()
            touched = self._prefiller.run(schedule.prefill, on_first_tokens)
            start += time.perf_counter() - before  # it is done when its tokens are here
        if plan is None:
            return None, touched
        # By their rows, which are one piece of the tables while the batch is full.
        decode.sort(key=attrgetter("row"))
        interruption: Interruption | None = None
        if take_newcomers is not None and self.runner.can_interrupt and not self.async_scheduling:
            k = candidate.num_speculative_tokens
            interruption = Interruption(
                self._prefiller, take_newcomers, on_first_tokens, schedule.budget, k
            )
        return self._submit(decode, plan, candidate, start, interruption=interruption), touched

    def _submit(
        self,
        requests: list[Request],
        plan: SpeculationPlan,
        candidate: Candidate,
        start: float,
        unread_tokens: int = 0,
        interruption: Interruption | None = None,
    ) -> RoundInFlight:
        """Submit a round; without asynchronous scheduling it is run when it is read."""
        k = candidate.num_speculative_tokens
        runner, done, is_whole = self.runner, None, True
        before: list[int] = []
        read: Callable[[], RoundResult]
        if self.async_scheduling:
            before = [request.metrics.num_preemptions for request in requests]
            is_whole = all(
                [r.capacity >= min(r.num_tokens + k, r.max_cached_tokens) for r in requests]
            )
            read = runner.submit(
                requests, candidate, plan.shadow_depths, unread_tokens=unread_tokens
            ).result
            if runner.device.type != "cuda":
                done = time.perf_counter()  # a device that does not run ahead of the host
        else:
            read = partial(runner.round, requests, candidate, plan.shadow_depths, interruption)
        self.newest_submitted = candidate
        return RoundInFlight(
            policy=self.policy,
            plan=plan,
            candidate=candidate,
            requests=requests,
            preemptions=before,
            is_whole=is_whole,
            is_ahead=unread_tokens > 0,
            started=start,
            done=done,
            read=read,
            interruption=interruption,
        )

    def _submit_ahead(self, current: RoundInFlight) -> RoundInFlight | None:
        """Submit the round behind one that was not read yet, or None where it has to wait.

        It waits where somebody is to be admitted or prefilled, where requests decode that are not
        in `current`, and where memory is short; so whoever is preempted is in no round.
        """
        scheduler = self.scheduler
        if not current.is_whole or scheduler.has_newcomers:
            return None
        live = [current.requests[place] for place in current.live()]
        if len(live) != len(scheduler.running):
            return None
        start = time.perf_counter()
        requests = [request for request in live if request.remaining_tokens > 1]
        if not requests:
            return None
        unread = current.candidate.num_speculative_tokens + 1
        longest = max(
            [c.num_speculative_tokens for c in self.candidates],
            default=current.candidate.num_speculative_tokens,
        )
        if not scheduler.reserve(requests, unread + longest):
            return None
        plan = self._plan(requests, known_to_policy=True)
        candidate = self._fitting(plan.candidate, requests, num_unread=1)
        k = candidate.num_speculative_tokens
        if k > longest and not scheduler.reserve(requests, unread + k):
            return None
        self.newest_candidate = plan.candidate
        self.runner.prepare(requests)
        return self._submit(requests, plan, candidate, start, unread)

    def _plan(self, decode: list[Request], *, known_to_policy: bool = False) -> SpeculationPlan:
        """Ask the policy; it is told of the requests that will decode, and of no others."""
        lengths = [request.num_tokens for request in decode]
        context = self.newest_context = self.runner.backend.context_of(lengths)
        new = 0
        if not known_to_policy:
            new = sum([not request.metrics.num_rounds for request in decode])
        return self.policy.plan(len(decode), context_tokens=context, new_requests=new)

    def _fitting(
        self, candidate: Candidate, decode: list[Request], *, num_unread: int = 0
    ) -> Candidate:
        """Return the shortest round that gives the same where every request is about to end.

        Only lengths that may be run anyway are taken, plain decoding among them, since a round of
        another length might have to be captured first. `num_unread` is how many tokens each is
        about to get at least from a round ahead of this one.
        """
        k = candidate.num_speculative_tokens
        if not k:
            return candidate
        due = max([request.remaining_tokens for request in decode]) - 1 - num_unread
        if due >= k:
            return candidate
        if due == 0:
            return PLAIN
        same_depth = [
            other
            for other in self.candidates
            if other.draft_loops == candidate.draft_loops
            and due <= other.num_speculative_tokens < k
        ]
        return min(same_depth, key=lambda c: c.num_speculative_tokens, default=candidate)

    def _finish(self, current: RoundInFlight, touched: list[Request]) -> bool:
        """Read a round and commit it; add its requests to `touched`, and tell the policy. Return
        whether all that it computed is finite."""
        result = current.read()
        requests = current.requests
        is_finite = result.is_finite
        if current.is_ahead:
            places = current.live()
            if len(places) < len(requests):
                requests = [requests[place] for place in places]
                result = result.part(places)
        tally = self._commit_round(current, requests, result)
        touched += requests
        done = time.perf_counter() if current.done is None else current.done
        start = current.started
        if current.is_ahead:  # it began when the round before was done, or later
            start = max(start, self._last_done)
        if current.interruption is not None:
            start += current.interruption.seconds
            touched += current.interruption.touched
        seconds = done - start
        self._last_done = done
        k = current.candidate.num_speculative_tokens
        current.policy.observe(tally.feedback(current.plan, seconds, k))
        return is_finite

    def _commit_round(
        self, current: RoundInFlight, requests: list[Request], result: RoundResult
    ) -> RoundTally:
        # No draft equals the mark, so the last token to be committed tells.
        last = [row[n] for row, n in zip(result.tokens, result.accepted, strict=True)]
        check_finite(requests, last)
        candidate, probe = current.candidate, current.plan.probe
        k = candidate.num_speculative_tokens
        tally = RoundTally(result, k)
        logprobs = result.logprobs or [None] * len(requests)
        committed = 0
        try:
            for request, tokens, accepted, work, own in zip(
                requests, result.tokens, result.accepted, result.loop_rows, logprobs, strict=True
            ):
                known = request.num_tokens
                room, due = request.capacity - known, request.max_cached_tokens - known
                offered = min(accepted, room) + 1
                taken = self._commit(request, tokens[:offered], own)
                request.num_computed = known + taken - 1
                if taken <= accepted or k > room or k >= due:
                    tally.cut(committed, room, due, taken)
                request.metrics.add_round(
                    candidate, tally.proposed[committed], tally.accepted[committed], work, probe
                )
                committed += 1
        finally:
            self.metrics.add_rounds(
                candidate,
                tally.proposed[:committed],
                tally.accepted[:committed],
                sum(result.loop_rows[:committed]),
                probe,
            )
        return tally

    def _commit(
        self,
        request: Request,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> int:
        """Append tokens; free the memory of a request that ends before anything else can fail."""
        try:
            return request.append(tokens)
        finally:
            if logprobs is not None:
                request.note_logprobs(logprobs)
            if request.finish_reason is not None:
                self.scheduler.finish(request)

    def _request_seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        if params.temperature == 0:
            # Some models draw their initial state by the seed: greedy text has to repeat all the
            # same, in any place of any list of prompts.
            return self.seed
        # Odd multiplier, wrapped to a signed 64-bit number: distinct requests get distinct seeds.
        mixed = (self.seed + (self._num_requests + 1) * 0x9E3779B97F4A7C15) % 2**64
        return mixed - 2**63
