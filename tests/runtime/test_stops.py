"""When a request ends, and what is handed out of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import GREEDY, PROMPTS, ScriptedToy, assert_all_free, like, oracle_text, run_to_end

from looped_spec.errors import CapacityError, ConfigError
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all

PROMPT = PROMPTS[0]
TEXT = oracle_text(PROMPT, SamplingParams(temperature=0.0, max_tokens=24))


class Spelling:
    """A detokenizer: each token stands for a text of its own, of which `hold` characters wait."""

    def __init__(self, spelling: dict[int, str] | None = None, hold: int = 0) -> None:
        self.spelling, self.hold, self.waiting = spelling, hold, ""

    def append(self, token_id: int) -> str:
        self.waiting += chr(48 + token_id) if self.spelling is None else self.spelling[token_id]
        cut = max(len(self.waiting) - self.hold, 0)
        sure, self.waiting = self.waiting[:cut], self.waiting[cut:]
        return sure

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join([self.append(token_id) for token_id in token_ids])

    def flush(self) -> str:
        rest, self.waiting = self.waiting, ""
        return rest


def letters(tokens: list[int]) -> str:
    return "".join(chr(48 + token) for token in tokens)


def engine_that_accepts_all(k: int, **setup: object) -> Engine:
    """Drafts are the oracle's tokens, so each round commits K + 1 of them."""
    adapter = like(ScriptedToy)
    adapter.script = {len(PROMPT) + i: token for i, token in enumerate(TEXT)}
    return make_engine(
        adapter,
        num_speculative_tokens=k,
        draft_loops=2 if k else 0,
        **setup,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("stop_at", range(0, 10))
def test_nothing_is_delivered_behind_the_end_token(k: int, stop_at: int) -> None:
    eos = TEXT[stop_at]
    end = TEXT.index(eos)
    engine = engine_that_accepts_all(k, eos_token_ids=(eos, 60))
    [request] = run_all(engine, [PROMPT], GREEDY)
    assert request.output_token_ids == TEXT[: end + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert request.take_new() == ("", TEXT[: end + 1])
    rounds = request.metrics.num_rounds
    assert rounds == -(-end // (k + 1))
    # Every round but the last commits K + 1; in the last, the drafts behind the end do not count.
    in_last = end - (k + 1) * (rounds - 1) if rounds else 0
    assert request.metrics.num_accepted_tokens == max(rounds - 1, 0) * k + min(in_last, k)
    assert request.metrics.num_draft_tokens == request.metrics.num_accepted_tokens


@pytest.mark.parametrize("k", [0, 4])
def test_ignore_eos_goes_on_to_the_limit(k: int) -> None:
    engine = engine_that_accepts_all(k, eos_token_ids=(TEXT[2],))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    [request] = run_all(engine, [PROMPT], params)
    assert request.output_token_ids == TEXT[:16]
    assert (request.finish_reason, request.stop_reason) == ("length", None)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_id_ends_the_request_and_is_the_reason(k: int, ignore_eos: bool) -> None:
    token = TEXT[3]
    engine = engine_that_accepts_all(k, eos_token_ids=(TEXT[3], 60))
    params = SamplingParams(
        temperature=0.0, max_tokens=16, stop_token_ids=[token, 59], ignore_eos=ignore_eos
    )
    [request] = run_all(engine, [PROMPT], params)
    assert request.output_token_ids == TEXT[: TEXT.index(token) + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", token)


def test_the_end_token_is_no_part_of_the_text() -> None:
    engine = engine_that_accepts_all(4, eos_token_ids=(TEXT[3],))
    request = engine.add_request(PROMPT, GREEDY, detokenizer=Spelling(hold=1))
    run_to_end(engine)
    assert request.text == letters(TEXT[:3])


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 10, 11])
def test_exactly_max_tokens_for_every_k_and_remainder(k: int, max_tokens: int) -> None:
    engine = engine_that_accepts_all(k)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    [request] = run_all(engine, [PROMPT], params)
    assert request.output_token_ids == TEXT[:max_tokens]
    assert request.finish_reason == "length"
    assert request.metrics.num_rounds == -(-(max_tokens - 1) // (k + 1))
    assert max_tokens == 1 + request.metrics.num_rounds + request.metrics.num_accepted_tokens


@pytest.mark.parametrize("k", [0, 3, 8])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_max_model_len_ends_a_request_that_asks_for_more(k: int, block_size: int) -> None:
    for max_model_len in (8, 9, 12, 16):
        engine = engine_that_accepts_all(k, max_model_len=max_model_len, block_size=block_size)
        params = SamplingParams(temperature=0.0, max_tokens=10**6)
        [request] = run_all(engine, [PROMPT], params)
        assert request.output_token_ids == TEXT[: max_model_len - len(PROMPT)]
        assert request.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 2])
def test_an_end_token_at_the_limit_is_a_stop(k: int) -> None:
    engine = engine_that_accepts_all(k, eos_token_ids=(TEXT[4],))
    params = SamplingParams(temperature=0.0, max_tokens=TEXT.index(TEXT[4]) + 1)
    [request] = run_all(engine, [PROMPT], params)
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("k", [0, 4, 8])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("span", [(0, 1), (1, 3), (2, 5), (3, 8)])
def test_a_stop_string_inside_an_accepted_run_ends_it(
    k: int, include: bool, span: tuple[int, int]
) -> None:
    stop = letters(TEXT)[span[0] : span[1]]
    at = letters(TEXT).index(stop)
    engine = engine_that_accepts_all(k)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=16,
        stop=["no such text", stop],
        include_stop_str_in_output=include,
    )
    request = engine.add_request(PROMPT, params, detokenizer=Spelling())
    run_to_end(engine)
    assert request.text == letters(TEXT)[: at + include * len(stop)]
    assert request.output_token_ids == TEXT[: at + len(stop)]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert_all_free(engine)


def lone_request(
    params: SamplingParams, detokenizer: Spelling, limit: int = 10**6, eos: int = -1
) -> Request:
    return Request(
        0,
        [0],
        params,
        seed=0,
        max_total_tokens=min(1 + params.max_tokens, limit),
        eos_token_ids=(eos,),
        detokenizer=detokenizer,
    )


PIECES = st.lists(st.text("ab", max_size=3), min_size=1, max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS, st.booleans(), st.integers(0, 2**16), st.integers(0, 2), st.booleans())
def test_stop_strings_cut_the_text_as_a_plain_search_does(
    pieces: list[str], stops: list[str], include: bool, dice: int, hold: int, eos: bool
) -> None:
    tokens = list(range(len(pieces))) + ([99] if eos else [])
    params = SamplingParams(
        stop=stops,
        include_stop_str_in_output=include,
        max_tokens=len(pieces) + (1 if eos else 0),
    )
    # Plain: after each token, and once more when all is sure, search all of the text.
    whole = "".join(pieces)
    sure = [(count, "".join(pieces[:count])) for count in range(1, len(pieces) + 1)]
    sure = [(count, text[: max(len(text) - hold, 0)]) for count, text in sure]
    want_text, want_tokens, want_stop = whole, tokens, None
    for count, text in [*sure, (len(tokens), whole)]:
        found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
        if found:
            at, length, want_stop = min(found)
            want_text, want_tokens = text[: at + include * length], tokens[:count]
            break

    request = lone_request(params, Spelling(dict(enumerate(pieces)), hold), eos=99)
    rng, streamed, streamed_tokens, position = random.Random(dice), "", [], 0
    while request.finish_reason is None:
        run = tokens[position : position + rng.randint(1, 4)]
        position += request.append(run)
        if rng.random() < 0.6 or request.finish_reason is not None:
            text, new = request.take_new()
            streamed, streamed_tokens = streamed + text, streamed_tokens + new
            assert request.text.startswith(streamed)
            assert want_text.startswith(streamed), "text behind a stop string was handed out"
    assert (request.text, request.output_token_ids) == (want_text, want_tokens)
    assert streamed + request.take_new()[0] == want_text
    assert streamed_tokens == want_tokens
    if want_stop is not None:
        assert (request.finish_reason, request.stop_reason) == ("stop", want_stop)
    else:
        assert request.finish_reason == ("stop" if eos else "length")
        assert request.stop_reason is None


@settings(max_examples=100, deadline=None)
@given(PIECES, st.integers(0, 2**16), st.integers(0, 2), st.booleans(), st.booleans())
def test_text_without_stop_strings_is_made_when_it_is_asked_for_and_is_all_the_same(
    pieces: list[str], dice: int, hold: int, eos: bool, reads: bool
) -> None:
    class Counting(Spelling):
        calls = 0

        def extend(self, token_ids: Sequence[int]) -> str:
            self.calls += 1
            return super().extend(token_ids)

    tokens = list(range(len(pieces))) + ([99] if eos else [])
    detokenizer = Counting(dict(enumerate(pieces)), hold)
    request = lone_request(SamplingParams(max_tokens=len(tokens)), detokenizer, eos=99)
    rng, streamed, position, taken = random.Random(dice), "", 0, 0
    while request.finish_reason is None:
        taken = request.append([*tokens, 1, 2][position : position + rng.randint(1, 4)])
        position += taken
        if reads:
            text, _ = request.take_new()
            streamed += text
            assert len(streamed) >= len("".join(pieces[:position])) - hold
    assert request.output_token_ids == tokens
    assert request.text == "".join(pieces)
    assert streamed + request.take_new()[0] == request.text
    assert request.finish_reason == ("stop" if eos else "length")
    assert reads or detokenizer.calls == 1, "text that nobody reads is decoded once, at the end"


@pytest.mark.parametrize("ending", ["eos", "length"])
def test_a_stop_string_that_only_the_held_back_text_completes_counts(ending: str) -> None:
    params = SamplingParams(stop="bc", max_tokens=3 if ending == "length" else 9)
    request = lone_request(params, Spelling({1: "a", 2: "b", 3: "c"}, hold=1), eos=7)
    request.append([1, 2, 3, 7] if ending == "eos" else [1, 2, 3])
    assert (request.text, request.finish_reason, request.stop_reason) == ("a", "stop", "bc")


def test_text_is_never_handed_out_before_it_is_sure_to_stay() -> None:
    request = lone_request(
        SamplingParams(stop="END", max_tokens=99), Spelling({i: c for i, c in enumerate("xEND.")})
    )
    seen = []
    for token in (0, 1, 2, 4, 0, 1, 2, 3):
        request.append([token])
        seen.append(request.take_new()[0])
    assert seen == ["", "", "x", "E", "N", ".", "x", ""]
    assert request.text == "xEN.x"


def test_an_aborted_request_keeps_what_it_had() -> None:
    engine = engine_that_accepts_all(2)
    request = engine.add_request(PROMPT, GREEDY, detokenizer=Spelling(hold=1))
    engine.step()
    engine.step()
    engine.abort(request)
    engine.abort(request)  # twice is once
    assert request.output_token_ids == TEXT[:4]
    assert request.text == letters(TEXT[:4])
    assert request.output().outputs[0].finish_reason == "abort"
    assert_all_free(engine)


def test_an_output_reports_the_request() -> None:
    engine = engine_that_accepts_all(2, eos_token_ids=(TEXT[5],))
    request = engine.add_request(PROMPT, GREEDY, prompt="hello", detokenizer=Spelling())
    assert not request.output().finished
    run_to_end(engine)
    output = request.output()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == (0, "hello", PROMPT)
    assert output.finished and output.metrics is request.metrics
    [completion] = output.outputs
    assert completion.token_ids == request.output_token_ids
    assert (completion.index, completion.finish_reason) == (0, "stop")


def test_prompts_that_leave_no_room_or_hold_nothing_are_refused() -> None:
    engine = make_engine(like(ScriptedToy), max_model_len=10)
    with pytest.raises(CapacityError, match=r"prompt of 10 tokens .* max_model_len is 10"):
        engine.add_request([1] * 10, GREEDY)
    with pytest.raises(ConfigError, match="prompt is empty"):
        engine.add_request([], GREEDY)
    assert not engine.has_work
