"""From the prompts of a request to token ids, in a thread of its own.

The tokenizer here is a second copy: those of the tokenizers library are not made to be used from
two threads at once, and the engine's thread decodes with the first.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from looped_spec.serve.errors import ApiError
from looped_spec.serve.protocol import ChatBody
from looped_spec.tokenization import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

Result = TypeVar("Result")

_SLACK = 4
"""How much longer than all of its longest tokens a prompt may be before it is tokenized at all:
some tokenizers shorten a text first."""


class PromptEncoder:
    """Turns prompts into token ids and refuses those that cannot be run."""

    def __init__(self, llm: LLM, max_prompt_tokens: int | None) -> None:
        """Load the second tokenizer; takes a while."""
        self._tokenizer = load_tokenizer(llm.loaded.folder)
        self._reserved = _template_arguments(self._tokenizer)
        self._vocab_size = llm.loaded.adapter.geometry.vocab_size
        most = llm.max_model_len - 1
        self._is_own_limit = max_prompt_tokens is not None and max_prompt_tokens < most
        self.max_prompt_tokens = min(max_prompt_tokens or most, most)
        self._max_characters = self.max_prompt_tokens * _SLACK * _longest_token(self._tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be given and are returned."""
        return self._tokenizer is not None

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the token ids of prompts; raise `ApiError` that says which is wrong and why."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_text(prompt, "prompt")

        def work() -> list[list[int]]:
            assert self._tokenizer is not None
            encode = self._tokenizer.encode
            return [encode(one) if isinstance(one, str) else one for one in prompts]

        if any(isinstance(prompt, str) for prompt in prompts):
            encoded = await self._in_thread(work)
        else:
            encoded = [one for one in prompts if not isinstance(one, str)]
        for tokens in encoded:
            self._check_tokens(tokens, "prompt")
        return encoded

    async def encode_chat(self, body: ChatBody) -> list[int]:
        """Return the token ids of a conversation, rendered by the model's template."""
        for message in body.messages:
            self._check_text(message.content, "messages")
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        options = body.chat_template_kwargs or {}
        if taken := sorted(self._reserved.intersection(options)):
            raise ApiError(
                400,
                f"chat_template_kwargs may not set '{taken[0]}'",
                param="chat_template_kwargs",
            )

        def work() -> list[int]:
            assert self._tokenizer is not None
            return self._tokenizer.apply_chat_template(messages, **options)

        tokens = await self._in_thread(work)
        self._check_tokens(tokens, "messages")
        return tokens

    async def token_texts(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each token by itself, special ones too; "" without a tokenizer."""
        wanted = set(token_ids)
        tokenizer = self._tokenizer
        if tokenizer is None:
            return dict.fromkeys(wanted, "")

        def text(token_id: int) -> str:
            try:
                return tokenizer.decode([token_id], skip_special_tokens=False)
            except Exception:  # a tokenizer may have ids that it cannot decode
                return ""

        def work() -> dict[int, str]:
            return {one: text(one) for one in wanted}

        return await self._in_thread(work)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _check_text(self, text: str, param: str) -> None:
        if self._tokenizer is None:
            raise ApiError(
                400, "this model has no tokenizer: give token ids as prompt", param=param
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400, f"{param} holds half of a surrogate pair: not valid Unicode", param=param
            ) from error
        if len(text) > self._max_characters:
            raise self._too_long(f"{len(text)} characters are more than any", param)

    def _check_tokens(self, tokens: list[int], param: str) -> None:
        if not tokens:
            raise ApiError(400, f"{param} is empty: give at least one token", param=param)
        if len(tokens) > self.max_prompt_tokens:
            raise self._too_long(f"got {len(tokens)}", param)
        self.check_ids(tokens, param)

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Raise `ApiError` for ids that are no tokens of the model."""
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                shown = token if abs(token) < 10**18 else "a larger one"
                raise ApiError(
                    400,
                    f"token ids must be between 0 and {self._vocab_size - 1}, got {shown}",
                    param=param,
                )

    def _too_long(self, what: str, param: str) -> ApiError:
        why = "max_prompt_tokens" if self._is_own_limit else "max_model_len, one of them generated"
        return ApiError(
            400,
            f"a prompt may have {self.max_prompt_tokens} tokens ({why}): {what}",
            param=param,
            code="context_length_exceeded",
        )


def _template_arguments(tokenizer: Tokenizer | None) -> frozenset[str]:
    """Return the names that mean something to the tokenizer itself, not to a model's template."""
    if tokenizer is None:
        return frozenset()
    own = inspect.signature(tokenizer.inner.apply_chat_template).parameters.values()
    named = (one.name for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD)
    return frozenset({"self", "messages", *named})


def _longest_token(tokenizer: Tokenizer | None) -> int:
    """Return the most characters that a token stands for, at least 1."""
    vocabulary = tokenizer.inner.get_vocab() if tokenizer is not None else ()
    return max(map(len, vocabulary), default=1)
