"""What the scripts share: their flag for texts, how they end, what they write, and their tables."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from looped_spec.atomic_json import write_json
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


def shown_command(name: str, argv: Sequence[str] | None) -> list[str]:
    """Return the words of a command, of paths the file name alone."""
    words = sys.argv[1:] if argv is None else argv
    return [name, *(word.rstrip("/").rpartition("/")[2] for word in words)]


def run_command(
    name: str,
    argv: Sequence[str] | None,
    path: Path | None,
    measure: Callable[[], dict[str, Any]],
    when_interrupted: str = "nothing was written",
) -> int:
    """Measure, and write what was found beside the command and its time; return the exit status.

    What is found may say these itself. The status is 2 for a mistake of the user and 130 when
    interrupted; `when_interrupted` says what is left then.
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    try:
        found = measure()
        document = {
            "schema_version": 1,
            "command": shown_command(name, argv),
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - clock, 1),
        } | found
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, document)
    except LoopedSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {when_interrupted}", file=sys.stderr)
        return 130
    return 0


def markdown(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lay rows out as a Markdown table; the first column is text, the others are numbers."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
