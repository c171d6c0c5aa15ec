"""Which candidate is current, and when another takes its place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from looped_spec.control.acceptance import AcceptanceModel
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.plan import PLAIN
from looped_spec.control.policy import Choice
from looped_spec.control.prospects import Prospects
from looped_spec.control.score_table import ScoreTable

STAY, SWITCHED, TURNED_ON, TURNED_OFF, UNSURE = range(5)
"""What a decision came to. UNSURE: plain decoding looks best, but some draft may still pay."""

RELUCTANT_TRIALS = 32
"""Trials for which drafting goes on against the odds, because some candidate may pay after all."""

USUAL_STAY_ROUNDS = 256
"""Rounds that drafting is expected to stay on or off, until it was seen how long it does."""

STAY_GAIN = 0.25
MAX_SHOWN = 99.0
MOST_CAUTION = 2.0
CAUTIOUS_TRIALS = 32
"""Most times the margin that is asked for; so many are asked for while little is known since a
change was found, and of a candidate that was left before."""


class Incumbent:
    """Keeps each bucket's current candidate until another is clearly ahead.

    Another is taken if it scores higher by `margin`, once the current one has had `dwell_trials`
    trials; by less, once that has added up over rounds to `lead_rounds`. More is asked of a
    candidate that was left before under the same workload, so that equals do not alternate, and
    just after a change was found. Between drafting and plain decoding the margin also covers what
    the change costs, spread over the rounds that it is expected to last. Drafting is not turned off
    while some candidate may still pay, for a while.

    Attributes:
        choice: the current candidate of the active bucket.
        dwell_trials: trials since it became current.
    """

    def __init__(
        self, config: AdaptiveSpecConfig, acceptance: AcceptanceModel, prospects: Prospects
    ) -> None:
        self._settings = settings = config.goodput
        self._acceptance = acceptance
        self._prospects = prospects
        self._switch_cost_rounds = config.switch_cost_rounds
        self._candidates = [bucket.candidates for bucket in config.buckets]
        self._positions = [_initial(config, bucket) for bucket in config.buckets]
        self._choices = [
            [Choice(position, False, (), "initial") for position in range(len(b.candidates))]
            for b in config.buckets
        ]
        self.choice = self._choices[0][self._positions[0]]
        self.dwell_trials = 0.0
        self._lead = 0.0
        self._left = [[0] * len(bucket.candidates) for bucket in config.buckets]
        self._turned_at = 0
        self._stay_rounds = float(USUAL_STAY_ROUNDS)
        # The dearer it is to come back, the surer.
        dearness = 1.0 + min(4.0, config.switch_cost_rounds)
        self._reluctance = self._most_reluctance = RELUCTANT_TRIALS * dearness
        self._off_optimism = settings.off_optimism * math.sqrt(dearness)

    def forgive(self) -> None:
        """Forget which candidates were left before: the workload or the batch has changed."""
        self._left = [[0] * len(row) for row in self._left]

    def position(self, bucket: int) -> int:
        """Return the position that is current in a bucket."""
        return self._positions[bucket]

    def reason(self, bucket: int) -> str:
        """Return why it is."""
        return self._choices[bucket][self._positions[bucket]].reason

    def enter(self, bucket: int) -> None:
        """Make a bucket the active one, whose candidate may be left at once."""
        self.choice = self._choices[bucket][self._positions[bucket]]
        self.dwell_trials = math.inf

    def decide(self, table: ScoreTable, margin: float, batch_size: int, round_number: int) -> int:
        """Take another candidate if it is far enough ahead; return what came of it.

        A margin of 0 takes whatever is best.
        """
        acceptance, settings = self._acceptance, self._settings
        acceptance.update()
        best, position = table.best(acceptance.tokens)
        current = self.choice.position
        if position == current:
            self._lead = 0.0
            return STAY
        if self.dwell_trials < settings.dwell_trials:
            return STAY
        arm, target = table.arms[current], table.arms[position]
        verdict = STAY
        if target.k:
            self._reluctance = self._most_reluctance
        elif margin and self._reluctance > 0.0:
            # Plain decoding shows nothing more: be sure that no draft pays.
            acceptance.couple()
            hope, draft = self._prospects.best_draft(table, self._off_optimism)
            if hope > best:
                self._reluctance -= batch_size
                verdict = UNSURE
                target, position = draft, draft.position
                best = table.score(position, acceptance.tokens)
        if position == current:
            return verdict
        times = min(2.0 ** self._left[table.bucket][position], MOST_CAUTION)
        if acceptance.trials_since_change < CAUTIOUS_TRIALS:
            times = MOST_CAUTION
        margin *= times
        is_turn = (arm.k > 0) != (target.k > 0)
        if is_turn:
            margin = max(margin, self._switch_cost_rounds / self._stay_rounds)
        score = table.score(current, acceptance.tokens)
        advantage = best / score - 1.0 if score > 0.0 else math.inf
        candidate = self._candidates[table.bucket][current]
        left = f"K={candidate.num_speculative_tokens} d={candidate.draft_loops}"
        if advantage > margin:
            percent = 100.0 * min(advantage, MAX_SHOWN)
            reason = f"{percent:.0f} % more tokens per second than {left} when chosen"
        else:
            self._lead += 0.0 if is_turn else advantage
            if self._lead <= settings.lead_rounds * times * times:
                return verdict
            reason = f"ahead of {left} for long, by {100.0 * advantage:.1f} % when chosen"
        if advantage > MOST_CAUTION * settings.margin:
            self.forgive()
        self._left[table.bucket][current] += 1
        self._switch(table.bucket, position, reason)
        if not is_turn:
            return SWITCHED
        self._stay_rounds += STAY_GAIN * (round_number - self._turned_at - self._stay_rounds)
        self._turned_at = round_number
        return TURNED_ON if target.k else TURNED_OFF

    def _switch(self, bucket: int, position: int, reason: str) -> None:
        self._positions[bucket] = position
        self._choices[bucket][position] = self.choice = Choice(position, False, (), reason)
        self.dwell_trials = 0.0
        self._lead = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON document."""
        return {
            "positions": list(self._positions),
            "reasons": [self.reason(bucket) for bucket in range(len(self._positions))],
            "dwell_trials": self.dwell_trials if self.dwell_trials < math.inf else None,
            "lead": self._lead,
            "left": [list(row) for row in self._left],
            "turned_at": self._turned_at,
            "stay_rounds": self._stay_rounds,
            "reluctance": self._reluctance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; `enter` is to follow."""
        self._positions = [int(position) for position in state["positions"]]
        for bucket, (position, reason) in enumerate(
            zip(self._positions, state["reasons"], strict=True)
        ):
            self._choices[bucket][position] = Choice(position, False, (), str(reason))
        dwell = state["dwell_trials"]
        self.dwell_trials = math.inf if dwell is None else float(dwell)
        self._lead = float(state["lead"])
        self._left = [[int(times) for times in row] for row in state["left"]]
        self._turned_at = int(state["turned_at"])
        self._stay_rounds = float(state["stay_rounds"])
        self._reluctance = float(state["reluctance"])


def _initial(config: AdaptiveSpecConfig, bucket: BatchBucket) -> int:
    """Return the position to start from: plain decoding if the cost table is not to be trusted."""
    is_doubtful = config.cost is not None and config.cost.mismatch is not None
    if is_doubtful and PLAIN in bucket.candidates:
        return bucket.candidates.index(PLAIN)
    return bucket.initial
