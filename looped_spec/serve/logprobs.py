"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from looped_spec.runtime.token_logprobs import TokenLogprobs

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"

TokenTexts = Callable[[Iterable[int]], Awaitable[dict[int, str]]]
"""Gives the text of each token by itself."""


class LogprobWriter:
    """Writes what belongs to the tokens of one answer, in their order."""

    def __init__(self, is_chat: bool, token_texts: TokenTexts) -> None:
        self._is_chat = is_chat
        self._token_texts = token_texts
        self._offset = 0

    async def document(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of a choice for the next tokens."""
        ids = {one.token_id for one in logprobs}
        ids.update(token_id for one in logprobs for token_id, _ in one.top)
        texts = await self._token_texts(ids)
        if self._is_chat:
            return {"content": [_chat_entry(one, texts) for one in logprobs]}
        document: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for one in logprobs:
            text = texts[one.token_id]
            document["tokens"].append(text)
            document["token_logprobs"].append(_finite(one.logprob))
            document["top_logprobs"].append(_by_text(one, texts))
            document["text_offset"].append(self._offset)
            self._offset += len(text)
        return document


def _by_text(one: TokenLogprobs, texts: dict[int, str]) -> dict[str, float]:
    """Return the likely tokens and the generated one by their texts, of equal texts the likeliest:
    halves of characters have no text of their own."""
    found: dict[str, float] = {}
    for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
        found.setdefault(texts[token_id], _finite(logprob))
    return found


def _chat_entry(one: TokenLogprobs, texts: dict[int, str]) -> dict[str, Any]:
    top = [_with_bytes(texts[token_id], logprob) for token_id, logprob in one.top]
    return {**_with_bytes(texts[one.token_id], one.logprob), "top_logprobs": top}


def _with_bytes(text: str, logprob: float) -> dict[str, Any]:
    """Return a token's text, its bytes unless it is half a character, and its log probability."""
    data = None if _HALF_CHARACTER in text else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
