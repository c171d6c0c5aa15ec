"""What to run only to learn from it, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looped_spec.control.acceptance import AcceptanceModel
from looped_spec.control.cost_correction import CostCorrection
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.probe_budget import ProbeBudget
from looped_spec.control.score_table import PLAIN_DEPTH, Arm, ScoreTable

WAIT_ROUNDS = 64
"""Rounds after which a probe whose feedback never came is given up."""

WORTH = 1.01
"""What a candidate must promise, over what is current, to be probed."""


@dataclass
class Burst:
    """A probe of one candidate over one or more rounds, each handed out when the one before is
    known.

    Attributes:
        bucket: the bucket that it belongs to.
        arm: what is probed.
        limit: most rounds.
        is_off: plain decoding is current: the question is whether drafting pays again.
        issued: rounds handed out.
        returned: rounds whose outcome is known.
        trials: first drafts that were tried.
        hits: how many of them were accepted.
        waited: rounds since the last one was handed out.
        lost: what it lost, in rounds of the current candidate.
    """

    bucket: int
    arm: Arm
    limit: int
    is_off: bool
    issued: int = 0
    returned: int = 0
    trials: int = 0
    hits: int = 0
    waited: int = 0
    lost: float = 0.0


class Explorer:
    """Decides on probes.

    While drafting is off, a probe comes after a wait that doubles with each that found nothing, up
    to where probes lose `loss_budget` of the time. While it is on, every `explore_interval` rounds
    the candidate is probed that might be better than the current one by what is not known of it:
    its cost, or its depth's acceptance. A depth that does not run is doubted more each round; the
    doubt grows half as fast after each probe that found nothing new.
    """

    def __init__(
        self, settings: GoodputSettings, acceptance: AcceptanceModel, correction: CostCorrection
    ) -> None:
        self._settings = settings
        self._acceptance = acceptance
        self._correction = correction
        self.budget = ProbeBudget(settings)
        self.burst: Burst | None = None
        self._countdown = settings.explore_interval
        self._round = 0
        self._seen = [0] * len(acceptance.depths)
        self._ran = [0] * len(acceptance.depths)
        self._doubt = [settings.doubt_variance] * len(acceptance.depths)

    def restart(self) -> None:
        """Look again soon at everything: the workload or the batch has changed."""
        self.budget.restart()
        self._countdown = min(self._countdown, 2.0)

    def drop(self) -> None:
        """Give up the probe under way."""
        self.burst = None

    def step(self, table: ScoreTable, position: int, batch_size: int) -> int | None:
        """Count a round, and return what it should probe: a position, or None for the current."""
        self._round += 1
        settings = self._settings
        is_on = table.arms[position].k > 0
        self.budget.earn(settings.explore_budget if is_on else settings.loss_budget)
        if self.burst is None:
            if is_on:
                self._countdown -= 1
                if self._countdown > 0:
                    return None
                self._countdown = settings.explore_interval
                self._look(table, position, batch_size)
            elif table.has_drafts and self.budget.wait():
                self._look_off(table, position, batch_size)
            if self.burst is None:
                return None
        return self._continue(table, position, batch_size)

    def taken_back(self) -> None:
        """Hear that the round just asked for does not run."""
        if self.burst is not None:
            self.burst.issued -= 1

    def ran(self, depth: int) -> None:
        """Hear that a depth ran."""
        self._seen[depth] = self._ran[depth] = self._round

    def heard(self, position: int, trials: int, hits: int, loss: float) -> None:
        """Hear what a round of a probe gave: first drafts, how many of them were accepted, and the
        time it lost in rounds of the current candidate."""
        self.budget.spend(loss)
        burst = self.burst
        if burst is None or burst.arm.position != position or burst.returned >= burst.issued:
            return
        burst.returned += 1
        burst.trials += trials
        burst.hits += hits
        burst.lost += loss

    def loss(self, table: ScoreTable, position: int, current: int) -> float:
        """Return what a round of a candidate is expected to lose, in rounds of the current one."""
        tokens = self._acceptance.tokens
        here = table.score(current, tokens)
        there = table.score(position, tokens)
        share = 1.0 - there / here if here > 0.0 else 0.0
        return share * table.cost(table.arms[position]) / table.cost(table.arms[current])

    def _continue(self, table: ScoreTable, position: int, batch_size: int) -> int | None:
        burst = self.burst
        assert burst is not None, "called with a probe under way"
        if burst.bucket != table.bucket or burst.arm.position == position:
            self.burst = None
            return None
        if burst.issued > burst.returned:
            burst.waited += 1
            if burst.waited > WAIT_ROUNDS:
                self.burst = None
            return None
        if burst.issued and (self.budget.credit < 0.0 or self._is_over(burst, table, position)):
            self.burst = None
            self._close(burst)
            return None
        burst.issued += 1
        burst.waited = 0
        return burst.arm.position

    def _is_over(self, burst: Burst, table: ScoreTable, position: int) -> bool:
        if burst.is_off:
            seems_rising = self._acceptance.is_rising or 2 * burst.hits >= burst.trials
            return burst.issued >= burst.limit or not seems_rising
        current = table.arms[position]
        here = max(table.score(position, self._acceptance.tokens), table.plain_score)
        if burst.arm.depth not in (PLAIN_DEPTH, current.depth):
            hope = max(
                self._hope(table, arm, current)
                for arm in table.arms
                if arm.depth == burst.arm.depth
            )
            return hope < WORTH * here or burst.issued >= 4 * burst.limit
        score = table.score(burst.arm.position, self._acceptance.tokens)
        is_behind = score < (1.0 - self._settings.behind) * here and burst.returned >= 4
        return is_behind or burst.issued >= burst.limit

    def _close(self, burst: Burst) -> None:
        """Wait longer after a probe that found nothing."""
        if burst.is_off:
            self.budget.back_off(burst.lost, self._settings.loss_budget)
        elif burst.arm.depth != PLAIN_DEPTH:
            depth = burst.arm.depth
            self._doubt[depth] = max(0.5 * self._doubt[depth], self._settings.min_doubt_variance)

    def _look_off(self, table: ScoreTable, position: int, batch_size: int) -> None:
        """Probe the depth that would pay first if acceptance rose, by its cheapest candidate."""
        current = table.arms[position]
        jump = self._settings.jump_logits**2
        target = max(
            (arm for arm in table.arms if arm.k),
            key=lambda arm: (self._hope(table, arm, current, jump), -arm.position),
        )
        arm = self._cheapest(table, target.depth, position)
        if self.budget.credit < self.loss(table, arm.position, position):
            return
        limit = max(1, math.ceil(2 * self._settings.burst_trials / batch_size))
        self.burst = Burst(table.bucket, arm, limit, True)

    def _look(self, table: ScoreTable, position: int, batch_size: int) -> None:
        """Probe the candidate that might be best, if any might and the credit is there."""
        current = table.arms[position]
        self._grow_doubts(current.depth)
        best = WORTH * max(table.score(position, self._acceptance.tokens), table.plain_score)
        target = None
        for arm in table.arms:
            if arm is current or (arm.depth == PLAIN_DEPTH and not table.plain_score):
                continue
            hope = self._hope(table, arm, current)
            if hope > best:
                best, target = hope, arm
        if target is None:
            self._look_at_stale(table, current, batch_size)
            return
        rounds = 2
        if target.depth not in (PLAIN_DEPTH, current.depth):
            target = self._cheapest(table, target.depth, position)
            rounds = max(1, math.ceil(self._settings.burst_trials / batch_size))
        if self.budget.credit >= rounds * max(0.0, self.loss(table, target.position, position)):
            self.burst = Burst(table.bucket, target, rounds, False)

    def _look_at_stale(self, table: ScoreTable, current: Arm, batch_size: int) -> None:
        """Spend credit that nothing else needs on the depth that was not seen for longest."""
        settings = self._settings
        depth = min(
            (arm.depth for arm in table.arms if arm.k and arm.depth != current.depth),
            key=lambda depth: (self._ran[depth], depth),
            default=None,
        )
        if depth is None or self._round - self._ran[depth] < settings.stale_rounds:
            return
        if self.budget.credit < 0.5 * settings.max_credit_rounds:
            return
        arm = self._cheapest(table, depth, current.position)
        rounds = max(1, math.ceil(settings.burst_trials / batch_size))
        self.burst = Burst(table.bucket, arm, rounds, False)

    def _grow_doubts(self, current_depth: int) -> None:
        """Doubt depths for the rounds since they ran, or since this was done last."""
        limit = self._settings.max_doubt_logits**2
        for depth, seen in enumerate(self._seen):
            if depth != current_depth:
                variance = self._doubt[depth] * (self._round - seen)
                self._acceptance.levels.doubt(depth, variance, limit)
            self._seen[depth] = self._round

    def _cheapest(self, table: ScoreTable, depth: int, current: int) -> Arm:
        """Return the candidate of a depth that loses least."""
        arms = [arm for arm in table.arms if arm.depth == depth]
        return min(arms, key=lambda arm: (self.loss(table, arm.position, current), arm.position))

    def _hope(self, table: ScoreTable, arm: Arm, current: Arm, jump: float = 0.0) -> float:
        """Return the score that a candidate may have at best, as far as is known, if that of the
        current one is as estimated; `jump` is a variance by which all depths may have moved."""
        score = table.score(arm.position, self._acceptance.tokens)
        score *= math.exp(self._settings.optimism * self._correction.deviation(arm.cell))
        if not arm.k or arm.depth == current.depth:
            return score
        covariance = self._acceptance.levels.covariance
        variance = covariance[arm.depth][arm.depth] + jump
        if current.k:
            shared = covariance[arm.depth][current.depth]
            variance -= shared * shared / covariance[current.depth][current.depth]
        return score * self.gain(arm, self._settings.optimism * math.sqrt(max(variance, 0.0)))

    def gain(self, arm: Arm, logits: float) -> float:
        """Return by what E(K) of a candidate would be multiplied if the log-odds of its first draft
        were higher by `logits`, and acceptance at each further position by the same factor."""
        chances: Sequence[float] = self._acceptance.chances(arm.depth)
        first = chances[0]
        factor = 1.0 / (first + (1.0 - first) * math.exp(-logits))
        total = there = survival = reached = 1.0
        for chance in chances[: arm.k]:
            survival *= chance
            reached *= min(factor * chance, 1.0)
            total += survival
            there += reached
        return there / total

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON document; a probe under way is not part of it."""
        return {
            "budget": self.budget.state_dict(),
            "countdown": self._countdown,
            "round": self._round,
            "seen": list(self._seen),
            "ran": list(self._ran),
            "doubt": list(self._doubt),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.budget.load_state_dict(state["budget"])
        self._countdown = float(state["countdown"])
        self._round = int(state["round"])
        self._seen = [int(seen) for seen in state["seen"]]
        self._ran = [int(ran) for ran in state["ran"]]
        self._doubt = [float(doubt) for doubt in state["doubt"]]
        self.burst = None
