"""How tokens are chosen and when a request ends; names and defaults as vLLM users know them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from looped_spec.errors import ConfigError, check_int, reject_unknown

_ELSEWHERE = frozenset(
    {"n", "best_of", "prompt_logprobs", "logit_bias", "min_tokens", "bad_words"}
    | {"presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids"}
)
"""Parameters of other engines that are not supported here."""

MAX_LOGPROBS = 20
"""Most of the likely tokens that may be asked for with each generated one."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request.

    Attributes:
        max_tokens: at most this many new tokens, at least 1.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: sample among the k most likely tokens (ties at the border stay in); 0 or -1 means
            all.
        top_p: sample among the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: same prompt, parameters and seed give the same text, with or without speculation. None
            takes the engine's seed where temperature is 0, and otherwise derives one from it and
            the number of requests before this one.
        stop: end at the first of these strings, which is not part of the text.
        stop_token_ids: end at any of these tokens.
        ignore_eos: go on after the model's own end tokens.
        include_stop_str_in_output: leave the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: return the log probability of each generated token, and those of so many of the
            most likely ones, 0 to 20; they are the target's own, before temperature and filters.
            None returns none, which is cheapest: rounds that return them are not captured.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __new__(cls, **params: object) -> SamplingParams:
        """Refuse an unknown parameter with the closest match."""
        for name in sorted(_ELSEWHERE.intersection(params)):
            raise ConfigError(f"sampling parameter '{name}' is not supported")
        reject_unknown(params, [f.name for f in fields(cls)], "sampling parameter")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        check_int("max_tokens", self.max_tokens, 1)
        check_int("top_k", self.top_k, -1)
        _check_float("temperature", self.temperature, 0.0, math.inf, "at least 0")
        _check_float("top_p", self.top_p, 0.0, 1.0, "in (0, 1]", open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        stop = _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        if any(not isinstance(text, str) or not text for text in stop):
            raise ConfigError(f"stop must be non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", stop)
        token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        for token_id in token_ids:
            check_int("stop_token_ids", token_id, 0)
        object.__setattr__(self, "stop_token_ids", token_ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, however they were given."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def filters(self) -> bool:
        """Whether any of top_k, top_p, min_p narrows the choice."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, tuple | list | set | frozenset):
        raise ConfigError(f"{name} must be a list, got {type(value).__name__}")
    return tuple(value)


def _check_float(
    name: str, value: object, low: float, high: float, text: str, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    below = value <= low if open_low else value < low
    if isinstance(value, int) and abs(value) > 2**53:
        raise ConfigError(f"{name} must be {text}, got an integer of {value.bit_length()} bits")
    if not math.isfinite(value) or below or value > high:
        raise ConfigError(f"{name} must be {text}, got {value}")
