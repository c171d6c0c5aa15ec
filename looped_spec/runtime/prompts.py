"""The forms in which a prompt may be given."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from looped_spec.errors import ConfigError, reject_unknown

OnePrompt = str | Sequence[SupportsIndex] | Mapping[str, Any]
Prompts = OnePrompt | Sequence[OnePrompt]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: a text, or token ids."""

    text: str | None
    token_ids: list[int] | None


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """Return prompts one by one; raise `ConfigError` that names the first of another form."""
    if isinstance(prompts, str | Mapping):
        return [_as_prompt(0, prompts)]
    if isinstance(prompts, bytes | bytearray | set | frozenset) or not hasattr(prompts, "__iter__"):
        return [_as_prompt(0, prompts)]
    items: list[object] = list(prompts)
    alone = _as_tokens(items)
    if alone:
        return [Prompt(None, alone)]
    return [_as_prompt(number, item) for number, item in enumerate(items)]


def _as_prompt(number: int, item: object) -> Prompt:
    if isinstance(item, str):
        return Prompt(item, None)
    if isinstance(item, Mapping):
        reject_unknown(item, ["prompt", "prompt_token_ids"], f"key of prompt {number}:")
        inner = item.get("prompt_token_ids", item.get("prompt"))
        if isinstance(inner, Mapping) or ("prompt_token_ids" in item and isinstance(inner, str)):
            inner = None
        return _as_prompt(number, inner)
    tokens = None
    is_list = isinstance(item, Sequence) and not isinstance(item, bytes | bytearray)
    if is_list or hasattr(item, "__array__"):
        tokens = _as_tokens(list(item))  # type: ignore[call-overload]
    if tokens is None:
        raise ConfigError(
            f"prompt {number} must be a text or a list of token ids, got {type(item).__name__}"
        )
    return Prompt(None, tokens)


def _as_tokens(items: Sequence[object]) -> list[int] | None:
    """Return token ids if that is what all of `items` are; integers of NumPy and torch count."""
    tokens = []
    for item in items:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            return None
        try:
            tokens.append(operator.index(item))
        except TypeError:
            return None
    return tokens
