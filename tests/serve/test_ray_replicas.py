"""Replicas of the bundled model behind Ray Serve on this machine: two of them, one of which is
killed, and as many as the load asks for."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from client import Client
from live_server import until
from processes import PATIENCE_SECONDS, descendants
from prometheus_client.parser import text_string_to_metric_families as parse_text

from looped_spec import LLM, SamplingParams

PROMPT = "The river rises in"
READY_SECONDS = 600.0
PLACES = (4, 4)
"""--max-num-seqs and --max-queued-requests of each replica."""

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'looped-spec[ray]'"
)


class RayProcess:
    """`looped-spec serve --ray` as a process of its own."""

    def __init__(self, log: Path, flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.client = Client(self.port)
        command = f"{sys.executable} -m looped_spec serve demo:ouro --ray {flags}"
        command += f" --port {self.port} --device cpu --num-threads 1"
        command += f" --max-num-seqs {PLACES[0]} --max-queued-requests {PLACES[1]}"
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command.split(), stderr=file, env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
            )

    @property
    def notes(self) -> list[str]:
        """The lines of its own on stderr."""
        lines = self._log.read_text().splitlines()
        return [line for line in lines if line.startswith("looped-spec: ")]

    def wait_for_replicas(self, count: int) -> None:
        """Return once as many answer, and no more."""

        def are_all_there() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            if not any("serving demo:ouro at" in note for note in self.notes):
                return False
            return len(self.totals("request_success")) == count

        until(are_all_there, READY_SECONDS)

    def kill(self) -> None:
        """End the process and all that it has started, if it still runs."""
        if self.process.poll() is not None:
            return
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)

    def totals(self, name: str, **labels: str) -> dict[str, float]:
        """The sum of a counter for each replica."""
        reply = self.client.get("/metrics")
        found: Counter[str] = Counter()
        for family in parse_text(reply.body.decode()) if reply.status == 200 else ():
            if family.name == f"looped_spec:{name}":
                for sample in family.samples:
                    if labels.items() <= sample.labels.items():
                        found[sample.labels["engine"]] += sample.value
        return dict(found)

    def num_running(self) -> float:
        """How many answers run on all replicas together."""
        return sum(self.totals("num_requests_running").values())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayProcess]:
    """Two replicas; killed at the end if no test ended them."""
    served = RayProcess(tmp_path_factory.mktemp("ray") / "log", "--replicas 2 --drain-seconds 300")
    try:
        served.wait_for_replicas(2)
        yield served
    finally:
        served.kill()


def body(seed: int, tokens: int) -> dict[str, Any]:
    """A request that takes `tokens` tokens."""
    return {"prompt": PROMPT, "seed": seed, "max_tokens": tokens, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The offline texts of `body(seed, 48)`, by plain decoding."""
    llm = LLM("demo:ouro", num_speculative_tokens=0, device="cpu", num_threads=1)
    params = [
        SamplingParams(seed=seed, max_tokens=48, ignore_eos=True, temperature=1.0)
        for seed in range(8)
    ]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.slow
@needs_ray
class TestTwoReplicas:
    def test_both_serve_the_offline_text_and_are_told_apart(
        self, served: RayProcess, expected: list[str]
    ) -> None:
        before = served.totals("request_success", finished_reason="length")
        with ThreadPoolExecutor(6) as pool:
            seeds = [index % 8 for index in range(24)]
            replies = list(
                pool.map(lambda seed: served.client.post("/v1/completions", body(seed, 48)), seeds)
            )
        assert [reply.text for reply in replies] == [expected[seed] for seed in seeds]
        after = served.totals("request_success", finished_reason="length")
        assert sum(after.values()) - sum(before.values()) == 24
        assert all(after[name] > before[name] for name in before)
        for name in after:
            info = served.client.get(f"/server_info?replica={name}").json
            assert (info["replica"], info["stage"]) == (name, "ready")
            assert info["engine"]["num_generation_tokens"] == 48 * after[name]
            history = served.client.get(f"/server_info/history?replica={name}").json
            assert history["replica"] == name
        assert served.client.get("/server_info?replica=none").status == 404
        assert served.client.get("/health").status == 200

    def test_a_stream_comes_as_it_is_made_and_ends_when_the_client_goes(
        self, served: RayProcess
    ) -> None:
        before = sum(served.totals("request_success", finished_reason="abort").values())
        with served.client.streaming("/v1/completions", **body(1, 400)) as stream:
            next(stream)
            assert served.num_running() == 1  # so the first event is not held until the last
        until(lambda: served.num_running() == 0)
        after = sum(served.totals("request_success", finished_reason="abort").values())
        assert after - before == 1

    def test_a_full_queue_is_told_by_status_429(self, served: RayProcess) -> None:
        count = 3 * sum(PLACES)
        with ThreadPoolExecutor(count) as pool:
            replies = list(
                pool.map(
                    lambda seed: served.client.post("/v1/completions", body(seed, 200)),
                    range(count),
                )
            )
        statuses = Counter(reply.status for reply in replies)
        assert set(statuses) == {200, 429}
        for reply in replies:
            if reply.status == 429:
                assert reply.error["code"] == "queue_full"
                assert reply.headers["retry-after"] == "1"
        until(lambda: served.num_running() == 0)

    def test_a_replica_that_is_killed_loses_no_request_in_silence(
        self, served: RayProcess, expected: list[str]
    ) -> None:
        killed = threading.Event()
        outcomes: Counter[str] = Counter()
        lock = threading.Lock()

        def client(number: int) -> None:
            after_kill = 0
            for index in range(200):
                seed = (number + index) % 8
                try:
                    if index % 2:
                        events = served.client.stream("/v1/completions", **body(seed, 48))
                        text = "".join(event["choices"][0]["text"] for event in events)
                    else:
                        reply = served.client.post("/v1/completions", body(seed, 48))
                        assert reply.status == 200, reply.status
                        text = reply.text
                    outcome = "right" if text == expected[seed] else "wrong"
                except Exception:  # whatever a client notices
                    outcome = "error"
                with lock:
                    outcomes[f"{outcome} {'after' if killed.is_set() else 'before'}"] += 1
                after_kill += killed.is_set()
                if after_kill > 6:
                    return

        threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: outcomes["right before"] >= 8)
        before = set(served.totals("request_success"))
        names = descendants(served.process.pid)
        replicas = [pid for pid, name in names.items() if name.startswith("ray::ServeReplica")]
        assert len(replicas) == 2
        os.kill(replicas[0], signal.SIGKILL)
        killed.set()
        for thread in threads:
            thread.join(READY_SECONDS)
        print(dict(outcomes))
        assert not any(outcomes[f"wrong {when}"] for when in ("before", "after"))
        assert not outcomes["error before"]
        assert outcomes["right after"] > 6
        # What ran on it, and what was sent to it before its end was noticed.
        assert outcomes["error after"] <= len(threads) * 3
        served.wait_for_replicas(2)
        assert len(set(served.totals("request_success")) - before) == 1

    def test_a_signal_lets_what_runs_end(self, served: RayProcess) -> None:
        with served.client.streaming("/v1/completions", **body(3, 400)) as stream:
            next(stream)
            served.process.send_signal(signal.SIGTERM)
            until(lambda: served.client.complete("the").status == 503)
            refused = served.client.complete("the")
            if refused.status == 503 and refused.headers["content-type"] == "application/json":
                assert refused.error["code"] == "shutting_down"
            events = list(stream)
            assert not [event for event in events if "error" in event]
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(PATIENCE_SECONDS) == 0
        assert served.notes[-1] == "looped-spec: stopped"
        assert not descendants(served.process.pid)


@pytest.mark.slow
@needs_ray
def test_replicas_come_with_the_load_and_go_with_it(tmp_path: Path, expected: list[str]) -> None:
    """Nobody gets another text, or an error, while there are more replicas or fewer.

    Two requests at once are as many as one replica is for: six clients ask for another replica, one
    alone does not. Who waits only reads what the command says, since questions are requests too.
    """
    served = RayProcess(
        tmp_path / "log",
        "--min-replicas 1 --max-replicas 2 --target-ongoing-requests 2 "
        "--upscale-delay-seconds 0 --downscale-delay-seconds 0",
    )
    is_over, is_light = threading.Event(), threading.Event()

    def client(number: int) -> list[str]:
        wrong = []
        for index in itertools.count():
            if is_over.is_set() or (number and is_light.is_set()):
                return wrong
            if is_light.is_set():
                time.sleep(1.0)
            seed = (number + index) % 8
            reply = served.client.post("/v1/completions", body(seed, 48))
            if reply.status != 200 or reply.text != expected[seed]:
                wrong.append(f"{reply.status}: {reply.body!r}")
        raise AssertionError

    def told() -> list[str]:
        return [note.partition("replicas: ")[2] for note in served.notes if "replicas: " in note]

    try:
        served.wait_for_replicas(1)
        with ThreadPoolExecutor(6) as pool:
            try:
                clients = [pool.submit(client, number) for number in range(6)]
                until(lambda: told()[-1:] == ["2 running"], READY_SECONDS)
                is_light.set()
                until(lambda: told()[-1:] == ["1 running"], READY_SECONDS)
            finally:
                is_light.set()
                is_over.set()
            assert [one.result() for one in clients] == [[]] * 6
        assert not any("3 running" in line for line in told()), told()
    finally:
        served.kill()
