"""Whatever comes, goes and is cut off, in whatever order: texts are plain decoding's, and every
block and row comes back."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toys import PROMPTS, assert_all_free, oracle_text, run_to_end, shared_toy

from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine

MANY = [
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(temperature=0.9, seed=5, max_tokens=6),
    SamplingParams(temperature=0.8, seed=6, top_p=0.9, max_tokens=1),
    SamplingParams(temperature=0.8, seed=7, top_k=4, max_tokens=14),
]
CHOICES = [(0, 0), (1, 1), (3, 2)]
TEXTS = (*PROMPTS, [*PROMPTS[0], *range(14, 20)])  # the last begins as the first


class EngineMachine(RuleBasedStateMachine):
    """An engine with little memory, and what its requests should become."""

    @initialize(
        is_async=st.booleans(),
        caches_prefixes=st.booleans(),
        block_size=st.integers(1, 5),
        tokens=st.integers(34, 80),
    )
    def start(self, is_async: bool, caches_prefixes: bool, block_size: int, tokens: int) -> None:
        self.engine = make_engine(
            shared_toy(),
            max_num_seqs=3,
            max_model_len=32,
            block_size=block_size,
            num_blocks=-(-tokens // block_size),
            max_num_batched_tokens=8,
            async_scheduling=is_async,
            prefix_caching=caches_prefixes,
        )
        self.engine.candidates = frozenset(Candidate(*one) for one in CHOICES)
        self.open: list[tuple[Request, int, SamplingParams]] = []

    @rule(
        prompt=st.integers(0, len(TEXTS) - 1), params=st.sampled_from(MANY), same_id=st.booleans()
    )
    def add(self, prompt: int, params: SamplingParams, same_id: bool) -> None:
        self.arrive(prompt, params, same_id)

    def arrive(self, prompt: int, params: SamplingParams, same_id: bool) -> None:
        request = self.engine.add_request(TEXTS[prompt], params)
        if same_id:  # a number says nothing about who it is
            request.request_id = 0
        self.open.append((request, prompt, params))

    @rule(
        prompt=st.integers(0, len(TEXTS) - 1),
        params=st.sampled_from(MANY),
        after=st.integers(0, 8),
        count=st.integers(1, 3),
    )
    def step_into_which_others_come(
        self, prompt: int, params: SamplingParams, after: int, count: int
    ) -> None:
        left = after

        def take_newcomers() -> bool:
            nonlocal left
            left -= 1
            if left != -1:
                return False
            for _ in range(count):
                self.arrive(prompt, params, same_id=False)
            return True

        self.engine.step(None, take_newcomers)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @rule(choice=st.sampled_from(CHOICES))
    def choose(self, choice: tuple[int, int]) -> None:
        self.engine.policy = StaticPolicy(Candidate(*choice))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), drops=st.booleans())
    def cut_off(self, data: Any, drops: bool) -> None:
        place = data.draw(st.integers(0, len(self.open) - 1))
        request, prompt, params = self.open.pop(place)
        if drops:
            self.engine.drop([request])
        elif request.finish_reason is None:
            self.engine.abort(request)
        text = oracle_text(TEXTS[prompt], params)
        assert request.output_token_ids == text[: len(request.output_token_ids)]
        assert request.row < 0 and not request.blocks

    @invariant()
    def nobody_shares_what_is_written(self) -> None:
        running = self.engine.scheduler.running
        rows = [request.row for request in running]
        assert len(set(rows)) == len(rows)
        own = [
            b
            for r in running
            for b in r.blocks[r.num_computed // self.engine.scheduler.block_size :]
        ]
        assert len(set(own)) == len(own)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        run_to_end(self.engine)
        for request, prompt, params in self.open:
            assert request.output_token_ids == oracle_text(TEXTS[prompt], params)
        assert_all_free(self.engine)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
