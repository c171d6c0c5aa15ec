"""What the Huginn adapter takes from config.json, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from huginn_models import FOLDERS, read_config, without_weights
from looped_spec_huginn.adapter import HuginnAdapter
from looped_spec_huginn.config import read_config as sizes_of

from looped_spec.errors import ConfigError, ModelLoadError, UnsupportedError
from looped_spec.loading import build_adapter
from looped_spec.plugins import PluginManager

REQUIRED = (
    "vocab_size",
    "n_embd",
    "n_heads",
    "n_layers_in_prelude",
    "n_layers_in_recurrent_block",
    "n_layers_in_coda",
    "mean_recurrence",
    "intermediate_size",
    "block_size",
    "rope_base",
    "norm_eps",
    "qk_bias",
    "tie_embeddings",
)
PUBLISHED: dict[str, Any] = {
    "n_embd": 5280,
    "n_heads": 55,
    "num_key_value_heads": 55,
    "head_dim": 96,
    "intermediate_size": 17920,
    "vocab_size": 65536,
    "padded_vocab_size": 65536,
    "padding_multiple": 4096,
    "block_size": 4096,
    "mean_recurrence": 32,
    "init_values": {"std": 0.008703882797784892, "embed_scale": 72.66360849833398},
}


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [None, "12", -1, [4]], ids=str)
def test_a_missing_or_odd_field_is_named_with_its_value(name: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json: {name} must be .*, got") as caught:
        sizes_of(read_config(**{name: value}))
    assert str(caught.value).endswith(repr(value))


def test_the_published_sizes_give_the_published_parameters_planes_and_limits() -> None:
    adapter = without_weights(**PUBLISHED)
    assert sum(p.numel() for p in adapter.module.parameters()) == 3_564_976_800
    assert len(adapter.module.state_dict()) == 77 - 1  # all but the rotary table
    assert len(adapter.kv_planes(32)) == 132
    plane_numbers = sum(2 * plane.num_kv_heads * plane.head_dim for plane in adapter.kv_planes(32))
    assert plane_numbers * 2 / 1024 == pytest.approx(2722, abs=1)  # KiB a token in bf16
    assert adapter.geometry.default_full_loops == 32
    assert adapter.geometry.max_model_len == 4096
    assert adapter.extra_stop_token_ids == (65504, 65505, 65508)


@pytest.mark.parametrize("full_loops", [1, 8, 32])
def test_depth_may_go_up_to_four_times_the_mean(full_loops: int) -> None:
    geometry = without_weights().geometry
    assert geometry.default_full_loops == 8
    assert geometry.check_full_loops(full_loops) == full_loops
    with pytest.raises(ConfigError, match=r"full_loops must be between 1 and 32 .*, got 33"):
        geometry.check_full_loops(33)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_planes_of_a_shallow_run_are_the_first_of_a_deep_run(folder: Any) -> None:
    with_sizes = HuginnAdapter(read_config(folder), {})
    shallow, deep = with_sizes.kv_planes(1), with_sizes.kv_planes(6)
    assert deep[: len(shallow)] == shallow
    blocks = with_sizes.config.n_layers_in_recurrent_block
    assert len(deep) - len(shallow) == 5 * blocks
    assert [plane.kind for plane in shallow[-blocks:]] == ["loop"] * blocks


def test_usual_names_of_other_families_are_not_read() -> None:
    usual = {"num_hidden_layers": 3, "hidden_size": 999, "max_position_embeddings": 7}
    assert sizes_of(read_config(**usual)) == sizes_of(read_config())
    with pytest.raises(ModelLoadError, match="n_embd must be a positive integer, got None"):
        sizes_of(read_config(n_embd=None, hidden_size=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "n_embd must be an even multiple of n_heads = 5, got 64"),
        ({"n_heads": 64}, "n_embd must be an even multiple of n_heads = 64, got 64"),
        ({"n_layers": 9}, "n_layers must be 8 by the other sizes, got 9"),
        ({"head_dim": 8}, "head_dim must be 16 by the other sizes, got 8"),
        (
            {"padded_vocab_size": 100},
            "padded_vocab_size must be at least vocab_size = 128, got 100",
        ),
        ({"norm_eps": math.nan}, "norm_eps must be a positive number, got nan"),
        ({"n_embd": True}, "n_embd must be a positive integer, got True"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        sizes_of(read_config(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"injection_type": "add"}, "injection_type 'add' is not implemented (only 'linear')"),
        ({"state_init": "zero"}, "state_init 'zero' is not implemented (only 'like-init')"),
        ({"bias": True}, "bias True is not implemented (only False)"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name 'LayerNorm' is not implemented"),
        ({"block_class_name": "PreNormBlock"}, "block_class_name 'PreNormBlock' is not"),
        ({"mlp_class_name": "BaseMLP"}, "mlp_class_name 'BaseMLP' is not implemented"),
        ({"nonlin_name": "GELU"}, "nonlin_name 'GELU' is not implemented (only 'SiLU')"),
        ({"architecture_class_name": "GPT"}, "architecture_class_name 'GPT' is not implemented"),
        ({"test_time_noise": 0.5}, "test_time_noise 0.5 is not implemented (only 0)"),
        ({"num_key_value_heads": 2}, "grouped queries (num_key_value_heads 2, n_heads 4)"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling is not implemented"),
        ({"init_values": {"embed_scale": 1.0}}, "init_values.embed_scale 1.0 is not implemented"),
        ({"init_values": {"std": 0.02}}, "init_values.std 0.02 is not implemented"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, object], reason: str
) -> None:
    config = read_config(**changes)
    assert (HuginnAdapter.unsupported_reason(config) or "").startswith(reason)
    with pytest.raises(UnsupportedError, match="is not supported: "):
        build_adapter(config, "some-model", PluginManager(), {})


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'init_scal'.*did you mean 'init_scale'"):
        build_adapter(read_config(), "some-model", PluginManager(), {"init_scal": 0.0})


def test_the_vocabulary_is_padded_as_written_or_to_the_multiple() -> None:
    assert sizes_of(read_config(vocab_size=100)).padded_vocab_size == 128
    rounded = read_config(vocab_size=129, padded_vocab_size=None, padding_multiple=64)
    assert sizes_of(rounded).padded_vocab_size == 192
    with pytest.raises(
        ModelLoadError, match="padding_multiple must be a positive integer, got None"
    ):
        sizes_of(read_config(padded_vocab_size=None, padding_multiple=None))


def test_stop_ids_outside_a_small_vocabulary_are_left_out() -> None:
    assert without_weights().extra_stop_token_ids == ()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_golden_configurations_are_supported(folder: Any) -> None:
    assert HuginnAdapter.unsupported_reason(read_config(folder)) is None


@pytest.mark.parametrize("name", [name for name in REQUIRED if "layers" in name or "mean" in name])
@pytest.mark.parametrize("value", [1025, 10**9, 2**40])
def test_a_count_that_no_model_has_is_refused_before_anything_is_built(
    name: str, value: int
) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} must be at most 1024, got {value}"):
        sizes_of(read_config(**{name: value}))
