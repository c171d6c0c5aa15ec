"""Adaptive speculation on a demo: against every static (K, d), never speculating, and `ema`.

Loads keep 1, 8 or 32 requests running, or go 1, 8, 32, 8, 1; texts are one kind, all kinds mixed,
or one kind after the other. All ways run in turn within each repeat, in an order that turns round,
and every token is compared with that of plain decoding. Policies start each run knowing nothing;
"warm" goes on with what it learnt in the runs before. "armed, K=0" is the whole machinery of
`goodput` with nothing to choose, beside "never", which has none: its loss is what off rounds cost.
"never, again" is the same as "never": the difference of the two is noise.

Regret is the time of a way over that of the static candidate with the least median time in the same
scenario, plain decoding among them, less one. That candidate is picked in hindsight, from the same
runs. Each repeat gives one regret; the median and the extremes are shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loads import Load, LoadRun, drive
from tqdm import tqdm
from workloads import Workload, add_text_flags, markdown, read_workloads, run_command

from looped_spec import LLM, AdaptiveSpecConfig, SamplingParams
from looped_spec.control.config import BatchBucket
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError, check_int
from looped_spec.offline.machine import machine
from looped_spec.offline.timing import in_turn

NEVER, AGAIN, ARMED, WARM = "never", "never, again", "armed, K=0", "goodput, warm"
MIXED, SHIFT = "mixed", "shift"


@dataclass(frozen=True)
class Timed:
    """A run, and whether its tokens are those of plain decoding."""

    run: LoadRun
    switches: int


def static_name(candidate: Candidate) -> str:
    """Return how a static candidate is called in the tables."""
    return f"K={candidate.num_speculative_tokens} d={candidate.draft_loops}"


class Ways:
    """Sets an LLM to each way of decoding."""

    def __init__(self, llm: LLM, candidates: Sequence[Candidate]) -> None:
        self._llm = llm
        self.statics = {NEVER: PLAIN} | {static_name(c): c for c in candidates}
        self._setters: dict[str, Callable[[], None]] = {
            name: lambda c=candidate: llm.set_speculation(c.num_speculative_tokens, c.draft_loops)  # type: ignore[misc]
            for name, candidate in self.statics.items()
        }
        most = llm.options.max_num_seqs
        nothing = AdaptiveSpecConfig(llm.full_loops, (BatchBucket(1, most, (PLAIN,)),))
        self._setters |= {
            AGAIN: lambda: llm.set_speculation(0),
            ARMED: lambda: llm.set_adaptive_speculation(nothing),
            "ema": lambda: llm.set_adaptive_speculation(policy="ema"),
            "goodput": llm.set_adaptive_speculation,
            WARM: self._go_on,
        }
        self._warm: Any = None

    @property
    def names(self) -> list[str]:
        """All ways, statics first."""
        return list(self._setters)

    def use(self, name: str) -> None:
        """Set the LLM to a way."""
        self._setters[name]()

    def forget(self) -> None:
        """Let the warm one begin anew."""
        self._warm = None

    def _go_on(self) -> None:
        if self._warm is None:
            self._llm.set_adaptive_speculation()
            self._warm = self._llm.policy
        self._llm.policy = self._warm


def mixtures(works: Sequence[Workload], names: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return endless enough prompts for each mixture: one kind, all in turn, or all in blocks."""
    kinds = {work.name: work.rows for work in works}
    found: dict[str, list[list[int]]] = {}
    for name in names:
        if name == MIXED:
            columns = zip(*kinds.values(), strict=False)
            found[name] = list(itertools.chain.from_iterable(columns))
        elif name == SHIFT:
            found[name] = list(itertools.chain.from_iterable(kinds.values()))
        elif name in kinds:
            found[name] = kinds[name]
        else:
            known = ", ".join([*kinds, MIXED, SHIFT])
            raise ConfigError(f"--mixtures must be of {known}, got '{name}'")
    return found


def prompts_for(load: Load, rows: Sequence[list[int]], is_shift: bool) -> list[list[int]]:
    """Return one prompt for every request of a load; rows repeat where there are too few, and a
    shift gets the same share of each kind, in their order."""
    count = load.num_requests
    if is_shift:
        return [rows[place * len(rows) // count] for place in range(count)]
    return list(itertools.islice(itertools.cycle(rows), count))


def measure(
    llm: LLM,
    ways: Ways,
    load: Load,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    repeats: int,
    progress: Callable[[], object],
) -> dict[str, list[Timed]]:
    """Time every way `repeats` times in turn, after a short warm-up of each."""

    def run(name: str) -> Timed:
        ways.use(name)
        done = drive(llm.engine, load, prompts, params)
        progress()
        stats = llm.stats()["controller"]
        return Timed(done, stats["num_switches"] if stats else 0)

    short = dataclasses.replace(params, max_tokens=min(params.max_tokens, 8))
    brief = Load.of(str(load.max_concurrency), 1)
    for name in ways.names:
        ways.use(name)
        drive(llm.engine, brief, prompts, short)
    ways.forget()
    return in_turn(ways.names, run, repeats)


def summarize(timed: dict[str, list[Timed]], statics: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each way."""
    seconds = {name: [one.run.seconds for one in runs] for name, runs in timed.items()}
    best = min(statics, key=lambda name: statistics.median(seconds[name]))
    expected = timed[NEVER][0].run.token_ids
    rows = []
    for name, runs in timed.items():
        metrics = runs[-1].run.metrics
        pairs = [zip(expected, one.run.token_ids, strict=True) for one in runs]
        ratios = [a / b for a, b in zip(seconds[name], seconds[best], strict=True)]
        speedups = [b / a for a, b in zip(seconds[name], seconds[NEVER], strict=True)]
        rows.append(
            {
                "way": name,
                "is_static": name in statics,
                "is_best_static": name == best,
                "tokens_per_second": statistics.median(one.run.tokens_per_second for one in runs),
                "speedup": _spread(speedups),
                "regret": _spread([ratio - 1 for ratio in ratios]),
                "draft_acceptance_rate": metrics.draft_acceptance_rate,
                "mean_acceptance_length": metrics.mean_acceptance_length,
                "switches": statistics.median(one.switches for one in runs),
                "probe_share": metrics.num_probe_rounds / metrics.num_rounds,
                "off_share": metrics.rounds_by_candidate.get(PLAIN, 0) / metrics.num_rounds,
                "rounds_by_candidate": [
                    [c.num_speculative_tokens, c.draft_loops, count]
                    for c, count in metrics.rounds_by_candidate.items()
                ],
                "identical_requests": sum(a == b for pair in pairs for a, b in pair),
                "requests": len(expected) * len(runs),
                "seconds": seconds[name],
                "stage_seconds": [one.run.stage_seconds for one in runs],
            }
        )
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def table(results: Sequence[dict[str, Any]], all_rows: bool) -> str:
    """Lay out every policy, never, and the best static candidate of each scenario, or all rows."""
    lines = []
    for row in results:
        if not (all_rows or not row["is_static"] or row["is_best_static"] or row["way"] == NEVER):
            continue
        regret, rate = row["regret"], row["draft_acceptance_rate"]
        lines.append(
            (
                f"{row['mixture']}, {row['load']}",
                row["way"] + (" (best static)" if row["is_best_static"] else ""),
                f"{row['tokens_per_second']:.0f}",
                f"{row['speedup']['median']:.2f}",
                f"{100 * regret['median']:+.1f} "
                f"({100 * regret['least']:+.1f} to {100 * regret['greatest']:+.1f})",
                "-" if rate is None else f"{rate:.2f}",
                f"{row['switches']:.0f}",
                f"{100 * row['probe_share']:.1f}",
                f"{row['identical_requests']} of {row['requests']}",
            )
        )
    heads = ("scenario", "way", "tokens/s", "over never", "regret, % (range)", "acceptance")
    return markdown((*heads, "switches", "probes, %", "identical requests"), lines)


def candidates_of(llm: LLM, args: argparse.Namespace) -> list[Candidate]:
    """Return the static candidates: those named, or all that the policies may choose from."""
    if args.candidates:
        given = [tuple(map(int, text.split(","))) for text in args.candidates]
        return [Candidate(*pair).check(llm.full_loops) for pair in given]
    llm.set_adaptive_speculation()
    return sorted(
        llm.engine.candidates - {PLAIN}, key=lambda c: (c.draft_loops, c.num_speculative_tokens)
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="demo:ouro", help="default: %(default)s")
    add_text_flags(parser)
    add("--loads", nargs="+", default=["1", "8", "32", "ramp"], help="batch sizes, and ramp")
    add("--mixtures", nargs="+", default=[MIXED], help=f"kinds of text, {MIXED} or {SHIFT}")
    add("--candidates", nargs="+", metavar="K,d", help="default: all that may be chosen")
    add("--requests", type=int, default=4, help="per place of the batch: %(default)s")
    add("--prompt-tokens", type=int, default=48, help="of each prompt: %(default)s")
    add("--max-tokens", type=int, default=64, help="of each completion: %(default)s")
    add("--temperature", type=float, default=0.0, help="default: %(default)g")
    add("--repeats", type=int, default=5, help="default: %(default)s")
    add("--threads", type=int, default=1, help="CPU threads: %(default)s")
    add("--all-rows", action="store_true", help="show every static candidate")
    add("--json", type=Path, metavar="FILE", help="file to write the numbers to")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, print the table, and return what the JSON file holds of it."""
    for name in ("requests", "prompt_tokens", "max_tokens", "repeats", "threads"):
        check_int(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    for name in args.loads:
        if name != "ramp" and not name.isdigit():
            raise ConfigError(f"--loads must be batch sizes or ramp, got '{name}'")
    loads = [Load.of(name, args.requests) for name in args.loads]
    torch.set_num_threads(args.threads)
    most = max(load.max_concurrency for load in loads)
    llm = LLM(args.model, num_threads=args.threads, max_num_seqs=most)
    ways = Ways(llm, candidates_of(llm, args))
    works = read_workloads(args, llm.get_tokenizer(), 4 * most, args.prompt_tokens)
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=True
    )
    before, results = machine(llm), []
    mixed = mixtures(works, args.mixtures)
    total = len(mixed) * len(loads) * args.repeats * len(ways.names)
    with tqdm(total=total, unit="run") as bar:
        for (mixture, rows), load in itertools.product(mixed.items(), loads):
            prompts = prompts_for(load, rows, mixture == SHIFT)
            timed = measure(llm, ways, load, prompts, params, args.repeats, bar.update)
            found = summarize(timed, list(ways.statics))
            results += [{"mixture": mixture, "load": load.name, **row} for row in found]
    print(table(results, args.all_rows))
    return {
        "model": args.model,
        "full_loops": llm.full_loops,
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "repeats": args.repeats,
        "texts": {work.name: work.provenance for work in works},
        "machine": before,
        "load_average_after": machine(llm)["load_average"],
        "results": results,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    args = parse(argv)
    return run_command("benchmarks/adaptive.py", argv, args.json, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
