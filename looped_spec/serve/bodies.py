"""Reading the JSON body of a request, within limits of size and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from looped_spec.atomic_json import without_repeats
from looped_spec.serve.errors import ApiError

THREAD_BYTES = 64 * 1024
"""A body of more is parsed in a thread, so that streams go on meanwhile."""


async def read_json_object(request: Request, max_bytes: int, seconds: float) -> dict[str, Any]:
    """Return the body, which must be a JSON object in UTF-8.

    Raises `ApiError` with status 415 for another media type, 413 for more than `max_bytes`, 408 if
    it took more than `seconds`, 400 for what is no JSON object.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        # A page of another site cannot send this type without being asked for permission first.
        raise ApiError(415, "the body must be JSON, sent with 'Content-Type: application/json'")
    try:
        async with asyncio.timeout(seconds or None):
            data = await _read(request, max_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"the body took more than {seconds:g} seconds") from error
    if len(data) > THREAD_BYTES:
        return await asyncio.to_thread(parse_json_object, data)
    return parse_json_object(data)


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that `data` is; raise `ApiError` if it is none."""
    try:
        document = json.loads(
            data.decode(), parse_constant=_refuse, object_pairs_hook=without_repeats
        )
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not valid UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        reason = str(error)[:200]
        if "set_int_max_str_digits" in reason:  # Python's limit, in words for programmers
            reason = "a number has thousands of digits"
        raise ApiError(400, f"the body is not valid JSON: {reason}") from error
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    return document


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body must have at most {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise too_large
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(400, "the client went away before its request was complete") from error
    return b"".join(parts)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
