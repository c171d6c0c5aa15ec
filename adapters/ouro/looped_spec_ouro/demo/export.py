"""Writing a trained demo in the official Ouro layout, and reading it back in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from looped_spec.errors import ModelLoadError
from looped_spec.loading import load_adapter
from looped_spec.testing.checkpoints import checkpoint_tensors
from looped_spec_ouro.adapter import OuroAdapter
from looped_spec_ouro.demo.vocabulary import END_OF_TEXT, tokenizer_settings
from looped_spec_ouro.model import OuroConfig


def config_json(config: OuroConfig) -> dict[str, Any]:
    """Return config.json with the keys of the official checkpoints."""
    return {
        "architectures": ["OuroForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "early_exit_threshold": 1.0,
        "eos_token_id": END_OF_TEXT,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "ouro",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": END_OF_TEXT,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "total_ut_steps": config.total_loops,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def export_demo(folder: Path, adapter: OuroAdapter, tokenizer: Tokenizer) -> None:
    """Write configs, weights and tokenizer into `folder`, each file whole or not at all."""
    config = config_json(adapter.config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = tokenizer_settings(adapter.config.max_position_embeddings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = checkpoint_tensors(adapter).items()
        halved = {name: tensor.to(torch.bfloat16) for name, tensor in tensors}
        weights = folder / "model.safetensors.part"
        # Written by hand, as `save_file` makes a file that only its owner may read.
        weights.write_bytes(save(halved, metadata={"format": "pt"}))
        weights.replace(folder / "model.safetensors")
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", {**generation, "do_sample": False})
        write_json(folder / "tokenizer_config.json", settings)
        _write_whole(folder / "tokenizer.json", tokenizer.to_str())
    except OSError as error:
        raise ModelLoadError(f"cannot write to {folder}: {error.strerror}") from error


def load_demo(folder: Path) -> tuple[OuroAdapter, Tokenizer]:
    """Read an exported folder back, as any model is; weights are widened to fp32."""
    adapter = load_adapter(folder, device="cpu", dtype="float32").adapter
    if not isinstance(adapter, OuroAdapter):
        raise ModelLoadError(f"{folder} holds no Ouro model")
    try:
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"no tokenizer of a demo in {folder}: {error.strerror}") from error
    except Exception as error:  # the reader has no error class of its own
        raise ModelLoadError(f"damaged tokenizer.json in {folder}: {error}") from error
    return adapter, tokenizer


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON as the project keeps it on disk: sorted, indented, ended by a line break."""
    _write_whole(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
