"""`looped-spec bench load`: what it measures and keeps, and its mistakes in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import Outcome

from looped_spec.cli import main as cli
from looped_spec.offline import load_bench
from looped_spec.offline.workloads import EVALUATION, group_of

Bench = Callable[..., Outcome]

SMALL = ("--input-tokens", 6, "--output-tokens", 8, "--requests-per-slot", 1, "--repeats", 2)
KEYS = {
    *("completed", "failed", "total_input", "total_output", "duration", "request_throughput"),
    *("output_throughput", "total_token_throughput", "mean_acceptance_length"),
    *("draft_acceptance_rate", "switches", "off_share", "identical_requests"),
    *(f"{what}_{n}_ms" for what in ("mean", "median", "std", "p99") for n in ("ttft", "tpot")),
    *(f"{what}_{n}_ms" for what in ("mean", "median", "std", "p99") for n in ("itl", "e2el")),
}


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Flags of two kinds of texts, some twenty of each group."""
    for name, start in (("cats", "the cat sat on the mat"), ("dogs", "a dog ran then")):
        lines = [json.dumps({"text": f"{start} {n} times"}) for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [f"--workload={name}={tmp_path / name}.jsonl" for name in ("cats", "dogs")]


@pytest.fixture
def bench(tiny_model: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run `looped-spec bench load` on the tiny model in this process."""

    def run(*arguments: object, small: bool = True) -> Outcome:
        capsys.readouterr()
        sizes = SMALL if small else ()
        words = ["bench", "load", str(tiny_model), *texts, *map(str, sizes), *map(str, arguments)]
        code = cli.main(words)
        return Outcome(code, *capsys.readouterr())

    return run


def result(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_every_way_is_timed_and_has_the_text_of_plain_decoding(
    bench: Bench, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    policies = "never,static:2,1,ema,ema:warm,goodput,goodput:off,never:again"
    done = bench("--profile", "ramp:1-3-1", "--policies", policies, "--json", out)
    assert (done.code, done.err) == (0, "")
    assert "ramp:1-3-1, mixed texts of the evaluation group (5 requests a run" in done.out
    assert "10 of 10" in done.out and "target at least +5.0%" in done.out
    (scenario,) = result(out)["scenarios"]
    names = [row["policy"] for row in scenario["results"]]
    assert names == policies.replace("2,1", "2;1").replace(",", " ").replace(";", ",").split()
    for row in scenario["results"]:
        assert row["identical_requests"] == row["requests"] == 10
        assert row["repeats"] == 2
    by_table = {row["policy"]: row["table_gain"]["median"] for row in scenario["results"]}
    assert max(by_table["never"], by_table["static:2,1"]) == 0.0
    assert by_table["never:again"] == by_table["goodput:off"] == by_table["never"]
    run = scenario["runs"]["goodput"]["1"]
    assert set(run) >= KEYS
    assert (run["completed"], run["total_input"], run["total_output"]) == (5, 30, 40)
    assert len(run["phase_seconds"]) == 3
    assert scenario["runs"]["never"]["0"]["off_share"] == 1.0
    assert scenario["runs"]["goodput:off"]["0"]["off_share"] == 1.0
    assert scenario["runs"]["static:2,1"]["0"]["off_share"] == 0.0
    assert set(scenario["timelines"]["goodput"]) >= {"seconds", "output_throughput"}
    assert str(tmp_path) not in out.read_text()


def test_ways_can_run_beside_each_other_by_turns(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--profile", "ramp:1-3-1", "--policies", "never,static:2,1,ema:warm,goodput"]
    done = bench(*flags, "--interleave", 2, "--json", out)
    assert (done.code, done.err) == (0, "")
    document = result(out)
    assert document["settings"]["interleave_ms"] == 2
    (scenario,) = document["scenarios"]
    for row in scenario["results"]:
        assert row["identical_requests"] == row["requests"] == 10
        assert row["repeats"] == 2
    assert scenario["runs"]["never"]["0"]["off_share"] == 1.0
    assert scenario["runs"]["static:2,1"]["0"]["off_share"] == 0.0
    refused = bench(*flags, "--json", out, "--resume")
    assert refused.code == 2 and "its interleave_ms is 2.0, this call's is null" in refused.err


def test_ctrl_c_between_turns_loses_the_repeat_and_resume_adds_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made = tmp_path / "out.json", []
    together = load_bench.drive_together

    def limited(*args: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) > 1:
            raise KeyboardInterrupt
        return together(*args, **options)

    flags = ["--profile", "fixed:2", "--policies", "never,static:1,1", "--interleave", 5]
    with monkeypatch.context() as patch:
        patch.setattr(load_bench, "drive_together", limited)
        done = bench(*flags, "--json", out)
    assert done.code == 130 and "interrupted after 2 of 4 runs" in done.err
    assert bench(*flags, "--json", out, "--resume").code == 0
    (scenario,) = result(out)["scenarios"]
    assert all(list(runs) == ["0", "1"] for runs in scenario["runs"].values())


def test_all_static_candidates_of_the_configuration_can_be_named(
    bench: Bench, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    bucket = {"min_batch_size": 1, "max_batch_size": 32, "candidates": [[0, 0], [1, 1], [2, 2]]}
    config.write_text(json.dumps({"schema_version": 1, "full_loops": 3, "buckets": [bucket]}))
    flags = ["--speculative-adaptive-config", config, "--policies", "static:all,goodput"]
    done = bench("--profile", "fixed:2", "--repeats", 1, *flags, "--all-rows")
    assert done.code == 0, done.err
    for name in ("never", "static:1,1", "static:2,2", "goodput"):
        assert name in done.out
    done = bench("--profile", "fixed:2", "--repeats", 1, *flags, "--json")
    (scenario,) = json.loads(done.out)["scenarios"]
    ran = {tuple(pair[:2]) for pair in scenario["runs"]["goodput"]["0"]["rounds_by_candidate"]}
    assert ran <= {(0, 0), (1, 1), (2, 2)}


def test_both_groups_are_measured_and_share_no_prompt(
    bench: Bench, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: dict[str, set[tuple[int, ...]]] = {}
    measure = load_bench.LoadBench.measure

    def noted(self: Any, scenario: load_bench.Scenario, on_run: Any) -> Any:
        prompts.setdefault(scenario.group, set()).update(map(tuple, scenario.prompts))
        return measure(self, scenario, on_run)

    monkeypatch.setattr(load_bench.LoadBench, "measure", noted)
    # Long enough that the numbers, by which the texts differ, are within the prompts.
    sizes = ("--input-tokens", 30, "--repeats", 1, "--policies", "never")
    done = bench("--profile", "fixed:3x3", "--group", "both", *sizes, "--json")
    assert done.code == 0, done.err
    groups = [scenario["group"] for scenario in json.loads(done.out)["scenarios"]]
    assert groups == ["evaluation", "selection"]
    assert len(prompts["evaluation"]) > 5 and len(prompts["selection"]) > 5
    assert not prompts["evaluation"] & prompts["selection"]
    assert group_of("the cat sat on the mat 0 times") in groups and EVALUATION in groups


def interrupt_after(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    """Press Ctrl-C in the middle of the run after so many."""
    drive, made = load_bench.drive, []

    def limited(engine: Any, profile: Any, *args: Any, **options: Any) -> Any:
        if profile.name != "warm-up":
            made.append(1)
            if len(made) > runs:
                raise KeyboardInterrupt
        return drive(engine, profile, *args, **options)

    monkeypatch.setattr(load_bench, "drive", limited)


def test_ctrl_c_keeps_what_was_measured_and_resume_adds_the_rest(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    flags = ["--profile", "fixed:1", "fixed:2", "--policies", "never,static:1,1", "--json", out]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        done = bench(*flags)
    assert done.code == 130
    assert f"interrupted after 3 of 8 runs; {out} has them, --resume goes on" in done.err
    assert "fixed:1, mixed" in done.out and "fixed:2, mixed" not in done.out
    (kept,) = result(out)["scenarios"]
    assert {name: list(runs) for name, runs in kept["runs"].items()} == {
        "never": ["0"],
        "static:1,1": ["0", "1"],
    }
    refused = bench(*flags)
    assert refused.code == 2 and "exists: --resume goes on with it" in refused.err
    assert bench(*flags, "--resume").code == 0
    document = result(out)
    assert [scenario["profile"] for scenario in document["scenarios"]] == ["fixed:1", "fixed:2"]
    before, after = kept["runs"]["static:1,1"], document["scenarios"][0]["runs"]["static:1,1"]
    assert before == after
    assert all(
        len(runs) == 2 for scenario in document["scenarios"] for runs in scenario["runs"].values()
    )
    assert len(document["sessions"]) == 2
    nothing = bench(*flags, "--resume")
    assert nothing.code == 0 and "has all runs already" in nothing.err


def test_a_file_that_was_measured_with_something_else_is_not_gone_on_with(
    bench: Bench, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    flags = ["--profile", "fixed:1", "--repeats", 1, "--json", out]
    assert bench(*flags, "--policies", "never").code == 0
    before = out.read_bytes()
    for other, said in (
        (["--policies", "never", "--output-tokens", 9], "output_tokens is 8, this call's is 9"),
        (["--policies", "ema"], 'policies of mixed, fixed:1 is ["never"] there'),
    ):
        done = bench(*flags, *other, "--resume")
        assert done.code == 2 and said in done.err, done.err
    assert out.read_bytes() == before
    out.write_text("{}")
    done = bench(*flags, "--resume")
    assert done.code == 2 and "is no result of 'bench load'" in done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--profile", "steady:3"], "profile must be fixed:B or ramp:B-B-"),
        (["--profile", "fixed:33"], "must be between 1 and max_num_seqs = 32, got 33"),
        (["--profile", "fixed:3", "--max-num-seqs", 2], "between 1 and max_num_seqs = 2, got 3"),
        (["--policies", "never,greedy"], "policies must be of never, never:again, static:K,d"),
        (["--policies", "static:1,3"], "draft_loops must be between 1 and full_loops - 1 = 2"),
        (["--mixture", "mixd"], "mixture must be of mixed, shifting, cats, dogs, got 'mixd'"),
        (["--group", "test"], "argument --group: invalid choice: 'test'"),
        (["--input-tokens", 90], "at most max_model_len = 96, got 90 + 8 = 98"),
        (["--input-tokens", 0], "input_tokens must be at least 1, got 0"),
        (["--repeats", 0], "repeats must be at least 1, got 0"),
        (["--interleave", 0.5], "interleave must be a finite number of at least 1, got 0.5"),
        (
            ["--interleave", 5, "--async-scheduling"],
            "--interleave needs rounds that end with",
        ),
        (["--temperature", -1], "temperature must be a finite number of at least 0"),
        (["--workload", "cats=other.jsonl"], "--workload cats is given twice"),
        (["--workload", "birds=missing.jsonl"], "cannot read missing.jsonl: No such file"),
        (["--workload", "birds"], "--workload must be NAME=PATH, got 'birds'"),
        (["--resume"], "--resume goes on with a file: give --json FILE"),
        (["--num-speculative-tokens", 2], "--num-speculative-tokens says how to decode"),
        (["--exit-threshold", 0.5], "--exit-threshold says how to decode"),
        (["--enable-prefix-caching"], "--enable-prefix-caching would let each run take over"),
        (["--json", "missing/out.json"], "folder 'missing' does not exist"),
        (["--plot", "picture.jpeg"], "must end in .png, .svg, .pdf, got 'picture.jpeg'"),
        (["--polices", "never"], "unknown flag '--polices' (did you mean '--policies'?)"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(bench: Bench, flags: list[object], said: str) -> None:
    done = bench(*flags)
    assert done.code == 2
    assert said in done.err and done.err.count("\n") == 1
    assert done.out == ""


def test_a_single_kind_of_text_needs_no_mixture(
    tiny_model: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--profile", "fixed:1", "--policies", "never", *map(str, SMALL)]
    assert cli.main(["bench", "load", str(tiny_model), texts[0], *flags]) == 0
    assert "fixed:1, cats texts of the evaluation group" in capsys.readouterr().out


def test_default_sizes_that_do_not_fit_say_so(bench: Bench) -> None:
    done = bench("--policies", "never", small=False)
    assert done.code == 2
    assert "must be at most max_model_len = 96, got 512 + 2048 = 2560" in done.err


def test_a_picture_shows_every_line_that_it_should(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    path = tmp_path / "load.svg"
    flags = ["--policies", "never,static:1,1,ema,goodput", "--repeats", 1, "--plot", path]
    done = bench("--profile", "fixed:2", *flags)
    assert done.code == 0 and done.err == f"looped-spec: drew {path}\n"
    assert path.read_text().startswith("<?xml")
    done = bench("--profile", "fixed:1", "fixed:2", *flags)
    assert done.code == 0
    assert (tmp_path / "load-1.svg").exists() and (tmp_path / "load-2.svg").exists()


def test_a_picture_without_matplotlib_is_refused_before_the_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    done = bench("--plot", "load.png")
    assert done.code == 2
    assert "a picture needs matplotlib: pip install 'looped-spec[plots]'" in done.err
