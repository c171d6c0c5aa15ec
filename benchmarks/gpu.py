"""Rounds on a Hopper GPU: are captured ones right, and what do they cost? Under four minutes.

Compared are captured rounds with eager ones, bit for bit, for tiny models of every bundled family.
Then, on the geometry of Ouro-1.4B with random weights in bfloat16: the plain round against what
memory traffic alone would take, eager against captured rounds, the time of a round for every
(B, L, K, d) as a cost table, speed-ups with forced acceptance against what these times predict, the
attention backends that are installed, how far texts diverge in bfloat16, and memory.

Every section has a time limit and catches its own errors, the numbers are written after each, and
what there was no time for is named; so there is a result whatever happens. `--dry-run` runs the
same code on the CPU with tiny models, where captured rounds are their traced twins.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from gpu_fused import compare_fused
from gpu_rounds import DRY, FULL, Bench, Clock, Plan
from gpu_sections import (
    PROBABILITY,
    check_exact,
    compare_attention,
    compare_eager,
    describe,
    measure_costs,
    measure_divergence,
    measure_forced,
    measure_plain,
    measure_width,
    note_memory,
)
from results import markdown

from looped_spec.atomic_json import write_json
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable
from looped_spec.presets.parts import Provenance
from looped_spec.presets.preset import Preset

LIMITS = {
    "machine": 10,
    "exact": 45,
    "load": 40,
    "plain": 25,
    "eager": 25,
    "fused": 20,
    "costs": 100,
    "width": 15,
    "forced": 40,
    "attention": 25,
    "divergence": 25,
    "memory": 5,
}
"""Most seconds of each section; together they may not take longer than `--seconds`."""

DRY_PATIENCE = 40
"""A dry run may take so many times as long: it may share its processor, and times nothing."""


class TimeOverError(Exception):
    """A section has used up its time."""


class Report:
    """The numbers so far, written after each section."""

    def __init__(
        self, path: Path | None, seconds: float, command: list[str], patience: float = 1
    ) -> None:
        """Write to `path`; the limits of sections count `patience` times."""
        self.clock = Clock(patience * seconds)
        self.patience = patience
        self.document: dict[str, Any] = {
            "schema_version": 1,
            "command": command,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "sections": {},
        }
        self._path = path
        self._start = time.perf_counter()

    def section(self, name: str, work: Callable[[dict[str, Any]], None]) -> bool:
        """Run a section, which fills a dictionary; return whether it came to its end."""
        found: dict[str, Any] = {}
        self.document["sections"][name] = found
        start = time.perf_counter()
        limit = min(self.patience * LIMITS[name], self.clock.left)
        try:
            if limit <= 0:
                raise TimeOverError("no time was left for it")
            with _time_limit(limit):
                work(found)
            found["status"] = "ok"
        except TimeOverError as error:
            found["status"], found["error"] = "time over", str(error) or f"over {limit:.0f} s"
        except Exception as error:
            found["status"] = "error"
            found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            found["traceback"] = traceback.format_exc()[-3000:]
        found["seconds"] = round(time.perf_counter() - start, 2)
        print(f"{name}: {found['status']}, {found['seconds']:.1f} s", flush=True)
        if "error" in found:
            print(f"  {found['error']}", flush=True)
        self.write()
        return bool(found["status"] == "ok")

    def write(self) -> None:
        """Write the document as it is."""
        self.document["seconds"] = round(time.perf_counter() - self._start, 1)
        if self._path is not None:
            write_json(self._path, self.document)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeOverError` in the work when time is over, where the system can."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(_: int, __: FrameType | None) -> None:
        raise TimeOverError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def preset_of(bench: Bench, machine: dict[str, Any], cost: CostTable) -> dict[str, Any]:
    """Return the costs as a preset without acceptance, to be completed by `preset generate`."""
    config = AdaptiveSpecConfig.default(bench.full_loops, bench.plan.batch_sizes[-1])
    record = Provenance(
        "measured",
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        command="benchmarks/gpu.py",
        versions={"torch": torch.__version__},
        device=machine.get("device"),
        notes="random weights: times of rounds are those of the geometry",
    )
    untouched = Provenance("modelled", record.date, source="AdaptiveSpecConfig.default")
    return Preset(
        model="ByteDance/Ouro-1.4B",
        adapter="ouro",
        device_name=machine.get("device") or "unknown",
        dtype=str(bench.plan.dtype).removeprefix("torch."),
        full_loops=bench.full_loops,
        config=config,
        cost=cost,
        acceptance=(),
        provenance={"config": untouched, "cost": record, "acceptance": untouched},
    ).to_json()


def run(plan: Plan, report: Report) -> bool:
    """Run all sections; return whether each came to its end and every comparison held."""
    sections = report.document["sections"]
    done = [report.section("machine", lambda found: describe(plan, found))]
    done.append(report.section("exact", lambda found: check_exact(plan, found)))
    benches: list[Bench] = []
    tables: list[CostTable] = []

    def load(found: dict[str, Any]) -> None:
        benches.append(Bench.load(plan, PROBABILITY))
        found["load_s"] = round(benches[0].load_seconds, 2)

    if not report.section("load", load):
        return False
    (bench,) = benches
    machine = sections["machine"]

    def costs(found: dict[str, Any]) -> None:
        clock = Clock(min(report.patience * LIMITS["costs"], report.clock.left) - 2)
        table = measure_costs(bench, clock, found)
        if table is not None:
            tables.append(table)
            found["table"] = table.to_json()
            found["preset"] = preset_of(bench, machine, table)

    def forced(found: dict[str, Any]) -> None:
        if not tables:
            raise TimeOverError("there are no round times to predict from")
        measure_forced(bench, tables[0], found)

    for name, work in (
        ("plain", lambda found: measure_plain(bench, machine, found)),
        ("eager", lambda found: compare_eager(bench, found)),
        ("fused", lambda found: compare_fused(bench, found)),
        ("costs", costs),
        ("forced", forced),
        ("width", lambda found: measure_width(bench, found)),
        ("attention", lambda found: compare_attention(bench, found)),
        ("divergence", lambda found: measure_divergence(bench, found)),
        ("memory", lambda found: note_memory(bench, found)),
    ):
        done.append(report.section(name, work))
    return all(done) and bool(sections["exact"].get("all_equal"))


def table_of(sections: dict[str, Any], *, is_dry: bool) -> str:
    """Return the one table: a line for every target; times of a dry run are held to none."""

    def line(name: str, value: float | None, target: float | None) -> tuple[str, str, str, str]:
        target = None if is_dry else target
        met = "-" if value is None or target is None else "yes" if value >= target else "no"
        return name, "-" if value is None else f"{value:.3f}", f"{target or '-'}", met

    rows: list[tuple[Any, ...]] = []
    exact = sections.get("exact", {})
    if "cases" in exact:
        bad = len(exact["different"])
        rows.append(("captured = eager, bit for bit", f"{exact['cases'] - bad}/{exact['cases']}",
                     "all", "yes" if not bad else "no"))  # fmt: skip
    for row in sections.get("plain", {}).get("rows", ()):
        size, share = row["batch_size"], row["share_of_bound"]
        target = 0.8 if size == 1 else None
        rows.append(line(f"plain round B={size}: {row['ms']:.3f} ms, share of bound", share,
                          target))  # fmt: skip
    for row in sections.get("eager", {}).get("rows", ()):
        name = f"eager / captured, B={row['batch_size']} K={row['num_speculative_tokens']}"
        rows.append(line(name, row["eager_by_graph"], 1.0))
    for row in sections.get("fused", {}).get("rows", ()):
        name = f"plain / fused, B={row['batch_size']} K={row['num_speculative_tokens']}"
        rows.append((name, f"{row['plain_by_fused']:.3f}", "-", "-"))
    for row in sections.get("forced", {}).get("rows", ()):
        mode = "async" if row["async_scheduling"] else "sync"
        name = (
            f"speed-up {row['speedup']:.2f} of predicted, B={row['batch_size']} "
            f"K={row['num_speculative_tokens']} d={row['draft_loops']} {mode}"
        )
        rows.append(line(name, row["of_predicted"], 0.95))
    width = sections.get("width", {})
    if "ratio" in width:
        name = f"tables of {width['wide_model_len']} / {width['narrow_model_len']} tokens"
        rows.append((name, f"{width['ratio']:.3f}", "-", "-"))
    for name, row in sections.get("attention", {}).get("backends", {}).items():
        if "plain_ms" in row:
            text = f"{row['plain_ms']:.3f} / {row['drafting_ms']:.3f} ms"
            rows.append((f"attention {name}, plain / drafting", text, "-", "-"))
    for row in sections.get("divergence", {}).get("rows", ()):
        name = (
            f"texts as alone, splits {row['num_splits'] or 'free'}, B={row['batch_size']} "
            f"K={row['num_speculative_tokens']}"
        )
        rows.append((name, f"{row['equal']}/{sections['divergence']['texts']}", "-", "-"))
    for name, found in sections.items():
        if found.get("status") != "ok":
            rows.append((f"section {name}", found.get("status", "not run"), "ok", "no"))
    return markdown(("what", "measured", "target", "met"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep the numbers; 0 if all went well, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    parser.add_argument("--seconds", type=float, default=225.0, help="default: %(default)s")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print("error: PyTorch finds no CUDA device; --dry-run needs none", file=sys.stderr)
        return 2
    with _quiet(num_threads=1 if args.dry_run else torch.get_num_threads()):
        return _measure(args, argv)


@contextlib.contextmanager
def _quiet(num_threads: int) -> Iterator[None]:
    """Set threads and logging for a while."""
    log = logging.getLogger("looped_spec")
    before = log.level, torch.get_num_threads()
    log.setLevel(logging.ERROR)
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        log.setLevel(before[0])
        torch.set_num_threads(before[1])


def _measure(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    command = ["benchmarks/gpu.py", *(word.rpartition("/")[2] for word in words)]
    report = Report(args.json, args.seconds, command, DRY_PATIENCE if args.dry_run else 1)
    is_good = run(DRY if args.dry_run else FULL, report)
    print(table_of(report.document["sections"], is_dry=args.dry_run))
    report.write()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
