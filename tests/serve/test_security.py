"""Who may ask, and what an answer may not tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from client import Client
from live_server import LiveServer, running

from looped_spec.errors import ConfigError
from looped_spec.serve.options import ServeOptions

KEY = "s3cret-key"
OPEN_PATHS = ("/", "/page.css", "/page.js", "/health", "/version")


@pytest.fixture(scope="module")
def locked(model: Path) -> LiveServer:
    with running(model, api_key=KEY) as server:
        yield server


def test_only_the_key_opens_what_tells_or_generates(locked: LiveServer) -> None:
    for path in ("/v1/models", "/server_info", "/server_info/history", "/openapi.json", "/no"):
        for header in (
            {},
            {"Authorization": f"Bearer {KEY}x"},
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer \xff"},
        ):
            reply = locked.client.get(path, **header)
            assert reply.status == 401, (path, header)
            assert reply.error["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert KEY not in reply.body.decode()
        assert locked.client.get(path, Authorization=f"bearer {KEY}").status in (200, 404)
    assert locked.client.complete("the", max_tokens=1).status == 401
    client = Client(locked.port, {"Authorization": f"Bearer {KEY}"})
    assert client.complete("the", max_tokens=1).status == 200


def test_health_version_page_and_metrics_are_open(locked: LiveServer) -> None:
    for path in (*OPEN_PATHS, "/metrics"):
        assert locked.client.get(path).status == 200, path


def test_metrics_ask_for_the_key_by_option(model: Path) -> None:
    with running(model, api_key=KEY, api_key_for_metrics=True) as server:
        assert server.client.get("/metrics").status == 401
        assert server.client.get("/metrics", Authorization=f"Bearer {KEY}").status == 200


def test_the_server_listens_on_this_machine_only_unless_told() -> None:
    assert ServeOptions().host == "127.0.0.1"


def test_no_answer_names_a_path_of_the_server(server: LiveServer, model: Path) -> None:
    client = server.client
    replies = [
        client.get("/server_info"),
        client.get("/v1/models"),
        client.get("/metrics"),
        client.get("/openapi.json"),
        client.complete("the", max_tokens=1, model=str(model)),
        client.complete("the", max_tokens=1, adapter_options={}),
        client.chat("a", chat_template_kwargs={"chat_template": "{{ 7 * 7 }}"}),
    ]
    for reply in replies[:4] + replies[5:]:
        assert str(model.parent) not in reply.body.decode()
        assert "Traceback" not in reply.body.decode()
    assert [reply.status for reply in replies] == [200] * 4 + [404, 400, 400]


def test_the_page_may_load_nothing_from_elsewhere(server: LiveServer) -> None:
    headers = server.client.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy and "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_the_key_is_not_shown_with_the_settings() -> None:
    from looped_spec.settings import Settings

    settings = Settings.from_environment({"LOOPED_SPEC_API_KEY": KEY})
    assert settings.api_key == KEY
    assert KEY not in repr(settings)
    assert Settings.from_environment({"LOOPED_SPEC_API_KEY": ""}).api_key is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"port": 70000}, "port must be between 0 and 65535, got 70000"),
        ({"port": "80"}, "port must be an integer"),
        ({"host": ""}, "host must be an address"),
        ({"api_key": "a b"}, "api_key must be visible ASCII"),
        ({"api_key": ""}, "api_key must be visible ASCII"),
        ({"api_key_for_metrics": True}, "api_key_for_metrics needs api_key"),
        ({"metrics_prefix": "a:b"}, "metrics_prefix must be letters"),
        ({"max_n": 0}, "max_n must be between 1"),
        ({"max_body_bytes": 10}, "max_body_bytes must be between 1024"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be between 1"),
        ({"drain_seconds": float("inf")}, "drain_seconds must be a finite number"),
        ({"served_model_name": ("a", "")}, "served_model_name must be names"),
        (
            {"per_request_spec_decode_metrics": "sumary"},
            "must be one of none, summary, detailed, got 'sumary' (did you mean 'summary'?)",
        ),
        ({"prot": 1}, "unknown option 'prot' (did you mean 'port'?)"),
    ],
)
def test_a_wrong_option_is_refused_with_its_range(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServeOptions.from_kwargs(options)
    assert text in str(error.value)
