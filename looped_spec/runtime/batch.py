"""The inputs of a batch on the device, kept from round to round while the batch stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looped_spec.runtime.request import Request
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors


@dataclass(frozen=True)
class BatchTensors:
    """What depends on which requests run, and in which rows, but not on how far they are.

    Attributes:
        rows: [B] int64, rows of the block tables.
        limits: [B] int64, positions from here on write to the trash block.
        sampling: the requests' parameters and seeds.
        mode: how much work the choice of their tokens is at most.
    """

    rows: Tensor
    limits: Tensor
    sampling: SamplingTensors
    mode: SamplingMode


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
    floats = torch.tensor(
        [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]],
        dtype=torch.float32,
    ).to(device)
    sampling = SamplingTensors(numbers[2], floats[0], numbers[3], floats[1], floats[2])
    return BatchTensors(numbers[0], numbers[1], sampling, SamplingMode.of(params))


def upload(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of integers as int64 on the device."""
    return torch.tensor(values, dtype=torch.int64).to(device)


class DecodeBatch:
    """The batch of the last round, so that the next one need not upload it again.

    What is kept is used only where it equals what the requests say now, so nobody has to tell of
    joins, ends, preemptions or failures.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._members: tuple[list[int], list[int]] | None = None
        self._tensors: BatchTensors | None = None
        self._starts: tuple[list[int], list[int]] | None = None
        self._start_tensors: tuple[Tensor, Tensor] | None = None

    def tensors(self, requests: Sequence[Request]) -> BatchTensors:
        """Return the tensors of these requests."""
        members = [r.request_id for r in requests], [r.row for r in requests]
        if self._tensors is None or members != self._members:
            limits = [request.max_cached_tokens for request in requests]
            self._tensors = upload_batch(requests, limits, self._vocab_size, self._device)
            self._members, self._starts = members, None
        return self._tensors

    def starts(self, tokens: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """Return each request's newest token and its position, [B] int64 each."""
        if self._start_tensors is None or self._starts != (tokens, positions):
            both = upload([tokens, positions], self._device)
            self._start_tensors, self._starts = (both[0], both[1]), (tokens, positions)
        return self._start_tensors

    def expect(
        self, tokens: list[int], positions: list[int], next_token: Tensor, next_position: Tensor
    ) -> None:
        """Keep where the next round starts: the numbers, and the tensors that hold them already."""
        self._starts, self._start_tensors = (tokens, positions), (next_token, next_position)
