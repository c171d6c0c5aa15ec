"""The options of the server beside those of the engine; the command-line flags come from here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looped_spec.errors import ConfigError, check_int, check_number, closest, reject_unknown
from looped_spec.sampling_params import MAX_LOGPROBS

SPEC_DECODE_METRICS = ("none", "summary", "detailed")
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_KEY = re.compile(r"[!-~]+")  # what fits into a header without quoting


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server; what each means is its help text, `ServeOptions.help_texts()`."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 is every network interface")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = _option(
        None,
        "key that clients must send as 'Authorization: Bearer KEY'; other users of this machine "
        "can read a command line, LOOPED_SPEC_API_KEY they cannot; default: that variable, or none",
    )
    api_key_for_metrics: bool = _option(False, "ask for the key at /metrics too")
    served_model_name: tuple[str, ...] = _option(
        (), "names that clients may ask for, the first one is reported; default: the model's name"
    )
    max_queued_requests: int = _option(
        256, "most requests that wait beyond max_num_seqs; more are refused with status 429"
    )
    max_body_bytes: int = _option(2**21, "most bytes of the body of an HTTP request")
    max_prompt_tokens: int | None = _option(
        None, "most tokens of a prompt; default: what max_model_len allows"
    )
    max_messages: int = _option(4096, "most messages of a conversation")
    max_n: int = _option(16, "most answers to one prompt (n)")
    max_logprobs: int = _option(
        MAX_LOGPROBS, "most likely tokens of which the log probability may be asked for"
    )
    max_stop_strings: int = _option(16, "most stop strings of a request")
    read_timeout_seconds: float = _option(
        30.0, "time that the body of a request may take; 0: any time"
    )
    drain_seconds: float = _option(
        30.0, "time that running requests get to end after SIGTERM or Ctrl-C"
    )
    per_request_spec_decode_metrics: str = _option(
        "detailed",
        "what an answer tells of its own speculation: none, summary, or detailed with histograms",
    )
    metrics_prefix: str = _option("looped_spec", "what the names of metrics begin with")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queued_requests", 0, 2**20),
            ("max_body_bytes", 1024, 2**30),
            ("max_messages", 1, 2**20),
            ("max_n", 1, 2**10),
            ("max_logprobs", 0, MAX_LOGPROBS),
            ("max_stop_strings", 0, 2**10),
        ):
            check_int(name, getattr(self, name), low, high)
        if self.max_prompt_tokens is not None:
            check_int("max_prompt_tokens", self.max_prompt_tokens, 1, 2**31)
        check_number("drain_seconds", self.drain_seconds, 0)
        check_number("read_timeout_seconds", self.read_timeout_seconds, 0)
        if not self.host:
            raise ConfigError("host must be an address or a name, got an empty text")
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise ConfigError("api_key must be visible ASCII characters without blanks")
        if self.api_key_for_metrics and self.api_key is None:
            raise ConfigError("api_key_for_metrics needs api_key: without one nobody is asked")
        if not all(self.served_model_name):
            raise ConfigError("served_model_name must be names, got an empty text")
        if not _PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                "metrics_prefix must be letters, digits and _, not a digit first, "
                f"got {self.metrics_prefix!r}"
            )
        value = self.per_request_spec_decode_metrics
        if value not in SPEC_DECODE_METRICS:
            raise ConfigError(
                "per_request_spec_decode_metrics must be one of "
                f"{', '.join(SPEC_DECODE_METRICS)}, got {value!r}"
                f"{closest(str(value), SPEC_DECODE_METRICS)}"
            )

    @classmethod
    def from_kwargs(cls, options: Mapping[str, Any]) -> ServeOptions:
        """Make options from keyword arguments; an unknown one is an error that names the
        closest."""
        reject_unknown(options, [f.name for f in dataclasses.fields(cls)], "option")
        return cls(**options)

    @classmethod
    def help_texts(cls) -> dict[str, str]:
        """Return the meaning of every option by name."""
        return {f.name: f.metadata["help"] for f in dataclasses.fields(cls)}
