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


def test_live_lengths_are_timed_with_tables_of_every_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "live.json"
    flags = ["--live-lengths", 40, 60, "--max-model-lens", 64, 128, "--live-batch-sizes", 2]
    assert host_time.main([*map(str, flags), "--json", str(out)]) == 0
    results = [row for row in json.loads(out.read_text())["results"] if row["attention"] == "sdpa"]
    cases = {(row["live_length"], row["max_model_len"]) for row in results}
    assert cases == {(40, 64), (40, 128), (60, 64), (60, 128)}
    assert all(row["us"] > 0 for row in results)
    assert capsys.readouterr().out.count("sdpa, B=2, max_model_len ") == 2


def test_a_live_length_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_time.main(["--live-lengths", "64", "2000"])
    assert "at most any max-model-lens" in capsys.readouterr().err
