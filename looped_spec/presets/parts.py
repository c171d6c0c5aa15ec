"""What a preset holds beside its configuration and costs: acceptance, and where it comes from."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from looped_spec.errors import ConfigError, check_int, is_number, shown_number
from looped_spec.presets.fields import (
    as_list,
    as_object,
    check_one_of,
    check_text,
    values_of,
)

KINDS = ("measured", "published", "modelled")
"""How the numbers of a part came about, the best first."""

GROUPS = ("selection", "evaluation", None)
"""Which of the disjoint groups of a workload's items: candidates are chosen on the one, and
reported on the other; null where there are no such groups, as in a publication."""


@dataclass(frozen=True)
class AcceptanceEntry:
    """How many drafts of one depth a workload accepted, by position.

    Attributes:
        workload: kind of text, such as "gsm8k".
        group: one of `GROUPS`.
        draft_loops: d.
        accepted: at index i, of the requests that had i drafts accepted and a further one, how many
            had that one accepted too; not whole numbers where they are derived from rates.
        trials: how many such requests there were, so that accepted[i] / trials[i] is the chance of
            draft i + 1 once those before it were accepted.
        kind: how this entry came about, where that is not what the provenance of the preset's
            acceptance says; null: as that says.
    """

    workload: str
    group: str | None
    draft_loops: int
    accepted: tuple[float, ...]
    trials: tuple[float, ...]
    kind: str | None = None

    def __post_init__(self) -> None:
        check_text("workload of acceptance", self.workload)
        check_one_of("group of acceptance", self.group, GROUPS)
        check_one_of("kind of acceptance", self.kind, (*KINDS, None))
        check_int("draft_loops of acceptance", self.draft_loops, 1)
        for name in ("accepted", "trials"):
            counts = tuple(as_list(getattr(self, name), f"{name} of acceptance"))
            for count in counts:
                if not is_number(count) or count < 0:
                    shown = shown_number(count)
                    raise ConfigError(
                        f"{name} of acceptance must be numbers of at least 0, got {shown}"
                    )
            object.__setattr__(self, name, counts)
        if len(self.accepted) != len(self.trials) or not self.trials:
            raise ConfigError(
                "accepted and trials of acceptance must have one number for each position, got "
                f"{len(self.accepted)} and {len(self.trials)}"
            )
        for position, (hits, count) in enumerate(zip(self.accepted, self.trials, strict=True)):
            if hits > count:
                raise ConfigError(
                    f"accepted of acceptance must not exceed trials, got {hits:g} of {count:g} at "
                    f"position {position + 1}"
                )

    @property
    def chances(self) -> tuple[float, ...]:
        """p_1, p_2, ...: the chance of each draft once those before it were accepted; ends where
        there were no trials."""
        rates = []
        for hits, count in zip(self.accepted, self.trials, strict=True):
            if count == 0:
                break
            rates.append(hits / count)
        return tuple(rates)

    def tokens(self, num_speculative_tokens: int) -> float:
        """Return E(K) = 1 + p_1 + p_1 p_2 + ..., the tokens that a round is expected to commit.

        Positions behind the last that was tried are taken to be like it.
        """
        total = survival = 1.0
        chances = self.chances
        for position in range(num_speculative_tokens if chances else 0):
            survival *= chances[min(position, len(chances) - 1)]
            total += survival
        return total

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a JSON document."""
        return asdict(self) | {"accepted": list(self.accepted), "trials": list(self.trials)}

    @classmethod
    def from_json(cls, document: Any) -> AcceptanceEntry:
        """Read what `to_json` wrote."""
        return cls(**values_of(cls, document, "an entry of acceptance"))


@dataclass(frozen=True)
class WorkloadRecord:
    """Which text was used, without the text.

    Attributes:
        items: how many texts were used.
        group: one of `GROUPS`.
        sha256: of the file, 64 hexadecimal digits; null where nobody said.
        file: name of the file, without its folder.
        bytes: of the file.
        documents: texts in the file, of all groups.
        tokens_each: tokens that a prompt was cut to.
        sha256_of_token_ids: of the prompts as they were used: a line of ids each.
    """

    items: int
    group: str | None = None
    sha256: str | None = None
    file: str | None = None
    bytes: int | None = None
    documents: int | None = None
    tokens_each: int | None = None
    sha256_of_token_ids: str | None = None

    def __post_init__(self) -> None:
        check_int("items of a workload", self.items, 0)
        check_one_of("group of a workload", self.group, GROUPS)
        check_text("file of a workload", self.file, optional=True)
        for name in ("bytes", "documents", "tokens_each"):
            if getattr(self, name) is not None:
                check_int(f"{name} of a workload", getattr(self, name), 0)
        for name in ("sha256", "sha256_of_token_ids"):
            value = getattr(self, name)
            is_hash = isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value)
            if value is not None and not is_hash:
                raise ConfigError(
                    f"{name} of a workload must be 64 hexadecimal digits, got {value!r:.80}"
                )


@dataclass(frozen=True)
class Provenance:
    """Where a part of a preset comes from.

    Attributes:
        kind: one of `KINDS`.
        date: when, as YYYY-MM-DD.
        source: the publication or file that the numbers were taken from.
        command: what makes them anew; a part needs a source or a command.
        versions: of the packages that they depend on.
        device: where they were measured; null for what is modelled.
        workloads: the texts that they were measured on, by name.
        notes: what else one must know: how gaps were filled, how far off a model is.
    """

    kind: str
    date: str
    source: str | None = None
    command: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    workloads: Mapping[str, WorkloadRecord] = field(default_factory=dict)
    notes: str | None = None

    def __post_init__(self) -> None:
        check_one_of("kind of provenance", self.kind, KINDS)
        for name in ("source", "command", "device", "notes"):
            check_text(f"{name} of provenance", getattr(self, name), optional=True)
        if self.source is None and self.command is None:
            raise ConfigError("provenance needs a source or a command")
        try:
            is_date = datetime.date.fromisoformat(self.date).isoformat() == self.date
        except (TypeError, ValueError):
            is_date = False
        if not is_date:
            raise ConfigError(f"date of provenance must be YYYY-MM-DD, got {self.date!r:.40}")
        versions = as_object(self.versions, "versions of provenance")
        for package, version in versions.items():
            check_text("name of a package", package)
            check_text(f"version of '{package}'", version)
        object.__setattr__(self, "versions", dict(sorted(versions.items())))
        for name in self.workloads:
            check_text("name of a workload", name)
        object.__setattr__(self, "workloads", dict(sorted(self.workloads.items())))

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Provenance:
        """Read what `to_json` wrote."""
        values = values_of(cls, document, "provenance")
        records = as_object(values.get("workloads", {}), "workloads of provenance")
        values["workloads"] = {
            name: WorkloadRecord(**values_of(WorkloadRecord, record, "a workload"))
            for name, record in records.items()
        }
        return cls(**values)
