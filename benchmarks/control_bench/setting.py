"""What a baseline knows of a trace, and what all baselines share."""

from __future__ import annotations

from bisect import bisect_left

from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.simulate import believed_costs
from looped_spec.control.trace import Trace


class Setting:
    """Candidates by K, the cost table with the errors of a seed, and ranges of batch sizes."""

    def __init__(self, trace: Trace, seed: int) -> None:
        self.full_loops = trace.full_loops
        self.candidates = sorted(
            trace.candidates, key=lambda c: (c.num_speculative_tokens, c.draft_loops)
        )
        self.depths = sorted({c.draft_loops for c in self.candidates} - {0})
        self.shallowest = self.depths[0]
        self._costs: dict[tuple[int, int], dict[Candidate, float]] = {}
        for phase, table in zip(trace.phases, believed_costs(trace, seed), strict=True):
            self._costs.setdefault((phase.batch_size, phase.context_tokens), table)
        self._edges = sorted({phase.batch_size for phase in trace.phases})

    def cost(self, batch_size: int, context_tokens: int, candidate: Candidate) -> float:
        """Return the milliseconds of a round, as the table has them."""
        return self._costs[batch_size, context_tokens][candidate]

    def bucket(self, batch_size: int) -> int:
        """Return the index of the batch range: one up to each batch size of the trace."""
        return bisect_left(self._edges, batch_size)

    def nearest(self, num_speculative_tokens: int, draft_loops: int) -> Candidate:
        """Return the candidate nearest in depth, then in draft length; the lower one on a tie."""
        if num_speculative_tokens == 0:
            return PLAIN
        d = min(self.depths, key=lambda depth: (abs(depth - draft_loops), depth))
        return min(
            (c for c in self.candidates if c.draft_loops == d),
            key=lambda c: (
                abs(c.num_speculative_tokens - num_speculative_tokens),
                c.num_speculative_tokens,
            ),
        )


class Baseline:
    """A policy that chooses by `choose` and learns by `learn`, whatever the order of feedback."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._next_id = 0
        self._pending: dict[int, tuple[Candidate, int]] = {}

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return what to run, and whether it is a probe."""
        raise NotImplementedError

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Take note of a round of `candidate`."""
        raise NotImplementedError

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        """Return the plan of what `choose` says."""
        candidate, probe = self.choose(batch_size, context_tokens)
        plan = SpeculationPlan(self._next_id, candidate, probe=probe)
        self._pending[self._next_id] = candidate, batch_size
        self._next_id += 1
        return plan

    def observe(self, feedback: RoundFeedback) -> None:
        """Let `learn` know, once for every plan."""
        ran = self._pending.pop(feedback.plan_id, None)
        if ran is not None:
            self.learn(*ran, feedback)
