"""Turns a pretrained Llama into a recurrent model that is still to be trained.

    python -m looped_spec_retrofit.convert LLAMA OUT --prelude 0-3 --core 6-11 --coda 12-15

Each group takes layers of the Llama by number, first to last; a layer in no group is dropped
(arXiv 2511.07384). The injection starts as the identity on the prelude's output, so that before any
training the model computes, at every depth, what the Llama without the dropped layers does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from looped_spec.checkpoint import StoredTensor, open_safetensors, scan_checkpoint
from looped_spec.errors import (
    ConfigError,
    LoopedSpecError,
    ModelLoadError,
    UnsupportedError,
    check_int,
)
from looped_spec.model_config import (
    CONFIG_FILE,
    read_json_config,
    read_rope_parameters,
    read_sizes,
)
from safetensors.torch import save_file
from torch import Tensor

GROUPS = ("prelude", "core", "coda")

# Deviation of the initial state of all published conversions: sqrt(2 / (5 * 5280)), which is the
# rule of the model whose code is borrowed, at the width of that model.
INIT_STD = 0.008703882797784892

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)

_LAYER = {  # parts of a Llama layer, by the tensor that they become; rows in this order
    "norm_1.weight": ("input_layernorm.weight",),
    "attn.Wqkv.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "attn.proj.weight": ("self_attn.o_proj.weight",),
    "norm_2.weight": ("post_attention_layernorm.weight",),
    "mlp.fc.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.proj.weight": ("mlp.down_proj.weight",),
}
_BLOCKS = {"prelude": "prelude", "core": "core_block", "coda": "coda"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def convert(
    llama: Path, out: Path, layers: Mapping[str, Sequence[int]], *, mean_recurrence: int = 4
) -> Path:
    """Write the recurrent model of `layers` (numbers by group, see `GROUPS`) and return `out`.

    The tokenizer's files come along. Raises `LoopedSpecError` for a Llama with parts that the
    family does not have, and for layers that it does not have.
    """
    config = recurrent_config(read_json_config(llama), layers, mean_recurrence)
    if (out / CONFIG_FILE).exists():
        raise ConfigError(f"{out} holds a model already: give another folder")
    stored = scan_checkpoint(llama)
    tensors = {
        "transformer.wte.weight": _read(stored, "model.embed_tokens.weight"),
        "transformer.ln_f.weight": _read(stored, "model.norm.weight"),
        "lm_head.weight": _read(
            stored, "lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"
        ),
    }
    for group in GROUPS:
        for number, layer in enumerate(layers[group]):
            for name, parts in _LAYER.items():
                rows = [_read(stored, f"model.layers.{layer}.{part}") for part in parts]
                tensors[f"transformer.{_BLOCKS[group]}.{number}.{name}"] = torch.cat(rows)
    embedding = tensors["transformer.wte.weight"]
    size = embedding.shape[1]
    passed_on = torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1)
    tensors["transformer.adapter.weight"] = passed_on.to(embedding.dtype)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in _TOKENIZER_FILES:
        if (llama / name).is_file():
            shutil.copyfile(llama / name, out / name)
    return out


def recurrent_config(
    llama: Mapping[str, Any], layers: Mapping[str, Sequence[int]], mean_recurrence: int
) -> dict[str, Any]:
    """Return the config.json of the recurrent model, with the fields of the published ones."""
    check_int("mean_recurrence", mean_recurrence, 1)
    if llama["model_type"] != "llama":
        raise UnsupportedError(f"only a llama can be converted, not a '{llama['model_type']}'")
    if reason := _unsupported_reason(llama):
        raise UnsupportedError(f"this llama cannot be converted: {reason}")
    sizes = read_sizes(llama, {name: name for name in _SIZES}, real_numbers=("rms_norm_eps",))
    for group in GROUPS:
        if not layers[group]:
            raise ConfigError(f"{group} needs at least one layer")
        for layer in layers[group]:
            if not 0 <= layer < sizes["num_hidden_layers"]:
                last = sizes["num_hidden_layers"] - 1
                raise ConfigError(f"{group}: the model has layers 0 to {last}, got {layer}")
    rope = read_rope_parameters(llama)
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    counts = {group: len(layers[group]) for group in GROUPS}
    return {
        "architectures": ["RavenForCausalLM"],
        "model_type": "huginn_raven",
        "architecture_class_name": "RecurrentGPT",
        "block_class_name": "SandwichBlock",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "norm_class_name": "RMSNorm_llama",
        "injection_type": "linear",
        "state_init": "like-init",
        "init_values": {"std": INIT_STD, "embed_scale": 1.0},
        "bias": False,
        "qk_bias": False,
        "tie_embeddings": False,
        "vocab_size": sizes["vocab_size"],
        "padded_vocab_size": sizes["vocab_size"],
        "n_embd": sizes["hidden_size"],
        "n_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "intermediate_size": sizes["intermediate_size"],
        "norm_eps": sizes["rms_norm_eps"],
        "max_position_embeddings": sizes["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
        "n_layers": sum(counts.values()),
        "n_layers_in_prelude": counts["prelude"],
        "n_layers_in_recurrent_block": counts["core"],
        "n_layers_in_coda": counts["coda"],
        "mean_recurrence": mean_recurrence,
        "bos_token_id": llama.get("bos_token_id"),
        "eos_token_id": llama.get("eos_token_id"),
    }


def _unsupported_reason(llama: Mapping[str, Any]) -> str | None:
    for field in ("attention_bias", "mlp_bias", "quantization_config"):
        if llama.get(field):
            return f"{field} is {llama[field]!r}"
    if llama.get("hidden_act", "silu") != "silu":
        return f"hidden_act is {llama['hidden_act']!r}"
    head_dim = llama.get("head_dim")
    if head_dim and head_dim * llama.get("num_attention_heads", 0) != llama.get("hidden_size"):
        return f"head_dim {head_dim} is not hidden_size / num_attention_heads"
    kind = read_rope_parameters(llama)["rope_type"]
    return None if kind in ("default", "llama3") else f"rope_type is {kind!r}"


def _read(stored: Mapping[str, StoredTensor], name: str) -> Tensor:
    if name not in stored:
        raise ModelLoadError(f"the checkpoint has no tensor '{name}'")
    with open_safetensors(stored[name].file) as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor.clone()


def layer_numbers(text: str) -> tuple[int, ...]:
    """Read "0-3", "7" or "0-3,6"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert the Llama of the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("llama", type=Path, help="folder of a Llama with safetensors weights")
    parser.add_argument("out", type=Path, help="folder to write to")
    for group in GROUPS:
        parser.add_argument(
            f"--{group}", type=layer_numbers, required=True, help='layers, such as "0-3"'
        )
    parser.add_argument("--mean-recurrence", type=int, default=4, help="depth by default")
    args = parser.parse_args(argv)
    layers = {group: getattr(args, group) for group in GROUPS}
    try:
        convert(args.llama, args.out, layers, mean_recurrence=args.mean_recurrence)
    except LoopedSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
