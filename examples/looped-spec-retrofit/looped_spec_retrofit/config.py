"""config.json of a retrofitted model: its sizes, and what of it is not implemented.

Field names are those of the code that the conversion borrows. Three of its fields are left over and
mean nothing here: `rope_base` (the base is `rope_theta`), `block_size` (positions are bounded by
`max_position_embeddings` only) and `eos_token_id` (of another tokenizer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looped_spec.errors import ModelLoadError
from looped_spec.layers.rope_scaling import Llama3Scaling
from looped_spec.model_config import read_boolean, read_rope_parameters, read_sizes

_COUNTS = {
    "n_layers_in_prelude": "num_prelude",
    "n_layers_in_recurrent_block": "num_core",
    "n_layers_in_coda": "num_coda",
    "mean_recurrence": "mean_recurrence",
}
_SIZES = {
    **_COUNTS,
    "vocab_size": "vocab_size",
    "padded_vocab_size": "padded_vocab_size",
    "n_embd": "hidden_size",
    "n_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "norm_eps",
}
_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)

# What a conversion writes. The block is called "SandwichBlock" although it is a Llama block.
_ONLY_VALUES = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama",
    "injection_type": "linear",
    "state_init": "like-init",
    "bias": False,
    "qk_bias": False,
    "test_time_noise": 0,
}


@dataclass(frozen=True)
class RetrofitConfig:
    """Sizes of a retrofitted model. Layers are counted as they are stored; those of the pretrained
    model that were dropped on conversion are in none of the three counts."""

    vocab_size: int
    padded_vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_prelude: int
    num_core: int
    num_coda: int
    mean_recurrence: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    init_std: float
    tie_embeddings: bool

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.num_heads


def read_config(config: Mapping[str, Any]) -> RetrofitConfig:
    """Take the sizes from config.json; each must be there, since defaults would hide a mistake."""
    values = dict(config)
    values.setdefault("padded_vocab_size", values.get("vocab_size"))
    rope = read_rope_parameters(config)
    scales = config.get("init_values")
    sizes = RetrofitConfig(
        **read_sizes(values, _SIZES, real_numbers=("norm_eps",), counts=_COUNTS),
        rope_theta=_number(rope, "rope_theta"),
        rope_scaling=_read_scaling(rope),
        init_std=_number(scales if isinstance(scales, Mapping) else {}, "std"),
        tie_embeddings=read_boolean(config, "tie_embeddings"),
    )
    _check_consistency(config, sizes)
    return sizes


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Name the first field that asks for what no published conversion has."""
    for name, only in _ONLY_VALUES.items():
        value = config.get(name, only)
        if value != only:
            return f"{name} {value!r} is not implemented (only {only!r})"
    if config.get("quantization_config"):
        return "quantization_config: quantised weights are not implemented"
    scales = config.get("init_values")
    scale = scales.get("embed_scale") if isinstance(scales, Mapping) else None
    if scale != 1.0:
        return f"init_values.embed_scale {scale!r} is not implemented (only 1.0)"
    rope = read_rope_parameters(config)
    if rope["rope_type"] not in ("default", "llama3"):
        return f"rope_type {rope['rope_type']!r} is not implemented (only default and llama3)"
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return None if partial == 1.0 else f"partial_rotary_factor {partial!r} is not implemented"


def _read_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    if rope["rope_type"] == "default":
        return None
    names = {name: name for name in _SCALING}
    return Llama3Scaling(**read_sizes(rope, names, real_numbers=_SCALING))


def _number(values: Mapping[str, Any], name: str) -> float:
    return float(read_sizes(values, {name: name}, real_numbers=(name,))[name])


def _check_consistency(config: Mapping[str, Any], sizes: RetrofitConfig) -> None:
    if sizes.hidden_size % sizes.num_heads or sizes.head_dim % 2:
        raise ModelLoadError(
            f"config.json: n_embd must be an even multiple of n_heads = {sizes.num_heads}, "
            f"got {sizes.hidden_size}"
        )
    if sizes.num_heads % sizes.num_kv_heads:
        raise ModelLoadError(
            f"config.json: n_heads must be a multiple of num_key_value_heads = "
            f"{sizes.num_kv_heads}, got {sizes.num_heads}"
        )
    if sizes.padded_vocab_size < sizes.vocab_size:
        raise ModelLoadError(
            f"config.json: padded_vocab_size must be at least vocab_size = {sizes.vocab_size}, "
            f"got {sizes.padded_vocab_size}"
        )
    blocks = sizes.num_prelude + sizes.num_core + sizes.num_coda
    for name, expected in (("n_layers", blocks), ("head_dim", sizes.head_dim)):
        if config.get(name, expected) != expected:
            raise ModelLoadError(
                f"config.json: {name} must be {expected} by the other sizes, got {config[name]!r}"
            )
