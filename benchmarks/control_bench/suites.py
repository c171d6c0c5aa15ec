"""The loads that policies are measured on, suites (a) to (g), as lists of traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from control_bench.landscapes import ARMS, FULL_LOOPS, A, B, Rates, phase
from control_bench.published import replays
from control_bench.scenarios import scenario_traces
from looped_spec.control.trace import CostError, Trace, TracePhase

SUITES: Mapping[str, str] = {
    "a": "ramp 1-8-32-8-1",
    "b": "acceptance steps at fixed B",
    "c": "scenarios",
    "d": "stationary, 5000 rounds",
    "e": "slow drift",
    "f": "best candidate changes every 50 rounds",
    "g": "published tables",
    "A": "landscape A, 11 phases",
    "B": "landscape B, 10 phases",
    "h": "hopeless, 2000 rounds",
}
"""Suite -> what is in it; A and B mix batch changes and steps, h is for the price of trying."""

COST_NOISE = 0.03
"""Coefficient of variation of measured round times, in every suite but the scenarios."""


@cache
def suite(name: str, scale: float = 1.0) -> tuple[Trace, ...]:
    """Return a suite's traces, with `scale` times as many rounds in each phase.

    Those of the formula say what a shadow readout costs; `without_shadows` takes that out.
    """
    makers: Mapping[str, Callable[[], list[Trace]]] = {
        "a": _ramps,
        "b": _steps,
        "c": scenario_traces,
        "d": _stationary,
        "e": _drift,
        "f": _adversarial,
        "g": replays,
        "A": lambda: [_trace("landscape A", _landscape_a())],
        "B": lambda: [_trace("landscape B", _landscape_b())],
        "h": _hopeless,
    }
    traces = makers[name]()
    return tuple(_scaled(trace, scale) if scale != 1 else trace for trace in traces)


def without_shadows(trace: Trace) -> Trace:
    """Return the trace for an adapter that cannot read out other depths."""
    return replace(trace, phases=tuple(replace(phase, shadow_ms=None) for phase in trace.phases))


def with_cost_error(trace: Trace, error: CostError) -> Trace:
    """Return the trace with another error in the policy's cost table."""
    return replace(trace, cost_error=error)


def _trace(name: str, phases: Sequence[TracePhase]) -> Trace:
    return Trace(FULL_LOOPS, ARMS, tuple(phases), name, cost_noise=COST_NOISE)


def _phase(batch_size: int, rates: Rates, rounds: int = 400) -> TracePhase:
    return phase(batch_size, rates, rounds)


def _landscape_a() -> list[TracePhase]:
    loads = (
        (1, "easy"), (8, "easy"), (32, "middling"), (8, "middling"), (1, "hard"), (1, "easy"),
        (8, "hopeless"), (8, "easy"), (32, "easy"), (1, "hopeless"), (1, "middling"),
    )  # fmt: skip
    return [_phase(batch_size, A[name]) for batch_size, name in loads]


def _landscape_b() -> list[TracePhase]:
    loads = (
        (1, "easy"), (8, "easy"), (32, "easy"), (8, "middling"), (1, "middling"), (1, "hopeless"),
        (1, "easy"), (8, "shallow"), (8, "hard"), (32, "middling"),
    )  # fmt: skip
    return [_phase(batch_size, B[name]) for batch_size, name in loads]


def _ramps() -> list[Trace]:
    return [
        _trace(f"ramp, {title} {name}", [_phase(b, rates[name]) for b in (1, 8, 32, 8, 1)])
        for title, rates in (("A", A), ("B", B))
        for name in ("easy", "middling", "hard")
    ]


def _steps() -> list[Trace]:
    return [
        _trace(
            f"steps at B = {batch_size}, {title}",
            [_phase(batch_size, rates[name]) for name in ("middling", "hopeless", "easy", "hard")],
        )
        for batch_size in (1, 8, 32)
        for title, rates in (("A", A), ("B", B))
    ]


def _stationary() -> list[Trace]:
    loads = ((1, A, "middling"), (8, B, "middling"), (32, A, "hard"), (8, A, "hopeless"))
    return [
        _trace(f"stationary {name} at B = {batch_size}", [_phase(batch_size, rates[name], 5000)])
        for batch_size, rates, name in loads
    ]


def _hopeless() -> list[Trace]:
    return [
        _trace(
            f"hopeless at B = {batch_size}, {title}", [_phase(batch_size, rates["hopeless"], 2000)]
        )
        for batch_size in (1, 8, 32)
        for title, rates in (("A", A), ("B", B))
    ]


def _drift() -> list[Trace]:
    """Acceptance moves from easy to hopeless and back in steps of 50 rounds."""
    traces = []
    for batch_size, title, rates in ((1, "A", A), (8, "B", B), (32, "A", A)):
        there = [step / 20 for step in range(21)]
        phases = [
            _phase(batch_size, _between(rates["easy"], rates["hopeless"], share), 50)
            for share in (*there, *reversed(there))
        ]
        traces.append(_trace(f"drift at B = {batch_size}, {title}", phases))
    return traces


def _adversarial() -> list[Trace]:
    """Every 50 rounds another load, in an order that is fixed but has no pattern."""
    order = random.Random("adversarial")
    traces = []
    for batch_size in (1, 8):
        names = [(A, "easy"), (A, "hopeless"), (B, "middling"), (A, "hard"), (B, "easy")]
        phases: list[TracePhase] = []
        last = -1
        for _ in range(40):
            last = order.choice([n for n in range(len(names)) if n != last])
            rates, name = names[last]
            phases.append(_phase(batch_size, rates[name], 50))
        traces.append(_trace(f"changes every 50 rounds at B = {batch_size}", phases))
    return traces


def _between(start: Rates, end: Rates, share: float) -> Rates:
    first, second, third = (a + share * (b - a) for a, b in zip(start, end, strict=True))
    return first, second, third


def _scaled(trace: Trace, scale: float) -> Trace:
    phases = tuple(
        replace(phase, rounds=max(1, round(phase.rounds * scale))) for phase in trace.phases
    )
    return replace(trace, phases=phases)
