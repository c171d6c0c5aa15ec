"""A converted model, before any training, computes what the Llama without its dropped layers does.

The Llama is that of transformers, which shares no code with this plugin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from looped_spec.errors import LoopedSpecError
from looped_spec.loading import load_adapter
from looped_spec.testing.oracle import dense_logits
from transformers import LlamaConfig, LlamaForCausalLM

from looped_spec_retrofit.convert import convert, layer_numbers, main, recurrent_config
from looped_spec_retrofit.tiny import LLAMA

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
LAYERS = {"prelude": (0, 1), "core": (3, 4), "coda": (5,)}
DROPPED = 2

SHAPES: dict[str, dict[str, Any]] = {
    "scaled": {},
    "not scaled": {"rope_scaling": None},
    "tied head": {"tie_word_embeddings": True},
    "all key heads": {"num_key_value_heads": 4},
}


def make_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a tiny Llama with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
        config = LlamaConfig(**{"tie_word_embeddings": False, **settings, **changes})
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("changes", SHAPES.values(), ids=list(SHAPES))
@torch.no_grad()
def test_a_converted_model_is_the_llama_without_its_dropped_layers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    llama = make_llama(**changes)
    llama.save_pretrained(tmp_path / "llama")
    adapter = load_adapter(convert(tmp_path / "llama", tmp_path / "out", LAYERS)).adapter
    del llama.model.layers[DROPPED]
    expected = llama(torch.tensor([TOKENS]), use_cache=False).logits[0]
    for loops in (1, 3):
        got = dense_logits(adapter, TOKENS, loops, seed=7)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_the_dropped_layer_would_be_missed(tmp_path: Path) -> None:
    llama = make_llama()
    llama.save_pretrained(tmp_path / "llama")
    adapters = [
        load_adapter(convert(tmp_path / "llama", tmp_path / name, layers)).adapter
        for name, layers in (("a", LAYERS), ("b", {**LAYERS, "core": (2, 3, 4)}))
    ]
    dropped, whole = (dense_logits(adapter, TOKENS, 1) for adapter in adapters)
    assert float((dropped - whole).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prelude", "0", "--core", "1-6", "--coda", "5"], "core: the model has layers 0 to 5"),
        (["--prelude", "3-1", "--core", "1", "--coda", "2"], "prelude needs at least one layer"),
        (
            ["--prelude", "0", "--core", "1", "--coda", "2", "--mean-recurrence", "0"],
            "mean_recurrence must be at least 1",
        ),
    ],
)
def test_a_bad_choice_of_layers_ends_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_llama().save_pretrained(tmp_path / "llama")
    capsys.readouterr()
    assert main([str(tmp_path / "llama"), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_converts_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_llama().save_pretrained(tmp_path / "llama")
    arguments = [str(tmp_path / "llama"), str(tmp_path / "out")]
    arguments += ["--prelude", "0-1", "--core", "3,4", "--coda", "5", "--mean-recurrence", "7"]
    assert main(arguments) == 0
    assert load_adapter(tmp_path / "out").adapter.geometry.default_full_loops == 7
    assert main(arguments) == 2
    assert "holds a model already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"head_dim": 16}, "head_dim 16 is not hidden_size"),
        ({"model_type": "qwen3"}, "only a llama can be converted, not a 'qwen3'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ],
)
def test_a_llama_with_other_parts_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoopedSpecError, match=message):
        recurrent_config({**LLAMA, **changes}, LAYERS, 4)


def test_layers_are_read_as_ranges_and_lists() -> None:
    assert layer_numbers("0-3") == (0, 1, 2, 3)
    assert layer_numbers("7") == (7,)
    assert layer_numbers("0-1,6") == (0, 1, 6)
    with pytest.raises(ValueError):
        layer_numbers("x")
