"""Nothing in a round reads on the host, has a shape by data, or leaves memory behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from round_guard import NotCapturableError, check_capturable
from torch import Tensor
from toys import BareToy, like, shared_toy

from looped_spec.control.plan import Candidate
from looped_spec.runtime.round_program import RoundProgram, RoundShape
from looped_spec.runtime.sampler import SamplingMode
from looped_spec.testing.rounds import make_program, randomize
from looped_spec.testing.toy import ToyAdapter

LOOPS = 3
ROWS = 4


def program_of(adapter: ToyAdapter, size: int = 3) -> RoundProgram:
    program = make_program(adapter, LOOPS)
    randomize(program, size, seed=0)
    return program


def run_into(
    program: RoundProgram, shape: RoundShape, depths: tuple[int, ...] = ()
) -> tuple[Callable[[], None], list[Tensor]]:
    """A round that writes its numbers to a static tensor, as captured rounds do."""
    out = torch.zeros(shape.batch_size, shape.num_columns + len(depths), dtype=torch.int64)

    def run() -> None:
        out.copy_(program(shape, depths, has_padding=True))

    return run, [*program.static_tensors, out]


@pytest.mark.parametrize("mode", list(SamplingMode))
@pytest.mark.parametrize(
    ("k", "d", "conditioned"), [(0, 0, False), (2, 1, False), (3, 2, False), (2, 1, True)]
)
@torch.inference_mode()
def test_a_round_can_be_captured(k: int, d: int, conditioned: bool, mode: SamplingMode) -> None:
    program = program_of(shared_toy(full_loops=LOOPS, depth_conditioned=conditioned))
    run, static = run_into(program, RoundShape.of(ROWS, Candidate(k, d), mode))
    run()
    assert check_capturable(run, static) > 100


@torch.inference_mode()
def test_a_round_with_shadow_depths_could_be_captured_too() -> None:
    program = program_of(like(BareToy, full_loops=LOOPS))
    run, static = run_into(program, RoundShape.of(3, Candidate(2, 1), SamplingMode.FILTERED), (2,))
    run()
    check_capturable(run, static)


KEPT: list[Tensor] = []


def reads_item(x: Tensor) -> object:
    return x * float(x.sum().item())


def reads_list(x: Tensor) -> object:
    return x.tolist()


def branches(x: Tensor) -> object:
    return x if bool((x > 0).all()) else -x


def finds(x: Tensor) -> object:
    return x.nonzero()


def selects(x: Tensor) -> object:
    return x[x > 0]


def brings(x: Tensor) -> object:
    return x + torch.tensor([1.0, 2.0, 3.0])


def keeps(x: Tensor) -> object:
    KEPT.append(x + 1)
    return x


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (reads_item, "reads a tensor on the host"),
        (reads_list, "reads a tensor on the host"),
        (branches, "reads a tensor on the host"),
        (finds, "depends on data"),
        (selects, "depends on data"),
        (brings, "from the host"),
        (keeps, "outlive the round"),
    ],
)
@torch.inference_mode()
def test_the_guard_finds_each_fault_in_a_model(fault: Any, message: str) -> None:
    class Faulty(ToyAdapter):
        def loop(self, state: Any, index: int, ctx: Any) -> Any:
            fault(torch.arange(3.0))
            return super().loop(state, index, ctx)

    program = program_of(like(Faulty, full_loops=LOOPS))
    run, static = run_into(program, RoundShape.of(2, Candidate(1, 1), SamplingMode.GREEDY))
    KEPT.clear()
    with pytest.raises(NotCapturableError, match=message):
        check_capturable(run, static)
