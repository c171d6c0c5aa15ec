"""A server as a process of its own, for the scripts that put a load on it."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from looped_spec.errors import LoopedSpecError


class ServerProcess:
    """`looped-spec serve` as a process of its own."""

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "looped_spec", "serve", model, "--port", "0", *arguments]
        # A session of its own: Ctrl-C is for whoever started this, who then stops it in order.
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        start = time.monotonic()
        assert self._process.stderr is not None
        try:
            line = self._process.stderr.readline()
        except BaseException:
            self._process.kill()
            raise
        self.ready_seconds = time.monotonic() - start
        found = re.search(r":(\d+)$", line.strip())
        if not found:
            self._process.kill()
            raise SystemExit(f"the server did not start: {line}")
        self.port = int(found[1])
        # A full pipe would hold up the server at its next line.
        self._drain = threading.Thread(target=_drain, args=[self._process.stderr], daemon=True)
        self._drain.start()
        self.seen_bytes: list[int] = []

    def info(self) -> dict[str, Any]:
        """Return /server_info."""
        document: dict[str, Any] = json.loads(self._get("/server_info"))
        return document

    def queue_seconds(self) -> tuple[float, float]:
        """Return how long all requests waited for their first step together, and how many did."""
        text = self._get("/metrics").decode()
        name = "looped_spec:request_queue_time_seconds"
        total, count = (
            float(re.findall(rf"^{name}_{part}{{.*}} (\S+)$", text, re.M)[0])
            for part in ("sum", "count")
        )
        return total, count

    def note_memory(self) -> None:
        """Take note of how much memory the process has."""
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        self.seen_bytes.append(int(fields[1]) * os.sysconf("SC_PAGE_SIZE"))

    def kill(self) -> None:
        """End the process as a fault would."""
        self._process.kill()
        self._process.wait(60)
        self._drain.join(60)

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        except OSError as error:
            raise LoopedSpecError(f"the server does not answer any more ({error})") from error
        finally:
            connection.close()

    def stop(self) -> int:
        """Return the exit code after SIGTERM."""
        self._process.terminate()
        code = self._process.wait(60)
        self._drain.join(60)
        return code


def _drain(pipe: IO[str]) -> None:
    with pipe:
        for _ in pipe:
            pass


def events_of(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the documents of a stream; raise `ConnectionError` if it has no end."""
    while line := response.readline():
        if line == b"data: [DONE]\n":
            return
        if line.strip():
            yield json.loads(line.removeprefix(b"data: "))
    raise ConnectionError("the stream broke off")
