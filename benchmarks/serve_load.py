"""Many clients at a server: is every answer right, is nothing left behind, how long does it take.

A server is started once with speculation and once without. The clients send requests of mixed
lengths, streamed and whole, greedy and sampled, and some go away in the middle. Every answer that
comes to its end is compared with what the same model gives offline by plain decoding.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looped_spec import LLM, SamplingParams, __version__
from looped_spec.atomic_json import write_json
from looped_spec.cli.tables import number, plain_table

PROMPTS = Path(__file__).resolve().parent.parent / "examples" / "prompts.jsonl"
READY_SECONDS = 300.0
MODES = {"speculation": [], "plain": ["--num-speculative-tokens", "0"]}


@dataclass(frozen=True)
class Item:
    """A request and the text that it must get."""

    prompt: str
    params: dict[str, Any]
    expected: str


@dataclass
class Tally:
    """What the clients saw, in seconds."""

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    num_finished: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    differing: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


class Client(threading.Thread):
    """Sends one request after the other until the time is over."""

    def __init__(
        self,
        number: int,
        port: int,
        items: Sequence[Item],
        tally: Tally,
        until: float,
        abort: float,
    ) -> None:
        super().__init__(name=f"client {number}")
        self._random = random.Random(number)
        self._port, self._items, self._tally = port, items, tally
        self._until, self._abort = until, abort

    def run(self) -> None:
        """Never raise: a failure is counted."""
        while time.monotonic() < self._until:
            item = self._random.choice(self._items)
            try:
                if self._random.random() < 0.75:
                    self._stream(item)
                else:
                    self._whole(item)
            except Exception as error:
                with self._tally.lock:
                    self._tally.failures.append(f"{type(error).__name__}: {error}")

    def _whole(self, item: Item) -> None:
        start = time.monotonic()
        with _asking(self._port, item) as response:
            document = json.loads(response.read())
        self._finish(item, document["choices"][0]["text"], time.monotonic() - start)
        with self._tally.lock:
            self._tally.num_tokens += document["usage"]["completion_tokens"]

    def _stream(self, item: Item) -> None:
        leaves_after = self._random.randint(1, 8) if self._random.random() < self._abort else None
        start = before = time.monotonic()
        text, gaps, first, tokens = "", [], 0.0, 0
        with _asking(self._port, item, stream=True) as response:
            for event in _events(response):
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                now = time.monotonic()
                (choice,) = event["choices"]
                text += choice["text"]
                if not tokens:
                    first = now - start
                else:
                    gaps += [(now - before) / choice["num_tokens"]] * choice["num_tokens"]
                tokens += choice["num_tokens"]
                before = now
                if leaves_after is not None and tokens > leaves_after:
                    with self._tally.lock:
                        self._tally.num_aborted += 1
                    return
        with self._tally.lock:
            self._tally.first_token.append(first)
            self._tally.between_tokens += gaps
            self._tally.num_tokens += tokens
        self._finish(item, text, time.monotonic() - start)

    def _finish(self, item: Item, text: str, seconds: float) -> None:
        with self._tally.lock:
            self._tally.num_finished += 1
            self._tally.whole.append(seconds)
            if text != item.expected:
                seen = {"prompt": item.prompt, "expected": item.expected, "got": text}
                self._tally.differing.append(seen)


class _asking:
    """A request whose answer is read inside; leaving closes the connection."""

    def __init__(self, port: int, item: Item, stream: bool = False) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = json.dumps({"prompt": item.prompt, "stream": stream, **item.params})
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", body, headers)

    def __enter__(self) -> http.client.HTTPResponse:
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            raise RuntimeError(f"{self._response.status} {self._response.read()!r}")
        return self._response

    def __exit__(self, *exc: object) -> None:
        self._response.close()
        self._connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while (line := response.readline().strip()) != b"data: [DONE]":
        if line:
            yield json.loads(line.removeprefix(b"data: "))


class ServerProcess:
    """`looped-spec serve` as a process of its own."""

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "looped_spec", "serve", model, "--port", "0", *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        start = time.monotonic()
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        self.ready_seconds = time.monotonic() - start
        found = re.search(r":(\d+)$", line.strip())
        if not found:
            raise SystemExit(f"the server did not start: {line}")
        self.port = int(found[1])

    def info(self) -> dict[str, Any]:
        """Return /server_info."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/server_info")
        document: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return document

    def resident_bytes(self) -> int:
        """Return how much memory the process has."""
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> int:
        """Return the exit code after SIGTERM."""
        self._process.terminate()
        return self._process.wait(60)


def make_items(args: argparse.Namespace) -> list[Item]:
    """Return requests of mixed kinds with their offline answers, by plain decoding."""
    chooser = random.Random(args.seed)
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    wanted = []
    for index in range(args.items):
        prompt = " ".join(chooser.sample(texts, chooser.randint(1, 3)))
        params: dict[str, Any] = {"max_tokens": chooser.choice((4, 16, 48, 96)), "seed": index}
        params["temperature"] = chooser.choice((0.0, 0.8))
        wanted.append((prompt, params))
    llm = LLM(args.model, num_speculative_tokens=0)
    outputs = llm.generate(
        [prompt for prompt, _ in wanted],
        [SamplingParams(**params) for _, params in wanted],
        use_tqdm=False,
    )
    return [
        Item(prompt, params, output.outputs[0].text)
        for (prompt, params), output in zip(wanted, outputs, strict=True)
    ]


def measure(args: argparse.Namespace, items: Sequence[Item], mode: str) -> dict[str, Any]:
    """Run one server under load and return what was seen."""
    server = ServerProcess(
        args.model, ["--max-num-seqs", str(args.max_num_seqs), *MODES[mode], *args.serve_arg]
    )
    tally = Tally()
    start = time.monotonic()
    clients = [
        Client(n, server.port, items, tally, start + args.seconds, args.abort)
        for n in range(args.clients)
    ]
    for client in clients:
        client.start()
    time.sleep(args.seconds / 3)
    early = server.resident_bytes()
    for client in clients:
        client.join()
    seconds = time.monotonic() - start
    for _ in range(100):  # an abort is noticed a round later
        engine = server.info()["engine"]
        if engine["num_free_blocks"] == engine["num_blocks"]:
            break
        time.sleep(0.1)
    speculation = server.info()["speculation"]
    late = server.resident_bytes()
    return {
        "ready_seconds": server.ready_seconds,
        "seconds": seconds,
        "num_finished": tally.num_finished,
        "num_aborted": tally.num_aborted,
        "num_failed": len(tally.failures),
        "num_differing": len(tally.differing),
        "tokens_per_second": tally.num_tokens / seconds,
        "held_blocks": engine["num_blocks"] - engine["num_free_blocks"],
        "resident_mib_after_a_third": early / 2**20,
        "resident_mib_at_the_end": late / 2**20,
        "draft_acceptance_rate": speculation["draft_acceptance_rate"],
        "first_token_seconds": percentiles(tally.first_token),
        "between_tokens_seconds": percentiles(tally.between_tokens),
        "whole_seconds": percentiles(tally.whole),
        "exit_code": server.stop(),
        "failures": tally.failures[:10],
        "differing": tally.differing[:10],
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median, the 90th and the 99th percentile, and the greatest."""
    if len(values) < 2:
        return dict.fromkeys(("p50", "p90", "p99", "max"))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Lay out the results, a column for each server."""
    rows = [
        [name, *(number(result[key], decimals) for result in results.values())]
        for name, key, decimals in (
            ("seconds until ready", "ready_seconds", 1),
            ("answers finished", "num_finished", 0),
            ("answers aborted by clients", "num_aborted", 0),
            ("requests failed", "num_failed", 0),
            ("answers unlike offline", "num_differing", 0),
            ("blocks held at the end", "held_blocks", 0),
            ("MiB after a third", "resident_mib_after_a_third", 1),
            ("MiB at the end", "resident_mib_at_the_end", 1),
            ("tokens per second", "tokens_per_second", 1),
            ("draft acceptance", "draft_acceptance_rate", 2),
        )
    ]
    for name, key in (
        ("first token", "first_token_seconds"),
        ("between tokens", "between_tokens_seconds"),
        ("whole answer", "whole_seconds"),
    ):
        for share in ("p50", "p90", "p99"):
            cells = [number(result[key][share], 3) for result in results.values()]
            rows.append([f"{name}, {share}, s", *cells])
    return plain_table(["", *results], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 if an answer was wrong, failed, or left something behind."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="demo:ouro")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each server")
    parser.add_argument("--items", type=int, default=64, help="different requests")
    parser.add_argument("--abort", type=float, default=0.2, help="share of streams left early")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--serve-arg", action="append", default=[], help="further flag of serve")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    items = make_items(args)
    results = {mode: measure(args, items, mode) for mode in args.modes}
    print(table(results))
    for mode, result in results.items():
        for failure in result["failures"] + result["differing"]:
            print(f"{mode}: {failure}", file=sys.stderr)
    if args.json:
        options = {key: value for key, value in vars(args).items() if key != "json"}
        provenance = {"version": __version__, "python": platform.python_version()}
        write_json(args.json, {"options": options, "provenance": provenance, "results": results})
    is_good = all(
        result["num_finished"]
        and not (result["num_failed"] or result["num_differing"] or result["held_blocks"])
        and result["exit_code"] == 0
        for result in results.values()
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
