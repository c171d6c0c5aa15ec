"""Runs what a call of `bench load` asks for: progress, the file, an earlier file, Ctrl-C."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from looped_spec.atomic_json import write_json
from looped_spec.cli import console
from looped_spec.cli.bench_load_report import run_line
from looped_spec.cli.main import EXIT_INTERRUPTED
from looped_spec.offline import load_policy
from looped_spec.offline.load_document import (
    check_same_scenario,
    check_same_settings,
    load_document,
)

if TYPE_CHECKING:
    from looped_spec.offline.load_bench import LoadBench, Scenario
    from looped_spec.offline.load_policy import WaySetter
    from looped_spec.runtime.llm import LLM


class LoadMeasurement:
    """The scenarios of a call, and what its file holds of them so far."""

    def __init__(
        self,
        llm: LLM,
        setter: WaySetter,
        scenarios: Sequence[Scenario],
        settings: Mapping[str, Any],
        args: argparse.Namespace,
        target: Path | None,
        before: Mapping[str, Any] | None,
    ) -> None:
        from looped_spec.offline.load_bench import LoadBench
        from looped_spec.offline.machine import machine
        from looped_spec.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=args.output_tokens,
            temperature=args.temperature,
            ignore_eos=True,
            seed=llm.options.seed,
        )
        self._bench: LoadBench = LoadBench(
            llm,
            setter,
            params,
            args.repeats,
            turn_seconds=None if args.interleave is None else args.interleave / 1000.0,
        )
        self._scenarios, self._settings, self._target = scenarios, settings, target
        self._sessions: list[dict[str, Any]] = []
        if before is not None:
            check_same_settings(before["settings"], settings, str(target))
            for scenario in scenarios:
                for one in before["scenarios"]:
                    if scenario.key == tuple(
                        one[key] for key in ("group", "mixture", "profile", "drains")
                    ):
                        check_same_scenario(one, scenario.header(), str(target))
            self._bench.resume(before["scenarios"])
            self._sessions = list(before["sessions"])
        self._started = time.perf_counter()
        self._session: dict[str, Any] = {
            "command": _command(args),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "repeats": args.repeats,
            "machine": machine(llm),
        }

    def run(self) -> int:
        """Measure everything that is missing; return the exit code, which tells of Ctrl-C."""
        todo = [self._bench.missing(scenario) for scenario in self._scenarios]
        tokens = [sum(map(len, s.prompts)) for s in self._scenarios]  # only to weigh the loads
        total = sum(n * len(runs) for n, runs in zip(tokens, todo, strict=True))
        num_runs, done = sum(map(len, todo)), 0
        with tqdm(
            total=total,
            unit_scale=True,
            leave=False,
            disable=not console.is_terminal(sys.stderr),
            bar_format="{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left {desc}",
        ) as bar:
            try:
                for scenario, weight in zip(self._scenarios, tokens, strict=True):

                    def on_run(
                        way: load_policy.Way,
                        record: Mapping[str, Any],
                        scenario: Scenario = scenario,
                        weight: int = weight,
                    ) -> None:
                        nonlocal done
                        done += 1
                        self._save()
                        bar.update(weight)
                        bar.set_description_str(run_line(scenario.key, way.name, record))

                    self._bench.measure(scenario, on_run)
            except KeyboardInterrupt:
                where = f"; {self._target} has them, --resume goes on" if self._target else ""
                bar.close()
                console.note(f"interrupted after {done} of {num_runs} runs{where}")
                return EXIT_INTERRUPTED
        if not num_runs:
            console.note(f"'{self._target}' has all runs already: none was made")
        return 0

    def document(self) -> dict[str, Any]:
        """Return what is known now, that of earlier calls included."""
        self._session["seconds"] = round(time.perf_counter() - self._started, 1)
        return load_document(
            self._settings, [*self._sessions, self._session], self._bench.document()
        )

    def _save(self) -> None:
        if self._target is not None:
            write_json(self._target, self.document())


def _command(args: argparse.Namespace) -> str:
    """Return the command without folders: of a path only its last part."""
    words = []
    for word in sys.argv[1:]:
        head, equals, path = word.rpartition("=")
        words.append(head + equals + (path if path.startswith("demo:") else Path(path).name))
    return shlex.join(["looped-spec", *words])
