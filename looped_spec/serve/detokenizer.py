"""A detokenizer that keeps its failure to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from looped_spec.runtime.request import Detokenizer


class GuardedDetokenizer:
    """Passes tokens on and notes the first exception instead of raising it.

    A step commits the tokens of many requests; one whose text cannot be made must not stop the
    others. Whoever made the request looks at `error` after the step. After a failure there is no
    text any more.
    """

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def append(self, token_id: int) -> str:
        """Take a token and return the text that became sure."""
        return self._guarded(lambda: self._inner.append(token_id))

    def extend(self, token_ids: Sequence[int]) -> str:
        """Take tokens and return the text that became sure."""
        return self._guarded(lambda: self._inner.extend(token_ids))

    def flush(self) -> str:
        """Return what was held back."""
        return self._guarded(lambda: self._inner.flush())

    def _guarded(self, make_text: Callable[[], str]) -> str:
        if self.error is None:
            try:
                return make_text()
            except Exception as error:
                self.error = error
        return ""
