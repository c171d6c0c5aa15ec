"""The tiny random model, written once for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The models of the tests are too small for more threads. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model; nothing writes to it."""
    from looped_spec_retrofit.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")
