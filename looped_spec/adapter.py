"""The contract between the core and a model family, and nothing else.

Depth is always counted in loops completed (1..D); a loop *index* is 0-based. Importing this module
does not import torch, so a plugin may describe itself without loading anything heavy.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from looped_spec.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn

API_VERSION = 1
"""What `AdapterSpec.api_version` is compared with; raised when the behaviour of this contract
changes."""

LoopState = tuple["Tensor", ...]
"""What a loop hands to the next: tensors whose first two axes are [B, T]; the rest is the adapter's
business."""

PerRow = Callable[["Tensor", "Tensor"], tuple["Tensor", ...]]
"""Computes tensors [B, T, ...] from positions [B, T] and seeds [B], both int64."""

PlaneKind = Literal["prelude", "loop", "readout"]


@dataclass(frozen=True)
class KVPlane:
    """One key/value plane of the cache: what one attention layer remembers at one depth.

    `kind` decides what speculation may reuse: `prelude` and `loop` planes written while drafting
    are kept, a `readout` plane depends on the depth it was read at and is written again by
    verification. A `loop` plane says which loop (0-based) writes it, and `layer` tells the planes
    of one loop apart: a token that leaves early stands in for itself in the planes of the same
    layer at deeper loops.
    """

    kind: PlaneKind
    num_kv_heads: int
    head_dim: int
    loop: int | None = None
    layer: int = 0

    def __post_init__(self) -> None:
        if (self.kind == "loop") != (self.loop is not None):
            raise ConfigError(f"a plane of kind '{self.kind}' cannot have loop={self.loop}")


def loop_planes(
    full_loops: int, num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[KVPlane, ...]:
    """Return a plane for each (loop, layer), all layers of a loop before those of the next."""
    return tuple(
        KVPlane("loop", num_kv_heads, head_dim, loop, layer)
        for loop in range(full_loops)
        for layer in range(num_layers)
    )


@dataclass(frozen=True)
class LoopGeometry:
    """Sizes and limits of one loaded model. Counts of loops are loops completed, lengths are
    tokens."""

    default_full_loops: int
    max_full_loops: int
    vocab_size: int
    hidden_size: int
    max_model_len: int

    def check_full_loops(self, full_loops: int) -> int:
        """Return `full_loops` if the model may run that deep; raise `ConfigError` with the range if
        not."""
        if not 1 <= full_loops <= self.max_full_loops:
            raise ConfigError(
                f"full_loops must be between 1 and {self.max_full_loops} (the deepest run of "
                f"this model), got {full_loops}"
            )
        return full_loops


@dataclass(frozen=True)
class ExitCriterion:
    """A way to tell that a token needs no more loops: its name and the official default
    threshold. With `monotone` its score never falls from one loop to the next, as a cumulative
    probability does not."""

    name: str
    default_threshold: float
    monotone: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What a family can do. The core asks these and never the adapter's name.

    Attributes:
        early_exit: criteria of `ModelAdapter.exit_score`, the default one first; empty if there is
            no signal.
        resumable: a shallow run is a prefix of a deep run, so verification may continue from
            drafted states.
        shadow_depths: the readout of an intermediate state is meaningful and disturbs no KV plane.
        seed_free: no stage reads `StageContext.seeds`, nor the seeds of `per_row`, so requests of
            different seeds may share what was computed of the same beginning of their prompts.
        non_kv_state: a name for per-request state beside the KV planes, which the core cannot roll
            back yet and therefore refuses; None if there is none.
    """

    early_exit: tuple[ExitCriterion, ...] = ()
    resumable: bool = True
    shadow_depths: bool = False
    seed_free: bool = False
    non_kv_state: str | None = None


@dataclass(frozen=True)
class AdapterSpec:
    """What a plugin says of one model family without importing it.

    Attributes:
        name: adapter name, `[a-z0-9_]+`.
        model_types: values of `model_type` in config.json that this adapter takes.
        accepts: `"module:function"` for a family that shares a model type with others: called with
            a config.json of such a type, the function tells whether the model is of this family. It
            must be as cheap to import as the plugin. None: every model of these types is.
        factory: `"module:Class"` of the `ModelAdapter`, imported on first use.
        api_version: the `API_VERSION` that the adapter was written for.
        capabilities: what the family can do at most; a loaded model may declare less.
        requires: top-level modules that must be importable, for instance `("transformers",)`.
        install_hint: what to type when one of them is missing.
        preset_package: package whose `presets/` folder holds preset files, or None.
        demo_package: package whose folder is a bundled checkpoint, reached as `demo:<name>`, or
            None.
    """

    name: str
    model_types: tuple[str, ...]
    factory: str
    api_version: int = API_VERSION
    capabilities: Capabilities = field(default_factory=Capabilities)
    requires: tuple[str, ...] = ()
    install_hint: str | None = None
    preset_package: str | None = None
    demo_package: str | None = None
    accepts: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise ConfigError(f"adapter name must match [a-z0-9_]+, got '{self.name}'")
        if isinstance(self.model_types, str) or not self.model_types:
            raise ConfigError(
                f"model_types of adapter '{self.name}' must be a tuple of at least one name"
            )
        for field_name, value, form in (
            ("factory", self.factory, "module:Class"),
            ("accepts", self.accepts, "module:function"),
        ):
            if value is not None and not re.fullmatch(r"[\w.]+:\w+", value):
                raise ConfigError(
                    f"{field_name} of adapter '{self.name}' must be '{form}', got '{value}'"
                )


@dataclass(frozen=True)
class WeightTarget:
    """Where one checkpoint tensor goes: rows `start` to `stop` of a parameter (all of it when both
    are None)."""

    parameter: str
    start: int | None = None
    stop: int | None = None


class StageContext(Protocol):
    """What the three stages know of the rows they compute. Adapters never see requests, blocks or a
    scheduler.

    Attributes:
        positions: [B, T] int64, absolute position of each row in its request.
        seeds: [B] int64, the requests' seeds; any per-token randomness must be hashed from (seed,
            position).
        total_loops: the depth that this run will reach; some models condition on it.
    """

    positions: Tensor
    seeds: Tensor
    total_loops: int

    def per_row(self, name: str, compute: PerRow) -> tuple[Tensor, ...]:
        """Return what `compute(positions, seeds)` gives for these rows, remembered under `name`.

        For what depends on nothing but position and seed: rotary angles, a hashed initial state.
        `compute` gets positions [B, T] and seeds [B] of all rows of a round at once and returns
        tensors whose first two axes are [B, T]; every step of the round then takes its slice.
        """
        ...

    def attend(
        self, plane: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """Write k and v into KV plane `plane`, and attend causally over what it holds for each
        row's request.

        q is [B, T, heads, head_dim], k and v are [B, T, kv_heads, head_dim]; the result has the
        shape of q. `plane` is a Python int, an index into `ModelAdapter.kv_planes`. The default
        scale is head_dim ** -0.5.
        """
        ...

    def logit_rows(self, hidden: Tensor) -> Tensor:
        """Keep only the rows whose logits are wanted; call it right before the head.

        [B, T, ...] in, [B, T', ...] out: in prefill T' is 1 (the last row of each prompt),
        otherwise T.
        """
        ...


class ModelAdapter(ABC):
    """A looped model as three stages over rows of shape [B, T, ...], with its sizes and its
    checkpoint layout.

    The constructor takes config.json as a mapping, and the adapter's own options (see `options`).
    It must build `module` with the parameters only, so that it can run under
    `torch.device("meta")`; whatever is computed from the config rather than loaded belongs into
    plain attributes made on first use.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    """Names and defaults of `adapter_options`; an unknown one is an error."""

    module: nn.Module
    geometry: LoopGeometry
    capabilities: Capabilities
    default_speculation: tuple[int, int] | None = None
    """(num_speculative_tokens, draft_loops) to use when neither the user nor a preset says; None
    means off."""
    speculation_note: str | None = None
    """Why `default_speculation` is None, and what to try: logged for a user who asked for no K."""
    extra_stop_token_ids: tuple[int, ...] = ()
    """Ids that end a text beside those that the model's files name: those of the family's code."""
    ignored_stop_token_ids: tuple[int, ...] = ()
    """Ids that config.json and generation_config.json name as ends although they are none: left
    over from another model with another tokenizer. The tokenizer's own end marks always count."""

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None: ...

    @classmethod
    def unsupported_reason(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint of this configuration cannot run, or None; asked before anything is
        allocated."""
        return None

    @abstractmethod
    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """Declare the KV planes of a run `full_loops` deep; `attend` takes indices into this
        tuple."""

    @abstractmethod
    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        """Embed `tokens` ([B, T] int64) and run the blocks that run once, before the first loop."""

    @abstractmethod
    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        """Run the shared block once; `index` is the number of loops completed before."""

    @abstractmethod
    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Return logits [B, T', V]: final norm, blocks that run once after the loops, head
        (`ctx.logit_rows`)."""

    def draft_readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Return the logits that drafts are taken from; by default those of `readout`."""
        return self.readout(state, ctx)

    def exit_score(
        self,
        criterion: str,
        state: LoopState,
        previous: LoopState,
        previous_score: Tensor | None,
        index: int,
        ctx: StageContext,
    ) -> Tensor:
        """Score readiness after loop `index`: [B, T] fp32; a row may leave once it reaches the
        threshold.

        `previous` is the state before this loop, `previous_score` what this method returned for the
        loop before it (None at the first), so that cumulative and counting criteria need no state
        of their own.
        """
        raise UnsupportedError(f"{type(self).__name__} has no early-exit criterion '{criterion}'")

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        """Map every checkpoint tensor name to its place; by default names are those of `module`."""
        return {name: WeightTarget(name) for name in self.module.state_dict()}

    def optional_checkpoint_tensors(self) -> frozenset[str]:
        """Name tensors that a checkpoint may omit (a tied head) or that are accepted and
        ignored."""
        return frozenset()
