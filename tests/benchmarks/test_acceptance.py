"""Draft acceptance on texts, as the engine counts it."""

from __future__ import annotations

import json
from pathlib import Path

import acceptance
import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "g.jsonl"
    names = ("Tom", "Ann", "Eva")
    items = [
        {"question": f"{name} has 3 apples and buys 4 more.", "answer": "3+4=7\n#### 7"}
        for name in names
    ]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_every_candidate_has_a_rate_and_the_tokens_of_plain_decoding(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--workload", f"gsm8k={text}", "--draft-tokens", "1", "3", "--draft-loops", "1", "3"]
    argv += ["--prompts", "2", "--prompt-tokens", "10", "--max-tokens", "12"]
    assert acceptance.main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    pairs = [(row["num_speculative_tokens"], row["draft_loops"]) for row in rows]
    assert pairs == [(1, 1), (3, 1), (1, 3), (3, 3)]
    for row in rows:
        assert row["identical_requests"] == row["requests"] == 2
        assert 0 <= row["draft_acceptance_rate"] <= 1
        assert row["mean_acceptance_length"] <= 1 + row["num_speculative_tokens"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| text | d | K = 1 | K = 3 |"
    assert lines[2] == (
        f"| gsm8k | 1 | {rows[0]['draft_acceptance_rate']:.2f} "
        f"| {rows[1]['draft_acceptance_rate']:.2f} |"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompt-tokens", "900"], "has 0 of at least 900 tokens, 1 are needed; give a longer"),
        (["--draft-loops", "4"], "draft_loops must be between 1 and full_loops - 1 = 3"),
        (["--prompts", "0"], "--prompts must be"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    change: list[str], message: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acceptance.main(["--workload", f"w={text}", *change]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
