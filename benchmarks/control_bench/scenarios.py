"""Suite (c): things that went wrong in other controllers, each as a load with what must happen.

A scenario has its number in docs/control.md. Those that are not about a load (padding, buffers,
ranks, grammars, reports) are unit tests of the controller instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from control_bench.landscapes import ARMS, FULL_LOOPS, A, phase, round_ms, survival
from control_bench.published import by_time, geometric
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.scores import regret, slowdown
from looped_spec.control.simulate import PhaseRun
from looped_spec.control.trace import CostError, Trace, TracePhase

Check = Callable[[Sequence[PhaseRun]], bool]


@dataclass(frozen=True)
class Scenario:
    """A load and the behaviour that it asks for.

    Attributes:
        number: its number in docs/control.md.
        required: what must happen, in words.
        trace: the load; its name starts with the number.
        check: whether it happened in a run.
    """

    number: int
    required: str
    trace: Trace
    check: Check


def scenario_traces() -> list[Trace]:
    """Return the loads of all scenarios."""
    return [scenario.trace for scenario in scenarios()]


def scenarios() -> list[Scenario]:
    """Return all scenarios."""
    return [
        _flip_flop(),
        _binary_acceptance(),
        _late_feedback(),
        _dear_switches(),
        *(_latch(batch_size, 500, 6, limit) for batch_size, limit in ((1, 64), (8, 16))),
        *(_hopeless(batch_size) for batch_size in (1, 8, 32)),
        *(_latch(batch_size, 5000, 9, limit) for batch_size, limit in ((1, 64), (8, 16))),
        _dear_plain(),
        _prefill(),
        _edge(),
        _ramp(),
        _shared(),
        _climb(),
        _deeper_is_slower(),
        _wrong_table(),
        _cliff(),
        _first_rounds(),
        _cohort(),
        _context(),
        _stall(),
    ]


def _trace(
    number: int,
    name: str,
    phases: Sequence[TracePhase],
    full_loops: int = FULL_LOOPS,
    **options: float | CostError,
) -> Trace:
    plain = Trace(full_loops, tuple(phases[0].cost_ms), tuple(phases), f"{number}: {name}")
    return replace(plain, **options)  # type: ignore[arg-type]


def _flat(batch_size: int, first: float, rounds: int, **options: float | bool) -> TracePhase:
    """Return a phase where the first draft of one loop is accepted with this probability.

    Deeper drafts are accepted a little more often, never enough to pay.
    """
    gain = (1 - first) * 0.2
    rates = (first, first + gain, first + 1.5 * gain)
    return phase(batch_size, rates, rounds, **options)  # type: ignore[arg-type]


def _flip_flop() -> Scenario:
    chain = (0.9, 0.65, 0.45, 0.15, 0.08)
    ms = {0: 5.0, 3: 10.0, 5: 10.0 * 3.23 / 3.0 * 1.01}
    return Scenario(
        1,
        "at most 2 switches after round 200, at most 1.5 % lost",
        _trace(
            1,
            "rungs within 1 %",
            [by_time(1, chain, ms, rounds) for rounds in (200, 4800)],
            2,
        ),
        lambda phases: phases[1].switches <= 2 and regret(phases) <= 0.015,
    )


def _binary_acceptance() -> Scenario:
    arms = (PLAIN, Candidate(1, 1))
    return Scenario(
        3,
        "no switch",
        _trace(3, "0/1 samples at B = 1", [phase(1, (0.6, 0.7, 0.8), 1000, arms=arms)]),
        lambda phases: phases[0].switches == 0,
    )


def _late_feedback() -> Scenario:
    phases = [phase(8, A[name]) for name in ("easy", "hopeless", "middling")]
    return Scenario(
        4,
        "at most 6 % regret",
        _trace(4, "late and repeated feedback", phases, feedback_delay=2, feedback_duplicates=0.2),
        lambda phases: regret(phases) <= 0.06,
    )


def _dear_switches() -> Scenario:
    load = _flat(8, 0.36, 2000)
    return Scenario(
        5,
        "at most 4 switches, at most 3 % regret",
        _trace(5, "resuming costs 3 rounds", [load], resume_ms=3 * round_ms(8, PLAIN)),
        lambda phases: phases[0].switches <= 4 and regret(phases) <= 0.03,
    )


def _latch(batch_size: int, off_rounds: int, number: int, limit: int) -> Scenario:
    phases = [_flat(batch_size, 0.1, off_rounds), _flat(batch_size, 0.9, 400)]
    return Scenario(
        number,
        f"on again within {limit} rounds",
        _trace(number, f"off for {off_rounds} rounds, then 0.9, B = {batch_size}", phases),
        lambda phases: phases[1].first_on <= limit,
    )


def _hopeless(batch_size: int) -> Scenario:
    return Scenario(
        8,
        "at most 1 % slower than never",
        _trace(8, f"acceptance 0.05, B = {batch_size}", [_flat(batch_size, 0.05, 3000)]),
        lambda phases: slowdown(phases) <= 0.01,
    )


def _dear_plain() -> Scenario:
    load = _flat(8, 0.22, 1000)
    cost = dict(load.cost_ms) | {PLAIN: 1.2 * load.cost_ms[PLAIN]}
    return Scenario(
        11,
        "at most 3 % regret",
        _trace(11, "plain rounds take 1.2 times the table", [replace(load, cost_ms=cost)]),
        lambda phases: regret(phases) <= 0.03,
    )


def _prefill() -> Scenario:
    loads = [replace(_flat(4, 0.7, rounds), mixed_prefill=0.5) for rounds in (200, 800)]
    return Scenario(
        14,
        "no switch after round 200",
        _trace(14, "prefill in every second round", loads),
        lambda phases: phases[1].switches == 0,
    )


def _edge() -> Scenario:
    loads = [_flat(8 - number % 2, 0.7, 1) for number in range(400)]
    return Scenario(
        15,
        "at most 2 switches after round 100",
        _trace(15, "B alternates 7 and 8", loads),
        lambda phases: sum(one.switches for one in phases[100:]) <= 2,
    )


def _ramp() -> Scenario:
    loads = [phase(batch_size, A["middling"]) for batch_size in (1, 8, 32, 8, 1)]
    return Scenario(
        18,
        "at 95 % from the first round of each further batch size",
        _trace(18, "ramp", loads),
        lambda phases: all(one.settled == 0 for one in phases[1:]),
    )


def _shared() -> Scenario:
    loads = [_flat(8, 0.9, 400), _flat(8, 0.3, 200), _flat(32, 0.3, 400)]
    return Scenario(
        19,
        "at 95 % within 8 rounds of B = 32",
        _trace(19, "acceptance falls at B = 8, then B = 32", loads),
        lambda phases: phases[2].settled <= 8,
    )


def _climb() -> Scenario:
    loads = [_flat(8, 0.3, 200), _flat(8, 0.95, 400)]
    return Scenario(
        23,
        "at 95 % within 24 rounds of the rise",
        _trace(23, "untracked positions", loads),
        lambda phases: phases[1].settled <= 24,
    )


def _deeper_is_slower() -> Scenario:
    cost = {PLAIN: 5.0, Candidate(1, 2): 5 * 1.908 / 1.20, Candidate(1, 3): 5 * 1.949 / 1.09}
    load = TracePhase(800, 8, 512, ({2: (0.908,), 3: (0.949,)},), cost, cost)
    return Scenario(
        27,
        "d = 2 within 32 rounds",
        _trace(27, "higher acceptance, lower throughput", [load]),
        lambda phases: phases[0].settled <= 32,
    )


def _wrong_table() -> Scenario:
    loads = [phase(8, A["middling"], rounds) for rounds in (500, 1500)]
    return Scenario(
        28,
        "at most 4 % regret after 500 rounds",
        _trace(28, "cells off by 15 %", loads, cost_error=CostError(0.15), cost_noise=0.03),
        lambda phases: regret(phases[1:]) <= 0.04,
    )


def _cliff() -> Scenario:
    chain = geometric(0.94, 8)
    table = {0: 42.0, 6: 62.6, 7: 64.4, 8: 66.1}
    true = {0: 42.0, 6: 62.5, 7: 79.9, 8: 91.6}
    believed = by_time(1, chain, table).table_ms
    load = replace(by_time(1, chain, true, 800), table_ms=believed)
    return Scenario(
        30,
        "at 95 %, which only K = 6 gives, within 64 rounds",
        _trace(30, "cost cliff that the table lacks", [load], 2, cost_noise=0.03),
        lambda phases: phases[0].settled <= 64,
    )


def _first_rounds() -> Scenario:
    load = _flat(8, 0.8, 400)
    slow = {candidate: 20 * ms for candidate, ms in load.cost_ms.items()}
    loads = [replace(load, rounds=3, cost_ms=slow), load]
    return Scenario(
        31,
        "at 95 % within 16 rounds",
        _trace(31, "first 3 rounds take 20 times as long", loads),
        lambda phases: phases[1].settled <= 16,
    )


def _cohort() -> Scenario:
    loads = [_flat(8, 0.1, 600), _flat(8, 0.85, 400, cohort_change=True)]
    return Scenario(
        35,
        "on within 16 rounds of the new requests",
        _trace(35, "new requests, new text", loads),
        lambda phases: phases[1].first_on <= 16,
    )


def _context() -> Scenario:
    def load(context_tokens: int, plain: float, rounds: int = 300) -> TracePhase:
        cost = _costs(64, {PLAIN: plain})
        rates = (survival((0.6, 0.7, 0.8)),)
        return TracePhase(rounds, 64, context_tokens, rates, cost, cost)

    loads = [load(context, plain) for context, plain in [(400, 3.8), (900, 6.0)] * 3]
    return Scenario(
        36,
        "at 95 % from the first round of every later visit",
        _trace(36, "context flips the sign", loads),
        lambda phases: all(one.settled == 0 for one in phases[2:]),
    )


def _costs(batch_size: int, changed: Mapping[Candidate, float]) -> dict[Candidate, float]:
    return {c: changed.get(c, round_ms(batch_size, c)) for c in ARMS}


def _stall() -> Scenario:
    load = _flat(8, 0.7, 400)
    slow = {candidate: 2 * ms for candidate, ms in load.cost_ms.items()}
    loads = [load, replace(load, rounds=50, cost_ms=slow), load]
    return Scenario(
        37,
        "no switch in the stall",
        _trace(37, "every round takes twice as long for 50 rounds", loads, cost_noise=0.03),
        lambda phases: phases[1].switches == 0,
    )
