"""The inputs of a batch on the device, written only where they changed since the round before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from looped_spec.runtime.request import Request
from looped_spec.runtime.row_state import BatchTensors, RowState
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors


def upload_batch(
    requests: Sequence[Request], limits: Sequence[int], vocab_size: int, device: torch.device
) -> BatchTensors:
    """Bring rows, limits and sampling parameters of a batch to the device, in two copies."""
    params = [request.params for request in requests]
    numbers = upload(
        [
            [request.row for request in requests],
            limits,
            [request.seed for request in requests],
            [min(max(p.top_k, 0), vocab_size) for p in params],
        ],
        device,
    )
    floats = _to_device(
        [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]],
        torch.float32,
        device,
    )
    sampling = SamplingTensors(numbers[2], floats[0], numbers[3], floats[1], floats[2])
    return BatchTensors(numbers[0], numbers[1], sampling, SamplingMode.of(params))


def upload(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of integers as int64 on the device."""
    return _to_device(values, torch.int64, device)


def _to_device(
    values: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy numbers to the device; to a CUDA device from pinned memory, without waiting.

    PyTorch keeps the pinned memory from being used again before the copy is done.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype).to(device)
    pinned = torch.tensor(values, dtype=dtype, pin_memory=True)
    return pinned.to(device, non_blocking=True)


class DecodeBatch:
    """What the host knows of the batch in a `RowState`, so that it writes only what changed.

    What is known is used only where it equals what the requests say now, so nobody has to tell of
    joins, ends, preemptions or failures. A request is itself, whatever number it has.
    """

    def __init__(self, state: RowState, vocab_size: int, device: torch.device) -> None:
        self._state = state
        self._vocab_size = vocab_size
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
            limits = [request.max_cached_tokens for request in requests]
            batch = upload_batch(requests, limits, self._vocab_size, self._device)
            self._state.set_batch(batch, keep_starts=follows)
            self._members, self._rows, self._mode = list(requests), rows, batch.mode
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
