"""From a model and the files of a user to a plan and what carries it out."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from looped_spec.errors import ConfigError
from looped_spec.offline.measurer import Measurer
from looped_spec.offline.plan import SamplingPlan
from looped_spec.offline.repetition import is_echo
from looped_spec.offline.settings import SamplingSettings
from looped_spec.offline.workloads import SELECTION, Workload, read_workloads
from looped_spec.version import __version__

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

MIN_ROWS = 2
"""Texts of each workload below which nothing is measured on it."""


def make_measurer(llm: LLM, paths: Mapping[str, Path], settings: SamplingSettings) -> Measurer:
    """Read the workloads and plan what is measured.

    Raises:
        ConfigError: a workload is unreadable, too small, or repeats itself; or a K or d is out of
            the model's range.
        CapacityError: a text would be longer than the engine allows, or a batch larger.
    """
    works = read_workloads(
        paths,
        llm.get_tokenizer(),
        group=SELECTION,
        num_rows=settings.prompts,
        num_tokens=settings.prompt_tokens,
        min_rows=min(settings.prompts, MIN_ROWS),
    )
    for work in works:
        _refuse_echo(work)
    run = llm.identity
    plan = SamplingPlan(
        model=run.model,
        revision=run.revision,
        adapter=run.adapter,
        adapter_options=dict(run.adapter_options),
        full_loops=run.full_loops,
        device_name=run.device_name,
        dtype=run.dtype,
        reads_shadows=llm.engine.runner.can_read_shadows,
        settings=settings,
        workloads={work.name: work.provenance for work in works},
        versions={
            "looped-spec": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        execution=run.execution,
    )
    plan.candidates()  # refuses what the model cannot do
    plan.check_length(llm.max_model_len)
    pool = llm.engine.runner.pool
    plan.check_memory(pool.num_blocks, pool.block_size)
    return Measurer(llm, plan, {work.name: work.rows for work in works})


def _refuse_echo(work: Workload) -> None:
    """Raise `ConfigError` where most prompts repeat themselves: a model then echoes them, and
    every draft is accepted."""
    echoes = sum(is_echo(row) for row in work.rows)
    if 2 * echoes > len(work.rows):
        raise ConfigError(
            f"workload {work.name} repeats itself in {echoes} of {len(work.rows)} prompts: a model "
            "echoes such text, and its drafts are accepted more often than those of other text; "
            "give texts that do not repeat"
        )
