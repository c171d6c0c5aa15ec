"""The measurements as a page of tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from control_bench.measure import POLICIES
from control_bench.suites import SUITES

# A document read back has its keys in alphabetical order, which tells a reader nothing.
_ORDER = {
    name: place
    for place, name in enumerate(
        (
            *POLICIES,
            *SUITES,
            "none",
            "none, with shadow depths",
            "decide_us_p50",
            "decide_us_p99",
            "feedback_us_p50",
            "feedback_us_p99",
        )
    )
}
_UNITS = {"": "", "x": "", "rounds": ""}


def report(document: Mapping[str, Any]) -> str:
    """Return the page; everything on it is in the document."""
    made = document["provenance"]
    parts = [
        "# Control policies, simulated",
        f"Made by `{made['command']}` with {made['seeds']} paired seeds on {made['machine']}; "
        "raw numbers: [control.json](control.json). Means over seeds, in brackets their 95 % "
        "bootstrap interval. What is measured is in [docs/control.md](../control.md)."
        + (f" {made['note']}" if "note" in made else ""),
        "## Targets",
        targets_table(document["targets"]),
        "## Regret by suite, %",
        _suites(document["policies"], document["statics"]),
        "![regret of all policies](control-regret.png)",
        "Best single candidate of each load, chosen in hindsight: "
        f"{_pairs(document['statics']['best_of_each_trace'])} % by suite.",
        "## The EMA tuned in hindsight",
        _tuned(document["tuned_ema"]),
        "## Wrong cost tables, regret in %",
        _errors(document["cost_error"]),
        "## Rounds to 95 % of the best rate",
        _speed(document["rounds_to_95"]),
        "## Targets that fight each other",
        "Looking more often finds a gain sooner and costs more where there is none. Without shadow "
        "depths nothing else can tell; the default is "
        f"{100 * document['loss_budget']:g} %.",
        _fight(document["fight"]),
        "## Scenarios",
        _scenarios(document["scenarios"]),
        "## Published tables",
        _published(document["published"]),
        "## Noise floor",
        _noise_floor(document["noise_floor"]),
        "## Time and memory of the controller",
        _timing(document["timing"]),
        "## Over time",
        "![landscape A](control-landscape-a.png)",
        "![landscape B](control-landscape-b.png)",
    ]
    return "\n\n".join(parts) + "\n"


def targets_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the targets with what was measured and the verdicts."""
    table = []
    for row in rows:
        sign = ">=" if row["is_floor"] else "<="
        table.append(
            (
                row["metric"],
                f"{sign} {_short(row['target'])}",
                f"{sign} {_short(row['stretch'])}",
                "not measured here" if row["value"] is None else _both(row["value"], row["unit"]),
                _verdict(row["target_met"]),
                _verdict(row["stretch_met"]),
                row["note"],
            )
        )
    return _table(("metric", "target", "stretch", "measured", "target", "stretch", ""), table)


def _suites(policies: Mapping[str, Any], statics: Mapping[str, Any]) -> str:
    names = list(SUITES)
    rows = []
    for policy in _in_order(policies):
        suites = policies[policy]
        cells = [
            f"{100 * suites[name]['regret']['mean']:.1f}" if name in suites else "-"
            for name in names
        ]
        worst = max(suites[name]["worst_phase"]["mean"] for name in suites)
        rows.append((policy, *cells, f"{100 * worst:.1f}"))
    for title, by_suite in statics["arms"].items():
        cells = [f"{100 * by_suite[n]:.1f}" if n in by_suite else "-" for n in names]
        rows.append((title, *cells, "-"))
    legend = "; ".join(f"{name}: {text}" for name, text in SUITES.items())
    head = ("policy", *names, "worst phase vs never")
    return f"{legend}.\n\n{_table(head, rows)}"


def _tuned(tuned: Mapping[str, Any]) -> str:
    rows = []
    for name in _in_order(tuned):
        found = tuned[name]
        chosen = found["settings"]
        ladders = "; ".join(
            f"B <= {edge}: {' '.join(f'{k},{d}' for k, d in rungs)}"
            for edge, rungs in chosen["ladders"]
        )
        rows.append(
            (
                name,
                f"{100 * found['mean']:.1f}",
                f"{100 * found['median_of_all']:.1f}",
                str(found["tried"]),
                f"beta {chosen['beta']}, up {chosen['up']:.2f}, down {chosen['down']:.2f}, every "
                f"{chosen['interval']}, off {'yes' if chosen['off'] else 'no'}; {ladders}",
            )
        )
    return _table(("load", "best regret, %", "median regret, %", "tried", "settings"), rows)


def _errors(found: Mapping[str, Any]) -> str:
    suites = _in_order(next(iter(found.values())))
    rows = [(title, *(_both(found[title][name]) for name in suites)) for title in _in_order(found)]
    return _table(("error", *suites), rows)


def _speed(found: Mapping[str, Any]) -> str:
    rows = []
    for policy in _in_order(found):
        kinds = found[policy]
        for kind, facts in kinds.items():
            numbers = (facts["p50"], facts["p95"], facts["mean"], facts["count"])
            rows.append((policy, kind, *(_short(n) for n in numbers)))
    return _table(("policy", "change", "median", "95th percentile", "mean", "phases"), rows)


def _fight(found: Sequence[Mapping[str, Any]]) -> str:
    changes = [key for key in found[0] if key.startswith("off to on")]
    rows = [
        (
            row["name"],
            _both(row["hopeless"]),
            *(f"{_short(row[c]['p50'])}, {_short(row[c]['p95'])}" for c in changes),
        )
        for row in found
    ]
    titles = [f"{change}: rounds to 95 %, median and 95th percentile" for change in changes]
    return _table(("policy", "slower than never, hopeless, %", *titles), rows)


def _scenarios(found: Sequence[Mapping[str, Any]]) -> str:
    policies = _in_order(found[0]["passed"]) if found else []
    rows = [
        (row["name"], row["required"], *(f"{100 * row['passed'][p]:.0f}%" for p in policies))
        for row in found
    ]
    return _table(("scenario", "required", *(f"seeds passing, {p}" for p in policies)), rows)


def _published(found: Sequence[Mapping[str, Any]]) -> str:
    policies = _in_order(found[0]["regret"]) if found else []
    rows = [
        (
            row["name"],
            "held out" if row["held_out"] else "open",
            *(f"{100 * row['regret'][p]:.1f}" for p in policies),
            f"{100 * row['best_static']:.1f}",
            f"{row['source']}; assumed: {row['assumed']}",
        )
        for row in found
    ]
    head = ("table", "", *(f"regret of {p}, %" for p in policies), "best static, %", "from")
    return _table(head, rows)


def _noise_floor(found: Mapping[str, Any]) -> str:
    return (
        f"The same policy with other seeds: {_both(found['first'])} and {_both(found['second'])} % "
        f"mean regret of suites {', '.join(found['suites'])}, {found['difference']:+.3f} apart."
    )


def _timing(found: Mapping[str, Any]) -> str:
    rows = []
    keys = _in_order(next(iter(next(iter(found.values())).values())))
    for policy in _in_order(found):
        for batch_size in sorted(found[policy], key=int):
            row = found[policy][batch_size]
            rows.append((policy, batch_size, *(f"{row[key]:.1f}" for key in keys)))
    return _table(("policy", "B", *(key.replace("_", " ") for key in keys)), rows)


def _in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order in which a reader expects them, unknown ones behind as they are."""
    return sorted(names, key=lambda name: _ORDER.get(name, len(_ORDER)))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _verdict(met: bool | None) -> str:
    return {True: "met", False: "**missed**", None: "-"}[met]


def _both(value: Mapping[str, float], unit: str = "") -> str:
    mean, low, high = value["mean"], value["low"], value["high"]
    shown = f"{mean:.2f}{_UNITS.get(unit, f' {unit}')}"
    return shown if low == high else f"{shown} ({low:.2f} to {high:.2f})"


def _pairs(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * found[name]:.1f}" for name in _in_order(found))


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
