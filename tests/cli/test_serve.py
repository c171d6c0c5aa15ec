"""`looped-spec serve` as a process, and its options."""

from __future__ import annotations

import http.client
import json
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE_SECONDS

from looped_spec.cli import main as cli


def serve_command(model: object, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "looped_spec", "serve", str(model), "--port", "0", *arguments]


class Served:
    """A server that runs as a process of its own."""

    def __init__(self, model: object, environment: Mapping[str, str], *arguments: str) -> None:
        self.process = subprocess.Popen(
            serve_command(model, *arguments), stderr=subprocess.PIPE, text=True, env=environment
        )
        self.first = self.line()
        found = re.search(r":(\d+)$", self.first)
        assert found, self.first
        self.port = int(found[1])

    def line(self) -> str:
        """The next line of its diagnostics."""
        assert self.process.stderr is not None
        ready, _, _ = select.select([self.process.stderr], [], [], PATIENCE_SECONDS)
        assert ready, "no line came"
        return self.process.stderr.readline().strip()

    def ask(self, body: dict[str, Any], key: str = "") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        response.connection = connection  # type: ignore[attr-defined]
        return response

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture
def start(tiny_model: Path, environment: dict[str, str]) -> Iterator[Any]:
    """Start a server with arguments; it is killed at the end if it still runs."""
    started: list[Served] = []

    def run(*arguments: str, model: object = tiny_model, **variables: str) -> Served:
        started.append(Served(model, environment | variables, *arguments))
        return started[-1]

    yield run
    for served in started:
        served.process.kill()
        served.process.wait()
        assert served.process.stderr is not None
        served.process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_what_runs_end_and_then_the_process(
    start: Any, number: int, code: int
) -> None:
    served = start("--served-model-name", "mine", "other", LOOPED_SPEC_API_KEY="k")
    assert served.first.startswith("looped-spec: serving mine at http://127.0.0.1:")
    refused = served.ask({"prompt": "the"})
    assert refused.status == 401
    refused.connection.close()
    body = {"prompt": "the", "model": "other", "max_tokens": 90, "ignore_eos": True}
    streaming = served.ask({**body, "stream": True}, "k")
    assert streaming.status == 200
    streaming.readline()
    served.process.send_signal(number)
    rest = streaming.read()
    assert rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest
    streaming.connection.close()
    assert served.process.wait(PATIENCE_SECONDS) == code
    assert served.process.stderr.read().splitlines()[-1] == "looped-spec: stopped"


@pytest.mark.slow
def test_after_a_kill_in_the_middle_of_a_stream_the_port_can_be_taken_again_at_once(
    start: Any,
) -> None:
    first = start()
    streaming = first.ask({"prompt": "the", "max_tokens": 90, "ignore_eos": True, "stream": True})
    assert streaming.readline().startswith(b"data: ")
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises((http.client.HTTPException, OSError)):
        streaming.read()  # it breaks off, and does not end as a stream does
    streaming.connection.close()
    second = start("--port", str(first.port))
    answer = second.ask({"prompt": "the", "max_tokens": 1})
    assert answer.status == 200
    answer.connection.close()
    assert second.end() == 0


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--port", "70000"], "port must be between 0 and 65535, got 70000"),
        (["--prot", "1"], "unknown flag '--prot' (did you mean '--port'?)"),
        (["--max-num-seqs", "0"], "max_num_seqs must be between 1"),
        (["--api-key", "a b"], "api_key must be visible ASCII"),
        (["--per-request-spec-decode-metrics", "all"], "must be one of none, summary, detailed"),
    ],
)
def test_a_wrong_option_is_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "demo:none", *arguments]) == 2
    (line,) = lines_of(capsys)
    assert line.startswith("looped-spec: error: ") and text in line


def test_a_port_in_use_is_one_line_and_nothing_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "demo:none", "--port", str(port)]) == 2
    (line,) = lines_of(capsys)
    assert line == f"looped-spec: error: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_model_that_cannot_be_loaded_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "demo:nothing", "--port", "0"]) == 2
    lines = lines_of(capsys)
    assert lines[-1].startswith("looped-spec: error: unknown demo 'nothing'")
    assert len(lines) <= 2


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name.startswith("looped_spec.serve") and name != "looped_spec.serve.options":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", "demo:none"]) == 2
    (line,) = lines_of(capsys)
    assert line.endswith("serving needs more packages: pip install 'looped-spec[serve]'")


def test_the_name_of_a_folder_tells_nothing_of_where_it_is(tiny_model: Path) -> None:
    from looped_spec.cli.serve import _default_name

    assert _default_name(str(tiny_model)) == "tiny"
    assert _default_name("demo:x") == "demo:x"
    assert _default_name("org/name") == "org/name"
