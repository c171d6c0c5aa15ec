"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import os
import signal
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


def pytest_configure(config: pytest.Config) -> None:
    """Let Triton interpret its kernels where it cannot compile them for a device; it decides that
    when it is imported. Let commands that tests start hear Ctrl-C: a shell that runs the tests in
    the background has them, and so those, ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):
        return  # the processes that run the tests come here too

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `-m gpu` find what needs a CUDA device in the conformance kit, which has no marks."""
    for item in items:
        if "cuda_device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


def pytest_collection_finish() -> None:
    """Let the collector forget what is there before the first test."""
    _forget_what_stays()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Do the same between files, whose tests have imported more."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _forget_what_stays()


def _forget_what_stays() -> None:
    """Take what is alive out of the garbage collector's sight.

    Each model that is loaded collects garbage, which takes most of the time of many tests where it
    goes through all modules and all tests.
    """
    gc.collect()
    gc.freeze()
