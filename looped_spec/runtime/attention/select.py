"""Which backend serves a model on this machine."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

from looped_spec.errors import UnsupportedError
from looped_spec.layers.native import Kernels
from looped_spec.runtime.attention.backend import AttentionBackend, AttentionNeeds
from looped_spec.runtime.attention.flash_attn import FlashAttnBackend
from looped_spec.runtime.attention.native import NativeBackend
from looped_spec.runtime.attention.sdpa import SdpaBackend
from looped_spec.runtime.attention.triton import TritonBackend
from looped_spec.runtime.attention.varlen import VarlenBackend

logger = logging.getLogger(__name__)

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (FlashAttnBackend, TritonBackend, VarlenBackend, SdpaBackend)
}
"""In the order in which `auto` takes the first that can."""


@dataclass(frozen=True)
class AttentionChoice:
    """A backend, and the tokens per block of the cache that it reads."""

    backend: AttentionBackend
    block_size: int


def choose_attention(
    name: str, needs: AttentionNeeds, kernels: Kernels | None = None
) -> AttentionChoice:
    """Return the backend called `name` (one of `ATTENTION_BACKENDS`), for "auto" the best one for
    `needs`: on the CPU the compiled `kernels` where the run has them.

    Raises:
        UnsupportedError: the backend that was asked for cannot serve `needs`; nothing falls back.
    """
    if name != "auto":
        reason = BACKENDS[name].unsupported_reason(needs)
        if reason is not None:
            raise UnsupportedError(_refusal(name, reason, needs))
        return _choice(BACKENDS[name], needs)
    if needs.device.type == "cpu":
        if kernels is not None:
            logger.info("attention_backend auto: native, as cpu_kernels says")
            backend = NativeBackend(kernels)
            return AttentionChoice(backend, needs.block_size or backend.default_block_size)
        logger.info("attention_backend auto: sdpa, the one for the CPU")
        return _choice(SdpaBackend, needs)
    passed_over = []
    for backend_class in BACKENDS.values():
        reason = backend_class.unsupported_reason(needs)
        if reason is None:
            break
        passed_over.append(f"{backend_class.name}: {reason}")
    choice = _choice(backend_class, needs)
    logger.info(
        "attention_backend auto: %s%s",
        choice.backend.description,
        f" (not {'; not '.join(passed_over)})" if passed_over else "",
    )
    return choice


def resolved_name(name: str, needs: AttentionNeeds, kernels: Kernels | None = None) -> str:
    """Return the name of the backend that `choose_attention` takes, without making it."""
    if name != "auto":
        return name
    if needs.device.type == "cpu":
        return SdpaBackend.name if kernels is None else NativeBackend.name
    usable = (b for b in BACKENDS.values() if b.unsupported_reason(needs) is None)
    return next(usable, SdpaBackend).name


def _choice(backend_class: type[AttentionBackend], needs: AttentionNeeds) -> AttentionChoice:
    backend = backend_class.create(needs)
    return AttentionChoice(backend, needs.block_size or backend.default_block_size)


def _refusal(name: str, reason: str, needs: AttentionNeeds) -> str:
    """Say what is wrong, and if it is the block size alone, what to do about it."""
    text = f"attention_backend '{name}' cannot be used here: {reason}"
    if needs.block_size is not None:
        free = dataclasses.replace(needs, block_size=None)
        if BACKENDS[name].unsupported_reason(free) is None:
            text += "; leave block_size out, or take another attention_backend"
    return text
