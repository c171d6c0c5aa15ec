"""How deep a model runs, and by which speculation or exit rule: the options, and what it
suggests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from looped_spec.adapter import ModelAdapter
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.plan import PLAIN
from looped_spec.errors import ConfigError, UnsupportedError, check_int, closest
from looped_spec.options import EngineOptions
from looped_spec.presets.lookup import PresetChoice
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.preset_use import preset_config
from looped_spec.runtime.speculation import Speculation, choose_speculation

logger = logging.getLogger(__name__)

_NOT_LOOKED_FOR = PresetChoice(reason="other options say what runs")


@dataclass(frozen=True)
class RunPlan:
    """The depth of every run, its speculation, the exit rule (None: full depth always), and the
    preset that it starts from."""

    full_loops: int
    speculation: Speculation
    exit_rule: ExitRule | None
    preset: PresetChoice = _NOT_LOOKED_FOR

    @property
    def description(self) -> str:
        """What is run, in a few words."""
        if self.exit_rule is not None:
            return f"early exit by {self.exit_rule.criterion} at {self.exit_rule.threshold:g}"
        speculation = self.speculation
        if isinstance(speculation, AdaptiveSpecConfig):
            return (
                f"speculation chosen by {speculation.policy} from {len(speculation.candidates)} "
                f"candidates in {len(speculation.buckets)} ranges of batch sizes"
            )
        k, d = speculation.num_speculative_tokens, speculation.draft_loops
        return f"speculation K={k} d={d}" if k else "speculation off"


def plan_run(
    options: EngineOptions,
    adapter: ModelAdapter,
    find_preset: Callable[[int], PresetChoice] | None = None,
) -> RunPlan:
    """Complete the options by what a preset says or the adapter suggests; needs no weights.

    `find_preset` returns the preset for a depth; it is not called where the options say what runs.

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
    preset = _NOT_LOOKED_FOR
    if find_preset is not None and full_loops > 1 and not options.ignores_presets:
        preset = find_preset(full_loops)
        logger.info("%s", preset.line)
    return RunPlan(full_loops, _speculation(options, adapter, full_loops, preset), None, preset)


def _speculation(
    options: EngineOptions, adapter: ModelAdapter, full_loops: int, preset: PresetChoice
) -> Speculation:
    """Return what the preset says, if there is one and it may speak.

    For a model that suggests no speculation, one that only resembles the run's may not turn it on.
    """
    policy = options.policy
    if policy is None and options.adapts and preset.preset is not None:
        policy = "goodput" if preset.preset.config.policy == "static" else None
    config = preset_config(preset, adapter, options.max_num_seqs, policy)
    is_off = options.adapts is None and adapter.default_speculation is None
    if config is None or (
        is_off and options.preset == "auto" and not (preset.match and preset.match.is_exact)
    ):
        return choose_speculation(options, adapter, full_loops)
    first = {bucket.candidates[bucket.initial] for bucket in config.buckets}
    if config.policy == "static" and len(first) == 1:
        return first.pop()
    return config


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
