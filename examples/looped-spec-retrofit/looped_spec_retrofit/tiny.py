"""Writes a tiny model with random weights, to try the plugin without a download.

    python -m looped_spec_retrofit.tiny FOLDER

What it says is noise. Its weights are small, so that rounding errors do not grow over the loops.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looped_spec.testing.checkpoints import fill_random, write_checkpoint
from torch import Tensor

from looped_spec_retrofit.adapter import RetrofitAdapter
from looped_spec_retrofit.convert import GROUPS, recurrent_config

_BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"

# Newline, blank and the other printable characters of ASCII, as tokenizers spell bytes. All other
# bytes are left out: noise of control characters would upset a terminal.
_ALPHABET = ("\u010a", "\u0120", *map(chr, range(33, 127)))

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": len(_ALPHABET) + 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": len(_ALPHABET),
    "eos_token_id": len(_ALPHABET) + 1,
}
LAYERS = dict(zip(GROUPS, ((0,), (3, 4), (5,)), strict=True))


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return the config.json of the tiny model, with some values changed."""
    return {**recurrent_config(LLAMA, LAYERS, 4), **changes}


def write_tiny(folder: Path, config: Mapping[str, Any] | None = None, *, seed: int = 0) -> Path:
    """Write a model with random weights and a tokenizer of characters; return its folder."""
    config = tiny_config() if config is None else config
    adapter = RetrofitAdapter(config, {})
    fill_random(adapter.module, seed=seed, adjust=_adjust)
    write_checkpoint(adapter, folder, config)
    _write_tokenizer(folder)
    return folder


def _adjust(name: str, parameter: Tensor) -> None:
    """Let the state and each branch count half, and embeddings be as large as trained ones."""
    if name.endswith("transformer.adapter.weight"):
        parameter[:, : parameter.shape[1] // 2] *= 0.5
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        parameter *= 0.5
    elif name.endswith("wte.weight"):
        parameter *= 5


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(_ALPHABET)}, []))
    tokenizer.add_special_tokens([_BOS, _EOS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, len(_ALPHABET))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": _BOS, "eos_token": _EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {__spec__.name} FOLDER")
    print(f"wrote {write_tiny(Path(sys.argv[1]))}")
