"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_plugins import FakeSite

# The models of the tests are too small for more threads, which mostly wait for each other, and for
# very long where another program runs. Set before torch is imported; a number given wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def fake_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A fake site on sys.path, whose modules are forgotten after the test."""
    folder = tmp_path / "fake_site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield FakeSite(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def pytest_configure() -> None:
    """Let Triton interpret its kernels where it cannot compile them for a device; it decides that
    when it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `-m gpu` find what needs a CUDA device in the conformance kit, which has no marks."""
    for item in items:
        if "cuda_device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
