"""What a call wants completed, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from looped_spec.errors import ConfigError
from looped_spec.runtime.prompts import Prompt, Prompts, as_prompts
from looped_spec.sampling_params import SamplingParams
from looped_spec.tokenization import Tokenizer


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt that may run: its text if it came as one, its tokens, its parameters."""

    text: str | None
    tokens: list[int]
    params: SamplingParams


def check_prompts(
    prompts: Prompts,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    model_name: str,
) -> list[CheckedPrompt]:
    """Return every prompt with its tokens and parameters; raise `ConfigError` for the first that is
    wrong."""
    items = as_prompts(prompts)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params = [sampling_params or SamplingParams()] * len(items)
    else:
        is_list = isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str)
        if not is_list or not all(isinstance(p, SamplingParams) for p in sampling_params):
            raise ConfigError(
                "sampling_params must be a SamplingParams or a list of them, got "
                f"{type(sampling_params).__name__}"
            )
        params = list(sampling_params)
        if len(params) != len(items):
            raise ConfigError(
                f"sampling_params must be one, or one per prompt: got {len(params)} for "
                f"{len(items)} prompts"
            )
    if tokenizer is None and any(one.stop_strings for one in params):
        raise ConfigError("stop strings need a tokenizer, and this model folder has none")
    checked = []
    for number, (item, one) in enumerate(zip(items, params, strict=True)):
        if item.token_ids is None and tokenizer is None:
            raise no_tokenizer(model_name)
        tokens = _tokens(number, item, tokenizer)
        _check_tokens(number, tokens, vocab_size)
        checked.append(CheckedPrompt(item.text, tokens, one))
    return checked


def no_tokenizer(model_name: str) -> ConfigError:
    """Return the error for a text given to a model that has no tokenizer."""
    return ConfigError(f"{model_name} has no tokenizer files: give prompts as lists of token ids")


def _tokens(number: int, item: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if item.token_ids is not None or tokenizer is None:
        return item.token_ids or []
    try:
        (item.text or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt {number} is not valid Unicode text") from error
    return tokenizer.encode(item.text or "")


def _check_tokens(number: int, tokens: Sequence[int], vocab_size: int) -> None:
    if not tokens:
        raise ConfigError(f"prompt {number} is empty: give at least one token")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"prompt {number}: token id must be between 0 and {vocab_size - 1}, got {token}"
            )
