"""What a run is called: its device, and what presets are told apart by."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.layers.fused import FusedKernels
from looped_spec.layers.native import Kernels
from looped_spec.loading import ModelOrigin
from looped_spec.options import EngineOptions
from looped_spec.presets.match import RunIdentity
from looped_spec.runtime.attention import AttentionNeeds
from looped_spec.runtime.attention.select import resolved_name
from looped_spec.runtime.graphs import graph_mode, linear_layout
from looped_spec.runtime.threads import planned_threads


def run_identity(
    options: EngineOptions,
    adapter: ModelAdapter,
    origin: ModelOrigin,
    device: torch.device,
    dtype: torch.dtype,
    full_loops: int,
    kernels: Kernels | None = None,
    fused: FusedKernels | None = None,
) -> RunIdentity:
    """Return the identity of a run, with what `kernels` and `fused` the options came down to; needs
    no weights."""
    is_cpu = device.type == "cpu"
    needs = AttentionNeeds.of(options, adapter.kv_planes(full_loops), device, dtype)
    defaults = type(adapter).options
    return RunIdentity(
        model=origin.name,
        adapter=origin.spec.name,
        device_name=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        full_loops=full_loops,
        revision=origin.revision,
        adapter_options={**defaults, **(options.adapter_options or {})},
        adapter_defaults=defaults,
        num_threads=planned_threads(options.num_threads, adapter, device),
        cpu_linear=linear_layout(options) if is_cpu else None,
        cpu_kernels=("torch" if kernels is None else "native") if is_cpu else None,
        graph_backend=graph_mode(options, device),
        fused="off" if fused is None else "on",
        attention_backend=resolved_name(options.attention_backend, needs, kernels),
        is_cuda=device.type == "cuda",
    )


def device_name(device: torch.device) -> str:
    """Return what the driver calls a GPU, or the name of the processor.

    Machines with the same model of processor have the same name, whatever their number of cores:
    the threads of a run are compared apart.
    """
    if device.type == "cuda":
        return " ".join(torch.cuda.get_device_name(device).split())
    return _processor()


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "CPU"
