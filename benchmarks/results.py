"""What the scripts share: their flag for texts, how they end, what they write, and their tables."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from looped_spec.errors import LoopedSpecError


def add_workload_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--workload`, whose values `looped_spec.offline.workloads.named_paths` reads."""
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="texts that the model was not trained on, JSON lines (.jsonl) or plain text; may be "
        "repeated",
    )


def run_command(
    name: str,
    argv: Sequence[str] | None,
    path: Path | None,
    measure: Callable[[], dict[str, Any]],
) -> int:
    """Measure, and write what was found beside the command and its time; return the exit status.

    It is 2 for a mistake of the user and 130 when interrupted. Of paths the file name alone is
    written.
    """
    words = sys.argv[1:] if argv is None else argv
    started, clock = datetime.now(UTC), time.perf_counter()
    try:
        document = measure() | {
            "schema_version": 1,
            "command": [name, *(word.rpartition("/")[2] for word in words)],
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - clock, 1),
        }
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    except LoopedSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def markdown(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lay rows out as a Markdown table; the first column is text, the others are numbers."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
