"""Write the presets that are not measured, and draw the report that the docs show of one that is.

Usage: python presets/rebuild.py [FOLDER] writes presets of published acceptance and modelled costs;
FOLDER is by default this one. The published figures lie in ouro/samples/published.json with their
source, the sizes of the models in */geometry.json. `--report` draws docs/reports/demo-huginn.md
from the measured preset of that demo instead; it needs the extra `plots`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path

from looped_spec.offline.devices import DEVICES
from looped_spec.offline.modelled import modelled_preset
from looped_spec.offline.roofline import PublishedRow, read_geometries, read_rows
from looped_spec.presets import AcceptanceEntry, Preset, Provenance, WorkloadRecord

HERE = Path(__file__).resolve().parent
REPORT = HERE.parent / "docs" / "reports" / "demo-huginn.md"
PUBLISHED = HERE / "ouro" / "samples" / "published.json"
COMMAND = "python presets/rebuild.py"
DATE = "2026-11-30"
TARGETS = ("h100-sxm", "h800", "h800-pcie", "h200")
MODELLED_TRIALS = 16.0
"""What a modelled entry is worth, in trials."""

RFC_TRIALS = 100.0
"""Stands for the trials of the RFC's points, which it does not tell."""

OF_1_4B = "ByteDance/Ouro-1.4B"
REVISION = "574fa66cb8bf5abdc979642d01cf2b79b16bfab1"
"""Of the model that the table was measured with."""


def conditional_chances(rates: dict[int, float]) -> list[float]:
    """Return p_1 ... p_8 from draft acceptance rates r(K) of K = 1, 2, 4 and 8.

    K r(K) is the sum of the first K survivals S_i = p_1 ... p_i. So S_1 and S_2 follow at once, and
    within 3-4 and 5-8 one chance is taken for all positions: that for which the sum comes out, at
    most 1 where the rates, which come from different runs, contradict each other.
    """
    sums = {k: k * rate for k, rate in rates.items()}
    first = sums[1]
    chances = [first, min(max((sums[2] - first) / first, 0.0), 1.0)]
    survival = chances[0] * chances[1]
    for low, high in ((2, 4), (4, 8)):
        length = high - low
        wanted = (sums[high] - sums[low]) / survival
        below, above = 0.0, 1.0
        for _ in range(60):
            middle = (below + above) / 2
            if sum(middle**i for i in range(1, length + 1)) < wanted:
                below = middle
            else:
                above = middle
        chances += [round(above, 9)] * length
        survival *= above**length
    return chances


def counts(chances: Iterable[float], trials: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return accepted and trials per position of so many first drafts."""
    accepted, tried = [], []
    for chance in chances:
        tried.append(round(trials, 3))
        trials *= chance
        accepted.append(round(min(trials, tried[-1]), 3))
    return tuple(accepted), tuple(tried)


def published_entries(rows: list[PublishedRow], kind: str | None) -> list[AcceptanceEntry]:
    """Return an entry for each workload and batch size of the table, at d = 2."""
    shapes: dict[tuple[int, int, int], dict[int, PublishedRow]] = {}
    for row in rows:
        shape = row.input_tokens, row.output_tokens, row.batch_size
        shapes.setdefault(shape, {})[row.num_speculative_tokens] = row
    entries = []
    for (length, output, size), by_k in shapes.items():
        rates = {k: row.acceptance for k, row in by_k.items()}
        rounds = size * (output - 1) / (1 + 8 * rates[8])  # of its K = 8 run
        accepted, trials = counts(conditional_chances(rates), rounds)
        name = f"vllm-rlt {length} in {output} out B{size}"
        entries.append(AcceptanceEntry(name, None, 2, accepted, trials, kind))
    return entries


def rfc_entries(kind: str | None) -> list[AcceptanceEntry]:
    """Return the RFC's two points: the first draft at d = 2 and at d = 3."""
    points = json.loads(PUBLISHED.read_text())["rfc"]["rows"]
    return [
        AcceptanceEntry(
            "rfc-84 L512 B8", None, d, (round(rate * RFC_TRIALS, 3),), (RFC_TRIALS,), kind
        )
        for d, rate, _ in points
    ]


def other_depths(entries: list[AcceptanceEntry]) -> list[AcceptanceEntry]:
    """Return what d = 1 and d = 3 are taken to accept: the mean log-odds of d = 2, moved by what
    the RFC's two points lie apart per doubling of d."""
    (_, low, _), (_, high, _) = json.loads(PUBLISHED.read_text())["rfc"]["rows"]
    per_doubling = (_logit(high) - _logit(low)) / math.log2(3 / 2)
    means = [sum(_logit(entry.chances[i]) for entry in entries) / len(entries) for i in range(8)]
    made = []
    for d in (1, 3):
        move = per_doubling * math.log2(d / 2)
        chances = [1 / (1 + math.exp(-(mean + move))) for mean in means]
        accepted, trials = counts(chances, MODELLED_TRIALS)
        made.append(AcceptanceEntry("moved from d=2", None, d, accepted, trials, "modelled"))
    return made


def _logit(chance: float) -> float:
    bounded = min(max(chance, 0.02), 0.98)
    return math.log(bounded / (1 - bounded))


def ouro_presets() -> list[Preset]:
    """Return the presets with published acceptance; those of the larger model have it from the
    smaller one, and say so."""
    rows = [row for row in read_rows(PUBLISHED) if row.table == "H800 PCIe"]
    source = json.loads(PUBLISHED.read_text())
    presets = []
    for model, geometry in read_geometries(HERE / "ouro" / "geometry.json").items():
        is_own = model == OF_1_4B
        table = published_entries(rows, None if is_own else "modelled")
        entries = table + rfc_entries(None if is_own else "modelled") + other_depths(table)
        filled = (
            "conditional chances follow from the rates of K = 1, 2, 4, 8, with one chance for "
            "positions 3-4 and one for 5-8; trials are those of the K = 8 runs, for the RFC's two "
            "points 100 stand in; d = 1 and d = 3 are modelled: the mean log-odds of d = 2 moved "
            "by what the RFC's points lie apart per doubling of d"
        )
        if not is_own:
            filled = f"nothing is published of this model: {OF_1_4B}'s are taken for it; {filled}"
        origin = Provenance(
            "published" if is_own else "modelled",
            DATE,
            source=f"{source['source']}; {source['rfc']['source']}",
            command=COMMAND,
            device="NVIDIA H800 PCIe, NVIDIA H100" if is_own else None,
            workloads={
                entry.workload: WorkloadRecord(8 if entry.workload.endswith("B8") else 1)
                for entry in table
            },
            notes=filled,
        )
        presets += [
            modelled_preset(
                model,
                geometry,
                DEVICES[name],
                entries,
                origin,
                command=COMMAND,
                date=DATE,
                revision=REVISION if is_own else None,
            )
            for name in TARGETS
        ]
    return presets


def silent_presets(adapter: str) -> list[Preset]:
    """Return presets of models that nothing is published of: off unless asked for."""
    origin = Provenance("modelled", DATE, command=COMMAND, notes="nothing is known: no entry")
    return [
        modelled_preset(model, geometry, DEVICES[name], (), origin, command=COMMAND, date=DATE)
        for model, geometry in read_geometries(HERE / adapter / "geometry.json").items()
        for name in TARGETS
    ]


def write_report(target: Path = REPORT) -> list[Path]:
    """Draw the report of the demo whose preset is measured, and return what was written."""
    from looped_spec.offline.report_pages import write_report as write

    (measured,) = (HERE / "huginn").glob("model=demo_huginn,*.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    return write(Preset.read(measured), (), target)


def main(folder: Path = HERE) -> None:
    """Write every preset of this kind."""
    for preset in [*ouro_presets(), *silent_presets("huginn"), *silent_presets("nanbeige")]:
        place = folder / preset.adapter
        place.mkdir(parents=True, exist_ok=True)
        preset.write(place / preset.file_name)
        print(f"{preset.adapter}/{preset.file_name}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--report"]:
        for path in write_report():
            print(path.relative_to(HERE.parent))
    else:
        main(*map(Path, sys.argv[1:2]))
