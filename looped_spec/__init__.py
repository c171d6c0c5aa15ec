"""Self-speculative decoding for looped (recurrent-depth) transformers.

Names are loaded on first use: importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from looped_spec.version import __version__

if TYPE_CHECKING:
    from looped_spec.adapter import ModelAdapter
    from looped_spec.control.config import AdaptiveSpecConfig
    from looped_spec.hooks import hookimpl
    from looped_spec.runtime.llm import LLM
    from looped_spec.sampling_params import SamplingParams

_HOMES = {
    "AdaptiveSpecConfig": "looped_spec.control.config",
    "LLM": "looped_spec.runtime.llm",
    "ModelAdapter": "looped_spec.adapter",
    "SamplingParams": "looped_spec.sampling_params",
    "hookimpl": "looped_spec.hooks",
}

__all__ = [
    "LLM",
    "AdaptiveSpecConfig",
    "ModelAdapter",
    "SamplingParams",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'looped_spec' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
