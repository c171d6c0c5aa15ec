"""One of several servers behind Ray Serve's proxy: an engine of its own, in a process of its own.

Ray imports this module in each replica; `ray_deployment` deploys it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric
from ray import serve
from starlette.types import ASGIApp

from looped_spec.serve.app import create_app
from looped_spec.serve.errors import ApiError
from looped_spec.serve.front import Front, Stage
from looped_spec.serve.imports import lasting_imports
from looped_spec.serve.metrics import metrics_text
from looped_spec.serve.options import ServeOptions
from looped_spec.serve.status import Document, Status

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

ASK_SECONDS = 5.0
"""How long the other replicas have to tell of themselves."""


class Replica:
    """What Ray Serve runs in each replica. All of it runs in one event loop."""

    async def __init__(  # type: ignore[misc]  # which Ray Serve awaits
        self, model: str, engine: Mapping[str, Any], options: ServeOptions, default_name: str
    ) -> None:
        """Load `model` with `engine`, keyword arguments of `LLM`; return when it is loaded."""

        def load() -> LLM:
            with lasting_imports():
                from looped_spec.runtime.llm import LLM
            return LLM(model, **engine)

        self.name = serve.get_replica_context().replica_id.unique_id
        self._front = Front(load, options, default_name, self.name)
        self._status = SharedStatus(self._front, self.name)
        is_over = asyncio.Event()
        self._front.on_stage = lambda stage: is_over.set()
        await self._front.start()
        await is_over.wait()
        if self._front.load_error is not None:
            raise self._front.load_error

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return what answers HTTP requests."""
        return create_app(self._front, self._status)

    async def check_health(self) -> None:
        """Raise if this replica should be replaced; Ray Serve asks now and then."""
        if self._front.stage is Stage.READY and not self._front.is_healthy:
            raise RuntimeError("the last answers all failed")

    async def families(self) -> list[Metric]:
        """Return this replica's metrics."""
        return list(await self._status.families())

    async def document(self, kind: Document) -> tuple[str, dict[str, Any]]:
        """Return the replica's name and a document of /server_info."""
        return self.name, await self._status.own_document(kind)

    async def drain(self) -> int:
        """Admit nothing more, end what is left after `drain_seconds`; return how much is open."""
        if self._front.stage is Stage.READY:
            self._front.drain()
            seconds = self._front.options.drain_seconds
            asyncio.get_running_loop().call_later(seconds, self._front.end_all)
        return self._front.num_open


class SharedStatus(Status):
    """Tells of all replicas, whichever of them is asked."""

    def __init__(self, front: Front, name: str) -> None:
        super().__init__(front)
        self._name = name

    async def metrics(self) -> bytes:
        """Return the metrics of every replica; the label `engine` says whose each is."""
        found = await self._ask("families")
        return metrics_text(family for families in found for family in families)

    async def document(self, kind: Document, replica: str | None) -> dict[str, Any]:
        """Return a document of one replica; raise `ApiError` with status 404 if it is not there."""
        if replica is None or replica == self._name:
            return {"replica": self._name, **await self.own_document(kind)}
        documents: dict[str, dict[str, Any]] = dict(await self._ask("document", kind))
        if replica not in documents:
            raise ApiError(404, "there is no such replica", param="replica")
        return {"replica": replica, **documents[replica]}

    async def _ask(self, method: str, *args: object) -> Iterable[Any]:
        """Call a method of every replica; one that is on its way out says nothing."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        try:
            answers = await handle.broadcast(method, *args).results_async(
                timeout_s=ASK_SECONDS, return_exceptions=True
            )
        except TimeoutError as error:
            raise ApiError(
                503, "a replica does not answer", headers={"Retry-After": f"{ASK_SECONDS:.0f}"}
            ) from error
        return [answer for answer in answers if not isinstance(answer, BaseException)]
