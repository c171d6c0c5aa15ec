"""Running the application: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from looped_spec.errors import ConfigError
from looped_spec.serve.app import create_app
from looped_spec.serve.front import Front, Stage
from looped_spec.serve.options import ServeOptions

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

_BACKLOG = 2048
_GRACE_SECONDS = 2.0
"""How long connections may take to close once their answers have ended."""

_SAME_SECONDS = 0.1
"""Signals that come within so long are one: `timeout` sends its own to a process and to its group,
which is twice to the same."""


class Server(uvicorn.Server):
    """uvicorn's server, which drains on a signal and then returns instead of raising it again."""

    def __init__(self, front: Front, notify: Callable[[str], None]) -> None:
        """Serve `front`; `notify` is told in a line of each change."""
        options = front.options
        self._front = front
        self._notify = notify
        self.address = ""
        self.signal: int | None = None
        self._last_signal = 0.0
        self._is_hurried = False
        self.has_ended = False
        front.on_stage = self._on_stage
        super().__init__(
            uvicorn.Config(
                create_app(front),
                lifespan="on",
                log_config=None,
                log_level="error",  # a warning for every client that speaks no HTTP is too much
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=int(options.drain_seconds + 1 + _GRACE_SECONDS),
            )
        )

    def run_on(self, listener: socket.socket) -> None:
        """Serve on a socket until a signal, or until loading fails."""
        host, port = listener.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.run(sockets=[listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM for a while, where that is possible; called in the event
        loop."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end what is open at the second, close connections as they are
        at the third."""
        last, self._last_signal = self._last_signal, time.monotonic()
        if self.signal is None:
            self.signal = sig
            self.should_exit = True  # noticed within 0.1 s, in the event loop
        elif self._last_signal - last > _SAME_SECONDS:
            follow = self._cut_off if self._is_hurried else self._hurry
            self._is_hurried = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(follow)

    def _hurry(self) -> None:
        """End open answers with an error, and give it a moment to arrive."""
        front = self._front
        if front.num_open:
            self._notify(f"open answers: {front.num_open}; they are ended now")
        front.drain()
        front.end_all()
        self._loop.call_later(_GRACE_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        """Wait for nobody. What uvicorn logs of the tasks that it cancels then is no news."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, let what runs come to its end, or end it after `drain_seconds`."""
        front = self._front
        front.drain()
        if front.num_open:
            seconds = front.options.drain_seconds
            self._notify(f"open answers: {front.num_open}; they get up to {seconds:g} s to end")
        timer = asyncio.get_running_loop().call_later(front.options.drain_seconds, front.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _on_stage(self, stage: Stage) -> None:
        if stage is Stage.READY:
            self._notify(f"serving {self._front.model_names[0]} at {self.address}")
        elif stage is Stage.FAILED:
            self.should_exit = True


def listen(options: ServeOptions) -> socket.socket:
    """Return a listening socket; raise `ConfigError` if the address cannot be had."""
    where = f"{options.host}:{options.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def serve(
    load: Callable[[], LLM],
    options: ServeOptions,
    default_name: str,
    notify: Callable[[str], None],
) -> Server:
    """Serve until a signal; raise what `load` raised if the model could not be loaded.

    Returns the server, whose `signal` says what ended it, and whose `has_ended` whether the
    engine's thread did: in the middle of loading only the end of the process stops it.
    """
    with listen(options) as listener:
        front = Front(load, options, default_name)
        server = Server(front, notify)
        server.run_on(listener)
    if front.load_error is not None:
        raise front.load_error
    server.has_ended = front.worker.join(_GRACE_SECONDS)
    return server
