"""From samples to a preset: the same samples always give the same file."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from looped_spec.control.plan import PLAIN
from looped_spec.offline.aggregate import Measured, TextKind, aggregate
from looped_spec.offline.cells import AcceptanceRun, CostBlock
from looped_spec.offline.plan import SamplingPlan
from looped_spec.offline.select import choose_config
from looped_spec.offline.store import Samples, read_samples
from looped_spec.offline.workloads import SELECTION
from looped_spec.presets import AcceptanceEntry, Preset, Provenance, WorkloadRecord


def build_preset(samples: Samples) -> Preset:
    """Return the preset that samples give.

    Raises:
        ConfigError: they are too few to select anything from.
    """
    plan = SamplingPlan.from_json(samples.header["plan"])
    measured = aggregate(samples.cells, plan.full_loops)
    settings = plan.settings
    config = choose_config(measured, plan.full_loops, settings.batch_sizes, settings.margin)
    return Preset(
        model=plan.model,
        revision=plan.revision,
        adapter=plan.adapter,
        adapter_options=dict(plan.adapter_options),
        device_name=plan.device_name,
        dtype=plan.dtype,
        full_loops=plan.full_loops,
        config=config,
        cost=measured.cost_table(_fingerprint(plan)),
        acceptance=tuple(
            _acceptance(kind, depth, measured)
            for kind in measured.kinds
            for depth in measured.depths
            if (kind, depth) in measured.acceptance
        ),
        provenance=_provenance(plan, measured, samples),
    )


def rebuild(path: Path) -> Preset:
    """Return the preset of a file of samples."""
    return build_preset(read_samples(path))


def _fingerprint(plan: SamplingPlan) -> dict[str, str]:
    found = dict(plan.execution) | {
        "model": plan.model,
        "device_name": plan.device_name,
        "dtype": plan.dtype,
        "full_loops": str(plan.full_loops),
    }
    if "num_threads" in plan.versions:
        found["num_threads"] = str(plan.versions["num_threads"])
    return found


def _acceptance(kind: TextKind, depth: int, measured: Measured) -> AcceptanceEntry:
    counts = measured.acceptance[kind, depth]
    return AcceptanceEntry(
        workload=kind.name,
        group=SELECTION,
        draft_loops=depth,
        accepted=tuple(counts.accepted),
        trials=tuple(counts.trials),
    )


def _provenance(plan: SamplingPlan, measured: Measured, samples: Samples) -> dict[str, Provenance]:
    header = samples.header
    versions = dict(plan.versions)
    if header.get("commit") is not None:
        versions["commit"] = header["commit"]
    common = Provenance(
        kind="measured",
        date=header["started"][:10],
        command=header["command"],
        versions={name: str(version) for name, version in versions.items()},
        device=plan.device_name,
    )
    workloads = {name: WorkloadRecord(**origin) for name, origin in plan.workloads.items()}
    said = [header["note"]] if header["note"] else []
    return {
        "cost": replace(
            common,
            notes="; ".join(
                [*said, *_cost_notes(plan, measured), *_missing(plan, samples, CostBlock)]
            ),
        ),
        "acceptance": replace(
            common,
            workloads=workloads,
            notes="; ".join(
                [*said, *_acceptance_notes(plan, measured), *_missing(plan, samples, AcceptanceRun)]
            ),
        ),
        "config": replace(
            common,
            workloads=workloads,
            notes="; ".join([*said, *_config_notes(plan, measured)]),
        ),
    }


def _missing(plan: SamplingPlan, samples: Samples, kind: type) -> list[str]:
    """Say how much of a kind of cell a budget left out, if any."""
    cells = [cell for cell in plan.first_cells() if isinstance(cell, kind)]
    missing = sum(cell.key not in samples.cells for cell in cells)
    return [f"{missing} of {len(cells)} cells of these were not measured"] if missing else []


def _cost_notes(plan: SamplingPlan, measured: Measured) -> list[str]:
    settings = plan.settings
    notes = [
        f"times of a step in ms, medians of up to {settings.repeats} blocks in which all "
        "candidates and twice plain decoding were timed in turn, contexts of random tokens"
    ]
    if measured.noise is not None:
        notes.append(f"the two plain ones differ by {100 * measured.noise:.1f} % (median)")
    host = ", ".join(
        f"{ms:.2f} at batch size {size}" for size, ms in sorted(measured.host_ms.items())
    )
    notes.append(f"of each step the engine beside its round takes, in ms: {host}")
    if measured.shadow_ratio is not None:
        by_size = ", ".join(
            f"{ratio:.2f} at batch size {size}" for size, ratio in measured.shadow_ratios.items()
        )
        notes.append(
            "one more readout beside a round takes, in loop passes of plain decoding, "
            f"{by_size}; shadow_cost_ratio is their median"
        )
    sizes = [
        size for size in settings.batch_sizes if len(plan.candidates(size)) < len(plan.candidates())
    ]
    if sizes:
        longest = max(c.num_speculative_tokens for c in plan.candidates(sizes[0]))
        notes.append(
            f"from batch size {sizes[0]} on times above K = {longest} are not measured but go on "
            "as straight lines"
        )
    return notes


def _acceptance_notes(plan: SamplingPlan, measured: Measured) -> list[str]:
    settings = plan.settings
    notes = [
        "conditional counts by position: of the requests that had the drafts before accepted, how "
        f"many had this one; texts go on {settings.screen_tokens} tokens behind prompts of "
        f"{settings.prompt_tokens}"
    ]
    if plan.reads_shadows and len(measured.depths) > 1:
        notes.append("drafted at the deepest depth, the shallower ones read out beside it")
    notes += [f"left out: {refused}" for refused in measured.refused]
    if measured.echoes:
        notes.append(f"{measured.echoes} texts of the others repeat themselves and do not count")
    return notes


def _config_notes(plan: SamplingPlan, measured: Measured) -> list[str]:
    notes = [
        "candidates are the best of each kind of text, and of texts whose drafts are accepted more "
        f"or less often, and what comes within {100 * plan.settings.margin:g} % of the best on "
        "average"
    ]
    for (size, candidate), found in sorted(
        measured.speedups.items(), key=lambda item: (item[0][0], -statistics.median(item[1]))
    ):
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        notes.append(
            f"on real texts at batch size {size} K = {k}, d = {d} ran "
            f"{statistics.median(found):.2f} times as fast as plain decoding "
            f"({min(found):.2f} to {max(found):.2f}, {_blocks(len(found))})"
        )
    if measured.confirm_noise is not None:
        notes.append(
            f"plain decoding against itself differs there by {100 * measured.confirm_noise:.1f} %"
        )
    if (error := _cost_error(plan, measured)) is not None:
        notes.append(
            f"rounds of these runs took what the cost table says within {100 * error:.0f} % "
            "(median), compared with plain decoding"
        )
    return notes


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _cost_error(plan: SamplingPlan, measured: Measured) -> float | None:
    """Return by how much rounds on real texts differ from the cost table, both over plain decoding;
    the context of these texts is taken in their middle."""
    table = measured.cost_table({})
    context = plan.settings.prompt_tokens + plan.settings.confirm_tokens / 2
    errors = []
    for (size, candidate), ms in measured.round_ms.items():
        said, plain = table.ms(size, context, candidate), table.ms(size, context, PLAIN)
        if candidate != PLAIN and said is not None and plain is not None:
            errors.append(abs((said / plain) / (ms / measured.round_ms[size, PLAIN]) - 1))
    return statistics.median(errors) if errors else None
