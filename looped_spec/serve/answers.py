"""The documents that answer a completion or a chat, whole or in events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from looped_spec.runtime.token_logprobs import TokenLogprobs
from looped_spec.serve.generation import Generation
from looped_spec.serve.job import Update
from looped_spec.serve.logprobs import LogprobWriter, TokenTexts
from looped_spec.serve.protocol import GenerationBody
from looped_spec.serve.speculation import request_metrics

Kind = Literal["completion", "chat"]

_OBJECTS: Mapping[Kind, tuple[str, str]] = {
    "completion": ("text_completion", "text_completion"),
    "chat": ("chat.completion", "chat.completion.chunk"),
}
_ID_PREFIXES: Mapping[Kind, str] = {"completion": "cmpl-", "chat": "chatcmpl-"}


@dataclass
class _Answer:
    """An answer as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    ending: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class AnswerWriter:
    """Writes the answers of one request, from its generation."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        body: GenerationBody,
        generation: Generation,
        metrics: str,
        token_texts: TokenTexts,
    ) -> None:
        """`metrics` is none, summary or detailed: what to tell of speculation."""
        self._kind = kind
        self._body = body
        self._generation = generation
        self._metrics = metrics
        self._logprobs = [LogprobWriter(kind == "chat", token_texts) for _ in generation.jobs]
        self._head = {
            "id": _ID_PREFIXES[kind] + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers and return the document with them."""
        answers = [_Answer() for _ in self._generation.jobs]
        async for index, update in self._generation.updates():
            answer = answers[index]
            answer.text += update.text
            answer.token_ids += update.token_ids
            answer.logprobs += update.logprobs or ()
            answer.ending, answer.stop_reason = update.ending, update.stop_reason
        return {
            **self._head,
            "object": _OBJECTS[self._kind][0],
            "choices": [await self._choice(index, one) for index, one in enumerate(answers)],
            "usage": self._usage(),
            **self._speculation(),
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield one document for every group of tokens that was committed together.

        `num_tokens` says how many they are, so that times between tokens can be computed.
        """
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        with_counts = bool(options and options.continuous_usage_stats)
        head = {**self._head, "object": _OBJECTS[self._kind][1]}
        begun: set[int] = set()
        async for index, update in self._generation.updates():
            document = {**head, "choices": [await self._delta(index, update, index not in begun)]}
            begun.add(index)
            if with_counts:
                document["usage"] = self._usage()
            elif with_usage:
                document["usage"] = None
            yield document
        if with_usage:
            yield {**head, "choices": [], "usage": self._usage(), **self._speculation()}

    async def _told(
        self, index: int, logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if self._body.num_logprobs is None:
            return None
        return await self._logprobs[index].document(logprobs or ())

    async def _choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        if self._kind == "chat":
            content: dict[str, Any] = {"message": {"role": "assistant", "content": answer.text}}
        else:
            content = {"text": answer.text}
        choice = {
            "index": index,
            **content,
            "logprobs": await self._told(index, answer.logprobs),
            "finish_reason": answer.ending,
            "stop_reason": answer.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = answer.token_ids
            choice["prompt_token_ids"] = self._generation.jobs[index].prompt_token_ids
        return choice

    async def _delta(self, index: int, update: Update, is_first: bool) -> dict[str, Any]:
        if self._kind == "chat":
            role = {"role": "assistant"} if is_first else {}
            content: dict[str, Any] = {"delta": {**role, "content": update.text}}
        else:
            content = {"text": update.text}
        choice = {
            "index": index,
            **content,
            "logprobs": await self._told(index, update.logprobs),
            "finish_reason": update.ending,
            "stop_reason": update.stop_reason,
            "num_tokens": len(update.token_ids),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = update.token_ids
        return choice

    def _usage(self) -> dict[str, int]:
        prompt, completion = (
            self._generation.num_prompt_tokens,
            self._generation.num_completion_tokens,
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _speculation(self) -> dict[str, Any]:
        if self._metrics == "none":
            return {}
        counts = request_metrics(self._generation.metrics(), self._metrics == "detailed")
        return {"metrics": {"speculative_decoding": counts}}
