"""How deep a model runs, and by which (K, d) or exit rule: the options and what it suggests."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from looped_spec.adapter import ModelAdapter
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError, UnsupportedError, check_int, closest
from looped_spec.options import EngineOptions
from looped_spec.runtime.early_exit import ExitRule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPlan:
    """The depth of every run, the first (K, d), and the exit rule (None: full depth always)."""

    full_loops: int
    candidate: Candidate
    exit_rule: ExitRule | None


def plan_run(options: EngineOptions, adapter: ModelAdapter) -> RunPlan:
    """Complete the options by what the adapter suggests; needs no weights.

    Raises:
        ConfigError: a depth, K, d or max_model_len is out of the model's range.
        UnsupportedError: early exit was asked of a model that gives no signal for it.
    """
    limit = adapter.geometry.max_model_len
    if options.max_model_len is not None and options.max_model_len > limit:
        raise ConfigError(
            f"max_model_len must be at most {limit} for this model, got {options.max_model_len}"
        )
    full_loops = adapter.geometry.check_full_loops(
        adapter.geometry.default_full_loops if options.full_loops is None else options.full_loops
    )
    rule = choose_exit_rule(options, adapter, full_loops)
    if rule is not None:
        return RunPlan(rule.max_loops, PLAIN, rule)
    return RunPlan(full_loops, choose_candidate(options, adapter, full_loops), None)


def choose_candidate(options: EngineOptions, adapter: ModelAdapter, full_loops: int) -> Candidate:
    """Return the (K, d) of the options, or what the adapter suggests where they give none."""
    k = options.num_speculative_tokens
    if k is not None:
        return complete_candidate(k, options.draft_loops, adapter, full_loops)
    if full_loops < 2:
        return PLAIN
    if adapter.default_speculation is None:
        if adapter.speculation_note:
            logger.info("speculation is off by default: %s", adapter.speculation_note)
        return PLAIN
    return complete_candidate(adapter.default_speculation[0], None, adapter, full_loops)


def complete_candidate(
    num_speculative_tokens: int, draft_loops: int | None, adapter: ModelAdapter, full_loops: int
) -> Candidate:
    """Return a (K, d) that the model can do; d left out is what the adapter suggests."""
    if draft_loops is None:
        suggested = adapter.default_speculation
        draft_loops = min(suggested[1] if suggested else 1, max(full_loops - 1, 1))
    return Candidate(num_speculative_tokens, draft_loops).check(full_loops)


def choose_exit_rule(
    options: EngineOptions, adapter: ModelAdapter, full_loops: int
) -> ExitRule | None:
    """Return the exit rule of the options, None where early exit was not asked for."""
    if not options.early_exit:
        return None
    criteria = {criterion.name: criterion for criterion in adapter.capabilities.early_exit}
    if not criteria:
        raise UnsupportedError(
            "early exit was asked for, but this model family declares no signal for it: leave out "
            "exit_threshold and exit_criterion"
        )
    name = options.exit_criterion or next(iter(criteria))
    if name not in criteria:
        raise ConfigError(
            f"exit_criterion must be one of {', '.join(criteria)}, "
            f"got '{name}'{closest(name, criteria)}"
        )
    threshold = options.exit_threshold
    if threshold is None:
        threshold = criteria[name].default_threshold
    max_loops = full_loops if options.max_loops is None else options.max_loops
    check_int("max_loops", max_loops, 1, full_loops)
    min_loops = 1 if options.min_loops is None else options.min_loops
    check_int("min_loops", min_loops, 1, max_loops)
    return ExitRule(name, threshold, min_loops, max_loops)
