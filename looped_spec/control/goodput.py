"""The default policy: the candidate with the most expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from looped_spec.control.acceptance import AcceptanceModel, count_trials
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost_correction import CostCorrection
from looped_spec.control.cost_model import CostModel
from looped_spec.control.explorer import Explorer
from looped_spec.control.levels import DepthLevels
from looped_spec.control.plan import RoundFeedback
from looped_spec.control.policy import CandidateScore, Choice, Issued
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
        base = math.log(settings.base_acceptance / (1.0 - settings.base_acceptance))
        levels = DepthLevels(
            [base + offset for offset in offsets],
            settings.level_deviation,
            settings.offset_deviation,
        )
        self._acceptance = AcceptanceModel(longest, settings, levels)
        self._depth_number = {depth: number for number, depth in enumerate(depths)}
        self._longest = [longest[depth] for depth in depths]
        self._explorer = Explorer(settings, self._acceptance, self._correction)
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
        current = self._current[bucket]
        is_off = not self._table.arms[current].k
        self._acceptance.alertness = self._settings.off_alertness if is_off else 1.0
        probed = self._explorer.step(self._table, current, batch_size)
        if probed is None:
            return self._choices[bucket][current]
        return Choice(probed, True, (), "probe")

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
            self._explorer.drop()
            self._dwell = math.inf
            self._decide(margin=0.0)
        else:
            self._fresh = True
        if is_other_bucket or is_other_context:
            self._explorer.restart()

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
        if table.arms[position].depth == PLAIN_DEPTH and margin is None:
            # Plain decoding shows nothing more: be sure that no draft pays.
            arm = table.arms[current]
            deviation = math.sqrt(self._acceptance.levels.covariance[arm.depth][arm.depth])
            score *= self._explorer.gain(arm, settings.optimism * deviation)
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
        if was_plain != (not self._table.arms[position].k):
            self._explorer.drop()
            self._explorer.budget.pause()

    # -- learning

    def learn(self, issued: Issued, feedback: RoundFeedback) -> None:
        """Take in the trials and the time of a round."""
        ran = feedback.num_speculative_tokens
        k = issued.candidate.num_speculative_tokens if ran is None else ran
        trials = 0
        hits: list[int] = []
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
                    self._changed()
                elif self._uncoupled >= COUPLE_TRIALS:
                    self._uncoupled = 0
                    self._acceptance.couple()
                self._dwell += trials
                self._fresh = True
            is_full = ran is not None or max(feedback.proposed, default=0) == k
            self._explorer.ran(number)
        else:
            self._dwell += len(feedback.proposed)
        if issued.probe:
            self._probed(issued, feedback, trials, hits[0] if trials else 0)
        if is_full and not feedback.num_prefill_tokens and not feedback.shadow:
            self._learn_cost(issued, k, feedback.seconds)

    def _probed(self, issued: Issued, feedback: RoundFeedback, trials: int, hits: int) -> None:
        """Charge a round of a probe with what it lost: its time in rounds of the current candidate,
        less its tokens in those of such a round."""
        table = self._table
        if issued.bucket != table.bucket:
            return
        current = table.arms[self._current[table.bucket]]
        there = table.arms[issued.position]
        usual = self._acceptance.tokens[current.depth][current.k] if current.k else 1.0
        size = len(feedback.accepted)
        tokens = 1.0 + sum(feedback.accepted) / size if size else usual
        loss = table.cost(there) / table.cost(current) - tokens / usual
        self._explorer.heard(issued.position, trials, hits, loss)

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

    def _changed(self) -> None:
        self._uncoupled = 0
        self._dwell = max(self._dwell, self._settings.dwell_trials)
        self._explorer.restart()

    def _join(self, batch_size: int, new_requests: int) -> None:
        """Discount evidence if at least half of the requests came within `COHORT_ROUNDS` rounds."""
        start = self._round - COHORT_ROUNDS
        self._joins.append((self._round << 20) | new_requests)
        recent = [j for j in self._joins if j >> 20 > start and j]
        self._joins = recent
        if 2 * sum(j & 0xFFFFF for j in recent) >= batch_size and self._round > 1:
            self._joins = []
            self._acceptance.keep(self._settings.cohort_trials)
            self._explorer.restart()
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
        if choice.probe:
            self._explorer.taken_back()

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
            "probe_cost_rounds": self._explorer.budget.spent,
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
        self._table = self._table_of(0, 1, self._bin(0.0))
