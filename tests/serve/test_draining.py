"""What signals do to a server: draining, its end, and what does not end in time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import (
    ENGINE,
    LONG,
    STEP_SECONDS,
    LiveServer,
    SlowEngine,
    http_request,
    running,
    until,
)

from looped_spec import LLM


@contextlib.contextmanager
def two_answers(server: LiveServer) -> Iterator[tuple[Future[Any], Future[Any]]]:
    """A whole answer and a stream that both run."""
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.client.post, "/v1/completions", LONG)
        stream = pool.submit(server.client.stream, "/v1/completions", **LONG)
        until(lambda: len(server.llm.engine.scheduler.running) == 2)
        yield whole, stream


def test_draining_ends_what_runs_and_takes_nothing_new(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LiveServer(lambda: LLM(model, **ENGINE))
    server.wait_until_ready()
    expected = server.client.complete("the cat", max_tokens=40, seed=3).text
    SlowEngine(server, monkeypatch)
    with server.client.streaming("/v1/completions", prompt="the cat", max_tokens=40, seed=3) as s:
        events = [next(s)]
        server.begin_to_stop()
        until(lambda: server.front.stage.value == "draining")
        with pytest.raises(OSError):
            server.client.get("/health")
        events += s
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    server.stop()
    assert server.notes[1] == "open answers: 1; they get up to 30 s to end"


def test_what_does_not_end_in_time_is_ended_with_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LiveServer(lambda: LLM(model, **ENGINE), drain_seconds=0.3)
    server.wait_until_ready()
    SlowEngine(server, monkeypatch)
    with two_answers(server) as (whole, stream):
        server.begin_to_stop()
        assert whole.result().status == 503
        assert whole.result().error["code"] == "shutting_down"
        assert stream.result()[-1]["error"]["code"] == "shutting_down"
    server.stop()


def test_a_second_signal_ends_open_answers_with_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = LiveServer(lambda: LLM(model, **ENGINE))
    server.wait_until_ready()
    SlowEngine(server, monkeypatch)
    with two_answers(server) as (whole, stream):
        for _ in range(2):  # as `timeout` sends it, and still the first
            server.begin_to_stop()
        until(lambda: server.front.stage.value == "draining")
        time.sleep(2 * STEP_SECONDS)
        assert not whole.done() and server.front.num_open == 2
        time.sleep(0.1)
        server.begin_to_stop()
        assert whole.result().error["code"] == "shutting_down"
        assert stream.result()[-1]["error"]["code"] == "shutting_down"
    server.stop()
    assert server.notes[-1] == "open answers: 2; they are ended now"
    assert not caplog.records


def test_after_a_second_signal_connections_that_stay_are_cut_off_without_a_trace(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(model) as server:
        head = http_request("/v1/completions", {"prompt": "the"})[:-5]
        with server.connect() as connection:
            connection.sendall(head)
            server.assert_idle()
            for _ in range(3):
                server.begin_to_stop()
                time.sleep(0.15)
            server._thread.join(5)
            assert not server._thread.is_alive()
    assert not caplog.records
