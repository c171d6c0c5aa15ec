"""Sampling on a Ray cluster: two workers of this machine, one of them killed in the middle."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fake_cells import FakeMeasurer, make_plan
from tiny_model import write_tiny_model

from looped_spec.errors import ConfigError
from looped_spec.offline.ray_workers import RayWorkers
from looped_spec.offline.store import read_samples

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'looped-spec[ray]'"
)
def test_a_worker_that_is_killed_loses_nothing_and_nothing_is_measured_twice(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path / "model", weight_scale=0.3)
    samples = tmp_path / "s.jsonl"
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "ray_run.py"), str(folder), str(samples)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["workers"], found["killed"]) == (2, 1)
    cells = read_samples(samples).cells  # which refuses a cell that is there twice
    assert set(found["expected"]) < set(cells)
    assert len([key for key in cells if key.startswith("confirm")]) == 4
    assert found["measured"] == len(cells)
    assert "a worker's device_name is" in found["refusal"]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'looped-spec\[ray\]'"):
        RayWorkers("auto", "m", {}, FakeMeasurer(make_plan(), {}))  # type: ignore[arg-type]


def test_a_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("ray")

    def init(**options: object) -> None:
        raise ConnectionError(f"nobody at {options['address']}")

    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(ConfigError, match=r"--ray 10\.0\.0\.1:6379: no cluster there"):
        RayWorkers("10.0.0.1:6379", "m", {}, FakeMeasurer(make_plan(), {}))  # type: ignore[arg-type]
