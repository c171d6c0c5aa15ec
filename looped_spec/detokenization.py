"""Text of a growing list of token ids, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from looped_spec.tokenization import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put for bytes that are not UTF-8 (yet)
_MAX_CHARACTER_BYTES = 4
_CONTEXT_CHARACTERS = 4
_WINDOW_TOKENS = 16


class IncrementalDetokenizer:
    """Turn token ids into text as they come; the pieces add up to the text of decoding all at once.

    Only a window of the last tokens is decoded each time, so the cost per token does not grow. What
    a later token may still change is held back: a character whose bytes have not all come. For
    byte-level tokenizers the sum is exact for any ids; for those that fall back to bytes it is
    exact for valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._silent = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were returned
        self._stalled = 0  # tokens since the last progress
        self._limit = _WINDOW_TOKENS

    def append(self, token_id: int) -> str:
        """Return the text that `token_id` completes; empty if it only starts a character."""
        if not self._is_shown(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text.rstrip(_REPLACEMENT))
        if stable > self._shown or stable == len(text):
            self._stalled = 0
        else:
            # A token is a byte at least: four of them without a character will not become one, and
            # only the last replacement may still do.
            self._stalled += 1
            if self._stalled >= _MAX_CHARACTER_BYTES:
                stable = len(text) - 1
        new = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if len(self._window) >= self._limit:
            self._shorten(text)
        return new

    def extend(self, token_ids: Sequence[int]) -> str:
        """Return the text that `token_ids` complete: that of appending one by one, decoded at
        once."""
        shown = [token_id for token_id in token_ids if self._is_shown(token_id)]
        if not shown:
            return ""
        window = self._window + shown
        text = self._decode(window)
        if text.endswith(_REPLACEMENT):  # how many tokens a character waits for counts
            return "".join([self.append(token_id) for token_id in shown])
        new = text[self._shown :]
        self._window, self._shown, self._stalled = window, len(text), 0
        if len(window) >= self._limit:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """Return what is held back, as far as it can be decoded, and start anew."""
        rest = self._decode(self._window)[self._shown :]
        self._window, self._shown, self._stalled = [], 0, 0
        return rest

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._silent and self._tokenizer.knows(token_id)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _shorten(self, text: str) -> None:
        """Drop the older half of the window, at a place that leaves the end of its text the same.

        The window may then begin inside a character, which garbles at most its first three
        characters: hence the four that must agree before what is held back. Where no such place is
        found (many bytes a character), the window gets longer instead.
        """
        held = len(text) - self._shown
        tail = text[max(self._shown - _CONTEXT_CHARACTERS, 0) :]
        if held > 1 or len(tail) < _CONTEXT_CHARACTERS + held:
            return
        middle = len(self._window) - self._limit // 2
        for start in range(middle, middle - _MAX_CHARACTER_BYTES, -1):
            shorter = self._decode(self._window[start:])
            if shorter.endswith(tail):
                self._window = self._window[start:]
                self._shown = len(shorter) - held
                return
        self._limit *= 2
