"""Chooses how the linear layers of a model on the CPU keep their weights, by measuring."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from looped_spec.errors import ConfigError, UnsupportedError
from looped_spec.huge_pages import HugePageArena, collapse_memory, huge_page_bytes
from looped_spec.layers.packed import (
    PACKINGS,
    HalfPacked,
    PackedLinear,
    TiledHalves,
    TiledPacked,
    can_pack,
    use_packed,
    use_transposed,
)
from looped_spec.options import CPU_LINEARS
from looped_spec.runtime.freed_memory import return_freed_memory

logger = logging.getLogger(__name__)

AUTO, PLAIN, TRANSPOSED = CPU_LINEARS[:3]
_NATIVE = (TiledHalves.name, TiledPacked.name)
# Half the memory, and bits that do not depend on the batch, are worth as much as some time.
_PREFERRED = tuple(dict.fromkeys((HalfPacked.name, TiledHalves.name, *CPU_LINEARS[1:])))

# Rows of a pass: a lone request, its drafts being checked, a full batch, a batch being checked.
_ROWS = (1, 4, 8, 32)
# A way must save this share of the time of those before it, so that noise seldom decides.
_GAIN = 0.1
# Repeats end early once so many in a row say that the same way is best.
_REPEATS = 5
_AGREEING = 3
# A matrix that is smaller than this is not worth a choice, and adapters read such weights directly.
_SMALLEST = 1 << 12
# What is measured reads so much in turn, or as much as the model has: one matrix alone would stay
# in the cache of a core. Of a larger one some rows are measured: time is proportional to them.
_MEASURED_BYTES = 1 << 24
# While weights are moved, freed memory goes back to the system each time that so much was moved.
_RETURNED_AT_ONCE = 1 << 28

Scores = Mapping[str, float]
"""For each way that works here its time by that of the plain one, mean of the ratios over rows."""


@dataclass(frozen=True)
class LinearReport:
    """What became of the linear layers of a model.

    Attributes:
        ways: how many layers keep their weights in which way.
        plain_bytes: what their weights took before.
        num_bytes: what they take now.
        seconds: what measuring and packing took.
        scores: what was measured, by out and in features; empty unless the choice was "auto".
    """

    ways: Mapping[str, int]
    plain_bytes: int
    num_bytes: int
    seconds: float
    scores: Mapping[tuple[int, int], Scores]

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "ways": dict(self.ways),
            "plain_bytes": self.plain_bytes,
            "num_bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "scores": {
                f"{rows}x{columns}": {way: round(score, 3) for way, score in scores.items()}
                for (rows, columns), scores in self.scores.items()
            },
        }


def check_linears(way: str, device: torch.device) -> None:
    """Raise `ConfigError` for a way that is asked for on a device that has no such choice."""
    if device.type != "cpu" and way not in (AUTO, PLAIN):
        raise ConfigError(f"cpu_linear={way!r} is for device cpu, not for '{device}'")


def arrange_linears(
    module: nn.Module, way: str = AUTO, *, use_native: bool = False
) -> LinearReport:
    """Let the linear layers of `module`, whose weights are in place, keep them as `way` says.

    Left as they are: layers on other devices or with a forward of their own, small ones, and those
    whose weight another module uses too. "auto" takes for each shape what is fastest here with the
    threads that are set now; shapes are measured once per process, so that all models of a process
    are treated alike. Whatever the way, what the process has in memory is moved into huge pages
    then. With `use_native` that may be a kernel of our own, which is compiled here. A
    layer's numbers never change, but which bits a sum is rounded to does.

    Raises:
        UnsupportedError: the way asked for cannot hold a weight, or this build of torch or this
            processor lacks its kernel.
    """
    start = time.perf_counter()
    layers = _candidates(module)
    before = sum(_num_bytes(layer) for layer in layers.values())
    scores: dict[tuple[int, int], Scores] = {}
    if way == AUTO:
        for layer in layers.values():
            size = layer.weight.shape[0], layer.weight.shape[1]
            if size not in scores:
                scores[size] = measure(
                    *size,
                    layer.weight.dtype,
                    torch.get_num_threads(),
                    _measured_bytes(before),
                    use_native,
                )

    def arrange(item: tuple[str, nn.Linear]) -> str:
        name, layer = item
        if way != AUTO:
            return _use(layer, way, name)
        order = ranked(scores[layer.weight.shape[0], layer.weight.shape[1]])
        return next(used for each in order if (used := _use(layer, each)))

    # Packing is done by one thread for each weight, and takes a minute for a billion numbers. What
    # another thread frees last the C library keeps, so none is made where one does it all.
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        ways = Counter(map(arrange, layers.items()))
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            ways = Counter(pool.map(arrange, layers.items()))
    after = sum(_num_bytes(layer) for layer in layers.values())
    in_huge_pages = 0
    if layers:
        _settle(module)
        return_freed_memory()  # else the originals, and what was measured, would stay
        in_huge_pages = collapse_memory()
    report = LinearReport(ways, before, after, time.perf_counter() - start, scores)
    if layers:
        logger.info(
            "linear layers: %s; %.0f MiB, plain %.0f MiB; %.1f s (cpu_linear); "
            "%.0f MiB of the process lie in huge pages",
            ", ".join(f"{count} {name}" for name, count in sorted(ways.items())),
            after / 2**20,
            before / 2**20,
            report.seconds,
            in_huge_pages / 2**20,
        )
    return report


def _settle(module: nn.Module) -> None:
    """Move all weights of a module into huge pages, one after the other, but for those that share
    their memory with another tensor, are no plain tensors, or are in the care of a library."""
    arena, moved = HugePageArena(), 0
    packed = [part.packed for part in module.modules() if isinstance(part, PackedLinear)]
    weights = _plain_weights(module)
    if sum(each.num_bytes for each in packed) + sum(p.nbytes for p in weights) < huge_page_bytes():
        return  # a page of its own for next to nothing

    def count(num_bytes: int) -> None:
        nonlocal moved
        moved += num_bytes
        if moved > _RETURNED_AT_ONCE:  # or as much as all weights would be held twice
            moved = 0
            return_freed_memory()

    while weights:
        parameter = weights.pop()
        parameter.data = arena.copy(parameter.data)
        count(parameter.nbytes)
    for each in packed:
        each.settle(arena)
        count(each.num_bytes)


def _plain_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose memory is theirs alone, as far as the module knows."""
    dense = [
        tensor
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized
    ]
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in dense)
    return [
        tensor
        for tensor in dense
        if isinstance(tensor, nn.Parameter)
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and users[tensor.untyped_storage().data_ptr()] == 1
    ]


def ranked(scores: Scores) -> list[str]:
    """Return the ways of `scores`, the best first: a later one only if it saves enough."""
    left, order = dict(scores), []
    while left:
        best = next(iter(left))
        for way, score in left.items():
            if score < (1.0 - _GAIN) * left[best]:
                best = way
        order.append(best)
        del left[best]
    return order


@functools.cache
def measure(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    num_threads: int,
    num_bytes: int = _MEASURED_BYTES,
    use_native: bool = False,
) -> Scores:
    """Time every way for weights of this shape, as many as take `num_bytes`; ways of our own
    kernels with `use_native`.

    PyTorch must be set to `num_threads` threads.
    """
    assert torch.get_num_threads() == num_threads
    row_bytes = in_features * dtype.itemsize
    rows = min(out_features, max(num_bytes // row_bytes, 64))
    copies = max(1, num_bytes // (rows * row_bytes))
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        # bf16 numbers as of a model, which all ways can hold; only where they lie differs
        weight = (0.02 * torch.randn(rows, in_features, generator=generator)).bfloat16().to(dtype)
        weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        inputs = [torch.randn(n, 1, in_features, generator=generator).to(dtype) for n in _ROWS]
        ways = [way for way in _PREFERRED if use_native or way not in _NATIVE]
        calls = _usable_calls(ways, weights, inputs[1])
        if num_bytes == _MEASURED_BYTES:  # of a smaller model much stays in a cache
            collapse_memory()  # as the weights of the model will lie
        best: dict[tuple[str, int], float] = {}
        firsts: list[str] = []
        for _ in range(_REPEATS):
            for way, of_way in calls.items():
                for x in inputs:
                    start = time.perf_counter()
                    for call in of_way:
                        call(x)
                    taken = time.perf_counter() - start
                    best[way, len(x)] = min(taken, best.get((way, len(x)), taken))
            scores = {
                way: sum(best[way, n] / best[PLAIN, n] for n in _ROWS) / len(_ROWS) for way in calls
            }
            firsts.append(ranked(scores)[0])
            if firsts[-_AGREEING:] == firsts[-1:] * _AGREEING:
                break
    return scores


def _measured_bytes(model_bytes: int) -> int:
    """Return how much to read in turn for a model whose layers take so many bytes."""
    return min(1 << max(model_bytes - 1, 0).bit_length(), _MEASURED_BYTES)


Call = Callable[[Tensor], Tensor]


def _usable_calls(
    ways: Sequence[str], weights: Sequence[Tensor], x: Tensor
) -> dict[str, list[Call]]:
    """Return the products with `weights` for each of the ways that works here."""
    calls: dict[str, list[Call]] = {}
    want = F.linear(x, weights[0])
    for way in ways:
        try:
            made = [_call(way, weight) for weight in weights]
            same = torch.allclose(made[0](x), want, rtol=0.1, atol=0.1)
        except Exception as error:  # whatever a kernel raises where it is missing
            logger.debug("cpu_linear %s does not work here: %s", way, error)
            continue
        if same:
            calls[way] = made
    return calls


def _call(way: str, weight: Tensor) -> Call:
    if way not in PACKINGS:
        laid = weight if way == PLAIN else weight.t().contiguous().t()
        return lambda x: F.linear(x, laid)
    packed = PACKINGS[way].of(weight)
    if packed is None:
        raise UnsupportedError(f"{way} does not hold {weight.dtype}")
    return lambda x: packed.linear(x, None)


def _candidates(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers to choose for, by name."""
    users: Counter[int] = Counter(
        id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False)
    )
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and can_pack(layer)
        and layer.weight.numel() >= _SMALLEST
        and users[id(layer.weight)] == 1
    }


def _use(layer: nn.Linear, way: str, name: str | None = None) -> str:
    """Keep the weight of `layer` in this way and return the way.

    Where it cannot be, return "" and leave the layer, or raise if the layer has a `name`.
    """
    if way == TRANSPOSED:
        use_transposed(layer)
    elif way != PLAIN:
        try:
            packed, reason = PACKINGS[way].of(layer.weight.detach()), "it would round its numbers"
        except Exception as error:  # whatever a kernel raises where it is missing
            packed, reason = None, str(error)
        if packed is None:
            if name is None:
                return ""
            raise UnsupportedError(f"cpu_linear={way!r} cannot hold weight '{name}': {reason}")
        use_packed(layer, packed)
    return way


def _num_bytes(layer: nn.Linear) -> int:
    if isinstance(layer, PackedLinear):
        return layer.packed.num_bytes
    return layer.weight.numel() * layer.weight.element_size()
