"""What an adapter needs of a Huginn config.json, under the names that Huginn gives its fields.

The official class also answers to the usual names, and one of those misleads: its
`num_hidden_layers` is the number of distinct blocks, which counts neither layers in use nor KV
planes. So only the fields' own names are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looped_spec.errors import ModelLoadError
from looped_spec.model_config import read_boolean, read_sizes

_SIZES = (
    "vocab_size",
    "padded_vocab_size",
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
)
_REAL_NUMBERS = ("rope_base", "norm_eps")
_COUNTS = (
    "n_layers_in_prelude",
    "n_layers_in_recurrent_block",
    "n_layers_in_coda",
    "mean_recurrence",
)

_ONLY_VALUES = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama",
    "injection_type": "linear",
    "state_init": "like-init",
    "bias": False,
    "test_time_noise": 0,
}


@dataclass(frozen=True)
class HuginnConfig:
    """Sizes of a Huginn checkpoint; blocks are counted as they are stored, not as they are used."""

    vocab_size: int
    padded_vocab_size: int
    n_embd: int
    n_heads: int
    n_layers_in_prelude: int
    n_layers_in_recurrent_block: int
    n_layers_in_coda: int
    mean_recurrence: int
    intermediate_size: int
    block_size: int
    rope_base: float
    norm_eps: float
    qk_bias: bool
    tie_embeddings: bool

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.n_embd // self.n_heads

    @property
    def embed_scale(self) -> float:
        """What embeddings and initial state are multiplied with: sqrt(E)."""
        return math.sqrt(self.n_embd)

    @property
    def init_std(self) -> float:
        """Deviation of weights and of the unscaled initial state: sqrt(2 / (5 E))."""
        return math.sqrt(2.0 / (5.0 * self.n_embd))


def read_config(config: Mapping[str, Any]) -> HuginnConfig:
    """Take the sizes from config.json; each must be there, since defaults would hide a mistake."""
    values = dict(config)
    if "padded_vocab_size" not in values:
        padding = read_sizes(values, {name: name for name in ("vocab_size", "padding_multiple")})
        blocks = -(-padding["vocab_size"] // padding["padding_multiple"])
        values["padded_vocab_size"] = blocks * padding["padding_multiple"]
    sizes = read_sizes(
        values, {name: name for name in _SIZES}, real_numbers=_REAL_NUMBERS, counts=_COUNTS
    )
    found = HuginnConfig(
        **sizes,
        qk_bias=read_boolean(config, "qk_bias"),
        tie_embeddings=read_boolean(config, "tie_embeddings"),
    )
    _check_consistency(config, found)
    return found


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Refuse what the published model does not have and this code does not compute."""
    for name, only in _ONLY_VALUES.items():
        value = config.get(name, only)
        if value != only:
            return f"{name} {value!r} is not implemented (only {only!r})"
    heads = config.get("n_heads")
    if config.get("num_key_value_heads", heads) != heads:
        return (
            f"grouped queries (num_key_value_heads {config['num_key_value_heads']}, n_heads "
            f"{heads}) are not implemented"
        )
    if config.get("rope_scaling"):
        return "rope_scaling is not implemented"
    return _scale_reason(config)


def _scale_reason(config: Mapping[str, Any]) -> str | None:
    """Refuse scales other than those that `HuginnConfig` computes from the width."""
    width, given = config.get("n_embd"), config.get("init_values")
    if not isinstance(width, int) or width < 1 or not isinstance(given, Mapping):
        return None
    for name, rule in (("embed_scale", width**0.5), ("std", (2.0 / (5.0 * width)) ** 0.5)):
        value = given.get(name, rule)
        if not isinstance(value, int | float) or not math.isclose(value, rule, rel_tol=1e-3):
            return f"init_values.{name} {value!r} is not implemented (only {rule:.6g}, from n_embd)"
    return None


def _check_consistency(config: Mapping[str, Any], sizes: HuginnConfig) -> None:
    if sizes.n_embd % sizes.n_heads or sizes.head_dim % 2:
        raise ModelLoadError(
            f"config.json: n_embd must be an even multiple of n_heads = {sizes.n_heads}, "
            f"got {sizes.n_embd}"
        )
    blocks = sizes.n_layers_in_prelude + sizes.n_layers_in_recurrent_block + sizes.n_layers_in_coda
    for name, expected in (("n_layers", blocks), ("head_dim", sizes.head_dim)):
        if config.get(name, expected) != expected:
            raise ModelLoadError(
                f"config.json: {name} must be {expected} by the other sizes, got {config[name]!r}"
            )
    if sizes.padded_vocab_size < sizes.vocab_size:
        raise ModelLoadError(
            f"config.json: padded_vocab_size must be at least vocab_size = {sizes.vocab_size}, "
            f"got {sizes.padded_vocab_size}"
        )
