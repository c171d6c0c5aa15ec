"""Which cells a sampling run measures, in the order of their value, and what they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from looped_spec.control.default_config import DRAFT_LENGTHS, default_depths, longest_draft
from looped_spec.control.plan import Candidate
from looped_spec.errors import CapacityError, ConfigError, reject_unknown
from looped_spec.offline.cells import AcceptanceRun, ConfirmBlock, CostBlock
from looped_spec.offline.settings import SamplingSettings

CHUNK_PROMPTS = 8
"""Prompts of one acceptance run: what a kill may lose."""


@dataclass(frozen=True)
class SamplingPlan:
    """What is measured of which model on which device.

    Attributes:
        model: its name: hub id, `demo:<name>`, or that of its folder.
        revision: of a hub model.
        adapter: name of its family.
        adapter_options: options of the family that are in force, defaults among them.
        full_loops: D.
        device_name: as a preset names it.
        dtype: of weights and activations.
        reads_shadows: runs at one depth tell of the shallower ones too.
        settings: how much is measured.
        workloads: origin of the texts by name; `items` is how many prompts there are.
        versions: of what the times depend on.
        execution: how rounds are run, as a preset is compared by it; older samples have the number
            of threads among `versions`, and nothing else of it.
    """

    model: str
    revision: str | None
    adapter: str
    adapter_options: Mapping[str, Any]
    full_loops: int
    device_name: str
    dtype: str
    reads_shadows: bool
    settings: SamplingSettings
    workloads: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, Any]
    execution: Mapping[str, str] = field(default_factory=dict)

    def candidates(self, batch_size: int | None = None) -> tuple[Candidate, ...]:
        """Return every (K, d), or those worth trying at a batch size; plain decoding is left out.

        Raises `ConfigError` for one that the model cannot do.
        """
        ks, ds = self.settings.ks, self.settings.ds
        lengths: Sequence[int] = DRAFT_LENGTHS if ks is None else ks
        if ks is None and batch_size is not None:
            lengths = [k for k in lengths if k <= longest_draft(batch_size)]
        depths = default_depths(self.full_loops) if ds is None else ds
        if not depths:
            raise ConfigError("a model of 1 loop has no cheaper draft: there is nothing to choose")
        return tuple(Candidate(k, d).check(self.full_loops) for d in depths for k in lengths)

    def check_length(self, max_model_len: int) -> None:
        """Raise `CapacityError` if a text or a context would be longer than the engine allows."""
        settings = self.settings
        longest = max(c.num_speculative_tokens for c in self.candidates())
        for name, tokens in (
            ("--context-lengths", max(settings.context_lengths) + longest + 16),
            (
                "--prompt-tokens and --screen-tokens",
                settings.prompt_tokens + settings.screen_tokens,
            ),
            (
                "--prompt-tokens and --confirm-tokens",
                settings.prompt_tokens + settings.confirm_tokens,
            ),
        ):
            if tokens > max_model_len:
                raise CapacityError(
                    f"{name} need {tokens} tokens a text, max_model_len is {max_model_len}: lower "
                    "them"
                )

    def check_memory(self, num_blocks: int, block_size: int) -> None:
        """Raise `CapacityError` if the cache does not hold the largest batch at its longest: it
        would never be run as one."""
        settings = self.settings
        longest = max(c.num_speculative_tokens for c in self.candidates())
        each = max(settings.context_lengths) + longest + 16
        flags = "--batch-sizes or --context-lengths"
        with_text = settings.prompt_tokens + settings.confirm_tokens + longest + 16
        if settings.confirm_repeats and with_text > each:
            each, flags = with_text, "--batch-sizes, --prompt-tokens or --confirm-tokens"
        size = max(settings.batch_sizes)
        needed = size * -(-each // block_size)
        if needed > num_blocks:
            raise CapacityError(
                f"{size} requests of {each} tokens need {needed} blocks of the key/value cache, "
                f"which has {num_blocks} of {block_size} tokens: lower {flags}, or raise "
                "--kv-cache-memory-bytes"
            )

    def first_cells(self) -> list[CostBlock | AcceptanceRun]:
        """Return the cells of costs and acceptance: one of everything, then the next of each."""
        settings = self.settings
        ds = sorted({c.draft_loops for c in self.candidates()})
        depths = ds[-1:] if self.reads_shadows else ds
        chunks = {name: -(-int(w["items"]) // CHUNK_PROMPTS) for name, w in self.workloads.items()}
        cells: list[CostBlock | AcceptanceRun] = []
        for turn in range(max(settings.repeats, *chunks.values())):
            cells += [
                CostBlock(size, length, turn)
                for length in settings.context_lengths
                for size in settings.batch_sizes
                if turn < settings.repeats
            ]
            cells += [
                AcceptanceRun(name, temperature, depth, turn)
                for name, count in chunks.items()
                for temperature in settings.temperatures
                for depth in depths
                if turn < count
            ]
        return cells

    def confirm_cells(self, finalists: Mapping[int, Sequence[Candidate]]) -> Iterator[ConfirmBlock]:
        """Yield the cells that run the finalists of each batch size on long texts."""
        for repeat in range(self.settings.confirm_repeats):
            for size, candidates in finalists.items():
                if candidates:
                    yield ConfirmBlock(size, tuple(candidates), repeat)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document, for the header of the samples."""
        return {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "settings"
        } | {"settings": self.settings.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SamplingPlan:
        """Read what `to_json` wrote."""
        names = [f.name for f in dataclasses.fields(cls)]
        reject_unknown(document, names, "key of a sampling plan")
        for name in names:
            if name not in document and name != "execution":
                raise ConfigError(f"a sampling plan needs {name}")
        values = dict(document)
        values["settings"] = SamplingSettings.from_json(values["settings"])
        return cls(**values)
