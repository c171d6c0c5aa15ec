"""What a Prometheus scraper sees."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from client import Reply
from live_server import LiveServer, running
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tree import ROOT

from looped_spec.control.plan import Candidate
from looped_spec.control.stats import Switch
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.serve.speculation import num_drafting_rounds, request_metrics

PREFIX = "looped_spec:"
BASE = {"model_name": "tiny", "engine": "0"}


def samples(reply: Reply) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and the labels beside those that all have."""
    found = {}
    for family in parse_text(reply.body.decode()):
        for sample in family.samples:
            assert BASE.items() <= sample.labels.items()
            more = tuple(sorted(sample.labels.items() - BASE.items()))
            found[sample.name, more] = sample.value
    return found


def scrape(server: LiveServer) -> dict[str, float]:
    """Every sample without labels of its own, by its name without the prefix."""
    found = samples(server.client.get("/metrics"))
    return {name.removeprefix(PREFIX): value for (name, more), value in found.items() if not more}


def test_counts_follow_what_was_served(server: LiveServer) -> None:
    before = scrape(server)
    reply = server.client.complete("the cat sat", max_tokens=24, seed=1, ignore_eos=True, n=2)
    usage = reply.json["usage"]
    speculation = reply.json["metrics"]["speculative_decoding"]
    after = scrape(server)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("generation_tokens_total") == usage["completion_tokens"] == 48
    assert grown("prompt_tokens_total") == 2 * usage["prompt_tokens"]
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
        assert grown(f"{name}_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 48 - 2
    assert grown("spec_decode_num_drafts_total") == speculation["num_spec_steps"]
    assert grown("spec_decode_num_draft_tokens_total") == speculation["num_draft_tokens"]
    accepted = speculation["num_accepted_draft_tokens"]
    assert grown("spec_decode_num_accepted_tokens_total") == accepted
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["kv_cache_usage_perc"] == 0
    assert grown("e2e_request_latency_seconds_sum") >= grown("time_to_first_token_seconds_sum")


def test_labelled_samples_agree_with_the_totals(server: LiveServer) -> None:
    server.client.complete("the cat sat", max_tokens=24, seed=1)
    found = samples(server.client.get("/metrics"))

    def of(name: str) -> dict[str, float]:
        return {
            value: number
            for (full, more), number in found.items()
            if full == PREFIX + name
            for _, value in more[-1:]
        }

    total = found[PREFIX + "spec_decode_num_accepted_tokens_total", ()]
    by_position = of("spec_decode_num_accepted_tokens_per_pos_total")
    assert set(by_position) == {"0", "1"}
    assert sum(by_position.values()) == total > 0
    assert by_position["0"] >= by_position["1"]
    assert set(of("request_success_total")) == {"stop", "length", "abort", "error"}
    assert of("adaptive_num_speculative_tokens") == {"1-4": 2}
    assert of("adaptive_draft_loops") == {"1-4": 2}
    bounds = of("time_to_first_token_seconds_bucket")
    assert list(bounds.values()) == sorted(bounds.values())
    assert bounds["+Inf"] == found[PREFIX + "time_to_first_token_seconds_count", ()]


def test_a_controllers_choices_are_gauges_per_batch_size(model: Path) -> None:
    adaptive = {"num_speculative_tokens": None, "draft_loops": None, "policy": "goodput"}
    with running(model, adaptive) as server:
        server.client.complete("the cat", max_tokens=60, seed=1, ignore_eos=True)
        found = samples(server.client.get("/metrics"))
        info = server.client.get("/server_info").json["speculation"]
        buckets = info["explanation"]["buckets"]
        for bucket in buckets:
            label = (("bucket", f"{bucket['min_batch_size']}-{bucket['max_batch_size']}"),)
            k = found[PREFIX + "adaptive_num_speculative_tokens", label]
            assert k == bucket["current"]["num_speculative_tokens"]
            d = found[PREFIX + "adaptive_draft_loops", label]
            assert d == bucket["current"]["draft_loops"]
            if k:
                assert 0 <= found[PREFIX + "adaptive_acceptance_ema", label] <= 1
        assert [b["is_active"] for b in buckets].count(True) == 1
        switches = sum(
            value
            for (name, _), value in found.items()
            if name == PREFIX + "adaptive_switches_total"
        )
        assert switches == info["controller"]["num_switches"]
        off = found[PREFIX + "adaptive_disabled_rounds_total", ()]
        assert off == info["controller"]["off_rounds"]
        assert found[PREFIX + "adaptive_stale_feedback_total", ()] == 0


def test_the_prefix_is_an_option_and_names_are_the_same_for_any_scraper(model: Path) -> None:
    with running(model, metrics_prefix="vllm") as server:
        server.client.complete("the", max_tokens=3)
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        for headers in ({}, {"Accept": accept}):
            reply = server.client.get("/metrics", **headers)
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert b"looped_spec" not in reply.body
            names = {family.name for family in parse_text(reply.body.decode())}
            assert "vllm:spec_decode_num_drafts" in names


def test_the_documentation_lists_the_metrics_and_no_others(server: LiveServer) -> None:
    text = (ROOT / "docs/serving.md").read_text()
    section = text[text.index("## Metrics") : text.index("## The live page")]
    documented = {
        name
        for row in re.findall(r"^\| `(.*?) \|", section, re.M)
        for name in re.findall(r"\b([a-z0-9_]{6,})(?:\{|`|$)", row)
    }
    families = parse_text(server.client.get("/metrics").body.decode())
    served = {
        family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        for family in families
        if not family.name.endswith("_created")
    }
    assert documented == served


def test_rates_of_a_request_that_drafted_nothing_are_none() -> None:
    metrics = SpeculationMetrics()
    metrics.add_round(Candidate(0, 0), 0, 0)
    counts = request_metrics(metrics, is_detailed=True)
    assert counts["mean_acceptance_length"] is None and counts["draft_acceptance_rate"] is None
    assert counts["acceptance_histogram"] == [] and counts["num_spec_steps"] == 0


def test_histograms_count_rounds_of_every_length() -> None:
    metrics = SpeculationMetrics()
    for k, proposed, accepted in ((2, 2, 0), (2, 2, 2), (3, 1, 1), (3, 3, 1), (0, 0, 0), (2, 0, 0)):
        metrics.add_round(Candidate(k, 1 if k else 0), proposed, accepted)
    assert num_drafting_rounds(metrics) == 4
    assert request_metrics(metrics, is_detailed=True) == {
        "mean_acceptance_length": 1 + 4 / 4,
        "draft_acceptance_rate": 4 / 8,
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 3,
        "acceptance_histogram": [1, 2, 1, 0],
        "acceptance_histogram_by_draft_length": {
            "1": [0, 1],
            "2": [1, 0, 1],
            "3": [0, 1, 0, 0],
        },
    }
    assert "acceptance_histogram" not in request_metrics(metrics, is_detailed=False)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [((1, 1), (2, 1), "up"), ((2, 1), (2, 2), "up"), ((2, 2), (0, 0), "down")],
)
def test_a_switch_has_a_direction(before: Any, after: Any, expected: str) -> None:
    assert Switch(1, 0, Candidate(*before), Candidate(*after), "").direction == expected


def test_the_detail_of_an_answers_metrics_is_an_option(model: Path) -> None:
    with running(model, per_request_spec_decode_metrics="none") as server:
        reply = server.client.complete("the", max_tokens=3)
        assert "metrics" not in reply.json
        events = server.client.stream(
            "/v1/completions", prompt="the", stream_options={"include_usage": True}
        )
        assert "metrics" not in events[-1]
        assert not math.isnan(scrape(server)["generation_tokens_total"])


def test_prompt_tokens_that_were_known_are_counted(model: Path) -> None:
    with running(model) as server:
        for _ in range(2):
            server.client.complete(list(range(3, 23)), max_tokens=2, seed=1)
        found = scrape(server)
        assert found["prefix_cache_queries_total"] == 40
        assert found["prefix_cache_hits_total"] == 16  # two blocks of eight
        engine = server.client.get("/server_info").json["engine"]
        assert engine["prefix_cache"] == {"num_queries": 40, "num_hits": 16}
        assert found["kv_cache_usage_perc"] == 0
    with running(model, {"enable_prefix_caching": False}) as server:
        assert not [name for name in scrape(server) if name.startswith("prefix_cache")]
        assert server.client.get("/server_info").json["engine"]["prefix_cache"] is None
