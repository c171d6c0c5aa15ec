"""The clients of the server's load: what they ask, what they see."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server_process import events_of


@dataclass(frozen=True)
class Item:
    """A request and the text that it must get."""

    prompt: str
    params: dict[str, Any]
    expected: str


@dataclass
class Tally:
    """What the clients saw, in seconds."""

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    num_finished: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    differing: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


class Client:
    """Sends requests, one after the other or at a rate, until the time is over."""

    def __init__(
        self,
        number: int,
        port: int,
        items: Sequence[Item],
        tally: Tally,
        abort: float,
        is_over: threading.Event,
    ) -> None:
        """Choose by `number`; nothing more is asked once `is_over` is set."""
        self._random = random.Random(number)
        self._port, self._items, self._tally, self._abort = port, items, tally, abort
        self._is_over = is_over

    def in_turn(self, until: float) -> None:
        """Ask again as soon as there is an answer."""
        while time.monotonic() < until and not self._is_over.is_set():
            self._ask(self._random.random())

    def at_rate(self, until: float, rate: float) -> None:
        """Ask `rate` times a second on average, at moments that no answer changes."""
        asking = []
        moment = time.monotonic()
        while (moment := moment + self._random.expovariate(rate)) < until:
            if self._is_over.wait(max(moment - time.monotonic(), 0)):
                break
            asking.append(threading.Thread(target=self._ask, args=(0.0,)))  # streamed all
            asking[-1].start()
        for thread in asking:
            thread.join()

    def _ask(self, whole: float) -> None:
        """Send a request, as a stream if `whole` is below 3/4; a failure is counted."""
        item = self._random.choice(self._items)
        try:
            if whole < 0.75:
                self._stream(item)
            else:
                self._whole(item)
        except Exception as error:
            with self._tally.lock:
                self._tally.failures.append(f"{type(error).__name__}: {error}")

    def _whole(self, item: Item) -> None:
        start = time.monotonic()
        with _asking(self._port, item) as response:
            document = json.loads(response.read())
        self._finish(item, document["choices"][0]["text"], time.monotonic() - start)
        with self._tally.lock:
            self._tally.num_tokens += document["usage"]["completion_tokens"]

    def _stream(self, item: Item) -> None:
        leaves_after = self._random.randint(1, 8) if self._random.random() < self._abort else None
        start = before = time.monotonic()
        text, gaps, first, tokens = "", [], 0.0, 0
        with _asking(self._port, item, stream=True) as response:
            for event in events_of(response):
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                now = time.monotonic()
                (choice,) = event["choices"]
                text += choice["text"]
                if not tokens:
                    first = now - start
                else:
                    gaps += [(now - before) / choice["num_tokens"]] * choice["num_tokens"]
                tokens += choice["num_tokens"]
                before = now
                if leaves_after is not None and tokens > leaves_after:
                    with self._tally.lock:
                        self._tally.num_aborted += 1
                    return
        with self._tally.lock:
            self._tally.first_token.append(first)
            self._tally.between_tokens += gaps
            self._tally.num_tokens += tokens
        self._finish(item, text, time.monotonic() - start)

    def _finish(self, item: Item, text: str, seconds: float) -> None:
        with self._tally.lock:
            self._tally.num_finished += 1
            self._tally.whole.append(seconds)
            if text != item.expected:
                seen = {"prompt": item.prompt, "expected": item.expected, "got": text}
                self._tally.differing.append(seen)


class _asking:
    """A request whose answer is read inside; leaving closes the connection."""

    def __init__(self, port: int, item: Item, stream: bool = False) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = json.dumps({"prompt": item.prompt, "stream": stream, **item.params})
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", body, headers)

    def __enter__(self) -> http.client.HTTPResponse:
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            raise RuntimeError(f"{self._response.status} {self._response.read()!r}")
        return self._response

    def __exit__(self, *exc: object) -> None:
        self._response.close()
        self._connection.close()
