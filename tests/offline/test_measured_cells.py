"""What is measured on a real engine: counts equal those of plain runs; nothing is left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fake_cells import make_plan
from tiny_model import write_tiny_model

from looped_spec import LLM
from looped_spec.control.plan import Candidate
from looped_spec.offline.cells import AcceptanceRun, ConfirmBlock, CostBlock
from looped_spec.offline.measure_acceptance import measure_acceptance
from looped_spec.offline.measurer import Measurer
from looped_spec.offline.repetition import is_echo, repeated_share
from looped_spec.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
PROMPTS = [[5 + n, 17, 40 + n] for n in range(6)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), weight_scale=0.25)
    return LLM(str(folder), max_num_seqs=8, num_speculative_tokens=0)


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work
    assert scheduler.allocator.num_free == scheduler.allocator.num_blocks


def test_counts_are_those_of_the_engine_s_own_metrics(llm: LLM) -> None:
    candidate = Candidate(3, 2)
    found = measure_acceptance(llm, PROMPTS, candidate, (), PARAMS)
    llm.set_speculation(3, 2)
    params = [dataclasses.replace(PARAMS, seed=seed) for seed in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    echoes = sum(
        is_echo(p + o.outputs[0].token_ids, len(p)) for p, o in zip(PROMPTS, outputs, strict=True)
    )
    rows = [*found["counts"], *found["echo_counts"]]
    assert sum(sum(hits) for _, _, hits in rows) == accepted > 0
    assert (found["texts"], found["echoes"], found["tokens"]) == (6, echoes, 6 * 24)
    for _, trials, hits in rows:
        # Who had the i-th draft accepted had a trial at the next, but for the ends of texts.
        assert all(later <= hit for later, hit in zip(trials[1:], hits, strict=False))
    assert_idle(llm)


def test_shadow_readouts_at_the_deepest_depth_tell_what_a_run_of_the_other_depth_tells(
    llm: LLM,
) -> None:
    prompts = [[3 + n, 11, 60 + n, n] for n in range(8)]
    params = dataclasses.replace(PARAMS, max_tokens=60)
    shadowed = measure_acceptance(llm, prompts, Candidate(4, 2), (1,), params)
    own = measure_acceptance(llm, prompts, Candidate(4, 1), (), params)

    def first(found: dict[str, list[list[int]]], depth: int) -> float:
        rows = [row for part in ("counts", "echo_counts") for row in found[part]]  # type: ignore[index]
        trials = sum(row[1][0] for row in rows if row[0] == depth and row[1])  # type: ignore[index]
        hits = sum(row[2][0] for row in rows if row[0] == depth and row[2])  # type: ignore[index]
        return hits / trials

    # Rounds begin at other places of the same texts, 100 or more in each: three deviations.
    assert first(shadowed, 1) == pytest.approx(first(own, 1), abs=0.15)
    deep, shallow = shadowed["counts"][1][1], shadowed["counts"][0][1]
    assert deep[0] == shallow[0] >= 100


def test_times_are_of_every_candidate_and_leave_the_engine_idle(llm: LLM) -> None:
    plan = dataclasses.replace(make_plan(ks=(1, 3), ds=(1, 2)), full_loops=llm.full_loops)
    found = Measurer(llm, plan, {}).measure(CostBlock(4, 32, 0))
    assert [row[:2] for row in found["ms"]] == [[0, 0], [1, 1], [1, 2], [3, 1], [3, 2]]
    assert all(row[2] >= row[3] > 0 for row in found["ms"])
    assert found["again_ms"] > 0 and found["host_ms"] >= 0
    # Plain rounds are read out at both depths, short drafts of the deepest at the other one.
    assert [row[:3] for row in found["shadow_ms"]] == [[0, 0, 2], [1, 2, 1]]
    assert all(row[3] > 0 for row in found["shadow_ms"])
    assert_idle(llm)
    plan = dataclasses.replace(plan, reads_shadows=False)
    assert "shadow_ms" not in Measurer(llm, plan, {}).measure(CostBlock(4, 32, 1))


def test_rounds_that_are_timed_with_readouts_do_read_out(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(make_plan(ks=(2,), ds=(1, 2)), full_loops=llm.full_loops)
    seen = set()
    real = llm.engine.runner.round

    def watched(requests, candidate, *rest, **options):  # type: ignore[no-untyped-def]
        result = real(requests, candidate, *rest, **options)
        if result.shadow_depths:
            seen.add((candidate, result.shadow_depths))
            assert all(len(row) == len(result.shadow_depths) for row in result.shadow)
        return result

    monkeypatch.setattr(llm.engine.runner, "round", watched)
    Measurer(llm, plan, {}).measure(CostBlock(2, 24, 0))
    assert seen == {(Candidate(0, 0), (1, 2)), (Candidate(2, 2), (1,))}


def test_a_timed_round_starts_from_the_context_that_it_is_said_to_have(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(make_plan(ks=(2,), ds=(1,)), full_loops=llm.full_loops)
    seen = []
    runner = llm.engine.runner
    real = runner.round

    def watched(requests, candidate, *rest, **options):  # type: ignore[no-untyped-def]
        if candidate.num_speculative_tokens:
            seen.append(([request.num_tokens for request in requests], len(requests)))
        return real(requests, candidate, *rest, **options)

    monkeypatch.setattr(runner, "round", watched)
    Measurer(llm, plan, {}).measure(CostBlock(3, 40, 1))
    # The newest token has no keys and values yet: 40 are cached.
    assert seen and all(item == ([41] * 3, 3) for item in seen)


def test_finalists_decode_the_same_number_of_tokens_at_a_full_batch(llm: LLM) -> None:
    plan = dataclasses.replace(make_plan(confirm_tokens=16), full_loops=llm.full_loops)
    rows = {"one": PROMPTS[:3], "two": PROMPTS[3:]}
    block = ConfirmBlock(4, (Candidate(2, 1), Candidate(1, 2)), 1)
    runs = Measurer(llm, plan, rows).measure(block)["runs"]
    assert [run[:2] for run in runs] == [[0, 0], [2, 1], [1, 2], [0, 0]]
    for k, _, tokens, seconds, rounds in runs:
        assert 64 <= tokens < 64 + 4 * (k + 1) and seconds > 0
        assert rounds * 4 <= tokens <= rounds * 4 * (k + 1)
    assert_idle(llm)


def test_prompts_of_a_chunk_are_those_of_the_workload(llm: LLM) -> None:
    plan = dataclasses.replace(make_plan(screen_tokens=8), full_loops=llm.full_loops)
    rows = {"one": [[n + 1, 2] for n in range(11)]}
    measurer = Measurer(llm, plan, rows)
    assert measurer.measure(AcceptanceRun("one", 0.0, 2, 0))["texts"] == 8
    last = measurer.measure(AcceptanceRun("one", 0.0, 2, 1))
    assert last["texts"] == 3 and [row[0] for row in last["counts"]] == [1, 2]


def test_an_interruption_in_a_cell_leaves_the_engine_idle(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(make_plan(ks=(1,), ds=(1,)), full_loops=llm.full_loops)
    step, calls = llm.engine.step, 0

    def interrupted(*args, **options):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return step(*args, **options)

    monkeypatch.setattr(llm.engine, "step", interrupted)
    rows = {"one": PROMPTS}
    for cell in (
        CostBlock(4, 16, 0),
        AcceptanceRun("one", 0.0, 1, 0),
        ConfirmBlock(2, (Candidate(1, 1),), 0),
    ):
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            Measurer(llm, plan, rows).measure(cell)
        assert_idle(llm)


def test_rounds_are_captured_before_they_are_timed_where_rounds_are_captured(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    llm = LLM(str(folder), max_num_seqs=2, num_speculative_tokens=0, graph_backend="traced")
    plan = dataclasses.replace(
        make_plan(ks=(2,), ds=(1,), batch_sizes=(1, 2)), full_loops=llm.full_loops
    )
    measurer = Measurer(llm, plan, {})
    measurer.capture()
    graphs = llm.engine.runner.graphs
    shapes = {(s.batch_size, s.num_speculative_tokens) for s in graphs.captured_shapes}
    assert {(1, 0), (2, 0), (1, 2), (2, 2)} <= shapes
    before = graphs.stats.as_dict()
    measurer.measure(CostBlock(2, 8, 0))
    after = graphs.stats.as_dict()
    assert after["replays"] > before["replays"]
    assert after["captured"] == before["captured"]
    # Readouts of other depths are not captured in an engine either.
    assert after["eager_rounds"].pop("shadow depths") > before["eager_rounds"].pop(
        "shadow depths", 0
    )
    assert after["eager_rounds"] == before["eager_rounds"]


def test_text_that_repeats_itself_is_told_from_text_that_does_not() -> None:
    fresh = list(range(60))
    assert repeated_share(fresh) == 0.0
    assert is_echo([1, 2, 3] * 20) and not is_echo(fresh + fresh[:10])
    # What stands in the prompt counts as having been there; the prompt itself does not count.
    assert is_echo(fresh + fresh, 60)
    assert not is_echo([1, 2, 3] * 20 + fresh, 60)
    assert repeated_share([], 0) == 0.0
