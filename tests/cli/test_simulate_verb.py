"""`looped-spec simulate`: what it prints, and its mistakes in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import Outcome
from processes import PATIENCE_SECONDS
from tree import ROOT

from looped_spec.cli import main as cli
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.trace_config import trace_config
from looped_spec.control.trace_document import read_trace

TRACES = ROOT / "examples" / "traces"
KEYS = [
    "decide_us",
    "flaps_per_1000",
    "probe_tax",
    "regret",
    "rounds_to_95",
    "slowdown_vs_never",
    "switches",
]

Simulate = Callable[..., Outcome]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The ramp with 12 rounds a phase."""
    document = json.loads((TRACES / "ramp.json").read_text())
    for phase in document["phases"]:
        phase["rounds"] = 12
    path = tmp_path / "small.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def simulate(small: Path, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Run `looped-spec simulate` on the small ramp, or on another `trace`, in this process."""

    def run(*arguments: object, trace: object = small) -> Outcome:
        capsys.readouterr()
        code = cli.main(["simulate", str(trace), *map(str, arguments)])
        return Outcome(code, *capsys.readouterr())

    return run


def result(done: Outcome) -> dict[str, Any]:
    assert (done.code, done.err) == (0, "")
    document: dict[str, Any] = json.loads(done.out)
    return document


def means(document: dict[str, Any]) -> dict[str, Any]:
    """Return everything but the times to decide, which no seed fixes."""
    return {key: value for key, value in document.items() if key != "decide_us"}


@pytest.mark.parametrize("policy", ["ema", "goodput", "static:2,1", "never", "oracle"])
def test_every_policy_prints_the_same_keys(simulate: Simulate, policy: str) -> None:
    document = result(simulate("--policy", policy, "--seeds", 2, "--json"))
    assert list(document) == KEYS
    assert len(document["rounds_to_95"]) == 5
    for estimate in (document["regret"], document["decide_us"]["p99"], *document["rounds_to_95"]):
        assert set(estimate) == {"mean", "low", "high"}
        assert estimate["low"] <= estimate["mean"] <= estimate["high"]
    assert document["decide_us"]["p50"]["mean"] > 0


def test_the_oracle_is_best_and_never_is_never(simulate: Simulate) -> None:
    oracle = result(simulate("--policy", "oracle", "--seeds", 3, "--json"))
    never = result(simulate("--policy", "never", "--seeds", 3, "--json"))
    assert oracle["regret"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert never["slowdown_vs_never"]["mean"]["mean"] == 0.0
    assert never["regret"]["mean"] > 0.2
    assert oracle["slowdown_vs_never"]["worst_phase"]["mean"] < -0.1


def test_two_runs_of_one_command_agree(simulate: Simulate) -> None:
    first, again = (
        result(simulate("--policy", "goodput", "--seeds", 2, "--json")) for _ in range(2)
    )
    assert means(first) == means(again)


def test_the_table_has_the_values_of_the_json(simulate: Simulate) -> None:
    document = result(simulate("--policy", "static:1,1", "--seeds", 2, "--json"))
    done = simulate("--policy", "static:1,1", "--seeds", 2)
    assert (done.code, done.err) == (0, "")
    head, *lines = done.out.splitlines()
    assert head == "ramp 1-8-32-8-1: policy static:1,1, 2 runs of 60 rounds"
    (shown,) = (line.split() for line in lines if line.startswith("regret"))
    assert shown[1] == f"{100 * document['regret']['mean']:.2f}%"
    phases = [line.split() for line in lines[-5:]]
    assert [phase[2] for phase in phases] == ["1", "8", "32", "8", "1"]
    assert [float(phase[4]) for phase in phases] == [
        estimate["mean"] for estimate in document["rounds_to_95"]
    ]


def test_a_preset_brings_its_own_candidates(
    simulate: Simulate, small: Path, tmp_path: Path
) -> None:
    trace = read_trace(json.loads(small.read_text()))
    pinned = AdaptiveSpecConfig.pinned(trace.candidates[1], 4, 32)
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps(pinned.to_json()))
    only = result(simulate("--policy", "goodput", "--preset", preset, "--seeds", 2, "--json"))
    k, d = trace.candidates[1].num_speculative_tokens, trace.candidates[1].draft_loops
    static = result(simulate("--policy", f"static:{k},{d}", "--seeds", 2, "--json"))
    assert means(only) == means(static)


def test_a_preset_of_the_traces_own_setup_changes_nothing(
    simulate: Simulate, small: Path, tmp_path: Path
) -> None:
    trace = read_trace(json.loads(small.read_text()))
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps(trace_config(trace, "ema").to_json()))
    with_it = result(simulate("--policy", "ema", "--preset", preset, "--seeds", 2, "--json"))
    assert means(with_it) == means(result(simulate("--policy", "ema", "--seeds", 2, "--json")))


@pytest.mark.parametrize("name", sorted(path.name for path in TRACES.glob("*.json")))
def test_the_examples_can_be_simulated(simulate: Simulate, name: str) -> None:
    document = result(simulate("--policy", "oracle", "--seeds", 1, "--json", trace=TRACES / name))
    assert document["regret"]["mean"] == 0


def test_a_plot_is_a_picture(simulate: Simulate, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    done = simulate("--policy", "goodput", "--seeds", 1, "--plot", picture)
    assert (done.code, done.err) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_the_extra_is_named(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = tmp_path / "plot.png"
    done = simulate("--policy", "never", "--plot", picture)
    assert (done.code, done.out) == (2, "")
    assert "pip install 'looped-spec[plots]'" in done.err and done.err.count("\n") == 1
    assert not picture.exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--policy"]),
        (["--policy", "goodpt"], ["policy must be one of ema, goodput", "mean 'goodput'?"]),
        (["--policy", "static:5,1"], ["no candidate of the trace", "0,0, 1,1, 2,1"]),
        (["--policy", "static:5"], ["must be written K,d, as in 2,1, got '5'"]),
        (["--policy", "never", "--seeds", "0"], ["seeds must be between 1 and 10000, got 0"]),
        (["--policy", "never", "--seeds", "x"], ["--seeds", "'x'"]),
        (["--policy", "never", "--preset", "x"], ["--preset is for ema and goodput"]),
        (["--policy", "ema", "--preset", "missing.json"], ["cannot read 'missing.json'"]),
        (["--policy", "never", "--plot", "missing/x.png"], ["folder 'missing' does not exist"]),
        (["--policy", "never", "--sedes", "2"], ["'--sedes'", "'--seeds'"]),
    ],
)
def test_a_mistake_is_one_line(simulate: Simulate, arguments: list[str], parts: list[str]) -> None:
    done = simulate(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("looped-spec: error: ") and done.err.count("\n") == 1
    for part in parts:
        assert part in done.err


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "is no JSON"),
        (b"\xff", "is no UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b"3", "the trace must be an object, got 3"),
        (b"{}", "the trace has no 'schema_version'"),
        (b'{"schema_version": 1, "phases": NaN}', "the trace has no 'full_loops'"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(
    simulate: Simulate, tmp_path: Path, content: bytes | None, part: str
) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    done = simulate("--policy", "never", trace=path)
    assert (done.code, done.out) == (2, "")
    assert part in done.err and done.err.count("\n") == 1


def test_a_preset_must_fit_the_trace(simulate: Simulate, small: Path, tmp_path: Path) -> None:
    preset = tmp_path / "preset.json"
    trace = read_trace(json.loads(small.read_text()))
    document = trace_config(trace, "goodput").to_json()
    document["buckets"][0]["candidates"].append([3, 3])
    preset.write_text(json.dumps(document))
    done = simulate("--policy", "goodput", "--preset", preset)
    assert done.code == 2 and "the preset has the candidate [3, 3]" in done.err
    preset.write_text(json.dumps(document | {"full_loops": 5}))
    done = simulate("--policy", "goodput", "--preset", preset)
    assert done.code == 2 and "full_loops of preset and trace must be the same" in done.err
    preset.write_text(json.dumps(document | {"bucket": []}))
    done = simulate("--policy", "goodput", "--preset", preset)
    assert done.code == 2 and "did you mean 'buckets'?" in done.err


def test_the_command_works_in_a_process_of_its_own_and_needs_no_torch(small: Path) -> None:
    code = (
        "import sys; from looped_spec.cli.main import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", str(small), "--policy", "goodput", "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == KEYS
