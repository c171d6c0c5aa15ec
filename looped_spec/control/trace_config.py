"""Policies by name, set up for a trace: what may run is the trace's, and so is the cost table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.simulate import FixedPlans, Policy, believed_costs
from looped_spec.control.trace import Trace
from looped_spec.control.trace_document import parse_candidate
from looped_spec.errors import ConfigError, closest

POLICIES = ("ema", "goodput", "static:K,d", "never", "oracle")

PolicyMaker = Callable[[int], Policy]
"""Makes a fresh policy for a run with this seed."""


def policy_maker(trace: Trace, name: str, preset: AdaptiveSpecConfig | None = None) -> PolicyMaker:
    """Return what makes the policy of a name in `POLICIES`; raises `ConfigError`.

    `ema` and `goodput` run with the preset's buckets, settings and cost, or with those of
    `trace_config` if there is none.
    """
    if name.startswith("static:"):
        candidate = parse_candidate(name.removeprefix("static:"))
        if candidate not in trace.candidates:
            known = ", ".join(
                f"{c.num_speculative_tokens},{c.draft_loops}" for c in trace.candidates
            )
            raise ConfigError(f"policy '{name}' is no candidate of the trace, which has {known}")
        return lambda seed: FixedPlans.static(trace, candidate)
    if name == "never":
        return lambda seed: FixedPlans.static(trace, PLAIN)
    if name == "oracle":
        return lambda seed: FixedPlans.oracle(trace)
    if name not in ("ema", "goodput"):
        raise ConfigError(
            f"policy must be one of {', '.join(POLICIES)}, got '{name}'{closest(name, POLICIES)}"
        )
    if preset is None:
        return lambda seed: AdaptiveController(trace_config(trace, name, seed))
    config = replace(_check_preset(trace, preset), policy=name)
    return lambda seed: AdaptiveController(config)


def trace_config(trace: Trace, policy: str, seed: int = 0, **options: Any) -> AdaptiveSpecConfig:
    """Return a configuration with the trace's candidates and, with its error, its cost table.

    There is one bucket up to each batch size of the trace. `ema` can only compare candidates of
    one depth: it gets those of the depth next to full_loops / 8. Where two phases have the same
    batch size and context, the table has the times of the first. `options` are further fields.
    """
    candidates = sorted(
        trace.candidates,
        key=lambda c: (c.num_speculative_tokens * c.draft_loops, c.draft_loops),
    )
    if policy == "ema":
        depths = {c.draft_loops for c in candidates} - {0}
        kept = min(depths, key=lambda d: (abs(d - trace.full_loops / 8), d), default=0)
        candidates = [c for c in candidates if c.draft_loops in (0, kept)]
    edges = [0, *sorted({phase.batch_size for phase in trace.phases})]
    buckets = [
        BatchBucket(low + 1, high, tuple(candidates), min(1, len(candidates) - 1))
        for low, high in pairwise(edges)
    ]
    plain_ms = min(phase.cost_ms[PLAIN] for phase in trace.phases)
    ratios = [
        trace.full_loops * phase.shadow_ms / phase.cost_ms[PLAIN]
        for phase in trace.phases
        if phase.shadow_ms is not None
    ]
    settings: dict[str, Any] = {
        "cost": cost_table(trace, seed),
        "switch_cost_rounds": trace.resume_ms / plain_ms,
        "shadow_depths_available": bool(ratios),
        "shadow_cost_ratio": max(ratios, default=0.0),
    }
    return AdaptiveSpecConfig(trace.full_loops, tuple(buckets), policy, **(settings | options))


def cost_table(trace: Trace, seed: int = 0) -> CostTable:
    """Return the table that a policy is given for a trace, with the errors of this seed."""
    times: dict[tuple[int, int, int, int], float] = {}
    for phase, table in zip(trace.phases, believed_costs(trace, seed), strict=True):
        for candidate, ms in table.items():
            shape = candidate.num_speculative_tokens, candidate.draft_loops
            times.setdefault((phase.batch_size, phase.context_tokens, *shape), ms)
    return CostTable.of(times)


def _check_preset(trace: Trace, preset: AdaptiveSpecConfig) -> AdaptiveSpecConfig:
    if preset.full_loops != trace.full_loops:
        raise ConfigError(
            f"full_loops of preset and trace must be the same, got {preset.full_loops} and "
            f"{trace.full_loops}"
        )
    unknown: list[Candidate] = [c for c in preset.candidates if c not in trace.candidates]
    if unknown:
        k, d = unknown[0].num_speculative_tokens, unknown[0].draft_loops
        raise ConfigError(
            f"the preset has the candidate [{k}, {d}], of which the trace does not say what it "
            "costs; add it to the trace's candidates"
        )
    return preset
