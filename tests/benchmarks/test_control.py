"""The benchmark of control policies: loads, rivals, arithmetic and report."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import control
import control_held_out
import pytest
from control_bench import (
    held_out,
    landscapes,
    published,
    statics,
    suites,
    targets,
    transitions,
    tuning,
)
from control_bench.baselines import RFC_LADDERS, RfcEma, SglangEma, ThroughputAware, TwoArms
from control_bench.measure import POLICIES, SHADOWS, per_seed, ratio, run_suites, run_trace
from control_bench.report import report, targets_table
from control_bench.scenarios import scenarios
from control_bench.setting import Baseline, Setting
from tree import ROOT

from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback
from looped_spec.control.scores import regret
from looped_spec.control.simulate import FixedPlans, PhaseRun, simulate
from looped_spec.control.trace import Trace
from looped_spec.control.trace_document import read_trace, trace_document

MEASURED = ROOT / "docs" / "measurements"
RIVALS = [name for name in POLICIES if not name.startswith(("goodput", "oracle", "ema"))]


@pytest.fixture(scope="module")
def steps() -> Trace:
    """Acceptance steps at B = 8 in landscape A, without shadow readouts."""
    (trace,) = (t for t in suites.suite("b") if t.name == "steps at B = 8, A")
    return suites.without_shadows(trace)


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_load_is_a_trace_that_can_be_written_down(name: str) -> None:
    for trace in suites.suite(name):
        assert read_trace(json.loads(json.dumps(trace_document(trace)))) == trace


def test_the_round_time_is_that_of_the_rfc() -> None:
    """T = d (K + 1) c(B) + (D - d) c(B (K + 1)) + T_other; rows are free when few."""
    assert landscapes.round_ms(1, Candidate(2, 1)) == pytest.approx(
        1.2 * (1 * 3 * math.hypot(1, 1 / 96) + 3 * math.hypot(1, 3 / 96) + 0.25)
    )
    assert landscapes.round_ms(96, PLAIN) == pytest.approx(1.2 * (4 * math.sqrt(2) + 0.25))
    ideal = landscapes.round_ms(1, Candidate(8, 3)) / landscapes.round_ms(1, PLAIN)
    assert ideal == pytest.approx((4 + 3 * 8) / 4, rel=0.06)


def test_landscapes_have_the_best_depth_that_they_are_made_for() -> None:
    """One loop is best in A wherever drafts pay, mostly two in B."""
    (a,), (b,) = suites.suite("A"), suites.suite("B")
    assert {phase.best().draft_loops for phase in a.phases} == {0, 1}
    assert [phase.best().draft_loops for phase in b.phases] == [2, 2, 2, 2, 2, 0, 2, 1, 2, 2]
    assert (len(a.phases), len(b.phases)) == (11, 10)
    assert len(a.candidates) == len(b.candidates) == 19


def test_the_adversary_changes_the_best_candidate_every_50_rounds() -> None:
    for trace in suites.suite("f"):
        best = [phase.best() for phase in trace.phases]
        assert all(phase.rounds == 50 for phase in trace.phases)
        assert all(now != before for before, now in itertools.pairwise(best))


def test_published_rates_are_those_of_the_tables() -> None:
    by_number = {replay.number: replay.trace for replay in published.REPLAYS}
    autospec = by_number[1].phases[3]
    assert autospec.batch_size == 8
    assert 1000 * autospec.rate(Candidate(4, 1)) == pytest.approx(911)
    deepseek = by_number[3].phases[-1]
    assert 1000 * deepseek.rate(PLAIN) == pytest.approx(8878.6)
    assert deepseek.best() == PLAIN
    code = by_number[11].phases[2]
    assert 1000 * code.rate(Candidate(3, 1)) == pytest.approx(45.9)
    assert (code.expected_tokens(Candidate(3, 1)) - 1) / 3 == pytest.approx(0.558)
    (rfc,) = by_number[27].phases
    gain = rfc.rate(Candidate(1, 3)) / rfc.rate(PLAIN)
    assert gain == pytest.approx(1.09)
    assert rfc.best() == Candidate(1, 2)


def test_half_of_the_published_tables_is_held_out() -> None:
    assert [r.number for r in published.REPLAYS if r.is_held_out] == [3, 7, 11, 15, 19, 23, 27]
    assert len(published.REPLAYS) == 14


@pytest.mark.parametrize("candidate", [PLAIN, Candidate(2, 1), Candidate(3, 3)])
def test_the_closed_form_of_a_single_candidate_is_what_is_simulated(
    steps: Trace, candidate: Candidate
) -> None:
    run = simulate(steps, FixedPlans.static(steps, candidate), 0)
    assert regret(run.phases) == pytest.approx(statics.static_regret(steps, candidate))


def test_the_best_static_is_the_best_of_all(steps: Trace) -> None:
    best, found = statics.best_static([steps])
    every = {c: statics.static_regret(steps, c) for c in steps.candidates}
    assert found == min(every.values()) == every[best]


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_runs_any_load_and_does_the_same_again(name: str) -> None:
    for title in ("a", "b", "g"):
        for trace in suites.suite(title, 0.05)[::3]:
            first, again = (run_trace(POLICIES[name], trace, [0]) for _ in range(2))
            assert first == again
            assert regret(first[0]) >= 0


@pytest.mark.parametrize("name", ["RFC EMA", "throughput-aware, d = 1", "llama.cpp bucket"])
def test_a_rival_beats_drafting_blindly_where_it_is_at_home(steps: Trace, name: str) -> None:
    (phases,) = run_trace(POLICIES[name], steps, [0])
    assert regret(phases) < statics.static_regret(steps, Candidate(6, 2))


def feed(policy: Baseline, batch_size: int, accepted: Callable[[int], int]) -> Candidate:
    """Run one round with `accepted(K)` drafts kept by each request, and return what ran."""
    plan = policy.plan(batch_size, context_tokens=512)
    k = plan.candidate.num_speculative_tokens
    kept = (accepted(k),) * batch_size
    policy.observe(RoundFeedback(plan.plan_id, (k,) * batch_size, kept, 0.005))
    return plan.candidate


def test_the_rfcs_ema_moves_one_candidate_a_time_and_not_before_it_has_seen_enough(
    steps: Trace,
) -> None:
    policy = RfcEma(Setting(steps, 0), ladders=[(2**16, [(1, 1), (2, 1), (3, 1)])])
    ran = [feed(policy, 8, lambda k: k).num_speculative_tokens for _ in range(40)]
    assert ran == [2] * 8 + [3] * 32
    fallen = [feed(policy, 8, lambda k: 0).num_speculative_tokens for _ in range(60)]
    assert fallen == sorted(fallen, reverse=True)
    assert fallen[-1] == 1


def test_the_rfcs_ema_turns_off_and_waits_longer_after_every_probe_that_fails(
    steps: Trace,
) -> None:
    policy = RfcEma(Setting(steps, 0), ladders=[(2**16, [(1, 1)])], off=True)
    drafts = [feed(policy, 8, lambda k: 0).num_speculative_tokens for _ in range(400)]
    runs = [(k, len(list(same))) for k, same in itertools.groupby(drafts)]
    assert runs[:8] == [(1, 8), (0, 8), (1, 4), (0, 16), (1, 4), (0, 32), (1, 4), (0, 64)]


def test_sglangs_ema_climbs_and_falls_by_half_a_step(steps: Trace) -> None:
    """The steps 1, 3, 5, 7 run as 1, 3, 4, 6, the nearest that the trace has."""
    policy = SglangEma(Setting(steps, 0), 1)

    def lengths(rounds: int, accepted: int) -> list[int]:
        done = [feed(policy, 1, lambda k: min(k, accepted)) for _ in range(rounds)]
        return [candidate.num_speculative_tokens for candidate in done]

    assert lengths(60, 8)[-1] == 6
    assert lengths(60, 3)[-1] == 4  # not above 3.5 and not at most 2.25
    assert lengths(60, 1)[-1] == 3
    assert lengths(60, 0)[-1] == 1  # from 1 there is no way to 0 in this range


def test_sglangs_ema_tries_again_at_every_update_once_it_is_off(steps: Trace) -> None:
    policy = SglangEma(Setting(steps, 0), 1)
    ran = [feed(policy, 8, lambda k: 0).num_speculative_tokens for _ in range(100)]
    assert ran[:15] == [1] * 15
    assert ran[50:] == ([0] * 5 + [1] * 5) * 5 or ran[50:] == ([1] * 5 + [0] * 5) * 5


def test_the_throughput_aware_policy_infers_acceptance_from_lengths(steps: Trace) -> None:
    policy = ThroughputAware(Setting(steps, 0), 1)
    p = 0.7
    policy.window.extend([(3, p + p**2 + p**3)] * 20)
    assert policy._acceptance() == pytest.approx(p, abs=2**-11)


def test_two_arms_hold_the_faster_one(steps: Trace) -> None:
    policy = TwoArms(Setting(steps, 0))
    for _ in range(600):
        feed(policy, 1, lambda k: k)
    assert policy.held == 1  # The same time for twice the tokens.
    for _ in range(600):
        feed(policy, 1, lambda k: 0)
    windows = [feed(policy, 1, lambda k: 0) for _ in range(64)]
    assert Candidate(8, 1) in windows  # All tie, and the one that is held stays.


def test_random_settings_are_sensible_and_always_the_same() -> None:
    settings = tuning.random_settings(150)
    assert settings == tuning.random_settings(150)
    assert all(0 < s.down < s.up < 1 for s in settings)
    assert all(len(s.ladders) == 3 and all(rungs for _, rungs in s.ladders) for s in settings)
    assert {len({d for _, d in s.ladders[0][1]}) for s in settings} == {1, 2}


def test_tuning_in_hindsight_is_no_worse_than_the_guess(steps: Trace) -> None:
    short = replace(steps, phases=tuple(replace(p, rounds=100) for p in steps.phases))
    found = tuning.tune(short, [0, 1], 30)
    guess = [
        regret(simulate(short, RfcEma(Setting(short, s), ladders=RFC_LADDERS), s).phases)
        for s in (0, 1)
    ]
    assert sum(found["regret"]) <= sum(guess)
    assert sum(found["regret"]) / 2 <= found["median_of_all"]


def test_transitions_are_told_apart() -> None:
    (ramp,) = (t for t in suites.suite("a") if t.name == "ramp, A easy")
    assert [kind for _, kind, _ in transitions.transitions(ramp)] == ["batch change"] * 4
    (changes,) = (t for t in suites.suite("b") if t.name == "steps at B = 1, A")
    assert transitions.transitions(changes) == [
        (1, "acceptance change", 1),
        (2, "off to on", 1),
        (3, "acceptance change", 1),
    ]
    (a,) = suites.suite("A")
    assert [(number, kind) for number, kind, _ in transitions.transitions(a)] == [
        (1, "batch change"),
        (3, "batch change"),
        (5, "acceptance change"),
        (7, "off to on"),
        (8, "batch change"),
        (10, "off to on"),
    ]


def test_ratios_are_of_means_over_the_same_seeds() -> None:
    one = ratio([1.0, 3.0], [2.0, 6.0])
    assert (one.mean, one.low, one.high) == (0.5, 0.5, 0.5)
    other = ratio([1.0, 3.0], [2.0, 2.0])
    assert (other.mean, other.low, other.high) == (1.0, 0.5, 1.5)


def test_scores_of_a_suite_are_means_over_its_traces() -> None:
    def phases(time_ms: float) -> list[PhaseRun]:
        return [PhaseRun(1, tokens=1, time_ms=time_ms, best_ms=1, plain_ms=1)]

    runs = {"one": [phases(1.1), phases(1.2)], "two": [phases(1.3), phases(1.0)]}
    assert per_seed(runs, regret) == pytest.approx([0.2, 0.1])


def test_a_target_is_met_by_the_mean() -> None:
    low = targets.Target("regret", "%", 3.0, 2.0, targets.Estimate(2.5, 2.0, 3.5))
    assert (low.document()["target_met"], low.document()["stretch_met"]) == (True, False)
    high = replace(low, is_floor=True)
    assert (high.meets(3.0), high.meets(2.0)) == (False, True)
    assert replace(low, value=None).document()["target_met"] is None


def test_several_processes_find_what_one_does() -> None:
    one = run_suites(["b"], "RFC EMA", [0, 1], scale=0.02)
    assert run_suites(["b"], "RFC EMA", [0, 1], scale=0.02, jobs=2) == one


def test_every_scenario_names_what_it_requires() -> None:
    found = scenarios()
    assert [s.number for s in found] == sorted(s.number for s in found)
    assert all(s.trace.name.startswith(f"{s.number}: ") and s.required for s in found)
    names = [s.trace.name for s in found]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_the_benchmark_runs_from_loads_to_report(tmp_path: Path) -> None:
    assert control.main(["--quick", "--no-plots", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "control.json").read_text())
    assert (tmp_path / "control.md").read_text() == report(document)
    assert set(document["policies"]) == set(POLICIES)
    assert {row["name"] for row in document["scenarios"]} == {s.trace.name for s in scenarios()}
    assert document["policies"]["oracle"]["b"]["regret"] == {"mean": 0, "low": 0, "high": 0}
    assert "h" in document["policies"][SHADOWS]


def test_the_page_of_measurements_is_made_of_the_numbers_beside_it() -> None:
    document = json.loads((MEASURED / "control.json").read_text())
    assert (MEASURED / "control.md").read_text() == report(document)
    assert not document["provenance"]["quick"]
    assert document["provenance"]["seeds"] >= 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds and --jobs must be at least 1, got 0, 1"),
        (["--quick", "--out", "missing"], "folder 'missing' does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert control.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_held_out_loads_are_of_no_seed_that_was_tuned_on_and_always_the_same() -> None:
    traces = held_out.held_out(6)
    assert traces == held_out.held_out(8)[:6]
    assert held_out.FIRST_SEED > 1000
    assert len({repr(trace.phases) for trace in traces}) == 6
    for trace in traces:
        assert read_trace(json.loads(json.dumps(trace_document(trace)))) == trace


def test_held_out_loads_are_reported_with_every_policy(tmp_path: Path) -> None:
    assert control_held_out.main(["--quick", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "control-held-out.json").read_text())
    assert (tmp_path / "control-held-out.md").read_text() == control_held_out.page(document)
    oracle = next(row for row in document["policies"] if row["policy"] == "oracle")
    assert oracle["regret"] == {"mean": 0, "low": 0, "high": 0}
    assert control_held_out.main(["--loads", "0"]) == 2


def test_a_page_lists_sizes_by_size_and_policies_as_they_are_told() -> None:
    page = (MEASURED / "control.md").read_text()
    sizes = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| goodput | ")]
    assert sizes[-4:] == ["1", "8", "32", "256"]
    table = page.split("## Regret by suite", 1)[1].split("![", 1)[0].splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in table if line.startswith("| ")]
    assert names[2 : 2 + len(POLICIES)] == list(POLICIES)


def test_time_is_measured_again_into_what_was_kept(tmp_path: Path) -> None:
    document = json.loads((MEASURED / "control.json").read_text())
    before = document["policies"]
    document["timing"]["goodput"]["1"]["decide_us_p50"] = -1.0
    (tmp_path / "control.json").write_text(json.dumps(document))
    assert control.main(["--retime", "--out", str(tmp_path)]) == 0
    again = json.loads((tmp_path / "control.json").read_text())
    assert again["policies"] == before
    assert again["timing"]["goodput"]["1"]["decide_us_p50"] > 0
    assert (tmp_path / "control.md").read_text() == report(again)
    assert control.main(["--retime"]) == 2


def test_the_pages_tell_the_same_targets() -> None:
    document = json.loads((MEASURED / "control.json").read_text())
    held = json.loads((MEASURED / "control-held-out.json").read_text())
    page = (ROOT / "docs" / "control.md").read_text()
    assert targets_table(document["targets"]) in page
    assert (MEASURED / "control-held-out.md").read_text() == control_held_out.page(held)
    assert not held["quick"]
