"""Modelled costs: what rounds take on a device that is not here, from sizes and data sheets.

Every layer pass reads its weights once and computes with every row; it takes the longer of the two,
with a soft corner, and a fixed time to start (`runtime.cost_estimate`). Of a data sheet's bandwidth
and compute the shares below are reached. With captured rounds a layer takes `GRAPH_LAYER_MS` to
start. An engine that starts operations one by one from Python takes a hundred times that, so that
loop passes cost the same whatever is in them: `launch_bound` models that from one measured time of
plain decoding, as for the published tables.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError, check_int, check_number
from looped_spec.offline.devices import KnownDevice
from looped_spec.presets.fields import as_object, values_of
from looped_spec.presets.preset import read_json
from looped_spec.runtime.cost_estimate import Machine, RoundTimes, StageSizes

BANDWIDTH_SHARE = 0.8
COMPUTE_SHARE = 0.6
"""What of a data sheet well-made kernels reach; customary figures, not measured here."""

GRAPH_LAYER_MS = 0.03
"""About ten kernels of a layer, 3 us apart, as within a captured graph."""

GRAPH_ROUND_MS = 0.1

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model, without its weights.

    Attributes:
        adapter: name of its adapter.
        full_loops: D.
        max_model_len: tokens.
        resumable: verification goes on from drafted states.
        prelude_layers, loop_layers, readout_layers: blocks of each stage.
        layer_parameters: parameters of one block.
        head_parameters: of the output matrix.
        cache_numbers: keys and values of a token in the planes of one loop.
        source: where the sizes are from.
    """

    adapter: str
    full_loops: int
    max_model_len: int
    resumable: bool
    prelude_layers: int
    loop_layers: int
    readout_layers: int
    layer_parameters: float
    head_parameters: float
    cache_numbers: int
    source: str

    def __post_init__(self) -> None:
        for name in ("full_loops", "max_model_len", "loop_layers", "cache_numbers"):
            check_int(f"{name} of a geometry", getattr(self, name), 1)
        for name in ("prelude_layers", "readout_layers"):
            check_int(f"{name} of a geometry", getattr(self, name), 0)
        for name in ("layer_parameters", "head_parameters"):
            check_number(f"{name} of a geometry", getattr(self, name), 1)

    @property
    def sizes(self) -> StageSizes:
        """The same as the cost model takes it."""
        names = [f.name for f in dataclasses.fields(StageSizes)]
        return StageSizes(**{name: getattr(self, name) for name in names})


def read_geometries(path: Path) -> dict[str, Geometry]:
    """Return the geometries of a file by the name of the model."""
    document = as_object(read_json(path, "file of geometries"), "a file of geometries")
    return {
        name: Geometry(**values_of(Geometry, one, "a geometry")) for name, one in document.items()
    }


def graph_machine(device: KnownDevice) -> Machine:
    """Return the figures of a device that runs captured rounds."""
    return Machine(
        bytes_per_ms=BANDWIDTH_SHARE * device.gigabytes_per_second * 1e6,
        multiplications_per_ms=COMPUTE_SHARE * device.teraflops * 1e9 / 2,
        layer_ms=GRAPH_LAYER_MS,
        round_ms=GRAPH_ROUND_MS,
    )


def launch_bound(geometry: Geometry, device: KnownDevice, plain_ms: float) -> Machine:
    """Return the figures of a device whose plain step of one request was measured to take
    `plain_ms`: what the device itself does not need is the host's, in equal parts per layer."""
    machine = dataclasses.replace(graph_machine(device), layer_ms=0.0, round_ms=0.0)
    busy = round_times(geometry, machine).ms(1, 64, PLAIN)
    passes = (
        geometry.prelude_layers
        + geometry.full_loops * geometry.loop_layers
        + geometry.readout_layers
        + 1
    )
    if plain_ms <= busy:
        raise ConfigError(f"plain_ms must be above {busy:.2f}, what the device needs")
    return dataclasses.replace(machine, layer_ms=(plain_ms - busy) / passes)


def round_times(geometry: Geometry, machine: Machine, bytes_per_number: int = 2) -> RoundTimes:
    """Return the model of a geometry's rounds on a machine."""
    return RoundTimes(
        geometry.sizes, machine, bytes_per_number, geometry.full_loops, geometry.resumable
    )


def modelled_cost(
    geometry: Geometry,
    device: KnownDevice,
    candidates: Sequence[Candidate],
    fingerprint: Mapping[str, str],
    bytes_per_number: int = 2,
) -> CostTable:
    """Return the cost table of a model on a device that runs captured rounds."""
    times = round_times(geometry, graph_machine(device), bytes_per_number)
    table = CostTable.sampled(
        lambda b, length, c: round(times.ms(b, length, c), 6),
        candidates,
        BATCH_SIZES,
        [length for length in CONTEXTS if length <= geometry.max_model_len],
    )
    return dataclasses.replace(table, fingerprint=tuple(sorted(fingerprint.items())))


@dataclass(frozen=True)
class PublishedRow:
    """A published measurement: its shape, how much faster than plain, and what was accepted.

    `plain_tokens_per_second` is that of all requests together.
    """

    table: str
    input_tokens: int
    output_tokens: int
    batch_size: int
    num_speculative_tokens: int
    draft_loops: int
    plain_tokens_per_second: float
    speedup: float
    acceptance: float


def read_rows(path: Path) -> list[PublishedRow]:
    """Return the rows of a file of published measurements."""
    document: Any = json.loads(path.read_text(encoding="utf-8"))
    return [PublishedRow(*row) for row in document["rows"]]


def predicted_speedup(times: RoundTimes, row: PublishedRow) -> float:
    """Return (1 + K a) T(0) / T(K, d), with the acceptance a that the row has."""
    context = row.input_tokens + row.output_tokens // 2
    candidate = Candidate(row.num_speculative_tokens, row.draft_loops)
    tokens = 1 + row.num_speculative_tokens * row.acceptance
    plain = times.ms(row.batch_size, context, PLAIN)
    return tokens * plain / times.ms(row.batch_size, context, candidate)
