"""Policies by which loops share keys and values are refused, with the reason; the reason holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huginn_models import read_config
from nanbeige_models import tiny_config
from torch import Tensor

from looped_spec import LLM
from looped_spec.adapter import LoopState, StageContext
from looped_spec.errors import UnsupportedError
from looped_spec.testing.stages import StageBench
from looped_spec.testing.toy import TOY_CONFIG, ToyAdapter, make_toy

REASON = r"tokens .*verified in one pass see other keys than tokens .*decoded one by one"

# The official policies, and a value that is none.
STRATEGIES = [
    "compress-s4",
    "latest-m4-compress-s4",
    "compress-anchor",
    "skip",
    "always-last-m4",
    4,
]


@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_huginn_refuses_shared_planes_before_weights_are_looked_for(
    strategy: object, num_speculative_tokens: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config()))
    with pytest.raises(UnsupportedError, match=f"lookup_strategy {strategy!r}.*{REASON}"):
        LLM(
            tmp_path,
            adapter_options={"lookup_strategy": strategy},
            num_speculative_tokens=num_speculative_tokens,
        )


def test_huginn_takes_the_policy_that_it_computes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config()))
    llm = LLM(
        tmp_path,
        device="cpu",
        load_format="dummy",
        kv_cache_memory_bytes=2**24,
        adapter_options={"lookup_strategy": "full"},
    )
    planes = llm.loaded.adapter.kv_planes(3)
    assert {plane.loop for plane in planes} == {None, 0, 1, 2}


@pytest.mark.parametrize("num_speculative_tokens", [0, 1])
def test_nanbeige_refuses_shared_planes_before_weights_are_looked_for(
    num_speculative_tokens: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(loop_share_kv=True)))
    with pytest.raises(UnsupportedError, match=f"loop_share_kv is True: sharing.*{REASON}"):
        LLM(tmp_path, num_speculative_tokens=num_speculative_tokens)


class SharingToy(ToyAdapter):
    """Every loop writes the planes of the first, as the sharing policies do."""

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        return super().loop(state, 0, ctx)


def spread(adapter: ToyAdapter) -> float:
    """Return the largest difference of logits between one pass and token by token."""
    tokens = torch.randint(0, 61, (1, 12), generator=torch.Generator().manual_seed(0))
    runs: list[Tensor] = [StageBench(adapter).logits(tokens, sizes) for sizes in ([12], [1] * 12)]
    return float((runs[0] - runs[1]).abs().max())


def test_tokens_of_one_pass_see_other_keys_only_where_loops_share_planes() -> None:
    healthy = make_toy()
    sharing = SharingToy(TOY_CONFIG, {})
    sharing.module.load_state_dict(healthy.module.state_dict())
    assert spread(healthy) < 1e-5  # rounding
    assert spread(sharing) > 1e-3
