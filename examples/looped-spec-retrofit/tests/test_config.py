"""config.json: what is read, what is refused by name, and what is left over in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from looped_spec import LLM
from looped_spec.errors import LoopedSpecError, UnsupportedError
from looped_spec.loading import load_adapter
from safetensors.torch import load_file, save_file

from looped_spec_retrofit.adapter import RetrofitAdapter
from looped_spec_retrofit.config import read_config
from looped_spec_retrofit.convert import INIT_STD, recurrent_config
from looped_spec_retrofit.tiny import tiny_config, write_tiny

# As published by Meta: config.json of Llama-3.2-1B.
LLAMA_3_2_1B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
PUBLISHED_LAYERS = {"prelude": range(0, 4), "core": range(6, 12), "coda": range(12, 16)}


@pytest.fixture(scope="module")
def published() -> RetrofitAdapter:
    """The shape of Recurrent-Llama-3.2-train-recurrence-16, without weights."""
    config = recurrent_config(LLAMA_3_2_1B, {k: list(v) for k, v in PUBLISHED_LAYERS.items()}, 16)
    with torch.device("meta"):
        return RetrofitAdapter(config, {})


def test_the_published_shape_has_as_many_parameters_as_the_published_model(
    published: RetrofitAdapter,
) -> None:
    count = sum(parameter.numel() for parameter in published.module.parameters())
    assert count == 1_385_228_288


def test_the_published_shape_has_a_plane_for_each_layer_that_runs(
    published: RetrofitAdapter,
) -> None:
    planes = published.kv_planes(16)
    assert len(planes) == 4 + 16 * 6 + 4
    assert {(plane.num_kv_heads, plane.head_dim) for plane in planes} == {(8, 64)}
    assert published.geometry.default_full_loops == 16
    assert published.geometry.max_full_loops == 64
    assert published.geometry.max_model_len == 131072


def test_checkpoint_tensors_have_the_published_names(published: RetrofitAdapter) -> None:
    names = set(published.checkpoint_layout())
    assert len(names) == 4 + 14 * 6
    assert {
        "transformer.wte.weight",
        "transformer.adapter.weight",
        "transformer.ln_f.weight",
        "lm_head.weight",
        "transformer.prelude.3.norm_1.weight",
        "transformer.core_block.5.attn.Wqkv.weight",
        "transformer.core_block.5.attn.proj.weight",
        "transformer.coda.0.norm_2.weight",
        "transformer.coda.0.mlp.fc.weight",
        "transformer.coda.0.mlp.proj.weight",
    } < names
    assert not published.optional_checkpoint_tensors()


def test_a_shallow_model_may_be_run_as_deep_as_the_paper_does() -> None:
    assert RetrofitAdapter(tiny_config(mean_recurrence=4), {}).geometry.max_full_loops == 32


def test_the_deviation_of_the_initial_state_is_that_of_the_file() -> None:
    assert tiny_config()["init_values"]["std"] == pytest.approx((2 / (5 * 5280)) ** 0.5)
    assert read_config(tiny_config()).init_std == INIT_STD


def test_left_over_fields_mean_nothing() -> None:
    plain = read_config(tiny_config())
    assert read_config(tiny_config(rope_base=50000, block_size=16, eos_token_id=65505)) == plain


def test_the_spelling_of_transformers_5_is_read_too() -> None:
    config = tiny_config()
    rope = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
    assert read_config({**config, "rope_parameters": rope}) == read_config(tiny_config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_bias": True}, "qk_bias True is not implemented"),
        ({"bias": True}, "bias True is not implemented"),
        ({"injection_type": "add"}, "injection_type 'add' is not implemented"),
        ({"state_init": "zero"}, "state_init 'zero' is not implemented"),
        ({"block_class_name": "TransformerPreNormBlock"}, "block_class_name 'TransformerPreNorm"),
        ({"nonlin_name": "GELU"}, "nonlin_name 'GELU' is not implemented"),
        ({"test_time_noise": 0.1}, r"test_time_noise 0\.1 is not implemented"),
        ({"init_values": {"std": 0.1, "embed_scale": 72.6}}, r"init_values\.embed_scale 72\.6"),
        ({"init_values": None}, r"init_values\.embed_scale None"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not implemented"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    reason = RetrofitAdapter.unsupported_reason(tiny_config(**changes))
    assert reason is not None
    assert re.search(message, reason), reason


def test_a_refused_model_ends_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps(tiny_config(test_time_noise=1)))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="not supported: test_time_noise 1 is not impl"):
        LLM(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 3}, "n_embd must be an even multiple of n_heads = 3, got 32"),
        ({"num_key_value_heads": 3}, "n_heads must be a multiple of num_key_value_heads = 3"),
        ({"padded_vocab_size": 8}, "padded_vocab_size must be at least vocab_size = 98"),
        ({"n_layers": 8}, "n_layers must be 4 by the other sizes, got 8"),
        ({"head_dim": 16}, "head_dim must be 8 by the other sizes, got 16"),
        ({"mean_recurrence": 0}, "mean_recurrence must be a positive integer, got 0"),
        ({"n_layers_in_coda": 10**9}, "n_layers_in_coda must be at most 1024"),
        ({"rope_theta": None}, "rope_theta must be a positive number, got None"),
        ({"init_values": {"embed_scale": 1.0}}, "std must be a positive number, got None"),
        ({"tie_embeddings": None}, "tie_embeddings must be true or false, got None"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor must be a positive number, got None"),
    ],
)
def test_sizes_that_make_no_sense_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoopedSpecError, match=message):
        read_config(tiny_config(**changes))


def test_a_checkpoint_with_a_norm_of_queries_and_keys_is_refused(tmp_path: Path) -> None:
    """Conversions of OLMo-2 have the same config.json fields but other blocks."""
    folder = write_tiny(tmp_path / "olmo")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.coda.0.attn.q_norm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LoopedSpecError, match=r"1 unexpected: .*attn\.q_norm\.weight"):
        load_adapter(folder, device="cpu")


@pytest.mark.parametrize("value", [-1, float("inf"), "1", True, None])
def test_a_bad_initial_scale_is_refused_by_name(tiny: Path, value: object) -> None:
    with pytest.raises(LoopedSpecError, match="init_scale must be a finite number of at least 0"):
        LLM(str(tiny), adapter_options={"init_scale": value})
