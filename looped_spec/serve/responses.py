"""HTTP answers: JSON documents, and streams of events that notice when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from looped_spec.serve.errors import ApiError

Result = TypeVar("Result")


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Return compact JSON in UTF-8; half of a surrogate pair becomes its escape."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class JsonResponse(Response):
    """A JSON document."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json_bytes(content)


def error_response(error: ApiError) -> JsonResponse:
    """Return the answer that tells of an error."""
    return JsonResponse(error.as_dict(), error.status, headers=error.headers)


class EventStream(Response):
    """Server-sent events, one for each document of `events`, then `[DONE]`.

    `on_end` is called in any case: at the end, when the client went away, when the task is
    cancelled. An `ApiError` of `events` becomes the last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[Mapping[str, Any]], on_end: Callable[[], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until there is nothing more, or nobody to send it to."""
        try:
            await first_of(self._send_all(send), disconnected(receive))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            async for document in self._events:
                await write(b"data: " + json_bytes(document) + b"\n\n")
        except ApiError as error:
            await write(b"data: " + json_bytes(error.as_dict()) + b"\n\n")
        await write(b"data: [DONE]\n\n", more=False)


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone away; only after its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Callable[[], Awaitable[Result]]) -> Result:
    """Return what `work` gives; cancel it when the client goes away before that.

    Raises `ApiError` then, which nobody will read.
    """
    results: list[Result] = []

    async def note_result() -> None:
        results.append(await work())

    await first_of(note_result(), disconnected(request.receive))
    if not results:
        raise ApiError(400, "the client went away")
    return results[0]


async def first_of(work: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Run both until one ends, and wait until the other is cancelled; raise what `work` raises."""
    tasks = [asyncio.create_task(work), asyncio.create_task(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not tasks[0].cancelled():
        tasks[0].result()
