"""Stop ids that a family's own code has beside those of the model's files, or knows to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from looped_spec_ouro.adapter import OuroAdapter

from looped_spec import LLM, SamplingParams

FOLDER = Path(__file__).parents[1] / "golden" / "ouro-a"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_generation_ends_at_a_stop_id_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LLM(str(FOLDER)).generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0]
    stop = plain.token_ids[3]
    monkeypatch.setattr(OuroAdapter, "extra_stop_token_ids", (stop,))
    llm = LLM(str(FOLDER))
    assert stop in llm.engine.eos_token_ids
    stopped = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]


def test_stop_ids_of_the_family_add_to_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_files = LLM(str(FOLDER)).engine.eos_token_ids
    monkeypatch.setattr(OuroAdapter, "extra_stop_token_ids", (7, 9))
    assert LLM(str(FOLDER)).engine.eos_token_ids == of_the_files | {7, 9}


def test_stop_ids_that_the_family_knows_to_be_wrong_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_the_files = LLM(str(FOLDER)).engine.eos_token_ids
    wrong = min(of_the_files)
    monkeypatch.setattr(OuroAdapter, "ignored_stop_token_ids", (wrong, 59))
    assert LLM(str(FOLDER)).engine.eos_token_ids == of_the_files - {wrong}
