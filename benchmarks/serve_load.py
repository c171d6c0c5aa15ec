"""Many clients at a server: is every answer right, is nothing left behind, how long does it take.

Two servers run, one with speculation and one without, and take turns under each load: clients that
ask again as soon as they are answered, or requests that come at a rate of their own. They are of
mixed lengths, streamed and whole, greedy and sampled, and some clients go away in the middle. Every
answer that comes to its end is compared with what the same model gives offline by plain decoding.
Ctrl-C ends it early, and keeps what was measured until then.

    python benchmarks/serve_load.py --clients 64 --rates --seconds 300
    python benchmarks/serve_load.py --clients 0 --rates 2 8 --seconds 150 --restarts 5
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from results import run_command
from serve_clients import Client, Item, Tally
from serve_report import is_good, percentiles, report
from server_process import ServerProcess

from looped_spec import LLM, SamplingParams
from looped_spec.offline.machine import machine_facts

SAME_SECONDS = 1.0
"""Signals that come within so long are one."""

PROMPTS = Path(__file__).resolve().parent.parent / "examples" / "prompts.jsonl"
MODES = {"speculation": [], "plain": ["--num-speculative-tokens", "0"]}


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
        self._queued = {mode: [0.0, 0.0] for mode in args.modes}

    def take_turn(self, mode: str, server: ServerProcess, items: Sequence[Item], turn: int) -> None:
        """Put the load at a server for a while; both get the same requests at the same moments.

        When interrupted the clients get the answers that they wait for, and all of it is kept.
        """
        args, tally = self._args, self.tallies[mode]
        queued, is_over = server.queue_seconds(), threading.Event()
        start = time.monotonic()
        until = start + args.seconds / args.turns
        begin = len(tally.first_token)
        threads = []
        for number in range(turn * 1000, turn * 1000 + self._clients):
            client = Client(number, server.port, items, tally, args.abort, is_over)
            if self._rate is not None:
                threads.append(threading.Thread(target=client.at_rate, args=(until, self._rate)))
            else:
                threads.append(threading.Thread(target=client.in_turn, args=(until,)))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            is_over.set()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            self.seconds[mode] += time.monotonic() - start
            self.turns[mode].append(tally.first_token[begin:])
            for place, value in enumerate(server.queue_seconds()):
                self._queued[mode][place] += value - queued[place]
            server.note_memory()

    def result(self, mode: str) -> dict[str, Any]:
        """Return what was seen of a server."""
        tally, seconds = self.tallies[mode], self.seconds[mode]
        total, count = self._queued[mode]
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
            "queue_seconds": total / count if count else None,
            "failures": tally.failures[:10],
            "differing": tally.differing[:10],
        }

    def results(self) -> dict[str, Any]:
        """Return what was seen of the servers that had a turn."""
        modes = [mode for mode in self._args.modes if self.seconds[mode]]
        return {
            "servers": {mode: self.result(mode) for mode in modes},
            "first_token_ratio": self.ratios() if set(modes) == set(MODES) else None,
        }

    def ratios(self) -> dict[str, Any]:
        """Return times to the first token with speculation by those without, of all and by turn."""
        spec, plain = (percentiles(self.tallies[mode].first_token) for mode in MODES)
        turns = [
            [percentiles(seen)["p50"] for seen in pair]
            for pair in zip(*(self.turns[mode] for mode in MODES), strict=False)
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


def measure_restart(args: argparse.Namespace, seconds: list[float]) -> None:
    """Kill a server and start another at once, several times; add to `seconds` until ready."""
    server = ServerProcess(args.model, args.serve_arg)
    try:
        for _ in range(args.restarts):
            server.kill()
            server = ServerProcess(args.model, args.serve_arg)
            seconds.append(server.ready_seconds)
    finally:
        server.kill()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was seen, until the end or an interruption."""
    items = make_items(args)
    loads = [Load(f"{args.clients} clients", args.clients, None, args)] if args.clients else []
    loads += [Load(f"{rate:g} requests/s", 1, rate, args) for rate in args.rates]
    flags = ["--max-num-seqs", str(args.max_num_seqs), *args.serve_arg]
    servers: dict[str, ServerProcess] = {}
    restarts: list[float] = []
    was_interrupted = False
    try:
        for mode in args.modes:
            servers[mode] = ServerProcess(args.model, [*flags, *MODES[mode]])
        try:
            for turn in range(args.turns):
                for load in loads:
                    # Back and forth: what changes slowly on the machine meets both alike.
                    for mode in args.modes if turn % 2 == 0 else args.modes[::-1]:
                        load.take_turn(mode, servers[mode], items, turn)
        except KeyboardInterrupt:
            was_interrupted = True
        left = {mode: finish(server) for mode, server in servers.items()}
        if args.restarts and not was_interrupted:
            try:
                measure_restart(args, restarts)
            except KeyboardInterrupt:
                was_interrupted = True
    finally:
        for server in servers.values():
            server.kill()
    return {
        "options": {key: value for key, value in vars(args).items() if key != "json"},
        "machine": machine_facts(torch.device("cpu")),
        "loads": {load.name: load.results() for load in loads},
        "servers": left,
        "restart_seconds": restarts,
        "was_interrupted": was_interrupted,
    }


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, and two of them at once what one does.

    `timeout` sends its signal to the process and to its group, which is twice to the same.
    """
    last = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > SAME_SECONDS:
            raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 if an answer was wrong, failed, or left something behind, 130
    if it was interrupted."""
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
    found: dict[str, Any] = {}

    def kept() -> dict[str, Any]:
        found.update(measure(args))
        print(report(found))
        for name, result in found["loads"].items():
            for mode, seen in result["servers"].items():
                for failure in seen["failures"] + seen["differing"]:
                    print(f"{name}, {mode}: {failure}", file=sys.stderr)
        return found

    with interruptible():
        code = run_command("serve_load.py", argv, args.json, kept)
    if code or found["was_interrupted"]:
        return code or 130
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
