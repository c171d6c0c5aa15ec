"""Loading, load, clients that go away."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import ENGINE, LONG, LiveServer, SlowEngine, http_request, running, until

from looped_spec import LLM
from looped_spec.errors import CapacityError, ModelLoadError
from looped_spec.runtime.request import Request
from looped_spec.serve.job import Job
from looped_spec.serve.server import listen


@pytest.fixture
def slow(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> SlowEngine:
    return SlowEngine(server, monkeypatch)


def test_while_loading_the_server_answers_but_does_not_serve(model: Path) -> None:
    go = threading.Event()

    def load() -> LLM:
        go.wait(60)
        return LLM(model, **ENGINE)

    server = LiveServer(load)
    try:
        client = server.client
        assert (client.get("/health").status, client.get("/health").json) == (
            503,
            {"status": "loading"},
        )
        for reply in (client.complete("the"), client.chat("the"), client.get("/v1/models")):
            assert (reply.status, reply.error["code"]) == (503, "model_loading")
            assert reply.headers["retry-after"] == "1"
        assert client.get("/server_info").json["stage"] == "loading"
        assert client.get("/metrics").status == client.get("/").status == 200
        assert client.get("/version").status == 200
        go.set()
        server.wait_until_ready()
        assert client.complete("the", max_tokens=1).status == 200
        (note,) = server.notes
        assert note == f"serving tiny at http://127.0.0.1:{server.port}"
    finally:
        go.set()
        server.stop()


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> LLM:
        raise ModelLoadError("no weights")

    server = LiveServer(load)
    until(lambda: not server._thread.is_alive())
    assert isinstance(server.front.load_error, ModelLoadError)
    server.stop()


def test_a_new_request_waits_for_no_more_than_the_running_round(
    server: LiveServer, slow: SlowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[float, list[Job]]] = []
    submit = server.front.worker.submit

    def noting(jobs: Any) -> Any:
        queued = submit(jobs)
        sent.append((time.monotonic(), jobs))
        return queued

    monkeypatch.setattr(server.front.worker, "submit", noting)
    with server.client.streaming("/v1/completions", **LONG) as stream:
        next(stream)
        for _ in range(5):
            assert server.client.complete("then", max_tokens=1).status == 200
    waited = []
    for moment, (job,) in sent:
        assert job.scheduled is not None
        waited.append(slow.started_between(moment, job.scheduled))
    # A step may have looked for requests just before, and begun just after, one was sent.
    assert len(waited) == 6 and max(waited) <= 1 and sum(waited) <= 2
    assert all(job.arrival <= job.scheduled for _, (job,) in sent)
    server.assert_idle()


def test_a_first_token_does_not_wait_for_the_round_of_the_others(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that follows its prefill in the same step waits until the token has arrived."""
    monkeypatch.setattr(server.front.worker, "_take_newcomers", lambda: False)  # but between steps
    arrived = threading.Event()
    runner = server.llm.engine.runner
    whole_round = runner.round
    in_time: list[bool] = []  # what the engine's thread raises is no failure of the test

    def waiting(*args: Any) -> Any:
        if len(server.llm.engine.scheduler.running) > 1:
            in_time.append(arrived.wait(10))
        return whole_round(*args)

    with server.client.streaming("/v1/completions", **LONG) as stream:
        next(stream)
        monkeypatch.setattr(runner, "round", waiting)
        with server.client.streaming(
            "/v1/completions", prompt="then", max_tokens=3, ignore_eos=True
        ) as other:
            assert next(other)["choices"][0]["num_tokens"] == 1
            arrived.set()
            assert [event["choices"][0]["finish_reason"] for event in other][-1] == "length"
    assert in_time and all(in_time)
    server.assert_idle()


def test_a_first_token_does_not_wait_for_the_end_of_a_round_that_is_under_way(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round stands still between two passes until one request was refused, and between two later
    ones until a newcomer's token has arrived."""
    begun, refused, arrived = threading.Event(), threading.Event(), threading.Event()
    worker, engine = server.front.worker, server.llm.engine
    whole_round, check = engine.runner.round, engine.scheduler.check
    in_time: list[bool] = []

    def holding(*args: Any) -> Any:
        *rest, look_for_newcomers = args
        if begun.is_set():
            return whole_round(*args)
        begun.set()

        def look() -> None:
            if not arrived.is_set():
                until(lambda: bool(worker._newcomers))
            answered = arrived if refused.is_set() else refused
            look_for_newcomers()
            in_time.append(answered.wait(10))

        return whole_round(*rest, look)

    def refuse_some(request: Request) -> None:
        if request.prompt_token_ids == [5]:
            raise CapacityError("it can never fit")
        check(request)

    with server.client.streaming("/v1/completions", **LONG) as stream:
        next(stream)
        monkeypatch.setattr(engine.scheduler, "check", refuse_some)
        monkeypatch.setattr(engine.runner, "round", holding)
        assert begun.wait(30)
        assert server.client.complete([5]).status == 400
        refused.set()
        with server.client.streaming(
            "/v1/completions", prompt="then", max_tokens=3, ignore_eos=True
        ) as other:
            assert next(other)["choices"][0]["num_tokens"] == 1
            arrived.set()
            assert [event["choices"][0]["finish_reason"] for event in other][-1] == "length"
    assert len(in_time) > 1 and all(in_time)
    server.assert_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(
    server: LiveServer,
    slow: SlowEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    stream: bool,
) -> None:
    steps_when_heard: list[int] = []
    abort = server.front.worker.abort

    def noting(jobs: Any) -> None:
        is_early = any(not job.has_ended for job in jobs)
        abort(jobs)
        if is_early:
            steps_when_heard.append(len(slow.starts))

    monkeypatch.setattr(server.front.worker, "abort", noting)
    body: dict[str, Any] = {**LONG, "stream": stream, "n": 2}
    if "chat" in path:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "the"}]
    allocator = server.llm.engine.scheduler.allocator
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.client.complete, "then", max_tokens=20, seed=2)
        with server.connect() as connection:
            connection.sendall(http_request(path, body))
            until(lambda: len(server.llm.engine.scheduler.running) >= 2)
        until(lambda: server.front.num_open <= 1)
        # One may have begun, but not been noted, when the front heard of it.
        assert sum(count > 1 for count in slow.num_running[steps_when_heard[0] :]) <= 1
        assert other.result().status == 200
    server.assert_idle()
    assert allocator.num_free == allocator.num_blocks


def test_a_client_that_goes_away_in_the_queue_is_forgotten(
    server: LiveServer, slow: SlowEngine
) -> None:
    before = len(slow.starts)
    sockets = []
    for _ in range(12):
        sockets.append(server.connect())
        sockets[-1].sendall(http_request("/v1/completions", LONG))
    until(lambda: server.front.num_open == 12)
    for connection in sockets:
        connection.close()
    server.assert_idle()
    assert len(slow.starts) - before < 400 / 3, "nobody ran to the end"


def test_a_full_queue_refuses_with_429_and_says_when_to_come_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, {"max_num_seqs": 1}, max_queued_requests=2) as server:
        SlowEngine(server, monkeypatch)
        client = server.client
        with ThreadPoolExecutor(3) as pool:
            taken = [pool.submit(client.complete, "the", max_tokens=30) for _ in range(3)]
            until(lambda: server.front.num_open == 3)
            for reply in (client.complete("the"), client.chat("the"), client.complete("a", n=2)):
                assert (reply.status, reply.error["code"]) == (429, "queue_full")
                assert int(reply.headers["retry-after"]) >= 1
            assert [one.result().status for one in taken] == [200] * 3
        assert client.complete("the", max_tokens=1, n=3).status == 200
        reply = client.complete("the", max_tokens=1, n=4)
        assert reply.status == 400, "it could never be taken"
        assert client.complete("", max_tokens=1).status == 400
        server.assert_idle()
        assert client.complete(["the"] * 3, max_tokens=1).status == 200, "refusals give back places"


def test_a_body_that_does_not_come_is_not_waited_for(model: Path) -> None:
    with running(model, read_timeout_seconds=0.3) as server:
        head = http_request("/v1/completions", {"prompt": "the"})[:-5]
        with server.connect() as connection:
            connection.sendall(head)
            assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert server.client.complete("the", max_tokens=1).status == 200
        server.assert_idle()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for both ends of a thousand connections in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this user may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_connections_that_send_nothing_or_read_nothing_stop_nobody(
    server: LiveServer, many_files: None
) -> None:
    with many_connections(server, 1000) as connections:
        for number, connection in enumerate(connections):
            if number % 3 == 1:
                connection.sendall(b"POST /v1/compl")
            elif number % 3 == 2:
                connection.sendall(b"\x00\xff not http\r\n\r\n")
        connections[0].sendall(http_request("/v1/completions", {**LONG, "stream": True}))
        start = time.monotonic()
        assert server.client.complete("the", max_tokens=1).status == 200
        # Before they are given up; with room, as other programs may run beside the tests.
        assert time.monotonic() - start < server.options.read_timeout_seconds - 5
    server.assert_idle()


def test_an_address_in_use_is_told_in_one_line(server: LiveServer) -> None:
    import dataclasses

    from looped_spec.errors import ConfigError

    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{server.port}: \w+"):
        listen(dataclasses.replace(server.options, port=server.port))
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:8000"):
        listen(dataclasses.replace(server.options, host="no.such.host.invalid", port=8000))


@contextlib.contextmanager
def many_connections(server: LiveServer, count: int) -> Iterator[list[socket.socket]]:
    """Open connections to a server, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server.connect()) for _ in range(count)]
