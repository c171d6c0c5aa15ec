"""What tests of the command line share: the outcome of a command, and a pretended terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


Generate = Callable[..., Outcome]


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal and keeps every write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)
