"""The policy of the RFC: an acceptance EMA per candidate, thresholds, one position a move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import log2
from typing import Any

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.cost_model import CostModel
from looped_spec.control.goodput_settings import check_number
from looped_spec.control.plan import PLAIN, RoundFeedback
from looped_spec.control.policy import CandidateScore, Choice, Issued, is_consistent
from looped_spec.control.thresholds import break_even, draft_acceptance_rate, shifted
from looped_spec.errors import ConfigError, check_int

THRESHOLD_CONTEXT = 512
"""Context, in tokens, at which thresholds are derived from a cost table."""


@dataclass
class BucketState:
    """What the policy knows of one batch bucket.

    `ema` and `rounds` are per position of the candidate list. `since_move` counts rounds of
    feedback of the current candidate since the last decision. While off, `waited` counts rounds
    until the next probe, which starts when it reaches `interval`; `probe_left` and `probe_seen`
    count the rounds of a probe that are still to run and those that came back.
    """

    position: int
    ema: list[float]
    rounds: list[int]
    since_move: int = 0
    is_off: bool = False
    waited: int = 0
    interval: int = 0
    probe_left: int = 0
    probe_seen: int = 0
    reason: str = "initial"

    def check(self) -> None:
        """Raise `ConfigError` unless everything is what it should be; a document may hold any."""
        for value in self.ema:
            check_number("ema of a bucket", value, 0.0, 1.0)
        for name in ("position", "since_move", "waited", "interval", "probe_left", "probe_seen"):
            check_int(f"{name} of a bucket", getattr(self, name), 0)
        for value in self.rounds:
            check_int("rounds of a bucket", value, 0)
        if not isinstance(self.is_off, bool) or not isinstance(self.reason, str):
            raise ConfigError("is_off and reason of a bucket must be true or false, and a text")


@dataclass(frozen=True)
class _Ladder:
    """The rungs of a bucket: positions with K > 0 in order, the position of K = 0 if there is one,
    and per position the thresholds. Below `off_below` of the lowest rung, plain decoding pays."""

    rungs: tuple[int, ...]
    off: int | None
    up: tuple[float, ...]
    down: tuple[float, ...]
    off_below: float
    place: dict[int, int] = field(default_factory=dict)


class EmaPolicy:
    """Moves one position up or down by E <- (1 - beta) E + beta r, r = accepted / proposed (RFC,
    Phase 1), and turns drafting off with exponential backoff of probes (Phase 2)."""

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self._config = config
        self._cost = CostModel(config)
        self._ladders = tuple(self._ladder(bucket) for bucket in config.buckets)
        self._states = [self._initial(i, bucket) for i, bucket in enumerate(config.buckets)]
        self._last_bucket = -1
        self._joined = 0

    def choose(
        self, bucket: int, batch_size: int, context_tokens: float, new_requests: int
    ) -> Choice:
        """Return the current candidate, after moving it if it is time to."""
        state, ladder = self._states[bucket], self._ladders[bucket]
        if not ladder.rungs:
            return Choice(state.position, False, (), state.reason)
        self._joined += new_requests
        if bucket != self._last_bucket or 2 * self._joined >= batch_size:
            if bucket != self._last_bucket or new_requests:
                state.interval = self._config.probe_interval
            self._joined = 0
            self._last_bucket = bucket
        if state.is_off:
            return self._while_off(state, ladder)
        self._move(state, ladder)
        return Choice(state.position, False, (), state.reason)

    def learn(self, issued: Issued, feedback: RoundFeedback) -> bool:
        """Update the EMA of the candidate that ran; rounds without a draft teach nothing."""
        if not is_consistent(feedback, issued.candidate.num_speculative_tokens):
            return False
        proposed = sum(feedback.proposed)
        if not proposed:
            return True
        state, j = self._states[issued.bucket], issued.position
        rate = sum(feedback.accepted) / proposed
        beta = self._config.ema_beta
        if state.rounds[j]:
            state.ema[j] += beta * (rate - state.ema[j])
        else:
            state.ema[j] = rate
        state.rounds[j] += 1
        if state.is_off:
            state.probe_seen += 1
        elif j == state.position:
            state.since_move += 1
        return True

    def current(self, bucket: int) -> int:
        """Return the position that runs when nothing is probed."""
        state, ladder = self._states[bucket], self._ladders[bucket]
        return ladder.off if state.is_off and ladder.off is not None else state.position

    def overruled(self, bucket: int, choice: Choice, position: int) -> None:
        """Take back a round of a probe that did not run."""
        if choice.probe:
            self._states[bucket].probe_left += 1

    def reason(self, bucket: int) -> str:
        """Return why the current candidate is current."""
        return self._states[bucket].reason

    def scores(
        self, bucket: int, batch_size: int, context_tokens: float
    ) -> tuple[CandidateScore, ...]:
        """Return each candidate with its EMA as score; tokens are those that the EMA implies."""
        scores = []
        state = self._states[bucket]
        for j, candidate in enumerate(self._config.buckets[bucket].candidates):
            tokens = 1 + candidate.num_speculative_tokens * state.ema[j]
            cost = self._cost.ms(batch_size, context_tokens, candidate)
            scores.append(CandidateScore(candidate, tokens, cost, state.ema[j]))
        return tuple(scores)

    def notes(self) -> tuple[str, ...]:
        """Return nothing."""
        return ()

    def counters(self) -> dict[str, float]:
        """Return nothing beside the controller's counts."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every bucket, and whose round was the last."""
        return {
            "buckets": [asdict(state) for state in self._states],
            "last_bucket": self._last_bucket,
            "joined": self._joined,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        states = [BucketState(**bucket) for bucket in state["buckets"]]
        for mine, loaded in zip(self._states, states, strict=True):
            loaded.check()
            if len(loaded.ema) != len(mine.ema) or len(loaded.rounds) != len(mine.rounds):
                raise ValueError("buckets have other numbers of candidates")
        self._states = states
        self._last_bucket = int(state["last_bucket"])
        self._joined = int(state["joined"])

    def _move(self, state: BucketState, ladder: _Ladder) -> None:
        j = state.position
        if j not in ladder.place:
            return
        config = self._config
        if state.since_move < config.interval or state.rounds[j] < config.warmup_rounds:
            return
        state.since_move = 0
        place, ema = ladder.place[j], state.ema[j]
        if ema > ladder.up[j] and place + 1 < len(ladder.rungs):
            self._go(state, ladder.rungs[place + 1], f"acceptance {ema:.3f} > {ladder.up[j]:.3f}")
        elif place > 0 and ema < ladder.down[j]:
            self._go(state, ladder.rungs[place - 1], f"acceptance {ema:.3f} < {ladder.down[j]:.3f}")
        elif place == 0 and ladder.off is not None and ema < ladder.off_below:
            state.is_off = True
            state.interval = config.probe_interval
            state.waited = state.probe_left = state.probe_seen = 0
            state.reason = f"off: acceptance {ema:.3f} < {ladder.off_below:.3f}"

    def _go(self, state: BucketState, position: int, reason: str) -> None:
        state.position = position
        state.reason = reason

    def _while_off(self, state: BucketState, ladder: _Ladder) -> Choice:
        assert ladder.off is not None, "without K = 0 in the list nothing is turned off"
        lowest = ladder.rungs[0]
        if state.probe_left:
            state.probe_left -= 1
            return Choice(lowest, True, (), "probe")
        if state.probe_seen >= self._config.probe_rounds:
            state.probe_seen = 0
            ema = state.ema[lowest]
            if ema > ladder.off_below:
                state.is_off = False
                state.since_move = 0
                self._go(state, lowest, f"probe: acceptance {ema:.3f} > {ladder.off_below:.3f}")
                return Choice(lowest, False, (), state.reason)
            state.interval = min(2 * state.interval, self._config.max_probe_interval)
        state.waited += 1
        if state.waited > state.interval:
            state.waited = state.probe_seen = 0
            state.probe_left = self._config.probe_rounds - 1
            state.rounds[lowest] = 0  # the probe's EMA starts from its own first round
            return Choice(lowest, True, (), "probe")
        return Choice(ladder.off, False, (), state.reason)

    def _initial(self, index: int, bucket: BatchBucket) -> BucketState:
        count = len(bucket.candidates)
        state = BucketState(bucket.initial, [0.0] * count, [0] * count)
        state.interval = self._config.probe_interval
        ladder = self._ladders[index]
        if bucket.initial == ladder.off and ladder.rungs:
            state.is_off = True
            state.position = ladder.rungs[0]
        return state

    def _ladder(self, bucket: BatchBucket) -> _Ladder:
        """Return the ladder of a bucket, with thresholds where none are given.

        Between neighbours of a ladder the threshold up is the lower one's acceptance at which both
        give the same tokens per second, the threshold down the upper one's at the same point.
        """
        arms = bucket.candidates
        rungs = tuple(j for j, arm in enumerate(arms) if arm.num_speculative_tokens)
        off = arms.index(PLAIN) if PLAIN in arms and rungs else None
        up, down = [1.0] * len(arms), [0.0] * len(arms)

        def cost(candidate: Any) -> float:
            return self._cost.ms(bucket.max_batch_size, THRESHOLD_CONTEXT, candidate)

        for low, high in pairwise(rungs):
            offset = self._offset(arms[low].draft_loops, arms[high].draft_loops)
            p = break_even(arms[low], arms[high], cost, offset)
            up[low] = draft_acceptance_rate(p, arms[low].num_speculative_tokens)
            down[high] = draft_acceptance_rate(
                shifted(p, offset), arms[high].num_speculative_tokens
            )
        off_below = 0.0
        if rungs:
            first = arms[rungs[0]]
            p = break_even(PLAIN, first, cost)
            off_below = draft_acceptance_rate(p, first.num_speculative_tokens)
        return _Ladder(
            rungs,
            off,
            bucket.up or tuple(up),
            bucket.down or tuple(down),
            bucket.down[rungs[0]] if bucket.down and rungs else off_below,
            {j: place for place, j in enumerate(rungs)},
        )

    def _offset(self, low: int, high: int) -> float:
        """Return by how much the log-odds of acceptance at depth `high` exceed those at `low`."""
        given = dict(self._config.depth_offsets or ())
        if low in given and high in given:
            return given[high] - given[low]
        return self._config.goodput.depth_offset_logits * log2(high / low)
