"""The benchmark of adaptive speculation: loads that are what they say, and honest regrets."""

from __future__ import annotations

import json
from pathlib import Path

import adaptive
import host_time
import pytest
from adaptive import Timed, prompts_for, summarize
from loads import RAMP, Load, LoadRun, Stage, drive

from looped_spec.control.plan import Candidate
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.toy import make_toy

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


def test_a_load_keeps_as_many_requests_running_as_each_stage_says() -> None:
    engine = make_engine(make_toy(), max_num_seqs=8, num_speculative_tokens=2, draft_loops=1)
    load = Load("up and down", (Stage(1, 2), Stage(5, 10), Stage(2, 4)))
    prompts = [[1 + i, 2] for i in range(16)]
    sizes: list[int] = []
    step = engine.step

    def watched() -> object:
        done = step()
        sizes.append(len(done))
        return done

    engine.step = watched  # type: ignore[method-assign,assignment]
    run = drive(engine, load, prompts, PARAMS)
    assert sizes[0] == 1 and max(sizes) == 5
    top = [place for place, size in enumerate(sizes) if size == 5]
    assert len(top) > 3 and set(sizes[: top[0]]) == {1}
    alone = run_all(make_engine(make_toy(), max_num_seqs=1), prompts, PARAMS)
    assert run.token_ids == [request.output_token_ids for request in alone]
    assert len(run.stage_seconds) == 3
    assert sum(run.stage_seconds) == pytest.approx(run.seconds)


def test_the_ramp_is_that_of_the_protocol() -> None:
    ramp = Load.of("ramp", 3)
    assert [stage.concurrency for stage in ramp.stages] == list(RAMP) == [1, 8, 32, 8, 1]
    assert ramp.num_requests == 3 * sum(RAMP)
    assert Load.of("8", 2).stages == (Stage(8, 16),)


def test_a_shift_gives_each_kind_of_text_its_share_in_order() -> None:
    rows = [[1], [2], [3]]
    load = Load("x", (Stage(2, 6),))
    assert prompts_for(load, rows, True) == [[1], [1], [2], [2], [3], [3]]
    assert prompts_for(load, rows, False) == [[1], [2], [3], [1], [2], [3]]


def timed(*seconds: float, tokens: tuple[int, ...] = (1, 2)) -> list[Timed]:
    metrics = SpeculationMetrics()
    metrics.add_round(Candidate(1, 1), 1, 1)
    return [Timed(LoadRun(s, [s], metrics, [list(tokens), [3]]), 0) for s in seconds]


def test_regret_is_paired_with_the_best_static_candidate_of_the_scenario() -> None:
    runs = {
        "never": timed(10, 20),
        "K=1 d=1": timed(8, 16),
        "goodput": timed(8, 20),
        "ema": timed(12, 24, tokens=(1, 5)),
    }
    rows = {row["way"]: row for row in summarize(runs, ["never", "K=1 d=1"])}
    assert [name for name, row in rows.items() if row["is_best_static"]] == ["K=1 d=1"]
    assert rows["K=1 d=1"]["regret"] == {"median": 0, "least": 0, "greatest": 0}
    assert rows["goodput"]["regret"]["median"] == pytest.approx(0.125)
    assert rows["goodput"]["regret"]["greatest"] == pytest.approx(0.25)
    assert rows["never"]["speedup"]["median"] == 1
    assert rows["ema"]["identical_requests"] == 2 and rows["ema"]["requests"] == 4
    assert rows["goodput"]["identical_requests"] == 4
    shown = adaptive.table([{"mixture": "m", "load": "1", **row} for row in rows.values()], False)
    assert "K=1 d=1 (best static)" in shown and "2 of 4" in shown


@pytest.mark.slow
def test_the_benchmark_runs_and_keeps_its_numbers(tmp_path: Path) -> None:
    lines = [{"question": f"How many are {n} and 3?", "answer": f"{n + 3}"} for n in range(8)]
    text, out = tmp_path / "gsm8k.jsonl", tmp_path / "out.json"
    text.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--gsm8k", text, "--mixtures", "gsm8k", "--loads", 2, "--candidates", "1,1"]
    flags += ["--requests", 1, "--prompt-tokens", 4, "--max-tokens", 8, "--repeats", 1]
    assert adaptive.main([*map(str, flags), "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    ways = [row["way"] for row in results]
    assert ways == [
        *("never", "K=1 d=1", "never, again", "armed, K=0", "ema", "goodput", "goodput, warm")
    ]
    assert all(row["identical_requests"] == row["requests"] == 2 for row in results)


def test_a_load_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert adaptive.main(["--loads", "two"]) == 2
    assert "--loads must be batch sizes or ramp, got 'two'" in capsys.readouterr().err


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
