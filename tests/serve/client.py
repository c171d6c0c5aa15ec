"""A plain HTTP client that checks nothing, and a plain reader of server-sent events."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from processes import PATIENCE_SECONDS

JSON_TYPE = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """A whole answer; the names of headers are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which must have OpenAI's keys and nothing else."""
        document = self.json
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        return dict(document["error"])

    @property
    def text(self) -> str:
        """The text of the only choice."""
        (choice,) = self.json["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])


class Client:
    """Sends requests to a port of the loopback interface, each on a connection of its own."""

    def __init__(self, port: int, headers: Mapping[str, str] | None = None) -> None:
        self.port = port
        self._headers = dict(headers or {})

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        """Send a request and read the answer."""
        with self._opened(method, path, body, headers) as response:
            named = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, named, response.read())

    def get(self, path: str, **headers: str) -> Reply:
        """Send a GET."""
        return self.send("GET", path, None, **headers)

    def post(self, path: str, document: object) -> Reply:
        """Send JSON."""
        return self.send("POST", path, json.dumps(document).encode(), **JSON_TYPE)

    def complete(self, prompt: object, **fields: Any) -> Reply:
        """Ask for a completion."""
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, text: str, **fields: Any) -> Reply:
        """Ask for the answer to one message."""
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    @contextlib.contextmanager
    def streaming(self, path: str, **document: Any) -> Iterator[Iterator[Any]]:
        """Ask for a stream and iterate over its documents as they come; leaving closes the
        connection. The stream must end with `[DONE]`."""
        body = json.dumps({"stream": True, **document}).encode()
        with self._opened("POST", path, body, JSON_TYPE) as response:
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield _documents(response)

    def stream(self, path: str, **document: Any) -> list[Any]:
        """Ask for a stream and return all of its documents."""
        with self.streaming(path, **document) as documents:
            return list(documents)

    @contextlib.contextmanager
    def _opened(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = None
        try:
            connection.request(method, path, body, {**self._headers, **named})
            response = connection.getresponse()
            yield response
        finally:
            if response is not None:
                response.close()
            connection.close()


def _documents(response: http.client.HTTPResponse) -> Iterator[Any]:
    while True:
        line = response.readline()
        assert line.startswith(b"data: "), line
        assert response.readline() == b"\n"
        data = line.removeprefix(b"data: ").rstrip(b"\n")
        if data == b"[DONE]":
            assert response.read() == b""
            return
        yield json.loads(data)


def stamped(documents: Iterator[Any]) -> Iterator[tuple[float, Any]]:
    """Each document with the time of its arrival."""
    for document in documents:
        yield time.monotonic(), document
