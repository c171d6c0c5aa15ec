"""A Nanbeige folder's SentencePiece model gives its own ids, its text back, and its chat format."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nanbeige_models import tiny_config
from nanbeige_tokenizer import ADDED, write_tokenizer
from sentencepiece import SentencePieceProcessor

from looped_spec.errors import ConfigError, ModelLoadError
from looped_spec.tokenization import (
    IncrementalDetokenizer,
    Tokenizer,
    load_tokenizer,
    stop_token_ids,
)

TEXT = "hello world, 你好世界\uff01 龘 grüße 😀👩‍👩‍👧\n\n  def f(x):\treturn x"
ALPHABET = st.one_of(st.sampled_from("helo wrd,\n\t好你界龘ü😀"), st.characters(codec="utf-8"))
QUESTION = [{"role": "user", "content": "你好"}]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module", params=[True, False], ids=["blank-first", "no-blank"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, SentencePieceProcessor]:
    """The tokenizer as it is loaded, and the SentencePiece model itself."""
    folder = tmp_path_factory.mktemp("tokenizer")
    model = write_tokenizer(folder, dummy_prefix=request.param)
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    return _load(folder), model


def _load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def _reference(model: SentencePieceProcessor, text: str) -> list[int]:
    """Encode by SentencePiece what stands between added tokens."""
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, ADDED)) + ")", text):
        if part in ADDED:
            ids.append(len(model) + ADDED.index(part))
        elif part:
            ids += model.encode(part)
    return ids


def _chat(tokenizer: Tokenizer, **options: bool) -> str:
    ids = tokenizer.apply_chat_template(QUESTION, **options)
    return tokenizer.decode(ids, skip_special_tokens=False)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(ALPHABET, max_size=40))
def test_ids_are_those_of_the_model_file(
    pair: tuple[Tokenizer, SentencePieceProcessor], text: str
) -> None:
    tokenizer, model = pair
    text = text.replace("▁", " ").replace("\0", "")
    assert tokenizer.inner.encode(text, add_special_tokens=False) == model.encode(text)


def test_ids_around_added_tokens_are_those_of_the_model_file(
    pair: tuple[Tokenizer, SentencePieceProcessor],
) -> None:
    tokenizer, model = pair
    text = "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nhello"
    assert tokenizer.inner.encode(text, add_special_tokens=False) == _reference(model, text)


def test_text_survives_the_round_trip(pair: tuple[Tokenizer, SentencePieceProcessor]) -> None:
    tokenizer, _ = pair
    ids = tokenizer.encode(TEXT)
    assert tokenizer.inner.convert_ids_to_tokens(ids[0]) == "<|im_start|>"
    assert tokenizer.decode(ids) == TEXT
    indented = f"    {TEXT}"
    assert tokenizer.decode(tokenizer.encode(indented)) == indented


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(ALPHABET, max_size=60))
def test_the_pieces_of_a_stream_add_up_to_the_text(
    pair: tuple[Tokenizer, SentencePieceProcessor], text: str
) -> None:
    tokenizer, _ = pair
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [*(detokenizer.append(token_id) for token_id in ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_of_several_byte_tokens_comes_whole(
    pair: tuple[Tokenizer, SentencePieceProcessor],
) -> None:
    tokenizer, _ = pair
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.inner.encode("好龘😀", add_special_tokens=False)
    pieces = [piece for token_id in ids if (piece := detokenizer.append(token_id))]
    assert pieces == ["好", "龘", "😀"]


def test_added_tokens_are_found_with_and_without_their_settings(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path)
    assert _load(tmp_path).special_token_ids >= {len(model), len(model) + 1}
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["added_tokens_decoder"]
    path.write_text(json.dumps(config))
    tokenizer = _load(tmp_path)
    assert tokenizer.eos_token_ids == (len(model) + 1,)
    ids = tokenizer.inner.encode("<think>hello</think>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (len(model) + 2, len(model) + 3)


def test_the_end_of_a_turn_stops_generation(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path)
    stop = stop_token_ids({"eos_token_id": 166101}, {"eos_token_id": [2]}, _load(tmp_path))
    assert stop == (2, len(model) + 1, 166101)


def test_a_chat_opens_a_thought_unless_told_not_to(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, dummy_prefix=False)
    tokenizer = _load(tmp_path)
    opened = (
        "<|im_start|>system\n你好<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    assert _chat(tokenizer) == opened
    assert _chat(tokenizer, enable_thinking=True) == opened
    assert _chat(tokenizer, enable_thinking=False) == f"{opened}\n</think>\n\n"


def test_a_chat_has_no_second_start_token(
    pair: tuple[Tokenizer, SentencePieceProcessor],
) -> None:
    """`add_bos_token` is for plain prompts: a template writes its start tokens itself."""
    tokenizer, model = pair
    ids = tokenizer.apply_chat_template(QUESTION, enable_thinking=False)
    assert ids.count(len(model)) == 3
    assert tokenizer.encode("你好").count(len(model)) == 1


def test_a_system_message_in_the_middle_is_the_users_to_mend(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    messages = [*QUESTION, {"role": "system", "content": "be brief"}]
    with pytest.raises(ConfigError, match="the system message must come first"):
        _load(tmp_path).apply_chat_template(messages)


def test_the_new_way_of_blanks_is_kept_where_the_folder_asks_for_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, legacy=False)
    ids = _load(tmp_path).inner.encode("hello<think>hello", add_special_tokens=False)
    tokens = _load(tmp_path).inner.convert_ids_to_tokens(ids)
    assert tokens[0].startswith("▁")
    assert not tokens[tokens.index("<think>") + 1].startswith("▁")


def test_a_normalisation_that_is_not_carried_over_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    _load(tmp_path)
    assert caplog.records == []
    write_tokenizer(tmp_path, normalisation="nfkc")
    with caplog.at_level(logging.WARNING, logger="looped_spec"):
        _load(tmp_path)
    assert "gives other ids than its tokenizer.model" in caplog.text


@pytest.mark.parametrize("module", ["sentencepiece", "google.protobuf"])
def test_without_its_libraries_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelLoadError, match="pip install sentencepiece protobuf"):
        load_tokenizer(tmp_path)


def test_a_broken_model_file_is_one_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match="cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
