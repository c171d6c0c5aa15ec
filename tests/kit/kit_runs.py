"""Runs the kit as a plugin author does: a project of its own, with pytest at its strictest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from processes import PATIENCE_SECONDS

SETTINGS = "[pytest]\naddopts = --strict-markers --strict-config\nfilterwarnings = error\n"
OUTCOMES = ["skipped", "passed", "failure", "error"]
"""What pytest's report calls them, the worst last."""


def run_kit(folder: Path, source: str, selected: Sequence[str], path: Sequence[Path]) -> Outcomes:
    """Run a test module in `folder`, and of it `selected` ("Class::test") or all.

    `path` are folders for sys.path.
    """
    (folder / "pytest.ini").write_text(SETTINGS)
    (folder / "test_conformance.py").write_text(source)
    (folder / "conftest.py").write_text(f"import sys\nsys.path[:0] = {list(map(str, path))}\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("--tb=short", "--junitxml=report.xml"),
            *(f"test_conformance.py::{name}" for name in selected or [""]),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return Outcomes(folder / "report.xml", done.stdout)


class Outcomes:
    """What came of the tests; of one with parameters, the worst."""

    def __init__(self, report: Path, text: str) -> None:
        self.text, self.report = text, report.read_text()
        self._worst: dict[tuple[str, str], str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            group = case.get("classname", "").rpartition(".")[2]
            key = group, case.get("name", "").split("[")[0]
            outcome = next((child.tag for child in case if child.tag in OUTCOMES), "passed")
            former = self._worst.get(key, OUTCOMES[0])
            self._worst[key] = max(former, outcome, key=OUTCOMES.index)

    def of(self, group: str) -> dict[str, str]:
        """Return the outcome of each test of a class."""
        return {test: outcome for (own, test), outcome in self._worst.items() if own == group}

    def failed(self, group: str) -> set[str]:
        """Return the tests of a class that failed, in their set-up too."""
        return {test for test, outcome in self.of(group).items() if outcome in OUTCOMES[2:]}
