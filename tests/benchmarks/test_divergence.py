"""Where texts leave plain decoding, and how near that was."""

from __future__ import annotations

import json
from pathlib import Path

import divergence
import pytest
import torch
from divergence import ExactLogits

from looped_spec import LLM

SHORT = ["--prompts", "3", "--max-tokens", "6", "--draft-tokens", "2", "--draft-loops", "1"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo:ouro", device="cpu", dtype="float32", num_threads=1, max_num_seqs=2)


def test_the_best_tokens_in_fp32_are_those_of_greedy_decoding(llm: LLM) -> None:
    prompts = [[5, 6, 7, 8], [9]]
    texts = divergence.complete(llm, divergence.PLAIN, 2, prompts, 8)
    exact = ExactLogits("demo:ouro", llm.full_loops, torch.float32, "cpu")
    for prompt, text in zip(prompts, texts, strict=True):
        margins, tokens = exact.best_two(prompt, text)
        assert tokens[:, 0].tolist() == text
        assert margins.shape == (8,) and float(margins.min()) >= 0


def test_a_difference_has_its_place_its_margin_and_whether_it_is_a_near_tie(llm: LLM) -> None:
    prompts = [[5, 6, 7, 8], [9], [3, 4]]
    plain = divergence.complete(llm, divergence.PLAIN, 3, prompts, 6)
    exact = ExactLogits("demo:ouro", llm.full_loops, torch.float32, "cpu")
    margins, tokens = exact.best_two(prompts[0], plain[0])
    _, others = exact.best_two(prompts[2], plain[2])
    second = int(tokens[3, 1])
    wild = next(t for t in range(50) if t not in others[1].tolist())
    found = [[*plain[0][:3], second, 1, 1], plain[1], [plain[2][0], wild, *plain[2][2:]]]
    one, other = divergence.differences(plain, found, prompts, exact)
    assert (one.request, one.position, one.both_best) == (0, 3, True)
    assert one.margin == pytest.approx(float(margins[3]), abs=1e-6)
    assert (other.request, other.position, other.both_best) == (2, 1, False)


def test_the_weights_are_rounded_to_the_dtype_that_ran() -> None:
    exact = ExactLogits("demo:ouro", 4, torch.bfloat16, "cpu")
    for parameter in exact._adapter.module.parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameter.bfloat16().float())


def test_a_run_writes_a_row_for_every_setting_and_all_texts_are_one_in_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    argv = [*SHORT, "--dtypes", "float32", "--batch-sizes", "1", "3", "--json", str(path)]
    assert divergence.main(argv) == 0
    document = json.loads(path.read_text())
    settings = [
        (row["batch_size"], row["num_speculative_tokens"], row["draft_loops"])
        for row in document["results"]
    ]
    assert settings == [(1, 0, 0), (1, 2, 1), (3, 0, 0), (3, 2, 1)]
    for row in document["results"]:
        assert row["equal_to_plain"] == row["equal_to_plain_alone"] == row["requests"] == 3
        assert row["differences"] == []
    facts = document["dtypes"]["float32"]
    assert facts["attention_backend"] == "sdpa" and facts["margins"]["positions"] == 18
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 and lines[3].startswith("| float32, B = 1, K = 2, d = 1 | 3 of 3 |")


def test_the_table_shows_where_and_how_near() -> None:
    differences = [
        {"request": 0, "position": 4, "margin": 0.02, "both_best": True},
        {"request": 2, "position": 9, "margin": 0.3, "both_best": False},
    ]
    row = {
        **{"dtype": "bfloat16", "batch_size": 8, "num_speculative_tokens": 2, "draft_loops": 1},
        **{"requests": 5, "equal_to_plain": 3, "equal_to_plain_alone": 2},
        "differences": differences,
    }
    assert divergence.table([row]).splitlines()[2] == (
        "| bfloat16, B = 8, K = 2, d = 1 | 3 of 5 | 2 of 5 | 6.5 (4) | 0.1600 (0.3000) | 1 of 2 |"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--dtypes", "bf16"], "dtype must be auto, float32, bfloat16"),
        (["--batch-sizes", "0"], "--batch-sizes must be at least 1, got 0"),
        (["--draft-loops", "9"], "draft_loops must be between 1 and full_loops - 1"),
        (["--attention-backend", "flash_attn", "--device", "cpu"], "it needs a CUDA device"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert divergence.main([*SHORT, *change]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
