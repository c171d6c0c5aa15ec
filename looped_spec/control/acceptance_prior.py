"""What is believed of acceptance before the first round: counts from earlier measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looped_spec.control.goodput_settings import check_number
from looped_spec.control.plan import MAX_SPECULATIVE_TOKENS
from looped_spec.errors import ConfigError, check_int, reject_unknown

DEFAULT_TRIALS = 16.0
"""What a prior is worth, in trials of this workload, however many trials are behind it: texts
differ more than counts of one of them can tell."""

DEMOTED_SHARE = 0.25
"""Share of its weight that a prior keeps where it was measured under other circumstances, such as
another dtype or revision. The device is not one of them: it does not change what is accepted."""

_KEYS = ("draft_loops", "accepted", "trials")


@dataclass(frozen=True)
class AcceptanceCounts:
    """How often drafts of one depth were accepted, by position.

    Counts are conditional: `trials[i]` is how many requests had the i drafts before accepted and
    one at position i, `accepted[i]` how many of those had it accepted too. Both may be fractions,
    as of counts that were weighted.

    Attributes:
        draft_loops: d.
        accepted: hits per position, at most `trials`.
        trials: trials per position, more than 0 at the first.
    """

    draft_loops: int
    accepted: tuple[float, ...]
    trials: tuple[float, ...]

    def __post_init__(self) -> None:
        check_int("draft_loops of acceptance counts", self.draft_loops, 1)
        for name in ("accepted", "trials"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        where = f"of acceptance counts at draft_loops {self.draft_loops}"
        if not 1 <= len(self.trials) <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"trials {where} must have 1 to {MAX_SPECULATIVE_TOKENS} positions, "
                f"got {len(self.trials)}"
            )
        if len(self.accepted) != len(self.trials):
            raise ConfigError(
                f"accepted {where} must have as many positions as trials, {len(self.trials)}, "
                f"got {len(self.accepted)}"
            )
        for accepted, trials in zip(self.accepted, self.trials, strict=True):
            check_number(f"trials {where}", trials, 0.0)
            check_number(f"accepted {where}", accepted, 0.0, trials)
        if not self.trials[0]:
            raise ConfigError(f"trials {where} must be more than 0 at the first position")

    @property
    def first_logit(self) -> float:
        """Log-odds of the first draft; half a trial more on either side keeps it finite."""
        misses = self.trials[0] - self.accepted[0]
        return math.log((self.accepted[0] + 0.5) / (misses + 0.5))

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON document."""
        return {
            "draft_loops": self.draft_loops,
            "accepted": list(self.accepted),
            "trials": list(self.trials),
        }

    @classmethod
    def from_json(cls, document: Any) -> AcceptanceCounts:
        """Read what `to_json` wrote."""
        if not isinstance(document, Mapping):
            raise ConfigError(f"acceptance counts must be a JSON object, got {document!r:.40}")
        reject_unknown(document, _KEYS, "key of acceptance counts")
        for name in _KEYS:
            if name not in document:
                raise ConfigError(f"acceptance counts need {name}")
        for name in ("accepted", "trials"):
            if not isinstance(document[name], list | tuple):
                raise ConfigError(
                    f"{name} of acceptance counts must be a list, got {document[name]!r:.40}"
                )
        return cls(document["draft_loops"], document["accepted"], document["trials"])


@dataclass(frozen=True)
class AcceptancePrior:
    """What `goodput` believes of acceptance until this workload has shown its own.

    Attributes:
        counts: one entry for each depth that something is known of.
        trials: what they are worth, in trials of this workload; at positions with fewer trials
            behind them, those. 0 leaves only what the depths have to do with each other.
    """

    counts: tuple[AcceptanceCounts, ...]
    trials: float = DEFAULT_TRIALS

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(self.counts))
        depths = [entry.draft_loops for entry in self.counts]
        if not depths:
            raise ConfigError("counts of an acceptance prior must not be empty")
        for depth in depths:
            if depths.count(depth) > 1:
                raise ConfigError(f"an acceptance prior has draft_loops {depth} twice: pool them")
        check_number("trials of an acceptance prior", self.trials, 0.0, 1e6)

    @classmethod
    def pooled(
        cls, entries: Iterable[AcceptanceCounts], trials: float = DEFAULT_TRIALS
    ) -> AcceptancePrior:
        """Make one of counts of several workloads, each with the same say at its depth, however
        many trials it has: a new text is as likely to be like the one as like the other."""
        by_depth: dict[int, list[AcceptanceCounts]] = {}
        for entry in entries:
            by_depth.setdefault(entry.draft_loops, []).append(entry)
        return cls(tuple(_pool(same) for _, same in sorted(by_depth.items())), trials)

    def demoted(self, share: float = DEMOTED_SHARE) -> AcceptancePrior:
        """Return the same belief with this share of its weight."""
        check_number("share of a demoted prior", share, 0.0, 1.0)
        return AcceptancePrior(self.counts, share * self.trials)

    def to_json(self) -> dict[str, Any]:
        """Return the prior as a JSON document."""
        return {"trials": self.trials, "counts": [entry.to_json() for entry in self.counts]}

    @classmethod
    def from_json(cls, document: Any) -> AcceptancePrior:
        """Read what `to_json` wrote; `trials` may be left out."""
        if not isinstance(document, Mapping):
            raise ConfigError(f"acceptance_prior must be a JSON object, got {document!r:.40}")
        reject_unknown(document, ("trials", "counts"), "key of acceptance_prior")
        counts = document.get("counts")
        if not isinstance(counts, list | tuple):
            raise ConfigError(f"counts of acceptance_prior must be a list, got {counts!r:.40}")
        return cls(
            tuple(AcceptanceCounts.from_json(entry) for entry in counts),
            document.get("trials", DEFAULT_TRIALS),
        )


def _pool(entries: Sequence[AcceptanceCounts]) -> AcceptanceCounts:
    """Return counts of one depth whose shares are means over entries; trials are the sums."""
    accepted, trials = [], []
    for position in range(max(len(entry.trials) for entry in entries)):
        shares = [
            entry.accepted[position] / entry.trials[position]
            for entry in entries
            if position < len(entry.trials) and entry.trials[position]
        ]
        if not shares:
            break
        total = sum(e.trials[position] for e in entries if position < len(e.trials))
        trials.append(total)
        accepted.append(min(total * math.fsum(shares) / len(shares), total))
    return AcceptanceCounts(entries[0].draft_loops, tuple(accepted), tuple(trials))
