"""Request fields that other servers know and this one refuses, with the reason.

Clients send many of them with the value that means nothing ("penalty 0"); that is let through.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from looped_spec.errors import closest
from looped_spec.serve.errors import ApiError

_LOGPROBS = "log probabilities are those of generated tokens; a known prompt is not computed again"
_PENALTY = "tokens are chosen from the target's own distribution, without penalties"
_TOOLS = "the answer is plain text, calls of tools are not parsed"
_GUIDED = "the answer is not constrained to a grammar"
_STORED = "nothing is stored"
_CACHED = "prompts that begin alike are found by their tokens"
_MARKED = "nobody is told apart by it; user may be sent, and changes nothing"
_EMBEDS = "prompts are texts or token ids"

_Refused = tuple[tuple[Any, ...], str]

_BOTH: dict[str, _Refused] = {
    "add_special_tokens": ((), "a prompt gets them, a conversation has those of its template"),
    "allowed_token_ids": (([],), "choices are narrowed by top_k, top_p and min_p only"),
    "bad_words": (([],), "no words can be forbidden"),
    "best_of": ((1,), "every answer is returned, none is ranked"),
    "cache_salt": ((), _CACHED),
    "detokenize": ((True,), "texts are always given; return_token_ids adds their tokens"),
    "echo": ((False,), "the prompt is not repeated in the answer"),
    "frequency_penalty": ((0,), _PENALTY),
    "guided_choice": ((), _GUIDED),
    "guided_grammar": ((), _GUIDED),
    "guided_json": ((), _GUIDED),
    "guided_regex": ((), _GUIDED),
    "kv_transfer_params": ((), "the cache stays with its engine"),
    "length_penalty": ((1,), "there is no beam search"),
    "logit_bias": (({},), "logits are not changed"),
    "logits_processors": (([],), "logits are not changed"),
    "metadata": (({},), _STORED),
    "min_tokens": ((0,), "an answer may end at any token; ignore_eos goes on to max_tokens"),
    "presence_penalty": ((0,), _PENALTY),
    "priority": ((0,), "requests are served in the order of their arrival"),
    "prompt_cache_key": ((), _CACHED),
    "prompt_cache_retention": ((), _CACHED),
    "prompt_logprobs": ((0, False), _LOGPROBS),
    "repetition_penalty": ((1,), _PENALTY),
    "request_id": ((), "send it as the header X-Request-Id"),
    "response_format": (({"type": "text"},), _GUIDED),
    "return_tokens_as_token_ids": ((False,), "return_token_ids gives numbers beside the texts"),
    "safety_identifier": ((), _MARKED),
    "spaces_between_special_tokens": ((True,), "special tokens stand as the tokenizer writes them"),
    "store": ((False,), _STORED),
    "structured_outputs": (({},), _GUIDED),
    "truncate_prompt_tokens": ((), "a prompt that is too long is refused"),
    "use_beam_search": ((False,), "there is no beam search"),
}

COMPLETION_REFUSED: Mapping[str, _Refused] = MappingProxyType(
    _BOTH
    | {
        "prompt_embeds": ((), _EMBEDS),
        "suffix": (("",), "text is generated behind a prompt, not into one"),
    }
)
"""Field of /v1/completions -> values that mean nothing (None always does), and why not others."""

CHAT_REFUSED: Mapping[str, _Refused] = MappingProxyType(
    _BOTH
    | {
        "add_generation_prompt": ((True,), "the answer is always a new message"),
        "audio": ((), "the answer is text"),
        "chat_template": ((), "a conversation is rendered by the model's own template"),
        "continue_final_message": ((False,), "the answer is always a new message"),
        "documents": (([],), "only messages are rendered"),
        "function_call": (("none",), _TOOLS),
        "functions": (([],), _TOOLS),
        "include_reasoning": ((True,), "the answer is one text, whatever the model puts in it"),
        "modalities": ((["text"],), "the answer is text"),
        "parallel_tool_calls": ((False, True), _TOOLS),
        "prediction": ((), "drafts come from the model itself"),
        "reasoning_effort": ((), "depth is set for the whole server, by full_loops"),
        "service_tier": (("auto", "default"), "there is one tier"),
        "tool_choice": (("none", "auto"), _TOOLS),
        "tools": (([],), _TOOLS),
        "verbosity": (("medium",), "ask for it in the messages"),
        "web_search_options": ((), _TOOLS),
    }
)
"""The same for /v1/chat/completions."""


def without_refused(
    body: Mapping[str, Any], known: Collection[str], refused: Mapping[str, _Refused]
) -> dict[str, Any]:
    """Return the fields that are `known`; raise `ApiError` for the first other one that would mean
    something."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name not in refused:
            shown = name if len(name) <= 64 else f"{name[:64]}..."
            raise ApiError(
                400,
                f"unknown field '{shown}'{closest(shown, known)}",
                param=shown,
                code="unknown_parameter",
            )
        else:
            neutral, reason = refused[name]
            if value is not None and not any(_same(value, one) for one in neutral):
                raise ApiError(
                    400,
                    f"'{name}' is not supported: {reason}",
                    param=name,
                    code="unsupported_parameter",
                )
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
