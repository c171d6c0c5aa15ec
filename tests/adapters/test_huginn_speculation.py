"""What speculation keeps, planes of prelude and loops, and what it writes again, the coda's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from golden import TOLERANCE, golden_prompts
from huginn_contexts import BLOCK_SIZE, make_pool, paged
from huginn_models import FOLDERS, continuation, load
from looped_spec_huginn.adapter import HuginnAdapter
from torch import Tensor

from looped_spec import SamplingParams
from looped_spec.adapter import LoopState, StageContext
from looped_spec.runtime.attention import PagedContext
from looped_spec.runtime.round import speculative_round
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits

FOLDER = FOLDERS[0]
CASE = golden_prompts(FOLDER)[1]
PLANTED = 1e3


class Planting(HuginnAdapter):
    """Leaves wrong keys and values in the coda's planes after every drafted token."""

    planted = 0

    def draft_readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Read out as ever, then spoil what the coda wrote for these rows."""
        logits = super().draft_readout(state, ctx)
        wrong = torch.full((*state[0].shape[:2], 4, 16), PLANTED)
        for plane, kind in enumerate(plane.kind for plane in self.kv_planes(1)):
            if kind == "readout":
                ctx.attend(plane, wrong, wrong, wrong)
                self.planted += 1
        return logits


@pytest.mark.parametrize(("k", "d"), [(1, 1), (4, 3), (8, 7)])
def test_coda_keys_and_values_of_drafts_are_overwritten_by_verification(k: int, d: int) -> None:
    adapter = load(FOLDER, adapter_class=Planting)
    assert isinstance(adapter, Planting)
    engine = make_engine(adapter, num_speculative_tokens=k, draft_loops=d)
    params = SamplingParams(temperature=0.0, max_tokens=len(continuation(CASE)))
    request = run_all(engine, [CASE.prompt], params)[0]
    assert request.output_token_ids == continuation(CASE)
    assert adapter.planted > 0
    for plane in engine.runner.pool.planes:
        for rows in plane:
            # The trash block is where rows past the end go, and nobody reads it.
            assert float(rows[1:].abs().max()) < PLANTED


@torch.no_grad()
def test_a_round_leaves_the_planes_that_plain_decoding_leaves() -> None:
    adapter = load(FOLDER)
    tokens = CASE.sequence("greedy_full_depth_zero_init")
    start, k, d, full_loops = 11, 4, 2, 8
    plain, speculated = make_pool(adapter, full_loops), make_pool(adapter, full_loops)
    for pool in (plain, speculated):
        _run(adapter, tokens[:start], paged(pool, 0, start, full_loops))
    out = speculative_round(
        adapter,
        lambda at, loops: paged(speculated, int(at[0, 0]), int(at[0, -1]) + 1, loops),
        torch.tensor([tokens[start]]),
        torch.tensor([start]),
        SamplingTensors(*(torch.zeros(1) for _ in range(5))),
        num_speculative_tokens=k,
        draft_loops=d,
        full_loops=full_loops,
        mode=SamplingMode.GREEDY,
    )
    accepted = int(out.accepted)
    assert out.tokens[0, : accepted + 1].tolist() == tokens[start + 1 : start + accepted + 2]
    for position in range(start, start + accepted + 1):
        _run(adapter, tokens[position : position + 1], paged(plain, position, position + 1, 8))
    valid = slice(BLOCK_SIZE, BLOCK_SIZE + start + accepted + 1)
    for expected_pair, pair in zip(plain.planes, speculated.planes, strict=True):
        for expected, rows in zip(expected_pair, pair, strict=True):
            torch.testing.assert_close(
                rows.flatten(0, 1)[valid], expected.flatten(0, 1)[valid], atol=TOLERANCE, rtol=0
            )


def test_every_loop_of_a_position_is_computed_once_and_the_codas_twice() -> None:
    writes: Counter[tuple[str, int, int]] = Counter()

    class Counting(PagedContext):
        def attend(
            self, plane: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
        ) -> Tensor:
            for position in self.positions[0].tolist():
                writes[planes[plane].kind, plane, position] += 1
            return super().attend(plane, q, k, v, scale=scale)

    adapter = load(FOLDER)
    planes = adapter.kv_planes(8)
    pool = make_pool(adapter, 8)
    k = 3

    def context(at: Tensor, loops: int) -> PagedContext:
        return paged(pool, int(at[0, 0]), int(at[0, -1]) + 1, loops, Counting)

    with torch.no_grad():
        speculative_round(
            adapter,
            context,
            torch.tensor([5]),
            torch.tensor([0]),
            SamplingTensors(*(torch.zeros(1) for _ in range(5))),
            num_speculative_tokens=k,
            draft_loops=2,
            full_loops=8,
            mode=SamplingMode.GREEDY,
        )
    assert len(writes) == len(planes) * (k + 1)
    for (kind, _, position), times in writes.items():
        # The row of the bonus token is not read out while drafting.
        assert times == (2 if kind == "readout" and position < k else 1)


def _run(adapter: HuginnAdapter, tokens: list[int], ctx: PagedContext) -> Tensor:
    state = adapter.prelude(torch.tensor([tokens]), ctx)
    for index in range(8):
        state = adapter.loop(state, index, ctx)
    return adapter.readout(state, ctx)


@pytest.mark.parametrize("full_loops", [1, 2, 12])
def test_other_depths_than_that_of_the_config_run_and_draft(full_loops: int) -> None:
    adapter = load(FOLDER)
    k, d = (2, full_loops // 2) if full_loops > 1 else (0, 0)
    engine = make_engine(adapter, num_speculative_tokens=k, draft_loops=d, full_loops=full_loops)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    request = run_all(engine, [CASE.prompt], params)[0]
    tokens = CASE.prompt + request.output_token_ids
    expected = dense_logits(adapter, tokens, full_loops).argmax(dim=-1).tolist()
    assert request.output_token_ids == expected[len(CASE.prompt) - 1 : -1]
