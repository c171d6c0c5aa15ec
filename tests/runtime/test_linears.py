"""Which way a model's linear layers keep their weights, and that it changes no text."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from looped_spec import LLM, SamplingParams
from looped_spec.errors import ConfigError, UnsupportedError
from looped_spec.layers.packed import PACKINGS, PackedLinear
from looped_spec.options import CPU_LINEARS
from looped_spec.runtime import linears
from looped_spec.runtime.linears import arrange_linears, check_linears, measure, ranked
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_generate
from looped_spec.testing.toy import ToyAdapter, make_toy

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
WAYS = CPU_LINEARS[1:]
SIZES = {"hidden_size": 64, "num_heads": 4, "head_dim": 16}


def toy_with_bf16_numbers(**changes: Any) -> ToyAdapter:
    adapter = make_toy(**SIZES, **changes)
    adapter.module.requires_grad_(False)
    for parameter in adapter.module.parameters():
        parameter.copy_(parameter.bfloat16().float())
    return adapter


def works(way: str) -> bool:
    return way in measure(128, 64, torch.float32, torch.get_num_threads(), use_native=True)


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_the_plain_model_with_and_without_speculation(way: str) -> None:
    if not works(way):
        pytest.skip(f"{way} does not work here")
    want = [
        dense_generate(toy_with_bf16_numbers(), p, GREEDY.max_tokens, full_loops=4) for p in PROMPTS
    ]
    for k, d in ((0, 0), (1, 1), (3, 2)):
        adapter = toy_with_bf16_numbers()
        report = arrange_linears(adapter.module, way)
        assert set(report.ways) == {way}
        engine = make_engine(adapter, num_speculative_tokens=k, draft_loops=d)
        got = [request.output_token_ids for request in run_all(engine, PROMPTS, GREEDY)]
        assert got == want, (way, k, d)


def test_auto_takes_for_each_shape_what_was_measured_to_be_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scores(out: int, _in: int, *_: object) -> dict[str, float]:
        fast = {64: "transposed", 128: "exact_fp16"}.get(out, "plain")
        return {way: 0.5 if way == fast else 1.0 for way in WAYS}

    if not works("exact_fp16"):
        pytest.skip("exact_fp16 does not work here")
    monkeypatch.setattr(linears, "measure", scores)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 96))
    with torch.no_grad():
        module[1].weight.copy_(module[1].weight.bfloat16().float())
    report = arrange_linears(module.requires_grad_(False))
    assert report.ways == {"transposed": 1, "exact_fp16": 1, "plain": 1}
    assert module[0].weight.t().is_contiguous()
    assert isinstance(module[1], PackedLinear)
    assert type(module[2]) is nn.Linear and module[2].weight.is_contiguous()
    assert report.plain_bytes - report.num_bytes == 2 * 64 * 128


def test_a_weight_that_would_be_rounded_takes_the_next_best_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = {"plain": 1.0, "transposed": 0.8, "exact_fp16": 0.4}
    monkeypatch.setattr(linears, "measure", lambda *_: best)
    layer = nn.Linear(64, 64).requires_grad_(False)
    layer.weight[0, 0] = 1.0 + 2.0**-20
    weight = layer.weight.clone()
    assert arrange_linears(nn.Sequential(layer)).ways == {"transposed": 1}
    assert torch.equal(layer.weight, weight)


def test_auto_takes_kernels_of_our_own_only_where_it_may() -> None:
    if not works("native_bf16"):
        pytest.skip("the kernels do not build here")
    threads = torch.get_num_threads()
    assert not {"native_bf16", "native_fp32"} & measure(76, 64, torch.float32, threads).keys()
    best = {"plain": 1.0, "native_bf16": 0.2, "native_fp32": 0.4}
    for as_bf16, way in ((True, "native_bf16"), (False, "native_fp32")):
        layer = nn.Linear(64, 128).requires_grad_(False)
        if as_bf16:
            layer.weight.copy_(layer.weight.bfloat16().float())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linears, "measure", lambda *args: best if args[-1] else {"plain": 1.0})
            assert arrange_linears(nn.Sequential(layer)).ways == {"plain": 1}
            assert arrange_linears(nn.Sequential(layer), use_native=True).ways == {way: 1}


def test_noise_does_not_decide_between_equals() -> None:
    assert ranked({"plain": 1.0, "transposed": 0.95, "onednn": 0.93})[0] == "plain"
    assert ranked({"plain": 1.0, "transposed": 0.85, "onednn": 0.8})[0] == "transposed"
    order = ranked({"plain": 1.0, "transposed": 0.85, "onednn": 0.5, "exact_fp16": 0.4})
    assert order == ["exact_fp16", "onednn", "transposed", "plain"]


def test_a_shape_is_measured_once_in_a_process() -> None:
    first = measure(72, 64, torch.float32, torch.get_num_threads())
    assert first["plain"] == 1.0 and all(score > 0 for score in first.values())
    assert measure(72, 64, torch.float32, torch.get_num_threads()) is first


def test_measuring_ends_when_three_repeats_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of our own: a call of the plain way takes 1 s, of the other `other[repeat]`."""

    def repeats(other: list[float]) -> int:
        laps = 0

        def lap() -> float:
            nonlocal laps
            repeat, place = divmod(laps, 2 * 2 * 4)
            laps += 1
            seconds = 1.0 if place < 2 * 4 else other[repeat]
            return laps % 2 * -seconds  # the start, then the end so much later

        calls = {"plain": [lambda x: x], "onednn": [lambda x: x]}
        monkeypatch.setattr(linears, "_usable_calls", lambda *_: calls)
        monkeypatch.setattr(linears.time, "perf_counter", lap)
        measure.cache_clear()
        measure(75, 64, torch.float32, torch.get_num_threads())
        return laps // (2 * 2 * 4)

    try:
        assert repeats([0.5, 0.9, 0.9, 0.9, 0.9]) == 3
        assert repeats([2.0, 0.95, 1.5, 0.5, 0.5]) == 3
        assert repeats([2.0, 0.5, 0.5, 0.5, 0.5]) == 4
        assert repeats([2.0, 2.0, 0.5, 0.5, 0.5]) == 5
    finally:
        measure.cache_clear()


def test_a_kernel_that_is_missing_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: torch.Tensor) -> None:
        raise RuntimeError("no such operator here")

    for kind in PACKINGS.values():
        monkeypatch.setattr(kind, "of", missing)
    assert set(measure(73, 64, torch.float32, torch.get_num_threads())) == {"plain", "transposed"}
    with pytest.raises(UnsupportedError, match="weight '0': no such operator here"):
        arrange_linears(nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), "onednn")


def test_a_kernel_that_computes_something_else_is_no_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in PACKINGS.values():
        monkeypatch.setattr(kind, "linear", lambda self, x, bias: 3 * x @ torch.ones(64, 74))
    assert set(measure(74, 64, torch.float32, torch.get_num_threads())) == {"plain", "transposed"}


def test_a_weight_that_would_be_rounded_is_refused_where_it_was_asked_for() -> None:
    layer = nn.Linear(64, 64).requires_grad_(False)
    layer.weight[0, 0] = 1.0 + 2.0**-20
    with pytest.raises(UnsupportedError, match="cannot hold weight 'head': it would round"):
        arrange_linears(nn.ModuleDict({"head": layer}), "exact_fp16")


def test_shared_and_small_weights_stay_as_they_are() -> None:
    embedding = nn.Embedding(128, 64)
    head = nn.Linear(64, 128, bias=False)
    head.weight = embedding.weight
    module = nn.Sequential(embedding, head, nn.Linear(64, 1)).requires_grad_(False)
    report = arrange_linears(module, "transposed")
    assert not report.ways and report.plain_bytes == report.num_bytes == 0
    assert head.weight is embedding.weight and embedding.weight.is_contiguous()


def test_one_layer_in_two_places_is_kept_once() -> None:
    layer = nn.Linear(64, 64).requires_grad_(False)
    report = arrange_linears(nn.Sequential(layer, layer), "transposed")
    assert report.ways == {"transposed": 1} and layer.weight.t().is_contiguous()


def test_another_device_has_no_such_choice() -> None:
    check_linears("auto", torch.device("cuda", 0))
    check_linears("plain", torch.device("cuda", 0))
    check_linears("onednn", torch.device("cpu"))
    with pytest.raises(
        ConfigError, match="cpu_linear='onednn' is for device cpu, not for 'cuda:0'"
    ):
        check_linears("onednn", torch.device("cuda", 0))


def test_a_misspelt_way_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'onednn'"):
        LLM("demo:ouro", cpu_linear="onednnn")


def test_a_model_says_which_way_it_took(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = LLM("demo:ouro", cpu_linear="transposed", max_model_len=32)
    assert llm.linears.ways == {"transposed": 5}
    assert any("linear layers: 5 transposed" in record.message for record in caplog.records)
    as_dict = llm.linears.as_dict()
    assert as_dict["ways"] == {"transposed": 5} and as_dict["scores"] == {}
