"""The benchmarks are scripts beside the packages; their tests import them from there."""

from __future__ import annotations

import sys

from tree import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
