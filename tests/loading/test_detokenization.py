"""The pieces of an incremental detokenizer add up to the text of decoding all at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import load, write_byte_fallback, write_byte_level

from looped_spec.detokenization import IncrementalDetokenizer
from looped_spec.tokenization import Tokenizer

EMOJI = "😀👩‍👩‍👧🇩🇪e\u0301"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    write_byte_level(folder)
    return load(folder)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_fallback")
    write_byte_fallback(folder)
    return load(folder)


@pytest.fixture(scope="module")
def single(byte_level: Tokenizer) -> dict[int, int]:
    """The one-byte token of each byte, which byte-level BPE spells as a printable character."""
    spelled = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = [byte for byte in range(256) if byte not in spelled]
    spelled |= {byte: chr(256 + number) for number, byte in enumerate(rest)}
    vocab = byte_level.inner.get_vocab()
    return {byte: vocab[character] for byte, character in spelled.items()}


class CountingTokenizer(Tokenizer):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:  # type: ignore[override]
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 430), max_size=80), st.booleans())
def test_any_ids_of_a_byte_level_tokenizer(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    assert "".join(pieces(byte_level, ids, skip)) == byte_level.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*b"\xf0\x9f\x98\x80\xe4\xbd\xa0a\xff\xc3"]), max_size=120))
def test_any_bytes_valid_or_not(
    byte_level: Tokenizer, single: dict[int, int], data: list[int]
) -> None:
    ids = [single[byte] for byte in data]
    assert byte_level.decode(ids) == bytes(data).decode("utf-8", errors="replace")
    assert "".join(pieces(byte_level, ids)) == byte_level.decode(ids)


def in_parts(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Take ids several at a time; the last size repeats."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts, place = [], 0
    while place < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        parts.append(detokenizer.extend(ids[place : place + size]))
        place += size
    return [*parts, detokenizer.flush()]


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*b"\xf0\x9f\x98\x80\xe4\xbd\xa0ab\xff\xc3"]), max_size=120), SIZES)
def test_several_bytes_at_once_valid_or_not(
    byte_level: Tokenizer, single: dict[int, int], data: list[int], sizes: list[int]
) -> None:
    ids = [single[byte] for byte in data]
    assert "".join(in_parts(byte_level, ids, sizes)) == byte_level.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from("ab ch"), st.sampled_from(EMOJI + "你ü"))), SIZES)
def test_several_tokens_at_once_never_give_half_a_character(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str, sizes: list[int]
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(text)
        parts = in_parts(tokenizer, ids, list(sizes))
        assert "".join(parts) == tokenizer.decode(ids)
        assert not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(EMOJI))))
def test_any_text_comes_back_and_never_half_a_character(byte_level: Tokenizer, text: str) -> None:
    out = pieces(byte_level, byte_level.encode(text))
    assert "".join(out) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in out)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from("ab ch"), st.sampled_from(EMOJI + "你ü"))))
def test_valid_text_of_a_byte_fallback_tokenizer(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode(text)
    assert "".join(pieces(byte_fallback, ids)) == byte_fallback.decode(ids)


def test_a_character_is_held_back_until_its_last_byte(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("a😀b")
    assert [piece for piece in pieces(byte_fallback, ids) if piece] == ["a", "😀", "b"]


def test_flush_shows_half_a_character_and_starts_anew(
    byte_level: Tokenizer, single: dict[int, int]
) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.append(single[byte]) for byte in b"a\xf0\x9f"] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.append(single[ord("b")]) == "b"


def test_special_tokens_inside_a_character_do_not_split_it(
    byte_level: Tokenizer, single: dict[int, int]
) -> None:
    first, *rest = (single[byte] for byte in "😀".encode())
    ids = [first, *[1, 2, 10**6] * 20, *rest]
    assert "".join(pieces(byte_level, ids)) == byte_level.decode(ids) == "😀"


@pytest.mark.parametrize(
    "data",
    [
        b"hello world ",
        "😀".encode(),
        "你好".encode(),
        b"\xff",
        b"\x80",
        b"\xf0\x9f",
        b"\xf0\x9f\x98",
        b"\xe4a\x80",
    ],
)
def test_the_work_per_token_does_not_grow(
    byte_level: Tokenizer, single: dict[int, int], data: bytes
) -> None:
    counting = CountingTokenizer(byte_level.inner)
    work = []
    for repeats in (1, 4):
        ids = [single[byte] for byte in data] * (repeats * 600 // len(data))
        counting.decoded = 0
        out = "".join(pieces(counting, ids))
        work.append(counting.decoded / len(ids))
        assert out == byte_level.decode(ids)
    assert work[1] < 1.2 * work[0]
    assert work[1] < 80


def test_tokens_that_never_end_with_a_character(byte_level: Tokenizer) -> None:
    """Emoji cut so that every token ends in the middle of one: no token boundary is a clean one."""

    class Shifted(CountingTokenizer):
        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:  # type: ignore[override]
            self.decoded += len(token_ids)
            tokens = {0: b"\xf0\x9f\x98", 1: b"\x80\xf0\x9f\x98", 2: b"\x80"}
            data = b"".join(tokens[token_id] for token_id in token_ids)
            return data.decode("utf-8", errors="replace")

        def knows(self, token_id: int) -> bool:
            return True

    shifted = Shifted(byte_level.inner)
    shifted.special_token_ids = frozenset()
    ids = [0, *[1] * 3000, 2]
    assert "".join(pieces(shifted, ids)) == "😀" * 3001
    assert shifted.decoded < 40 * len(ids)


def test_many_tokens_at_once_are_decoded_once(byte_level: Tokenizer) -> None:
    counting = CountingTokenizer(byte_level.inner)
    ids = byte_level.encode("the cat sat on the mat " * 40)
    assert in_parts(counting, ids, [len(ids)])[0] == byte_level.decode(ids)
    assert counting.decoded < 1.2 * len(ids)


def test_a_long_run_of_byte_tokens_stays_cheap(byte_fallback: Tokenizer) -> None:
    counting = CountingTokenizer(byte_fallback.inner)
    text = "a" + "😀你ü" * 300 + "b"
    ids = byte_fallback.encode(text)
    assert "".join(pieces(counting, ids)) == text
    assert counting.decoded < 120 * len(ids)
