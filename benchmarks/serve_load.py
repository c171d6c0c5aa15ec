"""Many clients at a server: is every answer right, is nothing left behind, how long does it take.

Two servers run, one with speculation and one without, and take turns under each load: clients that
ask again as soon as they are answered, or requests that come at a rate of their own. They are of
mixed lengths, streamed and whole, greedy and sampled, and some clients go away in the middle. Every
answer that comes to its end is compared with what the same model gives offline by plain decoding.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_process import ServerProcess, events_of

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


class Client:
    """Sends requests, one after the other or at a rate, until the time is over."""

    def __init__(
        self, number: int, port: int, items: Sequence[Item], tally: Tally, abort: float
    ) -> None:
        self._random = random.Random(number)
        self._port, self._items, self._tally, self._abort = port, items, tally, abort

    def in_turn(self, until: float) -> None:
        """Ask again as soon as there is an answer."""
        while time.monotonic() < until:
            self._ask(self._random.random())

    def at_rate(self, until: float, rate: float) -> None:
        """Ask `rate` times a second on average, at moments that no answer changes."""
        asking = []
        moment = time.monotonic()
        while (moment := moment + self._random.expovariate(rate)) < until:
            time.sleep(max(moment - time.monotonic(), 0))
            asking.append(threading.Thread(target=self._ask, args=(0.0,)))  # streamed all
            asking[-1].start()
        for thread in asking:
            thread.join()

    def _ask(self, whole: float) -> None:
        """Send a request, as a stream if `whole` is below 3/4; a failure is counted."""
        item = self._random.choice(self._items)
        try:
            if whole < 0.75:
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
            for event in events_of(response):
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


class Load:
    """One kind of load, what was seen of it on each server, and for how long."""

    def __init__(self, name: str, clients: int, rate: float | None, args: Any) -> None:
        self.name = name
        self._clients, self._rate, self._args = clients, rate, args
        self.tallies = {mode: Tally() for mode in args.modes}
        self.seconds = dict.fromkeys(args.modes, 0.0)
        self.turns: dict[str, list[list[float]]] = {mode: [] for mode in args.modes}

    def take_turn(self, mode: str, server: ServerProcess, items: Sequence[Item], turn: int) -> None:
        """Put the load at a server for a while; both get the same requests at the same moments."""
        args, tally = self._args, self.tallies[mode]
        start = time.monotonic()
        until = start + args.seconds / args.turns
        begin = len(tally.first_token)
        first = turn * 1000
        clients = [
            Client(first + n, server.port, items, tally, args.abort) for n in range(self._clients)
        ]
        if self._rate is not None:
            clients[0].at_rate(until, self._rate)
        else:
            threads = [threading.Thread(target=c.in_turn, args=(until,)) for c in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.seconds[mode] += time.monotonic() - start
        self.turns[mode].append(tally.first_token[begin:])

    def result(self, mode: str) -> dict[str, Any]:
        """Return what was seen of a server."""
        tally, seconds = self.tallies[mode], self.seconds[mode]
        return {
            "seconds": seconds,
            "num_finished": tally.num_finished,
            "num_aborted": tally.num_aborted,
            "num_failed": len(tally.failures),
            "num_differing": len(tally.differing),
            "tokens_per_second": tally.num_tokens / seconds,
            "first_token_seconds": percentiles(tally.first_token),
            "between_tokens_seconds": percentiles(tally.between_tokens),
            "whole_seconds": percentiles(tally.whole),
            "failures": tally.failures[:10],
            "differing": tally.differing[:10],
        }

    def ratios(self) -> dict[str, Any]:
        """Return times to the first token with speculation by those without, of all and by turn."""
        spec, plain = (percentiles(self.tallies[mode].first_token) for mode in MODES)
        turns = [
            [percentiles(seen)["p50"] for seen in pair]
            for pair in zip(*(self.turns[mode] for mode in MODES), strict=True)
        ]
        return {
            **{share: _by(spec[share], plain[share]) for share in ("p50", "p95")},
            "p50_of_turns": sorted(one for a, b in turns if (one := _by(a, b)) is not None),
        }


def _by(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def finish(server: ServerProcess) -> dict[str, Any]:
    """Wait until a server is idle, stop it, and return what it left behind."""
    for _ in range(100):  # an abort is noticed a round later
        info = server.info()
        engine = info["engine"]
        if engine["num_free_blocks"] == engine["num_blocks"]:
            break
        time.sleep(0.1)
    return {
        "ready_seconds": server.ready_seconds,
        "held_blocks": engine["num_blocks"] - engine["num_free_blocks"],
        "resident_mib": [number / 2**20 for number in server.seen_bytes],
        "draft_acceptance_rate": info["speculation"]["draft_acceptance_rate"],
        "exit_code": server.stop(),
    }


def measure_restart(args: argparse.Namespace) -> list[float]:
    """Kill a server and start another at once, several times; return the seconds until ready."""
    seconds = []
    server = ServerProcess(args.model, args.serve_arg)
    for _ in range(args.restarts):
        server.kill()
        server = ServerProcess(args.model, args.serve_arg)
        seconds.append(server.ready_seconds)
    server.stop()
    return seconds


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median, the 95th and the 99th percentile, and the greatest."""
    if len(values) < 2:
        return dict.fromkeys(("p50", "p95", "p99", "max"))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values)}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Lay out what was seen of a load, a column for each server."""
    rows = [
        [name, *(number(result[key], decimals) for result in results.values())]
        for name, key, decimals in (
            ("answers finished", "num_finished", 0),
            ("answers aborted by clients", "num_aborted", 0),
            ("requests failed", "num_failed", 0),
            ("answers unlike offline", "num_differing", 0),
            ("tokens per second", "tokens_per_second", 1),
        )
    ]
    for name, key in (
        ("first token", "first_token_seconds"),
        ("between tokens", "between_tokens_seconds"),
        ("whole answer", "whole_seconds"),
    ):
        for share in ("p50", "p95", "p99"):
            cells = [number(result[key][share], 4) for result in results.values()]
            rows.append([f"{name}, {share}, s", *cells])
    return plain_table(["", *results], rows)


def table_of_servers(servers: dict[str, dict[str, Any]]) -> str:
    """Lay out what the servers left behind, a column for each."""
    rows = [
        [name, *(number(result[key], decimals) for result in servers.values())]
        for name, key, decimals in (
            ("seconds until ready", "ready_seconds", 1),
            ("blocks held at the end", "held_blocks", 0),
            ("draft acceptance", "draft_acceptance_rate", 2),
            ("exit status", "exit_code", 0),
        )
    ]
    for name, place in (("MiB after the first turn", 0), ("MiB at the end", -1)):
        rows.append([name, *(number(one["resident_mib"][place], 1) for one in servers.values())])
    return plain_table(["", *servers], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 if an answer was wrong, failed, or left something behind."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="demo:ouro")
    parser.add_argument("--clients", type=int, default=64, help="0: no load of clients in turn")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[2.0, 8.0], help="further loads, in requests/s"
    )
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="for each load and server, all turns together"
    )
    parser.add_argument("--turns", type=int, default=4, help="of each server under each load")
    parser.add_argument("--items", type=int, default=64, help="different requests")
    parser.add_argument("--abort", type=float, default=0.2, help="share of streams left early")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument(
        "--restarts", type=int, default=3, help="times to kill a server and restart"
    )
    parser.add_argument("--serve-arg", action="append", default=[], help="further flag of serve")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    items = make_items(args)
    loads = [Load(f"{args.clients} clients", args.clients, None, args)] if args.clients else []
    loads += [Load(f"{rate:g} requests/s", 1, rate, args) for rate in args.rates]
    flags = ["--max-num-seqs", str(args.max_num_seqs), *args.serve_arg]
    servers = {mode: ServerProcess(args.model, [*flags, *MODES[mode]]) for mode in args.modes}
    for turn in range(args.turns):
        for load in loads:
            # Back and forth, so that what changes slowly on the machine meets both alike.
            for mode in args.modes if turn % 2 == 0 else args.modes[::-1]:
                load.take_turn(mode, servers[mode], items, turn)
                servers[mode].note_memory()
    left = {mode: finish(server) for mode, server in servers.items()}
    restarts = measure_restart(args)
    results: dict[str, dict[str, Any]] = {
        load.name: {
            "servers": {mode: load.result(mode) for mode in args.modes},
            "first_token_ratio": load.ratios() if set(args.modes) == set(MODES) else None,
        }
        for load in loads
    }
    for name, result in results.items():
        print(f"{name}\n{table(result['servers'])}")
        if ratio := result["first_token_ratio"]:
            turns = ", ".join(f"{one:.2f}" for one in ratio["p50_of_turns"])
            print(
                f"first token, speculation by plain: p50 {number(ratio['p50'], 2)}, "
                f"p95 {number(ratio['p95'], 2)}; p50 of the turns: {turns}"
            )
        print()
        for mode, seen in result["servers"].items():
            for failure in seen["failures"] + seen["differing"]:
                print(f"{name}, {mode}: {failure}", file=sys.stderr)
    print(table_of_servers(left))
    if restarts:
        shown = ", ".join(f"{seconds:.1f}" for seconds in restarts)
        print(f"\nseconds from kill -9 until ready again: {shown}")
    if args.json:
        options = {key: value for key, value in vars(args).items() if key != "json"}
        provenance = {"version": __version__, "python": platform.python_version()}
        document = {"options": options, "provenance": provenance, "loads": results}
        write_json(args.json, {**document, "servers": left, "restart_seconds": restarts})
    seen_all = [seen for result in results.values() for seen in result["servers"].values()]
    is_good = all(
        seen["num_finished"] and not (seen["num_failed"] or seen["num_differing"])
        for seen in seen_all
    ) and not any(one["held_blocks"] or one["exit_code"] for one in left.values())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
