"""Flags of who chooses K and d, and `--explain`, which says what was chosen and why."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_runs import Generate

from looped_spec import AdaptiveSpecConfig
from looped_spec.cli.explain import explain_text
from looped_spec.control.config import BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import PLAIN, Candidate

ARGUMENTS = ("--prompt", "the cat", "--max-tokens", 24)
LOOPS = 3
CONFIG = AdaptiveSpecConfig(
    LOOPS, (BatchBucket(1, 32, (PLAIN, Candidate(5, 2))),), policy="goodput"
)


def test_the_reasons_follow_the_summary_on_stderr_and_change_no_text(generate: Generate) -> None:
    plain = generate(*ARGUMENTS, "--num-speculative-tokens", 0)
    done = generate(*ARGUMENTS, "--explain")
    assert done.code == 0
    assert done.out == plain.out
    summary, policy, head, _, *rows, counts = done.err.splitlines()
    assert summary.startswith("looped-spec: 24 tokens in ") and "K and d by goodput (K=" in summary
    assert policy == "policy goodput"
    assert head.startswith("batch size 1 to 1: K=")
    assert any(row.startswith("  K=0 d=0 ") or row.startswith("> K=0 d=0 ") for row in rows)
    assert sum(row.startswith("> K=") for row in rows) == 1
    assert counts.endswith(" 0 late or unknown feedback")


def test_only_ranges_that_had_rounds_are_shown(generate: Generate) -> None:
    arguments = ["--prompt", "a", "b", "c", "--max-tokens", 12]
    heads = [
        line
        for line in generate(*arguments, "--explain").err.splitlines()
        if line.startswith("batch size ")
    ]
    assert heads and all(not head.startswith("batch size 5 ") for head in heads)


def test_the_json_carries_the_reasons_for_every_range(generate: Generate) -> None:
    document = json.loads(generate(*ARGUMENTS, "--explain", "--json").out)
    speculation = document["explain"]["speculation"]
    assert speculation["policy"] == document["policy"] == "goodput"
    assert speculation["buckets"][0]["min_batch_size"] == 1
    assert speculation["buckets"][-1]["max_batch_size"] == 32
    rounds = document["speculative"]["rounds_by_candidate"]
    assert document["explain"]["controller"]["plans"] == sum(count for _, _, count in rounds)
    assert document["num_speculative_tokens"] is None
    assert "explain" not in json.loads(generate(*ARGUMENTS, "--json").out)


def test_the_same_k_in_every_round_is_explained_too(generate: Generate) -> None:
    done = generate(*ARGUMENTS, "--num-speculative-tokens", 2, "--explain")
    assert done.err.splitlines()[1:] == [
        "policy static",
        "batch size 1 to 32: K=2 d=2, pinned",
    ]


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        (["--policy", "ema"], "ema"),
        (["--policy", "static"], "static"),
        (["--speculative-adaptive"], "goodput"),
        (["--no-speculative-adaptive"], "static"),
        (["--speculative-config", '{"num_speculative_tokens": 1}'], "static"),
    ],
)
def test_each_flag_decides_who_chooses(generate: Generate, flags: list[str], policy: str) -> None:
    assert json.loads(generate(*ARGUMENTS, *flags, "--json").out)["policy"] == policy


def test_a_configuration_is_read_from_a_file(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(CONFIG.to_json()))
    done = generate(*ARGUMENTS, "--speculative-adaptive-config", file, "--json")
    rounds = json.loads(done.out)["speculative"]["rounds_by_candidate"]
    assert {(k, d) for k, d, _ in rounds} <= {(0, 0), (5, 2)}


@pytest.mark.parametrize(
    ("flags", "one", "other"),
    [
        (
            ["--num-speculative-tokens", 1, "--speculative-adaptive"],
            "num_speculative_tokens",
            "speculative_adaptive",
        ),
        (
            ["--no-speculative-adaptive", "--policy", "ema"],
            "speculative_adaptive=False",
            "policy='ema'",
        ),
        (
            ["--speculative-config", "{}", "--num-speculative-tokens", 1],
            "speculative_config",
            "num_speculative_tokens",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_one_line_that_names_both(
    generate: Generate, flags: list[object], one: str, other: str
) -> None:
    done = generate(*ARGUMENTS, *flags)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert one in done.err and other in done.err


def test_candidates_that_all_score_nothing_are_shown_without_a_share_of_the_best() -> None:
    controller = AdaptiveController(AdaptiveSpecConfig.default(LOOPS, 1, policy="ema"))
    llm: Any = SimpleNamespace(explain=controller.explain, stats=lambda: {"controller": None})
    rows = [line for line in explain_text(llm).splitlines() if " d=" in line][1:]
    assert len(rows) > 1
    assert all(row.endswith("-") for row in rows)
