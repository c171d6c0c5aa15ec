"""A tiny untrained model folder with a tokenizer, written on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from looped_spec_ouro.adapter import OuroAdapter
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MAX_MODEL_LEN = 96
FULL_LOOPS = 3
CONFIG: dict[str, Any] = {
    "model_type": "ouro",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "total_ut_steps": FULL_LOOPS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": MAX_MODEL_LEN,
    "eos_token_id": 0,
}


def write_tiny_model(folder: Path, weight_scale: float = 0.5, **config: Any) -> Path:
    """Write config, random weights and a byte-level tokenizer; the same ones every time.

    The smaller the weights, the less a loop changes, and the more drafts are accepted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = CONFIG | config
    (folder / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        adapter = OuroAdapter(values, {})
    state = adapter.module.state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, target in adapter.checkpoint_layout().items():
        shape = list(state[target.parameter].shape)
        if target.stop is not None:
            shape[0] = target.stop - (target.start or 0)
        tensors[name] = weight_scale * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, then the cat ran"] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
