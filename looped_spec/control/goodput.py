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
from looped_spec.control.incumbent import TURNED_OFF, TURNED_ON, UNSURE, Incumbent
from looped_spec.control.levels import DepthLevels
from looped_spec.control.plan import RoundFeedback
from looped_spec.control.policy import CandidateScore, Choice, Issued
from looped_spec.control.prospects import Prospects
from looped_spec.control.resumption import Resumption
from looped_spec.control.score_table import ScoreTable
from looped_spec.control.score_tables import BINS_PER_OCTAVE, ScoreTables, bin_edges, context_bin
from looped_spec.control.shadows import ShadowSchedule

DECIDE_TRIALS = 4
MAX_DECIDE_TRIALS = 16
"""Between two decisions come `DECIDE_TRIALS` + batch size trials, at most `MAX_DECIDE_TRIALS`."""

WORTH_A_NOTE = 0.05
"""Share of time by which plain decoding must be slower than the table says to be told of."""


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
        if config.acceptance_prior is not None:
            self._acceptance.believe(config.acceptance_prior)
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
        self._resumption = Resumption()
        self._incumbent = Incumbent(config, self._acceptance, self._prospects)
        self._bucket = self._batch_size = self._context_bin = -1
        self._context_low = self._context_high = 0.0
        self._table: ScoreTable = self._tables.get(0, 1, 0)
        self._is_fresh = False
        self._undecided = 0
        self._decide_trials = 1
        self._idle = self._asked = 1
        self._round = 0
        self._is_plain_forbidden = not config.state_fresh_when_off

    # -- deciding

    def choose(
        self, bucket: int, batch_size: int, context_tokens: float, new_requests: int
    ) -> Choice:
        """Return what to run next."""
        is_elsewhere = False
        if (
            bucket != self._bucket
            or batch_size != self._batch_size
            or not self._context_low <= context_tokens < self._context_high
        ):
            is_elsewhere = self._enter(bucket, batch_size, context_tokens)
        self._round += 1
        if new_requests:
            self._join(batch_size, new_requests)
        if self._is_fresh:
            self._is_fresh = False
            self._undecided = 0
            self._decide(self._settings.margin)
        self._idle -= 1
        if self._idle <= 0 and is_elsewhere:  # The first round is of what seems best.
            self._asked += 1 - self._idle
            self._idle = 1
        return self._incumbent.choice if self._idle > 0 else self._ask(batch_size)

    def _ask(self, batch_size: int) -> Choice:
        """Let the explorer say what the round is used for beside."""
        choice = self._incumbent.choice
        self._acceptance.couple()
        errand = self._explorer.step(
            self._table, choice.position, batch_size, self._asked - max(self._idle, 0)
        )
        self._idle = self._asked = errand.rest
        shadows = tuple([self._acceptance.depths[depth] for depth in errand.shadows])
        if errand.position is not None:
            if not self._table.arms[errand.position].k:
                self._stopped(choice.position)  # A round of plain decoding may spoil drafts too.
            return Choice(errand.position, True, shadows, "probe")
        if shadows:
            return Choice(choice.position, False, shadows, choice.reason)
        return self._incumbent.choice

    def _join(self, batch_size: int, new_requests: int) -> None:
        """Take note of new requests; most of a batch make a new workload."""
        self._resumption.joined()
        if self._cohort.is_new(self._round, batch_size, new_requests):
            self._acceptance.keep(self._settings.cohort_trials)
            self._incumbent.forgive()
            self._restart()
            self._is_fresh = True

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

    def _enter(self, bucket: int, batch_size: int, context_tokens: float) -> bool:
        """Move to the table of another batch size, context or bucket; return whether the bucket or
        the context is quite another."""
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
        self._decide_trials = min(DECIDE_TRIALS + batch_size, MAX_DECIDE_TRIALS)
        self._is_fresh = True
        if is_other_bucket:
            self._explorer.burst = None
            self._incumbent.enter(bucket)
            self._set_alertness()
            self._decide(0.0)
        if is_other_bucket or is_other_context:
            self._incumbent.forgive()
            self._restart()
        return is_other_bucket or is_other_context

    def _decide(self, margin: float) -> None:
        """Let another candidate take over if it should, and see to what follows."""
        before = self._incumbent.choice.position
        verdict = self._incumbent.decide(self._table, margin, self._batch_size, self._round)
        if verdict == UNSURE:
            self._hurry()
        elif verdict in (TURNED_ON, TURNED_OFF):
            if verdict == TURNED_ON:
                self._acceptance.renew()
            else:
                self._stopped(before)
            self._explorer.burst = None
            self._explorer.budget.pause()
            self._set_alertness()
            self._hurry()

    def _stopped(self, position: int) -> None:
        """Take note that plain decoding follows the candidate at a position."""
        depth = self._table.arms[position].depth
        self._resumption.stopped(self._acceptance.chances(depth)[0])

    def _set_alertness(self) -> None:
        is_on = self._table.arms[self._incumbent.choice.position].k > 0
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
            self._undecided += trials
            if self._acceptance.record(number, counts, hits):
                self._changed()
            elif self._acceptance.levels.has_moved:
                self._acceptance.couple()
            self._incumbent.dwell_trials += trials
            self._resumption.saw(trials, hits[0])
            if self._resumption.is_stale and not self._is_plain_forbidden:
                self._forbid_plain()
            if self._undecided >= self._decide_trials or issued.probe:
                self._is_fresh = True
        else:
            self._incumbent.dwell_trials += len(proposed)
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
        current = table.arms[self._incumbent.position(table.bucket)]
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
        self._is_fresh = True

    def _learn_cost(self, issued: Issued, k: int, feedback: RoundFeedback) -> None:
        table = self._table
        is_here = self._context_low <= issued.context_tokens < self._context_high
        is_here = is_here and issued.batch_size == self._batch_size
        if not is_here or issued.bucket != self._bucket:
            table = self._tables.get(
                issued.bucket, issued.batch_size, context_bin(issued.context_tokens)
            )
        arm = table.arms[issued.position]
        if arm.k != k:
            return  # cut short: not what a round of this K takes
        ms = 1000.0 * feedback.seconds
        expected = table.expected_ms(arm, issued.context_tokens)
        if feedback.shadow:
            usual = table.cost(arm) * expected / arm.base_ms * math.exp(self._correction.common)
            self._explorer.shadows.learn_cost((ms - usual) / table.loop_ms, len(feedback.shadow))
        elif self._correction.learn(arm.cell, math.log(ms / expected)):
            table.set_cost(arm)
            if table is self._table:
                self._is_fresh = True

    def _forbid_plain(self) -> None:
        """Never decode plainly again: requests would lose their drafts for good."""
        self._is_plain_forbidden = True
        self._tables.forbid_plain()
        self._table = self._tables.get(self._bucket, self._batch_size, self._context_bin)
        self._incumbent.dwell_trials = math.inf
        self._is_fresh = True

    def _changed(self) -> None:
        """Act on a change of the workload: all may have to be looked at again."""
        self._is_fresh = True
        self._incumbent.dwell_trials = math.inf
        self._restart()

    # -- telling

    def current(self, bucket: int) -> int:
        """Return the position that runs when nothing is probed."""
        return self._incumbent.position(bucket)

    def overruled(self, bucket: int, choice: Choice, position: int) -> None:
        """Take back a round of a probe that did not run."""
        if choice.probe:
            self._explorer.taken_back()

    def reason(self, bucket: int) -> str:
        """Return why the current candidate is current."""
        return self._incumbent.reason(bucket)

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
        notes = []
        cost = self._config.cost
        if cost is None:
            notes.append("no cost table: costs are those of the ideal formula until measured")
        elif cost.mismatch is not None:
            notes.append(f"the cost table is only a guess, {cost.mismatch}")
        prior = self._config.acceptance_prior
        if prior is not None:
            notes.append(
                f"acceptance starts from earlier measurements, worth {prior.trials:g} trials"
            )
        tax = self._correction.off_tax()
        if tax > WORTH_A_NOTE and cost is not None:
            notes.append(
                f"off costs {100 * tax:.0f} %: a plain round takes that much longer here than the "
                "cost table says, beside rounds with drafts"
            )
        if self._is_plain_forbidden:
            notes.append("plain decoding spoils later drafts of a request, so it is never chosen")
        if self._config.shadow_depths_available and not self._explorer.shadows.is_available:
            notes.append("no readout of other depths came back, so none are asked for")
        return tuple(notes)

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
            "incumbent": self._incumbent.state_dict(),
            "acceptance": self._acceptance.state_dict(),
            "cost": self._correction.state_dict(),
            "explorer": self._explorer.state_dict(),
            "resumption": self._resumption.state_dict(),
            "round": self._round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._incumbent.load_state_dict(state["incumbent"])
        self._acceptance.load_state_dict(state["acceptance"])
        self._correction.load_state_dict(state["cost"])
        self._explorer.load_state_dict(state["explorer"])
        self._resumption.load_state_dict(state["resumption"])
        self._round = int(state["round"])
        self._tables.clear()
        if self._resumption.is_stale:
            self._is_plain_forbidden = True
            self._tables.forbid_plain()
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
