"""What the report of a preset says, before it is a page: sections of text, tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looped_spec.control.config import BatchBucket
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.figures import Picture, new_figure
from looped_spec.offline.load_plot import alt_text, draw_scenario, shown_ways
from looped_spec.offline.report_data import Point, at, best, groups, named, points, shapes
from looped_spec.offline.report_heatmaps import acceptance_picture, speedup_picture
from looped_spec.offline.report_scatter import round_time_picture, scatter_picture
from looped_spec.presets import Preset, Provenance

_SHORT = 60
"""Letters of a command that may stand in every row of a table."""

_FRAMES = "Frames mark what the preset may choose at that batch size, the thick one its start."


@dataclass(frozen=True)
class Table:
    """A head and rows of texts; the first column is text, the others are numbers or short."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A part of the report, in the order: text, tables, pictures."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


def sections(preset: Preset, loads: Sequence[Mapping[str, Any]] = ()) -> list[Section]:
    """Return the report; `loads` are documents of `bench load`."""
    measured = groups(preset)
    group = measured[0] if measured else None
    found = points(preset, group)
    parts = [
        _summary(preset, found),
        _choices(preset, found),
        _pictured(
            "Speed-up over K and d",
            speedup_picture(preset, group),
            f"Predicted: the tokens of a round, 1 + K alpha with the acceptance of {_of(group)}, "
            f"by its time, both against plain decoding. {_FRAMES}",
        ),
        _pictured(
            "Draft acceptance",
            acceptance_picture(preset, group),
            f"Accepted by proposed drafts in per cent, on {_of(group)}. A longer draft is accepted "
            "less, a deeper one more. Frames mark what may be chosen at some batch size.",
        ),
        _pictured(
            "Speed-up against acceptance",
            scatter_picture(preset, group),
            "High acceptance is not high speed: a deeper draft is accepted more often and costs "
            "more. The number beside a point is its K; rings are what the preset may choose.",
        ),
        _pictured(
            "Round time against the ideal model",
            round_time_picture(preset, group),
            f"The ideal round takes T = c (D + dK), with D = {preset.full_loops} and c from the "
            "plain round: a pass over many rows costs what one over a single row costs, and "
            "nothing else takes time. Above the dashed line a round takes longer than that; rings "
            "are what the preset may choose.",
        ),
        _overfitting(preset, measured),
    ]
    for document in loads:
        parts += _loads(document)
    parts.append(_origin(preset))
    return [part for part in parts if part is not None]


def _summary(preset: Preset, found: Sequence[Point]) -> Section:
    sizes, lengths = shapes(found)
    lines = [
        f"{preset.model} with the adapter {preset.adapter}, {preset.full_loops} loops, "
        f"{preset.dtype}, on {preset.device_name}.",
    ]
    if found:
        said = []
        for size in sizes:
            top = best(at(found, size, lengths[0]))
            said.append(
                f"{size} at once: {named(top)}, {top.speedup:.2f} times plain decoding"
                if top
                else f"{size} at once: plain decoding"
            )
        lines.append(f"Predicted to be fastest at a context of {lengths[0]}: {'; '.join(said)}.")
    kinds = {part: record.kind for part, record in preset.provenance.items()}
    lines.append(", ".join(f"{part}: {kind}" for part, kind in kinds.items()) + ".")
    return Section(f"Preset of {preset.model}", lines)


def _choices(preset: Preset, found: Sequence[Point]) -> Section:
    sizes, lengths = shapes(found)
    rows = []
    for bucket in preset.config.buckets:
        inside = [size for size in sizes if _holds(bucket, size)]
        top = best(at(found, inside[-1], lengths[0])) if inside else None
        rows.append(
            (
                _range(bucket.min_batch_size, bucket.max_batch_size),
                ", ".join(map(_pair, bucket.candidates)),
                _pair(bucket.candidates[bucket.initial]),
                f"{_pair(top.candidate)} at B={top.batch_size}: {top.speedup:.2f}" if top else "-",
            )
        )
    head = ("batch size", "may choose (K, d)", "starts from", "fastest predicted")
    text = f"Policy: {preset.config.policy}. (0, 0) is plain decoding."
    return Section("What runs", [text], [Table(head, rows)])


def _overfitting(preset: Preset, measured: Sequence[str | None]) -> Section | None:
    """Compare predictions by the texts that candidates were selected by with those by others."""
    if not {"selection", "evaluation"} <= set(measured):
        return None
    selecting, evaluating = points(preset, "selection"), points(preset, "evaluation")
    sizes, lengths = shapes(selecting)
    rows = []
    for size in sizes:
        top = best(at(selecting, size, lengths[0]))
        if top is None:
            rows.append((str(size), "plain", "-", "-", "-"))
            continue
        here = at(evaluating, size, lengths[0])
        again = next((p for p in here if p.candidate == top.candidate), None)
        other = best(here)
        rows.append(
            (
                str(size),
                _pair(top.candidate),
                _speed(top),
                _speed(again),
                f"{_pair(other.candidate)}: {_speed(other)}" if other else "plain",
            )
        )
    head = (
        *("batch size", "fastest on the selection group", "speed-up there"),
        *("speed-up on the evaluation group", "fastest on the evaluation group"),
    )
    text = (
        "The two groups of texts have no text in common. A choice that only suits the texts that "
        "it was selected by would lose on the others."
    )
    return Section("Selection against evaluation", [text], [Table(head, rows)])


def _loads(document: Mapping[str, Any]) -> Iterable[Section]:
    """Yield a section for each scenario of a result of `bench load`."""
    settings = document["settings"]
    for scenario in document["scenarios"]:
        if not scenario["results"]:
            continue
        rows = [_load_row(row) for row in scenario["results"]]
        head = (
            *("policy", "tokens/s", "over never", "against best static", "acceptance"),
            *("off", "switches", "identical requests"),
        )
        text = [
            f"Measured with {settings['model']}: {settings['input_tokens']} tokens in, "
            f"{settings['output_tokens']} out, texts of the {scenario['group']} group, medians of "
            f"{max(row['repeats'] for row in scenario['results'])} interleaved runs.",
            *(_verdict(verdict) for verdict in scenario["verdicts"]),
        ]
        pictures = []
        if shown_ways(scenario):
            figure = new_figure(9, 6.4)
            draw_scenario(figure, scenario, title=False)
            name = f"load-{scenario['mixture']}-{scenario['profile']}-{scenario['group']}"
            pictures.append(Picture(_file_name(name), figure, alt_text(scenario)))
        title = f"Load {scenario['profile']}, {scenario['mixture']} texts"
        yield Section(title, text, [Table(head, rows)], pictures)


def _load_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    gain, rate = row["gain_over_best_static"], row["draft_acceptance_rate"]
    return (
        row["policy"] + (" (best static)" if row["is_best_static"] else ""),
        f"{row['output_throughput']['median']:.0f}",
        f"{row['speedup']['median']:.2f}" if row["speedup"] else "-",
        _gain(gain),
        "-" if rate is None else f"{rate:.0%}",
        f"{row['off_share']:.0%}",
        f"{row['switches']:.0f}",
        f"{row['identical_requests']} of {row['requests']}",
    )


def _gain(gain: Mapping[str, float] | None) -> str:
    if gain is None:
        return "-"
    median, least, greatest = (100 * gain[key] for key in ("median", "least", "greatest"))
    return f"{median:+.1f}% ({least:+.1f} to {greatest:+.1f})"


def _verdict(verdict: Mapping[str, Any]) -> str:
    than = (
        "plain decoding" if verdict["what"] == "speedup_over_never" else "the best static K and d"
    )
    return (
        f"{verdict['policy']} against {than}: {100 * verdict['got']:+.1f}%, target at least "
        f"{100 * verdict['least']:+.1f}%: {'met' if verdict['met'] else 'missed'}."
    )


def _origin(preset: Preset) -> Section:
    rows, notes, told = [], [], ""
    for part, record in preset.provenance.items():
        made = _made(record)
        shown = "the same" if made == told and len(made) > _SHORT else made
        rows.append((part, record.kind, record.date, record.device or "-", shown))
        told = made
        notes += [(part, note) for note in (record.notes or "").split("; ") if note]
    tables = [Table(("part", "kind", "date", "device", "command or source"), rows)]
    if notes:
        tables.append(Table(("part", "note"), notes))
    return Section("Where it comes from", tables=tables)


def _made(record: Provenance) -> str:
    return record.command or record.source or "-"


def _pictured(title: str, picture: Picture | None, text: str) -> Section | None:
    return None if picture is None else Section(title, [text], pictures=[picture])


def _of(group: str | None) -> str:
    return f"the {group} group of texts" if group else "the texts of the source"


def _holds(bucket: BatchBucket, size: int) -> bool:
    return bucket.min_batch_size <= size <= bucket.max_batch_size


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _pair(candidate: Candidate) -> str:
    if candidate == PLAIN:
        return "(0, 0)"
    return f"({candidate.num_speculative_tokens}, {candidate.draft_loops})"


def _speed(point: Point | None) -> str:
    return f"{point.speedup:.2f}" if point is not None and point.speedup is not None else "-"


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "-" else "-" for letter in text)
