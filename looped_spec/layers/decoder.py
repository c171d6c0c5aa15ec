"""A decoder layer of the Llama family, whatever its parts are called and wherever it has norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

from looped_spec.adapter import StageContext
from looped_spec.layers.attention import RotaryAttention
from looped_spec.layers.kernels import TakesKernels, computes_as, is_hooked
from looped_spec.layers.mlp import SwiGLU
from looped_spec.layers.native import LinearKernels, NativeLayer, NativeRows
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.packed import tiles_of


@dataclass(frozen=True)
class DecoderParts:
    """The parts of x + n2(attn(n1 x)), then x + n4(mlp(n3 x)), where n2 and n4 may be missing."""

    attention: RotaryAttention
    mlp: SwiGLU
    before_attention: RMSNorm
    before_mlp: RMSNorm
    after_attention: RMSNorm | None = None
    after_mlp: RMSNorm | None = None


class NativeContext(Protocol):
    """A context whose cache the kernels of our own can reach."""

    def native_pages(self, plane: int) -> tuple[NativeRows, Tensor, Tensor] | None:
        """Return its rows and the pages of a plane, None where others attend."""
        ...


class DecoderLayer(nn.Module, TakesKernels):
    """Attention and feed-forward layer, each with its residual; subclasses name the parts.

    Where kernels of our own have all of its weights and attend, it is one call.
    """

    _native: NativeLayer | None = None
    _skipped: tuple[nn.Module, ...] = ()

    def parts(self) -> DecoderParts:
        """Return the parts."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], plane: int, ctx: StageContext
    ) -> Tensor:
        """Return [B, T, E] for `x` of that shape; `rotary` is of `RotaryAngles.cos_sin`."""
        kernels = self.kernels
        if isinstance(kernels, LinearKernels) and kernels.serves(x):
            native = self._native or self._make_native()
            if native is not None and hasattr(ctx, "native_pages") and self._may_skip_parts(x):
                reached = cast(NativeContext, ctx).native_pages(plane)
                if reached is not None:
                    return native(x, rotary, *reached)
        parts = self.parts()
        x = parts.attention.branch(
            x, rotary, plane, ctx, parts.before_attention, parts.after_attention
        )
        return parts.mlp.branch(x, parts.before_mlp, parts.after_mlp)

    def _may_skip_parts(self, x: Tensor) -> bool:
        """Whether nobody waits for a call of a part, and `x` is as wide as the layer."""
        if any(map(is_hooked, self._skipped)):
            return False
        return x.shape[-1] == self._skipped[2].in_features

    def _make_native(self) -> NativeLayer | None:
        """Return the weights as C takes them, None where it does not have them all, or a part
        computes something of its own.

        They are kept: norms may be changed in place from then on, but not replaced.
        """
        parts = self.parts()
        attention, mlp = parts.attention, parts.mlp
        qkv, o = tiles_of(attention.qkv_proj), tiles_of(attention.o_proj)
        gate_up, down = tiles_of(mlp.gate_up_proj), tiles_of(mlp.down_proj)
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        norms = (parts.before_attention, parts.before_mlp, parts.after_attention, parts.after_mlp)
        stock = computes_as(attention, RotaryAttention) and computes_as(mlp, SwiGLU)
        if not stock or not all(computes_as(norm, RMSNorm) for norm in norms):
            return None
        linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        skipped = (attention, mlp, *linears, *(norm for norm in norms if norm is not None))
        self._skipped = skipped
        last = parts.after_attention, parts.after_mlp
        after_attention, after_mlp = (None if norm is None else norm.parts for norm in last)
        self._native = NativeLayer(
            (attention.num_heads, attention.num_kv_heads, attention.head_dim),
            (qkv, o, gate_up, down),
            (parts.before_attention.parts, after_attention, parts.before_mlp.parts, after_mlp),
        )
        return self._native
