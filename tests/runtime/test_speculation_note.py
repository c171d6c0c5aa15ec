"""An adapter that leaves speculation off may say why, and a user who asked for nothing reads it."""

from __future__ import annotations

import logging

import pytest

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.options import EngineOptions
from looped_spec.runtime.speculation import choose_speculation
from looped_spec.testing.toy import ToyAdapter, make_toy

NOTE = "its first loop is a guess"


@pytest.fixture
def shy(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> ToyAdapter:
    """A toy that suggests no speculation and says why."""
    caplog.set_level(logging.INFO, logger="looped_spec")
    monkeypatch.setattr(ToyAdapter, "default_speculation", None)
    monkeypatch.setattr(ToyAdapter, "speculation_note", NOTE)
    return make_toy()


def test_the_reason_is_logged_once_when_speculation_is_off_by_default(
    shy: ToyAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_speculation(EngineOptions(), shy, 4) == PLAIN
    assert [record.getMessage() for record in caplog.records] == [
        f"speculation is off by default: {NOTE}"
    ]
    assert caplog.records[0].levelno == logging.INFO


@pytest.mark.parametrize("k", [0, 2])
def test_who_chose_for_themselves_is_told_nothing(
    shy: ToyAdapter, caplog: pytest.LogCaptureFixture, k: int
) -> None:
    chosen = choose_speculation(EngineOptions(num_speculative_tokens=k), shy, 4)
    assert chosen == (Candidate(k, 1) if k else PLAIN)
    assert caplog.records == []


def test_without_a_reason_nothing_is_logged(
    shy: ToyAdapter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ToyAdapter, "speculation_note", None)
    assert choose_speculation(EngineOptions(), shy, 4) == PLAIN
    assert caplog.records == []
