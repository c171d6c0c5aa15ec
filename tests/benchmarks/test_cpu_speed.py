"""The benchmark of the CPU: each turn is kept at once, and a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_speed
import pytest
import torch
from cpu_model import CONFIG
from cpu_reference import Generate
from cpu_report import BEFORE, BF16, FP32
from kept_parts import KeptParts

from looped_spec.adapter import ModelAdapter
from looped_spec.errors import ConfigError
from looped_spec.layers.native import BuildError
from looped_spec.testing.oracle import dense_generate

TINY = CONFIG | {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FLAGS = [
    *("--batch-sizes", "1", "2", "--prompt", "4", "--tokens", "5", "--threads", "1"),
    *("--repeats", "2", "--stage-repeats", "1", "--draft-tokens", "1", "2"),
]
SESSION = {"command": ["this"]}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a tiny model, and nothing that has to be compiled or imported first."""

    def no_kernels() -> None:
        raise BuildError("not in this test")

    monkeypatch.setattr(cpu_speed, "CONFIG", TINY)
    monkeypatch.setattr(cpu_speed, "Kernels", no_kernels)
    monkeypatch.setattr(cpu_speed, "llama_generate", lambda _: None)
    monkeypatch.setattr(cpu_speed, "STAGE_ROWS", (1, 2, 8))


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_an_interrupted_run_keeps_its_turns_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, threads = tmp_path / "speed.json", torch.get_num_threads()
    complete, calls = cpu_speed.complete, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 11:  # the second turn of three ways at B = 1 was the ninth call, warm-up too
            raise KeyboardInterrupt
        return complete(*args)

    monkeypatch.setattr(cpu_speed, "complete", interrupted)
    assert cpu_speed.main([*FLAGS, "--json", str(out)]) == 130
    assert "--resume goes on" in capsys.readouterr().err
    before = read(out)
    assert not before["is_complete"]
    assert [row["batch_size"] for row in before["plain"]] == [1, 1, 1]
    assert before["speculation"] == [] and before["stages"] == {}

    monkeypatch.setattr(cpu_speed, "complete", complete)
    assert cpu_speed.main([*FLAGS, "--json", str(out)]) == 2
    assert "holds a run that was stopped" in capsys.readouterr().err
    assert cpu_speed.main([*FLAGS, "--acceptance", "0.5", "--json", str(out), "--resume"]) == 2
    assert "its acceptance is 0.9, this call's is 0.5" in capsys.readouterr().err
    assert read(out) == before

    assert cpu_speed.main([*FLAGS, "--json", str(out), "--resume"]) == 0
    captured = capsys.readouterr()
    assert "3 of 13 parts are kept" in captured.err
    assert "s left" in captured.err and "s left" not in captured.err.splitlines()[-1]
    assert captured.out.count("| B=2, ") == 3 + 2
    after = read(out)
    assert after["is_complete"] and len(after["sessions"]) == 2
    assert before["parts"].items() <= after["parts"].items()
    assert {(row["batch_size"], row["way"]) for row in after["plain"]} == {
        (b, way) for b in (1, 2) for way in (BEFORE, FP32, BF16)
    }
    assert {(row["batch_size"], row["K"]) for row in after["speculation"]} == {
        (b, k) for b in (1, 2) for k in (1, 2)
    }
    assert set(after["stages"]) == {BEFORE, FP32, BF16}
    assert torch.get_num_threads() == threads


def test_the_file_names_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, code = tmp_path / "speed.json", tmp_path / "official"
    monkeypatch.setattr(
        cpu_speed, "official_generate", lambda *_: lambda ids, n: [[0] * n for _ in ids]
    )
    flags = [*FLAGS, "--batch-sizes", "1", "--repeats", "1", "--draft-tokens", "1"]
    assert cpu_speed.main([*flags, "--official", f"{code}/", "--json", str(out)]) == 0
    document = read(out)
    assert str(tmp_path) not in out.read_text()
    assert document["settings"]["official"] is True
    assert document["command"][-3:] == ["official", "--json", "speed.json"]
    assert "ratio_to_official" in document["plain"][0]


@pytest.mark.parametrize("first_token_off", [0, 1])
def test_the_texts_that_are_compared_are_those_of_the_model_itself(
    first_token_off: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the benchmark forces for the sake of acceptance would equal nobody's."""
    out = tmp_path / "speed.json"

    def plain_oracle(_: Path, config: dict[str, Any], ours: ModelAdapter) -> Generate:
        def generate(prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
            texts = [dense_generate(ours, p, num_tokens, full_loops=4) for p in prompts]
            texts[0][0] += first_token_off
            return texts

        return generate

    monkeypatch.setattr(cpu_speed, "official_generate", plain_oracle)
    flags = [*FLAGS, "--repeats", "1", "--draft-tokens", "1", "--official", str(tmp_path)]
    assert cpu_speed.main([*flags, "--json", str(out)]) == 0
    share = 0.5 if first_token_off else 1.0
    assert read(out)["official_equal_texts"] == {BEFORE: share, BF16: share}


def test_a_file_without_parts_is_not_gone_on_with(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"plain": []}')
    with pytest.raises(ConfigError, match="holds no parts of a run"):
        KeptParts(old, {}, SESSION, dict, resume=True)
    with pytest.raises(ConfigError, match="give --json FILE"):
        KeptParts(None, {}, SESSION, dict, resume=True)
    KeptParts(old, {}, SESSION, dict).measure({"one": (1, lambda: {"ms": 1.0})})  # it may go
    assert read(old)["parts"] == {"one": {"ms": 1.0}}
