"""Reading traces: what is in them, and what is said of one that is wrong."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from traces import COST_MS, SURVIVAL, document, phase

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.trace_document import parse_candidate, read_trace, trace_document
from looped_spec.errors import ConfigError


def test_what_is_left_out_has_its_default() -> None:
    trace = read_trace(document(phase(context_tokens=None)))
    (only,) = trace.phases
    assert (trace.cost_noise, trace.feedback_delay, trace.resume_ms) == (0, 0, 0)
    assert (only.context_tokens, only.mixed_prefill, only.cohort_change) == (0, 0, False)
    assert only.shadow_ms is None
    assert only.table_ms == only.cost_ms
    assert only.prefill_ms == COST_MS["0,0"]
    assert trace.candidates == (PLAIN, Candidate(1, 1), Candidate(3, 1), Candidate(2, 2))


def test_a_trace_survives_its_document() -> None:
    requests = [{"survival": SURVIVAL}, {"survival": {"1": [0.2, 0.1, 0.1], "2": [0.4, 0.1]}}]
    trace = read_trace(
        document(
            phase(table_ms=COST_MS | {"1,1": 7}, shadow_ms=0.1, mixed_prefill=0.5, prefill_ms=3),
            phase(survival=None, requests=requests, cohort_change=True),
            name="both",
            cost_noise=0.1,
            cost_error={"cell_deviation": 0.15, "depths": {"2": 1.2}, "cells": {"3,1": 0.5}},
            feedback_delay=2,
            feedback_duplicates=0.25,
            resume_ms=4,
        )
    )
    written = json.loads(json.dumps(trace_document(trace)))
    assert read_trace(written) == trace
    assert trace_document(read_trace(written)) == written


def test_requests_take_turns_in_the_mixture() -> None:
    low = {"1": [0.2, 0.1, 0.1], "2": [0.0, 0.0]}
    mixture = [{"survival": SURVIVAL}, {"survival": low}]
    (three,) = read_trace(document(phase(survival=None, requests=mixture, batch_size=3))).phases
    drafts = (2 * (0.8 + 0.6 + 0.5) + (0.2 + 0.1 + 0.1)) / 3
    assert three.expected_tokens(Candidate(3, 1)) == pytest.approx(1 + drafts)
    assert three.expected_tokens(PLAIN) == 1
    (one,) = read_trace(document(phase(survival=None, requests=mixture, batch_size=1))).phases
    assert one.expected_tokens(Candidate(2, 2)) == pytest.approx(1 + 0.9 + 0.75)


def test_the_best_candidate_is_the_one_with_most_tokens_per_time() -> None:
    (only,) = read_trace(document()).phases
    rates = {c: 2 * only.expected_tokens(c) / cost for c, cost in only.cost_ms.items()}
    assert only.best() == max(rates, key=lambda c: rates[c]) == Candidate(3, 1)
    assert only.rate(only.best()) == pytest.approx(2 * (1 + 0.8 + 0.6 + 0.5) / 8.5)


def broken(path: str, value: Any) -> dict[str, Any]:
    """Return a trace's document with what is at a path such as `phases.0.rounds` replaced."""
    whole = copy.deepcopy(document(cost_error={"depths": {}}))
    *way, last = path.split(".")
    at: Any = whole
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at[step]
    if isinstance(at, list):
        at[int(last)] = value
    elif value is None:
        del at[last]
    else:
        at[last] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema_version must be 1, got 2"),
        ("schema_version", True, "schema_version must be 1, got True"),
        ("schema_version", None, "the trace has no 'schema_version', which it needs"),
        ("phasse", 1, "unknown key in the trace 'phasse' (did you mean 'phases'?)"),
        ("name", "", "name must be a text of at least one character, got ''"),
        ("full_loops", 1, "full_loops must be between 2 and 1024, got 1"),
        ("full_loops", None, "the trace has no 'full_loops', which it needs"),
        ("candidates", [], "candidates must be a list of at least one, got []"),
        ("candidates.1", [1], "candidates[1] must be a pair [K, d], got [1]"),
        ("candidates.1", [1, 4], "candidates[1]: draft_loops must be between 1 and full_loops - 1"),
        ("candidates.1", [99, 1], "num_speculative_tokens must be between 0 and 64, got 99"),
        ("candidates.1", [1, 1.5], "candidates[1]: d must be an integer, got 1.5"),
        ("candidates.1", [-1, 1], "candidates[1]: K must be at least 0, got -1"),
        ("candidates.0", [0, 1], "candidates[0]: plain decoding is [0, 0], got [0, 1]"),
        ("candidates.0", [1, 1], "candidates[1]: [1, 1] is there twice"),
        ("candidates.0", [2, 1], "candidates must contain [0, 0]"),
        ("candidates.0", [4, 1], "candidates must contain [0, 0]"),
        ("phases", [], "phases must be a list of at least one, got []"),
        ("phases.0", 3, "phases[0] must be an object, got 3"),
        ("phases.0.rouns", 3, "unknown key in phases[0]: 'rouns' (did you mean 'rounds'?)"),
        ("phases.0.rounds", 0, "phases[0].rounds must be between 1 and 10000000, got 0"),
        ("phases.0.rounds", 2.0, "phases[0].rounds must be an integer, got 2.0"),
        ("phases.0.batch_size", None, "phases[0] has no 'batch_size', which it needs"),
        ("phases.0.batch_size", 0, "phases[0].batch_size must be between 1 and 65536, got 0"),
        ("phases.0.context_tokens", -1, "phases[0].context_tokens must be between 0 and"),
        ("phases.0.cohort_change", 1, "phases[0].cohort_change must be true or false, got 1"),
        ("phases.0.mixed_prefill", 1.5, "phases[0].mixed_prefill must be a number from 0 to 1"),
        ("phases.0.prefill_ms", -1, "phases[0].prefill_ms must be a number from 0 to"),
        ("phases.0.shadow_ms", "a", "phases[0].shadow_ms must be a number from 0 to"),
        ("phases.0.survival", None, "phases[0] must have either survival or requests"),
        ("phases.0.requests", [], "phases[0] must have either survival or requests"),
        ("phases.0.survival.3", [0.5], "unknown draft depth in phases[0].survival: '3'"),
        ("phases.0.survival.2", None, "phases[0].survival has no '2', which it needs"),
        (
            "phases.0.survival.1",
            [0.8, 0.6],
            "phases[0].survival['1'] must have at least 3 numbers, since candidates has "
            "[3, 1]; got 2",
        ),
        (
            "phases.0.survival.1.2",
            0.7,
            "phases[0].survival['1'][2] must be at most 0.6, the one before it, got 0.7",
        ),
        ("phases.0.survival.1.0", 1.1, "phases[0].survival['1'][0] must be a number from 0 to 1"),
        ("phases.0.survival.1.0", float("nan"), "must be a number from 0 to 1, got nan"),
        ("phases.0.survival.1.0", True, "must be a number from 0 to 1, got True"),
        ("phases.0.cost_ms.2,2", None, "phases[0].cost_ms has no '2,2', which it needs"),
        ("phases.0.cost_ms.4,1", 5, "unknown candidate in phases[0].cost_ms: '4,1'"),
        ("phases.0.cost_ms.1,1", 0, "phases[0].cost_ms['1,1'] must be a number from 1e-06 to"),
        ("phases.0.cost_ms.1,1", float("inf"), "phases[0].cost_ms['1,1'] must be a number"),
        ("phases.0.cost_ms.1,1", 10**400, "phases[0].cost_ms['1,1'] must be a number"),
        ("phases.0.table_ms", {"0,0": 5.0}, "phases[0].table_ms has no '1,1', which it needs"),
        ("cost_noise", 3, "cost_noise must be a number from 0 to 2, got 3"),
        ("cost_error", [], "cost_error must be an object, got []"),
        ("cost_error.cell", 1, "unknown key in cost_error: 'cell' (did you mean 'cells'?)"),
        ("cost_error.depths.7", 1.2, "unknown draft depth in cost_error.depths: '7'"),
        ("cost_error.depths.2", 0, "cost_error.depths['2'] must be a number from 0.01 to 100"),
        ("cost_error.cells", {"9,9": 1}, "unknown candidate in cost_error.cells: '9,9'"),
        ("cost_error.cell_deviation", -1, "cost_error.cell_deviation must be a number from 0 to 2"),
        ("feedback_delay", -1, "feedback_delay must be between 0 and 1000, got -1"),
        ("feedback_duplicates", 2, "feedback_duplicates must be a number from 0 to 1, got 2"),
    ],
)
def test_a_wrong_trace_is_named_by_place_value_and_range(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(broken(path, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("whole", [None, 3, "a", [1]])
def test_what_is_no_object_is_no_trace(whole: object) -> None:
    with pytest.raises(ConfigError, match="the trace must be an object, got"):
        read_trace(whole)


def test_a_wrong_kind_of_request_is_named_too() -> None:
    mixture = [{"survival": SURVIVAL}, {"survivl": SURVIVAL}]
    with pytest.raises(ConfigError, match=r"phases\[0\]\.requests\[1\]: 'survivl' \(did you mean"):
        read_trace(document(phase(survival=None, requests=mixture)))


@pytest.mark.parametrize("text", ["", "2", "2,", "a,b", "2,1,1", "-1,1", "2, 1"])
def test_a_candidate_is_written_with_a_comma(text: str) -> None:
    with pytest.raises(ConfigError, match="must be written K,d"):
        parse_candidate(text)
    assert parse_candidate("12,3") == Candidate(12, 3)
