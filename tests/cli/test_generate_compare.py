"""`looped-spec generate --compare`: a fair timing, the ideal model, and an honest verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_runs import Generate

from looped_spec.cli.compare import Comparison, Side, compare, predicted_speedup
from looped_spec.cli.generate_report import comparison_summary, comparison_table
from looped_spec.cli.generation import Setting
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import ConfigError
from looped_spec.offline.timing import Difference, Generated, Run, first_difference, in_turn
from looped_spec.runtime.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from looped_spec.sampling_params import SamplingParams

SPECULATIVE = Candidate(2, 1)


class FakeLLM:
    """Notes what it is asked for; `lies` are the calls in which the last token is another."""

    full_loops = 4

    def __init__(self, candidate: Candidate = SPECULATIVE, lies: tuple[int, ...] = ()) -> None:
        self.policy = StaticPolicy(candidate)
        self.lies = lies
        self.calls: list[tuple[Candidate, int]] = []

    @property
    def speculation(self) -> Candidate:
        return self.policy.candidate

    def set_speculation(self, num_speculative_tokens: int, draft_loops: int = 0) -> None:
        self.policy = StaticPolicy(Candidate(num_speculative_tokens, draft_loops))

    def generate(
        self, prompts: list[str], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        assert not use_tqdm
        lie = len(self.calls) in self.lies
        self.calls.append((self.speculation, params[0].max_tokens))
        results = []
        for number, prompt in enumerate(prompts):
            metrics = RequestMetrics()
            k = self.speculation.num_speculative_tokens
            metrics.add_round(self.speculation, k, 1 if number else 0)
            tokens = [5, 6, 8 if lie and number == 1 else 7]
            completion = CompletionOutput(0, "text", tokens, "length")
            results.append(RequestOutput(number, prompt, [1], [completion], True, metrics))
        return results


def run_compare(llm: FakeLLM, repeats: int = 3, max_tokens: int = 100) -> Comparison:
    params = [SamplingParams(max_tokens=max_tokens)] * 2
    return compare(llm, ["a", "b"], params, repeats)  # type: ignore[arg-type]


def side(*rates: float) -> Side:
    """Runs of 10 tokens at the given rates."""
    output = Generated("t", list(range(10)), "length")
    return Side([Run([output], SpeculationMetrics(), 10 / rate) for rate in rates])


def test_the_ideal_model_gives_the_numbers_of_the_rfc() -> None:
    shallow = predicted_speedup(4, 1, 2, 0.908)
    deep = predicted_speedup(4, 1, 3, 0.949)
    assert shallow == pytest.approx(4 * 1.908 / 6)
    assert deep == pytest.approx(4 * 1.949 / 7)
    assert deep / shallow == pytest.approx(0.88, abs=0.005)
    assert predicted_speedup(4, 3, 1, 1.0) == pytest.approx(16 / 7)
    assert predicted_speedup(4, 3, 1, 0.0) == pytest.approx(4 / 7)


def test_both_ways_are_warmed_up_and_then_alternate() -> None:
    llm = FakeLLM()
    run_compare(llm, repeats=3)
    spec = SPECULATIVE
    assert llm.calls[:2] == [(PLAIN, 16), (spec, 16)]
    assert [way for way, _ in llm.calls[2:]] == [PLAIN, spec, spec, PLAIN, PLAIN, spec]
    assert {tokens for _, tokens in llm.calls[2:]} == {100}
    assert llm.speculation == spec


def test_each_way_stands_as_often_before_as_behind_any_other() -> None:
    order: list[str] = []
    results = in_turn("abc", lambda way: order.append(way) or len(order), 4)
    assert "".join(order) == "abccbaabccba"
    assert results == {"a": [1, 6, 7, 12], "b": [2, 5, 8, 11], "c": [3, 4, 9, 10]}


def test_a_warm_up_is_never_longer_than_the_runs() -> None:
    llm = FakeLLM()
    run_compare(llm, max_tokens=3)
    assert {tokens for _, tokens in llm.calls} == {3}


def test_the_model_is_left_as_it_was_when_a_run_fails() -> None:
    llm = FakeLLM()

    def fail(*_: Any, **__: Any) -> list[RequestOutput]:
        raise KeyboardInterrupt

    llm.generate = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_compare(llm)
    assert llm.speculation == SPECULATIVE


def test_plain_decoding_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(ConfigError, match="set --num-speculative-tokens to 1 or more"):
        run_compare(FakeLLM(PLAIN))


def test_the_counts_are_those_of_speculative_runs_alone() -> None:
    metrics = run_compare(FakeLLM(), repeats=3).metrics
    assert (metrics.num_rounds, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (6, 12, 3)
    assert metrics.acceptance_by_position == [0.5, 0.0]


def test_rates_are_medians() -> None:
    setting = Setting("static", Candidate(1, 1), 4)
    result = Comparison(setting, side(10, 50, 20), side(30, 10, 90), None)
    assert result.plain.tokens_per_second == pytest.approx(20)
    assert result.speedup == pytest.approx(1.5)
    assert result.predicted_speedup is None


@pytest.mark.parametrize("lying_call", [2, 3, 4, 5, 7])
def test_any_run_with_other_tokens_ends_the_identity(lying_call: int) -> None:
    result = run_compare(FakeLLM(lies=(lying_call,)))
    assert result.difference == Difference(prompt=1, position=2)
    assert "no: prompt 2, token 3" in comparison_table(result)
    assert "NOT identical" in comparison_summary(result)


def test_warm_ups_do_not_count_for_the_identity() -> None:
    assert run_compare(FakeLLM(lies=(0,))).difference is None


def test_a_text_that_ends_earlier_differs_where_it_ends() -> None:
    long, short = Generated("", [1, 2, 3], "length"), Generated("", [1, 2], "stop")
    assert first_difference([long, long], [long, short]) == Difference(1, 2)
    assert first_difference([short], [short]) is None


def test_the_table_shows_every_measure() -> None:
    table = comparison_table(run_compare(FakeLLM()))
    assert "K=2 d=1 D=4" in table.splitlines()[0]
    predicted = 4 * (1 + 2 * 0.25) / (4 + 1 * 2)
    for row in (
        ("speedup predicted by the ideal model", f"{predicted:.2f}x"),
        ("draft acceptance rate", "25.0%"),
        ("acceptance by position", "50.0% 0.0%"),
        ("mean accepted length", "1.50"),
        ("identical tokens", "yes"),
    ):
        line = next(line for line in table.splitlines() if line.startswith(row[0]))
        assert line.endswith(f" {row[1]}")
    assert "Timed: " in table


def test_the_command_prints_prompt_and_text_once_and_then_the_table(generate: Generate) -> None:
    arguments = ("--prompt", "the cat", "--max-tokens", 10)
    text = generate(*arguments).out
    done = generate(*arguments, "--compare", "--repeats", 1, "--num-speculative-tokens", 2)
    assert done.code == 0
    assert done.out.startswith(f"--- prompt ---\nthe cat\n--- text ---\n{text}\n")
    assert done.out.count("--- prompt ---") == 1
    assert "identical tokens  " in done.out
    assert done.err.startswith("looped-spec: speedup ") and done.err.count("\n") == 1


def test_without_k_the_choice_of_each_round_is_what_is_compared(generate: Generate) -> None:
    done = generate("--prompt", "a", "--max-tokens", 10, "--compare", "--repeats", 1)
    assert done.code == 0
    assert "K and d by goodput D=3" in done.out and "ideal model" not in done.out.lower()
    assert "K and d by goodput (K=" in done.err and "tokens identical" in done.err


def test_the_json_of_a_comparison_has_the_agreed_keys(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    arguments = ["--prompt", "a", "b", "--max-tokens", 12, "--compare", "--repeats", 2]
    arguments += ["--num-speculative-tokens", 2, "--draft-loops", 1, "--temperature", 1]
    assert generate(*arguments, "--json", file).code == 0
    document = json.loads(file.read_text())
    assert [set(o) for o in document["outputs"]] == [{"text", "token_ids", "finish_reason"}] * 2
    assert document["identical"] is True
    assert document["first_difference"] is None
    assert document["repeats"] == 2
    for way in ("plain", "speculative"):
        assert document[way]["tokens_per_second"] > 0
        assert len(document[way]["seconds"]) == 2
    speculative = document["speculative"]
    rate = speculative["draft_acceptance_rate"]
    assert 0 <= rate <= 1
    assert len(speculative["acceptance_by_position"]) == 2
    ratio = speculative["tokens_per_second"] / document["plain"]["tokens_per_second"]
    assert document["speedup"] == pytest.approx(ratio, rel=1e-3)
    assert document["predicted_speedup"] == pytest.approx(3 * (1 + 2 * rate) / 5, abs=1e-5)
    settings = ("full_loops", "num_speculative_tokens", "draft_loops")
    assert [document[key] for key in settings] == [3, 2, 1]
