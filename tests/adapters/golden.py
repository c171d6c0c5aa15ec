"""Reads the golden folders: tiny checkpoints with outputs of the official model code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parent.parent / "golden"

TOLERANCE = 2e-5
"""Largest logit error allowed in fp32; sums run in another order than in the recorded code."""


@dataclass(frozen=True)
class GoldenPrompt:
    """One prompt of a golden folder; `tensors` are its outputs without the prompt's prefix."""

    prompt: list[int]
    tensors: dict[str, Tensor]

    def sequence(self, name: str) -> list[int]:
        """Return a recorded token sequence."""
        tokens: list[int] = self.tensors[name].tolist()
        return tokens


def golden_prompts(folder: Path) -> list[GoldenPrompt]:
    """Read all prompts of a golden folder, in their order."""
    expected = load_file(folder / "expected.safetensors")
    names = sorted({name.split(".")[0] for name in expected})
    result = []
    for name in names:
        own = {
            key.split(".", 1)[1]: value
            for key, value in expected.items()
            if key.split(".")[0] == name
        }
        result.append(GoldenPrompt(own["prompt"].tolist(), own))
    return result
