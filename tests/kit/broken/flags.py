"""Faults in what is declared: capabilities that the code does not have, and odd exits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from broken.case import BrokenToy
from looped_spec.adapter import Capabilities, ExitCriterion, LoopState, StageContext
from looped_spec.errors import UnsupportedError

GATE = ExitCriterion("gate", 0.9)


class ShadowReadoutThatWrites(BrokenToy):
    """Shadow readouts are declared harmless, but the readout has a plane of its own."""

    caught_by = ("test_a_shadow_readout_writes_no_plane",)
    can = Capabilities(shadow_depths=True)


class ExitThatRaises(BrokenToy):
    """A criterion is declared and not implemented."""

    caught_by = (
        "test_exit_scores_are_one_fp32_number_a_row",
        "test_scoring_changes_no_logits",
    )

    def exit_score(self, *rest: object) -> Tensor:  # type: ignore[override]
        raise NotImplementedError


class Scoring(BrokenToy):
    """A healthy criterion that is not cumulative, for the faults below."""

    can = Capabilities(early_exit=(GATE,))

    def exit_score(
        self,
        criterion: str,
        state: LoopState,
        previous: LoopState,
        previous_score: Tensor | None,
        index: int,
        ctx: StageContext,
    ) -> Tensor:
        if criterion != "gate":
            raise UnsupportedError(f"no criterion '{criterion}'")
        return self.gate(state, previous_score)

    def gate(self, state: LoopState, previous_score: Tensor | None) -> Tensor:
        """Return the probability to leave here, which need not grow."""
        return torch.sigmoid(4 * state[0].mean(dim=-1))


class ExitThatFalls(Scoring):
    """A probability per loop is declared as if it were cumulative."""

    caught_by = ("test_monotone_scores_never_fall",)
    can = Capabilities(early_exit=(ExitCriterion("gate", 0.9, monotone=True),))


class ExitOfTheBatch(Scoring):
    """A score is relative to the other requests."""

    caught_by = (
        "test_exit_scores_do_not_depend_on_other_rows",
        "test_texts_with_early_exit_do_not_depend_on_the_batch",
    )

    def gate(self, state: LoopState, previous_score: Tensor | None) -> Tensor:
        score = super().gate(state, previous_score)
        return score / score.max()


class ExitInHalfPrecision(Scoring):
    """A score is left in bfloat16, where a probability near 1 is rounded to 1."""

    caught_by = ("test_exit_scores_are_one_fp32_number_a_row",)

    def gate(self, state: LoopState, previous_score: Tensor | None) -> Tensor:
        return super().gate(state, previous_score).bfloat16()


class ExitWithAnyName(BrokenToy):
    """No criterion is declared, and yet every name gets a score."""

    caught_by = ("test_what_is_not_declared_cannot_be_scored",)
    can = Capabilities()

    def exit_score(self, criterion: str, state: LoopState, *rest: object) -> Tensor:  # type: ignore[override]
        return state[0].float().mean(dim=-1)


class ExitWithUnknownNames(Scoring):
    """A criterion that is not declared gets the score of the declared one."""

    caught_by = ("test_an_unknown_criterion_is_refused",)

    def exit_score(self, criterion: str, *rest: object) -> Tensor:  # type: ignore[override]
        return super().exit_score("gate", *rest)  # type: ignore[arg-type]


class ExitThatMovesTheState(Scoring):
    """Scoring norms the state in place."""

    caught_by = (
        "test_scoring_changes_no_logits",
        "test_an_exit_that_is_never_reached_changes_no_text",
    )

    def gate(self, state: LoopState, previous_score: Tensor | None) -> Tensor:
        state[0].copy_(self.module.norm(state[0]))
        return super().gate(state, previous_score)


class ExitThatWritesALoopPlane(BrokenToy):
    """A score is read out through the plane of the first loop."""

    caught_by = (
        "test_scoring_writes_readout_planes_at_most",
        "test_scoring_changes_no_logits",
    )

    def exit_score(self, criterion: str, state: LoopState, *rest: Any) -> Tensor:  # type: ignore[override]
        self.module.coda(state[0], 2, rest[-1])
        return super().exit_score(criterion, state, *rest)


class TwiceTheSameName(BrokenToy):
    """Two criteria share a name."""

    caught_by = ("test_exit_criteria_have_names_of_their_own_and_thresholds",)
    can = Capabilities(early_exit=(GATE, ExitCriterion("gate", 0.5)))


class DraftsOfNoToken(BrokenToy):
    """The suggested K is none."""

    caught_by = ("test_default_speculation_is_in_range",)
    default_speculation = (0, 1)


class WrongVocabulary(BrokenToy):
    """The geometry counts rows that the head does not have."""

    caught_by = ("test_logits_have_an_entry_for_every_token",)

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.geometry = replace(self.geometry, vocab_size=self.geometry.vocab_size - 1)


class SizesOutOfRange(BrokenToy):
    """The default depth is deeper than the deepest."""

    caught_by = ("test_the_sizes_are_sane",)

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.geometry = replace(self.geometry, max_full_loops=1)


FAULTS = (
    ShadowReadoutThatWrites,
    ExitThatRaises,
    ExitThatFalls,
    ExitOfTheBatch,
    ExitInHalfPrecision,
    ExitWithAnyName,
    ExitWithUnknownNames,
    ExitThatMovesTheState,
    ExitThatWritesALoopPlane,
    SizesOutOfRange,
    TwiceTheSameName,
    DraftsOfNoToken,
    WrongVocabulary,
)
