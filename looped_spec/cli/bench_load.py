"""Keep a model busy with a given number of requests and compare ways of decoding.

Whenever a request ends the next one starts. All ways get the same requests, run in turn, and every
token is compared with that of plain decoding. The best static K and d is picked in hindsight for
each load; regret and gain of the policies are against it.

examples:
  looped-spec bench load MODEL --workload gsm8k=gsm8k_test.jsonl --profile fixed:1 fixed:8
  looped-spec bench load MODEL --workload gsm8k=A.jsonl --workload code=B.jsonl \\
      --profile ramp:1-8-32-8-1 --mixture mixed shifting --json load.json --plot load.png
  looped-spec bench load MODEL --workload text=C.txt --policies never,static:2,1,static:all,goodput
  looped-spec bench load demo:NAME --workload gsm8k=A.jsonl --input-tokens 48 --output-tokens 64 \\
      --interleave 1000

docs/evaluation.md says what the numbers mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looped_spec.atomic_json import check_target, json_text
from looped_spec.cli import console
from looped_spec.cli.bench_load_report import report
from looped_spec.cli.bench_load_run import LoadMeasurement
from looped_spec.cli.engine_flags import add_engine_flags, engine_options
from looped_spec.cli.model_loading import load_model, memory_errors
from looped_spec.cli.read_json import read_json
from looped_spec.errors import CapacityError, ConfigError, check_int, check_number
from looped_spec.offline import load_policy
from looped_spec.offline.load import Profile
from looped_spec.offline.load_document import (
    read_load_document,
    settings_of,
)
from looped_spec.offline.load_mixture import MEANINGS, MIXED, prompts_for
from looped_spec.offline.workloads import EVALUATION, GROUPS, named_paths, read_workload

if TYPE_CHECKING:
    from looped_spec.offline.load_bench import Scenario
    from looped_spec.offline.load_policy import WaySetter
    from looped_spec.runtime.llm import LLM

STDOUT = "-"
BOTH = "both"
PROFILES = ("fixed:1", "fixed:8", "fixed:32", "ramp:1-8-32-8-1")
_NOT_HERE = (
    *("num_speculative_tokens", "draft_loops", "policy", "speculative_adaptive"),
    *("speculative_config", "exit_threshold", "exit_criterion", "min_loops", "max_loops"),
)
"""Options of the engine that say how to decode, which `--policies` does here."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `looped-spec bench load`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} MODEL --workload NAME=PATH [flags]"
    parser.add_argument("model", metavar="MODEL", help="demo:NAME, a local folder, or a hub id")
    load = parser.add_argument_group("load")
    add = load.add_argument
    add(
        "--workload",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="texts to complete: JSON lines of GSM8K's or HumanEval's form, or of prompt or text, "
        "or a text file; may be repeated",
    )
    add(
        "--profile",
        nargs="+",
        default=list(PROFILES),
        metavar="LOAD",
        help="fixed:B keeps B requests running, ramp:B-B-... goes from one B to the next; Bx3 "
        f"gives every slot of a batch 3 requests there (default: {' '.join(PROFILES)})",
    )
    add(
        "--mixture",
        nargs="+",
        metavar="NAME",
        help=f"{MEANINGS} (default: {MIXED}, or the kind that there is)",
    )
    add(
        "--group",
        choices=(*GROUPS, BOTH),
        default=EVALUATION,
        help="texts that presets are selected by, those that they are evaluated with, which are "
        "others, or both, one after the other (default: %(default)s)",
    )
    for flag, default, text in (
        ("--input-tokens", 512, "prompt tokens of each request"),
        ("--output-tokens", 2048, "new tokens of each request; ends of texts are ignored"),
        ("--requests-per-slot", 2, "requests that a slot of the batch gets, one after the other"),
        ("--repeats", 3, "timed runs of each way, of which the median counts"),
    ):
        add(flag, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    add(
        "--interleave",
        type=float,
        metavar="MS",
        help="run the ways of a repeat beside each other, by turns of MS milliseconds, each with a "
        "cache of its own, instead of one after the other: a machine that changes its speed then "
        "does so for all of them alike",
    )
    add("--temperature", type=float, default=0.0, metavar="X", help="default: %(default)g")
    add(
        "--drain",
        action="store_true",
        help="end every request of a phase before the next begins; else it begins when the last "
        "request of the one before has started",
    )
    add(
        "--policies",
        default=load_policy.DEFAULT,
        metavar="LIST",
        help=f"ways of decoding, with commas between: {load_policy.MEANINGS} (default: "
        "%(default)s)",
    )
    add_engine_flags(
        parser,
        seed="seed of the first request and of dummy weights; each further request gets one more",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write all runs to FILE, after each of them, or at the end to stdout instead of the "
        "tables",
    )
    output.add_argument(
        "--resume",
        action="store_true",
        help="go on with what FILE of --json has: add what it lacks, be it the rest of an "
        "interrupted call or further loads",
    )
    output.add_argument(
        "--plot",
        metavar="FILE",
        help="draw tokens per second, K and d over time, as a PNG or SVG; several loads get a "
        "number each; needs the extra `plots`",
    )
    output.add_argument("--all-rows", action="store_true", help="show every static K and d")
    output.add_argument(
        "-v", "--verbose", action="store_true", help="log what is loaded and chosen on stderr"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; everything that can be checked is checked before the first run."""
    profiles, names, paths, options = _checked(args)
    target = None if args.json in (None, STDOUT) else Path(args.json)
    before = _earlier(target, args.resume)
    if args.plot is not None:
        check_target(Path(args.plot))
        from looped_spec.offline.figures import check_format, check_matplotlib

        check_format(Path(args.plot))
        check_matplotlib()
    with console.log_level(args.verbose), memory_errors():
        llm = load_model(args.model, options)
        from looped_spec.offline.load_policy import WaySetter

        _check_length(llm, args)
        setter = WaySetter(llm)
        scenarios, works = _scenarios(llm, setter, profiles, names, paths, args)
        settings = settings_of(
            llm,
            config=setter.config,
            workloads=works,
            input_tokens=args.input_tokens,
            output_tokens=args.output_tokens,
            temperature=args.temperature,
            interleave_ms=args.interleave,
        )
        measurement = LoadMeasurement(llm, setter, scenarios, settings, args, target, before)
        code = measurement.run()
    document = measurement.document()
    if args.json == STDOUT:
        console.write(json_text(document))
    else:
        console.write(report(document["scenarios"], all_rows=args.all_rows))
    if args.plot is not None:
        from looped_spec.offline.load_plot import plot_scenarios

        for path in plot_scenarios(document["scenarios"], Path(args.plot)):
            console.note(f"drew {path}")
    return code


def _checked(
    args: argparse.Namespace,
) -> tuple[list[Profile], list[str], dict[str, Path], dict[str, Any]]:
    """Return profiles, names of policies, texts and options; raise for what needs no model."""
    for name in ("input_tokens", "output_tokens", "requests_per_slot", "repeats"):
        check_int(name, getattr(args, name), 1)
    check_number("temperature", args.temperature, 0.0)
    options = engine_options(args)
    if args.interleave is not None:
        check_number("interleave", args.interleave, 1.0)
        if options.get("async_scheduling"):
            raise ConfigError(
                "--interleave needs rounds that end with their step: leave --async-scheduling out"
            )
    for name in _NOT_HERE:
        if name in options:
            raise ConfigError(
                f"--{name.replace('_', '-')} says how to decode, which --policies does here: "
                "leave it out"
            )
    if options.get("enable_prefix_caching"):
        raise ConfigError(
            "--enable-prefix-caching would let each run take over the prompts of the one before: "
            "leave it out"
        )
    profiles = []
    for text in dict.fromkeys(args.profile):
        profile = Profile.parse(text, args.requests_per_slot, args.drain)
        if profile.max_concurrency > args.max_num_seqs:
            raise ConfigError(
                f"batch size of profile '{text}' must be between 1 and max_num_seqs = "
                f"{args.max_num_seqs}, got {profile.max_concurrency}: raise --max-num-seqs"
            )
        profiles.append(profile)
    if args.resume and args.json in (None, STDOUT):
        raise ConfigError("--resume goes on with a file: give --json FILE")
    return profiles, load_policy.split_names(args.policies), named_paths(args.workload), options


def _earlier(target: Path | None, resumes: bool) -> dict[str, Any] | None:
    """Return what a file holds that is to be gone on with; refuse to lose what it holds."""
    if target is None:
        return None
    check_target(target)
    if not target.is_file() or not target.stat().st_size:
        return None
    if not resumes:
        raise ConfigError(
            f"'{target}' exists: --resume goes on with it, or give the name of another file"
        )
    return read_load_document(read_json(str(target), "the result"), str(target))


def _check_length(llm: LLM, args: argparse.Namespace) -> None:
    total = args.input_tokens + args.output_tokens
    if total > llm.max_model_len:
        raise CapacityError(
            f"input_tokens + output_tokens must be at most max_model_len = {llm.max_model_len}, "
            f"got {args.input_tokens} + {args.output_tokens} = {total}: lower --input-tokens or "
            "--output-tokens"
        )


def _scenarios(
    llm: LLM,
    setter: WaySetter,
    profiles: Sequence[Profile],
    names: Sequence[str],
    paths: Mapping[str, Path],
    args: argparse.Namespace,
) -> tuple[list[Scenario], dict[str, dict[str, Any]]]:
    """Return what is to be measured, and where the texts come from."""
    from looped_spec.offline.load_bench import Scenario

    most = max(profile.num_requests for profile in profiles)
    found: list[Scenario] = []
    provenance: dict[str, dict[str, Any]] = {}
    for group in GROUPS[::-1] if args.group == BOTH else (args.group,):
        works = [
            read_workload(
                name,
                path,
                llm.get_tokenizer(),
                group=group,
                num_rows=most,
                num_tokens=args.input_tokens,
                min_rows=1,
                joins=True,
            )
            for name, path in paths.items()
        ]
        provenance |= {work.name: work.provenance for work in works}
        kinds = {work.name: work.rows for work in works}
        default = [MIXED] if len(kinds) > 1 else list(kinds)
        for mixture in dict.fromkeys(args.mixture or default):
            for profile in profiles:
                ways = load_policy.ways(names, profile, setter.config, llm.full_loops)
                prompts = prompts_for(profile, kinds, mixture)
                found.append(Scenario(group, mixture, profile, tuple(ways), tuple(prompts)))
    return found, provenance
