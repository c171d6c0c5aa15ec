"""`AdaptiveSpecConfig` as a JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from looped_spec.control.acceptance_prior import AcceptancePrior
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.cost import CostTable
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.plan import Candidate
from looped_spec.errors import ConfigError, check_int, reject_unknown

SCHEMA_VERSION = 1


def config_document(config: AdaptiveSpecConfig) -> dict[str, Any]:
    """Return the document; candidates are [K, d] pairs, as in a preset."""
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    for f in fields(config):
        document[f.name] = getattr(config, f.name)
    document["buckets"] = [_bucket_document(bucket) for bucket in config.buckets]
    document["cost"] = None if config.cost is None else config.cost.to_json()
    prior = config.acceptance_prior
    document["acceptance_prior"] = None if prior is None else prior.to_json()
    document["goodput"] = asdict(config.goodput)
    document["padded_batch_sizes"] = list(config.padded_batch_sizes)
    if config.depth_offsets is not None:
        document["depth_offsets"] = [list(pair) for pair in config.depth_offsets]
    return document


def read_config(document: Mapping[str, Any]) -> AdaptiveSpecConfig:
    """Make the configuration of a document; what is left out takes its default."""
    if not isinstance(document, Mapping):
        raise ConfigError(f"a configuration must be a JSON object, got {document!r:.40}")
    names = [f.name for f in fields(AdaptiveSpecConfig)]
    reject_unknown(document, ["schema_version", *names], "configuration key")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"schema_version of a configuration must be {SCHEMA_VERSION}, "
            f"got {document.get('schema_version')!r}"
        )
    for name in ("full_loops", "buckets"):
        if name not in document:
            raise ConfigError(f"a configuration needs {name}")
    values = {name: document[name] for name in names if name in document}
    values["buckets"] = tuple(_read_bucket(b) for b in _list(document, "buckets"))
    if values.get("cost") is not None:
        values["cost"] = CostTable.from_json(values["cost"])
    if values.get("acceptance_prior") is not None:
        values["acceptance_prior"] = AcceptancePrior.from_json(values["acceptance_prior"])
    if "goodput" in values:
        if not isinstance(values["goodput"], Mapping):
            raise ConfigError(f"goodput must be a JSON object, got {values['goodput']!r:.40}")
        known = [f.name for f in fields(GoodputSettings)]
        reject_unknown(values["goodput"], known, "goodput setting")
        values["goodput"] = GoodputSettings(**values["goodput"])
    if "padded_batch_sizes" in values:
        sizes = tuple(_list(document, "padded_batch_sizes"))
        for size in sizes:
            check_int("padded_batch_sizes", size, 1)
        values["padded_batch_sizes"] = sizes
    if values.get("depth_offsets") is not None:
        values["depth_offsets"] = tuple(
            _read_offset(pair) for pair in _list(document, "depth_offsets")
        )
    return AdaptiveSpecConfig(**values)


def _bucket_document(bucket: BatchBucket) -> dict[str, Any]:
    document: dict[str, Any] = {f.name: getattr(bucket, f.name) for f in fields(bucket)}
    document["candidates"] = [[c.num_speculative_tokens, c.draft_loops] for c in bucket.candidates]
    for name in ("up", "down"):
        if document[name] is not None:
            document[name] = list(document[name])
    return document


def _read_bucket(document: Any) -> BatchBucket:
    if not isinstance(document, Mapping):
        raise ConfigError(f"a batch bucket must be a JSON object, got {document!r:.40}")
    reject_unknown(document, [f.name for f in fields(BatchBucket)], "bucket key")
    for name in ("min_batch_size", "max_batch_size", "candidates"):
        if name not in document:
            raise ConfigError(f"a batch bucket needs {name}")
    values = dict(document)
    values["candidates"] = tuple(_read_candidate(c) for c in _list(document, "candidates"))
    for name in ("up", "down"):
        if values.get(name) is not None:
            values[name] = tuple(_list(document, name))
    return BatchBucket(**values)


def _read_candidate(pair: Any) -> Candidate:
    if (
        not isinstance(pair, list | tuple)
        or len(pair) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) for n in pair)
    ):
        raise ConfigError(f"a candidate must be a pair of integers [K, d], got {pair!r:.40}")
    return Candidate(*pair)


def _read_offset(pair: Any) -> tuple[int, float]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ConfigError(f"an entry of depth_offsets must be [d, gain], got {pair!r:.40}")
    return pair[0], pair[1]


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    value = document[name]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list, got {value!r:.40}")
    return list(value)
