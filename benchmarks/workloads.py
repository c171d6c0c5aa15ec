"""Texts to measure on: GSM8K, HumanEval and WikiText files of the user, none of them trained on."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from looped_spec.demos import data
from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.tokenization import Tokenizer


@dataclass(frozen=True)
class Workload:
    """Rows of token ids, all of one length and each from the beginning of a document."""

    name: str
    rows: list[list[int]]
    provenance: dict[str, Any]


def add_text_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add a flag for each kind of text; return their group."""
    texts = parser.add_argument_group("texts that the model was not trained on")
    texts.add_argument("--gsm8k", type=Path, metavar="FILE", help="GSM8K test split (.jsonl)")
    texts.add_argument("--humaneval", type=Path, metavar="FILE", help="HumanEval (.jsonl)")
    texts.add_argument("--wikitext", type=Path, metavar="FILE", help="WikiText-2 test text")
    return texts


def named_sources(args: argparse.Namespace) -> Iterator[tuple[Path, data.Source]]:
    """Read every text that was named, with the path that it comes from."""
    for path, reader in (
        (args.gsm8k, data.read_gsm8k),
        (args.humaneval, data.read_humaneval),
        (args.wikitext, data.read_wikitext),
    ):
        if path is not None:
            yield path, reader(path)


def read_workloads(
    args: argparse.Namespace, tokenizer: Tokenizer, num_rows: int, num_tokens: int
) -> list[Workload]:
    """Read every text that was named: the first `num_rows` documents of at least `num_tokens`
    tokens, cut to that many."""
    found = []
    for path, source in named_sources(args):
        rows: list[list[int]] = []
        for document in source.documents:
            ids = tokenizer.encode(document)
            if len(ids) >= num_tokens:
                rows.append(ids[:num_tokens])
            if len(rows) == num_rows:
                break
        if not rows:
            raise ConfigError(f"{path} has no document of {num_tokens} tokens")
        found.append(Workload(source.name, rows, source.provenance))
    if not found:
        raise ConfigError("nothing to measure: name at least one text, for instance --humaneval")
    return found


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
