"""The engine's thread: takes requests between rounds, steps, hands out what came of them.

All that touches the engine happens here. The front sends commands, which run before the next step,
so nothing waits for more than one round; new requests need not even wait for that, where a round
can stand still. Results go back to the front's event loop in one call a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from looped_spec.errors import CapacityError, ConfigError, LoopedSpecError
from looped_spec.runtime.request import Request, Status
from looped_spec.serve.detokenizer import GuardedDetokenizer
from looped_spec.serve.errors import ApiError, internal_error
from looped_spec.serve.isolation import step_alone
from looped_spec.serve.job import Ending, Job, Update
from looped_spec.serve.snapshot import EngineSnapshot, take_snapshot
from looped_spec.tokenization import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

logger = logging.getLogger(__name__)

STALL_SECONDS = 1.0
"""Without progress for so long, the request at the head of the queue is given up."""

Result = TypeVar("Result")


class EngineWorker:
    """Owns the engine once it is loaded."""

    def __init__(
        self,
        load: Callable[[], LLM],
        loop: asyncio.AbstractEventLoop,
        on_loaded: Callable[[LLM], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Load with `load` in the thread; then `on_loaded`, or `on_failure` and the thread ends.

        Both are called in `loop`, as is everything that goes back to the front.
        """
        self._load = load
        self._loop = loop
        self._on_loaded = on_loaded
        self._on_failure = on_failure
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._newcomers: list[Callable[[], None]] = []  # run first, or in the middle of a round
        self._is_closing = False
        self._jobs: dict[int, Job] = {}
        self._unscheduled: list[Job] = []
        self._outbox: list[tuple[Job, Update]] = []
        self._failed_steps = 0
        self._failed_answers = 0
        self._last_progress = 0.0
        self._last_scheduling = 0.0
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> asyncio.Future[None]:
        """Queue jobs, all or none; the future tells when, or raises why not."""
        return self._ask(lambda: self._queue(jobs), self._newcomers)

    def abort(self, jobs: Iterable[Job]) -> None:
        """End jobs that are still open, before the next step."""
        left = [job for job in jobs if not job.has_ended]
        if left:
            self._send(lambda: self._abort(left), self._inbox)

    def fail_all(self, error: ApiError) -> None:
        """End every open job with an error, before the next step."""
        self._send(lambda: self._fail(list(self._jobs.values()), error), self._inbox)

    def ask(self, question: Callable[[], Result]) -> asyncio.Future[Result]:
        """Call `question` between two steps; the future has its answer or exception."""
        return self._ask(question, self._inbox)

    def _ask(
        self, question: Callable[[], Result], inbox: list[Callable[[], None]]
    ) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = self._loop.create_future()

        def answer() -> None:
            try:
                result = question()
            except Exception as error:
                self._post(_fail_future, future, error)
            else:
                self._post(_resolve_future, future, result)

        self._send(answer, inbox)
        return future

    def snapshot(self) -> asyncio.Future[EngineSnapshot]:
        """Return a copy of the engine's counts."""
        return self.ask(lambda: take_snapshot(self._llm, self._failed_answers))

    def close(self) -> None:
        """Let the thread end once no job is left."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; tell whether it ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _send(self, command: Callable[[], None], inbox: list[Callable[[], None]]) -> None:
        with self._wake:
            inbox.append(command)
            self._wake.notify()

    def _post(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _main(self) -> None:
        try:
            self._llm = self._load()
            self._engine = self._llm.engine
            self._tokenizer = tokenizer_of(self._llm)
        except BaseException as error:
            self._post(self._on_failure, error)
            return
        self._post(self._on_loaded, self._llm)
        while True:
            with self._wake:
                while not (
                    self._newcomers or self._inbox or self._engine.has_work or self._is_closing
                ):
                    self._wake.wait()
                commands = [*self._newcomers, *self._inbox]
                self._newcomers.clear()
                self._inbox.clear()
                is_closing = self._is_closing
            if is_closing and not commands and not self._engine.has_work:
                return
            try:
                for command in commands:
                    command()
                if self._engine.has_work:
                    self._step()
            except Exception:  # a mistake of this module's own: the server must outlive it
                logger.exception("the engine's thread failed: all open requests end")
                self._abandon()
            self._flush()

    # Commands. What they raise goes to whoever asked.

    def _queue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._tokenizer is not None:
                job.detokenizer = GuardedDetokenizer(
                    IncrementalDetokenizer(self._tokenizer, job.params.skip_special_tokens)
                )
            job.request = self._engine.make_request(
                job.prompt_token_ids, job.params, detokenizer=job.detokenizer
            )
        for job in jobs:
            assert job.request is not None
            self._jobs[job.request.request_id] = job
            self._engine.scheduler.add(job.request)
        self._unscheduled += jobs
        self._last_progress = time.monotonic()

    def _abort(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.request is not None and not job.has_ended:
                self._drop(job)
                self._end(job, "abort")

    def _fail(self, jobs: Iterable[Job], error: ApiError) -> None:
        for job in jobs:
            if not job.has_ended:
                self._drop(job)
                self._end(job, "error", error)

    # Steps.

    def _step(self) -> None:
        self._last_scheduling = time.monotonic()
        before = self._position()
        try:
            touched = self._engine.step(self._report_first, self._take_newcomers)
        except Exception as error:
            self._note_failure(error)
            self._isolate(error)
            touched = [job.request for job in self._jobs.values() if job.request is not None]
        else:
            self._failed_steps = 0
        now = time.monotonic()
        self._note_scheduled()
        for request in touched:
            self._report(request, now)
        if touched or self._position() != before:
            self._last_progress = now
        elif now - self._last_progress > STALL_SECONDS:
            self._give_up_one(now)
        else:
            time.sleep(0.001)  # nothing could run: blocks are held by nobody that we know

    def _take_newcomers(self) -> bool:
        """Queue who came during this step; tell whether anybody did and waits now: a round stands
        still only once, and not for those that are refused."""
        if not self._newcomers:  # asked between any two passes, so without the lock
            return False
        with self._wake:
            commands = self._newcomers[:]
            self._newcomers.clear()
        for command in commands:
            command()
        self._last_scheduling = time.monotonic()
        return bool(self._engine.scheduler.waiting)

    def _report_first(self, requests: list[Request]) -> None:
        """Send first tokens on their way while the others' round runs."""
        self._note_scheduled()
        for request in requests:
            self._report(request, time.monotonic())
        self._flush()

    def _position(self) -> int:
        """Return a number that changes with every step that computes a part of a prompt."""
        return sum(request.num_computed for request in self._engine.scheduler.running)

    def _isolate(self, error: Exception) -> None:
        """After a step that failed, give each request a step of its own and end those that fail in
        it; the others lose nothing."""
        scheduler = self._engine.scheduler
        suspects = list(scheduler.running) or list(scheduler.waiting)[:1]
        for request in suspects:
            if request.finish_reason is not None:
                continue
            failure = step_alone(self._engine, request)
            if failure is None:
                continue
            logger.error("request %d fails: %s", request.request_id, _one_line(failure))
            self._fail([self._jobs[request.request_id]], _what_to_tell(failure))

    def _note_failure(self, error: Exception) -> None:
        self._failed_steps += 1
        is_first = self._failed_steps == 1  # a trace for each of a thousand steps helps nobody
        logger.error("a step failed: %s", _one_line(error), exc_info=error if is_first else None)

    def _note_scheduled(self) -> None:
        if not self._unscheduled:
            return
        still: list[Job] = []
        for job in self._unscheduled:
            assert job.request is not None
            if job.request.status is Status.WAITING:
                still.append(job)
            elif job.scheduled is None:
                job.scheduled = self._last_scheduling
        self._unscheduled = still

    def _report(self, request: Request, now: float) -> None:
        job = self._jobs.get(request.request_id)
        if job is None:
            return
        if request.finish_reason is not None:
            self._end(job, request.finish_reason)
            return
        text, tokens = request.take_new()
        if job.detokenizer is not None and job.detokenizer.error is not None:
            self._fail([job], internal_error())
        elif tokens:
            logprobs = job.take_logprobs(len(tokens))
            self._outbox.append((job, Update(text, tokens, now, logprobs=logprobs)))

    def _give_up_one(self, now: float) -> None:
        """End the request that should run next and cannot, so that the others are not held up."""
        scheduler = self._engine.scheduler
        request = (list(scheduler.running) or list(scheduler.waiting))[0]
        logger.error("request %d finds no memory: given up", request.request_id)
        error = ApiError(503, "there is no memory for this request now", code="no_memory")
        self._fail([self._jobs[request.request_id]], error)
        self._last_progress = now

    def _drop(self, job: Job) -> None:
        """Take a job's request out of the engine and free what it holds."""
        request = job.request
        if request is None or request.status is Status.FINISHED:
            return
        try:
            self._engine.abort(request)
        except Exception:
            logger.exception("request %d could not be taken out plainly", request.request_id)
            self._engine.drop([request])

    def _end(self, job: Job, ending: Ending, error: ApiError | None = None) -> None:
        request = job.request
        assert request is not None and not job.has_ended
        job.has_ended = True
        job.metrics = request.metrics
        del self._jobs[request.request_id]
        if job in self._unscheduled:
            self._unscheduled.remove(job)
        text, tokens = request.take_new()
        failure = job.detokenizer.error if job.detokenizer is not None else None
        if failure is not None:
            logger.error("request %d has no text", request.request_id, exc_info=failure)
            ending, error = "error", error or internal_error()
        if ending in ("stop", "length"):
            self._failed_answers = 0
        self._failed_answers += error is not None and error.status == 500
        logprobs = job.take_logprobs(len(tokens))
        now = time.monotonic()
        update = Update(text, tokens, now, ending, request.stop_reason, error, logprobs)
        self._outbox.append((job, update))

    def _abandon(self) -> None:
        """End every job, whatever state it is in."""
        scheduler = self._engine.scheduler
        with contextlib.suppress(Exception):
            self._engine.drop([*scheduler.running, *scheduler.waiting])
        jobs, self._jobs, self._unscheduled = list(self._jobs.values()), {}, []
        for job in jobs:
            job.has_ended = True
            now = time.monotonic()
            self._outbox.append((job, Update("", [], now, "error", error=internal_error())))

    def _flush(self) -> None:
        if self._outbox:
            updates, self._outbox = self._outbox, []
            self._post(_deliver, updates)


def tokenizer_of(llm: LLM) -> Tokenizer | None:
    """Return a model's tokenizer, None if its folder has none."""
    try:
        return llm.get_tokenizer()
    except ConfigError:
        return None


def _deliver(updates: list[tuple[Job, Update]]) -> None:
    for job, update in updates:
        job.deliver(update)


def _resolve_future(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail_future(future: asyncio.Future[Result], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _what_to_tell(error: Exception) -> ApiError:
    """Return what a client may know: our own words about its request, nothing of other errors."""
    if isinstance(error, CapacityError):
        return ApiError(503, str(error), code="no_memory")
    if isinstance(error, LoopedSpecError):
        return ApiError(500, str(error))
    return internal_error()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
