"""Whether rounds are captured, and how: the options and the device decide."""

from __future__ import annotations

import logging

import torch

from looped_spec.errors import UnsupportedError
from looped_spec.options import EngineOptions
from looped_spec.runtime.attention import AttentionBackend
from looped_spec.runtime.graphs.backends import CudaGraphs, GraphBackend, TracedGraphs

logger = logging.getLogger(__name__)


def choose_graphs(
    options: EngineOptions, device: torch.device, attention: AttentionBackend, max_model_len: int
) -> GraphBackend | None:
    """Return how rounds are captured, None for not at all.

    Raises:
        UnsupportedError: captured rounds were asked for where there can be none.
    """
    name = graph_mode(options, device)
    if name == "eager":
        return None
    if options.early_exit:
        raise UnsupportedError(
            f"graph_backend '{name}' cannot be combined with early exit, where the tokens decide "
            "how many rows a loop has: leave graph_backend out"
        )
    if name == "cuda" and device.type != "cuda":
        raise UnsupportedError(
            f"graph_backend 'cuda' needs a CUDA device, this run is on {device.type}: leave "
            "graph_backend out"
        )
    if name == "traced" and options.cpu_linear not in ("auto", "plain", "transposed"):
        raise UnsupportedError(
            f"graph_backend 'traced' cannot hold weights that are packed, as cpu_linear="
            f"'{options.cpu_linear}' does: leave cpu_linear out"
        )
    if attention.cost_follows_width:
        logger.warning(
            "captured rounds with attention_backend '%s' attend over all %d positions of "
            "max_model_len, however short the texts are: set max_model_len to what is needed, or "
            "enforce_eager=True",
            attention.name,
            max_model_len,
        )
    return CudaGraphs(device) if name == "cuda" else TracedGraphs()


def graph_mode(options: EngineOptions, device: torch.device) -> str:
    """Return what the options ask for on a device: cuda, traced, or eager for no capturing."""
    name = "eager" if options.enforce_eager else options.graph_backend
    if name == "auto":
        return "cuda" if device.type == "cuda" and not options.early_exit else "eager"
    return name


def linear_layout(options: EngineOptions) -> str:
    """Return how linear layers keep their weights: as `cpu_linear` says, but as plain tensors where
    rounds are traced, since a trace holds nothing else."""
    if options.graph_backend == "traced" and options.cpu_linear == "auto":
        return "plain"
    return options.cpu_linear
