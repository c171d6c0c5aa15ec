"""Measure the demo; `--help` shows how."""

from __future__ import annotations

import sys

from looped_spec.demos.evaluate import main
from looped_spec_huginn.demo.recipe import RECIPE

if __name__ == "__main__":
    sys.exit(main(RECIPE))
