"""A real server on a free port of the loopback interface, in a thread of this process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client import Client
from processes import PATIENCE_SECONDS

from looped_spec.runtime.llm import LLM
from looped_spec.serve.front import Front, Stage
from looped_spec.serve.options import ServeOptions
from looped_spec.serve.server import Server, listen

ENGINE: dict[str, Any] = {
    "num_speculative_tokens": 2,
    "draft_loops": 2,
    "max_num_seqs": 4,
    "block_size": 8,
    "kv_cache_memory_bytes": 2**20,
    "enable_prefix_caching": True,
}
NAME = "tiny"
STEP_SECONDS = 0.03
LONG = {"prompt": "the cat", "max_tokens": 400, "ignore_eos": True, "seed": 1}


class LiveServer:
    """A server that runs; `front` and `llm` are its insides."""

    def __init__(self, load: Callable[[], LLM], **options: Any) -> None:
        self.options = ServeOptions(port=0, **options)
        self.notes: list[str] = []
        self._listener = listen(self.options)
        self.port = self._listener.getsockname()[1]
        self.front = Front(load, self.options, NAME)
        self.server = Server(self.front, self.notes.append)
        self._thread = threading.Thread(target=self.server.run_on, args=(self._listener,))
        self._thread.start()

    @property
    def client(self) -> Client:
        """A client of this server."""
        return Client(self.port)

    def connect(self) -> socket.socket:
        """Return a bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    @property
    def llm(self) -> LLM:
        """The model, once it is loaded."""
        return self.front.llm

    def wait_until_ready(self) -> None:
        """Return once requests are served."""
        # Asking over HTTP again and again would hold up the thread that loads.
        until(lambda: self.front.stage is not Stage.LOADING)
        until(lambda: self.client.get("/health").status == 200)

    def assert_idle(self) -> None:
        """Every request has ended and every block is free, within one deadline."""

        def is_idle() -> bool:
            engine = self.client.get("/server_info").json["engine"]
            return bool(
                engine["num_free_blocks"] == engine["num_blocks"]
                and engine["num_running"] == engine["num_waiting"] == 0
                and self.front.num_open == 0
            )

        until(is_idle)

    def begin_to_stop(self) -> None:
        """Do what a signal does."""
        self.server.handle_exit(15, None)

    def stop(self) -> None:
        """Stop and wait for the end of every thread."""
        self.begin_to_stop()
        self._thread.join(PATIENCE_SECONDS)
        self._listener.close()
        assert not self._thread.is_alive()
        assert self.front.worker.join(PATIENCE_SECONDS)


class SlowEngine:
    """Makes every step of a server take a while, and notes when each began and with how many
    requests."""

    def __init__(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[float] = []
        self.num_running: list[int] = []
        engine = server.llm.engine
        step = engine.step

        def slow(*args: Any) -> Any:
            self.num_running.append(len(engine.scheduler.running))
            self.starts.append(time.monotonic())
            time.sleep(STEP_SECONDS)
            return step(*args)

        monkeypatch.setattr(engine, "step", slow)

    def started_between(self, first: float, last: float) -> int:
        """How many steps began after one moment and before another."""
        return sum(first < start < last for start in list(self.starts))


def http_request(path: str, body: dict[str, Any]) -> bytes:
    """A request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def running(
    model: Path, engine: dict[str, Any] | None = None, **options: Any
) -> Iterator[LiveServer]:
    """A server of `model` that is ready; it is stopped afterwards."""
    server = LiveServer(lambda: LLM(model, **{**ENGINE, **(engine or {})}), **options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
