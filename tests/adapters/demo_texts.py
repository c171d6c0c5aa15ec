"""A little text of each kind that demos are trained on, the same every time."""

from __future__ import annotations

import json
import random
from pathlib import Path

from looped_spec.demos import data


def write_text(folder: Path) -> dict[str, Path]:
    """Write the files and return their paths."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    words = ["apple", "pear", "buys", "sells", "three", "seven", "and", "then", "gives", "away"]

    def sentence() -> str:
        return " ".join(rng.choice(words) for _ in range(12)) + "."

    items = [{"question": sentence(), "answer": f"{sentence()}\n#### {n}"} for n in range(60)]
    articles = [f" = Article {n} = \n \n {sentence()} \n \n = = Part = = \n" for n in range(20)]
    paths = {"gsm8k": folder / "g.jsonl", "wikitext": folder / "w.txt", "python": folder / "py"}
    paths["gsm8k"].write_text("".join(json.dumps(item) + "\n" for item in items))
    paths["wikitext"].write_text(" \n" + "".join(articles))
    (paths["python"] / "tests").mkdir(parents=True)
    (paths["python"] / "tests" / "test_it.py").write_text("assert False\n")
    for n in range(5):
        (paths["python"] / f"m{n}.py").write_text(
            f"def f{n}(x):\n    return '{sentence()}' * {n}\n"
        )
    return paths


def read_text(folder: Path) -> list[data.Source]:
    """Write the files and read them as sources."""
    paths = write_text(folder)
    return [
        data.read_gsm8k(paths["gsm8k"]),
        data.read_wikitext(paths["wikitext"]),
        data.read_python(paths["python"]),
    ]
