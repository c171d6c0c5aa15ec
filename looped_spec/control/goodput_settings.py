"""The numbers that steer the `goodput` policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from looped_spec.errors import ConfigError

_RANGES: dict[str, tuple[float, float]] = {
    "evidence_trials": (8, 1e6),
    "position_prior_trials": (0.1, 1e4),
    "position_decay": (0.5, 1.0),
    "depth_offset_logits": (0.0, 10.0),
    "margin": (0.0, 1.0),
    "dwell_trials": (0, 1e6),
    "loss_budget": (0.0, 0.5),
}


@dataclass(frozen=True)
class GoodputSettings:
    """Hyper-parameters of `policy="goodput"`; control.md section 2 names each idea.

    Attributes:
        evidence_trials: trials after which an observation has lost two thirds of its weight.
        position_prior_trials: weight, in trials, of the prior of a position.
        position_decay: prior conditional acceptance of a position, over that of the one before.
        depth_offset_logits: prior gain in log-odds of acceptance for each doubling of draft loops.
        margin: how much better than the current candidate another must look to be switched to.
        dwell_trials: trials that a candidate gets before it may be left again.
        loss_budget: share of time that probes may lose.
    """

    evidence_trials: float = 160.0
    position_prior_trials: float = 8.0
    position_decay: float = 0.98
    depth_offset_logits: float = 0.8
    margin: float = 0.03
    dwell_trials: float = 16.0
    loss_budget: float = 0.004

    def __post_init__(self) -> None:
        for f in fields(self):
            low, high = _RANGES[f.name]
            check_number(f.name, getattr(self, f.name), low, high)


def check_number(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise `ConfigError` with name, value and range unless `value` is a number in it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    if not low <= value <= high:
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ConfigError(f"{name} must be {bound}, got {value:g}")
