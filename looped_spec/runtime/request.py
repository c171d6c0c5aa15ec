"""One request: its tokens, where it stands, and when it ends."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import Protocol

from looped_spec.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
)
from looped_spec.runtime.token_logprobs import TokenLogprobs
from looped_spec.sampling_params import SamplingParams


class Detokenizer(Protocol):
    """Turns tokens into text as they come; text that is not yet sure (half a character) is held
    back."""

    def append(self, token_id: int) -> str:
        """Take a token and return the text that became sure."""
        ...

    def extend(self, token_ids: Sequence[int]) -> str:
        """Take tokens and return the text that became sure, cheaper than one by one."""
        ...

    def flush(self) -> str:
        """Return what was held back."""
        ...


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class Request:
    """State of one request.

    The scheduler gives and takes `blocks` and `row`, keeps `block_hashes`, `num_published` and
    `prefix_epoch` for itself, and says in `num_cached_tokens` how much of the prompt it did not
    have to compute; the runner notes how many of the blocks its table holds, and the engine commits
    tokens. Their text is made when somebody asks for it, when
    the request ends, and with every token only where a stop string may end it.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_total_tokens: int,
        eos_token_ids: Collection[int] = (),
        detokenizer: Detokenizer | None = None,
        prompt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.params = params
        self.seed = seed
        self.max_total_tokens = max_total_tokens
        self.max_cached_tokens = max_total_tokens - 1  # the last one is never fed back
        self.num_tokens = len(self.prompt_token_ids)  # prompt and output tokens known so far
        self.status = Status.WAITING
        self.num_computed = 0
        self.blocks: list[int] = []
        self.is_one_piece = False  # each of its blocks lies behind the one before it
        self.capacity = 0  # tokens that the blocks hold; nothing behind them may be committed
        self.row = -1
        self.num_table_blocks = 0
        self.saved_cache: object | None = None
        self.block_hashes: list[bytes] | None = None  # of its prompt's full blocks, made on demand
        self.num_published = 0
        self.prefix_epoch = -1
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics()
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._text = ""
        self._num_decoded = 0
        self._scanned_chars = 0
        self._emitted_chars = 0
        self._emitted_tokens = 0
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._ends = self._stop_ids.union(() if params.ignore_eos else eos_token_ids)
        self._detokenizer = detokenizer
        self._hold_chars = max((len(s) - 1 for s in params.stop_strings), default=0)

    @property
    def remaining_tokens(self) -> int:
        """How many tokens may still be generated."""
        return self.max_total_tokens - self.num_tokens

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Return tokens `start` to `stop` of prompt and output."""
        border = len(self.prompt_token_ids)
        output = self.output_token_ids[max(start - border, 0) : max(stop - border, 0)]
        return self.prompt_token_ids[start:stop] + output

    @property
    def last_token(self) -> int:
        """The newest token."""
        return (self.output_token_ids or self.prompt_token_ids)[-1]

    @property
    def text(self) -> str:
        """The text of the output so far, as far as it is sure."""
        self._decode()
        return self._text

    def append(self, tokens: Sequence[int]) -> int:
        """Commit tokens in order up to the first that ends the request; return how many were
        taken."""
        if self._detokenizer is not None and self.params.stop_strings:
            for count, token in enumerate(tokens, start=1):
                self._append_checked(token)
                if self.finish_reason is not None:
                    return count
            return len(tokens)
        room = self.max_total_tokens - self.num_tokens
        taken = tokens if len(tokens) < room else tokens[:room]
        is_end = self._ends and not self._ends.isdisjoint(taken)
        if is_end:
            count = next(i for i, token in enumerate(taken, start=1) if token in self._ends)
            taken = taken[:count]
        self.output_token_ids += taken
        self.num_tokens += len(taken)
        if is_end:
            self._end_at(taken[-1])
        elif len(taken) >= room:
            self._finish("length")
        return len(taken)

    def _append_checked(self, token: int) -> None:
        """Commit a token and look whether its text completes a stop string."""
        assert self._detokenizer is not None
        self.output_token_ids.append(token)
        self.num_tokens += 1
        if token in self._ends:
            self._end_at(token)
            return
        self._num_decoded += 1
        stop = self._add_text(self._detokenizer.append(token))
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif self.remaining_tokens <= 0:
            self._finish("length")

    def _end_at(self, token: int) -> None:
        self._finish("stop", token if token in self._stop_ids else None)

    def note_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take what belongs to the newest tokens: of those that were offered to `append`, in their
        order, as many as it took."""
        assert self.logprobs is not None
        self.logprobs += logprobs[: len(self.output_token_ids) - len(self.logprobs)]

    def abort(self) -> None:
        """End the request as it stands."""
        if self.finish_reason is None:
            self._finish("abort")

    def take_new(self) -> tuple[str, list[int]]:
        """Return text and tokens that were not handed out yet; text that may become a stop string
        waits."""
        end = len(self.text)
        if self.finish_reason is None:
            end = max(self._emitted_chars, end - self._hold_chars)
        text = self._text[self._emitted_chars : end]
        tokens = self.output_token_ids[self._emitted_tokens :]
        self._emitted_chars, self._emitted_tokens = end, len(self.output_token_ids)
        return text, tokens

    def output(self) -> RequestOutput:
        """Return the result so far."""
        completion = CompletionOutput(
            0,
            self.text,
            list(self.output_token_ids),
            self.finish_reason,
            self.stop_reason,
            None if self.logprobs is None else list(self.logprobs),
        )
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            self.finish_reason is not None,
            self.metrics,
            self.num_cached_tokens,
        )

    def _decode(self) -> None:
        """Make the text of tokens that have none yet; a token that ends the request has none."""
        stop = len(self.output_token_ids)
        if self.finish_reason == "stop" and stop and self.output_token_ids[-1] in self._ends:
            stop -= 1
        if self._detokenizer is not None and self._num_decoded < stop:
            tokens = self.output_token_ids[self._num_decoded : stop]
            self._num_decoded = stop
            self._add_text(self._detokenizer.extend(tokens))

    def _add_text(self, text: str) -> str | None:
        """Take new text; return the stop string that it completes, having cut the text there."""
        start = max(0, self._scanned_chars - self._hold_chars)
        self._text += text
        self._scanned_chars = len(self._text)
        stops = self.params.stop_strings
        found = [(at, s) for s in stops if (at := self._text.find(s, start)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        keep = at + len(stop) if self.params.include_stop_str_in_output else at
        self._text = self._text[:keep]
        return stop

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        # The reason first: a detokenizer that fails must not leave the request open.
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is not None:
            self._decode()
            stop = self._add_text(self._detokenizer.flush())
            if stop is not None and reason != "abort":
                self.finish_reason, self.stop_reason = "stop", stop
