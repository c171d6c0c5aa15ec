"""The running mode of early exit, fed with a given text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import early_exit
import pytest
import torch
from exit_quality import follow, summarize
from torch.nn import functional as F

from looped_spec.runtime.early_exit import ExitRule
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits
from looped_spec.testing.toy import ToyAdapter, make_toy

RULE = ExitRule("gate", 0.85, 1, 4)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]


def spread_toy() -> ToyAdapter:
    """A toy whose tokens leave at different loops."""
    toy = make_toy(seed=3)
    with torch.no_grad():
        toy.module.exit_gate.weight.mul_(6.0)
    return toy


def test_fed_with_what_the_engine_wrote_it_makes_the_same_choices_at_the_same_depths() -> None:
    toy = spread_toy()
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    requests = run_all(make_engine(toy, exit_rule=RULE), PROMPTS, greedy)
    written = [request.output_token_ids for request in requests]
    rows = torch.tensor([p + new for p, new in zip(PROMPTS, written, strict=True)])
    _, loops, choices = follow(toy, rows, len(PROMPTS[0]), RULE)
    assert choices.tolist() == [new[1:] for new in written]
    assert loops.sum(dim=1).tolist() == [request.metrics.num_loop_rows for request in requests]
    assert len(set(loops.flatten().tolist())) >= 3


def test_without_exits_losses_are_those_of_a_plain_run() -> None:
    toy = spread_toy()
    rows = torch.randint(1, 30, (2, 14), generator=torch.Generator().manual_seed(0))
    losses, loops, _ = follow(toy, rows, 4, ExitRule("gate", math.inf, 1, 4))
    assert loops.unique().tolist() == [4]
    for row, found in zip(rows, losses, strict=True):
        logits = dense_logits(toy, row.tolist(), 4)
        expected = F.cross_entropy(logits[4:-1], row[5:], reduction="none")
        torch.testing.assert_close(found, expected)


def test_a_fixed_depth_lets_every_token_leave_there_and_the_summary_says_so() -> None:
    toy = spread_toy()
    rules = early_exit.rules([("gate", 0.5)], 4)
    assert list(rules) == [
        ("full depth", 4.0),
        *(("fixed depth", float(d)) for d in (1, 2, 3)),
        ("gate", 0.5),
    ]
    rows = torch.randint(1, 30, (2, 12), generator=torch.Generator().manual_seed(0))
    full = follow(toy, rows, 4, rules["full depth", 4.0])
    part = follow(toy, rows, 4, rules["fixed depth", 2.0])
    found = summarize([part], [full[2]], 4)
    assert (found.tokens, found.mean_loops, found.left_after) == (14, 2.0, (0, 14, 0, 0))
    assert found.loss == pytest.approx(float(part[0].mean()))
    assert found.agreement == pytest.approx(float((part[2] == full[2]).float().mean()))


def test_the_command_measures_quality_and_speed_of_a_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "g.jsonl"
    item = {"question": "Tom has 3 apples and buys 4 more.", "answer": "He has 3+4=7.\n#### 7"}
    text.write_text(json.dumps(item) + "\n")
    argv = ["--workload", f"w={text}", "--rows", "1", "--prompt-tokens", "8", "--row-tokens", "20"]
    argv += ["--exit", "gate", "0.5", "1.0", "--repeats", "1", "--max-tokens", "4"]
    assert early_exit.main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    full, gate = rows[0], [row for row in rows if row["criterion"] == "gate"]
    assert full["mean_loops"] == 4.0 and full["agreement"] == 1.0
    assert gate[0]["mean_loops"] < gate[1]["mean_loops"] == 4.0
    assert gate[1]["loss"] == pytest.approx(full["loss"])
    assert all(row["tokens_per_second"] > 0 for row in (full, *gate))
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)


def test_speed_alone_is_measured_of_full_depth_and_the_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "g.jsonl"
    item = {"question": "Tom has 3 apples and buys 4 more.", "answer": "He has 3+4=7.\n#### 7"}
    text.write_text(json.dumps(item) + "\n")
    argv = ["--workload", f"w={text}", "--rows", "0", "--prompt-tokens", "8", "--row-tokens", "20"]
    argv += ["--exit", "gate", "0.5", "--max-tokens", "4", "--repeats"]
    assert early_exit.main([*argv, "2", "--json", str(tmp_path / "out.json")]) == 0
    full, gate = json.loads((tmp_path / "out.json").read_text())["results"]
    assert full["loops_per_token_written"] == 4.0 > gate["loops_per_token_written"]
    assert gate["tokens_per_second_least"] <= gate["tokens_per_second"]
    assert early_exit.main([*argv, "0"]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def test_a_model_without_a_signal_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", "demo:nanbeige", "--exit", "gate", "0.5", "--workload", f"w={tmp_path}"]
    assert early_exit.main(argv) == 2
    assert "declares no signal for early exit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        (["gat", "0.5"], "must be one of gate, got 'gat' (did you mean 'gate'?)"),
        (["gate", "much"], "must be a number, got 'much'"),
        (["gate"], "at least one threshold"),
    ],
)
def test_a_mistaken_exit_is_one_line(
    exits: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert early_exit.main(["--exit", *exits]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
