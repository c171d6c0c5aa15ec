"""The answers to one HTTP request, as they come."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable

from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.sampling_params import SamplingParams
from looped_spec.serve.errors import ApiError, internal_error
from looped_spec.serve.job import Job, Update


class Generation:
    """One or several answers being generated; `close` it whatever happens.

    Attributes:
        jobs: one per answer, those to the first prompt first.
        num_prompt_tokens: of all prompts, each counted once.
    """

    def __init__(self, num_prompt_tokens: int, abort: Callable[[Iterable[Job]], None]) -> None:
        self.jobs: list[Job] = []
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = 0
        self._abort = abort
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()

    def deliver(self, index: int, update: Update) -> None:
        """Take an update of answer `index`."""
        self._updates.put_nowait((index, update))

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yield updates with the index of their answer until all have ended.

        Raises `ApiError` if one cannot be completed; the others are then of no use.
        """
        open_answers = len(self.jobs)
        while open_answers:
            index, update = await self._updates.get()
            if update.ending == "error":
                raise update.error or internal_error()
            if update.ending == "abort":
                raise ApiError(500, "the answer was aborted")
            self.num_completion_tokens += len(update.token_ids)
            open_answers -= update.ending is not None
            yield index, update

    def metrics(self) -> SpeculationMetrics:
        """Return the counts of all answers that have ended."""
        total = SpeculationMetrics()
        for job in self.jobs:
            if job.metrics is not None:
                total.add(job.metrics)
        return total

    def close(self) -> None:
        """End what is still open."""
        self._abort(self.jobs)


def params_of_answer(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of answer `index` to a prompt.

    The first has the seed that was given, so that it is the same with any n; the others' are
    derived from it. At temperature 0 all are the same answer. Without a seed the engine gives each
    one of its own.
    """
    if params.seed is None or params.temperature == 0 or index == 0:
        return params
    # An odd multiplier and a signed 64-bit number, as where the engine derives seeds.
    mixed = (params.seed + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    return dataclasses.replace(params, seed=mixed)
