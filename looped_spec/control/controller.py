"""The controller: finds the batch bucket, hands out plans, credits feedback to what ran."""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.ema import EmaPolicy
from looped_spec.control.explain import BucketExplanation, Explanation
from looped_spec.control.goodput import GoodputPolicy
from looped_spec.control.plan import Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.policy import CandidatePolicy, Issued
from looped_spec.control.state_shape import check_alike
from looped_spec.control.static import StaticPolicy
from looped_spec.control.stats import (
    MAX_RUNS,
    MAX_SWITCHES,
    ControllerStats,
    Direction,
    PlanRun,
    Switch,
    SwitchCount,
)
from looped_spec.errors import ConfigError

MAX_PENDING = 64
"""Plans that wait for feedback; what is older is given up."""

STAY_ROUNDS = 8
FAR_BEYOND = 2
STATE_VERSION = 2

Consensus = Callable[[int], int]
"""Takes this rank's vote, a position in the bucket's candidates, and returns the agreed one."""

_POLICIES: Mapping[str, Callable[[AdaptiveSpecConfig], CandidatePolicy]] = {
    "static": StaticPolicy.of,
    "ema": EmaPolicy,
    "goodput": GoodputPolicy,
}


class AdaptiveController:
    """Decides (K, d) of every round.

    The same inputs give the same plans: there is no clock and no randomness inside. Plans may be
    asked for ahead of feedback, and feedback may come in any order, twice or never.

    Args:
        config: what may be chosen, and how.
        consensus: for ranks that must agree; see `Consensus`. Every rank must call `plan` for the
            same rounds.
    """

    def __init__(self, config: AdaptiveSpecConfig, *, consensus: Consensus | None = None) -> None:
        self.config = config
        self._consensus = consensus
        self._policy = _POLICIES[config.policy](config)
        self._candidates = tuple(bucket.candidates for bucket in config.buckets)
        self._has_choice = tuple(len(arms) > 1 for arms in self._candidates)
        self._max_num_seqs = config.max_num_seqs
        self._bucket_by_size = [0] + [
            index
            for index, bucket in enumerate(config.buckets)
            for _ in range(bucket.min_batch_size, bucket.max_batch_size + 1)
        ]
        self._bucket = -1
        self._rounds_below = 0
        self._next_id = 0
        self._pending: dict[int, Issued] = {}
        self._last_shape: dict[int, tuple[int, float]] = {}
        self._running: Candidate | None = None
        self._run: list[Any] = [0, -1, None, False, 0]
        self._runs: deque[PlanRun] = deque(maxlen=MAX_RUNS)
        self._switches: deque[Switch] = deque(maxlen=MAX_SWITCHES)
        self._switch_counts: Counter[tuple[int, Direction]] = Counter()
        self._feedback = self._stale = self._invalid = 0
        self._off_rounds = self._probe_rounds = 0

    @property
    def max_k(self) -> int:
        """The largest K of any candidate: what buffers and lookahead slots are sized for."""
        return self.config.max_speculative_tokens

    def plan(
        self, batch_size: int, *, context_tokens: float = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        """Return what to run with `batch_size` decoding requests.

        Neither prefilling requests nor padding counts. `context_tokens` is how long the requests
        are so far: their mean, or the longest where a round costs as if all were as long;
        `new_requests` how many of them had no round before. A batch size beyond the
        last bucket is treated as that bucket's largest, one below 1 as 1, and a context that is no
        length as 0.
        """
        if batch_size < 1:
            batch_size = 1
        if not 0 <= context_tokens <= sys.float_info.max:  # also NaN
            context_tokens = 0
        bucket = self._bucket_of(batch_size)
        choice = self._policy.choose(bucket, batch_size, context_tokens, new_requests)
        index, probe, shadow_depths, reason = choice
        if self._consensus is not None:
            agreed = self._consensus(index)
            if agreed != index:
                if not 0 <= agreed < len(self._candidates[bucket]):
                    raise ConfigError(
                        f"consensus must be between 0 and {len(self._candidates[bucket]) - 1}, "
                        f"got {agreed}"
                    )
                self._policy.overruled(bucket, choice, agreed)
                index, probe, reason = agreed, False, "agreed with other ranks"
        candidate = self._candidates[bucket][index]
        plan_id = self._next_id
        self._next_id = plan_id + 1
        pending = self._pending
        pending[plan_id] = Issued(bucket, index, candidate, probe, batch_size, context_tokens)
        self._last_shape[bucket] = batch_size, context_tokens
        if len(pending) > MAX_PENDING:
            del pending[next(iter(pending))]
        run = self._run
        if run[2] is candidate and run[3] is probe and run[1] == bucket:
            run[4] += 1
        else:
            self._start_run(plan_id, bucket, candidate, probe, reason)
        return SpeculationPlan(plan_id, candidate, bucket, probe, shadow_depths)

    def observe(self, feedback: RoundFeedback) -> None:
        """Take in the outcome of a plan. What is current changes in `plan` only."""
        issued = self._pending.pop(feedback.plan_id, None)
        if issued is None:
            self._stale += 1
            return
        self._feedback += 1
        if not self._policy.learn(issued, feedback):
            self._invalid += 1

    def explain(self) -> Explanation:
        """Return what each bucket runs and why, with its candidates as the policy sees them."""
        buckets = []
        for index, bucket in enumerate(self.config.buckets):
            batch_size, context = self._last_shape.get(index, (bucket.max_batch_size, 0))
            buckets.append(
                BucketExplanation(
                    bucket.min_batch_size,
                    bucket.max_batch_size,
                    batch_size,
                    context,
                    index == self._bucket,
                    bucket.candidates[self._policy.current(index)],
                    self._policy.reason(index),
                    self._policy.scores(index, batch_size, context),
                )
            )
        return Explanation(self.config.policy, tuple(buckets), self._policy.notes())

    def stats(self) -> ControllerStats:
        """Return what was counted so far."""
        off, probes = self._off_rounds, self._probe_rounds
        runs = list(self._runs)
        if self._run[4]:
            current = PlanRun(*self._run)
            runs.append(current)
            off += self._off_part(current)
            probes += current.rounds if current.probe else 0
        return ControllerStats(
            plans=self._next_id,
            feedback=self._feedback,
            stale_feedback=self._stale,
            invalid_feedback=self._invalid,
            off_rounds=off,
            probe_rounds=probes,
            num_switches=self._switch_counts.total(),
            switch_counts=tuple(
                SwitchCount(bucket, direction, count)
                for (bucket, direction), count in sorted(self._switch_counts.items())
            ),
            switches=tuple(self._switches),
            history=tuple(runs),
            policy=self._policy.counters(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt as a JSON document. Plans in flight are not part of it."""
        return {
            "version": STATE_VERSION,
            "policy": self.config.policy,
            "candidates": self._listed(),
            "next_id": self._next_id,
            "bucket": self._bucket,
            "rounds_below": self._rounds_below,
            "learnt": self._policy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that a controller of the same configuration saved.

        Raises `ConfigError`, and keeps what it had, if the document is no such state.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"a controller state must be a JSON object, got {state!r:.40}")
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"version of a controller state must be {STATE_VERSION}, "
                f"got {state.get('version')!r}"
            )
        if state.get("policy") != self.config.policy:
            raise ConfigError(
                f"the state is of policy {state.get('policy')!r}, this controller runs "
                f"'{self.config.policy}'"
            )
        if state.get("candidates") != self._listed():
            raise ConfigError(
                "the state is of a controller with other buckets or candidates than this one's"
            )
        policy = _POLICIES[self.config.policy](self.config)  # a document that fails leaves no trace
        try:
            json.dumps(state["learnt"], allow_nan=False)  # raises for NaN and infinities
            check_alike(state["learnt"], policy.state_dict())
            policy.load_state_dict(state["learnt"])
            next_id, bucket, below = (int(state[n]) for n in ("next_id", "bucket", "rounds_below"))
            current = [int(policy.current(index)) for index in range(len(self._candidates))]
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise ConfigError(
                f"the state is not one of this configuration: {type(error).__name__}: {error}"
            ) from error
        sizes = [len(candidates) for candidates in self._candidates]
        if not all(0 <= place < size for place, size in zip(current, sizes, strict=True)):
            raise ConfigError(
                f"the state's current candidates {current} are not positions of this "
                f"configuration's, which has {sizes} per bucket"
            )
        if not -1 <= bucket < len(sizes) or next_id < 0 or below < 0:
            raise ConfigError(
                f"the state's bucket must be between -1 and {len(sizes) - 1} and next_id and "
                f"rounds_below at least 0, got {bucket}, {next_id} and {below}"
            )
        self._policy = policy
        self._next_id, self._bucket, self._rounds_below = next_id, bucket, below
        self._pending.clear()

    def _listed(self) -> list[list[list[int]]]:
        """Return [K, d] of every candidate by bucket."""
        return [[[c.num_speculative_tokens, c.draft_loops] for c in b] for b in self._candidates]

    def _bucket_of(self, batch_size: int) -> int:
        """Return the bucket: a larger one at once, a smaller one only for good.

        Just below its edge a bucket is kept for `STAY_ROUNDS` rounds. Its candidates fit any
        smaller batch, while those of a bucket below might not fit a larger one.
        """
        sizes = self._bucket_by_size
        bucket = sizes[batch_size] if 0 < batch_size < len(sizes) else self._outside(batch_size)
        current = self._bucket
        if bucket >= current:
            self._bucket = bucket
            self._rounds_below = 0
            return bucket
        self._rounds_below += 1
        edge = self.config.buckets[current].min_batch_size
        if self._rounds_below > STAY_ROUNDS or edge - batch_size >= FAR_BEYOND:
            self._bucket = bucket
            self._rounds_below = 0
            return bucket
        return current

    def _outside(self, batch_size: int) -> int:
        return len(self._candidates) - 1 if batch_size > 0 else 0

    def _start_run(
        self, plan_id: int, bucket: int, candidate: Candidate, probe: bool, reason: str
    ) -> None:
        if self._run[4]:
            run = PlanRun(*self._run)
            self._runs.append(run)
            self._off_rounds += self._off_part(run)
            self._probe_rounds += run.rounds if run.probe else 0
        self._run = [plan_id, bucket, candidate, probe, 1]
        if not probe:
            if self._running is not None and candidate != self._running:
                switch = Switch(plan_id, bucket, self._running, candidate, reason)
                self._switch_counts[bucket, switch.direction] += 1
                self._switches.append(switch)
            self._running = candidate

    def _off_part(self, run: PlanRun) -> int:
        is_off = run.candidate.num_speculative_tokens == 0 and self._has_choice[run.bucket]
        return run.rounds if is_off else 0
