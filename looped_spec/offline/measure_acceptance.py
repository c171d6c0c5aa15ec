"""Count which drafts are accepted, by depth and position, on texts of the selection group.

Runs with the longest drafts tell of all shorter ones: the i-th draft of a round is accepted or not
whatever stands behind it. Where a model can read out other depths beside a round, runs at the
deepest depth tell of the shallower ones too: a position is counted for a depth where its own drafts
up to there agree and the context was committed, and at the deepest depth least is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from looped_spec.control.acceptance import count_trials
from looped_spec.control.plan import Candidate
from looped_spec.offline.recording import RecordingPolicy
from looped_spec.offline.repetition import is_echo
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM


@dataclass
class Counts:
    """Conditional trials and hits per position: of those requests that had all drafts before
    accepted, how many proposed one here, and how many had it accepted."""

    trials: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, trials: Sequence[int], accepted: Sequence[int]) -> None:
        """Add counts of other rounds."""
        for mine, others in ((self.trials, trials), (self.accepted, accepted)):
            mine += [0] * (len(others) - len(mine))
            for position, count in enumerate(others):
                mine[position] += count


def measure_acceptance(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    candidate: Candidate,
    shadow_depths: Sequence[int],
    params: SamplingParams,
    first_seed: int = 0,
) -> dict[str, Any]:
    """Complete prompts as one batch; return counts per depth, `[d, trials, accepted]`, of the texts
    that are no echo, those of the echoes apart, and how many texts and tokens there are.

    The request of prompt i has the seed `first_seed` + i.
    """
    policy = RecordingPolicy(candidate, shadow_depths)
    llm.policy = policy
    engine = llm.engine
    requests: list[Request] = []
    rounds: list[list[Request]] = []
    try:
        for number, prompt in enumerate(prompts):
            seeded = _seeded(params, first_seed + number)
            requests.append(engine.add_request(prompt, seeded))
        while engine.has_work:
            before = len(policy.feedback)
            touched = engine.step()
            for feedback in policy.feedback[before:]:
                # Those that decoded stand behind those that were prefilled in the same step.
                rounds.append(touched[len(touched) - len(feedback.proposed) :])
    finally:
        engine.drop([request for request in requests if request.finish_reason is None])
    is_echoed = {
        request.request_id: is_echo(
            request.prompt_token_ids + request.output_token_ids, len(request.prompt_token_ids)
        )
        for request in requests
    }
    depths = (candidate.draft_loops, *shadow_depths)
    found = {(depth, echo): Counts() for depth in depths for echo in (False, True)}
    for feedback, members in zip(policy.feedback, rounds, strict=True):
        own = (candidate.draft_loops, feedback.proposed, feedback.accepted)
        shadows = [(s.draft_loops, s.proposed, s.accepted) for s in feedback.shadow]
        for depth, proposed, accepted in (own, *shadows):
            for request, p, a in zip(members, proposed, accepted, strict=True):
                # A row behind the last draft is a bonus token's, which no K of this run drafts.
                p = min(p, candidate.num_speculative_tokens)
                counts = count_trials([p], [min(a, p)], candidate.num_speculative_tokens)
                if counts is not None:
                    found[depth, is_echoed[request.request_id]].add(*counts)
    return {
        "counts": [_row(d, found[d, False]) for d in sorted(depths)],
        "echo_counts": [_row(d, found[d, True]) for d in sorted(depths)],
        "texts": len(requests),
        "echoes": sum(is_echoed.values()),
        "tokens": sum(len(request.output_token_ids) for request in requests),
    }


def _row(depth: int, counts: Counts) -> list[Any]:
    return [depth, counts.trials, counts.accepted]


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        ignore_eos=params.ignore_eos,
        seed=seed,
    )
