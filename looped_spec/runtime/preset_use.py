"""What a preset makes of a run: candidates, costs to start from, and acceptance to expect."""

from __future__ import annotations

import dataclasses

from looped_spec.adapter import ModelAdapter
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.cost import CostTable
from looped_spec.options import EngineOptions
from looped_spec.plugins import package_folder
from looped_spec.presets.expectation import starting_acceptance
from looped_spec.presets.lookup import PresetChoice, choose_preset, preset_folders
from looped_spec.presets.match import Match, RunIdentity
from looped_spec.presets.preset import Preset
from looped_spec.runtime.speculation import default_config
from looped_spec.settings import Settings


def find_preset(options: EngineOptions, run: RunIdentity, package: str | None) -> PresetChoice:
    """Return the preset for a run, as `options.preset` says; `package` is the adapter's package of
    presets.

    Raises:
        ConfigError: a preset that was asked for is not there or not for this run.
    """
    bundled = package_folder(package, "presets") if package else None
    settings = Settings.from_environment()
    return choose_preset(options.preset, run, preset_folders(settings.preset_dir, bundled))


def preset_config(
    choice: PresetChoice, adapter: ModelAdapter, max_num_seqs: int, policy: str | None
) -> AdaptiveSpecConfig | None:
    """Return what a preset lets the controller choose from in a run of up to `max_num_seqs`
    requests; None if there is no preset.

    Its costs count as measured only where all they depend on is the same, else as a prior. Its
    buckets are those of its own policy: for another one they are the usual ones.
    """
    preset, match = choice.preset, choice.match
    if preset is None or match is None:
        return None
    config = preset.config
    if policy == "static":
        config = dataclasses.replace(config, policy=policy)
    elif policy not in (None, config.policy):
        usual = default_config(adapter, preset.full_loops, max_num_seqs, policy or "goodput")
        config = dataclasses.replace(usual, shadow_cost_ratio=config.shadow_cost_ratio)
    return dataclasses.replace(
        config,
        buckets=fitted(config.buckets, max_num_seqs),
        cost=_cost(preset, match),
        acceptance_prior=config.acceptance_prior
        or starting_acceptance(preset, match.acceptance_doubt is not None),
    )


def fitted(buckets: tuple[BatchBucket, ...], max_num_seqs: int) -> tuple[BatchBucket, ...]:
    """Return buckets that end at `max_num_seqs`: those beyond are left out, the last one is cut or
    drawn out."""
    kept = [bucket for bucket in buckets if bucket.min_batch_size <= max_num_seqs]
    kept[-1] = dataclasses.replace(kept[-1], max_batch_size=max_num_seqs)
    return tuple(kept)


def _cost(preset: Preset, match: Match) -> CostTable | None:
    """Return its costs, demoted where they are of something else; None if the model's sizes tell
    more."""
    if match.cost_is_useless:
        return None
    doubt = match.cost_doubt
    kind = preset.provenance["cost"].kind
    if doubt is None and kind != "measured":
        doubt = f"the costs of the preset are {kind}"
    return dataclasses.replace(preset.cost, mismatch=doubt)
