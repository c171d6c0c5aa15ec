"""The options of `serve --ray` beside those of the server; its flags come from here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from looped_spec.errors import ConfigError, check_int, check_number

MOST_REPLICAS = 2**12
_AUTOSCALING = (
    "min_replicas",
    "max_replicas",
    "target_ongoing_requests",
    "upscale_delay_seconds",
    "downscale_delay_seconds",
)


def _option(text: str) -> Any:
    return dataclasses.field(default=None, metadata={"help": text})


@dataclass(frozen=True)
class RayOptions:
    """How many replicas there are and what each gets; None is the default that the help tells."""

    replicas: int | None = _option("engines, each a replica of its own; default: 1")
    min_replicas: int | None = _option(
        "fewest replicas; with this or --max-replicas Ray Serve adds and removes them by load; "
        "default: 1"
    )
    max_replicas: int | None = _option("most replicas that Ray Serve adds; default: min_replicas")
    target_ongoing_requests: float | None = _option(
        "requests per replica that Ray Serve aims at when it adds and removes replicas; "
        "default: max_num_seqs"
    )
    upscale_delay_seconds: float | None = _option(
        "how long the load must ask for more replicas before Ray Serve adds them; default: Ray's, "
        "30"
    )
    downscale_delay_seconds: float | None = _option(
        "how long the load must need fewer replicas before Ray Serve removes them; default: Ray's, "
        "600"
    )
    gpus_per_replica: float | None = _option(
        "GPUs, or a part of one, for each replica; default: 1 where the cluster has any"
    )
    cpus_per_replica: float | None = _option("CPUs for each replica; default: 1")

    def __post_init__(self) -> None:
        for name in ("replicas", "min_replicas", "max_replicas"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, 1, MOST_REPLICAS)
        for name, least in (
            ("target_ongoing_requests", 1.0),
            ("upscale_delay_seconds", 0.0),
            ("downscale_delay_seconds", 0.0),
            ("gpus_per_replica", 0.0),
            ("cpus_per_replica", 0.0),
        ):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least)
        if self.replicas is not None and self.is_autoscaling:
            raise ConfigError(
                f"replicas is a fixed number: it goes with none of {', '.join(_AUTOSCALING)}"
            )
        for name in _AUTOSCALING[2:]:
            if getattr(self, name) is not None and self.max_replicas is None:
                raise ConfigError(f"{name} needs max_replicas")
        if self.max_replicas is not None and self.max_replicas < (self.min_replicas or 1):
            raise ConfigError(
                f"max_replicas must be at least min_replicas = {self.min_replicas}, "
                f"got {self.max_replicas}"
            )

    @property
    def is_autoscaling(self) -> bool:
        """Whether Ray Serve chooses how many replicas there are."""
        return any(getattr(self, name) is not None for name in _AUTOSCALING)

    def check_unused(self) -> None:
        """Raise `ConfigError` if an option was given, for a command line without --ray."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                raise ConfigError(f"--{field.name.replace('_', '-')} needs --ray")

    def scale(self, max_num_seqs: int) -> dict[str, Any]:
        """Return the options of a Ray Serve deployment that say how many replicas it has."""
        if not self.is_autoscaling:
            return {"num_replicas": self.replicas or 1}
        fewest = self.min_replicas or 1
        autoscaling = {
            "min_replicas": fewest,
            "initial_replicas": fewest,
            "max_replicas": self.max_replicas or fewest,
            "target_ongoing_requests": self.target_ongoing_requests or max_num_seqs,
        }
        for name, value in (
            ("upscale_delay_s", self.upscale_delay_seconds),
            ("downscale_delay_s", self.downscale_delay_seconds),
        ):
            if value is not None:
                autoscaling[name] = value
        return {"autoscaling_config": autoscaling}
