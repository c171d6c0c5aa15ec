"""Measures cells on the machines of a Ray cluster, each cell once, whatever workers are lost.

Every node needs this package, the model, and the same kind of device. Texts travel as token ids.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.offline.cells import Cell, cell_document, read_cell
from looped_spec.offline.measurer import Measurer
from looped_spec.offline.plan import SamplingPlan

LOCAL = "local"
MAX_RETRIES = 3
"""How often a cell is begun again whose worker was lost."""


class RayWorkers:
    """Workers of a Ray cluster: one for each GPU, or for each CPU where there is no GPU.

    Args:
        address: of the cluster, `auto` for one that runs, `local` for one of this machine.
        model: what the workers load, as `LLM` takes it.
        options: keyword arguments of `LLM`.
        measurer: what is measured; its own model is not used.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """

    def __init__(
        self, address: str, model: str, options: Mapping[str, Any], measurer: Measurer
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--ray needs Ray: pip install 'looped-spec[ray]'") from error
        self._ray = ray
        try:
            ray.init(
                address=address,  # "local" is a word of Ray's too; none may mean a stale cluster
                include_dashboard=False if address == LOCAL else None,
                log_to_driver=False,
                ignore_reinit_error=True,
            )
        except Exception as error:  # Ray raises whatever its transport does
            raise ConfigError(f"--ray {address}: no cluster there ({error})") from error
        found = ray.cluster_resources()
        gpus = int(found.get("GPU", 0))
        self.count = gpus or max(int(found.get("CPU", 1)), 1)
        needs: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self._task = ray.remote(max_retries=MAX_RETRIES, **needs)(measure_there)
        spec = {
            "model": model,
            "options": dict(options),
            "plan": measurer.plan.to_json(),
            "rows": {name: [list(row) for row in rows] for name, rows in measurer.rows.items()},
        }
        self._spec = ray.put(json.dumps(spec))

    def run(self, cells: Iterator[Cell]) -> Iterator[tuple[Cell, dict[str, Any], float]]:
        """Yield each cell with its data and seconds as they come; see `Workers`."""
        ray = self._ray
        running: dict[Any, Cell] = {}
        try:
            while True:
                while len(running) < self.count and (cell := next(cells, None)) is not None:
                    task = self._task.remote(self._spec, json.dumps(cell_document(cell)))
                    running[task] = cell
                if not running:
                    return
                (done,), _ = ray.wait(list(running), num_returns=1)
                data, seconds = self._result(done, running[done])
                yield running.pop(done), data, seconds
        finally:
            for task in running:
                ray.cancel(task, force=True)

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()

    def _result(self, task: Any, cell: Cell) -> tuple[dict[str, Any], float]:
        errors = self._ray.exceptions
        try:
            data, seconds = self._ray.get(task)
        except errors.RayTaskError as error:
            if isinstance(error.cause, LoopedSpecError):
                raise LoopedSpecError(f"cell '{cell.key}': {error.cause}") from error
            raise
        except errors.RayError as error:
            raise LoopedSpecError(
                f"cell '{cell.key}' was lost with its worker {MAX_RETRIES + 1} times "
                f"({type(error).__name__}); the others are kept, --resume goes on"
            ) from error
        return data, seconds


def measure_there(spec: str, cell: str) -> tuple[dict[str, Any], float]:
    """Measure a cell in a worker; return its data and the seconds that it took."""
    measurer = _measurer(spec)
    start = time.monotonic()
    data = measurer.measure(read_cell(json.loads(cell)))
    return data, time.monotonic() - start


@functools.lru_cache(maxsize=1)
def _measurer(spec: str) -> Measurer:
    """Load the model, once for all cells that a worker measures."""
    from looped_spec.runtime.identity import device_name
    from looped_spec.runtime.llm import LLM

    document = json.loads(spec)
    plan = SamplingPlan.from_json(document["plan"])
    llm = LLM(document["model"], **document["options"])
    dtype = str(llm.loaded.dtype).removeprefix("torch.")
    found = {"device_name": device_name(llm.loaded.device), "dtype": dtype}
    for name, value in found.items():
        if value != getattr(plan, name):
            raise ConfigError(
                f"a worker's {name} is '{value}', the plan's '{getattr(plan, name)}': give --ray a "
                "cluster of one kind of device, the one that this command runs on"
            )
    measurer = Measurer(llm, plan, document["rows"])
    measurer.capture()
    return measurer
