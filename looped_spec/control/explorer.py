"""What to run only to learn from it, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from looped_spec.control.acceptance import AcceptanceModel
from looped_spec.control.burst import Burst, Errand
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.probe_budget import ProbeBudget
from looped_spec.control.prospects import Prospects
from looped_spec.control.score_table import PLAIN_DEPTH, Arm, ScoreTable
from looped_spec.control.shadows import ShadowSchedule

WAIT_ROUNDS = 64
"""Rounds after which a probe whose feedback never came is given up."""

IDLE_CREDIT = 0.5
"""Rounds of credit that are kept for probes of something promising."""

WORTH = 1.02
"""What a candidate must promise, over what is current, to be probed."""

TABLE_DOUBT = 0.2
"""How far, as a logarithm, the table may be off about plain decoding against what runs, for all
that is known before a plain round was seen here: then one is due, whatever the table says."""

PLAIN_ROUNDS = 2
COOL_ROUNDS = 64
MAX_COOL_ROUNDS = 1024
"""Rounds between two probes of one candidate that found nothing: the least and the most."""

CHECK_SHARE = 1.0
"""Share of `burst_trials` that it takes to check a change."""

URGENT_READOUTS = 4
UNSURE_VARIANCE = 0.1
ALL_DEPTHS_TURN = 4
"""While off, every so many readouts are of all depths instead of the most promising one."""


class Explorer:
    """Decides on probes and shadow readouts.

    While drafting is off, a probe comes after a wait that doubles with each that found nothing, up
    to where probes lose `loss_budget` of the time. While it is on, every `explore_interval` rounds
    the candidate is probed that might be better than the current one by what is not known of it:
    its cost, or its depth's acceptance. A depth that does not run is doubted more each round; the
    doubt grows half as fast after each probe that found nothing new. Where the engine reads out
    other depths, that takes the place of probes that only ask for acceptance.
    """

    def __init__(
        self,
        settings: GoodputSettings,
        acceptance: AcceptanceModel,
        prospects: Prospects,
        shadows: ShadowSchedule,
        switch_cost_rounds: float,
    ) -> None:
        self._settings = settings
        self._acceptance = acceptance
        self._prospects = prospects
        self._switch_cost = switch_cost_rounds
        self.shadows = shadows
        self.budget = ProbeBudget(settings)
        self.burst: Burst | None = None
        self._countdown = int(settings.explore_interval)
        self._urgent = 0
        self._round = self._restarted = 0
        self._checked = 0
        self._cooling: dict[tuple[int, int], tuple[int, int]] = {}
        count = len(acceptance.depths)
        self._seen = [0] * count
        self._doubted = [0] * count
        self._doubt = [settings.doubt_variance] * count

    def restart(self) -> None:
        """Look again soon at everything: the workload or the batch has changed."""
        self._restarted = self._round
        self.budget.restart()
        self._cooling.clear()
        self._countdown = min(self._countdown, 2)
        self._urgent = URGENT_READOUTS

    def step(self, table: ScoreTable, position: int, batch_size: int, rounds: int) -> Errand:
        """Return what the next round does; `rounds` have passed since the last call, this one
        included."""
        self._round += rounds
        settings = self._settings
        current = table.arms[position]
        is_on = current.k > 0
        self.budget.earn(rounds * (settings.explore_budget if is_on else settings.loss_budget))
        self.shadows.wait(rounds)
        shadows: tuple[int, ...] = ()
        rest = int(settings.explore_interval)
        if self.burst is None and table.has_drafts:
            if is_on:
                self._countdown -= rounds
                if self._countdown <= 0:
                    self._countdown = int(settings.explore_interval)
                    self._look(table, current, batch_size)
                rest = self._countdown
                if self.shadows.is_available:
                    shadows, wait = self._shadows_on(table, current)
                    rest = min(rest, wait)
            elif self.shadows.is_available:
                shadows, rest = self._shadows_off(table, current)
            else:
                if self.budget.wait(rounds):
                    self._look_off(table, current, batch_size)
                rest = max(1, math.ceil(self.budget.interval - self.budget.waited))
        if self.burst is None:
            return Errand(None, shadows, rest)
        return Errand(self._continue(self.burst, table, current), shadows, 1)

    def taken_back(self) -> None:
        """Hear that the round just asked for does not run."""
        if self.burst is not None:
            self.burst.issued -= 1

    def ran(self, depth: int) -> None:
        """Hear that a depth ran, or was read out."""
        self._seen[depth] = self._doubted[depth] = self._round

    def heard(self, position: int, trials: int, hits: int, loss: float) -> None:
        """Hear what a round of a probe gave: first drafts, how many of them were accepted, and the
        time it lost in rounds of the current candidate."""
        burst = self.burst
        is_mine = (
            burst is not None and burst.arm.position == position and burst.returned < burst.issued
        )
        if burst is not None and is_mine:
            if burst.is_off and not burst.returned:
                loss += self._switch_cost
            burst.returned += 1
            burst.trials += trials
            burst.hits += hits
            burst.lost += loss
        self.budget.spend(loss)

    def _continue(self, burst: Burst, table: ScoreTable, current: Arm) -> int | None:
        if burst.bucket != table.bucket or burst.arm.position == current.position:
            self.burst = None
            return None
        if burst.issued > burst.returned:
            burst.waited += 1
            if burst.waited > WAIT_ROUNDS:
                self.burst = None
            return None
        if burst.issued and (self.budget.credit < 0.0 or self._is_over(burst, table, current)):
            self.burst = None
            self._close(burst)
            return None
        burst.issued += 1
        burst.waited = 0
        return burst.arm.position

    def _is_over(self, burst: Burst, table: ScoreTable, current: Arm) -> bool:
        if burst.is_off:
            seems_rising = self._acceptance.is_rising or 2 * burst.hits >= burst.trials
            return burst.issued >= burst.limit or not seems_rising
        if burst.is_check:
            return burst.issued >= burst.limit or self._acceptance.unproven != burst.arm.depth
        here = self._prospects.best_known(table, current)
        depth = burst.arm.depth
        asks_acceptance = depth != current.depth or burst.arm.k > current.k
        if depth != PLAIN_DEPTH and asks_acceptance:
            arms = (burst.arm,) if depth == current.depth else table.of_depth[depth]
            is_hopeful = bool(self._prospects.hopes(table, current, arms, floor=WORTH * here))
            return not is_hopeful or burst.issued >= 4 * burst.limit
        score = self._prospects.score(table, burst.arm)
        is_behind = score < (1.0 - self._settings.behind) * here and burst.returned >= 4
        return is_behind or burst.issued >= burst.limit

    def _close(self, burst: Burst) -> None:
        """Wait longer after a probe that found nothing."""
        if burst.is_off:
            self.budget.back_off(burst.lost, self._settings.loss_budget)
            return
        key = burst.bucket, burst.arm.position
        wait = min(2 * self._cooling.get(key, (0, COOL_ROUNDS // 2))[1], MAX_COOL_ROUNDS)
        self._cooling[key] = self._round + wait, wait
        if burst.arm.depth != PLAIN_DEPTH:
            depth = burst.arm.depth
            self._doubt[depth] = max(0.5 * self._doubt[depth], self._settings.min_doubt_variance)

    def _look_off(self, table: ScoreTable, current: Arm, batch_size: int) -> None:
        """Probe the depth that would pay first if acceptance rose, by its cheapest candidate."""
        depth = self._most_promising(table, current)
        arm = self._prospects.cheapest(table, depth, current)
        if self.budget.credit < self._prospects.loss(table, arm, current) + self._switch_cost:
            return
        self.burst = Burst(table.bucket, arm, self._rounds(2.0, batch_size), True)

    def _most_promising(self, table: ScoreTable, current: Arm) -> int:
        jump = self._settings.jump_logits**2
        hopes = self._prospects.hopes(table, current, table.drafts, jump=jump)
        return max(hopes, key=lambda found: (found[0], -found[1].position))[1].depth

    def _look(self, table: ScoreTable, current: Arm, batch_size: int) -> None:
        """Probe the candidate that might be best, if any might and the credit is there."""
        self._grow_doubts(current.depth)
        if self._look_back(table, current, batch_size) or self._look_at_plain(table, current):
            return
        best, target = WORTH * self._prospects.best_known(table, current), None
        above = table.next_k(current)
        for hope, arm in self._prospects.hopes(table, current, table.arms, floor=best):
            if arm is current:
                continue
            if arm.depth == current.depth and arm.k > above:
                continue  # positions that do not run are looked at one step at a time
            if self._cooling.get((table.bucket, arm.position), (0, 0))[0] > self._round:
                continue
            if hope > best and hope > WORTH * self._prospects.score(table, arm):
                best, target = hope, arm
        if target is None:
            self._look_at_stale(table, current, batch_size)
            return
        rounds = 2
        if target.k > current.k and target.depth == current.depth:
            rounds = max(2, self._rounds(1.0, batch_size))
        if target.depth not in (PLAIN_DEPTH, current.depth):
            if self.shadows.is_available:
                if self._prospects.variance(target, current) > UNSURE_VARIANCE:
                    self._urgent = max(self._urgent, 1)
                    return
            else:
                target = self._prospects.cheapest(table, target.depth, current)
                rounds = self._rounds(1.0, batch_size)
        loss = self._prospects.loss(table, target, current)
        if self.budget.credit >= rounds * max(0.0, loss):
            self.burst = Burst(table.bucket, target, rounds, False)
        else:
            self._look_at_stale(table, current, batch_size)

    def _look_back(self, table: ScoreTable, current: Arm, batch_size: int) -> bool:
        """Probe the depth that showed a change and was left for it, once: what it was left for may
        have been bad luck, which nothing but the depth itself can tell. Return whether that was
        done."""
        depth = self._acceptance.unproven
        changes = self._acceptance.changes
        if depth in (-1, current.depth) or self._checked == changes or self.shadows.is_available:
            return False
        arms = table.of_depth.get(depth)
        if not arms:
            return False
        arm = min(arms, key=lambda arm: (table.cost(arm), arm.position))
        rounds = self._rounds(CHECK_SHARE, batch_size)
        self._checked = changes
        self.burst = Burst(table.bucket, arm, rounds, False, is_check=True)
        return True

    def _look_at_plain(self, table: ScoreTable, current: Arm) -> bool:
        """Probe plain decoding where it never ran, unless drafting is far ahead: whether drafting
        pays at all must not rest on what a table says. Return whether that was done."""
        plain = table.plain
        if plain is None or plain.cell.rounds or not table.plain_score:
            return False
        if self._round - self._restarted < self._settings.explore_interval:
            return False
        here = self._prospects.score(table, current)
        is_cool = self._cooling.get((table.bucket, plain.position), (0, 0))[0] <= self._round
        if not is_cool or table.plain_score * math.exp(TABLE_DOUBT) < here:
            return False
        if self.budget.credit < PLAIN_ROUNDS * self._prospects.loss(table, plain, current):
            return False
        self.burst = Burst(table.bucket, plain, PLAIN_ROUNDS, False)
        return True

    def _look_at_stale(self, table: ScoreTable, current: Arm, batch_size: int) -> None:
        """Spend credit that nothing else needs on the depth that was not seen for longest."""
        settings = self._settings
        if self.shadows.is_available:
            return
        others = [depth for depth in table.draft_depths if depth != current.depth]
        if not others:
            return
        depth = min(others, key=lambda depth: (self._seen[depth], depth))
        if self._round - self._seen[depth] >= settings.stale_rounds:
            arm = self._prospects.cheapest(table, depth, current)
            rounds = self._rounds(1.0, batch_size)
            if self.budget.credit > IDLE_CREDIT + rounds * self._prospects.loss(
                table, arm, current
            ):
                self.burst = Burst(table.bucket, arm, rounds, False)

    def _rounds(self, factor: float, batch_size: int) -> int:
        """Return the rounds that give `factor` times `burst_trials`."""
        return max(1, math.ceil(factor * self._settings.burst_trials / batch_size))

    def _grow_doubts(self, current_depth: int) -> None:
        """Doubt depths for the rounds since they ran, or since this was done last."""
        limit = self._settings.max_doubt_logits**2
        for depth, before in enumerate(self._doubted):
            if depth != current_depth:
                variance = self._doubt[depth] * (self._round - before)
                self._acceptance.levels.doubt(depth, variance, limit)
            self._doubted[depth] = self._round

    def _shadows_on(self, table: ScoreTable, current: Arm) -> tuple[tuple[int, ...], int]:
        """Return the depths to read out beside a round with drafts, and the rounds to the next."""
        depths = tuple(depth for depth in table.draft_depths if depth != current.depth)
        if not depths:
            return (), WAIT_ROUNDS
        cost = self.shadows.cost(len(depths), table.loop_ms / table.cost(current))
        share = self._settings.shadow_budget
        is_due = self.shadows.is_due(cost, share)
        if not is_due and self._urgent and self.budget.credit > cost:
            self.budget.spend(cost)
            is_due = True
        if not is_due:
            return (), max(1, math.ceil(self.shadows.interval(cost, share) - self.shadows.waited))
        self._urgent = max(0, self._urgent - 1)
        self.shadows.take(cost)
        return depths, 1 if self._urgent else self.shadows.interval(cost, share)

    def _shadows_off(self, table: ScoreTable, current: Arm) -> tuple[tuple[int, ...], int]:
        """Return the depths to read out beside a plain round, and the rounds to the next."""
        loop = table.loop_ms / table.cost(current)
        share = self._settings.loss_budget
        if (self.shadows.turn + 1) % ALL_DEPTHS_TURN:
            depths: tuple[int, ...] = (self._most_promising(table, current),)
        else:
            depths = table.draft_depths
        cost = self.shadows.cost(len(depths), loop)
        is_urgent = self._urgent > 0 or self._acceptance.is_rising
        is_due = self.shadows.is_due(cost, share)
        if not is_due and is_urgent and self.budget.credit > cost:
            is_due = True
        if not is_due:
            return (), max(1, math.ceil(self.shadows.interval(cost, share) - self.shadows.waited))
        self._urgent = max(0, self._urgent - 1)
        self.budget.spend(cost)
        self.shadows.take(cost)
        return depths, 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON document; a probe under way is not part of it."""
        return {
            "budget": self.budget.state_dict(),
            "shadows": self.shadows.state_dict(),
            "countdown": self._countdown,
            "urgent": self._urgent,
            "round": self._round,
            "restarted": self._restarted,
            "seen": list(self._seen),
            "doubted": list(self._doubted),
            "doubt": list(self._doubt),
            "cooling": [[*key, *wait] for key, wait in self._cooling.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.budget.load_state_dict(state["budget"])
        self.shadows.load_state_dict(state["shadows"])
        self._countdown = int(state["countdown"])
        self._urgent = int(state["urgent"])
        self._round = int(state["round"])
        self._restarted = int(state["restarted"])
        self._seen = [int(value) for value in state["seen"]]
        self._doubted = [int(value) for value in state["doubted"]]
        self._doubt = [float(value) for value in state["doubt"]]
        self._cooling = {
            (int(bucket), int(position)): (int(until), int(wait))
            for bucket, position, until, wait in state["cooling"]
        }
        self.burst = None
