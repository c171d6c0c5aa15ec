"""config.json of a Nanbeige model: its sizes, its loop count, and what of it is not implemented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looped_spec.errors import ModelLoadError
from looped_spec.model_config import check_count, read_sizes
from looped_spec_nanbeige.model import NanbeigeConfig

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",  # never hidden_size / heads: the release has 128 where that gives 64
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
}

# Any true, non-zero or non-empty value of one of these changes the network.
_FEATURES = {
    "enable_double_loop_split": "LoopSplit",
    "loop_middle_layers": "LoopSplit",
    "loop_middle_repeats": "LoopSplit",
    # Tokens of one pass see each other at the same loop, tokens one by one each other's last loop.
    "loop_share_kv": "sharing keys and values between loops, by which speculation would change the "
    "text (tokens verified in one pass see other keys than tokens decoded one by one),",
    "enable_mhc": "hyper-connections (mHC)",
    "enable_hyper_connection": "hyper-connections",
    "enable_h_res_identity": "hyper-connections",
    "enable_depth_attention": "depth attention",
    "insert_ngram_layer_idx": "n-gram embeddings",
    "ngram_insert_all_layers": "n-gram embeddings",
    "ngram_vocab_size_ratio": "n-gram embeddings",
    "ngram_embedding_hidden_size": "n-gram embeddings",
    "emb_neighbor_num": "n-gram embeddings",
    "emb_split_num": "n-gram embeddings",
    "qk_layernorm": "a norm of queries and keys",
    "attention_bias": "biases of the attention projections",
    "mlp_bias": "biases of the feed-forward projections",
    "sliding_window": "sliding-window attention",
    "moe": "a mixture of experts",
    "tie_word_embeddings": "a head tied to the embedding",
}

# Unknown fields of the same kinds are refused if they look like a switch that is on.
_KINDS = {
    "enable_": "an unknown feature",
    "loop_": "an unknown way to loop",
    "mhc_": "hyper-connections (mHC)",
    "hyper_connection": "hyper-connections",
    "depth_attention": "depth attention",
    "ngram_": "n-gram embeddings",
    "quantiz": "quantised weights",
}

# True in the release, where what they belong to is off.
_INERT = ("loop_loss_weights", "depth_attention_static_anchor_once")


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Name the first field of config.json that asks for what is not implemented, with its value.

    What brings weights of its own is refused by the loader as well, as unexpected tensors.
    """
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        return (
            f"quantization_config with quant_method {method!r}: quantised weights are not "
            "implemented, take the bfloat16 checkpoint"
        )
    for field, feature in _FEATURES.items():
        if config.get(field):
            return f"{field} is {config[field]!r}: {feature} is not implemented"
    for field, value in config.items():
        kind = next((text for prefix, text in _KINDS.items() if field.startswith(prefix)), None)
        is_on = value is True or (isinstance(value, list | dict) and len(value) > 0)
        if kind and is_on and field not in _INERT:
            return f"{field} is {value!r}: {kind} is not implemented"
    return _rope_reason(config) or _activation_reason(config)


def read_config(config: Mapping[str, Any]) -> NanbeigeConfig:
    """Take the sizes from config.json; each one must be there, and none is derived from another."""
    values = dict(config)
    if values.get("rope_theta") is None:  # transformers 5 writes it inside rope_parameters
        values["rope_theta"] = _rope_settings(config).get("rope_theta")
    sizes = read_sizes(values, _SIZES, real_numbers=("rms_norm_eps", "rope_theta"))
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ModelLoadError(
            f"config.json: num_attention_heads {sizes['num_heads']} must be a multiple of "
            f"num_key_value_heads {sizes['num_kv_heads']}"
        )
    if sizes["head_dim"] % 2:  # rotary embeddings turn pairs of channels
        raise ModelLoadError(f"config.json: head_dim must be even, got {sizes['head_dim']}")
    loops = count_loops(config)
    return NanbeigeConfig(
        **sizes,
        num_layers=count_physical_layers(config, loops),
        total_loops=loops,
        norm_between_loops=not config.get("skip_loop_final_norm", False),
    )


def count_loops(config: Mapping[str, Any]) -> int:
    """Return D by the official precedence: LoopSplit, then loss weights, then num_loops."""
    if config.get("enable_double_loop_split"):
        return 1
    weights = config.get("loop_loss_weights") or []
    if not isinstance(weights, list):
        raise ModelLoadError(f"config.json: loop_loss_weights must be a list, got {weights!r}")
    if weights:  # one for each loop but the last
        check_count("the loops of loop_loss_weights", len(weights) + 1)
        return len(weights) + 1
    return _count(config, "num_loops")


def count_physical_layers(config: Mapping[str, Any], loops: int) -> int:
    """Return L, the layers that have weights; num_hidden_layers may be the unrolled L * loops."""
    listed = _count(config, "num_hidden_layers")
    if config.get("num_physical_layers") is None:
        return listed
    layers = _count(config, "num_physical_layers")
    if listed not in (layers, layers * loops):
        raise ModelLoadError(
            f"config.json: num_hidden_layers must be num_physical_layers {layers}, or that times "
            f"{loops} loops, got {listed}"
        )
    return layers


def _count(config: Mapping[str, Any], field: str) -> int:
    return int(read_sizes(config, {field: field}, counts=(field,))[field])


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("rope_parameters") or {}
    return settings if isinstance(settings, Mapping) else {}


def _rope_reason(config: Mapping[str, Any]) -> str | None:
    """Refuse scaled or partial rotary embeddings, in the spelling of transformers 4 or 5."""
    for field in ("rope_scaling", "rope_parameters"):
        settings = config.get(field) or {}
        if not isinstance(settings, Mapping):
            return f"{field} is {settings!r}: only an object is understood"
        kind = settings.get("rope_type") or settings.get("type") or "default"
        if kind != "default" or settings.get("factor", 1.0) != 1.0:
            return f"{field} is {dict(settings)!r}: rope scaling is not implemented"
        if settings.get("partial_rotary_factor", 1.0) != 1.0:
            return f"{field} is {dict(settings)!r}: partial rotation is not implemented"
    partial = config.get("partial_rotary_factor", 1.0)
    return None if partial == 1.0 else f"partial_rotary_factor is {partial!r}: it must be 1.0"


def _activation_reason(config: Mapping[str, Any]) -> str | None:
    name = config.get("hidden_act", "silu")
    return None if name == "silu" else f"hidden_act is {name!r}: only silu is implemented"
