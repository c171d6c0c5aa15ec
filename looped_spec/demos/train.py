"""Training a demo from text of the user: `python -m looped_spec_<family>.demo.train --help`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from looped_spec.demos import data, vocabulary
from looped_spec.demos.evaluate import measure
from looped_spec.demos.export import Demo, export_demo, write_json
from looped_spec.demos.recipe import Recipe, S
from looped_spec.demos.trainer import Trainer, show
from looped_spec.errors import ConfigError, LoopedSpecError

WATCH_TOKENS = 5_000  # held-out tokens of each source that are measured while training


def parser(recipe: Recipe[S]) -> argparse.ArgumentParser:
    """Build the command line."""
    defaults = recipe.defaults
    p = argparse.ArgumentParser(
        prog=f"python -m looped_spec_{recipe.name}.demo.train",
        description=f"Train the tiny looped model that is bundled as demo:{recipe.name}.",
    )
    p.add_argument("--gsm8k", type=Path, required=True, help="GSM8K training split (.jsonl)")
    p.add_argument("--wikitext", type=Path, required=True, help="WikiText-2 validation text")
    p.add_argument(
        "--python-source",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder with Python source (default: this Python's standard library)",
    )
    p.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    p.add_argument(
        "--state", type=Path, help="file for the resumable state (default: OUT with .state.pt)"
    )
    p.add_argument("--resume", action="store_true", help="continue from the state file")
    p.add_argument("--steps", type=int, default=defaults.steps, help="may change on --resume")
    for name in recipe.flags:
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    p.add_argument("--seed", type=int, default=defaults.seed)
    p.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    p.add_argument("--threads", type=int, help="CPU threads (default: what torch chooses)")
    p.add_argument(
        "--compile", action="store_true", help="train through torch.compile (needs a C++ compiler)"
    )
    p.add_argument("--pause-at", type=int, help="save and end at this step, to be resumed")
    p.add_argument("--save-every", type=int, default=100, help="steps between saves")
    return p


def train(
    recipe: Recipe[S],
    sources: Sequence[data.Source],
    settings: S,
    out: Path,
    state: Path,
    resume: bool = False,
    save_every: int = 100,
    pause_at: int | None = None,
) -> Trainer:
    """Train on the documents of `sources` that are not held out, and export to `out`.

    Every `save_every` steps the state and the checkpoint are written and held-out text is measured;
    at step `pause_at` the run ends early, to be resumed.
    """
    texts = [text for source in sources for text in source.train()]
    tokenizer = vocabulary.train_tokenizer(texts, settings.model["vocab_size"])
    sampler = vocabulary.RowSampler(vocabulary.encode_documents(tokenizer, texts), settings.seed)
    trainer = Trainer(recipe, settings, sampler, tokenizer)
    if resume:
        trainer.load(state)
    demo = Demo(trainer.adapter, tokenizer, settings.model)
    watched = {source.name: texts for source in sources if (texts := source.held_out())}
    history = _history(state) if resume else []
    record = {
        "schema_version": 1,
        "settings": settings.as_dict(),
        "sources": {source.name: source.provenance for source in sources},
        "text_tokens": len(sampler.tokens),
        "threads": torch.get_num_threads(),
        "torch_version": torch.__version__,
        "history": history,
    }

    def save() -> None:
        trainer.save(state)
        export_demo(out, demo)
        progress = {"tokens_seen": trainer.tokens_seen, "seconds": round(trainer.seconds, 1)}
        write_json(state.with_suffix(".json"), {**record, **progress})

    with tqdm(total=trainer.total_steps, initial=trainer.step, unit="step", mininterval=5) as bar:
        try:
            while trainer.step < trainer.total_steps and trainer.step != pause_at:
                show(bar, trainer.train_step())
                if trainer.step % save_every == 0 or trainer.step == settings.steps:
                    for name, kept in watched.items():
                        result = measure(demo, kept, WATCH_TOKENS)
                        line = {"step": trainer.step, "source": name, **result.as_dict()}
                        history.append(line)
                        bar.write(f"{line}", file=sys.stderr)
                    save()
        finally:  # also when interrupted: what was learned so far stays usable
            save()
    return trainer


def _history(state: Path) -> list[dict[str, Any]]:
    path = state.with_suffix(".json")
    return list(json.loads(path.read_text(encoding="utf-8"))["history"]) if path.exists() else []


def main(recipe: Recipe[S], argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 2 for a mistake of the user, 130 when interrupted."""
    args = parser(recipe).parse_args(argv)
    state: Path = args.state or args.out.with_name(f"{args.out.name}.state.pt")
    try:
        names = ("steps", "seed", "learning_rate", *recipe.flags)
        given: dict[str, Any] = {name: getattr(args, name) for name in names}
        settings = dataclasses.replace(recipe.defaults, **given, compiled=args.compile)
        if args.save_every < 1:
            raise ConfigError(f"--save-every must be at least 1, got {args.save_every}")
        if args.threads is not None:
            if args.threads < 1:
                raise ConfigError(f"--threads must be at least 1, got {args.threads}")
            torch.set_num_threads(args.threads)
        sources = [
            data.read_gsm8k(args.gsm8k),
            data.read_wikitext(args.wikitext),
            data.read_python(args.python_source),
        ]
        trainer = train(
            recipe, sources, settings, args.out, state, args.resume, args.save_every, args.pause_at
        )
    except LoopedSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; continue with --resume --state {state}", file=sys.stderr)
        return 130
    print(f"{trainer.tokens_seen} tokens in {trainer.seconds:.0f} s; written to {args.out}")
    return 0
