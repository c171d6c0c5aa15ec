"""Measure a model on this device and write the preset that it runs fastest with.

Times of rounds and acceptance of drafts are measured apart: times at the batch sizes and contexts
that are named, acceptance on the selection group of every workload. What looks best is then run on
longer texts. Whatever was measured is kept at once; --resume goes on after any interruption."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looped_spec.atomic_json import check_target
from looped_spec.cli import console
from looped_spec.cli.engine_flags import add_adapter_option, read_adapter_options
from looped_spec.cli.flags import add_flag
from looped_spec.cli.model_loading import load_model, memory_errors
from looped_spec.cli.preset_files import check_note
from looped_spec.errors import ConfigError, check_number
from looped_spec.offline.settings import SamplingSettings
from looped_spec.options import EngineOptions

if TYPE_CHECKING:
    from looped_spec.offline.cells import Cell
    from looped_spec.offline.estimates import CellTimes
    from looped_spec.offline.measurer import Measurer
    from looped_spec.offline.plan import SamplingPlan
    from looped_spec.offline.session import Session, Workers

_ENGINE = (
    "device",
    "dtype",
    "num_threads",
    "full_loops",
    "attention_backend",
    "attention_num_splits",
    "cpu_linear",
    "cpu_kernels",
    "enforce_eager",
    "graph_backend",
    "kv_cache_memory_bytes",
    "max_model_len",
    "load_format",
    "revision",
    "seed",
)
_TYPES = {"tuple[int, ...]": int, "tuple[float, ...]": float, "int": int, "float": float}
_METAVARS = {
    "batch_sizes": "B",
    "context_lengths": "L",
    "ks": "K",
    "ds": "d",
    "temperatures": "T",
    "margin": "X",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", metavar="MODEL", help="demo:<name>, a local folder, or a hub id")
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="texts to measure acceptance on, JSON lines (.jsonl) or plain text; half of them, by "
        "their hash, are never used here: they are for evaluation; may be repeated",
    )
    what = parser.add_argument_group("what is measured")
    for field in dataclasses.fields(SamplingSettings):
        _add_setting(what, field)
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--budget",
        type=float,
        metavar="MINUTES",
        help="time that may be used; what has most to say is measured first, and what did not fit "
        "is named",
    )
    run.add_argument("--out", type=Path, metavar="PATH", help="the preset; default: its usual name")
    run.add_argument(
        "--samples",
        type=Path,
        metavar="PATH",
        help="where samples are kept as they come; default: beside the preset, in samples/",
    )
    run.add_argument("--resume", action="store_true", help="go on with the samples that are there")
    run.add_argument(
        "--dry-run", action="store_true", help="show what would be measured, and how long it takes"
    )
    run.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="measure on the machines of a Ray cluster, a GPU for each cell where there are any: "
        "host:port, auto (one that runs), or local (one of this machine)",
    )
    run.add_argument("--note", default="", metavar="TEXT", help="what the preset should say too")
    engine = parser.add_argument_group("model and engine")
    texts = EngineOptions.help_texts()
    for option in dataclasses.fields(EngineOptions):
        if option.name in _ENGINE:
            add_flag(engine, option, texts[option.name])
    add_adapter_option(engine)


def run(args: argparse.Namespace) -> int:
    """Plan, measure, and write the preset; return the exit code."""
    settings = _settings(args)
    if args.budget is not None:
        check_number("--budget", args.budget, 0.0)
    check_note(args.note)
    from looped_spec.offline.workloads import named_paths

    paths = named_paths(args.workload)
    _check_files(args, paths.values())
    llm = load_model(args.model, _engine_options(args, settings))
    from looped_spec.offline.prepare import make_measurer

    with memory_errors():
        measurer = make_measurer(llm, paths, settings)
        measurer.capture()
        return _carry_out(args, measurer)


def _beside(out: Path) -> Path:
    return out.parent / "samples" / f"{out.stem}.jsonl"


def _check_files(args: argparse.Namespace, workloads: Iterable[Path]) -> None:
    """Raise `ConfigError` for what can be seen of files before the model is loaded."""
    from looped_spec.offline.documents import read_documents
    from looped_spec.offline.store import check_free, read_samples

    for path in workloads:
        read_documents(path)
    if args.out is not None:
        check_target(args.out)
    samples = args.samples or (_beside(args.out) if args.out is not None else None)
    if samples is None or args.dry_run:
        return
    check_free(samples, resume=args.resume)
    if samples.exists() and samples.stat().st_size:
        read_samples(samples)


def _carry_out(args: argparse.Namespace, measurer: Measurer) -> int:
    from looped_spec.offline.build import build_preset
    from looped_spec.offline.checkout import commit
    from looped_spec.offline.estimates import CellTimes
    from looped_spec.offline.session import Session
    from looped_spec.offline.store import Samples, SampleStore
    from looped_spec.presets.lookup import PATTERN
    from looped_spec.presets.preset import preset_file_name

    plan = measurer.plan
    out = args.out or Path(preset_file_name(plan.model, plan.device_name, plan.dtype))
    check_target(out)
    samples = args.samples or _beside(out)
    times = CellTimes.of(measurer.llm, plan)
    if not out.match(PATTERN):
        console.note(
            f"'{out.name}' is found by its path alone: runs look for "
            f"'{preset_file_name(plan.model, plan.device_name, plan.dtype)}'"
        )
    if args.dry_run:
        console.write(_plan_text(plan, times, args.budget))
        return 0
    header = {
        "plan": plan.to_json(),
        "command": _command(sys.argv[1:]),
        "note": args.note.strip(),
        "commit": commit(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    with (
        SampleStore(samples, header, resume=args.resume) as store,
        _workers(args, measurer) as workers,
        _Bar() as bar,
    ):
        session = Session(
            plan,
            store,
            workers,
            times,
            budget=None if args.budget is None else 60 * args.budget,
            progress=bar,
        )
        try:
            session.run()
            try:
                preset = build_preset(Samples(store.header, store.cells))
            except ConfigError as error:
                if not session.left_out:
                    raise
                raise ConfigError(
                    f"the budget was too short for a preset, {len(session.left_out)} cells did not "
                    f"fit: {error}"
                ) from error
            preset.write(out)
        except BaseException:
            bar.close()
            store.remove_if_empty()
            console.note(
                f"{len(store.cells)} cells are kept in {samples}; the same command with --resume "
                "goes on from there"
                if store.cells
                else "no cell was measured, so nothing is kept"
            )
            raise
        bar.close()
    console.write(_summary(session, out, samples))
    return 0


def _workers(
    args: argparse.Namespace, measurer: Measurer
) -> contextlib.AbstractContextManager[Workers]:
    from looped_spec.offline.session import LocalWorker

    if args.ray is None:
        return contextlib.nullcontext(LocalWorker(measurer))
    from looped_spec.offline.ray_workers import RayWorkers

    settings = measurer.plan.settings
    return contextlib.closing(
        RayWorkers(args.ray, args.model, _engine_options(args, settings), measurer)
    )


def _add_setting(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    flag, text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool":
        group.add_argument(flag, action="store_true", help=text)
        return
    default = field.default
    if default is not None:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{text} (default: {shown})"
    options: dict[str, Any] = {"nargs": "+"} if kind.startswith("tuple") else {}
    group.add_argument(
        flag,
        type=_TYPES[kind],
        default=default,
        metavar=_METAVARS.get(field.name, "N"),
        help=text,
        **options,
    )


def _settings(args: argparse.Namespace) -> SamplingSettings:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingSettings):
        value = getattr(args, field.name)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return SamplingSettings(**values)


def _engine_options(args: argparse.Namespace, settings: SamplingSettings) -> dict[str, Any]:
    """Return keyword arguments of `LLM`: as wide as the largest batch, and plain until told."""
    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(EngineOptions)
        if field.name in _ENGINE and getattr(args, field.name) != field.default
    }
    if adapter_options := read_adapter_options(args.adapter_option):
        given["adapter_options"] = adapter_options
    widest = max(*settings.batch_sizes, 8)
    return given | {"max_num_seqs": widest, "num_speculative_tokens": 0}


def _command(arguments: Sequence[str]) -> str:
    """Return what was typed, with the last part of every path: folders are the user's own."""
    words = [console.PROG]
    for word in arguments:
        head, equals, path = word.rpartition("=")
        words.append(f"{head}{equals}{path.rpartition('/')[2]}" if "/" in word else word)
    return shlex.join(words)


def _plan_text(plan: SamplingPlan, times: CellTimes, budget: float | None) -> str:
    """Lay out what would be measured, and how long that would take."""
    from looped_spec.cli.tables import plain_table
    from looped_spec.offline.cells import AcceptanceRun, ConfirmBlock, CostBlock

    first = plan.first_cells()
    arms = plan.candidates()[: plan.settings.finalists]
    confirm = list(plan.confirm_cells(dict.fromkeys(plan.settings.batch_sizes, arms)))
    rows, total = [], 0.0
    for name, kind in (
        ("times of rounds", CostBlock),
        ("acceptance", AcceptanceRun),
        ("finalists on long texts", ConfirmBlock),
    ):
        cells = [cell for cell in (*first, *confirm) if isinstance(cell, kind)]
        seconds = times.total(cells)
        total += seconds
        rows.append((name, str(len(cells)), _minutes(seconds)))
    rows.append(("all", str(len(first) + len(confirm)), _minutes(total)))
    settings = plan.settings
    lines = [
        f"{plan.model} ({plan.adapter}, {plan.full_loops} loops) on {plan.device_name}, "
        f"{plan.dtype}",
        f"batch sizes {_list(settings.batch_sizes)}; contexts {_list(settings.context_lengths)}; "
        f"{len(plan.candidates())} candidates; texts: "
        + ", ".join(f"{name} ({w['items']})" for name, w in plan.workloads.items()),
        "",
        plain_table(("what", "cells", "time"), rows),
    ]
    if budget is not None and total > 60 * budget:
        lines.append(
            f"\nthe budget of {budget:g} min does not hold all of it: repeats that come last are "
            "left out"
        )
    return "\n".join(lines) + "\n"


def _summary(session: Session, out: Path, samples: Path) -> str:
    from looped_spec.offline.aggregate import aggregate

    measured = aggregate(session.store.cells, session.plan.full_loops)
    lines = [f"{out} is written, from {len(session.store.cells)} cells in {samples}"]
    lines += [f"left out: {refused}" for refused in measured.refused]
    if measured.noise is not None:
        lines.append(
            f"noise: plain decoding measured twice differs by {100 * measured.noise:.1f} % (median)"
        )
    if session.left_out:
        names = session.left_out
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        lines.append(
            f"the budget did not hold {len(names)} cells: {'; '.join(names[:5])}{more}; --resume "
            "measures them"
        )
    return "\n".join(lines) + "\n"


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


class _Bar:
    """A progress bar on stderr, with what is measured and the time left."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(
            disable=sys.stderr is None,
            bar_format="{desc} |{bar:20}| {n_fmt} of {total_fmt} cells, {elapsed}{postfix}",
            total=0,
        )

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, cell: Cell, seconds_left: float) -> None:
        """Show which cell is measured."""
        self._bar.set_description_str(cell.key, refresh=False)
        self._left(seconds_left)

    def end(self, cell: Cell, done: int, left: int, seconds_left: float) -> None:
        """Count a cell."""
        self._bar.total = done + left
        self._bar.update()
        self._left(seconds_left)

    def _left(self, seconds: float) -> None:
        self._bar.set_postfix_str(f"about {_minutes(seconds)} left")

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()
