"""The flags of every verb that loads a model: one per option of the engine, named and explained
there."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from looped_spec.cli.flags import add_flag
from looped_spec.errors import ConfigError
from looped_spec.options import EngineOptions

_SPECULATION_TEXT = """\
A looped model runs its block D times (full loops) for every token. Speculation drafts
K tokens with only d loops each, then checks them all in one pass of the other D - d
loops. It pays where drafts are mostly accepted; the text is that of plain decoding.
Without --num-speculative-tokens, K and d are chosen anew for each round."""
_EARLY_EXIT_TEXT = """\
Without speculation, a token may stop before full depth where the model says that it is
ready. That is cheaper and changes the text; --exit-threshold turns it on."""
_SPECULATION = (
    "num_speculative_tokens",
    "draft_loops",
    "full_loops",
    "preset",
    "policy",
    "speculative_adaptive",
    "speculative_adaptive_config",
    "speculative_config",
)
_OWN_FLAGS: dict[str, dict[str, Any]] = {
    "enable_prefix_caching": {
        "action": argparse.BooleanOptionalAction,
        "help": "let a request take over what an earlier one has computed of the same beginning of "
        "a prompt, in whole blocks; or never; default: in a server, not elsewhere",
    },
    "speculative_adaptive": {
        "action": argparse.BooleanOptionalAction,
        "help": "choose K and d anew for each round, even for a model that suggests no "
        "speculation; or keep what the model suggests",
    },
    "speculative_adaptive_config": {
        "metavar": "FILE",
        "help": "what may be chosen and how: the JSON of an AdaptiveSpecConfig",
    },
    "speculative_config": {
        "metavar": "JSON",
        "help": "the same in vLLM's form: num_speculative_tokens, draft_loops, and "
        "num_speculative_tokens_per_batch_size with entries [start, end, K] or [start, end, K, d]",
    },
}
_EARLY_EXIT = ("exit_threshold", "exit_criterion", "min_loops", "max_loops")


def add_engine_flags(parser: argparse.ArgumentParser, **help_texts: str) -> None:
    """Add a flag for every option of `EngineOptions`; `help_texts` replace the help of an option.

    An option left out on the command line has the default of its field.
    """
    speculation = parser.add_argument_group("speculation", _SPECULATION_TEXT)
    early_exit = parser.add_argument_group("early exit", _EARLY_EXIT_TEXT)
    engine = parser.add_argument_group("model and engine")
    texts = EngineOptions.help_texts() | help_texts
    fields = {field.name: field for field in dataclasses.fields(EngineOptions)}
    grouped = [(speculation, name) for name in _SPECULATION]
    grouped += [(early_exit, name) for name in _EARLY_EXIT]
    grouped += [(engine, name) for name in fields if name not in (*_SPECULATION, *_EARLY_EXIT)]
    for group, name in grouped:
        if name == "adapter_options":
            add_adapter_option(group)
        elif name in _OWN_FLAGS:
            flag = f"--{name.replace('_', '-')}"
            group.add_argument(flag, default=None, **_OWN_FLAGS[name])
        else:
            add_flag(group, fields[name], texts[name])


def add_adapter_option(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add the flag for options of the model family."""
    group.add_argument(
        "--adapter-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the model family; VALUE is JSON, or a text that is not JSON; may be "
        "repeated",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the checked options that were given, as keyword arguments of `LLM`.

    Raises `ConfigError` for a value out of its range; what depends on the model is checked later.
    """
    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(EngineOptions)
        if getattr(args, field.name, field.default) != field.default
    }
    if adapter_options := read_adapter_options(args.adapter_option):
        given["adapter_options"] = adapter_options
    EngineOptions.from_kwargs(given)
    return given


def read_adapter_options(pairs: list[str]) -> dict[str, Any]:
    """Return what `--adapter-option` was given, by name."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--adapter-option must be KEY=VALUE, got '{pair}'")
        if key in options:
            raise ConfigError(f"--adapter-option {key} is given twice")
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return options
