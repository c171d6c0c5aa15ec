"""What a measurement ran on, for whoever reads its numbers later."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from looped_spec.offline.checkout import commit
from looped_spec.version import __version__

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM


def machine(llm: LLM) -> dict[str, Any]:
    """Say what a model runs on."""
    facts = machine_facts(llm.loaded.device)
    return facts | {"dtype": str(llm.loaded.dtype).removeprefix("torch.")}


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Say what is known of the machine, and how busy it is."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "looped_spec": __version__,
        "commit": commit(),
    }
