"""What docs/early-exit.md shows runs, and its numbers are those that were measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE_SECONDS
from tree import ROOT

PAGE = (ROOT / "docs" / "early-exit.md").read_text()


def results(name: str) -> dict[tuple[str, float], dict[str, Any]]:
    """Return the rows of a file of measurements by criterion and threshold."""
    document = json.loads((ROOT / "docs" / "measurements" / f"{name}.json").read_text())
    return {(row["criterion"], row["threshold"]): row for row in document["results"]}


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert 1.0 <= float(done.stdout) < 4.0


@pytest.mark.parametrize("name", ["ouro", "huginn"])
def test_every_measured_row_is_shown_with_its_numbers(name: str) -> None:
    section = PAGE.split(f"### demo:{name}\n")[1].split("\n### ")[0]
    shown = [
        tuple(cell.strip(" `") for cell in line.strip("|").split("|"))
        for line in section.splitlines()
        if re.match(r"\| (`|fixed|full)", line)
    ]
    speeds = [results(f"early-exit-{name}-speed-{count}") for count in (1, 8)]
    expected = []
    for setting, row in results(f"early-exit-{name}").items():
        cells = [setting[0], f"{setting[1]:g}", f"{row['mean_loops']:.2f}", f"{row['loss']:.3f}"]
        cells.append(f"{row['agreement']:.3f}")
        for speed in speeds:
            full = next(iter(speed.values()))["tokens_per_second"]
            rate = speed[setting]["tokens_per_second"] if setting in speed else None
            cells.append(f"{rate:.0f} ({rate / full:.2f}x)" if rate else "")
        expected.append(tuple(cells))
    assert [(a, re.sub(r" loops?$", "", b), *rest) for a, b, *rest in shown] == expected
    assert len(expected) > 10
