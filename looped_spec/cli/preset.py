"""Measure, look at and compare presets: what to run for a model on a device, and why.

A preset holds the K and d worth running per batch size, the round times and the acceptance behind
that choice, and where each of them comes from. docs/presets.md explains how one is found for a
model.

verbs:
{verbs}

`looped-spec preset VERB --help` shows the options of a verb.

examples:
  looped-spec preset list
  looped-spec preset show H100
  looped-spec preset generate MODEL --workload maths=questions.jsonl
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from types import MappingProxyType

from looped_spec.cli.one_line_errors import use_one_line_errors
from looped_spec.errors import ConfigError, closest

VERBS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "generate": ("looped_spec.cli.preset_generate", "measure a model here and write a preset"),
        "list": ("looped_spec.cli.preset_list", "show which presets there are"),
        "show": ("looped_spec.cli.preset_show", "show what a preset says, and why"),
        "validate": ("looped_spec.cli.preset_validate", "check preset files"),
        "diff": ("looped_spec.cli.preset_diff", "compare two presets"),
        "estimate": ("looped_spec.cli.preset_estimate", "model a preset of a known device"),
        "report": ("looped_spec.cli.preset_report", "write a report with pictures"),
    }
)
"""Verb -> its module, which only the selected verb imports, and its line of help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Take the verb and leave its arguments to its module."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = "\n".join(f"  {verb:<10} {line}" for verb, (_, line) in VERBS.items())
    parser.description = (parser.description or "").replace("{verbs}", lines)
    parser.usage = f"{parser.prog} VERB ..."
    parser.add_argument("verb", metavar="VERB", help="one of the verbs above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    if args.verb not in VERBS:
        raise ConfigError(
            f"unknown verb 'preset {args.verb}'{closest(args.verb, VERBS)}; "
            f"verbs: {', '.join(VERBS)}"
        )
    module = importlib.import_module(VERBS[args.verb][0])
    parser = argparse.ArgumentParser(
        prog=f"looped-spec preset {args.verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    use_one_line_errors(parser)
    module.configure(parser)
    try:
        parsed = parser.parse_args(args.arguments)
    except SystemExit:  # how argparse ends --help
        return 0
    return int(module.run(parsed))
