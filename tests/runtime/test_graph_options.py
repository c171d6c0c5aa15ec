"""Captured rounds as a user asks for them, over a whole model."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from looped_spec import LLM, AdaptiveSpecConfig, SamplingParams
from looped_spec.control.config import BatchBucket
from looped_spec.control.plan import Candidate
from looped_spec.errors import ConfigError, UnsupportedError
from looped_spec.options import EngineOptions

PROMPTS = [[5, 6, 7, 8], [9], [1, 2, 3], [30, 31, 32, 33, 34]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=30, seed=4, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
]
SIZES = {"max_num_seqs": 3, "max_model_len": 40, "cudagraph_capture_sizes": (1, 3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", weight_scale=0.2))


def texts(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_mixed_load_over_traced_rounds_has_the_text_of_eager_ones(model: str) -> None:
    config = AdaptiveSpecConfig(
        3,
        (
            BatchBucket(1, 1, (Candidate(0, 0), Candidate(2, 2)), initial=1),
            BatchBucket(2, 3, (Candidate(0, 0), Candidate(1, 1)), initial=1),
        ),
    )
    found = []
    for graph_backend in ("eager", "traced"):
        llm = LLM(
            model,
            graph_backend=graph_backend,
            speculative_adaptive_config=config,
            async_scheduling=graph_backend == "traced",
            cpu_linear="plain",
            **SIZES,
        )
        captured = llm.stats()["graphs"]["captured"]
        found.append(texts(llm))
    assert found[0] == found[1]
    stats = llm.stats()["graphs"]
    shadows = stats["eager_rounds"].get("shadow depths", 0)
    assert stats["eager_rounds"] == ({"shadow depths": shadows} if shadows else {})
    assert stats["replays"] > 10
    # Two sizes and two modes: both buckets' candidates and plain decoding; a batch of one may still
    # be in the bucket of two.
    assert stats["captured"] == captured == 2 * (3 + 2)
    config_used: Any = llm.policy
    assert config_used.config.padded_batch_sizes == (1, 3), "costs are those of the padded batch"


def test_what_is_chosen_later_is_captured_then_and_kept(model: str) -> None:
    llm = LLM(model, graph_backend="traced", num_speculative_tokens=0, **SIZES)
    assert llm.stats()["graphs"]["captured"] == 2 * 2
    llm.set_speculation(1, 1)
    assert llm.stats()["graphs"]["captured"] == 2 * 2 * 2
    llm.set_speculation(0)
    llm.set_speculation(1, 1)
    assert llm.stats()["graphs"]["captured"] == 2 * 2 * 2
    texts(llm)
    assert llm.stats()["graphs"]["eager_rounds"] == {}


def test_a_batch_beyond_the_sizes_given_runs_eagerly_and_is_counted(model: str) -> None:
    llm = LLM(
        model,
        graph_backend="traced",
        num_speculative_tokens=0,
        max_num_seqs=3,
        max_model_len=40,
        cudagraph_capture_sizes=[1],
    )
    eager = LLM(model, num_speculative_tokens=0, max_num_seqs=3, max_model_len=40)
    assert texts(llm) == texts(eager)
    stats = llm.stats()["graphs"]
    assert stats["eager_rounds"]["not captured"] > 0 and stats["replays"] > 0


def test_no_memory_for_graphs_is_said_and_everything_runs_eagerly(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from looped_spec.runtime.graphs import TracedGraphs

    monkeypatch.setattr(TracedGraphs, "free_bytes", lambda self: 10**9)
    with caplog.at_level(logging.WARNING):
        llm = LLM(model, graph_backend="traced", graph_memory_bytes=0, **SIZES)
    assert llm.stats()["graphs"]["captured"] == 0 and "want of memory" in caplog.text
    assert texts(llm) == texts(LLM(model, **SIZES))


def test_sdpa_says_that_its_cost_follows_the_width(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        LLM(model, graph_backend="traced", num_speculative_tokens=0, **SIZES)
    assert "attend over all 40 positions of max_model_len" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"enforce_eager": True, "graph_backend": "cuda"}, ConfigError, "contradict"),
        ({"graph_backend": "cudagraph"}, ConfigError, "graph_backend must be one of"),
        ({"enforce_eager": 1}, ConfigError, "enforce_eager must be True or False"),
        ({"async_scheduling": "yes"}, ConfigError, "async_scheduling must be True or False"),
        ({"cudagraph_capture_sizes": ()}, ConfigError, "must be a list of batch sizes"),
        ({"cudagraph_capture_sizes": [0]}, ConfigError, "between 1 and"),
        ({"cudagraph_capture_sizes": "8"}, ConfigError, "must be a list of batch sizes"),
        ({"graph_memory_bytes": -1}, ConfigError, "graph_memory_bytes"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        EngineOptions.from_kwargs(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph_backend": "cuda", "device": "cpu"}, "needs a CUDA device"),
        ({"graph_backend": "traced", "exit_threshold": 0.5}, "early exit"),
        ({"graph_backend": "traced", "cpu_linear": "onednn"}, "cannot hold weights"),
    ],
)
def test_what_cannot_be_captured_is_refused(
    model: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        LLM(model, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_on_the_cpu_nothing_is_captured_unless_asked_for(model: str) -> None:
    stats = LLM(model).stats()["graphs"]
    assert stats["backend"] == "eager" and not stats["captured"]


def test_options_of_the_command_line_are_those_of_python(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from looped_spec.cli.main import main

    flags = ["--graph-backend", "traced", "--cudagraph-capture-sizes", "1", "2"]
    flags += ["--async-scheduling", "--num-speculative-tokens", "0", "--max-num-seqs", "2"]
    command = ["generate", model, "--prompt", "the cat", "--max-tokens", "4", *flags]
    assert main([*command, "--max-model-len", "40", "--device", "cpu"]) == 0
    assert main([*command, "--cudagraph-capture-sizes", "many"]) == 2
    assert "invalid int value: 'many'" in capsys.readouterr().err
