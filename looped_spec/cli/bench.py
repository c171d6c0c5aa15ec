"""Measure a model on this machine.

`looped-spec bench load MODEL` keeps it busy with a given number of requests and compares ways of
decoding.
"""

from __future__ import annotations

import argparse

from looped_spec.cli import bench_load
from looped_spec.cli.one_line_errors import use_one_line_errors
from looped_spec.cli.subverbs import StrictParser


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb `load`."""
    verbs = parser.add_subparsers(
        dest="verb", metavar="load", required=True, parser_class=StrictParser
    )
    load = verbs.add_parser(
        "load",
        help="compare ways of decoding under a load",
        description=bench_load.__doc__,
        allow_abbrev=False,
    )
    use_one_line_errors(load)
    bench_load.configure(load)


def run(args: argparse.Namespace) -> int:
    """Measure."""
    return bench_load.run(args)
