"""The benchmark of host time: rounds of a full batch, for every policy."""

from __future__ import annotations

import json
from pathlib import Path

import host_time
import pytest


def test_the_host_time_benchmark_times_rounds_of_a_full_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "host.json"
    flags = ["--batch-sizes", 3, "--rounds", 10, "--long", 40, "--requests", 60]
    assert host_time.main([*map(str, flags), "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [row["policy"] for row in results] == ["static K=0", "static K=2", "ema", "goodput"]
    assert all(row["short"]["us"] > 0 and row["last_requests_us"] > 0 for row in results)
    assert capsys.readouterr().out.count("B=3, ") == 4
