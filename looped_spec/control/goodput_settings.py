"""The numbers that steer the `goodput` policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from looped_spec.errors import ConfigError, is_number, shown_number

_RANGES: dict[str, tuple[float, float]] = {
    "evidence_trials": (8.0, 1e6),
    "evidence_rounds": (0.0, 1e4),
    "position_prior_trials": (0.1, 1e4),
    "unseen_trials": (1.0, 1e6),
    "position_decay": (0.5, 1.0),
    "base_acceptance": (0.01, 0.99),
    "depth_offset_logits": (0.0, 10.0),
    "offset_deviation": (0.01, 10.0),
    "level_deviation": (0.01, 10.0),
    "change_logits": (0.1, 10.0),
    "change_threshold": (0.5, 100.0),
    "off_alertness": (0.01, 1.0),
    "kept_trials": (0.0, 1e4),
    "jump_logits": (0.0, 10.0),
    "own_jump_logits": (0.0, 10.0),
    "cohort_trials": (1.0, 1e6),
    "margin": (0.0, 1.0),
    "lead_rounds": (0.0, 1e6),
    "dwell_trials": (0.0, 1e6),
    "loss_budget": (0.0, 0.5),
    "explore_budget": (0.0, 0.5),
    "start_credit_rounds": (0.0, 1e4),
    "max_credit_rounds": (0.0, 1e4),
    "off_probe_interval": (1.0, 1e6),
    "burst_trials": (1.0, 1e4),
    "behind": (0.0, 1.0),
    "explore_interval": (1.0, 1e6),
    "shadow_budget": (0.0, 0.5),
    "stale_rounds": (1.0, 1e9),
    "doubt_variance": (0.0, 10.0),
    "min_doubt_variance": (0.0, 10.0),
    "max_doubt_logits": (0.0, 10.0),
    "optimism": (0.0, 10.0),
    "off_optimism": (0.0, 10.0),
    "cost_deviation": (0.01, 2.0),
}


@dataclass(frozen=True)
class GoodputSettings:
    """Hyper-parameters of `policy="goodput"`; the defaults were frozen on the simulated suites.

    Attributes:
        evidence_trials: trials after which an observation has lost two thirds of its weight.
        evidence_rounds: the same in rounds, if that is longer.
        position_prior_trials: weight, in trials, of the prior of a position.
        unseen_trials: like `evidence_trials`, for positions behind the drafts that run.
        position_decay: prior of a position's acceptance over the estimate of the one before.
        base_acceptance: acceptance expected of the shallowest depth before anything is seen.
        depth_offset_logits: prior gain in log-odds of acceptance per doubling of the draft loops.
        level_deviation: standard deviation of what all depths have in common, in log-odds.
        offset_deviation: standard deviation of each depth beside that.
        change_logits: size of the change that is looked for, in log-odds.
        change_threshold: log-likelihood at which a change is believed.
        off_alertness: factor on that while drafting is off, where only probes look.
        kept_trials: what evidence from before a change is still worth, in trials.
        jump_logits: how far a change may have moved all depths, as a standard deviation.
        own_jump_logits: how far it may have moved each depth beside that.
        cohort_trials: what evidence is still worth once half of the requests are new ones.
        margin: how much better than the current candidate another must look to be taken.
        lead_rounds: a smaller advantage is enough if it adds up to this many rounds.
        dwell_trials: trials that a candidate gets before it may be left again.
        loss_budget: share of time that probes may lose while drafting is off.
        explore_budget: share of time that probes may lose while it is on.
        start_credit_rounds: rounds that probes may lose before any were saved up.
        max_credit_rounds: most rounds of loss that may be saved up.
        off_probe_interval: rounds without drafting before the first probe; doubles up to where
            the loss budget is used up.
        burst_trials: trials of a probe that looks promising.
        behind: a probe of several rounds ends early if it is this far behind.
        explore_interval: rounds between two looks for a candidate that might be better.
        shadow_budget: share of time for shadow readouts while drafting is on.
        stale_rounds: rounds that a depth may not run before idle credit is spent on it.
        doubt_variance: variance, in squared log-odds, that a depth gains in each round in which it
            does not run; halves with each probe of it that found nothing new.
        min_doubt_variance: where that halving ends.
        max_doubt_logits: most that a depth is doubted, as a standard deviation.
        optimism: standard deviations by which a candidate may be better than it looks.
        off_optimism: the same for drafts, where plain decoding looks better.
        cost_deviation: how far costs are off from cell to cell, as a standard deviation of the
            logarithm.
    """

    evidence_trials: float = 240.0
    evidence_rounds: float = 16.0
    position_prior_trials: float = 8.0
    unseen_trials: float = 96.0
    position_decay: float = 0.98
    base_acceptance: float = 0.65
    depth_offset_logits: float = 0.8
    level_deviation: float = 1.2
    offset_deviation: float = 0.5
    change_logits: float = 2.0
    change_threshold: float = 7.5
    off_alertness: float = 0.5
    kept_trials: float = 4.0
    jump_logits: float = 2.0
    own_jump_logits: float = 0.4
    cohort_trials: float = 32.0
    margin: float = 0.03
    lead_rounds: float = 1.0
    dwell_trials: float = 8.0
    loss_budget: float = 0.005
    explore_budget: float = 0.004
    start_credit_rounds: float = 2.0
    max_credit_rounds: float = 3.0
    off_probe_interval: float = 8.0
    burst_trials: float = 8.0
    behind: float = 0.35
    explore_interval: float = 16.0
    shadow_budget: float = 0.003
    stale_rounds: float = 64.0
    doubt_variance: float = 0.03
    min_doubt_variance: float = 0.002
    max_doubt_logits: float = 1.5
    optimism: float = 1.0
    off_optimism: float = 0.75
    cost_deviation: float = 0.1

    def __post_init__(self) -> None:
        for f in fields(self):
            low, high = _RANGES[f.name]
            check_number(f.name, getattr(self, f.name), low, high)


def check_number(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise `ConfigError` with name, value and range unless `value` is a number in it."""
    if not is_number(value):
        raise ConfigError(f"{name} must be a finite number, got {shown_number(value)}")
    if not low <= value <= high:
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ConfigError(f"{name} must be {bound}, got {value:g}")
