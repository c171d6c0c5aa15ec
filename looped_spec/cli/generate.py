"""Generate text with a model, plainly or by speculation, or time both side by side.

examples:
  looped-spec generate demo:NAME --prompt "Once upon a time"
  looped-spec generate MODEL --prompt-file questions.jsonl --max-tokens 64 --json answers.json
  looped-spec generate MODEL --prompt "Write a haiku." --temperature 0.8 --top-p 0.95 --seed 7
  looped-spec generate MODEL --prompt "2 + 2 =" --num-speculative-tokens 3 --draft-loops 1
  looped-spec generate MODEL --prompt "2 + 2 =" --compare
  looped-spec generate MODEL --prompt-file questions.jsonl --explain
  cat prompts.txt | looped-spec generate MODEL --prompt-file - --num-speculative-tokens 0

`looped-spec adapters` shows which models can be run, and the demos.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from looped_spec.atomic_json import check_target, json_text, write_json
from looped_spec.cli import console
from looped_spec.cli.compare import compare, no_comparison_of_early_exit, nothing_to_compare
from looped_spec.cli.engine_flags import add_engine_flags, engine_options
from looped_spec.cli.explain import explain_document, explain_text
from looped_spec.cli.generate_report import (
    comparison_document,
    comparison_summary,
    comparison_table,
    results_text,
    run_document,
    run_summary,
)
from looped_spec.cli.generation import Prompt, Setting, run_batch, run_streaming
from looped_spec.cli.model_loading import load_model, memory_errors
from looped_spec.cli.prompts import add_prompt_flags, check_prompts, read_prompts
from looped_spec.cli.sampling_flags import add_sampling_flags, sampling_params
from looped_spec.errors import ConfigError
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

STDOUT = "-"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `looped-spec generate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} MODEL (--prompt TEXT | --prompt-file FILE) [flags]"
    parser.add_argument("model", metavar="MODEL", help="demo:NAME, a local folder, or a hub id")
    add_prompt_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(
        parser,
        seed="seed of requests and of dummy weights; each further prompt gets one more, but all "
        "the same at temperature 0",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare",
        action="store_true",
        help="time plain and speculative decoding in turn and print both, the speedup and whether "
        "the tokens are identical",
    )
    output.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="timed runs of each for --compare, of which the median counts (default: 3)",
    )
    output.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the results as JSON to FILE, or to stdout instead of the text",
    )
    output.add_argument(
        "--explain",
        action="store_true",
        help="say at the end which K and d were chosen and why: on stderr, and in the JSON",
    )
    output.add_argument(
        "-v", "--verbose", action="store_true", help="log what is loaded and chosen on stderr"
    )


def run(args: argparse.Namespace) -> int:
    """Generate; everything that can be checked without the model is checked before it is loaded."""
    if args.compare and (args.exit_threshold is not None or args.exit_criterion is not None):
        raise no_comparison_of_early_exit()
    options = engine_options(args)
    placed = read_prompts(args)
    prompts = [prompt for _, prompt in placed]
    params = sampling_params(args, len(prompts))
    repeats = _repeats(args)
    target = None if args.json in (None, STDOUT) else Path(args.json)
    if target is not None:
        check_target(target)
    with console.log_level(args.verbose), memory_errors():
        llm = load_model(args.model, options)
        has_tokenizer = _has_tokenizer(llm)
        check_prompts(placed, llm.loaded.adapter.geometry.vocab_size, has_tokenizer)
        if args.compare:
            document, summary = _compare(
                llm, prompts, params, repeats, args.json == STDOUT, has_tokenizer
            )
        else:
            document, summary = _generate(llm, prompts, params, args.json == STDOUT, has_tokenizer)
        if args.explain:
            document |= {"explain": explain_document(llm)}
            summary = f"{summary}\n{explain_text(llm)}"
    if args.json == STDOUT:
        console.write(json_text(document))
    elif target is not None:
        write_json(target, document)
    console.note(summary)  # Last, so that a failure is the only line.
    return 0


def _repeats(args: argparse.Namespace) -> int:
    if args.repeats is not None and not args.compare:
        raise ConfigError("--repeats counts the runs of --compare: add --compare or leave it out")
    repeats = 3 if args.repeats is None else int(args.repeats)
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    if args.compare and args.num_speculative_tokens == 0:
        raise nothing_to_compare()
    return repeats


def _has_tokenizer(llm: LLM) -> bool:
    try:
        llm.get_tokenizer()
    except ConfigError:
        return False
    return True


def _generate(
    llm: LLM,
    prompts: list[Prompt],
    params: list[SamplingParams],
    is_json: bool,
    has_tokenizer: bool,
) -> tuple[dict[str, Any], str]:
    """Run the prompts once and show the texts; return the JSON document and the summary."""
    setting = Setting.of(llm)
    streams = len(prompts) == 1 and not is_json and has_tokenizer
    if streams and console.is_terminal(sys.stdout):
        try:
            result = run_streaming(llm, prompts[0], params[0], console.write)
        except KeyboardInterrupt:
            console.write("\n")  # So that what is said of it has a line of its own.
            raise
        console.write("\n")
    else:
        use_tqdm = len(prompts) > 1 and console.is_terminal(sys.stderr)
        result = run_batch(llm, prompts, params, use_tqdm)
        if not is_json:
            console.write(results_text(prompts, result.outputs, has_tokenizer=has_tokenizer))
    summary = run_summary(result, setting, llm.engine.runner.exit_rule)
    return run_document(llm, prompts, result, setting), summary


def _compare(
    llm: LLM,
    prompts: list[Prompt],
    params: list[SamplingParams],
    repeats: int,
    is_json: bool,
    has_tokenizer: bool,
) -> tuple[dict[str, Any], str]:
    """Time both ways and show texts and table; return the JSON document and the summary."""
    with tqdm(
        total=2 * (1 + repeats),
        desc="Runs",
        leave=False,
        disable=not console.is_terminal(sys.stderr),
    ) as bar:
        result = compare(llm, prompts, params, repeats, progress=bar.update)
    if not is_json:
        outputs = result.speculative.outputs
        console.write(results_text(prompts, outputs, True, has_tokenizer) + "\n")
        console.write(comparison_table(result))
    return comparison_document(llm, prompts, result), comparison_summary(result)
