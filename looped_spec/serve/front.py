"""The front: admits requests, hands them to the engine's thread, knows whether it is ready."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from looped_spec.errors import CapacityError, ConfigError
from looped_spec.sampling_params import SamplingParams
from looped_spec.serve.errors import ApiError, draining_error, loading_error
from looped_spec.serve.generation import Generation, params_of_answer
from looped_spec.serve.history import History
from looped_spec.serve.job import Job, Update
from looped_spec.serve.latencies import ENGINE_LABEL, Latencies
from looped_spec.serve.options import ServeOptions
from looped_spec.serve.prompts import PromptEncoder
from looped_spec.serve.snapshot import EngineSnapshot
from looped_spec.serve.worker import EngineWorker

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
SNAPSHOT_SECONDS = 2.0
"""A reader of counts waits so long for the end of a step, then gets the newest known ones."""

FAILURES_UNTIL_UNHEALTHY = 5
"""So many answers that fail in a row are more likely the device's fault than their own."""


class Stage(enum.Enum):
    """Where a server is in its life."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


class Front:
    """What all endpoints share. Everything here runs in the event loop."""

    def __init__(
        self,
        load: Callable[[], LLM],
        options: ServeOptions,
        default_name: str,
        engine_label: str = ENGINE_LABEL,
    ) -> None:
        """Serve the model that `load` returns, under `default_name` unless the options have
        another; `engine_label` tells its metrics from those of others."""
        self.options = options
        self.model_names = options.served_model_name or (default_name,)
        self.stage = Stage.LOADING
        self.load_error: BaseException | None = None
        self.started = time.time()
        self.latencies = Latencies(options.metrics_prefix, self.model_names[0], engine_label)
        self.history = History()
        self.on_stage: Callable[[Stage], None] = lambda stage: None
        self._load = load
        self._is_started = False
        self._newest: EngineSnapshot | None = None
        self._num_taken = 0

    async def start(self) -> None:
        """Begin to load the model, unless that has begun."""
        if self._is_started:
            return
        self._is_started = True
        loop = asyncio.get_running_loop()
        self.worker = EngineWorker(self._load_all, loop, self._on_loaded, self._on_failure)
        self.worker.start()
        self._sampler = loop.create_task(self._sample())

    async def stop(self) -> None:
        """Wait for nothing: let the thread end when it has nothing left to do."""
        self._sampler.cancel()
        self.worker.close()
        if self.stage is not Stage.LOADING and self.load_error is None:
            self.encoder.close()

    def drain(self) -> None:
        """Admit nothing more; what runs goes on."""
        if self.stage is Stage.READY:
            self._enter(Stage.DRAINING)

    def end_all(self) -> None:
        """End what is left of the running requests."""
        if self.stage in (Stage.READY, Stage.DRAINING):
            self.worker.fail_all(draining_error())

    @property
    def num_open(self) -> int:
        """How many answers are wanted and not ended yet."""
        return self._num_taken

    @property
    def num_places(self) -> int:
        """How many answers may be open at once, running and waiting; the model is loaded."""
        return self.llm.options.max_num_seqs + self.options.max_queued_requests

    @property
    def is_healthy(self) -> bool:
        """Whether requests are admitted, and the last answers did not all fail."""
        failures = self._newest.failed_answers if self._newest else 0
        return self.stage is Stage.READY and failures < FAILURES_UNTIL_UNHEALTHY

    def check_ready(self) -> None:
        """Raise `ApiError` with status 503 unless requests are admitted."""
        if self.stage is Stage.DRAINING:
            raise draining_error()
        if self.stage is not Stage.READY:
            raise loading_error()

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` with status 404 for the name of another model; none means ours."""
        if name is not None and name not in self.model_names:
            shown = name if len(name) <= 128 else f"{name[:128]}..."
            raise ApiError(
                404,
                f"there is no model '{shown}' here, only '{self.model_names[0]}'",
                param="model",
                code="model_not_found",
            )

    def reserve(self, count: int) -> Reservation:
        """Take the places of `count` answers; raise `ApiError` with status 429 if there are not so
        many."""
        places = self.num_places
        if count > places:
            raise ApiError(
                400,
                f"{count} answers are asked for at once, more than the {places} of the queue",
                param="n",
            )
        if self._num_taken + count > places:
            raise ApiError(
                429,
                f"the queue is full: {self._num_taken} answers are open, of at most {places}",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        return Reservation(self, count)

    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        n: int,
        reservation: Reservation,
        arrival: float,
    ) -> Generation:
        """Queue `n` answers to each prompt on places that were reserved.

        Raises `ApiError` with status 400 if one could never run; none is then.
        """
        generation = Generation(sum(map(len, prompts)), self._abort)
        for prompt in prompts:
            for index in range(n):
                deliver = partial(self._deliver, generation, len(generation.jobs))
                own = params_of_answer(params, index)
                generation.jobs.append(Job(prompt, own, arrival, deliver))
        queued = self.worker.submit(generation.jobs)
        try:
            await asyncio.shield(queued)
        except (CapacityError, ConfigError) as error:
            code = "context_length_exceeded" if isinstance(error, CapacityError) else None
            raise ApiError(400, str(error), code=code) from error
        except asyncio.CancelledError:
            count = reservation.hand_over()
            queued.add_done_callback(partial(self._after_all, generation.jobs, count))
            raise
        reservation.hand_over()
        return generation

    async def snapshot(self) -> EngineSnapshot | None:
        """Return the engine's counts, a moment old if a step takes long; None before it is
        loaded."""
        if self.stage in (Stage.READY, Stage.DRAINING):
            try:
                async with asyncio.timeout(SNAPSHOT_SECONDS):
                    self._newest = await self.worker.snapshot()
            except TimeoutError:
                pass
        return self._newest

    def _load_all(self) -> LLM:
        """Load the model and a second tokenizer; called in the engine's thread."""
        llm = self._load()
        self.encoder = PromptEncoder(llm, self.options.max_prompt_tokens)
        return llm

    def _on_loaded(self, llm: LLM) -> None:
        self.llm = llm
        self._enter(Stage.READY)

    def _on_failure(self, error: BaseException) -> None:
        self.load_error = error
        self._enter(Stage.FAILED)

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self.on_stage(stage)

    def _abort(self, jobs: Iterable[Job]) -> None:
        self.worker.abort(jobs)

    def _deliver(self, generation: Generation, index: int, update: Update) -> None:
        self.latencies.observe(generation.jobs[index], update)
        if update.ending is not None:
            self._num_taken -= 1
        generation.deliver(index, update)

    def _after_all(self, jobs: Sequence[Job], count: int, queued: asyncio.Future[None]) -> None:
        """Clear away what was queued for a client that went away meanwhile."""
        if queued.cancelled() or queued.exception() is not None:
            self._num_taken -= count
        else:
            self._abort(jobs)

    async def _sample(self) -> None:
        """Keep what the live page shows over time."""
        while True:
            await asyncio.sleep(self.history.interval_seconds)
            try:
                snapshot = await self.snapshot()
            except Exception:
                logger.exception("the engine's counts cannot be read")
                continue
            if snapshot is not None:
                self.history.add(snapshot, self.latencies.num_generation_tokens)


class Reservation:
    """Places in the queue, given back unless they were handed over to jobs, which give back each
    its own at its end."""

    def __init__(self, front: Front, count: int) -> None:
        self._front = front
        self._count = count
        front._num_taken += count

    def hand_over(self) -> int:
        """Leave the places to the jobs that have them now; return how many."""
        count, self._count = self._count, 0
        return count

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._front._num_taken -= self.hand_over()
