"""What a preset lets one expect: acceptance to start from, and speed-ups."""

from __future__ import annotations

from collections.abc import Sequence

from looped_spec.control.acceptance_prior import AcceptanceCounts, AcceptancePrior
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.presets.parts import AcceptanceEntry
from looped_spec.presets.preset import Preset

CONTEXT_TOKENS = 512
"""Where candidates are compared, if nobody says."""


def shown_context(cost: CostTable) -> int:
    """Return the context in tokens that a table is best shown at: the largest that was measured of
    up to `CONTEXT_TOKENS`, else the smallest."""
    contexts = {cell.context_tokens for cell in cost.cells}
    fitting = [length for length in contexts if length <= CONTEXT_TOKENS]
    return max(fitting) if fitting else min(contexts, default=CONTEXT_TOKENS)


def is_extrapolated(cost: CostTable, batch_size: int, context: int, candidate: Candidate) -> bool:
    """Whether a time lies outside what was measured of the candidate: at a batch size or a context
    (tokens) below or above all of its own."""
    shape = candidate.num_speculative_tokens, candidate.draft_loops
    cells = [cell for cell in cost.cells if cell[2:4] == shape]
    sizes = {cell.batch_size for cell in cells}
    near = {
        max((size for size in sizes if size <= batch_size), default=None),
        min((size for size in sizes if size >= batch_size), default=None),
    }
    for size in near:
        contexts = [cell.context_tokens for cell in cells if cell.batch_size == size]
        if not contexts or not min(contexts) <= context <= max(contexts):
            return True
    return False


def expected_speedup(
    cost: CostTable,
    entry: AcceptanceEntry,
    batch_size: int,
    candidate: Candidate,
    context_tokens: float = CONTEXT_TOKENS,
) -> float | None:
    """Return E(K) T(0) / T(K, d) of a candidate of the entry's depth; None if the table lacks
    it."""
    plain = cost.ms(batch_size, context_tokens, PLAIN)
    ms = cost.ms(batch_size, context_tokens, candidate)
    if plain is None or ms is None:
        return None
    return entry.tokens(candidate.num_speculative_tokens) * plain / ms


def speedups(
    cost: CostTable,
    acceptance: Sequence[AcceptanceEntry],
    batch_size: int,
    context_tokens: float = CONTEXT_TOKENS,
) -> dict[Candidate, list[float]]:
    """Return the expected speed-up of every candidate of the table, once for each entry of its
    depth that was not kept to evaluate with."""
    found: dict[Candidate, list[float]] = {}
    for candidate in cost.candidates:
        for entry in acceptance:
            if entry.draft_loops == candidate.draft_loops and entry.group != "evaluation":
                value = expected_speedup(cost, entry, batch_size, candidate, context_tokens)
                if value is not None:
                    found.setdefault(candidate, []).append(value)
    return found


def starting_acceptance(preset: Preset, is_doubted: bool = False) -> AcceptancePrior | None:
    """Return what to believe of acceptance before the first round: the entries that candidates
    were selected on, without modelled ones if there are others, at less weight where they are
    doubted, or all of them modelled."""
    usual = preset.provenance["acceptance"].kind
    known = [e for e in preset.acceptance if e.group != "evaluation" and e.trials[0] > 0]
    seen = [entry for entry in known if (entry.kind or usual) != "modelled"]
    if not known:
        return None
    prior = AcceptancePrior.pooled(
        AcceptanceCounts(entry.draft_loops, entry.accepted, entry.trials) for entry in seen or known
    )
    return prior.demoted() if is_doubted or not seen else prior
