"""Log probabilities of the target's tokens, where a request asks for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looped_spec.runtime.readback import Readback
from looped_spec.runtime.request import Request
from looped_spec.runtime.token_logprobs import TokenLogprobs

OnTargets = Callable[[Tensor, Tensor], None]
"""Called with the target's logits [B, T, V] and the tokens chosen by them [B, T] int64."""


@dataclass(frozen=True)
class _Copies:
    whole: Readback
    real: Readback


class LogprobReader:
    """Computes log probabilities on the device in one pass of the model, and reads them later.

    They are those of the target's logits as they are, before temperature and filters, so neither
    parameters nor drafts change them.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        """Read for those of `requests`, the rows of the pass, that ask for them."""
        self._wanted = [request.params.logprobs for request in requests]
        self._most = max(count or 0 for count in self._wanted)
        self._copies: _Copies | None = None

    @staticmethod
    def of(requests: Sequence[Request]) -> LogprobReader | None:
        """Return a reader, None where nobody asks."""
        if all([request.params.logprobs is None for request in requests]):
            return None
        return LogprobReader(requests)

    def __call__(self, logits: Tensor, targets: Tensor) -> None:
        """Compute, and begin to copy to the host; see `OnTargets`."""
        scores = logits.float().log_softmax(dim=-1)
        own = scores.gather(-1, targets.clamp(min=0)[..., None])
        rank = (scores > own).sum(dim=-1, keepdim=True) + 1
        top = scores.topk(min(self._most, scores.shape[-1]), dim=-1)
        whole = Readback(torch.cat((targets[..., None], rank, top.indices), dim=-1))
        self._copies = _Copies(whole, Readback(torch.cat((own, top.values), dim=-1)))

    def rows(self) -> list[list[TokenLogprobs] | None]:
        """Return for each request what its T tokens have, None for one that does not ask."""
        assert self._copies is not None, "no pass was run"
        whole, real = self._copies.whole.wait(), self._copies.real.wait()
        return [
            None if count is None else _tokens(whole[row].tolist(), real[row].tolist(), count)
            for row, count in enumerate(self._wanted)
        ]


def _tokens(whole: list[list[int]], real: list[list[float]], count: int) -> list[TokenLogprobs]:
    """Return what T tokens of a request have, with the `count` likeliest of what was read."""
    return [
        TokenLogprobs(
            ids[0],
            scores[0],
            ids[1],
            array("q", ids[2 : 2 + count]),
            array("f", scores[1:][:count]),
        )
        for ids, scores in zip(whole, real, strict=True)
    ]
