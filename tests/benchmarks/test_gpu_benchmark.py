"""The GPU script: a dry run goes through all of it, and whatever fails leaves the rest alone."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch

from looped_spec.control.plan import Candidate
from looped_spec.presets import Preset

SECTIONS = {
    "machine",
    "exact",
    "load",
    "plain",
    "eager",
    "fused",
    "costs",
    "forced",
    "width",
    "attention",
    "divergence",
    "memory",
}


@pytest.mark.slow
def test_a_dry_run_goes_through_every_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    before = logging.getLogger("looped_spec").level, torch.get_num_threads()
    assert gpu.main(["--dry-run", "--json", str(path)]) == 0
    assert (logging.getLogger("looped_spec").level, torch.get_num_threads()) == before
    document = json.loads(path.read_text())
    sections = document["sections"]
    assert {name: found["status"] for name, found in sections.items()} == dict.fromkeys(
        SECTIONS, "ok"
    )
    assert sections["exact"]["all_equal"] and sections["exact"]["cases"] == 18
    preset = Preset.from_json(sections["costs"]["preset"])
    for candidate in (Candidate(0, 0), Candidate(1, 1), Candidate(2, 1)):
        for batch_size in (1, 2, 3):
            assert preset.cost.ms(batch_size, 8, candidate)
    assert not sections["costs"]["skipped"]
    rows = sections["forced"]["rows"]
    assert {(row["batch_size"], row["async_scheduling"]) for row in rows} == {
        (size, is_async) for size in (1, 2, 3) for is_async in (False, True)
    }
    # Of two drafts that are right nine times in ten each, 2.71 tokens are expected in a round.
    found = [r["drafting"]["tokens_per_request_round"] for r in rows if r["batch_size"] == 3]
    assert all(1.2 < tokens <= 3 for tokens in found)
    assert sections["attention"]["backends"]["flash_attn"]["refused"]
    assert sections["fused"]["refused"]
    out = capsys.readouterr().out
    assert "| captured = eager, bit for bit | 18/18 | all | yes |" in out
    assert "speed-up" in out and str(tmp_path) not in path.read_text()


def test_a_section_that_fails_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    report = gpu.Report(path, 100, ["gpu.py"])

    def breaks(found: dict[str, Any]) -> None:
        found["measured"] = 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not report.section("plain", breaks)
    assert report.section("eager", lambda found: found.update(rows=[]))
    document = json.loads(path.read_text())["sections"]
    assert document["plain"]["measured"] == 1, "what was there before is kept"
    assert "illegal memory access" in document["plain"]["error"]
    assert document["eager"]["status"] == "ok"
    table = gpu.table_of(report.document["sections"], is_dry=False)
    assert "| section plain | error | ok | no |" in table


def test_a_section_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.LIMITS, "plain", 0.2)
    report = gpu.Report(None, 100, ["gpu.py"])
    start = time.monotonic()
    assert not report.section("plain", lambda found: time.sleep(30))
    assert time.monotonic() - start < 25
    assert report.document["sections"]["plain"]["status"] == "time over"


def test_when_time_is_over_the_rest_is_named_and_not_run() -> None:
    report = gpu.Report(None, 0, ["gpu.py"])
    assert not report.section("plain", lambda found: found.update(ran=True))
    found = report.document["sections"]["plain"]
    assert found["status"] == "time over" and "ran" not in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_the_full_plan_is_what_the_targets_speak_of() -> None:
    plan = gpu.FULL
    assert plan.batch_sizes == (1, 8, 32) and plan.contexts == (128, 512)
    pairs = {(c.num_speculative_tokens, c.draft_loops) for c in plan.candidates}
    assert pairs == {(0, 0)} | {(k, d) for k in (1, 2, 4, 8) for d in (1, 2, 3)}
    assert sum(gpu.LIMITS.values()) > 225, "sections share the time that there is"
