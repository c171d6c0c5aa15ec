"""Draw a preset: speed-up and acceptance over K and d, speed-up against acceptance, and round times
against the ideal model, with what may be chosen marked.

examples:
  looped-spec preset report PRESET.json -o report.html
  looped-spec preset report "1.4B H200" --load load.json -o report.md

A .html file holds everything and can be read in light and dark; beside a .md file there are its
pictures. Results of `looped-spec bench load` can be added. It needs the extra `plots`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from looped_spec.atomic_json import check_target
from looped_spec.cli import console
from looped_spec.cli.preset_files import read_preset
from looped_spec.cli.read_json import read_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `looped-spec preset report`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} PRESET -o REPORT [--load RESULT.json ...]"
    parser.add_argument("preset", metavar="PRESET", help="a file, or a part of one's name")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="REPORT",
        help="the file to write, .html or .md; pictures of a .md file lie beside it",
    )
    parser.add_argument(
        "--load",
        nargs="+",
        default=[],
        metavar="RESULT",
        help="results of `bench load` to show as well",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; everything is read and checked before anything is drawn."""
    from looped_spec.offline.figures import check_matplotlib
    from looped_spec.offline.load_document import read_load_document
    from looped_spec.offline.report_pages import check_report_name, write_report

    target = Path(args.output)
    check_report_name(target)
    check_target(target)
    preset, _ = read_preset(args.preset)
    loads = [read_load_document(read_json(name, "the result"), name) for name in args.load]
    check_matplotlib()
    for path in write_report(preset, loads, target):
        console.note(f"wrote {path}")
    return 0
