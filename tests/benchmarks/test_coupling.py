"""Acceptance of a draft with shared noise, beside the optimal coupling."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import coupling
import pytest
import torch
from torch import Tensor

from looped_spec.testing.oracle import dense_logits
from looped_spec.testing.toy import make_toy

DRAWS = 200_000
FIVE_DEVIATIONS = 5 * 0.5 / DRAWS**0.5  # of a share, whose deviation is at most 0.5


def distributions(sharpness: float, vocab: int = 7, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(int(10 * sharpness))
    logits = sharpness * torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1)
    return p, q


def shared_by_the_sum(p: Tensor, q: Tensor) -> float:
    """The formula as it is derived, term by term."""
    total = 0.0
    for i, _ in enumerate(p):
        if p[i] > 0 and q[i] > 0:
            total += 1 / float(torch.maximum(p / p[i], q / q[i]).sum())
    return total


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0, 20.0])
def test_running_sums_equal_the_sum_over_all_pairs(sharpness: float) -> None:
    p, q = distributions(sharpness)
    expected = torch.tensor([shared_by_the_sum(*pair) for pair in zip(p, q, strict=True)])
    torch.testing.assert_close(
        coupling.shared_noise_acceptance(p, q), expected.double(), rtol=1e-5, atol=1e-7
    )


def test_tokens_without_probability_count_nothing() -> None:
    p = torch.tensor([[0.5, 0.0, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]])
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.5, 0.0]])
    expected = [shared_by_the_sum(*pair) for pair in zip(p, q, strict=True)]
    assert coupling.shared_noise_acceptance(p, q).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
def test_shared_gumbel_noise_agrees_as_often_as_the_formula_says(sharpness: float) -> None:
    p, q = (x[0] for x in distributions(sharpness))
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(DRAWS, len(p), generator=generator, dtype=torch.float64)
    noise = -torch.log(-torch.log(uniform))
    same = (p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)
    expected = coupling.shared_noise_acceptance(p, q).item()
    assert same.double().mean().item() == pytest.approx(expected, abs=FIVE_DEVIATIONS)


def test_the_noise_of_the_engine_agrees_as_often_as_the_formula_says() -> None:
    logits = 1.5 * torch.randn(2, 40, 11, generator=torch.Generator().manual_seed(2))
    temperature, seeds = 0.7, range(500)
    p, q = (logits.double() / temperature).softmax(-1)
    first, second = (coupling.engine_choices(x, 3, temperature, seeds) for x in logits)
    measured = (first == second).double().mean().item()
    expected = coupling.shared_noise_acceptance(p, q).mean().item()
    deviation = 0.5 / (40 * len(seeds)) ** 0.5
    assert measured == pytest.approx(expected, abs=5 * deviation)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0, 30.0])
def test_shared_noise_lies_between_its_bound_and_the_optimum(sharpness: float) -> None:
    p, q = distributions(sharpness, vocab=50, rows=200)
    optimal = coupling.optimal_acceptance(p, q)
    shared = coupling.shared_noise_acceptance(p, q)
    distance = 0.5 * (p - q).abs().sum(-1)
    rounding = 1e-9  # of sums of 50 terms in fp64
    assert torch.allclose(optimal, 1 - distance)
    assert bool((shared <= optimal + rounding).all())
    assert bool((shared >= (1 - distance) / (1 + distance) - rounding).all())


def test_equal_distributions_always_agree_and_disjoint_ones_never() -> None:
    p, _ = distributions(2.0)
    apart = torch.cat((p, torch.zeros_like(p)), -1), torch.cat((torch.zeros_like(p), p), -1)
    for rate in (coupling.optimal_acceptance, coupling.shared_noise_acceptance):
        assert rate(p, p).tolist() == pytest.approx([1.0] * len(p))
        assert rate(*apart).tolist() == [0.0] * len(p)


def test_spans_hold_exactly_the_positions_asked_for() -> None:
    documents = [list(range(10)), list(range(100, 103)), list(range(200, 230))]
    spans = coupling.cut(documents, 4, 15)
    assert [span.tokens for span in spans] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [100, 101, 102],
        [200, 201],
    ]
    assert sum(len(span.tokens) for span in coupling.cut(documents, 4, 1000)) == 43


def test_logits_of_a_depth_are_those_of_a_run_that_stops_there() -> None:
    toy, tokens = make_toy(), [5, 9, 2, 40, 7]
    found = coupling.logits_by_depth(toy, tokens, (1, 3), 4)
    assert sorted(found) == [1, 3, 4]
    for depth, logits in found.items():
        torch.testing.assert_close(logits, dense_logits(toy, tokens, depth))


def test_a_model_is_measured_from_text_to_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, numbers = tmp_path / "some.txt", tmp_path / "numbers.json"
    text.write_text("Question: Ann has 3 apples and buys 4 more. How many has she?\n" * 4)
    sizes = ["--positions", "40", "--seeds", "2", "--engine-seeds", "1", "--max-tokens", "6"]
    arguments = ["--text", str(text), *sizes, "--draft-loops", "1", "2", "--json", str(numbers)]
    assert coupling.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(numbers.read_text())
    rows = document["results"]
    assert len(lines) == 2 + len(rows)
    assert [(row["text"], row["draft_loops"]) for row in rows] == list(
        itertools.product(("some.txt", coupling.ENGINE_TEXT), (1, 2))
    )
    assert [row["positions"] for row in rows] == [40, 40, 40, 40]  # 8 prompts, 5 drafts each
    for row in rows:
        assert row["expected"]["mean"] <= row["optimal"]["mean"] <= 1
        assert ("engine" in row) == (row["text"] == coupling.ENGINE_TEXT)
    assert document["texts"]["some.txt"]["bytes"] == text.stat().st_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to measure"),
        (["--text", "missing.txt"], "cannot read missing.txt"),
        (["--text", "some.txt", "--temperature", "0"], "--temperature must be above 0, got 0"),
        (["--text", "some.txt", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--text", "some.txt", "--draft-loops", "9"], "draft_loops must be between 1 and"),
        (["--text", "some.txt", "some.txt"], "two texts are named some.txt"),
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
    Path("some.txt").write_text("some text")
    assert coupling.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1
