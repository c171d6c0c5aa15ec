"""The default policy: the candidate with the most expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from looped_spec.control.acceptance import AcceptanceModel, count_trials
from looped_spec.control.change import UP
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost_correction import CostCorrection
from looped_spec.control.cost_model import CostModel
from looped_spec.control.coupling import DepthCoupling
from looped_spec.control.plan import RoundFeedback
from looped_spec.control.policy import CandidateScore, Choice, Issued
from looped_spec.control.probes import Burst, ProbeBudget
from looped_spec.control.score_table import PLAIN_DEPTH, Arm, ScoreTable

COUPLE_TRIALS = 16
CONTEXT_BINS_PER_OCTAVE = 4
MAX_TABLES = 512
COHORT_ROUNDS = 4


class GoodputPolicy:
    """Maximises E(K) / T over a bucket's candidates, plain decoding among them (control.md 2).

    Acceptance is learnt once for all batch sizes (`AcceptanceModel`), cost per size and candidate
    (`CostCorrection`). Another candidate is taken if it is ahead by `margin` after a dwell that is
    counted in trials, or by less for longer. What is not known well enough is probed, and probes
    may lose no more than `loss_budget` of the time (`ProbeBudget`).
    """

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self._config = config
        self._settings = settings = config.goodput
        self._cost = CostModel(config)
        self._correction = CostCorrection(settings.cost_deviation, self._cost.is_measured)
        longest: dict[int, int] = {}
        for candidate in config.candidates:
            if candidate.num_speculative_tokens:
                depth = candidate.draft_loops
                longest[depth] = max(longest.get(depth, 0), candidate.num_speculative_tokens)
        depths = sorted(longest)
        given = dict(config.depth_offsets or ())
        offsets = [
            given.get(d, settings.depth_offset_logits * math.log2(d / depths[0])) for d in depths
        ]
        coupling = DepthCoupling(
            offsets,
            settings.base_acceptance,
            settings.offset_deviation,
            settings.depth_prior_trials,
        )
        self._acceptance = AcceptanceModel(longest, settings, coupling)
        self._depth_number = {depth: number for number, depth in enumerate(depths)}
        self._longest = [longest[depth] for depth in depths]
        self._budget = ProbeBudget(settings)
        self._tables: dict[tuple[int, int, int], ScoreTable] = {}
        self._current = [bucket.initial for bucket in config.buckets]
        self._reasons = ["initial"] * len(config.buckets)
        self._choices = [
            [Choice(p, False, (), "") for p in range(len(b.candidates))] for b in config.buckets
        ]
        self._bucket = self._batch_size = self._context_bin = -1
        self._context_low = self._context_high = 0.0
        self._table: ScoreTable = self._table_of(0, 1, self._bin(0.0))
        self._fresh = False
        self._dwell = 0.0
        self._lead = 0.0
        self._uncoupled = 0
        self._explore_in = settings.explore_interval
        self._joins = [0] * COHORT_ROUNDS
        self._round = 0

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
        if new_requests:
            self._join(batch_size, new_requests)
        self._round += 1
        if self._fresh:
            self._fresh = False
            self._decide()
        budget = self._budget
        budget.earn()
        current = self._current[bucket]
        burst = budget.burst
        if burst is not None:
            probe = self._continue(burst)
            if probe is not None:
                return probe
        elif self._table.arms[current].k:
            self._explore_in -= 1
            if self._explore_in <= 0:
                self._explore_in = self._settings.explore_interval
                self._explore()
                if budget.burst is not None:
                    probe = self._continue(budget.burst)
                    if probe is not None:
                        return probe
        elif self._table.has_drafts:
            budget.waited += 1
            if budget.waited >= budget.interval and self._start_off_probe():
                assert budget.burst is not None
                probe = self._continue(budget.burst)
                if probe is not None:
                    return probe
        return self._choices[bucket][current]

    def _enter(self, bucket: int, batch_size: int, context_tokens: float) -> None:
        """Move to the table of another batch size, context or bucket."""
        number = self._bin(context_tokens)
        self._context_low, self._context_high = self._edges(number)
        is_other_bucket = bucket != self._bucket
        is_other_context = abs(number - self._context_bin) > CONTEXT_BINS_PER_OCTAVE // 2
        self._bucket, self._batch_size, self._context_bin = bucket, batch_size, number
        self._table = table = self._table_of(bucket, batch_size, number)
        if table.version != self._correction.version:
            table.refresh()
        settings = self._settings
        self._acceptance.memory_trials = max(
            settings.evidence_trials, settings.evidence_rounds * batch_size
        )
        if is_other_bucket:
            self._budget.burst = None
            self._dwell = math.inf
            self._decide(margin=0.0)
        else:
            self._fresh = True
        if is_other_bucket or is_other_context:
            self._budget.restart()
            self._explore_in = min(self._explore_in, 2)

    def _decide(self, margin: float | None = None) -> None:
        """Take another candidate if it is far enough ahead."""
        table = self._table
        tokens = self._acceptance.tokens
        best, position = table.best(tokens)
        bucket = table.bucket
        current = self._current[bucket]
        if position == current:
            self._lead = 0.0
            return
        score = table.score(current, tokens)
        settings = self._settings
        if self._dwell < settings.dwell_trials:
            return
        advantage = best / score - 1.0 if score > 0.0 else math.inf
        if margin is None:
            margin = settings.margin
        if advantage > margin:
            self._switch(position, f"{100 * min(advantage, 99.0):.0f} % more tokens per second")
            return
        self._lead += advantage
        if self._lead > settings.lead_rounds:
            self._switch(position, f"ahead for long, now by {100 * advantage:.1f} %")

    def _switch(self, position: int, reason: str) -> None:
        bucket = self._table.bucket
        was_plain = not self._table.arms[self._current[bucket]].k
        self._current[bucket] = position
        self._reasons[bucket] = reason
        self._choices[bucket][position] = Choice(position, False, (), reason)
        self._dwell = 0.0
        self._lead = 0.0
        burst = self._budget.burst
        if burst is not None and (burst.position == position or burst.is_off):
            self._budget.burst = None
        if was_plain != (not self._table.arms[position].k):
            self._budget.restart()
            self._budget.waited = 0.0

    # -- probing

    def _loss(self, position: int) -> float:
        """Return what a round of a candidate is expected to lose, in rounds of the current one."""
        table, tokens = self._table, self._acceptance.tokens
        current = self._current[table.bucket]
        here = table.score(current, tokens)
        there = table.score(position, tokens)
        share = max(0.0, 1.0 - there / here) if here > 0.0 else 0.0
        return share * table.cost(table.arms[position]) / table.cost(table.arms[current])

    def _continue(self, burst: Burst) -> Choice | None:
        """Return the next round of a probe; None if it is over or waits for what it has shown."""
        budget = self._budget
        if burst.bucket != self._bucket:
            budget.burst = None
            return None
        if burst.issued > burst.returned:
            burst.waited += 1
            if burst.waited > 64:
                budget.burst = None
            return None
        if burst.issued and self._is_over(burst):
            budget.burst = None
            if burst.is_off:
                budget.back_off(self._loss(burst.position))
            return None
        burst.issued += 1
        burst.waited = 0
        budget.spend(self._loss(burst.position))
        return Choice(burst.position, True, (), "probe")

    def _is_over(self, burst: Burst) -> bool:
        if burst.issued >= burst.limit:
            return True
        if burst.is_off:
            return 2 * burst.hits < burst.trials
        table, tokens = self._table, self._acceptance.tokens
        here = table.score(self._current[table.bucket], tokens)
        is_behind = table.score(burst.position, tokens) < (1.0 - self._settings.behind) * here
        return is_behind and burst.returned >= 4

    def _burst_rounds(self, least: int) -> int:
        return max(least, math.ceil(self._settings.burst_trials / self._batch_size))

    def _start_off_probe(self) -> bool:
        arms = [arm for arm in self._table.arms if arm.k]
        shortest = min(arm.k for arm in arms)
        position = min(
            (arm.position for arm in arms if arm.k == shortest), key=lambda p: (self._loss(p), p)
        )
        if self._budget.credit < self._loss(position):
            return False
        self._budget.burst = Burst(self._bucket, position, self._burst_rounds(1), True)
        return True

    def _explore(self) -> None:
        """Start a probe of the candidate that might be best, if any might and it can be paid."""
        table = self._table
        if table.version != self._correction.version:
            table.refresh()
            self._fresh = True
        settings = self._settings
        acceptance = self._acceptance
        tokens = acceptance.tokens
        current = table.arms[self._current[table.bucket]]
        here = table.score(current.position, tokens)
        best, target = here * 1.01, None
        for arm in table.arms:
            if arm is current or (arm.depth == PLAIN_DEPTH and not table.plain_score):
                continue
            variance = self._correction.deviation(arm.cell) ** 2
            if arm.depth not in (PLAIN_DEPTH, current.depth):
                slope = self._slope(arm)
                variance += slope * slope * acceptance.level_variance(arm.depth)
            hope = table.score(arm.position, tokens) * math.exp(
                settings.optimism * math.sqrt(variance)
            )
            if hope > best:
                best, target = hope, arm
        if target is None:
            return
        rounds = self._burst_rounds(2) if target.k else 2
        if self._budget.credit >= rounds * self._loss(target.position):
            self._budget.burst = Burst(self._bucket, target.position, rounds, False)

    def _slope(self, arm: Arm) -> float:
        """Return d log E(K) / d x, x the log-odds of the acceptance of all positions."""
        chances = self._acceptance.chances(arm.depth)
        survival = weighted = 0.0
        total, survival = 1.0, 1.0
        for position in range(arm.k):
            survival *= chances[position]
            weighted += (position + 1) * survival
            total += survival
        return (1.0 - chances[0]) * weighted / total

    # -- learning

    def learn(self, issued: Issued, feedback: RoundFeedback) -> None:
        """Take in the trials and the time of a round."""
        ran = feedback.num_speculative_tokens
        k = issued.candidate.num_speculative_tokens if ran is None else ran
        trials = 0
        is_full = True
        if k and issued.candidate.num_speculative_tokens:
            longest = issued.candidate.num_speculative_tokens
            counted = count_trials(feedback.proposed, feedback.accepted, longest)
            if counted is None or k > longest:
                return
            counts, hits = counted
            number = self._depth_number[issued.candidate.draft_loops]
            if counts:
                trials = counts[0]
                change = self._acceptance.record(number, counts, hits)
                self._uncoupled += trials
                if change:
                    self._changed(change)
                elif self._uncoupled >= COUPLE_TRIALS:
                    self._uncoupled = 0
                    self._acceptance.couple()
                self._dwell += trials
                self._fresh = True
            is_full = ran is not None or max(feedback.proposed, default=0) == k
            burst = self._budget.burst
            if burst is not None and issued.probe and issued.position == burst.position:
                burst.returned += 1
                if counts:
                    burst.trials += trials
                    burst.hits += hits[0]
        else:
            self._acceptance.age(0.25)
            self._dwell += len(feedback.proposed)
            burst = self._budget.burst
            if burst is not None and issued.probe and issued.position == burst.position:
                burst.returned += 1
        if is_full and not feedback.num_prefill_tokens and not feedback.shadow:
            self._learn_cost(issued, k, feedback.seconds)

    def _learn_cost(self, issued: Issued, k: int, seconds: float) -> None:
        if not 0.0 < seconds < math.inf:
            return
        table = self._table
        if issued.bucket != self._bucket or issued.batch_size != self._batch_size:
            table = self._table_of(
                issued.bucket, issued.batch_size, self._bin(issued.context_tokens)
            )
        arm = table.arms[issued.position]
        if arm.k != k:
            return
        if self._correction.learn(arm.cell, math.log(1000.0 * seconds / arm.base_ms)):
            table.set_cost(arm)
            if table is self._table:
                self._fresh = True

    def _changed(self, change: int) -> None:
        self._uncoupled = 0
        self._dwell = max(self._dwell, self._settings.dwell_trials)
        self._explore_in = min(self._explore_in, 2)
        if change == UP or not self._table.arms[self._current[self._table.bucket]].k:
            self._budget.restart()

    def _join(self, batch_size: int, new_requests: int) -> None:
        """Discount evidence if at least half of the requests came within `COHORT_ROUNDS` rounds."""
        start = self._round - COHORT_ROUNDS
        self._joins.append((self._round << 20) | new_requests)
        recent = [j for j in self._joins if j >> 20 > start and j]
        self._joins = recent
        if 2 * sum(j & 0xFFFFF for j in recent) >= batch_size and self._round > 1:
            self._joins = []
            self._acceptance.keep(self._settings.cohort_trials)
            self._budget.restart()
            self._fresh = True

    # -- tables

    def _bin(self, context_tokens: float) -> int:
        """Return the number of a context's bin, a quarter of an octave wide."""
        if context_tokens < 16:
            return 0
        return int(CONTEXT_BINS_PER_OCTAVE * math.log2(context_tokens / 16)) + 1

    def _edges(self, number: int) -> tuple[float, float]:
        if number == 0:
            return -math.inf, 16.0
        low = 16 * 2 ** ((number - 1) / CONTEXT_BINS_PER_OCTAVE)
        return low * (1 - 1e-12), 16 * 2 ** (number / CONTEXT_BINS_PER_OCTAVE)

    def _table_of(self, bucket: int, batch_size: int, context_bin: int) -> ScoreTable:
        key = bucket, batch_size, context_bin
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = self._make_table(bucket, batch_size, context_bin)
        return table

    def _make_table(self, bucket: int, batch_size: int, context_bin: int) -> ScoreTable:
        low, high = self._edges(context_bin)
        context = math.sqrt(low * high) if context_bin else 8.0
        padded = self._config.padded(batch_size)
        size = padded.bit_length() * 2 + (padded > 1.4 * 2 ** (padded.bit_length() - 1))
        context_octave = context_bin // (2 * CONTEXT_BINS_PER_OCTAVE)
        arms = []
        for position, candidate in enumerate(self._config.buckets[bucket].candidates):
            depth = self._depth_number.get(candidate.draft_loops, PLAIN_DEPTH)
            base_ms = self._cost.ms(batch_size, context, candidate)
            cell = self._correction.cell(size, context_octave, candidate)
            arms.append(Arm(position, depth, candidate.num_speculative_tokens, base_ms, cell))
        return ScoreTable(
            bucket, arms, self._longest, self._correction, self._config.state_fresh_when_off
        )

    # -- telling

    def current(self, bucket: int) -> int:
        """Return the position that runs when nothing is probed."""
        return self._current[bucket]

    def overruled(self, bucket: int, choice: Choice, index: int) -> None:
        """Take back a round of a probe that did not run."""
        burst = self._budget.burst
        if choice.probe and burst is not None:
            burst.issued -= 1

    def reason(self, bucket: int) -> str:
        """Return why the current candidate is current."""
        return self._reasons[bucket]

    def scores(
        self, bucket: int, batch_size: int, context_tokens: float
    ) -> tuple[CandidateScore, ...]:
        """Return expected tokens, corrected cost and their quotient, tokens per second."""
        table = self._table_of(bucket, batch_size, self._bin(context_tokens))
        table.refresh()
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
        """Return what probes lost so far, in rounds, and how many changes were found."""
        return {
            "probe_cost_rounds": self._budget.spent,
            "changes": float(self._acceptance.changes),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learnt as a JSON document."""
        return {
            "current": list(self._current),
            "acceptance": self._acceptance.state_dict(),
            "cost": self._correction.state_dict(),
            "budget": self._budget.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._current = [int(position) for position in state["current"]]
        self._acceptance.load_state_dict(state["acceptance"])
        self._correction.load_state_dict(state["cost"])
        self._budget.load_state_dict(state["budget"])
        self._tables.clear()
        self._bucket = -1
        self._table = self._table_of(0, 1, self._bin(0.0))
