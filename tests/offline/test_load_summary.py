"""What is said of the runs of a load: honest regrets, targets, and nothing of what did not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from looped_spec.cli.bench_load_report import report
from looped_spec.offline.load_summary import best_static, headroom, summarize, verdicts

NAMES = ["never", "static:1,1", "static:2,1", "ema", "goodput", "goodput:off"]


def record(seconds: float, phases: Sequence[float] = (), same: int = 4) -> dict[str, Any]:
    latencies = {
        f"{what}_{name}_ms": 1.0
        for name in ("ttft", "tpot", "itl", "e2el")
        for what in ("mean", "median", "std", "p99")
    }
    return latencies | {
        "duration": seconds,
        "output_throughput": 100 / seconds,
        "request_throughput": 4 / seconds,
        "total_token_throughput": 200 / seconds,
        "completed": 4,
        "identical_requests": same,
        "phase_seconds": list(phases or (seconds,)),
        "mean_acceptance_length": 1.5,
        "draft_acceptance_rate": None,
        "switches": 2,
        "probe_share": 0.0,
        "off_share": 1.0,
    }


def runs(**seconds: Sequence[float]) -> dict[str, dict[int, dict[str, Any]]]:
    by_name = {name.replace("_", ":").replace("x", ","): times for name, times in seconds.items()}
    return {name: {i: record(s) for i, s in enumerate(times)} for name, times in by_name.items()}


def test_regret_is_paired_with_the_best_static_candidate() -> None:
    found = runs(never=(10, 20), static_1x1=(8, 16), ema=(12, 24), goodput=(8, 20))
    found["ema"][1]["identical_requests"] = 1
    rows = {row["policy"]: row for row in summarize(NAMES, found)}
    assert list(rows) == ["never", "static:1,1", "ema", "goodput"]
    assert [name for name, row in rows.items() if row["is_best_static"]] == ["static:1,1"]
    assert rows["static:1,1"]["regret"] == {"median": 0, "least": 0, "greatest": 0}
    assert rows["goodput"]["regret"]["median"] == pytest.approx(0.125)
    assert rows["goodput"]["gain_over_best_static"]["least"] == pytest.approx(-0.2)
    assert rows["never"]["speedup"]["median"] == 1
    assert rows["goodput"]["speedup"]["median"] == pytest.approx(1.125)
    assert (rows["ema"]["identical_requests"], rows["ema"]["requests"]) == (5, 8)


def test_no_policy_and_no_twin_is_the_best_static_one() -> None:
    found = runs(never=(10,), goodput=(5,), never_again=(4,), goodput_off=(3,))
    assert best_static([*NAMES, "never:again"], found) == "never"
    assert best_static(NAMES, {}) is None


def test_a_repeat_that_only_one_has_is_left_out_of_the_pairs() -> None:
    rows = {row["policy"]: row for row in summarize(NAMES, runs(never=(10, 99), goodput=(5,)))}
    assert rows["goodput"]["speedup"] == {"median": 2, "least": 2, "greatest": 2}
    assert rows["never"]["repeats"] == 2


@pytest.mark.parametrize(
    ("kind", "seconds", "least", "met"),
    [
        ("fixed", 10.05, -0.01, True),
        ("fixed", 10.2, -0.01, False),
        ("ramp", 9.4, 0.05, True),
        ("ramp", 9.9, 0.05, False),
    ],
)
def test_a_target_is_met_or_missed_by_what_was_measured(
    kind: str, seconds: float, least: float, met: bool
) -> None:
    rows = summarize(NAMES, runs(never=(10,), static_1x1=(12,), goodput=(seconds,)))
    (verdict,) = verdicts(kind, rows)
    assert (verdict["least"], verdict["met"]) == (least, met)
    assert verdict["got"] == pytest.approx(10 / seconds - 1)


def test_a_policy_that_stays_off_is_held_against_plain_decoding() -> None:
    rows = summarize(NAMES, runs(never=(10, 10, 10), goodput_off=(10.05, 10.3, 10.06)))
    (verdict,) = verdicts("fixed", rows)
    assert verdict["met"] and verdict["got"] == pytest.approx(10 / 10.06 - 1)


def test_a_machine_that_changes_its_speed_does_not_choose_the_best_static_candidate() -> None:
    # The machine is twice as fast in the first repeat; only a part of the second one was run then.
    found = runs(never=(5, 10, 10), static_1x1=(4, 8, 8), static_2x1=(4.5, 4.5, 9))
    assert best_static(NAMES, found) == "static:1,1"


def test_headroom_is_what_the_best_of_each_phase_gains_over_the_best_single_one() -> None:
    found = {
        "never": {0: record(10, (4, 6))},
        "static:1,1": {0: record(12, (2, 10))},
        "goodput": {0: record(1, (0.5, 0.5))},
    }
    assert headroom(NAMES, found) == pytest.approx(10 / 8 - 1)
    assert headroom(NAMES, {"goodput": found["goodput"]}) is None
    assert headroom(NAMES, {}) is None


def test_the_table_has_policies_plain_decoding_and_the_best_static_one() -> None:
    found = runs(never=(10,), static_1x1=(8,), static_2x1=(9,), goodput=(8,))
    rows = summarize(NAMES, found)
    scenario = {
        "profile": "ramp:1-2",
        "mixture": "mixed",
        "group": "evaluation",
        "kind": "ramp",
        "drains": False,
        "phases": [[1, 2], [2, 2]],
        "distinct_prompts": 4,
        "results": rows,
        "verdicts": verdicts("ramp", rows),
        "headroom": 0.25,
    }
    text = report([scenario])
    assert "static:1,1 (best static)" in text and "static:2,1" not in text
    assert "static:2,1" in report([scenario], all_rows=True)
    assert "4 of 4" in text and "target at least +5.0%: missed" in text
    assert "together: +25.0% against the best single one" in text
    assert report([]) == "nothing was measured\n"
