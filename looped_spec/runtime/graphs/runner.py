"""Runs rounds: as they were captured where their shape was, else as they come."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from looped_spec.runtime.attention import Span
from looped_spec.runtime.graphs.backends import GraphBackend, Replay
from looped_spec.runtime.graphs.shapes import largest_first, pad
from looped_spec.runtime.logprobs import OnTargets
from looped_spec.runtime.round_program import RoundProgram, RoundShape
from looped_spec.runtime.sampler import SamplingMode

logger = logging.getLogger(__name__)

_MODES = tuple(sorted(SamplingMode, key=lambda mode: mode.value))
_FREE_SHARE = 0.5
"""Of the memory that is free when capturing begins, where no limit is given."""


@dataclass
class GraphStats:
    """What was captured and what was run.

    Attributes:
        backend: name of the graph backend, "eager" for none.
        captured: shapes that were captured.
        seconds: time that capturing took.
        num_bytes: device memory that it took, 0 where nobody can tell.
        given_up: shapes that were not captured, for want of memory or as a capture broke off.
        failure: why capturing was given up, None if it was not.
        replays: rounds that ran as captured.
        eager_rounds: rounds that did not, by reason; counted where there are graphs at all.
    """

    backend: str = "eager"
    captured: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    given_up: list[str] = field(default_factory=list)
    failure: str | None = None
    replays: int = 0
    eager_rounds: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON document."""
        return {
            "backend": self.backend,
            "captured": self.captured,
            "seconds": round(self.seconds, 3),
            "num_bytes": self.num_bytes,
            "given_up": list(self.given_up),
            "failure": self.failure,
            "replays": self.replays,
            "eager_rounds": dict(self.eager_rounds),
        }


@dataclass(frozen=True)
class _Captured:
    """A round that runs again, and where its numbers appear: [B, K + 2] int64."""

    replay: Replay
    numbers: Tensor


class GraphRunner:
    """Captures rounds before they are needed, and never while a request waits."""

    def __init__(
        self,
        program: RoundProgram,
        backend: GraphBackend | None = None,
        *,
        sizes: Sequence[int] = (),
        memory_limit: int | None = None,
        may_fail: bool = False,
    ) -> None:
        """Run rounds of `program`; without a backend all of them run eagerly.

        Args:
            program: the round.
            backend: how rounds are captured.
            sizes: batch sizes that are padded to, ascending.
            memory_limit: device memory in bytes that captured rounds may take; by default a half
                of what is free when the first is captured.
            may_fail: an error of the first capture (other than of memory) is logged and all rounds
                run eagerly, instead of being raised.
        """
        self.program = program
        self.backend = backend
        self.stats = GraphStats(backend.name if backend else "eager")
        self._memory_limit = memory_limit
        self._may_fail = may_fail
        self._captured: dict[RoundShape, _Captured] = {}
        self.pad_to(sizes)

    def pad_to(self, sizes: Sequence[int]) -> None:
        """Pad to these batch sizes (ascending) from now on; larger batches run eagerly."""
        self.sizes = tuple(sizes)
        self._padded = [pad(size, self.sizes) for size in range(max(self.sizes, default=0) + 1)]

    @property
    def is_active(self) -> bool:
        """Whether rounds are captured at all."""
        return self.backend is not None and self.stats.failure is None

    @property
    def captured_shapes(self) -> frozenset[RoundShape]:
        """The shapes that run as captured."""
        return frozenset(self._captured)

    def covers(self, shape: RoundShape) -> bool:
        """Whether a round of this shape runs as captured."""
        return self._find(shape) is not None

    def run(
        self,
        shape: RoundShape,
        shadow_depths: Sequence[int] = (),
        num_positions: int = 0,
        on_targets: OnTargets | None = None,
        spans: Sequence[Span] = (),
    ) -> Tensor:
        """Run a round of the batch that `program.state` holds; see `RoundProgram.__call__`.

        `num_positions` is the length of the longest row at the end of the round, at most. On a CUDA
        device the next round may overwrite the result.
        """
        if self.is_active:
            more = "logprobs" if on_targets else "shadow depths" if shadow_depths else None
            captured = None if more else self._find(shape)
            if captured is not None:
                self.program.state.flush()
                captured.replay()
                self.program.state.moved()
                self.stats.replays += 1
                numbers = captured.numbers[: shape.batch_size]
                # On a CUDA device the copy to the host is queued before anything overwrites them.
                return numbers if numbers.is_cuda else numbers.clone()
            self.stats.eager_rounds[more or "not captured"] += 1
        width = self.program.width_for(num_positions) if num_positions else None
        return self.program(
            shape,
            shadow_depths,
            width=width,
            spans=spans,
            has_padding=False,
            on_targets=on_targets,
        )

    @torch.inference_mode()
    def capture(self, shapes: Iterable[RoundShape], *, show_progress: bool = True) -> None:
        """Capture those of `shapes` that are not yet, largest first, as far as memory goes.

        What the state holds as its batch is lost. Once a round was captured any error of another
        ends capturing, as want of memory does, and what was captured stays: PyTorch may tell of
        memory that runs out inside a capture as of an invalid capture (pytorch/pytorch#159594).
        """
        missing = largest_first(set(shapes) - self._captured.keys())
        if self.backend is None or not self.is_active or not missing:
            return
        self.program.state.empty_batch()  # so that a warm-up touches the trash block alone
        numbers = torch.zeros(
            max(shape.batch_size * shape.num_columns for shape in missing),
            dtype=torch.int64,
            device=self.program.state.batch.device,
        )
        clock, free = time.perf_counter(), self.backend.free_bytes()
        if self._memory_limit is None and free is not None:
            self._memory_limit = int(_FREE_SHARE * free)
        bar = _progress(missing, show_progress, f"Capturing rounds ({self.backend.name})")
        given_up: list[RoundShape] = []
        reason: str | None = None
        for shape in bar:
            if given_up or not self._has_memory(free):
                given_up.append(shape)
                continue
            try:
                self._captured[shape] = self._capture(self.backend, shape, numbers)
            except torch.OutOfMemoryError:
                given_up.append(shape)
            except RuntimeError as error:
                if not self._captured:
                    self._fail(error)
                    break
                given_up.append(shape)
                reason = f"because a capture broke off, perhaps for want of memory: {_line(error)}"
        self.backend.release()
        self._note(missing, given_up, reason, time.perf_counter() - clock, free)

    def _capture(self, backend: GraphBackend, shape: RoundShape, numbers: Tensor) -> _Captured:
        count = shape.batch_size * shape.num_columns
        out = numbers[:count].view(shape.batch_size, shape.num_columns)
        tensors = [*self.program.static_tensors, numbers]

        def function() -> None:
            part = numbers[:count].view(shape.batch_size, shape.num_columns)
            part.copy_(self.program(shape, has_padding=True))

        return _Captured(backend.capture(function, tensors), out)

    def _find(self, shape: RoundShape) -> _Captured | None:
        """Return the captured round of the padded shape; one with more work for token choice gives
        the same tokens."""
        batch_size, k, d, mode = shape
        size = self._padded[batch_size] if batch_size < len(self._padded) else None
        if size is None:
            return None
        for enough in _MODES[mode.value :]:
            captured = self._captured.get(RoundShape(size, k, d, enough))
            if captured is not None:
                return captured
        return None

    def _has_memory(self, free_at_start: int | None) -> bool:
        if free_at_start is None or self._memory_limit is None or self.backend is None:
            return True
        taken = self.stats.num_bytes + free_at_start - (self.backend.free_bytes() or 0)
        return taken < self._memory_limit

    def _fail(self, error: RuntimeError) -> None:
        self._captured.clear()
        if not self._may_fail:
            raise error
        self.stats.failure = _line(error)
        logger.warning(
            "rounds cannot be captured here and run eagerly, which is slower: %s; "
            "enforce_eager=True leaves the attempt out",
            self.stats.failure,
        )

    def _note(
        self,
        missing: Sequence[RoundShape],
        given_up: Sequence[RoundShape],
        reason: str | None,
        seconds: float,
        free: int | None,
    ) -> None:
        stats = self.stats
        stats.captured = len(self._captured)
        stats.seconds += seconds
        if free is not None and self.backend is not None:
            stats.num_bytes += max(0, free - (self.backend.free_bytes() or 0))
        if stats.failure is not None:
            return
        logger.info(
            "captured %d rounds (%s) in %.1f s, %.0f MiB",
            len(missing) - len(given_up),
            stats.backend,
            seconds,
            stats.num_bytes / 2**20,
        )
        if given_up:
            stats.given_up += map(str, given_up)
            logger.warning(
                "%d of %d rounds were not captured and run eagerly, %s: %s",
                len(given_up),
                len(missing),
                reason or f"for want of memory (graph_memory_bytes is {self._memory_limit})",
                "; ".join(map(str, given_up)),
            )


def _line(error: RuntimeError) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _progress(shapes: Sequence[RoundShape], wanted: bool, text: str) -> Iterable[RoundShape]:
    """Return the shapes with a progress bar, without one where there is nothing to draw it on."""
    bar: Callable[..., Iterable[RoundShape]] = tqdm
    try:
        return bar(shapes, desc=text, leave=False, disable=not wanted or sys.stderr is None)
    except (OSError, ValueError):  # a closed or full stderr
        return shapes
