"""What all samples together say: round times, acceptance, speedups on real texts, and the noise."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError
from looped_spec.offline.cells import AcceptanceRun, ConfirmBlock, CostBlock, read_cell
from looped_spec.offline.measure_acceptance import Counts

MIN_TRIALS = 16
"""First drafts below which the acceptance of a text is not known."""

_PRIOR_TRIALS = 4.0


@dataclass(frozen=True)
class TextKind:
    """Texts of one workload at one temperature."""

    workload: str
    temperature: float

    @property
    def name(self) -> str:
        """How a preset calls it."""
        if not self.temperature:
            return self.workload
        return f"{self.workload}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Refused:
    """Texts whose acceptance is not used, and why."""

    kind: TextKind
    texts: int
    echoes: int

    def __str__(self) -> str:
        return (
            f"{self.kind.name}: {self.echoes} of {self.texts} texts repeat themselves, which makes "
            "drafts easier than other text does"
        )


@dataclass(frozen=True)
class Measured:
    """What the samples say.

    Attributes:
        times: {(B, L, K, d): ms} of a step, plain decoding among them.
        host_ms: what a step of the engine takes beside its round, by batch size; part of `times`.
        noise: by how much two measurements of plain decoding in the same block differ: the median
            of the absolute difference over the first.
        acceptance: conditional counts by kind of text and depth.
        refused: kinds of text that are left out, since most of their texts repeat themselves.
        echoes: texts left out of the kinds that are used.
        speedups: of each finalist on real texts over plain decoding, one per block.
        confirm_noise: like `noise`, of those runs.
        round_ms: median time of a round of these runs, plain decoding among them.
        shadow_ratios: by batch size, the time of one more readout over that of a loop pass of plain
            decoding; empty where nobody measured it.
    """

    times: Mapping[tuple[int, int, int, int], float]
    host_ms: Mapping[int, float]
    noise: float | None
    acceptance: Mapping[tuple[TextKind, int], Counts]
    refused: tuple[Refused, ...]
    echoes: int
    speedups: Mapping[tuple[int, Candidate], list[float]]
    confirm_noise: float | None
    round_ms: Mapping[tuple[int, Candidate], float]
    shadow_ratios: Mapping[int, float]

    @property
    def shadow_ratio(self) -> float | None:
        """The median over all batch sizes; None where nobody measured it."""
        return statistics.median(self.shadow_ratios.values()) if self.shadow_ratios else None

    @property
    def kinds(self) -> list[TextKind]:
        """The kinds of text, in the order of the samples."""
        return list(dict.fromkeys(kind for kind, _ in self.acceptance))

    @property
    def depths(self) -> list[int]:
        """The draft depths that acceptance is known of."""
        return sorted({depth for _, depth in self.acceptance})

    def chances(self, kind: TextKind, depth: int, longest: int) -> list[float]:
        """Return p_1 ... p_longest: the chance of each draft if those before it were accepted.

        A position with few trials is drawn to the one before it, by a weight of a few trials.
        """
        counts = self.acceptance[kind, depth]
        chance, found = 0.5, []
        for position in range(longest):
            trials = accepted = 0
            if position < len(counts.trials):
                trials, accepted = counts.trials[position], counts.accepted[position]
            weight = _PRIOR_TRIALS if position else 1.0
            chance = (accepted + weight * chance) / (trials + weight)
            found.append(chance)
        return found

    def cost_table(self, fingerprint: Mapping[str, str]) -> CostTable:
        """Return the times as a cost table, the same shapes at every batch size and context.

        Where a large batch was not tried with the longest drafts, their times go on as straight
        lines from those of shorter ones: a table that ended there would take them from a smaller
        batch.
        """
        whole = dict(self.times)
        arms = sorted({key[2:] for key in whole if key[2]})
        for size, length in sorted({key[:2] for key in whole}):
            for k, d in arms:
                if (size, length, k, d) not in whole:
                    whole[size, length, k, d] = self._longer(size, length, k, d)
        return CostTable.of(whole, fingerprint)

    def _longer(self, size: int, length: int, k: int, d: int) -> float:
        """Return the time of drafts longer than those measured, from the two longest of these;
        plain decoding counts as a draft of none."""
        known = {
            key[2]: ms
            for key, ms in self.times.items()
            if key[:2] == (size, length) and key[3] in (0, d)
        }
        low, high = sorted(known)[-2:]
        return known[high] + (k - high) * (known[high] - known[low]) / (high - low)


def aggregate(cells: Mapping[str, Any], full_loops: int) -> Measured:
    """Reduce the records of samples of a model of so many loops, whatever order they stand in."""
    found = [(read_cell(data["of"]), data) for _, data in sorted(cells.items())]
    costs = [(cell, data) for cell, data in found if isinstance(cell, CostBlock)]
    runs = [(cell, data) for cell, data in found if isinstance(cell, AcceptanceRun)]
    confirms = [(cell, data) for cell, data in found if isinstance(cell, ConfirmBlock)]
    times, host_ms = _times(costs)
    plain = [(data["ms"][0][2], data["again_ms"]) for _, data in costs]
    acceptance, refused, echoes = _acceptance(runs)
    speedups, round_ms, again = _speedups(confirms)
    return Measured(
        times,
        host_ms,
        _noise(plain),
        acceptance,
        refused,
        echoes,
        speedups,
        _noise(again),
        round_ms,
        _shadow_ratios(costs, full_loops),
    )


def _shadow_ratios(
    costs: Sequence[tuple[CostBlock, Mapping[str, Any]]], full_loops: int
) -> dict[int, float]:
    """Return what one more readout takes, in loop passes of plain decoding, by batch size.

    A round with readouts is compared with the same one without, in its own block; the median counts
    of all blocks and kinds of rounds, at least 0.
    """
    found: dict[int, list[float]] = {}
    for block, data in costs:
        usual = {(k, d): median for k, d, median, _ in data["ms"]}
        loop_ms = (usual[0, 0] + data["again_ms"]) / 2 / full_loops
        for k, d, depths, ms in data.get("shadow_ms", ()):
            # Plain decoding was timed twice: its mean is what rounds are compared with.
            alone = usual[k, d] if k else loop_ms * full_loops
            found.setdefault(block.batch_size, []).append((ms - alone) / depths / loop_ms)
    return {size: max(statistics.median(each), 0.0) for size, each in sorted(found.items())}


def _noise(pairs: Sequence[tuple[float, float]]) -> float | None:
    return statistics.median(abs(b / a - 1) for a, b in pairs) if pairs else None


def _times(
    costs: Sequence[tuple[CostBlock, Mapping[str, Any]]],
) -> tuple[dict[tuple[int, int, int, int], float], dict[int, float]]:
    """Return ms per shape, and of the host per batch size.

    A candidate is compared with plain decoding in its own block, so that blocks of a fast and of a
    slow hour agree; the median of the ratios times the median of plain decoding is its time.
    """
    ratios: dict[tuple[int, int, int, int], list[float]] = {}
    plain: dict[tuple[int, int], list[float]] = {}
    host: dict[int, list[float]] = {}
    for block, data in costs:
        shape = block.batch_size, block.context_tokens
        base = (data["ms"][0][2] + data["again_ms"]) / 2
        plain.setdefault(shape, []).append(base)
        host.setdefault(block.batch_size, []).append(data["host_ms"])
        for k, d, median, _ in data["ms"]:
            ratios.setdefault((*shape, k, d), []).append(1.0 if not k else median / base)
    host_ms = {size: statistics.median(found) for size, found in host.items()}
    return {
        shape: statistics.median(found) * statistics.median(plain[shape[:2]]) + host_ms[shape[0]]
        for shape, found in sorted(ratios.items())
    }, host_ms


def _acceptance(
    runs: Sequence[tuple[AcceptanceRun, Mapping[str, Any]]],
) -> tuple[dict[tuple[TextKind, int], Counts], tuple[Refused, ...], int]:
    texts: dict[TextKind, list[int]] = {}
    depths: dict[TextKind, int] = {}
    counts: dict[tuple[TextKind, int], Counts] = {}
    for run, data in runs:
        kind = TextKind(run.workload, run.temperature)
        seen = texts.setdefault(kind, [0, 0])
        if run.draft_loops == depths.setdefault(kind, run.draft_loops):
            # Drafts of another depth give the same texts.
            seen[0] += data["texts"]
            seen[1] += data["echoes"]
        for depth, trials, accepted in data["counts"]:
            counts.setdefault((kind, depth), Counts()).add(trials, accepted)
    refused = tuple(
        Refused(kind, total, echoes)
        for kind, (total, echoes) in texts.items()
        if 2 * echoes > total
    )
    unusable = {each.kind for each in refused}
    for kind, depth in list(counts):
        first = counts[kind, depth].trials[:1]
        if kind in unusable or not first or first[0] < MIN_TRIALS:
            del counts[kind, depth]
    echoes = sum(n for kind, (_, n) in texts.items() if kind not in unusable)
    return counts, refused, echoes


def _speedups(
    confirms: Sequence[tuple[ConfirmBlock, Mapping[str, Any]]],
) -> tuple[
    dict[tuple[int, Candidate], list[float]],
    dict[tuple[int, Candidate], float],
    list[tuple[float, float]],
]:
    speedups: dict[tuple[int, Candidate], list[float]] = {}
    rounds: dict[tuple[int, Candidate], list[float]] = {}
    again = []
    for block, data in confirms:
        rates = []
        for k, d, tokens, seconds, count in data["runs"]:
            if not count or not seconds:
                raise ConfigError(
                    f"no round was timed at batch size {block.batch_size}: the model ends every "
                    "text at once; give --ignore-eos"
                )
            rates.append((Candidate(k, d), tokens / seconds))
            rounds.setdefault((block.batch_size, Candidate(k, d)), []).append(
                1000 * seconds / count
            )
        plain = (rates[0][1] + rates[-1][1]) / 2
        again.append((rates[0][1], rates[-1][1]))
        for candidate, rate in rates:
            if candidate != PLAIN:
                speedups.setdefault((block.batch_size, candidate), []).append(rate / plain)
    return speedups, {key: statistics.median(found) for key, found in rounds.items()}, again
