"""The default policy: the candidate with the most expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from looped_spec.control.acceptance import AcceptanceModel, count_trials
from looped_spec.control.cohort import Cohort
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost_correction import CostCorrection
from looped_spec.control.explorer import Explorer
from looped_spec.control.levels import DepthLevels
from looped_spec.control.plan import RoundFeedback
from looped_spec.control.policy import CandidateScore, Choice, Issued
from looped_spec.control.prospects import Prospects
from looped_spec.control.score_table import ScoreTable
from looped_spec.control.score_tables import BINS_PER_OCTAVE, ScoreTables, bin_edges, context_bin
from looped_spec.control.shadows import ShadowSchedule

COUPLE_TRIALS = 16
"""Trials after which what one depth showed is carried to the others."""

RELUCTANT_TRIALS = 32
"""Trials for which drafting goes on against the odds, because some candidate may pay after all."""

USUAL_DWELL_ROUNDS = 256
"""Rounds that drafting is expected to stay on or off, until it was seen how long it does."""


class GoodputPolicy:
    """Maximises E(K) / T over a bucket's candidates, plain decoding among them (control.md 2).

    Acceptance is learnt once for all batch sizes (`AcceptanceModel`), cost per size and candidate
    (`CostCorrection`). Another candidate is taken if it is ahead by `margin` after a dwell that is
    counted in trials, or by less for longer. What is not known well enough is probed or read out,
    within a budget of lost time (`Explorer`).
    """

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self._config = config
        self._settings = settings = config.goodput
        is_measured = config.cost is not None and config.cost.mismatch is None
        self._correction = CostCorrection(settings.cost_deviation, is_measured)
        longest: dict[int, int] = {}
        for candidate in config.candidates:
            if candidate.num_speculative_tokens:
                depth = candidate.draft_loops
                longest[depth] = max(longest.get(depth, 0), candidate.num_speculative_tokens)
        self._acceptance = AcceptanceModel(longest, settings, _levels(config, sorted(longest)))
        self._number = {depth: number for number, depth in enumerate(sorted(longest))}
        self._prospects = Prospects(self._acceptance, self._correction, settings.optimism)
        self._explorer = Explorer(
            settings,
            self._acceptance,
            self._prospects,
            ShadowSchedule(config.shadow_depths_available, config.shadow_cost_ratio),
            config.switch_cost_rounds,
        )
        self._tables = ScoreTables(config, longest, self._correction)
        self._cohort = Cohort()
        self._current = [bucket.initial for bucket in config.buckets]
        self._reasons = ["initial"] * len(config.buckets)
        self._choices = [
            [Choice(position, False, (), "initial") for position in range(len(b.candidates))]
            for b in config.buckets
        ]
        self._bucket = self._batch_size = self._context_bin = -1
        self._context_low = self._context_high = 0.0
        self._table: ScoreTable = self._tables.get(0, 1, 0)
        self._choice = self._choices[0][self._current[0]]
        self._is_fresh = False
        self._dwell_trials = 0.0
        self._lead = 0.0
        self._uncoupled = 0
        self._idle = self._asked = 1
        self._round = 0
        self._turned_at = 0
        # The dearer it is to come back, the surer.
        dearness = 1.0 + min(4.0, config.switch_cost_rounds)
        self._reluctance = self._most_reluctance = RELUCTANT_TRIALS * dearness
        self._off_optimism = settings.off_optimism * math.sqrt(dearness)
        self._stay_rounds = float(USUAL_DWELL_ROUNDS)

    # -- deciding

    def choose(
        self, bucket: int, batch_size: int, context_tokens: float, new_requests: int
    ) -> Choice:
        """Return what to run next."""
        if (
            bucket != self._bucket
            or batch_size != self._batch_size
            or not self._context_low <= context_tokens < self._context_high
        ):
            self._enter(bucket, batch_size, context_tokens)
        self._round += 1
        if new_requests and self._cohort.is_new(self._round, batch_size, new_requests):
            self._acceptance.keep(self._settings.cohort_trials)
            self._restart()
            self._is_fresh = True
        if self._is_fresh:
            self._is_fresh = False
            self._decide(self._settings.margin)
        self._idle -= 1
        if self._idle > 0:
            return self._choice
        return self._ask(batch_size)

    def _ask(self, batch_size: int) -> Choice:
        """Let the explorer say what the round is used for beside."""
        position = self._choice.position
        self._acceptance.update()
        errand = self._explorer.step(
            self._table, position, batch_size, self._asked - max(self._idle, 0)
        )
        self._idle = self._asked = errand.rest
        shadows = tuple([self._acceptance.depths[depth] for depth in errand.shadows])
        if errand.position is not None:
            return Choice(errand.position, True, shadows, "probe")
        if shadows:
            return Choice(position, False, shadows, self._choice.reason)
        return self._choice

    def _restart(self) -> None:
        """Look at everything again, soon."""
        self._explorer.restart()
        self._hurry()

    def _hurry(self) -> None:
        """Have the explorer asked in the next round."""
        ahead = self._idle - 1
        if ahead > 0:
            self._idle -= ahead
            self._asked -= ahead

    def _enter(self, bucket: int, batch_size: int, context_tokens: float) -> None:
        """Move to the table of another batch size, context or bucket."""
        number = context_bin(context_tokens)
        self._context_low, self._context_high = bin_edges(number)
        is_other_bucket = bucket != self._bucket
        is_other_context = abs(number - self._context_bin) > BINS_PER_OCTAVE // 2
        self._bucket, self._batch_size, self._context_bin = bucket, batch_size, number
        self._table = table = self._tables.get(bucket, batch_size, number)
        table.refresh()
        settings = self._settings
        self._acceptance.memory_trials = max(
            settings.evidence_trials, settings.evidence_rounds * batch_size
        )
        self._is_fresh = True
        if is_other_bucket:
            self._explorer.burst = None
            self._dwell_trials = math.inf
            self._choice = self._choices[bucket][self._current[bucket]]
            self._set_alertness()
            self._decide(0.0)
        if is_other_bucket or is_other_context:
            self._restart()

    def _decide(self, margin: float) -> None:
        """Take another candidate if it is far enough ahead."""
        table, acceptance, settings = self._table, self._acceptance, self._settings
        acceptance.update()
        tokens = acceptance.tokens
        best, position = table.best(tokens)
        current = self._choice.position
        if position == current:
            self._lead = 0.0
            return
        if self._dwell_trials < settings.dwell_trials:
            return
        arm, target = table.arms[current], table.arms[position]
        score = table.score(current, tokens)
        if not target.k and margin and self._reluctance > 0:
            # Plain decoding shows nothing more: be sure that no draft pays.
            acceptance.couple()
            hope, draft = self._prospects.best_draft(table, self._off_optimism)
            if hope > best:
                self._reluctance -= self._batch_size
                self._hurry()
                target, position = draft, draft.position
                best = table.score(position, acceptance.tokens)
                if position == current:
                    return
            score = table.score(current, acceptance.tokens)
        elif target.k:
            self._reluctance = self._most_reluctance
        if arm.k != target.k and not (arm.k and target.k):
            margin = max(margin, self._config.switch_cost_rounds / self._stay_rounds)
        advantage = best / score - 1.0 if score > 0.0 else math.inf
        if advantage > margin:
            self._switch(position, f"{100 * min(advantage, 99.0):.0f} % more tokens per second")
        elif arm.k and target.k:
            self._lead += advantage
            if self._lead > settings.lead_rounds:
                self._switch(position, f"ahead for long, now by {100 * advantage:.1f} %")

    def _switch(self, position: int, reason: str) -> None:
        bucket = self._table.bucket
        was_on = self._table.arms[self._choice.position].k > 0
        self._current[bucket] = position
        self._reasons[bucket] = reason
        self._choices[bucket][position] = self._choice = Choice(position, False, (), reason)
        self._dwell_trials = 0.0
        self._lead = 0.0
        if was_on != (self._table.arms[position].k > 0):
            stayed = self._round - self._turned_at
            self._stay_rounds += 0.25 * (stayed - self._stay_rounds)
            self._turned_at = self._round
            if not was_on:
                self._acceptance.renew()
            self._explorer.burst = None
            self._explorer.budget.pause()
            self._set_alertness()
            self._idle = min(self._idle, 1)

    def _set_alertness(self) -> None:
        is_on = self._table.arms[self._choice.position].k > 0
        self._acceptance.alertness = 1.0 if is_on else self._settings.off_alertness

    # -- learning

    def learn(self, issued: Issued, feedback: RoundFeedback) -> bool:
        """Take in the trials and the time of a round; return whether its numbers make sense."""
        candidate = issued.candidate
        proposed, accepted = feedback.proposed, feedback.accepted
        k = candidate.num_speculative_tokens
        ran = feedback.num_speculative_tokens
        counted = count_trials(proposed, accepted, k)
        if counted is None or (ran is not None and ran > k):
            return False
        counts, hits = counted
        trials = 0
        if counts:
            trials = counts[0]
            number = self._number[candidate.draft_loops]
            self._explorer.ran(number)
            self._uncoupled += trials
            if self._acceptance.record(number, counts, hits):
                self._changed()
            elif self._uncoupled >= COUPLE_TRIALS:
                self._uncoupled = 0
                self._acceptance.couple()
            self._dwell_trials += trials
            self._is_fresh = True
        else:
            self._dwell_trials += len(proposed)
        if issued.probe:
            self._probed(issued, accepted, trials, hits[0] if trials else 0)
        if feedback.shadow:
            self._learn_shadows(issued, feedback)
        if not feedback.num_prefill_tokens and 0.0 < feedback.seconds < math.inf:
            if ran is None:
                ran = max(proposed, default=0) if k else 0
            self._learn_cost(issued, ran, feedback)
        return True

    def _probed(self, issued: Issued, accepted: tuple[int, ...], trials: int, hits: int) -> None:
        """Charge a round of a probe with what it lost: its time in rounds of the current candidate,
        less its tokens in those of such a round."""
        table = self._table
        if issued.bucket != table.bucket:
            return
        current = table.arms[self._current[table.bucket]]
        usual = self._acceptance.tokens[current.depth][current.k] if current.k else 1.0
        tokens = 1.0 + sum(accepted) / len(accepted) if accepted else usual
        loss = table.cost(table.arms[issued.position]) / table.cost(current) - tokens / usual
        self._explorer.heard(issued.position, trials, hits, loss)

    def _learn_shadows(self, issued: Issued, feedback: RoundFeedback) -> None:
        """Take in what other depths would have accepted. Beside plain decoding, that is all there
        is, so a change is told from it as well."""
        is_plain = not issued.candidate.num_speculative_tokens
        for shadow in feedback.shadow:
            number = self._number.get(shadow.draft_loops)
            if number is None:
                continue
            longest = max(shadow.proposed, default=0)
            counted = count_trials(shadow.proposed, shadow.accepted, longest)
            if counted is None or not counted[0]:
                continue
            self._explorer.ran(number)
            if not is_plain:
                self._acceptance.shadow(number, *counted)
            elif self._acceptance.record(number, *counted):
                self._changed()
        self._explorer.shadows.answered()
        self._acceptance.couple()
        self._uncoupled = 0
        self._is_fresh = True

    def _learn_cost(self, issued: Issued, k: int, feedback: RoundFeedback) -> None:
        table = self._table
        if issued.bucket != self._bucket or issued.batch_size != self._batch_size:
            table = self._tables.get(
                issued.bucket, issued.batch_size, context_bin(issued.context_tokens)
            )
        arm = table.arms[issued.position]
        if arm.k != k:
            return  # cut short: not what a round of this K takes
        ms = 1000.0 * feedback.seconds
        if feedback.shadow:
            usual = table.cost(arm) * math.exp(self._correction.common)
            self._explorer.shadows.learn_cost((ms - usual) / table.loop_ms, len(feedback.shadow))
        elif self._correction.learn(arm.cell, math.log(ms / arm.base_ms)):
            table.set_cost(arm)
            if table is self._table:
                self._is_fresh = True

    def _changed(self) -> None:
        """Act on a change of the workload: all may have to be looked at again."""
        self._uncoupled = 0
        self._dwell_trials = max(self._dwell_trials, self._settings.dwell_trials)
        self._restart()

    # -- telling

    def current(self, bucket: int) -> int:
        """Return the position that runs when nothing is probed."""
        return self._current[bucket]

    def overruled(self, bucket: int, choice: Choice, position: int) -> None:
        """Take back a round of a probe that did not run."""
        if choice.probe:
            self._explorer.taken_back()

    def reason(self, bucket: int) -> str:
        """Return why the current candidate is current."""
        return self._reasons[bucket]

    def scores(
        self, bucket: int, batch_size: int, context_tokens: float
    ) -> tuple[CandidateScore, ...]:
        """Return expected tokens, corrected cost and their quotient, tokens per ms and request."""
        table = self._tables.get(bucket, batch_size, context_bin(context_tokens))
        table.refresh()
        self._acceptance.couple()
        tokens = self._acceptance.tokens
        scores = []
        for arm, candidate in zip(table.arms, self._config.buckets[bucket].candidates, strict=True):
            expected = tokens[arm.depth][arm.k] if arm.k else 1.0
            cost = table.cost(arm)
            scores.append(CandidateScore(candidate, expected, cost, expected / cost))
        return tuple(scores)

    def notes(self) -> tuple[str, ...]:
        """Return what else a user should know."""
        return ()

    def counters(self) -> dict[str, float]:
        """Return what probes and readouts cost so far, in rounds, and how many changes were
        found."""
        return {
            "probe_cost_rounds": self._explorer.budget.spent,
            "shadow_cost_rounds": self._explorer.shadows.spent,
            "changes": float(self._acceptance.changes),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learnt as a JSON document."""
        return {
            "current": list(self._current),
            "acceptance": self._acceptance.state_dict(),
            "cost": self._correction.state_dict(),
            "explorer": self._explorer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._current = [int(position) for position in state["current"]]
        self._acceptance.load_state_dict(state["acceptance"])
        self._correction.load_state_dict(state["cost"])
        self._explorer.load_state_dict(state["explorer"])
        self._tables.clear()
        self._bucket = -1
        self._table = self._tables.get(0, 1, 0)


def _levels(config: AdaptiveSpecConfig, depths: list[int]) -> DepthLevels:
    """Return what is expected of the first draft at each depth before anything is seen."""
    settings = config.goodput
    base = math.log(settings.base_acceptance / (1.0 - settings.base_acceptance))
    given = dict(config.depth_offsets or ())
    means = [
        base + given.get(d, settings.depth_offset_logits * math.log2(d / depths[0])) for d in depths
    ]
    return DepthLevels(means, settings.level_deviation, settings.offset_deviation)
