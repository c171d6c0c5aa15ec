"""The command `looped-spec`: picks a verb, imports only its module, turns mistakes into one line.

A verb's module has `configure(parser)`, which adds its arguments, and `run(args)`, which returns
the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from looped_spec.cli import console
from looped_spec.cli.console import PROG
from looped_spec.cli.one_line_errors import use_one_line_errors
from looped_spec.errors import ConfigError, LoopedSpecError, closest
from looped_spec.settings import VARIABLES
from looped_spec.version import __version__

VERBS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "adapters": ("looped_spec.cli.adapters", "show the installed plugins and their adapters"),
        "bench": ("looped_spec.cli.bench", "measure a model under a load"),
        "generate": ("looped_spec.cli.generate", "generate text with a model"),
        "preset": ("looped_spec.cli.preset", "measure, show, compare and estimate presets"),
        "serve": ("looped_spec.cli.serve", "serve a model over HTTP, as OpenAI's API"),
        "simulate": ("looped_spec.cli.simulate", "try a control policy on a load, without a model"),
    }
)
"""Verb -> its module, which only the selected verb imports, and its line of help."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        console.flush()  # Here, so that a reader that went away is noticed below.
        return code
    except LoopedSpecError as error:
        console.note(f"error: {' '.join(str(error).split())}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        console.note("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        console.discard_stdout()
        return EXIT_BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    """Split the arguments at the verb: before it are ours, after it the verb's own."""
    at = next((i for i, text in enumerate(arguments) if not text.startswith("-")), len(arguments))
    parser = _top_parser()
    try:
        parser.parse_args(arguments[:at])
        if at == len(arguments):
            parser.error(f"a verb is missing: {', '.join(VERBS)}")
        verb = arguments[at]
        if verb not in VERBS:
            raise ConfigError(
                f"unknown verb '{verb}'{closest(verb, VERBS)}; verbs: {', '.join(VERBS)}"
            )
        module = importlib.import_module(VERBS[verb][0])
        verb_parser = argparse.ArgumentParser(
            prog=f"{PROG} {verb}", description=module.__doc__, allow_abbrev=False
        )
        use_one_line_errors(verb_parser)
        module.configure(verb_parser)
        args = verb_parser.parse_args(arguments[at + 1 :])
    except SystemExit:  # How argparse ends --help and --version.
        return 0
    return int(module.run(args))


def _top_parser() -> argparse.ArgumentParser:
    """Build the parser of what precedes the verb; its help lists verbs and variables."""
    verbs = "\n".join(f"  {verb:<10} {line}" for verb, (_, line) in VERBS.items())
    width = max(map(len, VARIABLES))
    variables = "\n".join(f"  {name:<{width}}  {line}" for name, line in VARIABLES.items())
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} [--help] [--version] VERB ...",
        description="Self-speculative decoding for looped (recurrent-depth) transformers.",
        epilog=f"verbs:\n{verbs}\n\n`{PROG} VERB --help` shows the options of a verb.\n\n"
        f"environment variables:\n{variables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    use_one_line_errors(parser)
    return parser
