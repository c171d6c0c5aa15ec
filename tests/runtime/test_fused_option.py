"""`fused` is used where it can be, refused with the reason where it cannot, and off by default."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from looped_spec.errors import ConfigError, UnsupportedError
from looped_spec.options import EngineOptions
from looped_spec.runtime.fused import choose_fused

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "off"])
def test_they_are_off_by_default(name: str) -> None:
    assert EngineOptions().fused == "auto"
    assert choose_fused(EngineOptions(fused=name), torch.device("cuda", 0)) is None


def test_a_name_that_is_none_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="fused must be one of auto, on, off, got 'onn'"):
        EngineOptions(fused="onn")


def test_asked_for_where_they_cannot_serve_they_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="fused='on' cannot be used here: Triton is not"):
        choose_fused(EngineOptions(fused="on"), CPU)
