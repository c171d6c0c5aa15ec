"""Checks of the rows: what is computed for a token depends on its own request alone."""

from __future__ import annotations

import copy

import pytest
import torch

from looped_spec.adapter import LoopState, ModelAdapter
from looped_spec.testing.conformance.base import ConformanceBase
from looped_spec.testing.oracle import dense_logits
from looped_spec.testing.stages import StageBench

_TOKENS = 9
_CHUNKINGS = ([9], [1] * 9, [4, 1, 1, 3])
_SEEDS = (5, 3, 5)


class RowChecks(ConformanceBase):
    """Chunks, batches, padding and repetition change nothing."""

    def test_states_are_tensors_of_rows(self, adapter: ModelAdapter) -> None:
        bench = StageBench(adapter, seeds=(0, 1))
        states = bench.states(self.sample_tokens(adapter, 2, 3), bench.context(0, 3))
        kinds = []
        for state in states:
            assert isinstance(state, tuple)
            for tensor in state:
                assert tensor.shape[:2] == (2, 3), "the first two axes are [B, T]"
            kinds.append([(tensor.shape, tensor.dtype) for tensor in state])
        assert all(kind == kinds[0] for kind in kinds), "every loop hands on what it got"

    def test_logits_have_an_entry_for_every_token(self, adapter: ModelAdapter) -> None:
        bench = StageBench(adapter, seeds=(0, 1))
        logits = bench.logits(self.sample_tokens(adapter, 2, 3))
        assert logits.shape == (2, 3, adapter.geometry.vocab_size)
        assert bool(torch.isfinite(logits).all())

    @pytest.mark.parametrize("sizes", _CHUNKINGS, ids=str)
    def test_chunks_give_the_logits_of_the_whole(
        self, adapter: ModelAdapter, sizes: list[int]
    ) -> None:
        tokens = self.sample_tokens(adapter, 1, _TOKENS)
        depth = adapter.geometry.default_full_loops
        expected = dense_logits(adapter, tokens[0].tolist(), depth, seed=7)
        got = StageBench(adapter, seeds=(7,)).logits(tokens, sizes)[0]
        self.assert_close(got, expected, f"logits in chunks of {sizes} and in one sequence")

    def test_a_state_depends_on_seed_and_position_alone(self, adapter: ModelAdapter) -> None:
        tokens = self.sample_tokens(adapter, 1, _TOKENS).expand(3, _TOKENS)
        runs = [StageBench(adapter, seeds=_SEEDS).chunks(tokens, sizes) for sizes in _CHUNKINGS]
        for depth in (0, adapter.geometry.default_full_loops):
            first, *others = (_joined(run, depth) for run in runs)
            for number, expected in enumerate(first):
                for other in others:
                    self.assert_close(other[number], expected, "states of two chunkings")
                self.assert_close(expected[0], expected[2], "states of requests of one seed")

    def test_a_seed_free_model_gives_the_same_logits_for_every_seed(
        self, adapter: ModelAdapter
    ) -> None:
        if not adapter.capabilities.seed_free:
            pytest.skip("capability seed_free: not declared")
        tokens = self.sample_tokens(adapter, 1, _TOKENS)
        one, other = (
            StageBench(adapter, seeds=(seed,)).logits(tokens, [6, 1, 2]) for seed in (0, 1)
        )
        self.assert_close(other, one, "logits under two seeds")

    def test_logits_do_not_depend_on_other_rows(self, adapter: ModelAdapter) -> None:
        tokens = self.sample_tokens(adapter, 3, _TOKENS)
        together = StageBench(adapter, seeds=_SEEDS).logits(tokens, [6, 1, 2])
        for row, seed in enumerate(_SEEDS):
            alone = StageBench(adapter, seeds=(seed,)).logits(tokens[row : row + 1], [6, 1, 2])
            self.assert_close(together[row], alone[0], f"logits of request {row} and alone")

    def test_logits_do_not_depend_on_padding(self, adapter: ModelAdapter) -> None:
        last_rows = (4, 0, 2)
        outputs = []
        for filler in (1, 2):
            tokens = self.sample_tokens(adapter, 3, 5)
            padding = self.sample_tokens(adapter, 3, 5, seed=filler)
            for row, last in enumerate(last_rows):
                tokens[row, last + 1 :] = padding[row, last + 1 :]
            bench = StageBench(adapter, seeds=_SEEDS)
            ctx = bench.context(0, 5, last_rows=last_rows)
            logits = bench.readout(bench.states(tokens, ctx)[-1], ctx)
            assert logits.shape[1] == 1, "the readout passes its rows through ctx.logit_rows"
            outputs.append(logits[:, 0])
        self.assert_close(outputs[1], outputs[0], "logits under two paddings")

    def test_prefill_reads_out_the_last_row_of_each_prompt(self, adapter: ModelAdapter) -> None:
        tokens = self.sample_tokens(adapter, 2, 5)
        bench = StageBench(adapter, seeds=(7, 7))
        ctx = bench.context(0, 5, last_rows=(4, 1))
        logits = bench.readout(bench.states(tokens, ctx)[-1], ctx)
        assert logits.shape[1] == 1, "the readout passes its rows through ctx.logit_rows"
        depth = adapter.geometry.default_full_loops
        for row, last in enumerate((4, 1)):
            expected = dense_logits(adapter, tokens[row, : last + 1].tolist(), depth, seed=7)[-1]
            self.assert_close(logits[row, 0], expected, f"logits of prompt {row}")

    def test_a_stage_leaves_its_inputs_as_they_are(self, adapter: ModelAdapter) -> None:
        bench = StageBench(adapter)
        ctx = bench.context(0, 3)
        tokens = self.sample_tokens(adapter, 1, 3)
        given = tokens.clone()
        state = bench.prelude(tokens, ctx)
        assert torch.equal(tokens, given)
        for index in range(bench.full_loops):
            before = copy.deepcopy(state)
            bench.draft_readout(state, ctx)
            bench.readout(state, ctx)
            _assert_same(state, before, f"a readout after {index} loops")
            after = bench.loop(state, index, ctx)
            _assert_same(state, before, f"loop {index}")
            state = after

    def test_two_runs_are_identical(self, adapter: ModelAdapter) -> None:
        tokens = self.sample_tokens(adapter, 2, _TOKENS)
        runs = [StageBench(adapter, seeds=(1, 2)).logits(tokens, [5, 1, 3]) for _ in range(2)]
        assert torch.equal(runs[0], runs[1])

    def test_half_precision_runs_through_every_stage(self, adapter: ModelAdapter) -> None:
        half = copy.deepcopy(adapter)
        half.module.to(torch.bfloat16)
        bench = StageBench(half, dtype=torch.bfloat16)
        logits = bench.logits(self.sample_tokens(adapter, 1, _TOKENS), [5, 1, 3])
        assert bool(torch.isfinite(logits).all())

    def test_a_cuda_device_gives_the_same_logits(
        self, adapter: ModelAdapter, cuda_device: str
    ) -> None:
        tokens = self.sample_tokens(adapter, 2, _TOKENS)
        expected = StageBench(adapter, seeds=(1, 2)).logits(tokens, [5, 1, 3])
        moved = copy.deepcopy(adapter)
        moved.module.to(cuda_device)
        got = StageBench(moved, seeds=(1, 2), device=cuda_device).logits(tokens, [5, 1, 3])
        self.assert_close(got.cpu(), expected, "logits on CUDA and on the CPU")

    @pytest.fixture
    def cuda_device(self) -> str:
        """Return the name of the CUDA device; skip where there is none."""
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        return "cuda"


def _joined(chunks: list[tuple[list[LoopState], torch.Tensor]], depth: int) -> LoopState:
    """Put the states of all chunks after `depth` loops together."""
    parts = [states[depth] for states, _ in chunks]
    return tuple(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))


def _assert_same(state: LoopState, before: LoopState, what: str) -> None:
    for now, then in zip(state, before, strict=True):
        assert torch.equal(now, then), f"{what} changes the state that it is given"
