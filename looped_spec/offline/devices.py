"""Figures of known devices, from their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from looped_spec.errors import ConfigError, closest


@dataclass(frozen=True)
class KnownDevice:
    """A device as its data sheet has it.

    Attributes:
        device_name: what the driver calls it.
        gigabytes_per_second: memory bandwidth.
        teraflops: of dense bfloat16 products with sums in float32, without sparsity.
        source: where the figures stand.
    """

    device_name: str
    gigabytes_per_second: float
    teraflops: float
    source: str


_HOPPER = "NVIDIA H100 data sheet (dense: half of the figure with sparsity)"
_EXPORT = "NVIDIA's figures for this variant, as its sellers' data sheets give them"
_AMPERE = "NVIDIA A100 data sheet"
_BLACKWELL = "NVIDIA RTX Blackwell architecture white paper"

DEVICES: dict[str, KnownDevice] = {
    "h100-sxm": KnownDevice("NVIDIA H100 80GB HBM3", 3350, 989, _HOPPER),
    "h100-pcie": KnownDevice("NVIDIA H100 PCIe", 2000, 756, _HOPPER),
    "h200": KnownDevice("NVIDIA H200", 4800, 989, "NVIDIA H200 data sheet"),
    "h800": KnownDevice("NVIDIA H800", 3350, 989, _EXPORT),
    "h800-pcie": KnownDevice("NVIDIA H800 PCIe", 2000, 756, _EXPORT),
    "h20": KnownDevice("NVIDIA H20", 4000, 148, _EXPORT),
    "h20-3e": KnownDevice("NVIDIA H20-3e", 4800, 148, _EXPORT),
    "a100": KnownDevice("NVIDIA A100-SXM4-80GB", 2039, 312, _AMPERE),
    "a100-40gb": KnownDevice("NVIDIA A100-SXM4-40GB", 1555, 312, _AMPERE),
    "a800": KnownDevice("NVIDIA A800-SXM4-80GB", 2039, 312, _EXPORT),
    "b200": KnownDevice("NVIDIA B200", 8000, 2250, "NVIDIA Blackwell data sheet"),
    "rtx-4090": KnownDevice("NVIDIA GeForce RTX 4090", 1008, 165.2, "NVIDIA Ada white paper"),
    "rtx-5080": KnownDevice("NVIDIA GeForce RTX 5080", 960, 112.6, _BLACKWELL),
    "rtx-5090": KnownDevice("NVIDIA GeForce RTX 5090", 1792, 209.5, _BLACKWELL),
}


def known_device(name: str) -> KnownDevice:
    """Return the device of a short name or of what the driver calls it."""
    key = name.lower().replace("_", "-")
    if key in DEVICES:
        return DEVICES[key]
    for device in DEVICES.values():
        if device.device_name == name:
            return device
    raise ConfigError(
        f"unknown device '{name}'{closest(key, DEVICES)}; known: {', '.join(DEVICES)}"
    )
