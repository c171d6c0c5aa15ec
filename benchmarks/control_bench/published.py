"""Published measurements as traces: what a policy would have met on those machines.

Only some of what a trace needs was published. A rate r in tokens per second at batch size B with
E tokens per request and round fixes the round's time, T = B E / r, once E is known; where neither
acceptance nor tokens per round were given, they are assumed and said to be. A table has a number,
which is that of docs/control.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.trace import Trace, TracePhase

ROUNDS = 400
COST_NOISE = 0.03


@dataclass(frozen=True)
class Replay:
    """A published table as a trace.

    Attributes:
        number: its number in docs/control.md.
        source: where it was published.
        assumed: what was not published and is made up.
        trace: the load.
    """

    number: int
    source: str
    assumed: str
    trace: Trace

    @property
    def is_held_out(self) -> bool:
        """Whether nothing may be tuned on it: tables 3, 7, 11 and so on."""
        return self.number % 4 == 3


def replays() -> list[Trace]:
    """Return the traces of all tables."""
    return [replay.trace for replay in REPLAYS]


def held_out() -> set[str]:
    """Return the names of the traces that nothing may be tuned on."""
    return {replay.trace.name for replay in REPLAYS if replay.is_held_out}


def chain(*conditional: float) -> tuple[float, ...]:
    """Return s_1, s_2, ... of conditional acceptances p_1, p_2, ..."""
    found, reached = [], 1.0
    for rate in conditional:
        reached *= rate
        found.append(reached)
    return tuple(found)


def geometric(first: float, longest: int, decay: float = 0.98) -> tuple[float, ...]:
    """Return s_i where each conditional acceptance is `decay` times the one before."""
    return chain(*(first * decay**i for i in range(longest)))


def of_rate(alpha: float, num_speculative_tokens: int) -> float:
    """Return p such that drafts of conditional acceptance p have the acceptance rate `alpha`."""
    below, above = 0.0, 1.0
    for _ in range(60):
        middle = (below + above) / 2
        powers = (middle**i for i in range(1, num_speculative_tokens + 1))
        if sum(powers) / num_speculative_tokens < alpha:
            below = middle
        else:
            above = middle
    return below


def by_rate(
    batch_size: int,
    survival: Sequence[float],
    tokens_per_second: Mapping[int, float],
    rounds: int = ROUNDS,
    context_tokens: int = 512,
) -> TracePhase:
    """Return a phase whose draft lengths K run at the given rates, of all requests together."""
    ms = {k: 1000 * batch_size * (1 + sum(survival[:k])) / r for k, r in tokens_per_second.items()}
    return by_time(batch_size, survival, ms, rounds, context_tokens)


def by_time(
    batch_size: int,
    survival: Sequence[float],
    round_ms: Mapping[int, float],
    rounds: int = ROUNDS,
    context_tokens: int = 512,
) -> TracePhase:
    """Return a phase whose draft lengths K take the given times; there is one draft depth."""
    cost = {_arm(k): ms for k, ms in round_ms.items()}
    return TracePhase(rounds, batch_size, context_tokens, ({1: tuple(survival)},), cost, cost)


def _arm(num_speculative_tokens: int) -> Candidate:
    return Candidate(num_speculative_tokens, 1) if num_speculative_tokens else PLAIN


def _trace(name: str, phases: Sequence[TracePhase], full_loops: int = 2) -> Trace:
    return Trace(full_loops, tuple(phases[0].cost_ms), tuple(phases), name, cost_noise=COST_NOISE)


def _autospec() -> Trace:
    rates = {
        1: (162, 289, 528, 823, 1268, 2143, 3353),
        2: (188, 332, 568, 903, 1451, 2297, 3693),
        3: (195, 332, 572, 896, 1531, 2352, 3555),
        4: (199, 333, 572, 911, 1537, 2348, 3400),
        5: (199, 331, 569, 905, 1464, 2316, 3222),
        6: (188, 311, 549, 883, 1413, 2239, 3054),
    }
    survival = geometric(0.75, 6)
    phases = []
    for number, batch_size in enumerate((1, 2, 4, 8, 16, 32, 64)):
        at = {k: float(row[number]) for k, row in rates.items()}
        phases.append(by_rate(batch_size, survival, {0: at[1] / 1.4} | at))
    return _trace("table 1, AutoSpec", phases)


def _deepseek() -> Trace:
    none = (381.5, 729.2, 1342.8, 2393.0, 4094.8, 6340.8, 8878.6)
    seven = (970.3, 1762.6, 2909.5, 4756.3, 6712.4, 8778.9, 7852.4)
    survival = geometric(0.85, 7)
    phases = [
        by_rate(batch_size, survival, {0: plain, 7: fast})
        for batch_size, plain, fast in zip((4, 8, 16, 32, 64, 128, 256), none, seven, strict=True)
    ]
    return _trace("table 3, ShareGPT on 8 MI355X", phases)


def _all_tie() -> Trace:
    survival = (0.715, 0.438, 0.438)
    ms = {0: 11.39, 1: 19.43, 2: 24.44, 3: 11.98 * (1 + sum(survival))}
    return _trace("table 5, all tie", [by_time(1, survival, ms, 2000)])


def _mlxcel() -> Trace:
    survival = (0.75, 0.55, 0.17, 0.13, 0.12, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01)
    rates = {0: 15.0, 2: 21.30, 3: 16.24, 5: 12.12, 7: 9.12, 11: 5.80}
    return _trace("table 7, hot M5 Max", [by_rate(1, survival, rates, 800)])


def _rmlx() -> Trace:
    first, second = 0.877, 2 * 0.728 - 0.877
    phases = [by_time(1, (first, second), {0: 10.0, 1: 13.8, 2: 20.0})]
    best = of_rate(0.895, 2)
    phases.append(by_time(1, geometric(best, 2, 1.0), {0: 10.0, 1: 15.4, 2: 20.8}))
    return _trace("table 9, rMLX", phases)


def _r9700() -> Trace:
    plain_ms = 1000 / 29.0
    phases = []
    for rate, alpha in ((58.6, 0.792), (43.8, 0.545), (45.9, 0.558), (66.8, 0.959)):
        survival = geometric(of_rate(alpha, 3), 12, 1.0)
        three_ms = 1000 * (1 + 3 * alpha) / rate
        slope = (three_ms - plain_ms) / 3
        lengths = (0, 1, 2, 3, 4, 6, 8, 12)
        phases.append(by_time(1, survival, {k: plain_ms + slope * k for k in lengths}))
    return _trace("table 11, reasoning, prose, code, recall", phases)


def _mtplx() -> Trace:
    survival = geometric(0.8, 3)
    rates = ((29.8, 30.3, 36.8), (28.1, 32.7, 34.5), (27.9, 33.7, 36.0))
    phases = [
        by_rate(1, survival, {0: 22.0} | {k: r for k, r in enumerate(row, start=1)})
        for row in rates
    ]
    return _trace("table 13, D1 to D3", phases)


def _omlx() -> Trace:
    survival = chain(0.74, 0.65, 0.61, 0.55, 0.45)
    five_ms = 1000 * (1 + sum(survival)) / 55.5
    plain_ms = 1000 / 32.0
    slope = (five_ms - plain_ms) / 5
    ms = {k: plain_ms + slope * k for k in range(6)}
    return _trace("table 15, pinned 5 beats adaptive", [by_time(1, survival, ms, 800)])


def _off_pays() -> Trace:
    survival = geometric(0.62, 3)
    phases = [
        by_rate(256, survival, {0: 2711.7, 3: 2139.8}, context_tokens=400),
        by_rate(256, survival, {0: 1987.1, 3: 1838.9}, context_tokens=900),
    ]
    return _trace("table 17, off pays at B = 256", phases)


def _eagle() -> Trace:
    high = (1.0, 0.95, 0.93, 0.80, 0.65, 0.52, 0.40)
    low = (0.62, 0.35, 0.18, 0.09, 0.05, 0.02, 0.01)
    at = by_rate(4, high, {0: 460.7, 1: 620.6, 3: 954.8, 7: 999.0})
    again = by_time(4, low, {c.num_speculative_tokens: ms for c, ms in at.cost_ms.items()})
    return _trace("table 19, high and low acceptance", [at, again, at])


def _layerskip() -> Trace:
    k, parts = 6, 10
    cost = {PLAIN: 10.0}
    survivals: dict[int, tuple[float, ...]] = {}
    for d, speedup in ((1, 0.995), (2, 1.746)):
        ratio = (parts + d * k) / parts  # T(K, d) / T(0) = (D + dK) / D, every part a loop
        cost[Candidate(k, d)] = 10.0 * ratio
        survivals[d] = geometric(of_rate((speedup * ratio - 1) / k, k), k, 1.0)
    only = TracePhase(800, 1, 512, (survivals,), cost, cost)
    return _trace("table 21, twice the depth turns a loss into a gain", [only], parts)


def _every_setting_loses() -> Trace:
    survival = geometric(0.6, 5)
    losses = {5: 0.753, 4: 0.816, 3: 0.84, 2: 0.863, 1: 0.959}
    rates = {0: 100.0} | {k: 100 * share for k, share in losses.items()}
    return _trace("table 23, every setting loses", [by_rate(1, survival, rates, 2000)])


def _moe() -> Trace:
    survival = (0.21, 0.16, 0.13, 0.115)
    return _trace(
        "table 25, verifying wakes experts",
        [by_time(4, survival, {0: 10.0, 1: 11.0, 4: 19.0}, 800)],
    )


def _h100() -> Trace:
    cost = {PLAIN: 5.0, Candidate(1, 2): 5.0 * 1.908 / 1.20, Candidate(1, 3): 5.0 * 1.949 / 1.09}
    only = TracePhase(800, 8, 512, ({2: (0.908,), 3: (0.949,)},), cost, cost)
    return _trace("table 27, a deeper draft is accepted more and slower", [only], 4)


REPLAYS: tuple[Replay, ...] = (
    Replay(1, "sglang #22246", "p = 0.75, K = 0 at 1/1.4 of K = 1", _autospec()),
    Replay(3, "vllm #52362", "p = 0.85", _deepseek()),
    Replay(5, "kekzl/imp #1466", "s_3 = s_2", _all_tie()),
    Replay(7, "mlxcel #1204", "K = 0 at 15 tokens/s, s_i of their sums", _mlxcel()),
    Replay(9, "rMLX #496", "times relative to a plain round of 10 ms", _rmlx()),
    Replay(11, "llama-cpp-rdna-boosts", "time linear in K", _r9700()),
    Replay(13, "MTPLX #271", "p = 0.8, K = 0 at 22 tokens/s", _mtplx()),
    Replay(15, "omlx #3352", "time linear in K, K = 0 at 32 tokens/s", _omlx()),
    Replay(17, "vllm #48944", "p = 0.62", _off_pays()),
    Replay(19, "sglang #21599", "B = 4, s_i of their sums, the phase of low acceptance", _eagle()),
    Replay(21, "LayerSkip blog, Llama2-13B", "K = 6, ideal cost", _layerskip()),
    Replay(23, "ds4 #913", "p = 0.6, thresholds taken as draft lengths", _every_setting_loses()),
    Replay(25, "vllm #46295", "s_i of the gains", _moe()),
    Replay(27, "RFC, H100, Ouro-1.4B", "a plain round of 5 ms", _h100()),
)
