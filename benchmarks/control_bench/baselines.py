"""Controllers of other engines, written from how they are described, to compare with.

Each is told what a policy is told: candidates, the cost table, batch size, context and feedback.
Where an engine has no draft depth, one is fixed. Where its draft lengths are not among the
candidates, the nearest is run. docs/control.md says where each is described.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from control_bench.setting import Baseline, Setting
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback


class RfcEma(Baseline):
    """The RFC's thresholds: per (batch range, candidate) an EMA of accepted / proposed, one move
    a time; with `off`, plain decoding below the break-even d / D and doubling waits for probes."""

    def __init__(
        self,
        setting: Setting,
        *,
        ladders: Sequence[tuple[int, Sequence[tuple[int, int]]]],
        beta: float = 0.15,
        up: float = 0.8,
        down: float = 0.5,
        interval: int = 8,
        warmup: int = 8,
        off: bool = False,
    ) -> None:
        """Take ladders as (largest batch size, [(K, d), ...]), ascending."""
        super().__init__(setting)
        self.edges = [edge for edge, _ in ladders]
        self.ladders = [
            list(dict.fromkeys(setting.nearest(k, d) for k, d in rungs)) for _, rungs in ladders
        ]
        self.beta, self.up, self.down = beta, up, down
        self.interval, self.warmup, self.off = interval, warmup, off
        self.position = [min(1, len(ladder) - 1) for ladder in self.ladders]
        self.ema: dict[tuple[int, Candidate], float] = {}
        self.rounds: dict[tuple[int, Candidate], int] = {}
        self.since = 0
        self.is_off = False
        self.wait = self.waited = self.probing = 0

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Move if it is time to, and return where that leads."""
        bucket = self._bucket(batch_size)
        ladder = self.ladders[bucket]
        if self.is_off:
            if self.probing:
                self.probing -= 1
                return ladder[0], True
            self.waited += 1
            if self.waited <= self.wait:
                return PLAIN, False
            self.waited, self.probing = 0, 3
            self.rounds[bucket, ladder[0]] = 0
            return ladder[0], True
        place = min(self.position[bucket], len(ladder) - 1)
        arm = ladder[place]
        ema = self.ema.get((bucket, arm), 0.0)
        if self.since >= self.interval and self.rounds.get((bucket, arm), 0) >= self.warmup:
            self.since = 0
            if ema > self.up and place + 1 < len(ladder):
                place += 1
            elif ema < self.down and place > 0:
                place -= 1
            elif self.off and place == 0 and ema < self._break_even(arm):
                self.is_off, self.wait, self.waited, self.probing = True, 8, 1, 0
                self.rounds[bucket, arm] = 0
                return PLAIN, False
            self.position[bucket] = place
        return ladder[place], False

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Update the EMA of the candidate that ran."""
        proposed = sum(feedback.proposed)
        if not proposed:
            return
        key = self._bucket(batch_size), candidate
        rate = sum(feedback.accepted) / proposed
        seen = self.rounds.get(key, 0)
        ema = self.ema.get(key, rate) if seen else rate
        self.ema[key] = ema + self.beta * (rate - ema)
        self.rounds[key] = seen + 1
        self.since += 1
        if self.is_off and self.rounds[key] >= 4:
            if self.ema[key] > self._break_even(candidate):
                self.is_off, self.since = False, 0
            else:
                self.wait = min(2 * self.wait, 512)

    def _break_even(self, candidate: Candidate) -> float:
        return candidate.draft_loops / self.setting.full_loops

    def _bucket(self, batch_size: int) -> int:
        return next(
            (n for n, edge in enumerate(self.edges) if batch_size <= edge), len(self.edges) - 1
        )


RFC_LADDERS = (
    (7, [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1)]),
    (31, [(1, 1), (1, 2), (2, 2), (3, 2)]),
    (2**16, [(1, 1), (1, 2), (2, 2)]),
)
"""One guess in the RFC's sense: many short drafts for small batches, fewer and deeper for large."""


class SglangEma(Baseline):
    """SGLang's EMA of accepted length with its default file: steps and hysteresis per batch range.

    Up while the EMA is above steps - 0.5, down while it is at most the lower steps - 0.75; to 0
    steps, of which nothing is said, at 0.25. There nothing is smoothed: every update interval
    tries the next.
    """

    STEPS = ((1, (1, 3, 5, 7)), (8, (0, 1, 3)), (32, (0, 1)), (64, (0,)))

    def __init__(self, setting: Setting, draft_loops: int) -> None:
        super().__init__(setting)
        self.edges = [edge for edge, _ in self.STEPS]
        self.ladders = [
            list(dict.fromkeys(setting.nearest(k, draft_loops) for k in steps))
            for _, steps in self.STEPS
        ]
        self.at = [len(ladder) // 2 for ladder in self.ladders]
        middle = [ladder[at] for ladder, at in zip(self.ladders, self.at, strict=True)]
        self.ema = [max(0.0, arm.num_speculative_tokens - 1.0) for arm in middle]
        self.batches = [0] * len(self.STEPS)

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return the current steps of the batch range."""
        slot = self._slot(batch_size)
        return self.ladders[slot][self.at[slot]], False

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Smooth the mean accepted length, and move at every fifth batch after the tenth."""
        slot = self._slot(batch_size)
        if candidate.num_speculative_tokens:
            mean = sum(feedback.accepted) / len(feedback.accepted)
            self.ema[slot] += 0.2 * (mean - self.ema[slot])
        self.batches[slot] += 1
        if self.batches[slot] <= 10 or (self.batches[slot] - 10) % 5:
            return
        steps = [arm.num_speculative_tokens for arm in self.ladders[slot]]
        at, ema = self.at[slot], self.ema[slot]
        while at > 0 and ema <= self._drop_below(steps[at - 1]):
            at -= 1
        if at == self.at[slot]:
            while at < len(steps) - 1 and ema > steps[at] - 0.5:
                at += 1
        self.at[slot] = at

    def _drop_below(self, steps: int) -> float:
        return (steps - 0.5 if steps else 0.5) - 0.25

    def _slot(self, batch_size: int) -> int:
        return max(n for n, edge in enumerate(self.edges) if batch_size >= edge)


class ThroughputAware(Baseline):
    """SGLang's proposed throughput-aware policy: a window of 20 accepted lengths, costs profiled at
    the start, the draft length with the most expected tokens per time.

    The acceptance per position is the one that explains the window's mean length; with no draft
    length 0 among its steps it never turns drafting off.
    """

    def __init__(self, setting: Setting, draft_loops: int, window: int = 20) -> None:
        super().__init__(setting)
        d = setting.nearest(1, draft_loops).draft_loops
        self.arms = [c for c in setting.candidates if c.draft_loops == d]
        self.arm = self.arms[min(1, len(self.arms) - 1)]
        self.window: deque[tuple[int, float]] = deque(maxlen=window)

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return the draft length with the highest expected rate."""
        if self.window:
            p = self._acceptance()
            self.arm = max(
                self.arms,
                key=lambda c: (
                    sum(p**i for i in range(c.num_speculative_tokens + 1))
                    / self.setting.cost(batch_size, context_tokens, c)
                ),
            )
        return self.arm, False

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Keep the round's mean accepted length."""
        self.window.append(
            (candidate.num_speculative_tokens, sum(feedback.accepted) / len(feedback.accepted))
        )

    def _acceptance(self) -> float:
        total = sum(mean for _, mean in self.window)
        lengths = Counter(k for k, _ in self.window)
        low, high = 0.0, 1.0
        for _ in range(12):
            p = (low + high) / 2
            expected = sum(n * p * (1 - p**k) / (1 - p) for k, n in lengths.items())
            low, high = (p, high) if expected < total else (low, p)
        return (low + high) / 2


class CostAware(Baseline):
    """Measured tokens per millisecond: an EMA for each draft length and batch range, the fastest
    runs, and every 64 rounds a neighbour is tried for 4."""

    def __init__(self, setting: Setting, draft_loops: int) -> None:
        super().__init__(setting)
        d = setting.nearest(1, draft_loops).draft_loops
        self.arms = [PLAIN, *(c for c in setting.candidates if c.draft_loops == d)]
        self.rates: dict[tuple[int, Candidate], float] = {}
        self.at: dict[int, int] = {}
        self.round = 0
        self.trial = -1

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return the fastest so far, or a neighbour to try."""
        bucket = self.setting.bucket(batch_size)
        at = self.at.setdefault(bucket, min(1, len(self.arms) - 1))
        self.round += 1
        step = self.round % 64
        if step < 4:
            if step == 0:
                side = 1 if (self.round // 64) % 2 else -1
                self.trial = at + side if 0 <= at + side < len(self.arms) else at - side
            if 0 <= self.trial < len(self.arms):
                return self.arms[self.trial], True
        known = [n for n, arm in enumerate(self.arms) if (bucket, arm) in self.rates]
        if known:
            at = max(known, key=lambda n: self.rates[bucket, self.arms[n]])
            self.at[bucket] = at
        return self.arms[at], False

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Smooth the tokens per time of what ran."""
        if feedback.num_prefill_tokens:
            return
        rate = (len(feedback.accepted) + sum(feedback.accepted)) / feedback.seconds
        key = self.setting.bucket(batch_size), candidate
        self.rates[key] = self.rates.get(key, rate) + 0.1 * (rate - self.rates.get(key, rate))


class TransformersHeuristic(Baseline):
    """The schedule of transformers: two tokens more if all drafts were accepted, else one fewer."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.k = 5.0

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return the nearest draft length at one loop."""
        return self.setting.nearest(round(self.k), 1), False

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Count a batch as accepted if every request's drafts were."""
        longest = max(c.num_speculative_tokens for c in self.setting.candidates)
        if feedback.accepted == feedback.proposed:
            self.k = min(self.k + 2, longest)
        else:
            self.k = max(self.k - 1, 1)


class LlamaBucket(Baseline):
    """The bucket of a llama.cpp branch: full acceptance fills it, rejected drafts drain it; full
    moves to the next draft length, empty to the one before."""

    SIZE = 4.0

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.ladder = [c for c in setting.candidates if c.draft_loops == setting.shallowest]
        self.at = min(1, len(self.ladder) - 1)
        self.level = 0.0

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return the current draft length."""
        return self.ladder[self.at], False

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Fill by the share of requests that kept all drafts, drain by the share of lost drafts."""
        if candidate != self.ladder[self.at]:
            return
        pairs = list(zip(feedback.accepted, feedback.proposed, strict=True))
        full = sum(a == p for a, p in pairs) / len(pairs)
        lost = 1 - sum(feedback.accepted) / sum(feedback.proposed)
        self.level += full - lost
        step = (self.level >= self.SIZE) - (self.level <= -self.SIZE)
        if step:
            self.level = 0.0
            self.at = min(max(self.at + step, 0), len(self.ladder) - 1)


class TwoArms(Baseline):
    """mlxcel's two widths by measured throughput: windows of 32 rounds, a challenger needs a 2 %
    lead and is given up after 4 rounds if it trails by more than 35 %; a loser is tried again
    after 4, 16, then 64 windows."""

    WINDOW = 32

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.arms = [setting.nearest(3, 1), setting.nearest(8, 1)]
        self.held = 0
        self.running = 0
        self.rates: list[float | None] = [None, None]
        self.tokens = self.seconds = 0.0
        self.rounds = self.windows = 0
        self.wait = 0

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return the width of the current window."""
        return self.arms[self.running], self.running != self.held

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Close a window when it is over, and decide."""
        self.tokens += len(feedback.accepted) + sum(feedback.accepted)
        self.seconds += feedback.seconds
        self.rounds += 1
        rate = self.tokens / self.seconds
        challenges = self.running != self.held
        behind = self.rates[self.held]
        is_lost = challenges and self.rounds == 4 and behind is not None and rate < 0.65 * behind
        if self.rounds < self.WINDOW and not is_lost:
            return
        self.rates[self.running] = rate
        self.tokens = self.seconds = 0.0
        self.rounds = 0
        if challenges:
            if behind is None or rate > 1.02 * behind:
                self.held, self.wait = self.running, 4
            else:
                self.wait = min(4 * max(self.wait, 1), 64)
            self.running, self.windows = self.held, 0
        else:
            self.windows += 1
            if self.windows > self.wait:
                self.running = 1 - self.held
