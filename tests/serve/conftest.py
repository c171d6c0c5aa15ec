"""A tiny model with a chat template, and servers of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, running
from tiny_model import write_tiny_model

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant', 'system') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if shout %}LOUD {% endif %}assistant:"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 3 loops; tests must not change it."""
    folder = write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512
    )
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def shared(model: Path) -> Iterator[LiveServer]:
    """A server for tests that leave it as it was."""
    with running(model) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    """The shared server; after each test all its blocks are free."""
    yield shared
    shared.assert_idle()
