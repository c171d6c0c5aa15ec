"""Some loads of these tests are those of the benchmark, which lies beside the packages."""

from __future__ import annotations

import sys

from tree import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
