"""The model once more, slow and plain: whole sequences, one token and one head at a time, float64.

Written from the description of the family and the names in its checkpoints; it shares no code with
the adapter and reads the checkpoint itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """One checkpoint. `tokens` are the T tokens of a text, states are [T, E]."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.double() for name, tensor in stored.items()}
        self.weights.setdefault("lm_head.weight", self.weights["transformer.wte.weight"])
        self.frequencies = frequencies(self.config)

    def states(self, tokens: list[int], loops: int, start: Tensor) -> list[Tensor]:
        """Return the state before the first loop (`start`) and after each."""
        embedded = self.weights["transformer.wte.weight"][tokens]
        for number in range(self.config["n_layers_in_prelude"]):
            embedded = self._block(f"transformer.prelude.{number}", embedded)
        states = [start.double()]
        for _ in range(loops):
            both = torch.cat((states[-1], embedded), dim=1)
            state = both @ self.weights["transformer.adapter.weight"].T
            for number in range(self.config["n_layers_in_recurrent_block"]):
                state = self._block(f"transformer.core_block.{number}", state)
            states.append(state)
        return states

    def head(self, state: Tensor) -> Tensor:
        """Return logits [T, V] of a state."""
        for number in range(self.config["n_layers_in_coda"]):
            state = self._block(f"transformer.coda.{number}", state)
        normed = self._norm("transformer.ln_f.weight", state)
        return (normed @ self.weights["lm_head.weight"].T)[:, : self.config["vocab_size"]]

    def logits(self, tokens: list[int], loops: int, start: Tensor) -> Tensor:
        """Return logits [T, V] after so many loops."""
        return self.head(self.states(tokens, loops, start)[-1])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = (x * x).mean(dim=1, keepdim=True)
        return x / (mean_square + self.config["norm_eps"]).sqrt() * self.weights[name]

    def _block(self, name: str, x: Tensor) -> Tensor:
        x = x + self._attention(f"{name}.attn", self._norm(f"{name}.norm_1.weight", x))
        both = self._norm(f"{name}.norm_2.weight", x) @ self.weights[f"{name}.mlp.fc.weight"].T
        half = both.shape[1] // 2
        gate, up = both[:, :half], both[:, half:]
        hidden = gate / (1 + (-gate).exp()) * up
        return x + hidden @ self.weights[f"{name}.mlp.proj.weight"].T

    def _attention(self, name: str, x: Tensor) -> Tensor:
        heads, kv_heads = self.config["n_heads"], self.config["num_key_value_heads"]
        size = self.config["n_embd"] // heads
        rows = self.weights[f"{name}.Wqkv.weight"].split(size)  # one matrix [size, E] a head
        queries, keys = rows[:heads], rows[heads : heads + kv_heads]
        values = rows[heads + kv_heads :]
        outputs = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            q = self._rotate(x @ queries[head].T)
            k = self._rotate(x @ keys[shared].T)
            v = x @ values[shared].T
            mixed = [
                ((q[t] @ k[: t + 1].T) / math.sqrt(size)).softmax(dim=0) @ v[: t + 1]
                for t in range(len(x))
            ]
            outputs.append(torch.stack(mixed))
        return torch.cat(outputs, dim=1) @ self.weights[f"{name}.proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn channel i with channel i + half, as one complex number, by position x frequency."""
        half = x.shape[1] // 2
        pairs = torch.complex(x[:, :half], x[:, half:])
        angles = torch.outer(torch.arange(len(x), dtype=torch.float64), self.frequencies)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=1)


def frequencies(config: dict[str, Any]) -> Tensor:
    """Return the rotary frequencies, float64, by the rule of Llama 3.1 where there is scaling."""
    size = config["n_embd"] // config["n_heads"]
    plain = [config["rope_theta"] ** (-2 * i / size) for i in range(size // 2)]
    rule = config["rope_scaling"]
    if not rule:
        return torch.tensor(plain, dtype=torch.float64)
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    context, factor = rule["original_max_position_embeddings"], rule["factor"]
    scaled = []
    for frequency in plain:
        wave = 2 * math.pi / frequency
        if wave < context / high:
            scaled.append(frequency)
        elif wave > context / low:
            scaled.append(frequency / factor)
        else:
            smooth = (context / wave - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.tensor(scaled, dtype=torch.float64)
