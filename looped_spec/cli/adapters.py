"""Show every installed plugin: what it brings, whether it can be used, and if not, why.

`looped-spec adapters new NAME` writes the project of a new one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from looped_spec.adapter import Capabilities
from looped_spec.cli import adapters_new, console
from looped_spec.cli.one_line_errors import use_one_line_errors
from looped_spec.cli.subverbs import StrictParser
from looped_spec.errors import ConfigError
from looped_spec.plugins import PluginManager, PluginRecord
from looped_spec.settings import PLUGINS, STRICT_PLUGINS, Settings
from looped_spec.version import __version__

COLUMNS = ("name", "status", "model_types", "capabilities", "demo", "distribution", "cause")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `looped-spec adapters`, and its verb `new`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verbs = parser.add_subparsers(dest="verb", metavar="new", parser_class=StrictParser)
    new = verbs.add_parser(
        "new",
        help="write the project of a new adapter",
        description=adapters_new.__doc__,
        allow_abbrev=False,
    )
    use_one_line_errors(new)
    adapters_new.configure(new)


def run(args: argparse.Namespace) -> int:
    """Print the plugins; a broken one is a line of the output, not a failure of the command."""
    if args.verb == "new":
        if args.json:
            raise ConfigError("--json shows the installed plugins: leave it out before 'new'")
        return adapters_new.run(args)
    manager = PluginManager()
    with console.stdout_for_ours_alone():
        records = manager.records()
    text = _as_json(manager, records) if args.json else _as_table(manager.settings, records)
    console.write(f"{text}\n")
    for warning in manager.warnings():
        console.note(f"warning: {warning}")
    return 0


def _as_json(manager: PluginManager, records: list[PluginRecord]) -> str:
    settings = manager.settings
    document = {
        "looped_spec_version": __version__,
        "plugins": [_fields(record) for record in records],
        "settings": {
            PLUGINS: None if settings.plugins is None else list(settings.plugins),
            STRICT_PLUGINS: settings.strict_plugins,
        },
        "warnings": manager.warnings(),
    }
    return json.dumps(document, indent=2, sort_keys=True)


def _fields(record: PluginRecord) -> dict[str, Any]:
    """Take what both outputs show from a record; what the plugin never declared is null."""
    spec = record.spec
    return {
        "name": record.name,
        "entry_point": record.entry_point,
        "status": record.status,
        "model_types": list(record.model_types),
        "accepts": spec.accepts if spec else None,
        "capabilities": dataclasses.asdict(spec.capabilities) if spec else None,
        "demo": f"demo:{record.name}" if spec and spec.demo_package else None,
        "distribution": record.distribution,
        "version": record.version,
        "cause": record.cause,
    }


def _as_table(settings: Settings, records: list[PluginRecord]) -> str:
    """Lay the records out in columns, the cause last since it is long."""
    rows = [tuple(column.replace("_", " ").upper() for column in COLUMNS)]
    for record in records:
        shown = _fields(record) | {
            "model_types": _model_types_text(record),
            "capabilities": _capabilities_text(record.spec.capabilities) if record.spec else "",
            "distribution": f"{record.distribution} {record.version}",
        }
        rows.append(tuple(shown[column] or "-" for column in COLUMNS))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if not records:
        lines = ["no plugins are installed"]
    return "\n".join([*lines, "", *_settings_lines(settings)])


def _model_types_text(record: PluginRecord) -> str:
    """Mark the model types of which an adapter takes only its own models."""
    some = " (some)" if record.spec and record.spec.accepts else ""
    return ",".join(f"{model_type}{some}" for model_type in record.model_types)


def _capabilities_text(capabilities: Capabilities) -> str:
    criteria = "/".join(criterion.name for criterion in capabilities.early_exit)
    parts = {
        f"early_exit={criteria}": bool(criteria),
        "resumable": capabilities.resumable,
        "shadow_depths": capabilities.shadow_depths,
        "seed_free": capabilities.seed_free,
        f"non_kv_state={capabilities.non_kv_state}": capabilities.non_kv_state is not None,
    }
    return ",".join(text for text, holds in parts.items() if holds)


def _settings_lines(settings: Settings) -> list[str]:
    """Show the switches as they were read, with what they mean when they are not a list or 1."""
    if settings.plugins is None:
        plugins = "unset (all adapters)"
    else:
        plugins = ",".join(settings.plugins) or "empty (no adapter)"
    strict = "1" if settings.strict_plugins else "0 (broken plugins are only reported)"
    return [f"{PLUGINS}: {plugins}", f"{STRICT_PLUGINS}: {strict}"]
