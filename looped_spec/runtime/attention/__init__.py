"""Attention over the paged cache: what the stages see of it, and the backends that compute it."""

from __future__ import annotations

from looped_spec.runtime.attention.backend import (
    AttentionBackend,
    AttentionNeeds,
    PagedRows,
    Span,
)
from looped_spec.runtime.attention.context import PagedContext
from looped_spec.runtime.attention.sdpa import SdpaBackend
from looped_spec.runtime.attention.select import AttentionChoice, choose_attention

__all__ = [
    "AttentionBackend",
    "AttentionChoice",
    "AttentionNeeds",
    "PagedContext",
    "PagedRows",
    "SdpaBackend",
    "Span",
    "choose_attention",
]
