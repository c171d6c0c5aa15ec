"""Checks of whole texts: whatever is drafted, they are those of a slow oracle without a cache."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from torch._subclasses import FakeTensorMode

from looped_spec.adapter import ModelAdapter
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.conformance.base import draft_depth
from looped_spec.testing.conformance.texts import (
    NEW_TOKENS,
    PARAMS,
    PROMPT_LENGTHS,
    TextChecks,
    small_engine,
    some_drafts,
)
from looped_spec.testing.drafts import with_dictated_drafts
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.stages import StageBench

_MOST_TOKENS = 512


class GenerationChecks(TextChecks):
    """Texts from the engine, greedy and seeded, over ragged batches."""

    def test_plain_decoding_gives_the_text_of_the_oracle(self, adapter: ModelAdapter) -> None:
        self.assert_lossless(adapter, small_engine(adapter), (0, 1, 2))

    @pytest.mark.parametrize("requests", [(1,), (0, 1, 2)], ids=["alone", "batch"])
    @pytest.mark.parametrize("depth", ["shallowest", "deepest"])
    @pytest.mark.parametrize("num_speculative_tokens", [1, 3])
    def test_speculation_changes_no_token(
        self,
        adapter: ModelAdapter,
        num_speculative_tokens: int,
        depth: str,
        requests: tuple[int, ...],
    ) -> None:
        draft_depth(adapter)
        deepest = adapter.geometry.default_full_loops - 1
        if depth == "deepest" and deepest == 1:
            pytest.skip("geometry: there is one draft depth only")
        engine = small_engine(
            adapter, num_speculative_tokens, 1 if depth == "shallowest" else deepest
        )
        self.assert_lossless(adapter, engine, requests)

    def test_a_text_of_rejected_drafts_alone_is_unchanged(self, adapter: ModelAdapter) -> None:
        depth = draft_depth(adapter)
        engine = small_engine(with_dictated_drafts(adapter, {}), 3, depth)
        self.assert_lossless(adapter, engine, (0, 1, 2))

    def test_a_text_of_accepted_drafts_is_unchanged(self, adapter: ModelAdapter) -> None:
        depth = draft_depth(adapter)
        right: dict[tuple[int, int], int] = {}
        for number in (0, 1, 2):
            expected = self.oracle(adapter, number)
            seed = PARAMS[number].seed or 0
            right |= {
                (seed, PROMPT_LENGTHS[number] + index): token
                for index, token in enumerate(expected)
            }
        engine = small_engine(with_dictated_drafts(adapter, right), 3, depth)
        self.assert_lossless(adapter, engine, (0, 1, 2))

    def test_an_end_token_inside_a_draft_ends_the_text(self, adapter: ModelAdapter) -> None:
        depth = draft_depth(adapter)
        prompt = self.prompt(adapter, 2)
        for seed in range(20):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=NEW_TOKENS)
            text = self.oracle(adapter, 2, params)
            if text[2] not in text[:2]:
                break
        else:
            pytest.skip("the model says one token over and over")
        right = {(seed, len(prompt) + index): token for index, token in enumerate(text)}
        dictated = with_dictated_drafts(adapter, right)
        engine = small_engine(dictated, 4, depth, eos_token_ids=(text[2],))
        (request,) = run_all(engine, [prompt], params)
        self.assert_text(adapter, prompt, request.output_token_ids, text[:3], params)
        if request.output_token_ids == text[:3]:
            assert request.finish_reason == "stop"

    def test_a_text_may_reach_the_longest_length(self, adapter: ModelAdapter) -> None:
        longest = adapter.geometry.max_model_len
        if longest > _MOST_TOKENS:
            pytest.skip(
                f"geometry: texts of {longest} tokens take too long, give a tiny model less"
            )
        k, depth = some_drafts(adapter)
        prompt: list[int] = self.sample_tokens(adapter, 1, longest - NEW_TOKENS)[0].tolist()
        # The other request has longer to go, and no draft is right: those of the first, which is a
        # token short of its end, run over it.
        prompts, params = [prompt, prompt[:1]], [PARAMS[0], replace(PARAMS[1], max_tokens=12)]
        engine = make_engine(
            with_dictated_drafts(adapter, {}),
            num_speculative_tokens=k,
            draft_loops=depth,
            max_model_len=longest,
        )
        try:
            requests = run_all(engine, prompts, params)
        except IndexError as error:
            raise AssertionError(
                "a stage fails at positions beyond max_model_len, where drafts at the end of a "
                "text and padding may lie: clamp what goes into a table"
            ) from error
        for known, one, request in zip(prompts, params, requests, strict=True):
            expected = self.oracle_text(adapter, known, one)
            self.assert_text(adapter, known, request.output_token_ids, expected, one)

    def test_nothing_leaks_from_a_request_to_the_next(self, adapter: ModelAdapter) -> None:
        fresh = copy.deepcopy(adapter)
        tokens = self.sample_tokens(adapter, 2, 7)
        reused = StageBench(adapter)
        reused.logits(tokens[:1], [4, 1, 2])
        logits = reused.logits(tokens[1:], [4, 1, 2])
        expected = StageBench(fresh).logits(tokens[1:], [4, 1, 2])
        self.assert_close(logits, expected, "logits after another request and alone")
        texts = []
        for model, numbers in ((adapter, (0, 1)), (fresh, (1,))):
            engine = small_engine(model, *some_drafts(adapter), max_num_seqs=1)
            requests = self.run(model, engine, numbers)
            texts.append(requests[-1].output_token_ids)
        self.assert_text(adapter, self.prompt(adapter, 1), texts[0], texts[1], PARAMS[1])

    @pytest.mark.parametrize("place", ["early", "late"])
    def test_a_prompt_in_the_middle_of_a_round_changes_no_token(
        self, adapter: ModelAdapter, place: str
    ) -> None:
        k, depth = some_drafts(adapter)
        full = adapter.geometry.default_full_loops
        before = min(2, full) if place == "early" else k * depth + full  # of so many passes
        engine = small_engine(adapter, k, depth)
        if not engine.runner.can_interrupt:
            pytest.skip("rounds do not stand still on this device")
        requests = [engine.add_request(self.prompt(adapter, n), PARAMS[n]) for n in (0, 1)]
        engine.step()

        def take_newcomers() -> bool:
            nonlocal before
            before -= 1
            if not before:
                requests.append(engine.add_request(self.prompt(adapter, 2), PARAMS[2]))
            return not before

        while engine.has_work:
            engine.step(None, take_newcomers)
        assert len(requests) == 3, "nobody came in the middle of a round"
        for number, request in enumerate(requests):
            prompt, expected = self.prompt(adapter, number), self.oracle(adapter, number)
            self.assert_text(adapter, prompt, request.output_token_ids, expected, PARAMS[number])

    def test_what_the_cache_held_before_is_never_seen(self, adapter: ModelAdapter) -> None:
        tokens = self.sample_tokens(adapter, 2, 7)
        outputs = []
        for value in (0.0, 30.0):
            bench = StageBench(adapter, seeds=(1, 2))
            bench.fill(range(len(bench.pool.planes)), slice(None), value)
            outputs.append(bench.logits(tokens, [4, 1, 2]))
        self.assert_close(outputs[1], outputs[0], "logits over a clean and a dirty cache")

    def test_aborting_frees_everything(self, adapter: ModelAdapter) -> None:
        engine = small_engine(adapter, *some_drafts(adapter))
        aborted = [
            engine.add_request(self.prompt(adapter, number), PARAMS[number]) for number in (0, 2)
        ]
        for _ in range(2):
            engine.step()
        for request in aborted:
            engine.abort(request)
        assert not engine.has_work
        allocator = engine.scheduler.allocator
        assert allocator.num_free == allocator.num_blocks
        self.assert_lossless(adapter, engine, (1,))

    def test_a_round_reads_no_tensor_on_the_host(self, adapter: ModelAdapter) -> None:
        num_drafts, depth = some_drafts(adapter)
        fake = copy.deepcopy(adapter)  # What a model keeps from this run is no number.
        tokens = self.sample_tokens(adapter, 2, 1)
        with FakeTensorMode(allow_non_fake_inputs=True):
            bench = StageBench(fake, seeds=(1, 2))
            for step in range(num_drafts):
                ctx = bench.context(3, num_drafts).column(step, bench.full_loops)
                state = bench.prelude(tokens, ctx)
                for index in range(depth):
                    state = bench.loop(state, index, ctx)
                bench.draft_readout(state, ctx)
            bench.logits(tokens)
