"""The server that the load benchmarks start as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

SCRIPT = """#!{python}
import sys
print("listening on http://127.0.0.1:4321", file=sys.stderr, flush=True)
for _ in range(10_000):
    print("a warning that nobody reads" * 5, file=sys.stderr, flush=True)
sys.exit(7)
"""


def test_a_server_that_writes_more_than_a_pipe_holds_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "server"
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    server = ServerProcess("demo:ouro", [])
    assert server.port == 4321
    assert server._process.wait(60) == 7
    assert server.stop() == 7
