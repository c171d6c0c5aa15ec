"""The inputs of a batch on the device, written only where they changed since the round before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from looped_spec.runtime.attention import Span
from looped_spec.runtime.request import Request
from looped_spec.runtime.row_state import RowState
from looped_spec.runtime.sampler import SamplingMode


def upload(values: Sequence[list[int]], device: torch.device) -> Tensor:
    """Return rows of integers, all of a length, as int64 on the device."""
    return _upload(values, "q", torch.int64, device)


def upload_floats(values: Sequence[list[float]], device: torch.device) -> Tensor:
    """Return rows of numbers, all of a length, as fp32 on the device."""
    return _upload(values, "f", torch.float32, device)


def _upload(
    values: Sequence[list[Any]], code: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy numbers to the device; to a CUDA device from pinned memory, without waiting.

    PyTorch keeps the pinned memory from being used again before the copy is done. An array first:
    torch needs five times as long to read lists.
    """
    flat = array(code)
    for row in values:
        flat.fromlist(row)
    if not flat:
        return torch.empty(len(values), 0, dtype=dtype, device=device)
    tensor = torch.frombuffer(flat, dtype=dtype).view(len(values), -1)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class DecodeBatch:
    """What the host knows of the batch in a `RowState`, so that it writes only what changed.

    What is known is used only where it equals what the requests say now, so nobody has to tell of
    joins, ends, preemptions or failures. A request is itself, whatever number it has.
    """

    def __init__(self, state: RowState, device: torch.device) -> None:
        self._state = state
        self._device = device
        self._members: list[Request] = []
        self._rows: list[int] = []
        self._starts: tuple[list[int], list[int]] | None = None
        self._mode = SamplingMode.GREEDY

    def load(self, requests: Sequence[Request], *, follows: bool = False) -> SamplingMode:
        """Make these requests the batch of the state; return what token choice needs at most.

        With `follows` a round of them that the host has not read yet has written where they start;
        otherwise they start from what they say.
        """
        rows = [request.row for request in requests]
        if requests != self._members or rows != self._rows:
            is_range = rows == list(range(rows[0], rows[0] + len(rows)))
            first = rows[0] if is_range else None
            self._state.set_batch(upload([rows], self._device)[0], first, keep_starts=follows)
            self._mode = SamplingMode.of([request.params for request in requests])
            self._members, self._rows = list(requests), rows
            self._starts = None
        if follows:
            self._state.follow()
        else:
            starts = [r.last_token for r in requests], [r.num_tokens - 1 for r in requests]
            if starts != self._starts:
                both = upload(starts, self._device)
                self._state.set_starts((both[0], both[1]))
        self._starts = None  # the round moves them
        return self._mode

    def expect(self, tokens: list[int], positions: list[int]) -> None:
        """Note where the newest round left the batch."""
        self._starts = tokens, positions

    def forget(self) -> None:
        """Write the batch anew next time."""
        self._members, self._rows, self._starts = [], [], None


def span_of(request: Request) -> Span:
    """Return where the newest token of a request stands."""
    block = request.blocks[0] if request.is_one_piece else None
    return Span(request.num_tokens - 1, request.capacity, block)
