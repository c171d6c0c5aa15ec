"""The two endpoints that generate."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from looped_spec.errors import ConfigError
from looped_spec.sampling_params import SamplingParams
from looped_spec.serve.answers import AnswerWriter, Kind
from looped_spec.serve.bodies import read_json_object
from looped_spec.serve.errors import ApiError
from looped_spec.serve.front import Front
from looped_spec.serve.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    check_body,
)
from looped_spec.serve.responses import EventStream, JsonResponse, unless_disconnected

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's API generates for /v1/completions unless told; a chat goes on to its end."""


class CompletionEndpoints:
    """Answers /v1/completions and /v1/chat/completions."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def completions(self, request: Request) -> Response:
        """Complete one prompt or several."""
        arrival = time.monotonic()
        body = await self._read(CompletionBody, request)

        async def encode() -> list[list[int]]:
            return await self._front.encoder.encode(body.prompt)

        count = len(body.prompt)
        params = self._params(body, DEFAULT_COMPLETION_TOKENS)
        return await self._answer("completion", request, body, params, encode, count, arrival)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        arrival = time.monotonic()
        body = await self._read(ChatBody, request)

        async def encode() -> list[list[int]]:
            return [await self._front.encoder.encode_chat(body)]

        params = self._params(body, self._front.llm.max_model_len)
        return await self._answer("chat", request, body, params, encode, 1, arrival)

    async def _read(self, kind: type[Body], request: Request) -> Body:
        """Return the body of a request that could be served."""
        front = self._front
        options = front.options
        seconds = options.read_timeout_seconds
        document = await read_json_object(request, options.max_body_bytes, seconds)
        front.check_ready()
        most_items = {
            "prompt": front.num_places,
            "messages": options.max_messages,
            "stop": options.max_stop_strings,
        }
        body = check_body(kind, document, most_items)
        self._admit(body)
        return body

    def _admit(self, body: GenerationBody) -> None:
        """Refuse what could not be served, before any work."""
        front = self._front
        front.check_model(body.model)
        options = front.options
        if (body.n or 1) > options.max_n:
            raise ApiError(400, f"n must be between 1 and {options.max_n}, got {body.n}", param="n")
        if (body.num_logprobs or 0) > options.max_logprobs:
            name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
            raise ApiError(
                400,
                f"{name} must be between 0 and {options.max_logprobs}, got {body.num_logprobs}",
                param=name,
            )
        if len(body.stop or ()) > options.max_stop_strings:  # one that came without a list
            raise ApiError(
                400,
                f"stop may have {options.max_stop_strings} texts, got {len(body.stop or ())}",
                param="stop",
            )
        if body.stop and not front.encoder.has_tokenizer:
            raise ApiError(400, "stop needs a tokenizer, and this model has none", param="stop")
        if body.stop_token_ids:
            front.encoder.check_ids(body.stop_token_ids, "stop_token_ids")

    def _params(self, body: GenerationBody, default_max_tokens: int) -> SamplingParams:
        try:
            return body.sampling_params(default_max_tokens)
        except ConfigError as error:
            name = str(error).split()[0]
            param = name if name in type(body).model_fields else None
            raise ApiError(400, str(error), param=param) from error

    async def _answer(
        self,
        kind: Kind,
        request: Request,
        body: GenerationBody,
        params: SamplingParams,
        encode: Callable[[], Awaitable[list[list[int]]]],
        num_prompts: int,
        arrival: float,
    ) -> Response:
        front, n = self._front, body.n or 1
        with front.reserve(num_prompts * n) as reservation:
            try:
                prompts = await encode()
            except ConfigError as error:
                raise ApiError(400, str(error)) from error
            front.check_ready()
            generation = await front.generate(prompts, params, n, reservation, arrival)
        writer = AnswerWriter(
            kind,
            front.model_names[0],
            body,
            generation,
            front.options.per_request_spec_decode_metrics,
            front.encoder.token_texts,
        )
        if body.stream:
            return EventStream(writer.events(), generation.close)
        try:
            return JsonResponse(await unless_disconnected(request, writer.whole))
        finally:
            generation.close()
