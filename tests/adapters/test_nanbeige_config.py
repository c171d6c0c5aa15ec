"""What the Nanbeige adapter reads from config.json, and what it refuses by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from looped_spec_nanbeige.adapter import NanbeigeAdapter
from looped_spec_nanbeige.config import count_loops
from nanbeige_models import RELEASE, TINY, tiny_config, write_tiny
from safetensors.torch import load_file, save_file

from looped_spec import LLM, SamplingParams
from looped_spec.errors import ModelLoadError, UnsupportedError
from looped_spec.loading import load_adapter
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.oracle import dense_logits

TOKENS = [5, 9, 2, 7, 7, 1]


def _build(config: dict[str, Any]) -> NanbeigeAdapter:
    with torch.device("meta"):
        return NanbeigeAdapter(config, {})


@pytest.mark.parametrize(
    ("changes", "loops"),
    [
        ({}, 2),
        ({"num_loops": 3}, 3),
        ({"loop_loss_weights": [0.1]}, 2),
        ({"loop_loss_weights": [0.1, 0.2, 0.3], "num_loops": 2}, 4),
        ({"loop_loss_weights": [0.1, 0.2], "num_loops": None}, 3),
        ({"loop_loss_weights": None}, 2),
    ],
)
def test_the_loop_count_follows_the_official_precedence(
    changes: dict[str, Any], loops: int
) -> None:
    adapter = _build({**RELEASE, **changes})
    assert adapter.geometry.default_full_loops == adapter.geometry.max_full_loops == loops
    assert len(adapter.kv_planes(loops)) == 22 * loops


def test_loop_split_counts_as_one_loop_before_anything_else() -> None:
    config = {**RELEASE, "enable_double_loop_split": True, "loop_loss_weights": [0.5]}
    assert count_loops(config) == 1


@pytest.mark.parametrize(
    "changes", [{"loop_loss_weights": 0.5}, {"num_loops": 0}, {"num_loops": None}]
)
def test_a_loop_count_that_cannot_be_read_names_its_field(changes: dict[str, Any]) -> None:
    (field,) = changes
    with pytest.raises(ModelLoadError, match=rf"config\.json: {field} must be"):
        _build({**RELEASE, **changes})


@pytest.mark.parametrize("listed", [22, 44])
def test_physical_layers_are_those_with_weights_however_many_are_listed(listed: int) -> None:
    adapter = _build({**RELEASE, "num_physical_layers": 22, "num_hidden_layers": listed})
    assert len(adapter.module.model.layers) == 22
    assert len(adapter.kv_planes(2)) == 44


def test_layer_counts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="num_hidden_layers must be num_physical_layers 22"):
        _build({**RELEASE, "num_physical_layers": 22, "num_hidden_layers": 66})


def test_an_unrolled_layer_count_alone_does_not_fit_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"missing: model\.layers\.3"):
        load_adapter(write_tiny(tmp_path / "model", num_hidden_layers=6))


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
    ],
)
def test_no_size_is_guessed(field: str) -> None:
    config = {key: value for key, value in RELEASE.items() if key != field}
    with pytest.raises(ModelLoadError, match=rf"config\.json: {field} must be a positive"):
        _build(config)


def test_heads_must_share_keys_evenly() -> None:
    with pytest.raises(ModelLoadError, match="num_attention_heads 48 must be a multiple"):
        _build({**RELEASE, "num_key_value_heads": 9})


def test_theta_may_stand_in_the_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 70000000.0}
    folder = write_tiny(tmp_path / "model", rope_theta=None, rope_parameters=rope)
    expected = dense_logits(load_adapter(TINY).adapter, TOKENS, 2)
    assert torch.equal(dense_logits(load_adapter(folder).adapter, TOKENS, 2), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"quantization_config": None, "loop_middle_layers": None, "emb_neighbor_num": None},
        {"depth_attention_static_anchor_once": True, "num_residual_streams": 4},
        {"mhc_sinkhorn_iterations": 20, "ngram_fused_mode": "average", "no_repeat_ngram_size": 3},
        {"skip_loop_final_norm": True, "loop_loss_weights": [0.5]},
        {"rope_scaling": {"rope_type": "default"}},
        {"use_cache": True, "auto_map": {"AutoConfig": "configuration_nanbeige.NanbeigeConfig"}},
    ],
)
def test_what_the_release_has_is_supported(changes: dict[str, Any]) -> None:
    assert NanbeigeAdapter.unsupported_reason({**RELEASE, **changes}) is None
    assert NanbeigeAdapter.unsupported_reason(tiny_config(**changes)) is None


@pytest.mark.parametrize(
    ("field", "value", "feature"),
    [
        ("enable_double_loop_split", True, "LoopSplit"),
        ("loop_middle_layers", 6, "LoopSplit"),
        ("loop_share_kv", True, "sharing keys and values between loops"),
        ("enable_mhc", True, "mHC"),
        ("enable_hyper_connection", True, "hyper-connections"),
        ("enable_h_res_identity", True, "hyper-connections"),
        ("mhc_diff_for_loop", True, "mHC"),
        ("enable_depth_attention", True, "depth attention"),
        ("insert_ngram_layer_idx", [0, 3], "n-gram embeddings"),
        ("ngram_insert_all_layers", True, "n-gram embeddings"),
        ("ngram_vocab_size_ratio", 2, "n-gram embeddings"),
        ("emb_neighbor_num", 2, "n-gram embeddings"),
        ("qk_layernorm", True, "a norm of queries and keys"),
        ("attention_bias", True, "biases of the attention projections"),
        ("mlp_bias", True, "biases of the feed-forward projections"),
        ("sliding_window", 4096, "sliding-window attention"),
        ("moe", {"num_experts": 8}, "a mixture of experts"),
        ("tie_word_embeddings", True, "a head tied to the embedding"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, "rope scaling"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "rope scaling"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}, "rope scaling"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "partial rotation"),
        ("partial_rotary_factor", 0.5, "must be 1.0"),
        ("hidden_act", "gelu", "only silu"),
        ("enable_something_new", True, "an unknown feature"),
        ("loop_something_new", [1, 2], "an unknown way to loop"),
        ("depth_attention_new_switch", True, "depth attention"),
    ],
)
def test_what_is_not_implemented_is_refused_by_field_and_value(
    field: str, value: Any, feature: str
) -> None:
    reason = NanbeigeAdapter.unsupported_reason({**RELEASE, field: value})
    assert reason is not None
    assert reason.startswith(f"{field} is {value!r}: ")
    assert feature in reason


@pytest.mark.parametrize("method", ["fp8", "gptq", "compressed-tensors"])
def test_quantised_weights_are_refused_with_their_method(method: str) -> None:
    config = {**RELEASE, "quantization_config": {"quant_method": method, "bits": 8}}
    reason = NanbeigeAdapter.unsupported_reason(config)
    assert reason is not None
    assert f"quant_method '{method}': quantised weights are not implemented" in reason


def test_a_refused_config_ends_before_weights_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(enable_mhc=True)))
    with pytest.raises(UnsupportedError, match=r"not supported: enable_mhc is True: .*mHC"):
        LLM(str(tmp_path))


def test_weights_of_a_feature_that_no_field_names_do_not_load(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_layernorm.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"unexpected: .*q_layernorm"):
        load_adapter(folder)


def test_there_is_no_early_exit_and_asking_for_one_says_so() -> None:
    adapter = _build(tiny_config())
    assert adapter.capabilities.early_exit == ()
    state = (torch.zeros(1, 1, 48),)
    with pytest.raises(
        UnsupportedError, match="NanbeigeAdapter has no early-exit criterion 'gate'"
    ):
        adapter.exit_score("gate", state, state, None, 0, DenseContext(1, 1, 2))


def test_speculation_is_off_unless_asked_for_and_the_user_reads_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="looped_spec")
    llm = LLM(str(TINY))
    assert llm.speculation.num_speculative_tokens == 0
    notes = [r.getMessage() for r in caplog.records if "speculation is off" in r.getMessage()]
    assert len(notes) == 1
    assert "try num_speculative_tokens=1 draft_loops=1" in notes[0]
    caplog.clear()
    asked = LLM(str(TINY), num_speculative_tokens=1)
    assert (asked.speculation.num_speculative_tokens, asked.speculation.draft_loops) == (1, 1)
    assert not any("off by default" in record.getMessage() for record in caplog.records)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    plain, drafted = (m.generate([TOKENS], params, use_tqdm=False)[0] for m in (llm, asked))
    assert plain.outputs[0].token_ids == drafted.outputs[0].token_ids
    assert asked.stats()["num_draft_tokens"] > 0


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_physical_layers", "num_loops"])
@pytest.mark.parametrize("value", [1025, 10**9, 2**40])
def test_a_count_that_no_model_has_is_refused_before_anything_is_built(
    field: str, value: int
) -> None:
    with pytest.raises(ModelLoadError, match=f"{field} must be at most 1024, got {value}"):
        _build({**RELEASE, field: value})


def test_more_loop_loss_weights_than_loops_of_any_model_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="loop_loss_weights must be at most 1024, got 1025"):
        _build({**RELEASE, "loop_loss_weights": [0.1] * 1024})


def test_an_odd_head_dim_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="head_dim must be even, got 127"):
        _build({**RELEASE, "head_dim": 127})


def test_rope_parameters_that_are_no_object_are_named() -> None:
    reason = NanbeigeAdapter.unsupported_reason({**RELEASE, "rope_parameters": [1]})
    assert reason == "rope_parameters is [1]: only an object is understood"
