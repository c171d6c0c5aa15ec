"""The application: which path does what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from looped_spec.serve.completions import CompletionEndpoints
from looped_spec.serve.envelope import METRICS_PATH, Envelope
from looped_spec.serve.errors import ApiError, internal_error
from looped_spec.serve.front import Front, Stage
from looped_spec.serve.metrics import TEXT_TYPE
from looped_spec.serve.protocol import ChatBody, CompletionBody
from looped_spec.serve.responses import JsonResponse, error_response
from looped_spec.serve.status import Document, Status
from looped_spec.version import __version__

PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def create_app(front: Front, status: Status | None = None) -> ASGIApp:
    """Return the application around `front`, which starts and stops with it.

    `status` answers questions about the server; by default it knows of this front alone.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await front.start()
        try:
            yield
        finally:
            await front.stop()

    app = FastAPI(
        title="looped-spec",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # the pages of FastAPI load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    generating = CompletionEndpoints(front)
    _post(app, "/v1/completions", generating.completions, CompletionBody)
    _post(app, "/v1/chat/completions", generating.chat, ChatBody)
    telling = _StatusEndpoints(front, status or Status(front))
    for path, endpoint in (
        ("/v1/models", telling.models),
        ("/v1/models/{name:path}", telling.model),
        ("/health", telling.health),
        (METRICS_PATH, telling.metrics),
        ("/version", telling.version),
        ("/server_info", telling.server_info),
        ("/server_info/history", telling.history),
    ):
        _get(app, path, endpoint)
    for path in PAGE_FILES:
        _get(app, path, _page, include_in_schema=False)
    app.add_exception_handler(ApiError, _tell_error)
    app.add_exception_handler(HTTPException, _tell_http_error)
    app.add_exception_handler(Exception, _tell_internal_error)
    options = front.options
    return Envelope(app, options.api_key, options.api_key_for_metrics)


def _get(app: FastAPI, path: str, endpoint: Any, *, include_in_schema: bool = True) -> None:
    """Add an endpoint to read; who watches a server may ask for its headers alone."""
    app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=include_in_schema)
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _post(app: FastAPI, path: str, endpoint: Any, body: type[CompletionBody | ChatBody]) -> None:
    """Add an endpoint that reads its body itself, and describe the body in the schema."""
    schema = body.model_json_schema()
    content = {"application/json": {"schema": schema}}
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


class _StatusEndpoints:
    """What can be asked of the server itself."""

    def __init__(self, front: Front, status: Status) -> None:
        self._front = front
        self._status = status

    async def models(self) -> Response:
        """List the model, by each of its names."""
        self._front.check_ready()
        data = [self._model(name) for name in self._front.model_names]
        return JsonResponse({"object": "list", "data": data})

    async def model(self, name: str) -> Response:
        """Tell of the model by one of its names."""
        self._front.check_ready()
        self._front.check_model(name)
        return JsonResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        front = self._front
        return {
            "id": name,
            "object": "model",
            "created": int(front.started),
            "owned_by": "looped-spec",
            "max_model_len": front.llm.max_model_len,
        }

    async def health(self) -> Response:
        """Return 200 if requests are served, 503 while loading, draining or failing."""
        front = self._front
        await front.snapshot()
        status = front.stage.value if front.stage is not Stage.READY else "failing"
        if front.is_healthy:
            return JsonResponse({"status": "ok"})
        return JsonResponse({"status": status}, 503, headers={"Retry-After": "1"})

    async def metrics(self) -> Response:
        """Return all metrics for Prometheus."""
        return Response(await self._status.metrics(), headers={"Content-Type": TEXT_TYPE})

    async def version(self) -> Response:
        """Return the version of this package."""
        return JsonResponse({"version": __version__})

    async def server_info(self, request: Request) -> Response:
        """Return what runs, how busy it is, what speculation does and why."""
        return await self._document("info", request)

    async def history(self, request: Request) -> Response:
        """Return the last minutes, point by point."""
        return await self._document("history", request)

    async def _document(self, kind: Document, request: Request) -> Response:
        replica = request.query_params.get("replica")
        return JsonResponse(await self._status.document(kind, replica))


async def _page(request: Request) -> Response:
    """Return a file of the live page."""
    name, media_type = PAGE_FILES[request.url.path]
    text = resources.files("looped_spec.serve").joinpath("page", name).read_bytes()
    return Response(text, media_type=media_type, headers=_PAGE_HEADERS)


async def _tell_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _tell_http_error(request: Request, error: Exception) -> Response:
    """Tell what the router says, a missing path or a wrong method, as an OpenAI error."""
    assert isinstance(error, HTTPException)
    messages = {404: "there is nothing at this path", 405: "this path takes another method"}
    message = messages.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=error.headers))


async def _tell_internal_error(request: Request, error: Exception) -> Response:
    """Tell of a mistake of ours; it is raised again behind this answer, and logged outside."""
    return error_response(internal_error())
