"""What is known of one installed plugin, and what two of them may not both claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from looped_spec.adapter import AdapterSpec
from looped_spec.errors import LoopedSpecError
from looped_spec.settings import PLUGINS

Status = Literal["active", "disabled", "unavailable", "incompatible", "error"]


@dataclass(frozen=True)
class PluginRecord:
    """One adapter that a plugin declares, or one plugin that never got as far as declaring any.

    Attributes:
        entry_point: name of the entry point; need not be unique.
        distribution: name of the installed distribution that has the entry point.
        version: version of that distribution.
        status: `active`, `disabled` by the allow-list, `unavailable` for want of a module,
            `incompatible` with this version of looped-spec, or `error`.
        cause: why it is not active, in one line that says what to do; None if it is.
        spec: what the plugin declares; None if it was not asked or failed.
    """

    entry_point: str
    distribution: str
    version: str
    status: Status
    cause: str | None = None
    spec: AdapterSpec | None = None

    @property
    def name(self) -> str:
        """The adapter's name, or the entry point's where no adapter is known."""
        return self.spec.name if self.spec else self.entry_point

    @property
    def model_types(self) -> tuple[str, ...]:
        """The model types that the adapter takes; empty where no adapter is known."""
        return self.spec.model_types if self.spec else ()

    @property
    def source(self) -> str:
        """Where the record comes from, for messages."""
        return f"{self.distribution} {self.version} (entry point '{self.entry_point}')"


def one_line(error: BaseException) -> str:
    """Describe an exception in one line; our own errors speak for themselves."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be shown)"
    if isinstance(error, LoopedSpecError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def mark_conflicts(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """Turn every record into an error that claims an adapter name or model type of another.

    Neither side wins, whatever else its status is: which adapter runs a model must not depend on
    the order of sys.path, nor change when a missing module is installed. Only a disabled record
    claims nothing.
    """
    claims: dict[str, list[PluginRecord]] = {}
    for record in records:
        if record.spec is None or record.status == "disabled":
            continue
        for claim in (f"adapter name '{record.name}'", *_model_type_claims(record)):
            claims.setdefault(claim, []).append(record)
    causes: dict[int, str] = {}
    for claim, claimants in claims.items():
        if len(claimants) > 1:
            for record in claimants:
                causes.setdefault(id(record), conflict_text(claim, claimants))
    return [
        replace(record, status="error", cause=causes[id(record)])
        if id(record) in causes
        else record
        for record in records
    ]


def _model_type_claims(record: PluginRecord) -> list[str]:
    """Name the model types of one record, each once; none where it takes only some models of
    them."""
    if record.spec is not None and record.spec.accepts is not None:
        return []
    return [f"model type '{model_type}'" for model_type in dict.fromkeys(record.model_types)]


def conflict_text(claim: str, claimants: Sequence[PluginRecord]) -> str:
    """Name all sides of a conflict, and what ends it; the allow-list knows only adapter names."""
    sources = list(dict.fromkeys(record.source for record in claimants))
    if len(sources) == 1:
        return f"{claim} is claimed twice by {sources[0]}: only its author can mend that"
    text = f"{claim} is claimed by {' and '.join(sources)}: uninstall all but one"
    names = [record.name for record in claimants]
    if len(set(names)) == len(names):
        text += f", or set {PLUGINS} without all but one of {', '.join(names)}"
    return text
