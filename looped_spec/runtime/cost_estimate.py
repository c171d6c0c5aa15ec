"""What rounds cost relative to each other, from the sizes of a model, until they are measured."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import Candidate

NOT_MEASURED = "computed from the model's sizes, not measured"
_CONTEXTS = (0, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Machine:
    """Rough figures of a device.

    Only ratios matter, and they are corrected from the first rounds on; that a factor of two is
    missing where weights stay in a processor's cache costs a few rounds, not more.

    Attributes:
        bytes_per_ms: what is read of weights and cache in a millisecond.
        multiplications_per_ms: products and sums that go with them, of one process.
        layer_ms: time to start the operations of a layer, however little there is to compute.
        round_ms: the same for what a round does once.
    """

    bytes_per_ms: float
    multiplications_per_ms: float
    layer_ms: float
    round_ms: float


CPU = Machine(2e7, 2.5e7, 0.2, 0.5)
CUDA = Machine(2e9, 2e11, 0.01, 0.1)


@dataclass(frozen=True)
class StageSizes:
    """Parameters and layers of the stages of a model; the layers of all stages are taken to be
    alike."""

    prelude_layers: int
    loop_layers: int
    readout_layers: int
    layer_parameters: float
    head_parameters: float
    cache_numbers: int
    """Keys and values that one token has in the planes of one loop."""

    @classmethod
    def of(cls, adapter: ModelAdapter) -> StageSizes:
        """Take the sizes from the declared planes and the shapes of the parameters."""
        planes = adapter.kv_planes(1)
        kinds = [plane.kind for plane in planes]
        of_a_loop = [plane for plane in planes if plane.kind == "loop"]
        vocab_size, width = adapter.geometry.vocab_size, adapter.geometry.hidden_size
        rest = sum(
            parameter.numel()
            for parameter in adapter.module.parameters()
            if parameter.ndim != 2 or parameter.shape[0] < vocab_size
        )
        return cls(
            kinds.count("prelude"),
            len(of_a_loop),
            kinds.count("readout"),
            rest / max(len(kinds), 1),
            vocab_size * width,
            sum(2 * plane.num_kv_heads * plane.head_dim for plane in of_a_loop),
        )


def with_estimated_cost(
    config: AdaptiveSpecConfig, adapter: ModelAdapter, dtype: torch.dtype, device: torch.device
) -> AdaptiveSpecConfig:
    """Return the configuration with a cost table of this model, no more than a prior, if it has
    none."""
    if config.cost is not None:
        return config
    rounds = RoundTimes(
        StageSizes.of(adapter),
        CUDA if device.type == "cuda" else CPU,
        dtype.itemsize,
        config.full_loops,
        adapter.capabilities.resumable,
    )
    sizes = {2**power for power in range(config.max_num_seqs.bit_length())}
    longest = adapter.geometry.max_model_len
    table = CostTable.sampled(
        rounds.ms,
        config.candidates,
        sorted({*sizes, config.max_num_seqs}),
        [*(context for context in _CONTEXTS if context < longest), longest],
    )
    return dataclasses.replace(
        config,
        cost=CostTable(table.cells, table.fingerprint, NOT_MEASURED),
        shadow_cost_ratio=rounds.shadow_ratio(),
    )


class RoundTimes:
    """Times of rounds: each stage reads its weights once a pass and computes with every row."""

    def __init__(
        self,
        sizes: StageSizes,
        machine: Machine,
        bytes_per_number: int,
        full_loops: int,
        resumable: bool,
    ) -> None:
        self._sizes, self._machine, self._bytes = sizes, machine, bytes_per_number
        self._full_loops, self._resumable = full_loops, resumable

    def ms(self, batch_size: int, context_tokens: int, candidate: Candidate) -> float:
        """Return the time of a round, as `speculative_round` runs it."""
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        narrow, wide = batch_size, batch_size * (k + 1)
        cached = batch_size * context_tokens
        loop, first, last = self._loop, self._prelude, self._readout
        check = last(wide, cached) + self._machine.round_ms
        if not self._resumable:
            draft = k * (first(narrow, cached) + d * loop(narrow, cached) + last(narrow, cached))
            check += first(wide, cached) + self._full_loops * loop(wide, cached)
            return draft + check
        draft = (k + 1) * (first(narrow, cached) + d * loop(narrow, cached))
        check += (self._full_loops - d) * loop(wide, cached)
        return draft + k * last(narrow, cached) + check

    def shadow_ratio(self) -> float:
        """Return the time of one more readout over that of a loop pass, without any context."""
        return self._readout(1, 0) / self._loop(1, 0)

    def _loop(self, rows: int, cached: int) -> float:
        return self._layers(self._sizes.loop_layers, rows, cached)

    def _prelude(self, rows: int, cached: int) -> float:
        return self._layers(self._sizes.prelude_layers, rows, cached)

    def _readout(self, rows: int, cached: int) -> float:
        layers = self._layers(self._sizes.readout_layers, rows, cached)
        return layers + self._machine.layer_ms + self._pass(self._sizes.head_parameters, rows)

    def _layers(self, count: int, rows: int, cached: int) -> float:
        sizes = self._sizes
        keys_and_values = cached * sizes.cache_numbers / max(sizes.loop_layers, 1) * self._bytes
        each = self._machine.layer_ms + self._pass(sizes.layer_parameters, rows)
        return count * (each + keys_and_values / self._machine.bytes_per_ms)

    def _pass(self, parameters: float, rows: int) -> float:
        """Return the time of `rows` rows through so many parameters: reading or computing,
        whichever takes longer, with a soft corner between."""
        reading = parameters * self._bytes / self._machine.bytes_per_ms
        computing = parameters * rows / self._machine.multiplications_per_ms
        return math.hypot(reading, computing)
