"""Linear layers whose weight is kept in the form that a CPU kernel reads fastest.

A general matrix product lays its operands out anew in every call, which for a few rows costs more
than the product. Here a weight is laid out once and the original is let go, so there is one copy.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from looped_spec.huge_pages import HugePageArena
from looped_spec.layers.kernels import is_hooked
from looped_spec.layers.native import LinearKernels, Tiles

logger = logging.getLogger(__name__)

# The layout that oneDNN takes for this many rows serves one row and hundreds nearly as well.
_ONEDNN_ROWS = 8
_CHECKED_NUMBERS = 1 << 20
_NO_NEW_WEIGHT = "a packed linear layer takes no new weight: load the model again"


class Packed(ABC):
    """A weight [out, in] in a form of its own."""

    name: ClassVar[str]

    def __deepcopy__(self, _: Any) -> Packed:
        return self  # nothing changes it

    @classmethod
    @abstractmethod
    def of(cls, weight: Tensor) -> Packed | None:
        """Pack `weight` ([out, in], on the CPU), or return None where this form cannot hold
        exactly its numbers.

        Raises whatever the kernel raises where this build of torch or this processor lacks it.
        """

    @abstractmethod
    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias: [..., out] for x [..., in] of the weight's dtype."""

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the weight, a new tensor with the numbers that were packed."""

    def settle(self, arena: HugePageArena) -> None:  # noqa: B027  # most forms are a library's
        """Move the weight into huge pages, where this form can."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that the packed weight takes, but for some padding."""


class OneDnnPacked(Packed):
    """oneDNN's own blocked layout; the same numbers, rearranged."""

    name = "onednn"

    def __init__(self, weight: Tensor, num_bytes: int) -> None:
        self._weight = weight
        self._num_bytes = num_bytes

    @classmethod
    def of(cls, weight: Tensor) -> OneDnnPacked | None:
        """Reorder; every number can be held."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ONEDNN_ROWS)
        return cls(packed, weight.numel() * weight.element_size())

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply; the bits of a row do not depend on how many rows there are, up to some dozen
        of them."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return out

    def unpack(self) -> Tensor:
        """Reorder back."""
        return self._weight.to_dense()

    @property
    def num_bytes(self) -> int:
        """Those of the plain weight."""
        return self._num_bytes


class HalfPacked(Packed):
    """Numbers stored in half precision (IEEE fp16) and multiplied in fp32, by FBGEMM.

    Half the memory and half the traffic, where nothing is rounded: a bf16 number has fewer digits
    than an fp16 one, and a power of two that scales the whole matrix brings its numbers into the
    range of fp16. Products, sums, inputs and outputs are fp32. The bits of a row do not depend on
    how many rows there are.
    """

    name = "exact_fp16"

    def __init__(self, packed: Any, scale: float, num_bytes: int) -> None:
        """Take FBGEMM's object, which holds the weight divided by `scale`."""
        self._packed = packed
        self._scale = scale
        # Not a number of Python: torch would make a tensor of it in every call.
        self._factor = torch.tensor(scale, dtype=torch.float32)
        self._num_bytes = num_bytes

    @classmethod
    def of(cls, weight: Tensor) -> HalfPacked | None:
        """Pack an fp32 weight if fp16 holds each of its numbers, scaled or not."""
        if weight.dtype != torch.float32:
            return None
        scale = _exact_scale(weight)
        if scale is None:
            return None
        scaled = weight.contiguous() if scale == 1.0 else weight / scale
        packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        return cls(packed, scale, 2 * weight.numel())

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply and undo the scale, which as a power of two rounds nothing."""
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        if self._scale != 1.0:
            out.mul_(self._factor)
        return out if bias is None else out.add_(bias)

    def unpack(self) -> Tensor:
        """Return the fp32 weight."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight.float() * self._scale

    @property
    def num_bytes(self) -> int:
        """Two for each number."""
        return self._num_bytes


class TiledPacked(Packed):
    """fp32 numbers laid out for the kernel of our own, which is compiled where it runs.

    Every output is summed in one order, so the bits of a row depend neither on how many rows there
    are nor on the threads.
    """

    name = "native_fp32"
    _as_bf16: ClassVar[bool] = False

    def __init__(self, kernels: LinearKernels, tiles: Tiles) -> None:
        self._kernels, self.tiles = kernels, tiles

    @classmethod
    def of(cls, weight: Tensor) -> TiledPacked | None:
        """Lay out an fp32 weight.

        Raises:
            BuildError: the kernels cannot be compiled here.
        """
        if weight.dtype != torch.float32:
            return None
        kernels = LinearKernels()
        tiles = kernels.pack_tiles(weight.contiguous(), as_bf16=cls._as_bf16)
        return None if tiles is None else cls(kernels, tiles)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply."""
        out = self._kernels.linear(x, self.tiles)
        return out if bias is None else out.add_(bias)

    def unpack(self) -> Tensor:
        """Return the fp32 weight."""
        return self._kernels.unpack_tiles(self.tiles)

    def settle(self, arena: HugePageArena) -> None:
        """Move the tiles; nobody may compute with them meanwhile."""
        self.tiles = Tiles(arena.copy(self.tiles.words), self.tiles.outputs)

    @property
    def num_bytes(self) -> int:
        """Those of the tiles, the last of which may be padded."""
        return self.tiles.num_bytes


class TiledHalves(TiledPacked):
    """Numbers stored as bf16 where it holds each of them exactly, as of a bf16 checkpoint.

    Half the memory and half the traffic; inputs, products, sums and outputs are fp32.
    """

    name = "native_bf16"
    _as_bf16 = True


PACKINGS: Mapping[str, type[Packed]] = MappingProxyType(
    {kind.name: kind for kind in (OneDnnPacked, HalfPacked, TiledHalves, TiledPacked)}
)
"""The forms by name."""


class PackedLinear(nn.Linear):
    """A linear layer that has given its weight away to a `Packed`.

    `parameters()` still names a weight of the right shape, dtype and device, for whoever counts;
    it takes no memory and holds NaN, so that no one computes with it unnoticed. Reading `.weight`
    unpacks the real one, and so does `state_dict()`.
    """

    packed: Packed
    _was_read = False

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight, unpacked anew for every read."""
        if not self._was_read:
            self._was_read = True
            logger.warning(
                "the weight of a packed linear layer of %d x %d is read, which copies it each "
                "time: call the layer instead, or use cpu_linear='plain'",
                self.out_features,
                self.in_features,
            )
        return self.packed.unpack()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(_NO_NEW_WEIGHT)
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for x [..., in]."""
        return self.packed.linear(x, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed.unpack()

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        raise AttributeError(_NO_NEW_WEIGHT)


def tiles_of(layer: nn.Linear) -> Tiles | None:
    """Return the weight of a layer without bias, where kernels of our own have it and nobody waits
    for the layer to be called."""
    packed = layer.__dict__.get("packed")
    if not isinstance(packed, TiledPacked) or layer.bias is not None or is_hooked(layer):
        return None
    return packed.tiles


def can_pack(layer: nn.Module) -> bool:
    """Tell whether `layer` is a linear layer that computes as `nn.Linear` does, on the CPU."""
    return (
        isinstance(layer, nn.Linear)
        and not isinstance(layer, PackedLinear)
        and type(layer).forward is nn.Linear.forward
        and layer.weight.device.type == "cpu"
    )


def use_packed(layer: nn.Linear, packed: Packed) -> None:
    """Let `layer` compute with `packed`, which holds its weight, and let go of the weight.

    The layer stays the object that it is, so it does not matter who else refers to it.
    """
    weight = layer.weight
    nothing = torch.full((1, 1), math.nan, dtype=weight.dtype).expand(weight.shape)
    layer._parameters["weight"] = nn.Parameter(nothing, requires_grad=False)
    layer.packed = packed  # type: ignore[assignment]
    own = type(layer)
    layer.__class__ = type(f"Packed{own.__name__}", (PackedLinear, own), {})


def use_transposed(layer: nn.Linear) -> None:
    """Keep the weight of `layer` column by column; it is the same tensor to all who read it."""
    columns = layer.weight.detach().t().contiguous()
    layer.weight = nn.Parameter(columns.t(), requires_grad=False)


def _exact_scale(weight: Tensor) -> float | None:
    """Return a power of two by which fp32 `weight` is to be divided so that fp16 holds every
    number exactly, or None if there is none; 1 where that suffices."""
    largest = max(abs(float(end)) for end in torch.aminmax(weight))
    if not math.isfinite(largest):
        return None
    if _fits_half(weight, 1.0):
        return 1.0
    # The largest number lands between 2**14 and 2**15, below the largest of fp16.
    scale = 2.0 ** (math.frexp(largest)[1] - 15)
    return scale if _fits_half(weight, scale) else None


def _fits_half(weight: Tensor, scale: float) -> bool:
    """Tell whether fp16 holds every number of `weight` divided by `scale`."""
    rows = max(1, _CHECKED_NUMBERS // max(weight.shape[1], 1))
    return all(
        torch.equal(part.half().float(), part)
        for part in (chunk / scale for chunk in torch.split(weight, rows))
    )
