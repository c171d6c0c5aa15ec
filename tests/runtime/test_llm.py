"""`LLM` as its users meet it: prompts, options, streams, and errors that come before any work."""

from __future__ import annotations

import dataclasses
import inspect
import io
import itertools
import logging
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from looped_spec import LLM, SamplingParams
from looped_spec.errors import CapacityError, ConfigError
from looped_spec.runtime.outputs import StreamChunk

FOLDER = str(Path(__file__).parent.parent / "golden" / "ouro-b")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def make(**options: Any) -> LLM:
    """A tiny model with two drafts a round."""
    return LLM(FOLDER, **{"num_speculative_tokens": 2, "draft_loops": 1, **options})


@pytest.fixture(scope="module")
def llm() -> LLM:
    """One model for tests that leave it as it was."""
    return make()


def texts(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    """The tokens that come of each prompt."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(llm: LLM) -> None:
    """Nothing runs and all memory is free."""
    stats = llm.stats()
    assert not llm.engine.has_work
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_one_list_of_tokens_is_one_prompt(llm: LLM) -> None:
    assert texts(llm, [3, 4, 5]) == texts(llm, [[3, 4, 5]])
    assert len(texts(llm, [[3, 4, 5], [6]])) == 2


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_results_carry_prompt_tokens_reason_and_counts(llm: LLM) -> None:
    output = llm.generate([3, 4, 5], GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == [3, 4, 5]
    assert output.finished
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason == "length"
    metrics = output.metrics
    # The prompt gives the first token; each round then its accepted drafts and one more.
    assert metrics.num_rounds + metrics.num_accepted_tokens == 7
    assert metrics.draft_acceptance_rate is not None


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], GREEDY, "prompt 0 is empty"),
        ([[3], []], GREEDY, "prompt 1 is empty"),
        ([[3], [97]], GREEDY, "prompt 1: token id must be between 0 and 96, got 97"),
        ([[-1]], GREEDY, "between 0 and 96, got -1"),
        ([3.5], GREEDY, "prompt 0 must be a text or a list of token ids, got float"),
        ([[True]], GREEDY, "prompt 0 must be a text or a list of token ids, got list"),
        ([None], GREEDY, "got NoneType"),
        ([[3], [4]], [GREEDY], "one per prompt: got 1 for 2 prompts"),
        ("a text", GREEDY, "has no tokenizer files"),
        ([[3]], SamplingParams(stop="x"), "stop strings need a tokenizer"),
    ],
)
def test_a_wrong_call_is_refused_and_runs_nothing(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    before = llm.stats()["num_rounds"]
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats()["num_rounds"] == before
    assert_idle(llm)


def test_a_prompt_longer_than_the_model_is_refused_with_the_numbers() -> None:
    llm = make(max_model_len=10)
    with pytest.raises(CapacityError, match=r"prompt of 10 tokens .* max_model_len is 10"):
        llm.generate([[3], [3] * 10], GREEDY, use_tqdm=False)
    assert_idle(llm)
    output = llm.generate([[3] * 9], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_a_cache_too_small_for_the_length_asked_for_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"has 20000 bytes, which hold \d+ tokens .* 200 needs"):
        make(max_model_len=200, kv_cache_memory_bytes=20000)


def test_without_a_length_asked_for_the_cache_decides_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="looped_spec"):
        llm = make(kv_cache_memory_bytes=200_000)
    assert llm.max_model_len < 256
    assert f"max_model_len is {llm.max_model_len} tokens" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drft_loops": 2}, r"unknown option 'drft_loops' \(did you mean 'draft_loops'\?\)"),
        ({"draft_loops": 4}, "between 1 and full_loops - 1 = 3, got 4"),
        ({"draft_loops": 0}, "between 1 and full_loops - 1 = 3, got 0"),
        ({"num_speculative_tokens": 65}, "between 0 and 64, got 65"),
        ({"num_speculative_tokens": 2.0}, "must be an integer, got 2.0"),
        ({"num_speculative_tokens": None}, "draft_loops needs num_speculative_tokens"),
        ({"full_loops": 5}, "full_loops must be between 1 and 4"),
        ({"full_loops": 1}, "full_loops of at least 2"),
        ({"policy": "greedy"}, "policy must be one of static"),
        ({"attention_backend": "sdp"}, r"varlen, sdpa, got 'sdp' \(did you mean 'sdpa'"),
        ({"max_model_len": 1000}, "at most 256"),
        ({"block_size": 0}, "block_size must be between 1 and 65536, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer, got True"),
    ],
)
def test_a_wrong_option_is_refused_with_name_and_range(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_the_signature_lists_every_option_with_its_default() -> None:
    parameters = inspect.signature(LLM).parameters
    assert next(iter(parameters)) == "model"
    assert parameters["block_size"].default is None
    assert parameters["device"].default == "auto"


def test_left_out_k_and_d_are_what_the_family_suggests_within_the_depth() -> None:
    assert LLM(FOLDER).speculation == LLM(FOLDER, num_speculative_tokens=2).speculation
    shallow = LLM(FOLDER, full_loops=2).speculation
    assert (shallow.num_speculative_tokens, shallow.draft_loops) == (2, 1)
    assert LLM(FOLDER, full_loops=1).speculation.num_speculative_tokens == 0


def test_switching_speculation_changes_no_text(llm: LLM) -> None:
    expected = texts(llm, [[3, 4, 5], [6]])
    for k, d in ((0, 0), (4, 2), (1, 3)):
        llm.set_speculation(k, d)
        assert texts(llm, [[3, 4, 5], [6]]) == expected
    llm.set_speculation(2, 1)
    with pytest.raises(ConfigError, match="between 1 and full_loops - 1 = 3, got 4"):
        llm.set_speculation(2, 4)
    assert llm.speculation.draft_loops == 1


def test_requests_without_a_seed_differ_and_repeat_with_the_engines_seed() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = texts(make(seed=5), [[3], [3]], params)
    assert first[0] != first[1]
    assert texts(make(seed=5), [[3], [3]], params) == first
    assert texts(make(seed=6), [[3], [3]], params) != first


def collect(chunks: list[StreamChunk], index: int) -> list[int]:
    """The tokens of one prompt's chunks."""
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def test_a_stream_gives_the_same_tokens_in_order_with_one_end_each(llm: LLM) -> None:
    prompts = [[3, 4, 5], [6], [7, 8]]
    chunks = list(llm.stream(prompts, GREEDY))
    assert [collect(chunks, i) for i in range(3)] == texts(llm, prompts)
    ends = [chunk.index for chunk in chunks if chunk.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]


def test_two_streams_read_in_turn_both_come_to_their_end(llm: LLM) -> None:
    one, other = llm.stream([[3, 4, 5]], GREEDY), llm.stream([[6], [7]], GREEDY)
    first, second = [next(one)], [next(other)]
    second += list(other)
    first += list(one)
    assert collect(first, 0) == texts(llm, [[3, 4, 5]])[0]
    assert [collect(second, i) for i in range(2)] == texts(llm, [[6], [7]])
    assert_idle(llm)


def test_closing_a_stream_frees_what_it_held(llm: LLM) -> None:
    stream = llm.stream([[3, 4, 5], [6]], GREEDY)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert_idle(llm)


def test_a_failure_in_the_model_frees_everything_and_the_next_call_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make()
    expected = texts(llm, [[3, 4, 5]])
    adapter = llm.loaded.adapter
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> Any:
            raise RuntimeError("device lost")

        patch.setattr(adapter, "loop", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.generate([[3, 4, 5], [6]], GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert texts(llm, [[3, 4, 5]]) == expected


@pytest.mark.parametrize(
    "prompts",
    [
        {"prompt_token_ids": [3, 4, 5]},
        [{"prompt_token_ids": [3, 4, 5]}],
        [(3, 4, 5)],
        np.array([3, 4, 5]),
        np.array([[3, 4, 5]]),
        [torch.tensor([3, 4, 5])],
        [list(np.array([3, 4, 5]))],
    ],
)
def test_a_prompt_may_come_in_the_forms_that_users_have(llm: LLM, prompts: Any) -> None:
    assert texts(llm, prompts) == texts(llm, [[3, 4, 5]])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompts": "x"}, r"unknown key of prompt 0: 'prompts' \(did you mean 'prompt'"),
        ({"prompt_token_ids": "x"}, "prompt 0 must be a text or a list of token ids"),
        ({"prompt": {"prompt": "x"}}, "prompt 0 must be a text or a list of token ids"),
        ({}, "prompt 0 must be a text or a list of token ids"),
        (np.array([3.0]), "prompt 0 must be a text or a list of token ids"),
    ],
)
def test_a_prompt_of_another_form_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.generate([prompt], GREEDY, use_tqdm=False)


def test_a_wrong_stream_is_refused_at_the_call_and_a_stream_not_read_runs_nothing(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="prompt 0 is empty"):
        llm.stream([[]], GREEDY)
    llm.stream([[3]], GREEDY)
    assert_idle(llm)


def test_set_speculation_takes_the_familys_draft_depth() -> None:
    llm = make(num_speculative_tokens=0, draft_loops=None)
    llm.set_speculation(3)
    assert llm.speculation == LLM(FOLDER, num_speculative_tokens=3).speculation


def test_greedy_text_of_a_seed_dependent_model_repeats_in_any_place() -> None:
    folder = str(Path(__file__).parent.parent / "golden" / "huginn-b")
    llm = LLM(folder, seed=3)
    first = texts(llm, [[3, 4], [5], [3, 4]])
    assert first[0] == first[2]
    assert texts(llm, [[5], [3, 4]]) == [first[1], first[0]]
    assert texts(LLM(folder, seed=4), [[3, 4]]) != [first[0]]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 0}, r"unknown sampling parameter 'temprature' \(did you mean 'temperat"),
        ({"n": 2}, "sampling parameter 'n' is not supported"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": float("inf")}, "temperature must be at least 0, got inf"),
        ({"stop": [""]}, "stop must be non-empty strings"),
    ],
)
def test_a_wrong_sampling_parameter_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**params)


def test_sampling_parameters_can_be_copied_and_pickled() -> None:
    params = SamplingParams(temperature=0.5, stop="x", stop_token_ids={4, 2})
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, max_tokens=3).stop_strings == ("x",)


def test_threads_that_share_an_llm_get_the_tokens_of_lone_calls(llm: LLM) -> None:
    prompts = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12]]
    expected = [texts(llm, [prompt])[0] for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            results = pool.map(lambda prompt: texts(llm, [prompt])[0], prompts)
            assert list(results) == expected
    assert_idle(llm)


def test_an_interruption_at_any_line_of_the_books_loses_nothing() -> None:
    llm = make(block_size=4, kv_cache_memory_bytes=140_000, max_model_len=20)
    expected = texts(llm, [[3, 4, 5], [6], [7, 8]])
    files = ("scheduler.py", "kv_cache.py", "engine.py", "llm.py")
    for stop_at in range(3, 900, 7):
        lines = itertools.count()

        def trace(frame: Any, event: str, _: Any, lines: Any = lines, stop: int = stop_at) -> Any:
            if not frame.f_code.co_filename.endswith(files):
                return None
            if frame.f_code.co_name in ("drop", "abort", "__init__"):
                return None
            if event == "line" and next(lines) == stop:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            texts(llm, [[3, 4, 5], [6], [7, 8]])
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert_idle(llm)
        assert len(llm.engine.scheduler._free_rows) == llm.options.max_num_seqs
    assert texts(llm, [[3, 4, 5], [6], [7, 8]]) == expected


@pytest.mark.parametrize("stream", [None, "full", "closed"])
def test_a_progress_bar_that_cannot_be_drawn_stops_nothing(
    llm: LLM, stream: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError("no space left") if stream == "full" else ValueError("closed")

    monkeypatch.setattr(sys, "stderr", None if stream is None else Broken())
    outputs = llm.generate([[3, 4, 5]], GREEDY, use_tqdm=True)
    assert len(outputs[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {3, 4}, Path("x"), [b"abc"]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ConfigError, match="prompt 0 must be a text or a list of token ids"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", [5, "ab", {}, [None], [{}], SamplingParams])
def test_what_are_no_sampling_parameters_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ConfigError, match="sampling_params must be"):
        llm.generate([[3]], params, use_tqdm=False)


@pytest.mark.parametrize(
    "params",
    [
        {"stop": 5},
        {"stop": {"the": 1}},
        {"stop_token_ids": 5},
        {"temperature": 10**400},
        {"seed": 10**5000},
        {"ignore_eos": "no"},
    ],
)
def test_sampling_parameters_of_odd_kinds_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(params))):
        SamplingParams(**params)


def test_a_small_model_runs_on_one_thread_unless_told_otherwise() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        make()
        assert torch.get_num_threads() == 1
        make(num_threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ConfigError, match="num_threads must be between 1 and 1024, got 0"):
        make(num_threads=0)
