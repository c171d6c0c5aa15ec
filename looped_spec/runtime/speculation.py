"""Who chooses (K, d), and from what: the options, completed by what the model suggests."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looped_spec.adapter import ModelAdapter
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError, check_int, reject_unknown
from looped_spec.options import EngineOptions

logger = logging.getLogger(__name__)

Speculation = Candidate | AdaptiveSpecConfig
"""The same (K, d) in every round, or what is chosen from."""

METHOD = "self_speculative"
_PER_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
_KEYS = ("method", "num_speculative_tokens", "draft_loops", _PER_BATCH_SIZE)


def choose_speculation(
    options: EngineOptions, adapter: ModelAdapter, full_loops: int
) -> Speculation:
    """Return what the options ask for, or what suits the model where they say nothing.

    Raises:
        ConfigError: K, d or a configuration is out of the model's range, or unreadable.
    """
    if options.speculative_config is not None:
        return read_speculative_config(options, adapter, full_loops)
    if options.speculative_adaptive_config is not None:
        return _given_config(options, full_loops)
    k = options.num_speculative_tokens
    if k is not None:
        return complete_candidate(k, options.draft_loops, adapter, full_loops)
    if full_loops < 2 and not options.adapts:
        return PLAIN
    if options.adapts is None and adapter.default_speculation is None:
        if adapter.speculation_note:
            logger.info("speculation is off by default: %s", adapter.speculation_note)
        return PLAIN
    if options.adapts is False:
        suggested = adapter.default_speculation
        return complete_candidate(suggested[0] if suggested else 0, None, adapter, full_loops)
    return default_config(adapter, full_loops, options.max_num_seqs, options.policy or "goodput")


def complete_candidate(
    num_speculative_tokens: int, draft_loops: int | None, adapter: ModelAdapter, full_loops: int
) -> Candidate:
    """Return a (K, d) that the model can do; d left out is what the adapter suggests."""
    if draft_loops is None:
        suggested = adapter.default_speculation
        draft_loops = min(suggested[1] if suggested else 1, max(full_loops - 1, 1))
    elif num_speculative_tokens == 0:
        # Nothing is drafted, so it does not matter, but a mistake should not pass unseen.
        check_int("draft_loops", draft_loops, 0, full_loops - 1)
    return Candidate(num_speculative_tokens, draft_loops).check(full_loops)


def default_config(
    adapter: ModelAdapter, full_loops: int, max_num_seqs: int, policy: str
) -> AdaptiveSpecConfig:
    """Return what is chosen from where nobody says; it starts from what the model suggests."""
    Candidate(1, 1).check(full_loops)  # refuses a model of one loop
    config = AdaptiveSpecConfig.default(full_loops, max_num_seqs, policy=policy)
    if adapter.default_speculation is None:
        return config
    start = complete_candidate(adapter.default_speculation[0], None, adapter, full_loops)
    is_ladder = policy != "goodput"  # one depth, which acceptance is compared along
    buckets = [_starting_from(start, bucket, is_ladder) for bucket in config.buckets]
    return dataclasses.replace(config, buckets=tuple(buckets))


def _starting_from(start: Candidate, bucket: BatchBucket, is_ladder: bool) -> BatchBucket:
    """Return the bucket with `start` as its initial candidate, where that is not too long for it
    or strange to its ladder."""
    candidates = bucket.candidates
    if start not in candidates:
        if is_ladder or start.num_speculative_tokens > bucket.max_speculative_tokens:
            return bucket
        candidates = (*candidates, start)
    return dataclasses.replace(bucket, candidates=candidates, initial=candidates.index(start))


def _given_config(options: EngineOptions, full_loops: int) -> AdaptiveSpecConfig:
    """Return `speculative_adaptive_config` if this run can do it."""
    given = options.speculative_adaptive_config
    if isinstance(given, AdaptiveSpecConfig):
        config = given
    else:
        config = AdaptiveSpecConfig.from_json(_document("speculative_adaptive_config", given))
    if options.policy not in (None, config.policy):
        raise ConfigError(
            f"policy='{options.policy}' and speculative_adaptive_config, whose policy is "
            f"'{config.policy}', contradict each other: leave policy out or change the file's"
        )
    return check_config(config, full_loops, options.max_num_seqs)


def check_config(
    config: AdaptiveSpecConfig, full_loops: int, max_num_seqs: int
) -> AdaptiveSpecConfig:
    """Return the configuration if a run of this depth and size can do it."""
    if config.full_loops != full_loops:
        raise ConfigError(
            f"the adaptive configuration is for full_loops {config.full_loops}, this run has "
            f"{full_loops}: give full_loops={config.full_loops} to run as deep, or a "
            f"configuration made for full_loops {full_loops}"
        )
    return config.check_engine(max_num_seqs)


def read_speculative_config(
    options: EngineOptions, adapter: ModelAdapter, full_loops: int
) -> Speculation:
    """Return what `speculative_config` says: one (K, d), or one for each range of batch sizes."""
    name = "speculative_config"
    document = _document(name, options.speculative_config)
    reject_unknown(document, _KEYS, f"key of {name}")
    method = document.get("method", METHOD)
    if method != METHOD:
        raise ConfigError(
            f"method of {name} must be '{METHOD}', got {method!r}: a looped model drafts for itself"
        )
    k, d = document.get("num_speculative_tokens"), document.get("draft_loops")
    for key, value in (("num_speculative_tokens", k), ("draft_loops", d)):
        if value is not None:
            check_int(f"{key} of {name}", value)
    if _PER_BATCH_SIZE not in document:
        if k is None:
            raise ConfigError(f"{name} needs num_speculative_tokens or {_PER_BATCH_SIZE}")
        return complete_candidate(k, d, adapter, full_loops)
    entries = document[_PER_BATCH_SIZE]
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(f"{_PER_BATCH_SIZE} must be a list of [start, end, K], got {entries!r}")
    buckets = []
    for entry in entries:
        low, high, own_k, own_d = _entry(entry, d)
        if k is not None and own_k > k:
            raise ConfigError(
                f"{_PER_BATCH_SIZE} has K = {own_k}, above num_speculative_tokens = {k} of {name}"
            )
        candidate = complete_candidate(own_k, own_d, adapter, full_loops)
        buckets.append(BatchBucket(low, high, (candidate,)))
    config = AdaptiveSpecConfig(full_loops, tuple(buckets), policy="static")
    return check_config(config, full_loops, options.max_num_seqs)


def _entry(entry: Any, draft_loops: int | None) -> tuple[int, int, int, int | None]:
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) not in (3, 4):
        raise ConfigError(
            f"an entry of {_PER_BATCH_SIZE} must be [start, end, K] or [start, end, K, d], "
            f"got {entry!r}"
        )
    for what, value in zip(("start", "end", "K", "d"), entry, strict=False):
        check_int(f"{what} of {_PER_BATCH_SIZE}", value)
    low, high, k, *rest = entry
    return low, high, k, rest[0] if rest else draft_loops


def _document(name: str, given: Any) -> Mapping[str, Any]:
    """Return a JSON object that came as a mapping, as its text, or as the path of a file."""
    if isinstance(given, Mapping):
        return given
    text, source = str(given).strip(), name
    if not isinstance(given, str | Path) or not text or _is_json(text):
        raise ConfigError(
            f"{name} must be a JSON object or the name of a file with one, got {given!r:.60}"
        )
    if not text.startswith("{"):
        source = f"{name} '{given}'"
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"{source} cannot be read: {error}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source} must be a JSON object, got {document!r:.60}")
    return document


def _is_json(text: str) -> bool:
    """Return whether a text is JSON, but no object, or seems meant to be a list."""
    if text.startswith("["):
        return True
    try:
        return not isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
