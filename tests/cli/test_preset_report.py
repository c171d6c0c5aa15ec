"""`looped-spec preset report`: pages that stand alone, pictures that say what is in the preset."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_runs import Outcome

from looped_spec.cli import main as cli
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.cost import CostTable, analytic_ms
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.report_data import acceptance_rate, best, groups, points, pooled
from looped_spec.presets import AcceptanceEntry, Preset, Provenance

FULL_LOOPS = 4
Report = Callable[..., Outcome]


def ideal(batch_size: int, context_tokens: int, candidate: Candidate) -> float:
    return analytic_ms(FULL_LOOPS, candidate, loop_ms=float(batch_size))


@pytest.fixture
def preset() -> Preset:
    """A preset of ideal costs, whose depth 2 is accepted more than its depth 1."""
    arms = [Candidate(k, d) for k in (1, 2) for d in (1, 2)]
    entries = [
        AcceptanceEntry(kind, group, d, (60 + 20 * d - less, 30), (100, 50))
        for kind, less in (("maths", 0), ("prose", 20))
        for group in ("selection", "evaluation")
        for d in (1, 2)
    ]
    buckets = (
        BatchBucket(1, 4, (PLAIN, Candidate(2, 1), Candidate(1, 2)), 1),
        BatchBucket(5, 8, (PLAIN, Candidate(1, 1))),
    )
    record = Provenance("measured", "2026-11-30", command="measure a|b <c>", device="<A> & B")
    return Preset(
        "demo:toy",
        "toy",
        "<A> & B",
        "float32",
        FULL_LOOPS,
        AdaptiveSpecConfig(FULL_LOOPS, buckets),
        CostTable.sampled(ideal, arms, (1, 8), (128,)),
        tuple(entries),
        {"config": record, "cost": record, "acceptance": record},
    )


@pytest.fixture
def report(preset: Preset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Run `looped-spec preset report` on that preset, or on another `file`, in this process."""
    preset.write(tmp_path / "preset.json")

    def run(*arguments: object, file: object = tmp_path / "preset.json") -> Outcome:
        capsys.readouterr()
        code = cli.main(["preset", "report", str(file), *map(str, arguments)])
        return Outcome(code, *capsys.readouterr())

    return run


def test_points_have_the_speedup_of_the_ideal_model_where_costs_are_ideal(preset: Preset) -> None:
    found = {(p.batch_size, p.candidate): p for p in points(preset, "selection")}
    assert len(found) == 8
    for (_, candidate), point in found.items():
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        assert point.acceptance is not None and point.speedup is not None
        wanted = FULL_LOOPS * (1 + k * point.acceptance) / (FULL_LOOPS + d * k)
        assert point.speedup == pytest.approx(wanted)
        assert point.ideal_ms(FULL_LOOPS) == pytest.approx(point.ms)


def test_what_may_be_chosen_is_marked_by_batch_size(preset: Preset) -> None:
    marked = {
        (p.batch_size, p.candidate, p.is_initial)
        for p in points(preset, "selection")
        if p.is_candidate
    }
    assert marked == {
        (1, Candidate(2, 1), True),
        (1, Candidate(1, 2), False),
        (8, Candidate(1, 1), False),
    }


def test_acceptance_is_pooled_over_the_texts_of_one_group(preset: Preset) -> None:
    first, second = pooled(preset.acceptance, "selection")
    assert (first.draft_loops, first.accepted, first.trials) == (1, (140, 60), (200, 100))
    assert second.accepted == (180, 60)
    (alone, _) = pooled(preset.acceptance, "selection", "prose")
    assert alone.accepted == (60, 30)
    assert acceptance_rate(first, 2) == pytest.approx((0.7 + 0.7 * 0.6) / 2)
    assert acceptance_rate(AcceptanceEntry("x", None, 1, (0,), (0,)), 1) is None
    assert groups(preset) == ["selection", "evaluation"]


def test_a_depth_that_nobody_measured_has_a_cost_and_no_speedup(preset: Preset) -> None:
    less = tuple(entry for entry in preset.acceptance if entry.draft_loops == 1)
    found = points(dataclasses.replace(preset, acceptance=less), "selection")
    assert {p.candidate.draft_loops for p in found if p.speedup is None} == {2}
    assert best(p for p in found if p.candidate.draft_loops == 2) is None


class Page(HTMLParser):
    """Collects what a page loads, its identifiers and the words of its body."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name == "aria-label":
                self.labels.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_needs_nothing_else_and_takes_the_colours_of_its_reader(
    report: Report, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    out = tmp_path / "report.html"
    done = report("-o", out)
    assert (done.code, done.out, done.err) == (0, "", f"looped-spec: wrote {out}\n")
    text = out.read_text()
    page = Page(text)
    assert text.count("<svg") == len(page.labels) == 4
    assert all(link.startswith(("#", "data:image/png;")) for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"@import|<script|<link|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text and "currentColor" in text
    assert "#010203" not in text
    assert "demo:toy with the adapter toy, 4 loops, float32, on <A> & B." in "".join(page.words)
    assert "<A>" not in text
    speedup = best(p for p in points(Preset.read(tmp_path / "preset.json"), "selection"))
    assert speedup is not None and f"{speedup.speedup:.2f}" in page.labels[0]
    again = tmp_path / "again.html"
    report("-o", again)
    assert again.read_text() == text


def test_markdown_has_its_pictures_beside_it_with_words_for_each(
    report: Report, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    out = tmp_path / "report.md"
    assert report("-o", out).code == 0
    text = out.read_text()
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    assert [name for _, name in pictures] == [
        *("report-speedup.png", "report-acceptance.png"),
        *("report-speedup-against-acceptance.png", "report-round-time.png"),
    ]
    assert all(
        len(alt) > 60 and (tmp_path / name).read_bytes()[:4] == b"\x89PNG" for alt, name in pictures
    )
    assert "| 1 to 4 | (0, 0), (2, 1), (1, 2) | (2, 1) |" in text
    assert "measure a\\|b <c>" in text
    assert "## Selection against evaluation" in text


def test_a_preset_without_acceptance_still_shows_its_round_times(
    preset: Preset, report: Report, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    dataclasses.replace(preset, acceptance=()).write(tmp_path / "bare.json")
    assert report("-o", tmp_path / "bare.md", file=tmp_path / "bare.json").code == 0
    assert re.findall(r"\]\(([^)]+)\)", (tmp_path / "bare.md").read_text()) == [
        "bare-round-time.png"
    ]


def load_result() -> dict[str, Any]:
    """Return what `bench load` writes, made small."""
    spread = {"median": 1.0, "least": 0.9, "greatest": 1.1}
    row = {
        "policy": "never",
        "is_best_static": True,
        "repeats": 3,
        "output_throughput": spread,
        "speedup": spread,
        "gain_over_best_static": {"median": 0.0, "least": 0.0, "greatest": 0.0},
        "draft_acceptance_rate": None,
        "off_share": 1.0,
        "switches": 0,
        "identical_requests": 7,
        "requests": 9,
    }
    line = {"seconds": [0.5, 1.5], "output_throughput": [2.0, 3.0], "batch_size": [1, None]}
    line |= {"num_speculative_tokens": [0.0, None], "draft_loops": [None, None]}
    scenario = {
        "group": "evaluation",
        "mixture": "mixed",
        "profile": "ramp:1-2",
        "drains": False,
        "policies": ["never"],
        "runs": {},
        "results": [row],
        "timelines": {"never": line},
        "verdicts": [
            {
                "what": "gain_over_best_static",
                "policy": "goodput",
                "least": 0.05,
                "got": 0.07,
                "met": True,
            }
        ],
    }
    return {
        "schema_version": 1,
        "kind": "load",
        "settings": {"model": "demo:toy", "input_tokens": 4, "output_tokens": 8},
        "sessions": [],
        "scenarios": [scenario],
    }


def test_results_of_loads_are_shown_as_well(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    (tmp_path / "load.json").write_text(json.dumps(load_result()))
    assert report("-o", tmp_path / "report.md", "--load", tmp_path / "load.json").code == 0
    text = (tmp_path / "report.md").read_text()
    assert "## Load ramp:1-2, mixed texts" in text and "7 of 9" in text
    assert "goodput against the best static K and d: +7.0%, target at least +5.0%: met." in text
    assert (tmp_path / "report-load-mixed-ramp-1-2-evaluation.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "report.pdf"], "must end in .html or .md, got 'report.pdf'"),
        (["-o", "missing/report.html"], "folder 'missing' does not exist"),
        (["-o", "r.html", "--load", "missing.json"], "cannot read 'missing.json'"),
        ([], "the following arguments are required: -o/--output"),
        (["-o", "r.html", "--lod", "x"], "unknown flag '--lod' (did you mean '--load'?)"),
    ],
)
def test_a_mistake_is_one_line(
    report: Report, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = report(*arguments)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["preset.json"]


def test_files_of_another_kind_are_refused(report: Report, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    done = report("-o", tmp_path / "r.html", "--load", other)
    assert done.code == 2 and "is no result of 'bench load'" in done.err
    done = report("-o", tmp_path / "r.html", file=other)
    assert done.code == 2 and "a preset needs schema_version" in done.err


def test_without_matplotlib_the_extra_is_named(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    done = report("-o", tmp_path / "report.html")
    assert done.code == 2
    assert "a picture needs matplotlib: pip install 'looped-spec[plots]'" in done.err
    assert not (tmp_path / "report.html").exists()
