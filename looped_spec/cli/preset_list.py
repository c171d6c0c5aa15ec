"""Show which presets there are, and how each of their parts came about.

Looked into are the folder that LOOPED_SPEC_PRESET_DIR names, then what every adapter brings; a run
with --preset auto looks into them in this order. --json names the file of each.
"""

from __future__ import annotations

import argparse
from typing import Any

from looped_spec.atomic_json import json_text
from looped_spec.cli import console
from looped_spec.cli.preset_files import all_files, all_folders
from looped_spec.cli.tables import plain_table
from looped_spec.errors import ConfigError
from looped_spec.presets import Preset
from looped_spec.presets.preset import PARTS


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table, with every file's path"
    )


def run(args: argparse.Namespace) -> int:
    """List; a broken file is a line of the output."""
    found = [_entry(folder.name, file) for folder, file in all_files()]
    folders = [{"folder": str(f.path), "name": f.name} for f in all_folders()]
    if args.json:
        console.write(json_text({"presets": found, "folders": folders}))
        return 0
    header = ("model", "device", "dtype", "D", "policy", *PARTS, "from")
    rows = [
        (
            e["model"],
            e["device_name"],
            e["dtype"],
            str(e["full_loops"]),
            e["policy"],
            *(e["kinds"][part] for part in PARTS),
            e["folder"],
        )
        for e in found
        if "error" not in e
    ]
    lines = [plain_table(header, rows)] if rows else ["no presets"]
    lines += [f"broken: {e['error']}" for e in found if "error" in e]
    console.write("\n".join(lines) + "\n")
    return 0


def _entry(folder: str, file: Any) -> dict[str, Any]:
    try:
        preset = Preset.read(file)
    except ConfigError as error:
        return {"folder": folder, "file": str(file), "error": str(error)}
    return {
        "folder": folder,
        "file": str(file),
        "model": preset.model,
        "adapter": preset.adapter,
        "device_name": preset.device_name,
        "dtype": preset.dtype,
        "full_loops": preset.full_loops,
        "revision": preset.revision,
        "policy": preset.config.policy,
        "kinds": {part: preset.provenance[part].kind for part in PARTS},
    }
