"""Presets whose costs are modelled: for devices that nobody measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.cost import CostTable
from looped_spec.control.default_config import DRAFT_LENGTHS, default_depths, longest_draft
from looped_spec.control.plan import MAX_SPECULATIVE_TOKENS, PLAIN, Candidate
from looped_spec.errors import ConfigError
from looped_spec.offline.devices import KnownDevice
from looped_spec.offline.roofline import BATCH_SIZES, Geometry, modelled_cost
from looped_spec.presets import AcceptanceEntry, Preset, Provenance
from looped_spec.presets.expectation import CONTEXT_TOKENS, speedups

MOST_CANDIDATES = 4
NEAR_BEST = 0.9
"""A candidate stays if it reaches this share of the best."""

LEAST_GAIN = 1.02
"""Expected speed-up below which plain decoding is where to start."""

COST_NOTES = (
    "a roofline: each layer pass reads its weights once at 0.8 of the data sheet's bandwidth and "
    "computes at 0.6 of its dense rate, whichever takes longer with a soft corner, plus 0.03 ms to "
    "start a layer; rounds are captured; not measured, so a run takes it as a prior only"
)
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def modelled_preset(
    model: str,
    geometry: Geometry,
    device: KnownDevice,
    acceptance: Sequence[AcceptanceEntry],
    acceptance_from: Provenance,
    *,
    command: str,
    date: str,
    dtype: str = "bfloat16",
    revision: str | None = None,
    adapter_options: Mapping[str, Any] | None = None,
    ks: Sequence[int] | None = None,
    ds: Sequence[int] | None = None,
    note: str = "",
) -> Preset:
    """Return a preset of a model on a device; without acceptance it keeps speculation off.

    `ks` and `ds` left out are those that are tried by default. A depth that nothing is known of is
    modelled, but not chosen.

    Raises:
        ConfigError: a depth is out of the model's range, or the entries tell of none of them.
    """
    depths = default_depths(geometry.full_loops) if ds is None else ds
    lengths = DRAFT_LENGTHS if ks is None else ks
    candidates = [Candidate(k, d).check(geometry.full_loops) for d in depths for k in lengths]
    cost = modelled_cost(
        geometry,
        device,
        candidates,
        {
            "model": model,
            "device_name": device.device_name,
            "dtype": dtype,
            "graph_backend": "cuda",
        },
        _BYTES[dtype],
    )
    source = f"{device.source}: {device.gigabytes_per_second:g} GB/s, {device.teraflops:g} TFLOPS"
    if acceptance:
        known = _known_depth(acceptance, depths)
        buckets = _buckets(cost, acceptance, known, limits_drafts=ks is None)
        config = AdaptiveSpecConfig(geometry.full_loops, buckets)
        why = (
            "the (K, d) with most expected tokens per ms by the modelled costs at "
            f"{CONTEXT_TOKENS} tokens of context, on average over workloads, and what comes within "
            f"{100 * (1 - NEAR_BEST):.0f} % of it, among all and among those of the depth with "
            "most trials, whose best is the start"
        )
    else:
        config = AdaptiveSpecConfig.pinned(PLAIN, geometry.full_loops, BATCH_SIZES[-1])
        why = "nothing is known of this model's acceptance: speculation stays off unless asked for"
    said = [note] if note else []
    made: dict[str, Any] = {"date": date, "command": command}
    return Preset(
        model=model,
        adapter=geometry.adapter,
        device_name=device.device_name,
        dtype=dtype,
        full_loops=geometry.full_loops,
        config=config,
        cost=cost,
        acceptance=tuple(acceptance),
        provenance={
            "config": Provenance("modelled", **made, notes="; ".join([*said, why])),
            "cost": Provenance(
                "modelled",
                **made,
                source=f"{source}; {geometry.source}",
                notes="; ".join([*said, COST_NOTES]),
            ),
            "acceptance": acceptance_from,
        },
        revision=revision,
        adapter_options=adapter_options or {},
    )


def _near(ranked: Sequence[Candidate], mean: Mapping[Candidate, float]) -> list[Candidate]:
    """Return the best of candidates, which come best first, and what comes near it."""
    return [c for c in ranked if mean[c] >= NEAR_BEST * mean[ranked[0]]][:MOST_CANDIDATES]


def _known_depth(acceptance: Sequence[AcceptanceEntry], depths: Sequence[int]) -> int:
    """Return the depth that most is known of, among `depths`."""
    trials: dict[int, float] = {}
    for entry in acceptance:
        if entry.draft_loops in depths and entry.group != "evaluation":
            trials[entry.draft_loops] = trials.get(entry.draft_loops, 0.0) + entry.trials[0]
    if not trials:
        told = ", ".join(str(d) for d in sorted({entry.draft_loops for entry in acceptance}))
        raise ConfigError(
            f"acceptance is known of draft_loops {told} only, and of texts to select by; none of "
            f"it is among draft_loops {', '.join(map(str, depths))}"
        )
    return max(trials, key=lambda depth: trials[depth])


def _buckets(
    cost: CostTable, acceptance: Sequence[AcceptanceEntry], known: int, *, limits_drafts: bool
) -> tuple[BatchBucket, ...]:
    """Return buckets up to the sizes of the table, each with what looks best at its largest.

    Where to start is the best of the depth `known`: others are there to be tried. At large batches
    no long drafts are, if `limits_drafts`.
    """
    buckets = []
    low = 1
    for size in BATCH_SIZES:
        longest = longest_draft(size) if limits_drafts else MAX_SPECULATIVE_TOKENS
        mean = {
            candidate: sum(values) / len(values)
            for candidate, values in speedups(cost, acceptance, size).items()
            if candidate.num_speculative_tokens <= longest
        }
        ranked = sorted(mean, key=lambda c: (-mean[c], c.num_speculative_tokens, c.draft_loops))
        of_known = [c for c in ranked if c.draft_loops == known]
        best = of_known[0]
        kept = list({*_near(ranked, mean), *_near(of_known, mean)})
        kept.sort(key=lambda c: (c.num_speculative_tokens * c.draft_loops, c.draft_loops))
        arms = (PLAIN, *kept)
        pays = mean[best] >= LEAST_GAIN
        buckets.append(BatchBucket(low, size, arms, arms.index(best) if pays else 0))
        low = size + 1
    return tuple(buckets)
