"""A sampling run on a Ray cluster of this machine, one of whose two workers is killed.

Usage: ray_run.py MODEL_FOLDER SAMPLES; prints what came of it as JSON. A process of its own, since
Ray leaves open what a test session watches.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import ray
from fake_cells import header_of, make_plan, make_times
from processes import descendants

from looped_spec import LLM
from looped_spec.errors import LoopedSpecError
from looped_spec.offline.cells import Cell
from looped_spec.offline.measurer import Measurer
from looped_spec.offline.ray_workers import RayWorkers
from looped_spec.offline.session import Session
from looped_spec.offline.store import SampleStore
from looped_spec.runtime.identity import device_name

OPTIONS = {"max_num_seqs": 8, "num_speculative_tokens": 0, "device": "cpu", "num_threads": 1}


class KillsOne:
    """Kills a worker that is measuring, once a few cells are in."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def begin(self, cell: Cell, seconds_left: float) -> None:
        """Nothing to do."""

    def end(self, cell: Cell, done: int, left: int, seconds_left: float) -> None:
        """Kill."""
        print(cell.key, file=sys.stderr, flush=True)
        if done >= 2 and not self.killed:
            names = descendants(os.getpid())
            busy = [pid for pid, name in names.items() if name.startswith("ray::measure_there")]
            if busy:
                os.kill(busy[0], signal.SIGKILL)
                self.killed.append(busy[0])


def main(folder: str, samples: str) -> None:
    """Run, and print what came of it."""
    llm = LLM(folder, **OPTIONS)
    plan = dataclasses.replace(
        make_plan(
            ks=(1, 2),
            ds=(1,),
            context_lengths=(16,),
            temperatures=(0.9,),  # greedy text of an untrained model repeats itself
            screen_tokens=12,
            confirm_tokens=8,
        ),
        full_loops=llm.full_loops,
        device_name=device_name(llm.loaded.device),
    )
    rows = {name: [[n + 3, 7, 9] for n in range(16)] for name in ("easy", "hard")}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    workers = RayWorkers("local", folder, OPTIONS, Measurer(llm, plan, rows))
    killer = KillsOne()
    with SampleStore(Path(samples), header_of(plan), resume=False) as store:
        session = Session(plan, store, workers, make_times(plan), progress=killer)
        session.run()
    other = dataclasses.replace(plan, device_name="another device")
    strange = RayWorkers("local", folder, OPTIONS, Measurer(llm, other, rows))
    try:
        next(strange.run(iter(plan.first_cells())))
        refusal = ""
    except LoopedSpecError as error:
        refusal = str(error)
    workers.close()
    found = {
        "workers": workers.count,
        "killed": len(killer.killed),
        "measured": session.num_measured,
        "expected": [cell.key for cell in plan.first_cells()],
        "refusal": refusal,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
