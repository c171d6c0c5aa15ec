"""The load on a server, on servers and clients that only pretend: what is kept and when."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import serve_load
from serve_clients import Item, Tally


class FakeServer:
    """Answers what the script asks of a server."""

    started: list[FakeServer]

    def __init__(self, model: str, arguments: list[str]) -> None:
        self.port, self.ready_seconds = 1, 2.5
        self.mode = "plain" if "0" in arguments else "speculation"
        self.seen_bytes: list[int] = []
        self.held, self.num_asked, self.is_stopped = 0, 0, False
        self.started.append(self)

    def info(self) -> dict[str, Any]:
        engine = {"num_blocks": 9, "num_free_blocks": 9 - self.held}
        return {"engine": engine, "speculation": {"draft_acceptance_rate": 0.5}}

    def queue_seconds(self) -> tuple[float, float]:
        self.num_asked += 1
        return 0.25 * self.num_asked, float(self.num_asked)

    def note_memory(self) -> None:
        self.seen_bytes.append(2**20 * (100 + len(self.seen_bytes)))

    def kill(self) -> None:
        self.is_stopped = True

    def stop(self) -> int:
        self.is_stopped = True
        return 0


class FakeClient:
    """Is answered at once, three times a turn; the turn that `interrupted_in` names is interrupted
    before its last answer."""

    turns = 0
    interrupted_in = 0
    wrong_in = 0

    def __init__(self, number: int, port: int, items: Any, tally: Tally, *_: Any) -> None:
        self._tally, self._is_over = tally, _[-1]

    def in_turn(self, until: float) -> None:
        FakeClient.turns += 1
        self._answer()
        self._answer()
        if FakeClient.turns == self.interrupted_in:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert self._is_over.wait(60)
        if FakeClient.turns == self.wrong_in:
            self._tally.differing.append({"prompt": "a", "expected": "b", "got": "c"})
        self._answer()

    def _answer(self) -> None:
        with self._tally.lock:
            self._tally.num_finished += 1
            self._tally.num_tokens += 10
            self._tally.first_token.append(0.1)
            self._tally.between_tokens.append(0.01)
            self._tally.whole.append(0.3)


@pytest.fixture(autouse=True)
def nothing_real(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeServer.started = []
    monkeypatch.setattr(FakeClient, "turns", 0)
    monkeypatch.setattr(serve_load, "ServerProcess", FakeServer)
    monkeypatch.setattr(serve_load, "Client", FakeClient)
    monkeypatch.setattr(serve_load, "make_items", lambda args: [Item("a", {}, "b")])


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = ["--clients", "1", "--rates", "--turns", "2", "--json", str(path), *arguments]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    code = serve_load.main(command)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert all(server.is_stopped for server in FakeServer.started)
    return code, json.loads(path.read_text())


def test_a_whole_run_says_all_of_both_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run(tmp_path / "load.json", "--restarts", "2")
    assert code == 0 and not document["was_interrupted"]
    load = document["loads"]["1 clients"]
    for mode in ("speculation", "plain"):
        seen = load["servers"][mode]
        assert (seen["num_finished"], seen["first_token_seconds"]["p99"]) == (6, 0.1)
        assert seen["queue_seconds"] == 0.25
        assert document["servers"][mode]["resident_mib"] == [100, 101]
        assert document["servers"][mode]["held_blocks"] == 0
    assert load["first_token_ratio"] == {"p50": 1, "p95": 1, "p50_of_turns": [1, 1]}
    assert document["restart_seconds"] == [2.5, 2.5]
    shown = capsys.readouterr().out
    assert "p50 of the turns: 1.00, 1.00" in shown
    assert "until ready again: 2.50, 2.50" in shown


def test_an_interruption_keeps_what_was_measured_and_waits_for_the_last_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeClient, "interrupted_in", 3)
    code, document = run(tmp_path / "load.json")
    assert code == 130 and document["was_interrupted"]
    servers = document["loads"]["1 clients"]["servers"]
    finished = {mode: seen["num_finished"] for mode, seen in servers.items()}
    assert finished == {"speculation": 3, "plain": 6}  # turns go back and forth
    assert document["restart_seconds"] == []
    assert len(FakeServer.started) == 2
    assert "interrupted: this is what was measured until then" in capsys.readouterr().out


def test_an_interruption_in_the_first_turn_leaves_the_other_server_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeClient, "interrupted_in", 1)
    code, document = run(tmp_path / "load.json")
    assert code == 130
    load = document["loads"]["1 clients"]
    assert set(load["servers"]) == {"speculation"} and load["first_token_ratio"] is None


@pytest.mark.parametrize("fault", ["an answer", "a block"])
def test_a_wrong_answer_and_a_block_that_is_held_fail(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "an answer":
        monkeypatch.setattr(FakeClient, "wrong_in", 2)
    else:
        monkeypatch.setattr(serve_load.time, "sleep", lambda _: None)
        monkeypatch.setattr(
            FakeServer, "held", property(lambda self: 1, lambda self, _: None), raising=False
        )
    code, document = run(tmp_path / "load.json", "--restarts", "0")
    assert code == 1 and not document["was_interrupted"]


def test_clients_ask_no_more_once_it_is_over() -> None:
    from serve_clients import Client

    asked: list[float] = []
    is_over = threading.Event()

    class Counting(Client):
        def _ask(self, whole: float) -> None:
            asked.append(whole)
            if len(asked) == 3:
                is_over.set()

    client = Counting(0, 1, [Item("a", {}, "b")], Tally(), 0.0, is_over)
    client.in_turn(until=float("inf"))
    assert len(asked) == 3
    client.at_rate(float("inf"), 1000.0)
    assert len(asked) == 3
