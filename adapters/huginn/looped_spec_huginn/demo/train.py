"""Train `demo:huginn` from text of the user; `--help` shows how."""

from __future__ import annotations

import os
import sys

from looped_spec.demos.train import main
from looped_spec_huginn.demo.recipe import RECIPE

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # also where torch.compile forks
    sys.exit(main(RECIPE))
