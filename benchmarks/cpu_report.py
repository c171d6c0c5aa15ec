"""What the parts of the CPU benchmark amount to: rates, ratios turn by turn, and their tables.

Every part is as `cpu_speed` keeps it: a mapping of numbers, times in milliseconds, named by what it
measures, at which batch size and in which turn. Summaries are made of whatever parts there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cpu_model import StageTimes
from kept_parts import Part
from results import markdown

OFFICIAL = {1: 11.0, 8: 46.0}
"""Tokens per second of the official implementation's `generate` by batch size, recorded before on
a machine of this kind (2 cores, about 17.5 GB/s); not measured in this run."""
BF16, FP32, BEFORE = "auto, bf16 numbers", "auto, fp32 numbers", "plain"
NATIVE = "auto and native kernels, bf16 numbers"
NATIVE_FP32 = "auto and native kernels, fp32 numbers"
LLAMA, OFFICIAL_CODE = "transformers", "official"
REFERENCES = (LLAMA, OFFICIAL_CODE)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the greatest."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "greatest": round(max(values), 4),
    }


def turns_of(parts: Mapping[str, Part], kind: str) -> list[Part]:
    """Return the turns of a kind that were measured, in order."""
    mine = {name: part for name, part in parts.items() if name.startswith(f"{kind}, turn ")}
    return [mine[name] for name in sorted(mine, key=lambda name: int(name.rpartition(" ")[2]))]


def plain_rows(
    parts: Mapping[str, Part], batch_sizes: Sequence[int], tokens: int, bound_seconds: float
) -> list[dict[str, Any]]:
    """Return a row for every way at every batch size; ratios are taken turn by turn."""
    rows = []
    for batch_size in batch_sizes:
        turns = turns_of(parts, f"plain decoding, B={batch_size}")
        for way in turns[0] if turns else ():
            mine = [turn[way] for turn in turns]
            rates = [1e3 * batch_size * tokens / one for one in mine]
            row: dict[str, Any] = {
                "batch_size": batch_size,
                "way": way,
                "tokens_per_second": summary(rates),
            }
            for other in (BEFORE, *REFERENCES):
                if other in turns[0] and way != other and way not in REFERENCES:
                    row[f"ratio_to_{other}"] = summary([turn[other] / turn[way] for turn in turns])
            rate = statistics.median(rates)
            if batch_size in OFFICIAL and way not in REFERENCES:
                row["ratio_to_recorded"] = round(rate / OFFICIAL[batch_size], 2)
            if bound_seconds:
                row["share_of_bound"] = round(bound_seconds / (batch_size / rate), 3)
            rows.append(row)
    return rows


def predicted_ms(k: int, d: int, loops: int, one: StageTimes, many: StageTimes) -> float:
    """Return the time of a round from those of its stages over B and over B (K + 1) rows."""
    if not k:
        return one.prelude + loops * one.loop + one.readout
    drafts = (k + 1) * (one.prelude + d * one.loop) + k * one.readout
    return drafts + (loops - d) * many.loop + many.readout


def speculation_rows(
    parts: Mapping[str, Part],
    batch_sizes: Sequence[int],
    draft_tokens: Sequence[int],
    draft_loops: int,
    loops: int,
    acceptance: float,
) -> list[dict[str, Any]]:
    """Compare each K with plain decoding, turn by turn, and with what the stages predict."""
    rows = []
    for batch_size in batch_sizes:
        turns = turns_of(parts, f"speculation, B={batch_size}")
        if not turns:
            continue
        one = StageTimes.median([StageTimes(**turn["stages"]["0"]) for turn in turns])
        plain = [turn["runs"]["0"] for turn in turns]
        for k in draft_tokens:
            many = StageTimes.median([StageTimes(**turn["stages"][str(k)]) for turn in turns])
            runs = [turn["runs"][str(k)] for turn in turns]
            speedups = [a["ms"] / b["ms"] for a, b in zip(plain, runs, strict=True)]
            # Rounds are those of the run: some tens of tokens are few, and the last round
            # overhangs.
            plain_ms = plain[-1]["rounds"] * predicted_ms(0, 0, loops, one, one)
            ms = runs[-1]["rounds"] * predicted_ms(k, draft_loops, loops, one, many)
            prediction = plain_ms / ms
            rows.append(
                {
                    "batch_size": batch_size,
                    "K": k,
                    "d": draft_loops,
                    "speedup": summary(speedups),
                    "predicted": round(prediction, 4),
                    "measured_by_predicted": round(statistics.median(speedups) / prediction, 4),
                    "rounds": runs[-1]["rounds"],
                    "plain_rounds": plain[-1]["rounds"],
                    "expected_tokens_per_round": round(sum(acceptance**i for i in range(k + 1)), 3),
                }
            )
    return rows


def stage_rows(parts: Mapping[str, Part], ways: Sequence[str]) -> dict[str, Any]:
    """Return for each way the milliseconds of a loop pass over some rows, and eight by one."""
    found = {}
    for way in ways:
        part = parts.get(f"stages, {way}")
        if part is None:
            continue
        by_requests = part["loop_ms"]
        verified = part["loop_ms_of_one_request"]
        ratios = [b / a for a, b in zip(by_requests["1"], by_requests["8"], strict=True)]
        found[way] = {
            "loop_ms_by_requests": {n: summary(each) for n, each in by_requests.items()},
            "eight_rows_by_one": summary(ratios),
            "eight_rows_of_one_request_by_one": round(verified["8"] / verified["1"], 3),
        }
    return found


def print_tables(document: Mapping[str, Any], acceptance: float) -> None:
    """Print what was found, for people."""
    heads = ("plain decoding", "tokens/s", "by plain linears", "by transformers", "by official")
    rows = [
        (
            f"B={each['batch_size']}, {each['way']}",
            _spread(each["tokens_per_second"], 1),
            *(
                each.get(f"ratio_to_{other}", {}).get("median", "-")
                for other in (BEFORE, LLAMA, OFFICIAL_CODE)
            ),
            each.get("ratio_to_recorded", "-"),
            each.get("share_of_bound", "-"),
        )
        for each in document["plain"]
    ]
    print(markdown((*heads, "by official, recorded", "of the bound"), rows))
    if document["official_equal_texts"] is not None:
        shares = document["official_equal_texts"].items()
        print("\ngreedy texts equal to those of the official code:")
        print(", ".join(f"{way} {100 * share:.0f} %" for way, share in shares))
    print(
        f"\nbound: {document['bytes_per_token'] / 1e6:.0f} MB of fp32 weights a token at "
        f"{max(document['bandwidth_bytes_per_second']) / 1e9:.1f} GB/s are "
        f"{document['bound_ms']:.1f} ms\n"
    )
    columns = (f"drafts right with p={acceptance}", "speed-up", "predicted", "measured by it")
    speedups = [
        (
            f"B={each['batch_size']}, K={each['K']}, d={each['d']}",
            _spread(each["speedup"], 2),
            f"{each['predicted']:.2f}",
            f"{each['measured_by_predicted']:.2f}",
        )
        for each in document["speculation"]
    ]
    print(markdown(columns, speedups))
    for way, each in document["stages"].items():
        print(f"loop pass over 8 rows by one over 1 row, {way}: {each['eight_rows_by_one']}")


def _spread(each: Mapping[str, float], digits: int) -> str:
    median, least, greatest = (f"{each[n]:.{digits}f}" for n in ("median", "least", "greatest"))
    return f"{median} ({least} to {greatest})"
