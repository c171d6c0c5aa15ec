"""The units of work of offline sampling: each is measured in one go and kept as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looped_spec.control.plan import Candidate
from looped_spec.errors import ConfigError


@dataclass(frozen=True)
class CostBlock:
    """Time a round of every candidate, and twice of plain decoding, at one batch size and context.

    Attributes:
        batch_size: requests in the batch.
        context_tokens: tokens that each has cached.
        repeat: which of the repeats it is; the order of the candidates turns round with each.
    """

    batch_size: int
    context_tokens: int
    repeat: int

    @property
    def key(self) -> str:
        """The name of the record."""
        return f"cost B={self.batch_size} L={self.context_tokens} repeat={self.repeat}"


@dataclass(frozen=True)
class AcceptanceRun:
    """Complete some prompts of a workload with the longest drafts of one depth.

    Attributes:
        workload: name of the texts.
        temperature: of all requests.
        draft_loops: depth of the drafts.
        chunk: which prompts of the workload.
    """

    workload: str
    temperature: float
    draft_loops: int
    chunk: int

    @property
    def key(self) -> str:
        """The name of the record."""
        return (
            f"acceptance {self.workload} temperature={self.temperature:g} d={self.draft_loops} "
            f"chunk={self.chunk}"
        )


@dataclass(frozen=True)
class ConfirmBlock:
    """Decode real texts with the finalists, and twice plainly, at one batch size.

    Attributes:
        batch_size: requests that are kept running.
        candidates: the finalists.
        repeat: which of the repeats it is.
    """

    batch_size: int
    candidates: tuple[Candidate, ...]
    repeat: int

    @property
    def key(self) -> str:
        """The name of the record."""
        arms = " ".join(f"{c.num_speculative_tokens},{c.draft_loops}" for c in self.candidates)
        return f"confirm B={self.batch_size} [{arms}] repeat={self.repeat}"


Cell = CostBlock | AcceptanceRun | ConfirmBlock


def cell_document(cell: Cell) -> dict[str, Any]:
    """Return a cell as a JSON document."""
    if isinstance(cell, CostBlock):
        return {"kind": "cost", **vars(cell)}
    if isinstance(cell, AcceptanceRun):
        return {"kind": "acceptance", **vars(cell)}
    arms = [[c.num_speculative_tokens, c.draft_loops] for c in cell.candidates]
    return {"kind": "confirm", **vars(cell), "candidates": arms}


def read_cell(document: Mapping[str, Any]) -> Cell:
    """Read what `cell_document` wrote."""
    values = dict(document)
    kind = values.pop("kind", None)
    try:
        if kind == "cost":
            return CostBlock(**values)
        if kind == "acceptance":
            return AcceptanceRun(**values)
        if kind == "confirm":
            values["candidates"] = tuple(Candidate(*pair) for pair in values["candidates"])
            return ConfirmBlock(**values)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"a cell of kind '{kind}' cannot have {sorted(values)}") from error
    raise ConfigError(f"kind of a cell must be cost, acceptance or confirm, got {kind!r}")
