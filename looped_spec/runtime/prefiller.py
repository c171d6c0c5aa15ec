"""Computes prompts: before a round, and between two passes of a round that newcomers interrupt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from looped_spec.runtime.request import Request, Status
from looped_spec.runtime.runner import ModelRunner
from looped_spec.runtime.scheduler import PrefillChunk, Scheduler
from looped_spec.runtime.tally import check_finite
from looped_spec.runtime.token_logprobs import TokenLogprobs

Commit = Callable[[Request, Sequence[int], Sequence[TokenLogprobs] | None], int]
"""Appends tokens, with what belongs to them, to a request."""

OnFirstTokens = Callable[[list[Request]], None]
"""Gets the requests that have just got their first token."""

TakeNewcomers = Callable[[], bool]
"""Adds requests that came meanwhile to the scheduler; tells whether there were any."""


class Prefiller:
    """Runs chunks of prompts, and commits the token behind one that ends."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, commit: Commit) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._commit = commit

    def run(
        self, chunks: Sequence[PrefillChunk], on_first_tokens: OnFirstTokens | None
    ) -> list[Request]:
        """Run chunks of requests that were prepared; return those that got their first token,
        after `on_first_tokens` has had them."""
        touched = []
        logprobs: dict[int, TokenLogprobs] = {}
        if all([chunk.request.logprobs is None for chunk in chunks]):
            tokens = self._runner.prefill(chunks)
        else:
            tokens = self._runner.prefill(chunks, logprobs)
        check_finite([chunk.request for chunk in chunks], tokens)
        for place, (chunk, token) in enumerate(zip(chunks, tokens, strict=True)):
            self._scheduler.note_computed(chunk.request, chunk.stop)
            if token is not None:
                chunk.request.status = Status.DECODING
                own = logprobs.get(place)
                self._commit(chunk.request, [token], None if own is None else [own])
                touched.append(chunk.request)
        if touched and on_first_tokens is not None:
            on_first_tokens(touched)
        return touched

    def run_newcomers(
        self, budget: int, num_speculative_tokens: int, on_first_tokens: OnFirstTokens | None
    ) -> list[Request]:
        """Let in who waits, beside a round that is under way with so many drafts, and run what
        `budget` tokens allow of their prompts; see `run`.

        Nothing is taken from those in the round: they keep their rows and their memory.
        """
        chunks = self._scheduler.admit(budget, num_speculative_tokens)
        if not chunks:
            return []
        self._runner.prepare([chunk.request for chunk in chunks])
        return self.run(chunks, on_first_tokens)


class Interruption:
    """What newcomers may do to one round: have their prompts computed in the middle of it, once.

    So they need not wait for its end, which with drafts is several times as far off as without; and
    since it happens once, a stream of newcomers cannot hold up those who decode.

    Attributes:
        seconds: how long the round stood still.
        touched: who got a first token meanwhile.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        take_newcomers: TakeNewcomers,
        on_first_tokens: OnFirstTokens | None,
        budget: int,
        num_speculative_tokens: int,
    ) -> None:
        """Allow `budget` tokens of prompts in a round with so many drafts."""
        self.seconds = 0.0
        self.touched: list[Request] = []
        self._prefiller = prefiller
        self._take_newcomers = take_newcomers
        self._on_first_tokens = on_first_tokens
        self._budget = budget
        self._num_speculative_tokens = num_speculative_tokens

    def __call__(self) -> None:
        """Look for newcomers; to be called between two passes of the round."""
        if self._budget <= 0:
            return
        start = time.perf_counter()  # to take them is a part of it
        if not self._take_newcomers():
            return
        budget, self._budget = self._budget, 0
        self.touched = self._prefiller.run_newcomers(
            budget, self._num_speculative_tokens, self._on_first_tokens
        )
        self.seconds = time.perf_counter() - start
