"""One request that fails takes no other with it, and the server goes on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import LiveServer, running, until

from looped_spec.serve import worker as worker_module
from looped_spec.serve.detokenizer import GuardedDetokenizer

POISON = 299  # a token that no prompt here encodes to
GOOD = [{"prompt": f"the cat {number}", "seed": number, "max_tokens": 20} for number in range(3)]
BAD = {"prompt": [5, POISON, 6], "max_tokens": 20, "temperature": 0}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What is logged of faults that tests make is read by nobody."""
    caplog.set_level(logging.CRITICAL, "looped_spec")


@pytest.fixture(scope="module")
def own(model: Path) -> Iterator[LiveServer]:
    with running(model) as server:
        yield server


@pytest.fixture(scope="module")
def expected(own: LiveServer) -> list[str]:
    """The texts of the good requests, each alone."""
    return [own.client.post("/v1/completions", one).text for one in GOOD]


def all_together(server: LiveServer, *bad: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Send good and bad requests at once; return the replies to the bad, and to the good."""
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(lambda one: server.client.post("/v1/completions", one), [*bad, *GOOD])
        )
    return replies[: len(bad)], replies[len(bad) :]


def assert_others_are_unharmed(server: LiveServer, good: list[Any], expected: list[str]) -> None:
    assert [reply.status for reply in good] == [200] * len(good)
    assert [reply.text for reply in good] == expected
    server.assert_idle()
    assert server.client.get("/health").status == 200


def poisoned(monkeypatch: pytest.MonkeyPatch, server: LiveServer, effect: Any) -> None:
    """Call `effect` with the state of rows whose token is the poison."""
    adapter = server.llm.loaded.adapter
    prelude = adapter.prelude

    def changed(tokens: torch.Tensor, ctx: Any) -> Any:
        state = prelude(tokens, ctx)
        hit = tokens == POISON
        return effect(state, hit) if hit.any() else state

    monkeypatch.setattr(adapter, "prelude", changed)


def test_an_adapter_that_raises_for_one_request(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def effect(state: Any, hit: torch.Tensor) -> Any:
        raise RuntimeError("broken at /secret/path")

    poisoned(monkeypatch, own, effect)
    (bad,), good = all_together(own, BAD)
    assert (bad.status, bad.error["code"]) == (500, "internal_error")
    assert "secret" not in bad.body.decode()
    assert_others_are_unharmed(own, good, expected)


def test_logits_that_are_not_numbers(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def effect(state: Any, hit: torch.Tensor) -> Any:
        return tuple(part.masked_fill(hit[..., None], torch.nan) for part in state)

    poisoned(monkeypatch, own, effect)
    (bad, again), good = all_together(own, BAD, {**BAD, "prompt": [POISON] * 30})
    assert (bad.status, again.status) == (500, 500)
    assert "computes NaN or infinity" in bad.error["message"]
    assert_others_are_unharmed(own, good, expected)


def test_a_failure_in_a_stream_is_its_last_event(
    own: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = itertools.count()

    def effect(state: Any, hit: torch.Tensor) -> Any:
        return state if next(steps) < 1 else tuple(part * torch.nan for part in state)

    adapter = own.llm.loaded.adapter
    prelude = adapter.prelude
    monkeypatch.setattr(
        adapter, "prelude", lambda tokens, ctx: effect(prelude(tokens, ctx), tokens)
    )
    first, last = own.client.stream("/v1/completions", prompt="the cat", max_tokens=9)
    assert first["choices"][0]["num_tokens"] == 1
    assert "computes NaN or infinity" in last["error"]["message"]
    own.assert_idle()


@pytest.mark.parametrize("part", ["append", "extend", "flush"])
def test_a_tokenizer_that_fails_for_one_request(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    class Failing:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            if name == part:
                raise ValueError("no text")
            return getattr(self.inner, name)

    def guarded(inner: Any) -> GuardedDetokenizer:
        # The good requests keep special tokens out of their text, the bad one does not.
        return GuardedDetokenizer(Failing(inner) if not inner._silent else inner)

    monkeypatch.setattr(worker_module, "GuardedDetokenizer", guarded)
    bad_one = {"prompt": "the", "max_tokens": 9, "skip_special_tokens": False, "stop": "never"}
    if part == "extend":
        del bad_one["stop"]  # text is made token by token for stop strings only
    (bad,), good = all_together(own, bad_one)
    assert (bad.status, bad.error["code"]) == (500, "internal_error")
    assert_others_are_unharmed(own, good, expected)


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("books")])
def test_an_allocator_that_raises_for_a_while(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    allocator = own.llm.engine.scheduler.allocator
    allocate = allocator.allocate
    calls = itertools.count()

    def sometimes(*args: Any) -> Any:
        if next(calls) in (2, 5):
            raise error
        return allocate(*args)

    monkeypatch.setattr(allocator, "allocate", sometimes)
    _, good = all_together(own)
    assert_others_are_unharmed(own, good, expected)
    assert next(calls) > 5


def test_an_allocator_that_is_exhausted_for_a_while_only_delays(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = own.llm.engine.scheduler.allocator
    allocate = allocator.allocate
    calls = itertools.count()
    monkeypatch.setattr(
        allocator, "allocate", lambda *args: allocate(*args) if next(calls) > 20 else None
    )
    _, good = all_together(own)
    assert_others_are_unharmed(own, good, expected)
    assert next(calls) > 20


def test_an_allocator_that_stays_exhausted_fails_requests_but_not_the_server(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "STALL_SECONDS", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(own.llm.engine.scheduler.allocator, "allocate", lambda *args: None)
        _, failed = all_together(own)
        assert [reply.status for reply in failed] == [503] * 3
        assert failed[0].error["code"] == "no_memory"
    _, good = all_together(own)
    assert_others_are_unharmed(own, good, expected)


def test_a_policy_that_fails_blames_no_request(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(feedback: object) -> None:
        raise ValueError

    monkeypatch.setattr(own.llm.engine.policy, "observe", fail)
    _, good = all_together(own)
    assert_others_are_unharmed(own, good, expected)


def test_an_engine_that_always_fails_is_not_healthy_until_it_works_again(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(own.llm.engine.runner, "round", fail)
        for _ in range(3):
            _, failed = all_together(own)
            assert [reply.status for reply in failed] == [500] * 3
        until(lambda: own.client.get("/health").json == {"status": "failing"})
        assert own.client.get("/health").status == 503
    _, good = all_together(own)
    assert_others_are_unharmed(own, good, expected)


def test_a_mistake_of_the_engines_thread_itself_ends_what_runs_and_nothing_more(
    own: LiveServer, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(own.front.worker, "_report", lambda *args: 1 / 0)
        _, failed = all_together(own)
        assert [reply.status for reply in failed] == [500] * 3
    _, good = all_together(own)
    assert_others_are_unharmed(own, good, expected)


def test_a_mistake_of_the_servers_own_is_told_as_any_error_and_logged_once(
    own: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("private")

    caplog.set_level(logging.ERROR, "looped_spec")
    monkeypatch.setattr(own.front.encoder, "encode", fail)
    bad = own.client.complete("the cat")
    assert (bad.status, bad.error["code"]) == (500, "internal_error")
    assert "private" not in bad.error["message"]
    assert "x-request-id" in bad.headers
    until(lambda: bool(caplog.records))
    assert [record.name for record in caplog.records] == ["looped_spec.serve.envelope"]
