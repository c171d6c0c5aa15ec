"""What a run is called: options are told as what they came down to, not as they were asked for."""

from pathlib import Path

import pytest
import torch

from looped_spec import LLM
from looped_spec.options import EngineOptions
from looped_spec.runtime import identity
from looped_spec.runtime.attention import AttentionNeeds, choose_attention
from looped_spec.runtime.attention.select import resolved_name
from looped_spec.runtime.kernels import choose_kernels

FOLDER = str(Path(__file__).parent.parent / "golden" / "ouro-b")
CPU = torch.device("cpu")


def test_kernels_and_attention_are_told_as_what_serves_the_run() -> None:
    run = LLM(FOLDER, max_num_seqs=2, cpu_kernels="auto", preset="none").identity
    kernels = choose_kernels(EngineOptions(cpu_kernels="auto"), CPU, torch.float32)
    expected = ("torch", "sdpa") if kernels is None else ("native", "native")
    assert (run.cpu_kernels, run.attention_backend) == expected
    assert (run.fused, run.is_cuda) == ("off", False)


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_the_backend_that_is_told_is_the_one_that_is_chosen(name: str) -> None:
    kernels = choose_kernels(EngineOptions(cpu_kernels="auto"), CPU, torch.float32)
    needs = AttentionNeeds(CPU, torch.float32, frozenset({16}))
    for one in (None, kernels):
        chosen = choose_attention(name, needs, one).backend
        assert resolved_name(name, needs, one) == chosen.name


def test_a_run_on_cuda_tells_its_attention_and_no_kernels_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(FOLDER, max_num_seqs=2, preset="none")
    monkeypatch.setattr(identity, "device_name", lambda device: "GPU")
    run = identity.run_identity(
        EngineOptions(attention_backend="sdpa"),
        llm.loaded.adapter,
        llm.loaded.origin,
        torch.device("cuda"),
        torch.bfloat16,
        llm.full_loops,
    )
    assert run.is_cuda
    assert run.execution == {"graph_backend": "cuda", "fused": "off", "attention_backend": "sdpa"}
