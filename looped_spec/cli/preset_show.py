"""Show what a preset says: candidates, round times, acceptance, and where each comes from.

The expected speed-up of a candidate is E(K) T(0) / T(K, d): the tokens that its acceptance
promises for a round, over what the round takes against plain decoding. Chosen candidates are
marked with *, the one to start from with **; ~ marks what lies outside of what was measured.

examples:
  looped-spec preset show my-preset.json
  looped-spec preset show "1.4B H200"
"""

from __future__ import annotations

import argparse
from typing import Any

from looped_spec.atomic_json import json_text
from looped_spec.cli import console
from looped_spec.cli.preset_files import read_preset
from looped_spec.cli.tables import number, percent, plain_table
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError
from looped_spec.presets import Preset
from looped_spec.presets.expectation import (
    CONTEXT_TOKENS,
    is_extrapolated,
    shown_context,
    speedups,
)
from looped_spec.presets.preset import PARTS


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("preset", metavar="PRESET", help="a file, or a part of one's name")
    parser.add_argument(
        "--context-tokens",
        type=int,
        metavar="L",
        help="context that times are shown at (default: the largest that was measured, up to "
        f"{CONTEXT_TOKENS})",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the preset with its expected speed-ups as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Show."""
    if args.context_tokens is not None and args.context_tokens < 0:
        raise ConfigError(f"--context-tokens must be at least 0, got {args.context_tokens}")
    preset, path = read_preset(args.preset)
    context = shown_context(preset.cost) if args.context_tokens is None else args.context_tokens
    if args.json:
        expected = [
            [size, c.num_speculative_tokens, c.draft_loops, sum(values) / len(values)]
            for size in _batch_sizes(preset)
            for c, values in _speedups(preset, size, context).items()
        ]
        document = {
            "preset": preset.to_json(),
            "context_tokens": context,
            "expected_speedup": expected,
            "file": str(path),
        }
        console.write(json_text(document))
        return 0
    console.write(show_text(preset, context))
    return 0


def show_text(preset: Preset, context: int | None = None) -> str:
    """Lay out a preset for people, at a context of its own unless one is given."""
    if context is None:
        context = shown_context(preset.cost)
    return "\n\n".join(_parts(preset, context)) + "\n"


def _parts(preset: Preset, context: int) -> list[str]:
    revision = f", revision {preset.revision}" if preset.revision else ""
    options = f", adapter options {dict(preset.adapter_options)}" if preset.adapter_options else ""
    head = (
        f"{preset.model} ({preset.adapter}, {preset.full_loops} loops{revision}{options}) on "
        f"{preset.device_name}, {preset.dtype}\npolicy {preset.config.policy}"
    )
    at = f"at {context} tokens of context"
    if any(_guess(preset, size, context, *preset.cost.candidates) for size in _batch_sizes(preset)):
        at += "; ~ is extrapolated beyond what was measured"
    parts = [
        head,
        f"time of a round in ms {at}\n{_cost(preset, context)}",
    ]
    if preset.acceptance:
        parts.append(f"expected speed-up {at}\n{_gain(preset, context)}")
        parts.append("acceptance by position, given that of those before\n" + _acceptance(preset))
    parts.append("candidates K,d by batch size\n" + _buckets(preset))
    parts.append("\n".join(_origin(preset)))
    return parts


def _batch_sizes(preset: Preset) -> list[int]:
    return sorted({cell.batch_size for cell in preset.cost.cells})


def _guess(preset: Preset, size: int, context: int, *candidates: Candidate) -> str:
    """Return the mark of a time that rests on one that was not measured around there."""
    is_guess = any(is_extrapolated(preset.cost, size, context, c) for c in candidates)
    return "~" if is_guess else ""


def _speedups(preset: Preset, size: int, context: int) -> dict[Candidate, list[float]]:
    return speedups(preset.cost, preset.acceptance, size, context)


def _name(candidate: Candidate) -> str:
    return f"{candidate.num_speculative_tokens},{candidate.draft_loops}"


def _mark(preset: Preset, size: int, candidate: Candidate) -> str:
    bucket = preset.config.buckets[preset.config.bucket_index(size)]
    if candidate not in bucket.candidates:
        return "  "
    return "**" if bucket.candidates.index(candidate) == bucket.initial else "* "


def _cost(preset: Preset, context: int) -> str:
    sizes = _batch_sizes(preset)
    rows = [
        (
            "plain" if c == PLAIN else f"K,d {_name(c)}",
            *(
                _guess(preset, size, context, c)
                + number(preset.cost.ms(size, context, c), 3)
                + _mark(preset, size, c)
                for size in sizes
            ),
        )
        for c in preset.cost.candidates
    ]
    return plain_table(("", *(f"B {size}  " for size in sizes)), rows)


def _gain(preset: Preset, context: int) -> str:
    sizes = _batch_sizes(preset)
    by_size = {size: _speedups(preset, size, context) for size in sizes}
    rows = []
    for c in preset.cost.candidates:
        if c == PLAIN or not any(c in found for found in by_size.values()):
            continue
        cells = []
        for size in sizes:
            values = by_size[size].get(c)
            mean = sum(values) / len(values) if values else None
            guess = _guess(preset, size, context, PLAIN, c) if values else ""
            cells.append(guess + number(mean, 2, "x") + _mark(preset, size, c))
        rows.append((f"K,d {_name(c)}", *cells))
    return plain_table(("", *(f"B {size}  " for size in sizes)), rows)


def _acceptance(preset: Preset) -> str:
    longest = max(len(entry.chances) for entry in preset.acceptance)
    rows = [
        (
            entry.workload,
            entry.group or "-",
            str(entry.draft_loops),
            entry.kind or preset.provenance["acceptance"].kind,
            f"{entry.trials[0]:g}",
            *(percent(entry.chances[i]) if i < len(entry.chances) else "-" for i in range(longest)),
        )
        for entry in preset.acceptance
    ]
    positions = (f"p{i + 1}" for i in range(longest))
    return plain_table(("workload", "group", "d", "kind", "trials", *positions), rows)


def _buckets(preset: Preset) -> str:
    rows = [
        (
            f"{b.min_batch_size}-{b.max_batch_size}",
            _name(b.candidates[b.initial]),
            "  ".join("plain" if c == PLAIN else _name(c) for c in b.candidates),
        )
        for b in preset.config.buckets
    ]
    return plain_table(("B", "start", "candidates"), rows)


def _origin(preset: Preset) -> list[str]:
    lines = ["where it comes from"]
    for part in PARTS:
        origin = preset.provenance[part]
        facts: list[tuple[str, Any]] = [
            ("source", origin.source),
            ("command", origin.command),
            ("device", origin.device),
            ("versions", ", ".join(f"{k} {v}" for k, v in origin.versions.items())),
            ("notes", origin.notes),
        ]
        lines.append(f"  {part}: {origin.kind}, {origin.date}")
        lines += [f"    {name}: {value}" for name, value in facts if value]
    return lines
