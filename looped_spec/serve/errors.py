"""What a client is told went wrong: OpenAI's error object, never a path or a trace."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_TYPES: Mapping[int, tuple[str, str | None]] = MappingProxyType(
    {
        400: ("invalid_request_error", None),
        401: ("authentication_error", "invalid_api_key"),
        404: ("invalid_request_error", "not_found"),
        405: ("invalid_request_error", "method_not_allowed"),
        408: ("invalid_request_error", "request_timeout"),
        413: ("invalid_request_error", "request_too_large"),
        415: ("invalid_request_error", "unsupported_media_type"),
        429: ("rate_limit_error", "queue_full"),
        500: ("server_error", "internal_error"),
        503: ("server_error", "unavailable"),
    }
)


class ApiError(Exception):
    """An answer other than success.

    Attributes:
        status: the HTTP status; within a stream, which has one already, only the object tells.
        param: the request field that is at fault.
        headers: to send along, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """Return the error object."""
        kind, code = _TYPES.get(self.status, ("invalid_request_error", None))
        error = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code or code,
        }
        return {"error": error}


def internal_error() -> ApiError:
    """Return what a client is told of a failure of ours; the log has the rest."""
    return ApiError(500, "the server failed to answer this request; its log says why")


def loading_error() -> ApiError:
    """Return what a client is told before the model is ready."""
    return ApiError(
        503, "the model is still loading", code="model_loading", headers={"Retry-After": "1"}
    )


def draining_error() -> ApiError:
    """Return what a client is told once the server is on its way out."""
    return ApiError(
        503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"}
    )
