"""The same amount of work in another library, to be measured beside ours.

The official code of the family comes with its checkpoints, as Python files that the transformers
library runs. Whoever has them gives their folder. The library's own Llama always stands beside:
as many layers as loops times layers, which share their weights as the loops do. It has two norms a
layer and three of the loops less, no exit gate, and is otherwise the same computation, so the
comparison favours it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from looped_spec.adapter import ModelAdapter
from looped_spec.errors import UnsupportedError

Generate = Callable[[Sequence[list[int]], int], list[list[int]]]
"""Completes prompts greedily by so many tokens, and returns those."""

_MODEL_CLASS = "modeling_ouro.OuroForCausalLM"


def llama_generate(config: dict[str, Any]) -> Generate | None:
    """Return `generate` of Llama with shared layers; None where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    transformers = _transformers()
    layers, loops = config["num_hidden_layers"], config["total_ut_steps"]
    sizes = {key: config[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=layers * loops,
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=False,
            **_no_special_tokens(),
            **sizes,
        )
    )
    for number, layer in enumerate(model.model.layers):
        shared = model.model.layers[number % layers]
        layer.mlp = shared.mlp  # the attention itself differs: it knows its place in the cache
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, getattr(shared.self_attn, name))
    return _generate(model)


def official_generate(folder: Path, config: dict[str, Any], ours: ModelAdapter) -> Generate:
    """Return `generate` of the official code in `folder`, with the weights of our model.

    The code is run as `trust_remote_code` would run it. What was tried works with transformers
    4.56.2 to 4.57.6; with other releases the official files fail.

    Raises:
        UnsupportedError: transformers is not installed, or the code does not run with this release.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError("--official needs the transformers library, 4.56.2 to 4.57.6")
    transformers = _transformers()
    modules: Any = importlib.import_module("transformers.dynamic_module_utils")
    name = _MODEL_CLASS
    if (folder / "config.json").exists():
        stored = json.loads((folder / "config.json").read_text())
        name = stored.get("auto_map", {}).get("AutoModelForCausalLM", name)
    try:
        kind = modules.get_class_from_dynamic_module(name, str(folder), local_files_only=True)
        known = {key: value for key, value in config.items() if key != "model_type"}
        model = kind(kind.config_class(**known, **_no_special_tokens()))
    except Exception as error:  # whatever the code raises with a release that it was not made for
        raise UnsupportedError(
            f"the official code in '{folder}' does not run with transformers "
            f"{transformers.__version__}: {error}"
        ) from error
    _copy_weights(ours, model)
    return _generate(model)


def _no_special_tokens() -> dict[str, Any]:
    return {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


def _transformers() -> Any:
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


@torch.no_grad()
def _copy_weights(ours: ModelAdapter, theirs: nn.Module) -> None:
    """Give each weight of the official model the numbers that ours has for it."""
    held = dict(ours.module.named_parameters())
    for name, target in ours.checkpoint_layout().items():
        rows = slice(target.start, target.stop)
        theirs.get_parameter(name).copy_(held[target.parameter][rows])


def _generate(model: Any) -> Generate:
    model.eval()

    @torch.inference_mode()
    def generate(prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
        )
        made: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return made

    return generate
