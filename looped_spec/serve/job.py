"""One answer being generated, as the front and the engine's thread share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.runtime.request import Request
from looped_spec.runtime.token_logprobs import TokenLogprobs
from looped_spec.sampling_params import SamplingParams
from looped_spec.serve.detokenizer import GuardedDetokenizer
from looped_spec.serve.errors import ApiError

Ending = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Update:
    """What one step brought for one answer.

    Attributes:
        text: new text that is sure; may be empty while a character or a stop string is open.
        token_ids: the tokens that were committed, each reported once.
        seconds: when, on the monotonic clock.
        ending: how it ended; None if it goes on. Every job has exactly one update with an ending,
            and that is its last.
        stop_reason: the stop string or stop token that ended it.
        error: what to tell the client, for the ending "error".
        logprobs: what belongs to `token_ids`, None if it was not asked for.
    """

    text: str
    token_ids: list[int]
    seconds: float
    ending: Ending | None = None
    stop_reason: int | str | None = None
    error: ApiError | None = None
    logprobs: list[TokenLogprobs] | None = None


class Job:
    """An answer to be generated.

    The front makes it and reads it after its last update; in between it belongs to the engine's
    thread, which calls `deliver` in the front's event loop.

    Attributes:
        arrival: when it was asked for, on the monotonic clock.
        scheduled: when the engine first took it up, None before that.
        metrics: counts of its rounds, once it ended.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival: float,
        deliver: Callable[[Update], None],
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.arrival = arrival
        self.deliver = deliver
        self.scheduled: float | None = None
        self.metrics: SpeculationMetrics | None = None
        self.request: Request | None = None
        self.detokenizer: GuardedDetokenizer | None = None
        self.has_ended = False
        self._num_told = 0

    def take_logprobs(self, count: int) -> list[TokenLogprobs] | None:
        """Return what belongs to the next `count` tokens that are handed out."""
        start, self._num_told = self._num_told, self._num_told + count
        logprobs = self.request.logprobs if self.request is not None else None
        return None if logprobs is None else logprobs[start : start + count]
