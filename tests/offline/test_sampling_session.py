"""A sampling run: resumed after any cell, within its budget, whatever the clock does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cells import BAD, GOOD, FakeMeasurer, header_of, make_plan, make_times

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.plan import Candidate
from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.offline import store as store_module
from looped_spec.offline.build import build_preset, rebuild
from looped_spec.offline.cells import Cell, CostBlock
from looped_spec.offline.plan import SamplingPlan
from looped_spec.offline.session import LocalWorker, Session
from looped_spec.offline.store import Samples, SampleStore, read_samples


def session(
    path: Path,
    measurer: Any,
    *,
    plan: SamplingPlan | None = None,
    resume: bool = True,
    **options: Any,
) -> Session:
    """A session whose store stays open."""
    plan = plan or make_plan()
    store = SampleStore(path, header_of(plan), resume=resume)
    clock = options.get("clock")
    worker = LocalWorker(measurer) if clock is None else LocalWorker(measurer, clock)
    return Session(plan, store, worker, make_times(plan), **options)


def run(path: Path, measurer: Any, **options: Any) -> Session:
    """Run a session and close its store."""
    one = session(path, measurer, **options)
    with one.store:
        one.run()
    return one


class StopsAfter(FakeMeasurer):
    """Is interrupted in the middle of a cell."""

    limit = 0

    def measure(self, cell: Cell) -> dict[str, Any]:
        if len(self.measured) == self.limit:
            raise KeyboardInterrupt
        return super().measure(cell)


def test_a_run_that_is_interrupted_after_any_cell_gives_the_same_samples(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    everything = FakeMeasurer(make_plan(), GOOD)
    run(whole, everything)
    expected = read_samples(whole)
    assert len(everything.measured) == len(expected.cells) == 8 + 4 + 4
    path = tmp_path / "parts.jsonl"
    measured: list[str] = []
    for number in range(len(expected.cells)):
        one = StopsAfter(make_plan(), GOOD)
        one.limit = 1 if number < len(expected.cells) - 1 else 99
        if one.limit == 1:
            with pytest.raises(KeyboardInterrupt):
                run(path, one)
        else:
            run(path, one)
        measured += one.measured
    assert measured == everything.measured
    assert read_samples(path) == expected
    again = FakeMeasurer(make_plan(), GOOD)
    run(path, again)
    assert again.measured == []
    assert rebuild(path).to_json() == rebuild(whole).to_json()


def test_one_of_everything_comes_before_the_repeats_and_the_finalists_last(
    tmp_path: Path,
) -> None:
    measurer = FakeMeasurer(make_plan(), GOOD)
    run(tmp_path / "s.jsonl", measurer)
    kinds = [key.split()[0] for key in measurer.measured]
    assert (
        kinds
        == ["cost"] * 4 + ["acceptance"] * 2 + ["cost"] * 4 + ["acceptance"] * 2 + ["confirm"] * 4
    )
    assert [key[-1] for key in measurer.measured[:6]] == ["0"] * 6


class Clock:
    """A clock that a cell moves on by the seconds that it takes."""

    def __init__(self, jump: Callable[[int], float] = lambda reading: 0.0) -> None:
        self.now, self.readings, self.jump = 1000.0, 0, jump

    def __call__(self) -> float:
        self.readings += 1
        return self.now + self.jump(self.readings)


class Timed(FakeMeasurer):
    """Takes a second a cell by a given clock."""

    clock: Clock

    def measure(self, cell: Cell) -> dict[str, Any]:
        self.clock.now += 1.0
        return super().measure(cell)


def timed(clock: Clock, plan: SamplingPlan | None = None) -> Timed:
    measurer = Timed(plan or make_plan(), GOOD)
    measurer.clock = clock
    return measurer


def test_a_budget_is_kept_and_what_did_not_fit_is_named(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "s.jsonl"
    plan = make_plan(confirm_tokens=8)
    done = run(path, timed(clock, plan), plan=plan, clock=clock, budget=10.5)
    assert clock.now - 1000.0 <= 10.5
    assert done.left_out
    held = read_samples(path).cells
    assert not set(held) & set(done.left_out)
    notes = build_preset(read_samples(path)).provenance["cost"].notes or ""
    costs = sum(key.startswith("cost") for key in done.left_out)
    assert costs and f"{costs} of 8 cells of these were not measured" in notes
    # The finalists had their share, though not all repeats were in.
    assert any(key.startswith("confirm") for key in held)
    assert build_preset(read_samples(path)).config.candidates
    rest = Clock()
    then = run(path, timed(rest, plan), plan=plan, clock=rest)
    assert not then.left_out and set(held) < set(read_samples(path).cells)
    assert "not measured" not in (rebuild(path).provenance["cost"].notes or "")


def test_a_budget_of_nothing_measures_nothing_and_says_so(tmp_path: Path) -> None:
    clock = Clock()
    done = run(tmp_path / "s.jsonl", timed(clock), clock=clock, budget=0.0)
    assert done.num_measured == 0 and len(done.left_out) == 12
    with pytest.raises(ConfigError, match="no times"):
        rebuild(tmp_path / "s.jsonl")


def test_a_clock_that_jumps_back_and_forth_loses_nothing(tmp_path: Path) -> None:
    steady, jumping = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run(steady, timed(Clock()))
    clock = Clock(lambda reading: 5000.0 * (-1) ** reading)
    run(jumping, timed(clock), clock=clock)
    assert read_samples(jumping).cells == read_samples(steady).cells


def test_a_cell_in_which_the_machine_stood_still_does_not_leave_out_the_others() -> None:
    times, cells = make_times(make_plan()), make_plan().first_cells()
    same = [cell for cell in cells if isinstance(cell, CostBlock) and cell.batch_size == 1]
    for cell, seconds in zip(same[:3], (2.0, 2.0, 3600.0), strict=True):
        times.learn(cell, seconds)
    assert times.seconds(same[3]) < 4.0


def test_a_disk_that_fills_up_in_the_middle_keeps_all_cells_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.jsonl"
    real, writes = store_module.os.write, 0

    def full(fd: int, data: bytes) -> int:
        nonlocal writes
        writes += 1
        if writes > 5:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(store_module.os, "write", full)
    with pytest.raises(LoopedSpecError, match="No space left"):
        run(path, FakeMeasurer(make_plan(), GOOD))
    monkeypatch.undo()
    assert len(read_samples(path).cells) == 4
    second = FakeMeasurer(make_plan(), GOOD)
    run(path, second)
    assert len(second.measured) == 12


def test_an_even_slower_machine_gives_the_same_ratios(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    measurer = FakeMeasurer(make_plan(), GOOD)
    run(path, measurer)
    table = rebuild(path).cost
    for size in (1, 8):
        plain = table.ms(size, 32, Candidate(0, 0))
        for candidate in make_plan().candidates():
            ms = table.ms(size, 32, candidate)
            assert ms is not None and plain is not None
            # Blocks differ by a factor of 2; the second plain time of each is 2 % above the first.
            ratio = measurer.ms(size, candidate) / measurer.ms(size, Candidate(0, 0)) / 1.01
            assert ms / plain == pytest.approx(ratio, rel=1e-5)


def test_what_pays_is_chosen_and_nothing_where_nothing_pays(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    run(good, FakeMeasurer(make_plan(), GOOD))
    run(bad, FakeMeasurer(make_plan(), BAD, row_cost=0.3))
    preset = rebuild(good)
    assert preset.config.max_num_seqs == 8
    for bucket in preset.config.buckets:
        assert bucket.candidates[0] == Candidate(0, 0)
        assert bucket.candidates[bucket.initial] != Candidate(0, 0)
    assert [bucket.candidates for bucket in rebuild(bad).config.buckets] == [(Candidate(0, 0),)] * 2


@pytest.mark.parametrize("loops", [0.3, 0.0, None])
def test_what_a_readout_takes_is_in_the_preset_if_it_was_measured(
    tmp_path: Path, loops: float | None
) -> None:
    path = tmp_path / "s.jsonl"
    run(path, FakeMeasurer(make_plan(), GOOD, readout_loops=loops))
    preset = rebuild(path)
    default = AdaptiveSpecConfig.default(4, 1).shadow_cost_ratio
    wanted = default if loops is None else loops
    assert preset.config.shadow_cost_ratio == pytest.approx(wanted, abs=1e-3)
    notes = preset.provenance["cost"].notes or ""
    assert ("one more readout beside a round takes" in notes) is (loops is not None)


def test_the_first_candidate_is_the_one_with_the_most_tokens_a_second(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    plan = make_plan(confirm_repeats=0)
    measurer = FakeMeasurer(plan, dict.fromkeys(GOOD, 0.85))
    run(path, measurer, plan=plan)
    for bucket, size in zip(rebuild(path).config.buckets, (1, 8), strict=True):
        best = max(
            plan.candidates(),
            key=lambda c: (
                sum(0.85**i for i in range(c.num_speculative_tokens + 1)) / measurer.ms(size, c)
            ),
        )
        assert bucket.candidates[bucket.initial] == best


def test_echoes_are_left_out_and_reported_and_nothing_but_echoes_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.jsonl"
    run(path, FakeMeasurer(make_plan(), GOOD, echoes={"hard": 5, "easy": 1}))
    preset = rebuild(path)
    assert {entry.workload for entry in preset.acceptance} == {"easy"}
    notes = preset.provenance["acceptance"].notes or ""
    assert "hard: 10 of 16 texts repeat themselves" in notes and "2 texts of the others" in notes
    only = tmp_path / "echo.jsonl"
    with pytest.raises(ConfigError, match=r"repeat themselves.*a temperature above 0"):
        run(only, FakeMeasurer(make_plan(), GOOD, echoes={"hard": 8, "easy": 8}))


class EndsAtOnce(FakeMeasurer):
    """A model whose every text is one token long."""

    def measure(self, cell: Cell) -> dict[str, Any]:
        data = super().measure(cell)
        return data | {"counts": [[1, [], []], [2, [], []]]} if "counts" in data else data


def test_a_model_that_ends_every_text_at_once_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ignore-eos if the model ends its texts at once"):
        run(tmp_path / "s.jsonl", EndsAtOnce(make_plan(), GOOD))


def test_samples_in_any_order_give_the_same_preset(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    run(path, FakeMeasurer(make_plan(), GOOD))
    samples = read_samples(path)
    turned = Samples(samples.header, dict(reversed(samples.cells.items())))
    assert build_preset(turned).to_json() == build_preset(samples).to_json()


def test_drafts_too_long_to_be_tried_at_a_large_batch_cost_more_there_than_shorter_ones(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.jsonl"
    plan = make_plan(ks=None, batch_sizes=(1, 32), confirm_repeats=0)
    run(path, FakeMeasurer(plan, GOOD), plan=plan)
    preset = rebuild(path)
    times = [preset.cost.ms(32, 32, Candidate(k, 1)) or 0.0 for k in (3, 4, 6, 8)]
    assert times == sorted(set(times))
    assert times[3] > 3 * (preset.cost.ms(1, 32, Candidate(8, 1)) or 0.0) / 2
    assert "from batch size 32 on times above K = 4 are not measured" in (
        preset.provenance["cost"].notes or ""
    )
