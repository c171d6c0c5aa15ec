"""What offline sampling measures, and how much of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from looped_spec.control.plan import MAX_SPECULATIVE_TOKENS
from looped_spec.errors import ConfigError, check_int, check_number, reject_unknown


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of a sampling run; what each means is its help text."""

    batch_sizes: tuple[int, ...] = _setting((1, 8, 32), "requests per batch to measure at")
    context_lengths: tuple[int, ...] = _setting((128, 512), "tokens of context to time rounds at")
    ks: tuple[int, ...] | None = _setting(None, "K, draft lengths; default: 1 2 3 4 6 8")
    ds: tuple[int, ...] | None = _setting(
        None, "d, draft loops; default: all of a shallow model, else D/16, D/8, D/4 and D/2"
    )
    temperatures: tuple[float, ...] = _setting(
        (0.0,), "of the texts that acceptance is measured on"
    )
    repeats: int = _setting(5, "times that each round is timed anew, in turn with all others")
    prompts: int = _setting(24, "prompts of each workload, all from its selection group")
    prompt_tokens: int = _setting(48, "tokens of each prompt")
    screen_tokens: int = _setting(64, "new tokens of each prompt, to measure acceptance on")
    finalists: int = _setting(3, "candidates per batch size that are run on long texts")
    confirm_tokens: int = _setting(160, "new tokens of each of those texts")
    confirm_repeats: int = _setting(3, "times that this is repeated; 0 leaves it out")
    margin: float = _setting(0.02, "share by which speculation must be faster to be worth it")
    ignore_eos: bool = _setting(False, "go on behind the model's own end of a text")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("batch_sizes", 1, 2**16),
            ("context_lengths", 1, 2**31),
            ("ks", 1, MAX_SPECULATIVE_TOKENS),
            ("ds", 1, 2**16),
        ):
            values = getattr(self, name)
            if values is None:
                continue
            object.__setattr__(self, name, tuple(sorted(set(values))))
            if not values:
                raise ConfigError(f"{name} must not be empty")
            for value in values:
                check_int(name, value, low, high)
        for temperature in self.temperatures:
            check_number("temperatures", temperature, 0.0)
        object.__setattr__(self, "temperatures", tuple(sorted(set(self.temperatures))))
        if not self.temperatures:
            raise ConfigError("temperatures must not be empty")
        for name, least in (
            ("repeats", 1),
            ("prompts", 1),
            ("prompt_tokens", 1),
            ("screen_tokens", 2),
            ("finalists", 1),
            ("confirm_tokens", 2),
            ("confirm_repeats", 0),
        ):
            check_int(name, getattr(self, name), least, 2**31)
        check_number("margin", self.margin, 0.0)
        if self.margin >= 1:
            raise ConfigError(f"margin must be below 1, got {self.margin:g}")

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a JSON document."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SamplingSettings:
        """Read what `to_json` wrote."""
        reject_unknown(document, [f.name for f in dataclasses.fields(cls)], "sampling setting")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in document.items()
        }
        return cls(**values)
