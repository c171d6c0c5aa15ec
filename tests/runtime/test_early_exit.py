"""Early exit: each token as deep as it needs, checked against a plain loop, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import PROMPTS, assert_all_free, run_to_end

from looped_spec.adapter import KVPlane, LoopState, StageContext
from looped_spec.control.plan import PLAIN
from looped_spec.errors import ConfigError, UnsupportedError
from looped_spec.options import EngineOptions
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.request import Request
from looped_spec.runtime.run_plan import plan_run
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.toy import ToyAdapter, make_toy

GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
RULE = ExitRule("gate", 0.85, 1, 4)


def spread_toy() -> ToyAdapter:
    """A toy whose tokens leave at different loops."""
    toy = make_toy(seed=3)
    with torch.no_grad():
        toy.module.exit_gate.weight.mul_(6.0)
    return toy


class PlainContext:
    """One token at a time over lists of keys and values, one list a plane: the oracle's cache."""

    def __init__(self, planes: Sequence[KVPlane]) -> None:
        self.cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in planes]
        self.seeds = torch.zeros(1, dtype=torch.int64)
        self.positions = torch.zeros(1, 1, dtype=torch.int64)
        self.total_loops = 4

    def per_row(self, name: str, compute: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = compute(self.positions, self.seeds)
        return result

    def attend(
        self, plane: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
    ) -> Tensor:
        entries = self.cache[plane]
        del entries[int(self.positions) :]
        entries.append((k[0, 0], v[0, 0]))
        repeat = q.shape[2] // k.shape[2]
        keys = torch.stack([e[0] for e in entries]).repeat_interleave(repeat, dim=1)
        values = torch.stack([e[1] for e in entries]).repeat_interleave(repeat, dim=1)
        weights = torch.einsum("hd,thd->ht", q[0, 0], keys) * q.shape[-1] ** -0.5
        return torch.einsum("ht,thd->hd", weights.softmax(-1), values)[None, None]

    def logit_rows(self, hidden: Tensor) -> Tensor:
        return hidden


@torch.no_grad()
def plain_exit(
    toy: ToyAdapter, prompt: Sequence[int], count: int, rule: ExitRule
) -> tuple[list[int], list[int]]:
    """Return new tokens and the loops that each but the first took; the prompt is at full depth."""
    planes = toy.kv_planes(rule.max_loops)
    ctx = PlainContext(planes)
    ctx.total_loops = rule.max_loops
    tokens, depths = list(prompt), []
    for position in range(len(prompt) + count - 1):
        ctx.positions = torch.tensor([[position]])
        state: LoopState = toy.prelude(torch.tensor([[tokens[position]]]), ctx)
        score, depth = None, rule.max_loops
        for index in range(rule.max_loops):
            previous, state = state, toy.loop(state, index, ctx)
            score = toy.exit_score("gate", state, previous, score, index, ctx)
            ready = index + 1 >= rule.min_loops and float(score) >= rule.threshold
            if position >= len(prompt) and ready:
                depth = index + 1
                break
        for number, plane in enumerate(planes):
            if plane.loop is not None and plane.loop >= depth:
                twin = next(
                    i
                    for i, other in enumerate(planes)
                    if (other.loop, other.layer) == (depth - 1, plane.layer)
                )
                del ctx.cache[number][position:]
                ctx.cache[number].append(ctx.cache[twin][position])
        logits = toy.readout(state, ctx)
        if position >= len(prompt):
            depths.append(depth)
        if position + 1 >= len(prompt):
            tokens.append(int(logits[0, 0].argmax()))
    return tokens[len(prompt) :], depths


@pytest.mark.parametrize("rule", [RULE, ExitRule("gate", 0.5, 2, 3), ExitRule("gate", 0.0, 1, 4)])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"block_size": 1}])
def test_tokens_and_depths_are_those_of_the_plain_loop(
    rule: ExitRule, options: dict[str, Any]
) -> None:
    toy = spread_toy()
    requests = run_all(make_engine(toy, exit_rule=rule, **options), PROMPTS, GREEDY)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        tokens, depths = plain_exit(toy, prompt, GREEDY.max_tokens, rule)
        assert request.output_token_ids == tokens
        assert request.metrics.num_loop_rows == sum(depths)
        assert request.metrics.num_rounds == len(depths)


def test_the_case_that_is_checked_has_tokens_of_several_depths() -> None:
    depths = {depth for p in PROMPTS for depth in plain_exit(spread_toy(), p, 14, RULE)[1]}
    assert len(depths) >= 3


class CountingToy(ToyAdapter):
    """A toy that counts the rows that each loop is given."""

    rows: list[int]

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        if state[0].shape[1] == 1:
            self.rows[index] += state[0].shape[0]
        return super().loop(state, index, ctx)


def test_rows_that_have_left_are_not_computed() -> None:
    toy = CountingToy({}, {})
    toy.module.load_state_dict(spread_toy().module.state_dict())
    toy.rows = [0] * 4
    engine = make_engine(toy, exit_rule=RULE)
    prompts = [[*prompt, 1] for prompt in PROMPTS]  # no prompt of one row, which would count too
    requests = run_all(engine, prompts, GREEDY)
    assert sum(toy.rows) == sum(request.metrics.num_loop_rows for request in requests)
    assert toy.rows == sorted(toy.rows, reverse=True)
    assert toy.rows[3] < 0.8 * toy.rows[0]
    assert engine.metrics.loops_per_round == pytest.approx(sum(toy.rows) / toy.rows[0])


def test_at_threshold_one_every_token_runs_all_loops_and_the_text_is_plain() -> None:
    toy = spread_toy()
    rule = ExitRule("gate", 1.0, 1, 4)
    requests = run_all(make_engine(toy, exit_rule=rule), PROMPTS, GREEDY)
    plain = run_all(make_engine(toy), PROMPTS, GREEDY)
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]
    assert all(r.metrics.num_loop_rows == 4 * r.metrics.num_rounds for r in requests)


def test_rows_of_a_batch_do_not_influence_each_other() -> None:
    toy = spread_toy()
    together = run_all(make_engine(toy, exit_rule=RULE), PROMPTS, GREEDY)
    for prompt, request in zip(PROMPTS, together, strict=True):
        alone = run_all(make_engine(toy, exit_rule=RULE), [prompt], GREEDY)[0]
        assert alone.output_token_ids == request.output_token_ids
        assert alone.metrics.num_loop_rows == request.metrics.num_loop_rows


@pytest.mark.parametrize("num_blocks", [6, 8, 10])
def test_preemption_changes_no_text_and_no_depth(num_blocks: int) -> None:
    toy = spread_toy()
    roomy = run_all(make_engine(toy, exit_rule=RULE), PROMPTS, GREEDY)
    engine = make_engine(toy, exit_rule=RULE, num_blocks=num_blocks)
    tight = run_all(engine, PROMPTS, GREEDY)
    assert engine.scheduler.num_preemptions > 0
    assert [r.output_token_ids for r in tight] == [r.output_token_ids for r in roomy]
    assert [r.metrics.num_loop_rows for r in tight] == [r.metrics.num_loop_rows for r in roomy]


def test_a_preempted_request_can_be_aborted_while_its_cache_is_saved() -> None:
    engine = make_engine(spread_toy(), exit_rule=RULE, num_blocks=6)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    saved: list[Request] = []
    while not saved:
        engine.step()
        saved = [request for request in requests if request.saved_cache is not None]
    engine.abort(saved[0])
    assert saved[0].saved_cache is None
    run_to_end(engine)
    assert_all_free(engine)


def test_sampled_text_repeats_with_its_seed_whatever_the_batch() -> None:
    toy = spread_toy()
    params = SamplingParams(temperature=1.0, max_tokens=14, seed=11)
    together = run_all(make_engine(toy, exit_rule=RULE), PROMPTS, params)
    alone = run_all(make_engine(toy, exit_rule=RULE), [PROMPTS[1]], params)[0]
    assert alone.output_token_ids == together[1].output_token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_threshold": 0.5, "num_speculative_tokens": 2}, "cannot be combined with specul"),
        ({"exit_criterion": "gate", "num_speculative_tokens": 1}, "cannot be combined"),
    ],
)
def test_early_exit_with_speculation_is_refused_before_any_model_is_read(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_threshold": float("nan")}, "exit_threshold must be a finite number, got nan"),
        ({"exit_threshold": "high"}, "exit_threshold must be a finite number, got 'high'"),
        ({"min_loops": 2}, "min_loops and max_loops belong to early exit"),
        ({"max_loops": 2}, "or full_loops to run every token less deep"),
        ({"exit_threshold": 0.5, "min_loops": 0}, "min_loops must be between 1 and 4, got 0"),
        ({"exit_threshold": 0.5, "max_loops": 5}, "max_loops must be between 1 and 4, got 5"),
        (
            {"exit_threshold": 0.5, "max_loops": 2, "min_loops": 3},
            "min_loops must be between 1 and 2, got 3",
        ),
        ({"exit_criterion": "gates"}, r"one of gate, got 'gates' \(did you mean 'gate'"),
    ],
)
def test_a_wrong_exit_option_is_refused_with_its_range(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_run(EngineOptions(**options), make_toy())


def test_the_default_threshold_is_the_familys_own() -> None:
    plan = plan_run(EngineOptions(exit_criterion="gate"), make_toy())
    assert plan.exit_rule == ExitRule("gate", 1.0, 1, 4)
    assert plan.speculation == PLAIN


def test_a_family_without_a_signal_refuses_early_exit() -> None:
    toy = make_toy()
    toy.capabilities = type(toy.capabilities)()
    with pytest.raises(UnsupportedError, match="declares no signal"):
        plan_run(EngineOptions(exit_threshold=0.5), toy)
