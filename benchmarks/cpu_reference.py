"""The same amount of work in another library, to be measured beside ours.

The official code of the family comes with its checkpoints and builds on the classes of the
transformers library. Here that library's own Llama stands for it: as many layers as loops times
layers, which share their weights as the loops do. It has two norms a layer less and is otherwise
the same computation, so the comparison favours it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch


def reference_generate(config: dict[str, Any]) -> Callable[[Sequence[list[int]], int], int] | None:
    """Return a function that completes prompts greedily by so many tokens and returns how many
    came; None where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
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
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
            **sizes,
        )
    ).eval()
    for number, layer in enumerate(model.model.layers):
        shared = model.model.layers[number % layers]
        layer.mlp = shared.mlp  # the attention itself differs: it knows its place in the cache
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, getattr(shared.self_attn, name))

    @torch.inference_mode()
    def generate(prompts: Sequence[list[int]], max_tokens: int) -> int:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
        )
        return int((out.shape[1] - ids.shape[1]) * out.shape[0])

    return generate
