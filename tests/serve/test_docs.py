"""What docs/serving.md says is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from live_server import LiveServer
from tree import ROOT

from looped_spec.cli.main import main
from looped_spec.options import EngineOptions
from looped_spec.serve.app import PAGE_FILES, create_app
from looped_spec.serve.front import Front
from looped_spec.serve.options import ServeOptions
from looped_spec.serve.protocol import ChatBody, CompletionBody

TEXT = (ROOT / "docs/serving.md").read_text()


def no_model() -> Any:
    raise AssertionError("nothing is loaded here")


def test_every_endpoint_is_listed() -> None:
    app: Any = create_app(Front(no_model, ServeOptions(), "x"))
    routes = [route for route in app._app.routes if isinstance(route, APIRoute)]
    served = {f"{method} {route.path}" for route in routes for method in route.methods - {"HEAD"}}
    served = {path.replace("{name:path}", "NAME") for path in served}
    documented = set(re.findall(r"^\| `((?:GET|POST) \S+)` \|", TEXT, re.M))
    page = {f"GET {path}" for path in PAGE_FILES} - {"GET /"}
    assert documented - {"GET /openapi.json"} == served - page


def test_the_headers_of_whatever_can_be_read_can_be_had_alone(server: LiveServer) -> None:
    for path in sorted(set(re.findall(r"^\| `GET (\S+)` \|", TEXT, re.M)) - {"/openapi.json"}):
        path = path.replace("NAME", "tiny")
        whole, head = server.client.get(path), server.client.send("HEAD", path)
        assert (head.status, head.body) == (whole.status, b"") == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]


def test_every_supported_field_is_named() -> None:
    section = TEXT[TEXT.index("## Requests") : TEXT.index("Any other field is refused")]
    named = set(re.findall(r"`(\w+)`", section))
    assert named == {*CompletionBody.model_fields, *ChatBody.model_fields} | {
        "include_usage",
        "continuous_usage_stats",
    }


def test_every_flag_is_named_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    columns = re.findall(r"^  (-\S.*?)(?:  |$)", shown, re.M)
    flags = {flag for column in columns for flag in re.findall(r"--[a-z-]+", column)}
    assert len(flags) > 50
    assert set(re.findall(r"`(--[a-z-]+)", TEXT)) == flags - {"--help"}


def test_the_defaults_in_the_tables_are_those_of_the_options() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\d+) \|", TEXT, re.M)
    assert len(rows) > 8
    for flag, shown in rows:
        name = flag.replace("-", "_")
        options = ServeOptions if name in ServeOptions.help_texts() else EngineOptions
        assert float(getattr(options(), name)) == float(shown), flag


def test_the_keys_of_speculation_are_explained(server: LiveServer) -> None:
    reply = server.client.complete("the", max_tokens=9, seed=1)
    keys = set(reply.json["metrics"]["speculative_decoding"])
    section = TEXT[TEXT.index("| key | meaning |") : TEXT.index("## Errors")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == keys


def test_the_example_runs(server: LiveServer, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("openai", reason="the openai client is not installed")
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    example = example.replace(":8000/", f":{server.port}/").replace("demo:ouro", "tiny")
    names: dict[str, Any] = {}
    try:
        exec(compile(example, "serving.md", "exec"), names)
    finally:
        names["client"].close()
    assert capsys.readouterr().out.strip()
