"""Writing a trained demo in the official layout of its family, and reading it back in fp32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from looped_spec.adapter import ModelAdapter
from looped_spec.demos.vocabulary import tokenizer_settings
from looped_spec.errors import ModelLoadError
from looped_spec.loading import load_adapter
from looped_spec.testing.checkpoints import checkpoint_tensors

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Demo:
    """A demo as it lies in its folder, with its weights in fp32; `config` is config.json."""

    adapter: ModelAdapter
    tokenizer: Tokenizer
    config: Mapping[str, Any]


def export_demo(folder: Path, demo: Demo) -> None:
    """Write configs, weights and tokenizer into `folder`, each file whole or not at all.

    A tensor that a checkpoint may omit (a tied head) is not written.
    """
    config = dict(demo.config)
    generation = {key: config[key] for key in _TOKEN_IDS}
    settings = tokenizer_settings(demo.adapter.geometry.max_model_len)
    omitted = demo.adapter.optional_checkpoint_tensors()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = checkpoint_tensors(demo.adapter).items()
        halved = {name: t.to(torch.bfloat16) for name, t in tensors if name not in omitted}
        weights = folder / "model.safetensors.part"
        # Written by hand, as `save_file` makes a file that only its owner may read.
        weights.write_bytes(save(halved, metadata={"format": "pt"}))
        weights.replace(folder / "model.safetensors")
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", {**generation, "do_sample": False})
        write_json(folder / "tokenizer_config.json", settings)
        _write_whole(folder / "tokenizer.json", demo.tokenizer.to_str())
    except OSError as error:
        raise ModelLoadError(f"cannot write to {folder}: {error.strerror}") from error


def load_demo(folder: Path, adapter_class: type[ModelAdapter]) -> Demo:
    """Read an exported folder back, as any model is; weights are widened to fp32."""
    loaded = load_adapter(folder, device="cpu", dtype="float32")
    if not isinstance(loaded.adapter, adapter_class):
        raise ModelLoadError(f"{folder} holds no model of {adapter_class.__name__}")
    try:
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"no tokenizer of a demo in {folder}: {error.strerror}") from error
    except Exception as error:  # the reader has no error class of its own
        raise ModelLoadError(f"damaged tokenizer.json in {folder}: {error}") from error
    return Demo(loaded.adapter, tokenizer, loaded.config)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON as the project keeps it on disk: sorted, indented, ended by a line break."""
    _write_whole(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
