"""Every preset that has samples beside it is what these samples give."""

from __future__ import annotations

from pathlib import Path

import pytest
from tree import ROOT

from looped_spec.offline.build import rebuild
from looped_spec.offline.plan import SamplingPlan
from looped_spec.offline.store import read_samples
from looped_spec.presets import Preset

SAMPLES = sorted((ROOT / "presets").glob("*/samples/*.jsonl"))
DEMOS = ("huginn", "nanbeige", "ouro")


@pytest.mark.parametrize("samples", SAMPLES, ids=lambda path: str(path.parent.parent.name))
def test_a_preset_is_built_again_from_its_samples(samples: Path, tmp_path: Path) -> None:
    preset = rebuild(samples)
    shipped = samples.parent.parent / preset.file_name
    assert samples.name == f"{shipped.stem}.jsonl"
    preset.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == shipped.read_text()


@pytest.mark.parametrize("samples", SAMPLES, ids=lambda path: str(path.parent.parent.name))
def test_samples_are_whole_and_hold_no_text_and_no_folder(samples: Path) -> None:
    found = read_samples(samples)
    plan = SamplingPlan.from_json(found.header["plan"])
    assert {cell.key for cell in plan.first_cells()} <= set(found.cells)
    assert all(origin["group"] == "selection" for origin in plan.workloads.values())
    text = samples.read_text()
    assert "/" not in text and len(text) < 100_000


@pytest.mark.parametrize("name", DEMOS)
def test_every_demo_has_a_preset_that_was_measured(name: str) -> None:
    (path,) = (ROOT / "presets" / name).glob("model=demo_*.json")
    preset = Preset.read(path)
    assert preset.model == f"demo:{name}" and path.name == preset.file_name
    assert {record.kind for record in preset.provenance.values()} == {"measured"}
    assert any(SAMPLES) and (path.parent / "samples" / f"{path.stem}.jsonl") in SAMPLES
