"""What a request may say: the fields of OpenAI's API, and vLLM's beyond it, that are supported."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    SkipValidation,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from looped_spec.sampling_params import SamplingParams
from looped_spec.serve.errors import ApiError
from looped_spec.serve.fields import CHAT_REFUSED, COMPLETION_REFUSED, without_refused

MAX_STOP_CHARACTERS = 256
"""Most characters of one stop string: so many of an answer are held back until it is sure."""

MAX_TOKENS = 2**31 - 1
"""What `max_tokens` may be at most; an answer ends at `max_model_len` in any case."""

_Schema = dict[str, Any]


def _list_of(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _either(*forms: _Schema) -> WithJsonSchema:
    """Describe a field that is taken in several forms and kept in one."""
    return WithJsonSchema({"anyOf": list(forms)})


_TEXT: _Schema = {"type": "string"}
_IDS = _list_of({"type": "integer", "minimum": 0})
_TEXT_PART: _Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}

_PROMPT = "must be a text, a list of token ids, or a list of either"
_STOP = f"must be a text or a list of texts, each of 1 to {MAX_STOP_CHARACTERS} characters"


def _as_prompts(value: Any) -> list[str | list[int]]:
    """Return a list of prompts, each a text or token ids."""
    if isinstance(value, str) or (value and _are_ids(value)):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(_PROMPT)
    for one in value:
        if not isinstance(one, str) and not (one and _are_ids(one)):
            raise ValueError(_PROMPT)
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _as_stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    is_list = isinstance(stops, list)
    if not is_list or not all(
        isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops
    ):
        raise ValueError(_STOP)
    assert isinstance(stops, list)
    if any("\ud800" <= character <= "\udfff" for stop in stops for character in stop):
        raise ValueError("holds half of a surrogate pair: no answer could have it")
    return stops


def _as_text(value: Any) -> Any:
    """Join the parts of a message that came as a list; other parts than texts are refused."""
    if not isinstance(value, list):
        return value
    parts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text" or set(part) != {"type", "text"}:
            named = f", not '{kind[:64]}'" if isinstance(kind, str) and kind != "text" else ""
            raise ValueError(f"may have parts of type 'text' with a text{named}")
        if not isinstance(part["text"], str):
            raise ValueError("may have parts of type 'text' with a text")
        parts.append(part["text"])
    return "".join(parts)


def _as_count(value: Any) -> Any:
    """Take false, which some clients send, for none."""
    return None if value is False else value


class _Strict(BaseModel):
    """No unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, value: Any) -> Any:
        """Leave one unknown name of many: pydantic would list a million of them for seconds."""
        known = cls.model_fields
        if not isinstance(value, dict) or len(value) <= len(known):
            return value
        kept = {name: value[name] for name in known if name in value}
        first = next(name for name in value if name not in known)
        return {**kept, first: value[first]}


class StreamOptions(_Strict):
    """`stream_options`: counts in a last event, or in every one."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Message(_Strict):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, BeforeValidator(_as_text), _either(_TEXT, _list_of(_TEXT_PART))]
    name: Annotated[str, Field(max_length=64)] | None = None


Stops = Annotated[list[str], BeforeValidator(_as_stops), _either(_TEXT, _list_of(_TEXT))]


class GenerationBody(_Strict):
    """What both ways to generate have in common; None is a default, as a missing field."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(le=MAX_TOKENS)] | None = None
    min_p: float | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def token_limit(self) -> int | None:
        """Most new tokens that were asked for."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likely tokens to tell of beside each generated one; None: of no token."""
        return None

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """Return the parameters of the first answer; raises `ConfigError`."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "logprobs": self.num_logprobs,
        }
        kept = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=self.token_limit or default_max_tokens, **kept)


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    # Checked once, by hand: pydantic takes a second for each half a million of prompts.
    prompt: Annotated[
        SkipValidation[list[str | list[int]]],
        BeforeValidator(_as_prompts),
        _either(_TEXT, _IDS, _list_of(_TEXT), _list_of(_IDS)),
    ]
    logprobs: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_as_count)] = None

    @property
    def num_logprobs(self) -> int | None:
        """As the field says."""
        return self.logprobs


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    # Only the first error is told; those of a million messages would take many seconds to list.
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`top_logprobs` where `logprobs` is true, which the one needs."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        return self.top_logprobs or 0

    @property
    def token_limit(self) -> int | None:
        """Most new tokens that were asked for, by its newer name or the older."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise ApiError(
                400,
                "max_tokens and max_completion_tokens are two names of one limit, and differ",
                param="max_tokens",
            )
        return self.max_completion_tokens


Body = TypeVar("Body", bound=GenerationBody)

NO_LIMITS: Mapping[str, int] = MappingProxyType({})
_ITEMS = {"prompt": "prompts", "messages": "messages", "stop": "texts"}
_REFUSED = {CompletionBody: COMPLETION_REFUSED, ChatBody: CHAT_REFUSED}


def check_body(
    kind: type[Body], document: Mapping[str, Any], most_items: Mapping[str, int] = NO_LIMITS
) -> Body:
    """Return a checked body; raise `ApiError` that names the field and says what it may be.

    `most_items` says how long the lists of some fields may be. A longer one is refused without a
    look at what is in it, which for half a million items would take longer than a client that is
    being streamed to should wait.
    """
    kept = without_refused(document, kind.model_fields, _REFUSED[kind])
    for name, most in most_items.items():
        items = kept.get(name)
        if not isinstance(items, list) or len(items) <= most:
            continue
        if name == "prompt" and type(items[0]) is int:
            continue  # one prompt of many tokens
        text = f"{name} may have {most} {_ITEMS[name]}, got {len(items)}"
        raise ApiError(400, text, param=name)
    try:
        body = kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])[1:]
        text = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            text = "is not supported"
        elif first["type"] == "missing":
            text = "is required"
        raise ApiError(400, f"{place[:200]}: {text}", param=place[:200] or None) from error
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(400, "stream_options belongs to stream: true", param="stream_options")
    return body
