"""The default policy: the candidate with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost_model import CostModel
from looped_spec.control.plan import RoundFeedback
from looped_spec.control.policy import CandidateScore, Choice, Issued


class GoodputPolicy:
    """First version: pooled discounted conditional acceptance per depth, argmax of E / T."""

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self._config = config
        self._cost = CostModel(config)
        self._current = [bucket.initial for bucket in config.buckets]
        self._accepted: dict[int, float] = {}
        self._trials: dict[int, float] = {}
        self._rounds = 0

    def choose(
        self, bucket: int, batch_size: int, context_tokens: float, new_requests: int
    ) -> Choice:
        """Return the best candidate, or now and then the cheapest that drafts."""
        scores = self.scores(bucket, batch_size, context_tokens)
        current = self._current[bucket]
        best = max(range(len(scores)), key=lambda j: scores[j].score)
        if scores[best].score > 1.03 * scores[current].score:
            self._current[bucket] = current = best
        self._rounds += 1
        if not scores[current].candidate.num_speculative_tokens and self._rounds % 32 == 0:
            drafting = [j for j, s in enumerate(scores) if s.candidate.num_speculative_tokens]
            if drafting:
                return Choice(min(drafting, key=lambda j: scores[j].cost_ms), True, (), "probe")
        return Choice(current, False, (), "most tokens per second")

    def learn(self, issued: Issued, feedback: RoundFeedback) -> None:
        """Count conditional trials of the depth that ran."""
        depth = issued.candidate.draft_loops
        trials = accepted = 0
        for p, a in zip(feedback.proposed, feedback.accepted, strict=True):
            trials += min(p, a + 1)
            accepted += a
        keep = max(0.0, 1 - trials / self._config.goodput.evidence_trials)
        self._trials[depth] = self._trials.get(depth, 0.0) * keep + trials
        self._accepted[depth] = self._accepted.get(depth, 0.0) * keep + accepted

    def current(self, bucket: int) -> int:
        """Return the position that runs when nothing is probed."""
        return self._current[bucket]

    def overruled(self, bucket: int, choice: Choice, index: int) -> None:
        """Do nothing yet."""

    def reason(self, bucket: int) -> str:
        """Return why the current candidate is current."""
        return "most tokens per second"

    def scores(
        self, bucket: int, batch_size: int, context_tokens: float
    ) -> tuple[CandidateScore, ...]:
        """Return how each candidate of a bucket is seen now."""
        scores = []
        for candidate in self._config.buckets[bucket].candidates:
            depth = candidate.draft_loops
            p = (self._accepted.get(depth, 0.0) + 5.6) / (self._trials.get(depth, 0.0) + 8)
            tokens = sum(p**i for i in range(candidate.num_speculative_tokens + 1))
            cost = self._cost.ms(batch_size, context_tokens, candidate)
            scores.append(CandidateScore(candidate, tokens, cost, tokens / cost))
        return tuple(scores)

    def notes(self) -> tuple[str, ...]:
        """Return nothing."""
        return ()

    def counters(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "current": list(self._current),
            "accepted": {str(d): n for d, n in self._accepted.items()},
            "trials": {str(d): n for d, n in self._trials.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._current = list(state["current"])
        self._accepted = {int(d): n for d, n in state["accepted"].items()}
        self._trials = {int(d): n for d, n in state["trials"].items()}
