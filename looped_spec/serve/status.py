"""What a server tells of itself: its metrics and the documents of /server_info."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from prometheus_client.metrics_core import Metric

from looped_spec.serve.front import Front
from looped_spec.serve.info import ServerInfo
from looped_spec.serve.metrics import EngineCollector, metrics_text

Document = Literal["info", "history"]


class Status:
    """Asks one front; a server that shares its address with others asks those too."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._info = ServerInfo(front)
        self._collector = EngineCollector(front.options.metrics_prefix, front.latencies)

    async def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return metrics_text(await self.families())

    async def document(self, kind: Document, replica: str | None) -> dict[str, Any]:
        """Return a document of /server_info; `replica` says whose, None is whoever answers."""
        return await self.own_document(kind)

    async def families(self) -> Iterable[Metric]:
        """Return this front's metrics, each with its samples."""
        return self._collector.families(await self._front.snapshot())

    async def own_document(self, kind: Document) -> dict[str, Any]:
        """Return a document of this front."""
        if kind == "info":
            return self._info.document(await self._front.snapshot())
        history = self._front.history
        return {"interval_seconds": history.interval_seconds, "points": history.as_list()}
