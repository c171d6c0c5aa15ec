"""docs/embedding.md: its engine runs, and the controller does for it what the page says."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

from processes import PATIENCE_SECONDS
from tree import ROOT

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import RoundFeedback, SpeculationPlan
from looped_spec.control.stats import ControllerStats

PAGE = (ROOT / "docs" / "embedding.md").read_text()


def test_the_controller_drives_a_foreign_engine(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(example.splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, "-c", f"{example}\nimport sys\nassert 'torch' not in sys.modules"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    easy, hard = done.stdout.splitlines()
    assert float(re.findall(r"easy text: (\S+) times", easy)[0]) > 1.3
    assert 0.97 < float(re.findall(r"hard text: (\S+) times", hard)[0]) < 1.05
    assert "K=0" in hard and "K=0" not in easy
    (page,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
    for shown, said in zip(page.splitlines(), (easy, hard), strict=True):
        assert said.startswith(shown.removesuffix("..."))


def test_a_preset_is_read_as_the_page_does_without_torch(tmp_path: Path) -> None:
    lines = re.findall(r"^    ((?:preset|config) = .*)$", PAGE, re.M)
    assert len(lines) == 2
    preset = next((ROOT / "presets" / "ouro").glob("model=*.json"))
    (tmp_path / "preset.json").write_bytes(preset.read_bytes())
    code = [
        "import dataclasses, sys",
        "from looped_spec.control.controller import AdaptiveController",
        "from looped_spec.presets.preset import Preset",
        *lines,
        "controller = AdaptiveController(config)",
        "print(controller.plan(10**6).candidate in config.buckets[-1].candidates)",
        "print(controller.explain().as_dict()['policy'], 'torch' in sys.modules)",
    ]
    command = [sys.executable, "-c", "\n".join(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True", "goodput False"], done.stderr


def test_every_name_of_the_interface_on_the_page_exists() -> None:
    known = set(inspect.signature(AdaptiveController.plan).parameters) | {"consensus", "as_dict"}
    known |= set(dir(AdaptiveController)) | set(SpeculationPlan._fields)
    for cls in (AdaptiveSpecConfig, RoundFeedback, ControllerStats):
        known |= {field.name for field in dataclasses.fields(cls)}
    named = set(re.findall(r"`(?:controller\.)?(\w+)(?:=\w*|\(\))?`", PAGE))
    assert len(named) > 12
    assert named - known == set()


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
