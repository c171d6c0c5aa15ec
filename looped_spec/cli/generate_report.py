"""How `looped-spec generate` shows its results: for people, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from looped_spec.cli.compare import Comparison
from looped_spec.cli.generation import Prompt, Setting
from looped_spec.cli.tables import number, percent, plain_table
from looped_spec.offline.timing import Generated, Run
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.version import __version__

if TYPE_CHECKING:
    from looped_spec.runtime.early_exit import ExitRule
    from looped_spec.runtime.llm import LLM

SCHEMA_VERSION = 1


def run_summary(run: Run, setting: Setting, rule: ExitRule | None = None) -> str:
    """Say on one line what a run did; `rule` is that of early exit, None without it."""
    text = (
        f"{run.num_tokens} tokens in {run.seconds:.2f} s, "
        f"{number(run.tokens_per_second, 1)} tokens/s"
    )
    if rule is not None:
        return (
            f"{text}, early exit by {rule.criterion} at {rule.threshold:g}: "
            f"{number(run.metrics.loops_per_round)} loops per token, "
            f"{rule.min_loops} to {rule.max_loops} allowed"
        )
    if setting.is_off:
        return f"{text}, speculation off"
    return f"{text}, {_speculation_text(run.metrics, setting)}"


def comparison_summary(result: Comparison) -> str:
    """Say on one line how the two ways of decoding compare."""
    return (
        f"speedup {number(result.speedup, 2, 'x')} over plain decoding, "
        f"{_speculation_text(result.metrics, result.setting)}, "
        f"tokens {'identical' if result.difference is None else 'NOT identical'}"
    )


def comparison_table(result: Comparison) -> str:
    """Return the table of `--compare` and below it how it was measured."""
    plain, speculative, metrics = result.plain, result.speculative, result.metrics
    is_ideal = result.setting.candidate is not None
    predicted = number(result.predicted_speedup, 2, "x")
    by_position = " ".join(map(percent, metrics.acceptance_by_position)) or "-"
    rows = [
        (
            "tokens/s, median",
            number(plain.tokens_per_second, 1),
            number(speculative.tokens_per_second, 1),
        ),
        ("tokens/s, slowest to fastest", _spread(plain.rates), _spread(speculative.rates)),
        ("speedup", "1.00x", number(result.speedup, 2, "x")),
        *([("speedup predicted by the ideal model", "", predicted)] if is_ideal else []),
        ("draft acceptance rate", "", percent(metrics.draft_acceptance_rate)),
        ("acceptance by position", "", by_position),
        ("mean accepted length", "", number(metrics.mean_acceptance_length)),
        ("identical tokens", "", _identical_text(result)),
    ]
    count = len(plain.outputs)
    return (
        plain_table(("", "plain", f"{result.setting.label} D={result.setting.full_loops}"), rows)
        + f"\n\nTimed: whole calls with {count} prompt{'s' * (count != 1)} in one call, from text "
        f"to text (prefill included);\n{len(plain.runs)} of each in turn, after an untimed warm-up "
        "of each.\n"
        + (
            "Ideal model: D (1 + K alpha) / (D + d K), alpha the draft acceptance rate.\n"
            * is_ideal
        )
    )


def results_text(
    prompts: Sequence[Prompt],
    outputs: Sequence[Generated],
    show_prompts: bool = False,
    has_tokenizer: bool = True,
) -> str:
    """Lay out texts in the order of their prompts; several get a header each.

    Token ids stand for the text of a model that has no tokenizer.
    """
    parts = []
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        header = f"=== {index} of {len(prompts)} ===\n" if len(prompts) > 1 else ""
        shown = output.text if has_tokenizer else str(output.token_ids)
        if show_prompts:
            parts.append(f"{header}--- prompt ---\n{prompt}\n--- text ---\n{shown}\n")
        else:
            parts.append(f"{header}{shown}\n")
    return "\n".join(parts)


def run_document(llm: LLM, prompts: Sequence[Prompt], run: Run, setting: Setting) -> dict[str, Any]:
    """Return the JSON of a run without comparison."""
    side = _side(run.tokens_per_second, [run])
    key = "plain"
    rule = llm.engine.runner.exit_rule
    if rule is not None:
        key = "early_exit"
        side |= dataclasses.asdict(rule) | {"loops_per_token": run.metrics.loops_per_round}
    elif not setting.is_off:
        key = "speculative"
        side |= _acceptance(run.metrics)
    return _document(llm, prompts, run.outputs, setting) | {key: side}


def comparison_document(llm: LLM, prompts: Sequence[Prompt], result: Comparison) -> dict[str, Any]:
    """Return the JSON of a comparison; `outputs` are those of speculative decoding."""
    difference = result.difference
    return _document(llm, prompts, result.speculative.outputs, result.setting) | {
        "plain": _side(result.plain.tokens_per_second, result.plain.runs),
        "speculative": _side(result.speculative.tokens_per_second, result.speculative.runs)
        | _acceptance(result.metrics),
        "speedup": result.speedup,
        "predicted_speedup": result.predicted_speedup,
        "identical": difference is None,
        "first_difference": None if difference is None else dataclasses.asdict(difference),
        "repeats": len(result.plain.runs),
    }


def _document(
    llm: LLM, prompts: Sequence[Prompt], outputs: Sequence[Generated], setting: Setting
) -> dict[str, Any]:
    candidate = setting.candidate
    return {
        "schema_version": SCHEMA_VERSION,
        "model": llm.loaded.name,
        "full_loops": llm.full_loops,
        "policy": setting.policy,
        "num_speculative_tokens": candidate.num_speculative_tokens if candidate else None,
        "draft_loops": candidate.draft_loops if candidate else None,
        "cache_tokens": llm.engine.runner.pool.num_blocks * llm.engine.runner.pool.block_size,
        "prompts": list(prompts),
        "outputs": [dataclasses.asdict(output) for output in outputs],
        "machine": _machine(llm),
    }


def _machine(llm: LLM) -> dict[str, Any]:
    import torch

    device = llm.loaded.device
    is_cuda = device.type == "cuda"
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "dtype": str(llm.loaded.dtype).removeprefix("torch."),
        "cpu_count": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "looped_spec": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _side(tokens_per_second: float | None, runs: Sequence[Run]) -> dict[str, Any]:
    return {"tokens_per_second": tokens_per_second, "seconds": [run.seconds for run in runs]}


def _acceptance(metrics: SpeculationMetrics) -> dict[str, Any]:
    return {
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "acceptance_by_position": metrics.acceptance_by_position,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "num_switches": metrics.num_switches,
        "num_probe_rounds": metrics.num_probe_rounds,
        "rounds_by_candidate": [
            [c.num_speculative_tokens, c.draft_loops, count]
            for c, count in metrics.rounds_by_candidate.items()
        ],
    }


def _speculation_text(metrics: SpeculationMetrics, setting: Setting) -> str:
    return (
        f"{setting.label}{_mostly(metrics, setting)}: "
        f"draft acceptance {percent(metrics.draft_acceptance_rate)}, "
        f"mean accepted length {number(metrics.mean_acceptance_length)}"
    )


def _mostly(metrics: SpeculationMetrics, setting: Setting) -> str:
    """Say what was chosen most often, where it was chosen."""
    if setting.candidate is not None or not metrics.num_rounds:
        return ""
    candidate, count = next(iter(metrics.rounds_by_candidate.items()))
    k, d = candidate.num_speculative_tokens, candidate.draft_loops
    return f" (K={k} d={d} in {percent(count / metrics.num_rounds)} of rounds)"


def _spread(rates: Sequence[float]) -> str:
    return f"{min(rates):.1f} to {max(rates):.1f}" if rates else "-"


def _identical_text(result: Comparison) -> str:
    if result.difference is None:
        return "yes"
    return f"no: prompt {result.difference.prompt + 1}, token {result.difference.position + 1}"
