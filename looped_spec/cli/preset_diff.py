"""Compare two presets: what differs in their fields, candidates, times and acceptance.

The exit code is 0 whether they differ or not, as long as both can be read.

examples:
  looped-spec preset diff old.json new.json
  looped-spec preset diff "1.4B H200" "1.4B H100"
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from looped_spec.atomic_json import json_text
from looped_spec.cli import console
from looped_spec.cli.preset_files import read_preset
from looped_spec.cli.tables import percent, plain_table
from looped_spec.control.plan import Candidate
from looped_spec.presets import Preset

FIELDS = ("model", "adapter", "revision", "device_name", "dtype", "full_loops", "adapter_options")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("one", metavar="ONE", help="a file, or a part of one's name")
    parser.add_argument("other", metavar="OTHER", help="what to compare it with")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Compare."""
    one, other = (read_preset(name)[0] for name in (args.one, args.other))
    found = difference(one, other)
    console.write(json_text(found) if args.json else _report(found))
    return 0


def difference(one: Preset, other: Preset) -> dict[str, Any]:
    """Return what differs: fields as pairs, buckets, time ratios (other / one) per candidate, and
    acceptance of the first draft per workload and depth."""
    fields = {
        name: [getattr(one, name), getattr(other, name)]
        for name in FIELDS
        if getattr(one, name) != getattr(other, name)
    }
    if one.config.policy != other.config.policy:
        fields["policy"] = [one.config.policy, other.config.policy]
    times = [{c[:4]: c.ms for c in preset.cost.cells} for preset in (one, other)]
    ratios: dict[tuple[int, int], list[float]] = {}
    for shape in sorted(times[0].keys() & times[1].keys()):
        ratios.setdefault(shape[2:], []).append(times[1][shape] / times[0][shape])
    first = [
        {(e.workload, e.group, e.draft_loops): e.chances[0] for e in p.acceptance if e.chances}
        for p in (one, other)
    ]
    keys = sorted(first[0].keys() | first[1].keys(), key=str)
    sizes = sorted({b.max_batch_size for p in (one, other) for b in p.config.buckets})
    return {
        "fields": fields,
        "buckets": [
            {"batch_size": size, "one": _bucket(one, size), "other": _bucket(other, size)}
            for size in sizes
            if _bucket(one, size) != _bucket(other, size)
        ],
        "time_ratio": [
            [k, d, min(found), statistics.median(found), max(found)]
            for (k, d), found in ratios.items()
            if any(ratio != 1.0 for ratio in found)
        ],
        "cells_of_one_only": len(times[0].keys() - times[1].keys()),
        "cells_of_other_only": len(times[1].keys() - times[0].keys()),
        "first_draft": [
            [*key, first[0].get(key), first[1].get(key)]
            for key in keys
            if first[0].get(key) != first[1].get(key)
        ],
    }


def _bucket(preset: Preset, size: int) -> str:
    """Return the candidates at a batch size, the one to start from in brackets."""
    bucket = preset.config.buckets[preset.config.bucket_index(size)]
    names = [_name(candidate) for candidate in bucket.candidates]
    names[bucket.initial] = f"[{names[bucket.initial]}]"
    return " ".join(names)


def _name(candidate: Candidate) -> str:
    return f"{candidate.num_speculative_tokens},{candidate.draft_loops}"


def _report(found: dict[str, Any]) -> str:
    parts: list[str] = []
    rows: list[tuple[str, ...]]
    if found["fields"]:
        rows = [(name, str(a), str(b)) for name, (a, b) in found["fields"].items()]
        parts.append(plain_table(("field", "one", "other"), rows))
    if found["buckets"]:
        lines = [
            f"  up to B {b['batch_size']}: {b['one']}  ->  {b['other']}" for b in found["buckets"]
        ]
        parts.append("\n".join(["candidates", *lines]))
    if found["time_ratio"]:
        rows = [
            (f"K,d {k},{d}", *(f"{value:.3f}" for value in values))
            for k, d, *values in found["time_ratio"]
        ]
        table = plain_table(("time, other / one", "least", "median", "most"), rows)
        parts.append(table)
    if found["first_draft"]:
        rows = [
            (str(workload), str(group or "-"), str(d), percent(a), percent(b))
            for workload, group, d, a, b in found["first_draft"]
        ]
        parts.append(plain_table(("first draft accepted", "group", "d", "one", "other"), rows))
    alone = found["cells_of_one_only"], found["cells_of_other_only"]
    if any(alone):
        parts.append(f"times that only one of them has: {alone[0]} and {alone[1]}")
    return "\n\n".join(parts or ["no difference but in where they come from, if any"]) + "\n"
