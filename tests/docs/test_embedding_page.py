"""docs/embedding.md: its engine runs, and the controller does for it what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from processes import PATIENCE_SECONDS
from tree import ROOT

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


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
