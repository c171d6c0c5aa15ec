"""What surrounds every request: its id, the key it must bring, and the last resort for errors."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from looped_spec.serve.errors import ApiError, internal_error
from looped_spec.serve.responses import error_response

logger = logging.getLogger(__name__)

_GOOD_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_OPEN_PATHS = frozenset({"/", "/health", "/version", "/page.css", "/page.js"})
METRICS_PATH = "/metrics"


class Envelope:
    """ASGI middleware around the whole application."""

    def __init__(
        self, app: ASGIApp, api_key: str | None = None, api_key_for_metrics: bool = False
    ) -> None:
        self._app = app
        self._digest = None if api_key is None else _digest(api_key)
        self._open = _OPEN_PATHS if api_key_for_metrics else _OPEN_PATHS | {METRICS_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an HTTP request; websockets are refused, other events passed on."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        has_started = has_ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started, has_ended
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)
            has_ended = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            self._check_key(scope)
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("%s %s failed", scope["method"], request_id)
            if has_ended:
                return
            if has_started:
                raise  # the connection is closed in the middle, so that the client notices
            known = error if isinstance(error, ApiError) else internal_error()
            await error_response(known)(scope, receive, send_with_id)

    def _check_key(self, scope: Scope) -> None:
        if self._digest is None or scope["path"] in self._open:
            return
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Digests are of one length, so the time tells nothing of the key's.
        if kind.lower() != "bearer" or not hmac.compare_digest(_digest(given), self._digest):
            raise ApiError(
                401,
                "a valid key is needed: send 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()


def _request_id(headers: Headers) -> str:
    """Return the client's id for its request if it may be repeated in a header, or a new one."""
    given = headers.get("x-request-id", "")
    return given if _GOOD_ID.fullmatch(given) else secrets.token_hex(16)
