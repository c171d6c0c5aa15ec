"""A trace as a JSON document: reading one with every check, and writing one.

Keys, ranges and defaults are in docs/control.md. Every mistake in a document is a `ConfigError`
that names the place, what stands there, and what may.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.trace import CostError, Survival, Trace, TracePhase
from looped_spec.errors import ConfigError, check_int, reject_unknown

SCHEMA_VERSION = 1

_TRACE_KEYS = (
    "schema_version",
    "name",
    "full_loops",
    "candidates",
    "phases",
    "cost_noise",
    "cost_error",
    "feedback_delay",
    "feedback_duplicates",
    "resume_ms",
)
_PHASE_KEYS = (
    "rounds",
    "batch_size",
    "context_tokens",
    "survival",
    "requests",
    "cost_ms",
    "table_ms",
    "shadow_ms",
    "mixed_prefill",
    "prefill_ms",
    "cohort_change",
)
_ERROR_KEYS = ("cell_deviation", "depths", "cells")
_CELL = re.compile(r"(\d{1,6}),(\d{1,6})")
_MAX_ROUNDS = 10**7
_MAX_MS = 1e9


def read_trace(document: object) -> Trace:
    """Check a JSON document and make a trace of it; raises `ConfigError`."""
    fields = _object("the trace", document)
    reject_unknown(fields, _TRACE_KEYS, "key in the trace")
    version = _required("the trace", fields, "schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ConfigError(f"schema_version must be {SCHEMA_VERSION}, got {version!r}")
    full_loops = _required("the trace", fields, "full_loops")
    check_int("full_loops", full_loops, 2, 1024)
    candidates = _candidates(_required("the trace", fields, "candidates"), full_loops)
    phases = _list("phases", _required("the trace", fields, "phases"))
    name = fields.get("name", "trace")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name must be a text of at least one character, got {name!r}")
    delay = fields.get("feedback_delay", 0)
    check_int("feedback_delay", delay, 0, 1000)
    return Trace(
        full_loops=full_loops,
        candidates=candidates,
        phases=tuple(
            _phase(f"phases[{number}]", phase, candidates) for number, phase in enumerate(phases)
        ),
        name=name,
        cost_noise=_number("cost_noise", fields.get("cost_noise", 0.0), 0.0, 2.0),
        cost_error=_cost_error(fields.get("cost_error", {}), candidates),
        feedback_delay=delay,
        feedback_duplicates=_number(
            "feedback_duplicates", fields.get("feedback_duplicates", 0.0), 0.0, 1.0
        ),
        resume_ms=_number("resume_ms", fields.get("resume_ms", 0.0), 0.0, _MAX_MS),
    )


def _candidates(value: object, full_loops: int) -> tuple[Candidate, ...]:
    """Read [[K, d], ...]: each possible at this depth, none twice, plain decoding among them."""
    found: list[Candidate] = []
    for number, pair in enumerate(_list("candidates", value)):
        where = f"candidates[{number}]"
        numbers = _list(where, pair)
        if len(numbers) != 2:
            raise ConfigError(f"{where} must be a pair [K, d], got {pair!r}")
        for part, text in zip(numbers, ("K", "d"), strict=True):
            check_int(f"{where}: {text}", part, 0)
        candidate = Candidate(*numbers)
        try:
            checked = candidate.check(full_loops)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if checked != candidate:
            raise ConfigError(f"{where}: plain decoding is [0, 0], got {pair!r}")
        if candidate in found:
            raise ConfigError(f"{where}: {pair!r} is there twice")
        found.append(candidate)
    if PLAIN not in found:
        raise ConfigError("candidates must contain [0, 0], plain decoding, which all is held to")
    return tuple(found)


def _phase(where: str, value: object, candidates: Sequence[Candidate]) -> TracePhase:
    fields = _object(where, value)
    reject_unknown(fields, _PHASE_KEYS, f"key in {where}:")
    rounds = _required(where, fields, "rounds")
    check_int(f"{where}.rounds", rounds, 1, _MAX_ROUNDS)
    batch_size = _required(where, fields, "batch_size")
    check_int(f"{where}.batch_size", batch_size, 1, 2**16)
    context_tokens = fields.get("context_tokens", 0)
    check_int(f"{where}.context_tokens", context_tokens, 0, 2**31)
    cohort_change = fields.get("cohort_change", False)
    if not isinstance(cohort_change, bool):
        raise ConfigError(f"{where}.cohort_change must be true or false, got {cohort_change!r}")
    cost_ms = _costs(f"{where}.cost_ms", _required(where, fields, "cost_ms"), candidates)
    table_ms, shadow_ms = fields.get("table_ms"), fields.get("shadow_ms")
    prefill_ms = fields.get("prefill_ms", cost_ms[PLAIN])
    return TracePhase(
        rounds=rounds,
        batch_size=batch_size,
        context_tokens=context_tokens,
        requests=_requests(where, fields, candidates),
        cost_ms=cost_ms,
        table_ms=cost_ms if table_ms is None else _costs(f"{where}.table_ms", table_ms, candidates),
        shadow_ms=None
        if shadow_ms is None
        else _number(f"{where}.shadow_ms", shadow_ms, 0.0, _MAX_MS),
        mixed_prefill=_number(f"{where}.mixed_prefill", fields.get("mixed_prefill", 0.0), 0.0, 1.0),
        prefill_ms=_number(f"{where}.prefill_ms", prefill_ms, 0.0, _MAX_MS),
        cohort_change=cohort_change,
    )


def _requests(
    where: str, fields: Mapping[str, Any], candidates: Sequence[Candidate]
) -> tuple[Survival, ...]:
    """Read `survival`, or `requests` with one survival for each of several kinds."""
    if ("survival" in fields) == ("requests" in fields):
        raise ConfigError(f"{where} must have either survival or requests")
    if "survival" in fields:
        return (_survival(f"{where}.survival", fields["survival"], candidates),)
    found = []
    for number, request in enumerate(_list(f"{where}.requests", fields["requests"])):
        place = f"{where}.requests[{number}]"
        keys = _object(place, request)
        reject_unknown(keys, ("survival",), f"key in {place}:")
        survival = _required(place, keys, "survival")
        found.append(_survival(f"{place}.survival", survival, candidates))
    return tuple(found)


def _survival(where: str, value: object, candidates: Sequence[Candidate]) -> Survival:
    """Read d -> [s_1, s_2, ...], one list for every depth, as long as its longest draft."""
    longest: dict[int, int] = {}
    for candidate in candidates:
        if candidate != PLAIN:
            d = candidate.draft_loops
            longest[d] = max(longest.get(d, 0), candidate.num_speculative_tokens)
    fields = _object(where, value)
    reject_unknown(fields, [str(d) for d in longest], f"draft depth in {where}:")
    found = {}
    for d, k in longest.items():
        place = f"{where}['{d}']"
        rates = _list(place, _required(where, fields, str(d)))
        if len(rates) < k:
            raise ConfigError(
                f"{place} must have at least {k} numbers, since candidates has [{k}, {d}]; "
                f"got {len(rates)}"
            )
        before = 1.0
        for number, rate in enumerate(rates):
            _number(f"{place}[{number}]", rate, 0.0, 1.0)
            if rate > before:
                raise ConfigError(
                    f"{place}[{number}] must be at most {before}, the one before it, got {rate}"
                )
            before = rate
        found[d] = tuple(float(rate) for rate in rates)
    return found


def _costs(where: str, value: object, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
    """Read "K,d" -> milliseconds, one for every candidate and no other."""
    fields = _object(where, value)
    known = [_cell(candidate) for candidate in candidates]
    reject_unknown(fields, known, f"candidate in {where}:")
    found = {}
    for candidate, name in zip(candidates, known, strict=True):
        place = f"{where}['{name}']"
        found[candidate] = _number(place, _required(where, fields, name), 1e-6, _MAX_MS)
    return found


def _cost_error(value: object, candidates: Sequence[Candidate]) -> CostError:
    where = "cost_error"
    fields = _object(where, value)
    reject_unknown(fields, _ERROR_KEYS, f"key in {where}:")
    depths = _object(f"{where}.depths", fields.get("depths", {}))
    by_name = {str(c.draft_loops): c.draft_loops for c in candidates}
    reject_unknown(depths, by_name, f"draft depth in {where}.depths:")
    cells = _object(f"{where}.cells", fields.get("cells", {}))
    by_cell = {_cell(candidate): candidate for candidate in candidates}
    reject_unknown(cells, by_cell, f"candidate in {where}.cells:")
    deviation = fields.get("cell_deviation", 0.0)
    return CostError(
        cell_deviation=_number(f"{where}.cell_deviation", deviation, 0.0, 2.0),
        depths={
            by_name[name]: _number(f"{where}.depths['{name}']", factor, 0.01, 100.0)
            for name, factor in depths.items()
        },
        cells={
            by_cell[name]: _number(f"{where}.cells['{name}']", factor, 0.01, 100.0)
            for name, factor in cells.items()
        },
    )


def _cell(candidate: Candidate) -> str:
    return f"{candidate.num_speculative_tokens},{candidate.draft_loops}"


def trace_document(trace: Trace) -> dict[str, Any]:
    """Return the document that `read_trace` makes this trace of."""
    error = trace.cost_error
    return {
        "schema_version": SCHEMA_VERSION,
        "name": trace.name,
        "full_loops": trace.full_loops,
        "candidates": [[c.num_speculative_tokens, c.draft_loops] for c in trace.candidates],
        "phases": [_phase_document(phase) for phase in trace.phases],
        "cost_noise": trace.cost_noise,
        "cost_error": {
            "cell_deviation": error.cell_deviation,
            "depths": {str(d): factor for d, factor in error.depths.items()},
            "cells": {_cell(candidate): factor for candidate, factor in error.cells.items()},
        },
        "feedback_delay": trace.feedback_delay,
        "feedback_duplicates": trace.feedback_duplicates,
        "resume_ms": trace.resume_ms,
    }


def _phase_document(phase: TracePhase) -> dict[str, Any]:
    survivals = [{str(d): list(s) for d, s in kind.items()} for kind in phase.requests]
    document: dict[str, Any] = {
        "rounds": phase.rounds,
        "batch_size": phase.batch_size,
        "context_tokens": phase.context_tokens,
        "cost_ms": {_cell(candidate): cost for candidate, cost in phase.cost_ms.items()},
        "mixed_prefill": phase.mixed_prefill,
        "prefill_ms": phase.prefill_ms,
        "cohort_change": phase.cohort_change,
    }
    if len(survivals) == 1:
        document["survival"] = survivals[0]
    else:
        document["requests"] = [{"survival": survival} for survival in survivals]
    if phase.table_ms != phase.cost_ms:
        document["table_ms"] = {_cell(c): cost for c, cost in phase.table_ms.items()}
    if phase.shadow_ms is not None:
        document["shadow_ms"] = phase.shadow_ms
    return document


def parse_candidate(text: str) -> Candidate:
    """Read "K,d"; raises `ConfigError`."""
    match = _CELL.fullmatch(text)
    if match is None:
        raise ConfigError(f"a candidate must be written K,d, as in 2,1, got {text!r}")
    return Candidate(int(match[1]), int(match[2]))


def _object(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be an object, got {_shown(value)}")
    return value


def _list(where: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{where} must be a list of at least one, got {_shown(value)}")
    return value


def _required(where: str, fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise ConfigError(f"{where} has no '{key}', which it needs")
    return fields[key]


def _number(where: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{where} must be a number from {low:g} to {high:g}, got {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
