"""Measuring a demo checkpoint: `python -m looped_spec_<family>.demo.evaluate --help`.

Two numbers per depth: the loss of its readout, and how often its greedy choice is that of full
depth, which is the acceptance of a single draft token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from looped_spec.demos import data, vocabulary
from looped_spec.demos.depths import token_losses
from looped_spec.demos.export import Demo, load_demo, write_json
from looped_spec.demos.recipe import Recipe, S
from looped_spec.errors import ConfigError, LoopedSpecError

ROW_TOKENS = 256


@dataclass(frozen=True)
class Measurement:
    """Numbers per loop, averaged over tokens: loss in nats, agreement as a rate 0..1."""

    tokens: int
    loss: tuple[float, ...]
    agreement_with_full: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, rounded to what is worth reading."""
        return {
            "tokens": self.tokens,
            "loss_per_loop": [round(x, 4) for x in self.loss],
            "agreement_with_full_depth": [round(x, 4) for x in self.agreement_with_full],
        }


@torch.no_grad()
def measure(
    demo: Demo,
    texts: Sequence[str],
    max_tokens: int | None = None,
    row_tokens: int = ROW_TOKENS,
    loops: int | None = None,
) -> Measurement:
    """Measure `texts`, each from its own beginning, cut into rows of `row_tokens`.

    With `max_tokens`, it stops after the row that reaches that many. `loops`, if given, is how deep
    to look; full depth is what the model declares, whatever lies beyond it.
    """
    full = demo.adapter.geometry.default_full_loops
    loops = max(full, loops or full)
    total = torch.zeros(2, loops, dtype=torch.float64)
    tokens = 0
    documents = vocabulary.encode_documents(demo.tokenizer, texts)
    for ids, begin in ((d, b) for d in documents for b in range(0, len(d) - 1, row_tokens)):
        if max_tokens is not None and tokens >= max_tokens:
            break
        row = torch.from_numpy(ids[begin : begin + row_tokens + 1]).unsqueeze(0)
        losses, choices = token_losses(demo.adapter, row[:, :-1], row[:, 1:], loops)
        total[0] += losses.double().sum(dim=(1, 2))
        total[1] += (choices == choices[full - 1]).double().sum(dim=(1, 2))
        tokens += row.shape[1] - 1
    mean = (total / max(1, tokens)).tolist()
    return Measurement(tokens, tuple(mean[0]), tuple(mean[1]))


def parser(recipe: Recipe[S]) -> argparse.ArgumentParser:
    """Build the command line."""
    p = argparse.ArgumentParser(
        prog=f"python -m looped_spec_{recipe.name}.demo.evaluate",
        description="Measure loss and agreement of every loop of a demo checkpoint, in fp32.",
    )
    p.add_argument(
        "folder", type=Path, nargs="?", default=recipe.folder, help="default: the bundled one"
    )
    held_out = p.add_argument_group("training sources, of which the held-out part is measured")
    held_out.add_argument("--gsm8k", type=Path, help="GSM8K training split (.jsonl)")
    held_out.add_argument("--wikitext", type=Path, help="WikiText-2 validation text")
    held_out.add_argument("--python-source", type=Path, help="folder with Python source")
    workloads = p.add_argument_group("workloads, never trained on")
    workloads.add_argument("--gsm8k-test", type=Path, help="GSM8K test split (.jsonl)")
    workloads.add_argument("--humaneval", type=Path, help="HumanEval (.jsonl)")
    workloads.add_argument("--wikitext-test", type=Path, help="WikiText-2 test text")
    p.add_argument("--max-tokens", type=int, help="stop each text after this many tokens")
    p.add_argument("--row-tokens", type=int, help=f"default: {ROW_TOKENS}, or the model's limit")
    p.add_argument("--loops", type=int, help="look deeper than full depth, where the model can")
    p.add_argument("--json", type=Path, help="file to write the numbers to")
    return p


def read_texts(args: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Read every text that was named: documents to measure, and their source's provenance."""
    readers = (
        ("gsm8k held out", args.gsm8k, data.read_gsm8k, True),
        ("wikitext held out", args.wikitext, data.read_wikitext, True),
        ("python held out", args.python_source, data.read_python, True),
        ("gsm8k test", args.gsm8k_test, data.read_gsm8k, False),
        ("humaneval", args.humaneval, data.read_humaneval, False),
        ("wikitext test", args.wikitext_test, data.read_wikitext, False),
    )
    texts = {}
    for name, path, reader, only_held_out in readers:
        if path is not None:
            source = reader(path)
            documents = source.held_out() if only_held_out else list(source.documents)
            texts[name] = (documents, source.provenance)
    if not texts:
        raise ConfigError("nothing to measure: name at least one text, for instance --humaneval")
    return texts


def table(results: dict[str, Measurement]) -> str:
    """Lay the numbers out as a Markdown table, one text a row."""
    loops = range(1, 1 + max(len(result.loss) for result in results.values()))
    heads = ["text", "tokens", *(f"loss {d}" for d in loops), *(f"agree {d}" for d in loops)]
    rows = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    for name, result in results.items():
        numbers = [f"{x:.3f}" for x in (*result.loss, *result.agreement_with_full)]
        rows.append([name, str(result.tokens), *numbers])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(recipe: Recipe[S], argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 2 for a mistake of the user, 130 when interrupted."""
    args = parser(recipe).parse_args(argv)
    try:
        for name in ("max_tokens", "row_tokens", "loops"):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be at least 1, got {getattr(args, name)}")
        demo = load_demo(args.folder, recipe.adapter_class)
        geometry = demo.adapter.geometry
        if args.loops is not None:
            geometry.check_full_loops(args.loops)
        row_tokens = args.row_tokens or min(ROW_TOKENS, geometry.max_model_len)
        if row_tokens > geometry.max_model_len:
            raise ConfigError(
                f"--row-tokens must be at most {geometry.max_model_len}, got {row_tokens}"
            )
        texts = read_texts(args)
        results = {
            name: measure(demo, documents, args.max_tokens, row_tokens, args.loops)
            for name, (documents, _) in tqdm(texts.items(), unit="text")
        }
        if args.json is not None:
            measured = {
                name: {**result.as_dict(), "source": texts[name][1]}
                for name, result in results.items()
            }
            settings = {
                "dtype": "float32",
                "row_tokens": row_tokens,
                "full_loops": geometry.default_full_loops,
            }
            write_json(args.json, {"schema_version": 1, **settings, "texts": measured})
    except LoopedSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {args.json}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(table(results))
    return 0
