"""Model a preset of a device that is not here: costs from sizes, bandwidth and compute.

A roofline with a fixed time to start a layer; docs/presets.md says how far it is off from what was
published. A run takes such costs as no more than a prior. Acceptance is taken over from a preset
that has it (--acceptance-from); without any, the preset keeps speculation off.

MODEL is a local folder with its config.json (weights are not read), or a model whose sizes an
adapter brings.

examples:
  looped-spec preset estimate ORG/MODEL --device a100 -o presets/
  looped-spec preset estimate ./my-model --device h200 --acceptance-from measured.json
  looped-spec preset estimate ./my-model --device h200 --full-loops 8 --ks 1 2 4 --ds 1 2
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looped_spec.atomic_json import check_target, json_text
from looped_spec.cli import console
from looped_spec.cli.engine_flags import add_adapter_option, read_adapter_options
from looped_spec.cli.preset_files import all_folders, check_note, read_preset
from looped_spec.cli.preset_show import show_text
from looped_spec.errors import ConfigError, check_int, closest
from looped_spec.offline.settings import SamplingSettings
from looped_spec.presets import AcceptanceEntry, Provenance
from looped_spec.presets.lookup import GEOMETRY_FILE

if TYPE_CHECKING:
    from looped_spec.offline.roofline import Geometry

MAX_FULL_LOOPS = 2**16


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", metavar="MODEL", help="a local folder, or a known model's name")
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME",
        help="a known device, such as h100-sxm, h200, h800, h20 or a100; a wrong name lists all",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of the weights (default: bfloat16); compute is taken to be that of bfloat16",
    )
    parser.add_argument(
        "--acceptance-from",
        metavar="PRESET",
        help="a preset of the same model to take acceptance from: a file, or a part of one's name",
    )
    parser.add_argument(
        "--full-loops",
        type=int,
        metavar="N",
        help="D, loops of the target; default: the depth the model was trained for",
    )
    settings = {field.name: field for field in dataclasses.fields(SamplingSettings)}
    for name, metavar in (("ks", "K"), ("ds", "d")):
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs="+",
            metavar=metavar,
            help=settings[name].metadata["help"],
        )
    add_adapter_option(parser)
    parser.add_argument("--note", default="", metavar="TEXT", help="what the preset should say too")
    parser.add_argument(
        "-o", "--out", metavar="PATH", help="write here: a file, or a folder that gets its name"
    )
    parser.add_argument("--json", action="store_true", help="print the preset as JSON")


def run(args: argparse.Namespace) -> int:
    """Model, and write or show what came out."""
    from looped_spec.offline.devices import known_device
    from looped_spec.offline.modelled import modelled_preset

    path = Path(args.out or ".")
    if not path.is_dir():
        is_special = path.exists() and not path.is_file()  # a pipe or a device
        if path.suffix != ".json" and not is_special:
            raise ConfigError(
                f"--out '{path}' is no folder, and a preset's file ends in .json: make the folder, "
                "or give the name of a file"
            )
        check_target(path)
    device = known_device(args.device)
    check_note(args.note)
    # Depths and lengths are checked as those of a measurement are.
    grid = SamplingSettings(ks=_tuple(args.ks), ds=_tuple(args.ds))
    options = read_adapter_options(args.adapter_option)
    name, geometry = _geometry(args.model, args.full_loops, options)
    command = _command(args, name)
    date = datetime.date.today().isoformat()
    acceptance, origin, revision = _acceptance(args.acceptance_from, name, geometry, command, date)
    preset = modelled_preset(
        name,
        geometry,
        device,
        acceptance,
        origin,
        command=command,
        date=date,
        dtype=args.dtype,
        revision=revision,
        adapter_options=options,
        ks=grid.ks,
        ds=grid.ds,
        note=args.note.strip(),
    )
    if args.out is not None:
        path = path / preset.file_name if path.is_dir() else path
        check_target(path)
        preset.write(path)
        console.note(f"wrote {path}")
    if args.json:
        console.write(json_text(preset.to_json()))
    elif args.out is None:
        console.write(show_text(preset))
    return 0


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _command(args: argparse.Namespace, name: str) -> str:
    """Return what makes the preset anew; of files their names."""
    words = ["looped-spec", "preset", "estimate", name, "--device", args.device]
    if args.dtype != "bfloat16":
        words += ["--dtype", args.dtype]
    if args.acceptance_from is not None:
        words += ["--acceptance-from", Path(args.acceptance_from).name]
    if args.full_loops is not None:
        words += ["--full-loops", str(args.full_loops)]
    for flag, values in (("--ks", args.ks), ("--ds", args.ds)):
        words += [flag, *map(str, values)] if values else []
    for pair in args.adapter_option:
        words += ["--adapter-option", pair]
    return shlex.join(words)


def _geometry(
    model: str, full_loops: int | None, options: Mapping[str, Any]
) -> tuple[str, Geometry]:
    """Return name and sizes of a model: of a folder's config.json, or as an adapter knows them;
    `full_loops` deep if that is given."""
    from looped_spec.offline.roofline import read_geometries

    if Path(model).is_dir():
        return _of_folder(model, full_loops, options)
    if options:
        raise ConfigError(
            "--adapter-option needs the folder of a model: the sizes that are known of "
            f"'{model}' are those of its defaults"
        )
    if full_loops is not None:
        check_int("full_loops", full_loops, 2, MAX_FULL_LOOPS)
    known: dict[str, Geometry] = {}
    for folder in all_folders():
        if (folder.path / GEOMETRY_FILE).is_file():
            known |= read_geometries(folder.path / GEOMETRY_FILE)
    for name, geometry in known.items():
        if model in (name, name.rsplit("/", 1)[-1]):
            if full_loops is not None:
                geometry = dataclasses.replace(geometry, full_loops=full_loops)
            return name, geometry
    raise ConfigError(
        f"model '{model}' is no folder here, and its sizes are not known{closest(model, known)}; "
        f"known: {', '.join(known) or 'none'}"
    )


def _of_folder(
    model: str, full_loops: int | None, options: Mapping[str, Any]
) -> tuple[str, Geometry]:
    from looped_spec.loading import build_adapter
    from looped_spec.model_config import read_json_config
    from looped_spec.offline.roofline import Geometry
    from looped_spec.plugins import PluginManager
    from looped_spec.runtime.cost_estimate import StageSizes

    folder, plugins = Path(model), PluginManager()
    config, name = read_json_config(folder), folder.resolve().name
    adapter = build_adapter(config, name, plugins, options)
    if full_loops is None:
        full_loops = adapter.geometry.default_full_loops
    adapter.geometry.check_full_loops(full_loops)
    return name, Geometry(
        adapter=plugins.resolve_model_type(config["model_type"], config).name,
        full_loops=full_loops,
        max_model_len=adapter.geometry.max_model_len,
        resumable=adapter.capabilities.resumable,
        **dataclasses.asdict(StageSizes.of(adapter)),
        source="config.json of the model's folder",
    )


def _acceptance(
    given: str | None, model: str, geometry: Geometry, command: str, date: str
) -> tuple[tuple[AcceptanceEntry, ...], Provenance, str | None]:
    """Return entries, origin and revision of what another preset says of acceptance, which no
    device changes."""
    from looped_spec.presets.match import same_model

    if given is None:
        nothing = Provenance("modelled", date, command=command, notes="nothing is known: no entry")
        return (), nothing, None
    other, path = read_preset(given)
    if not same_model(other.model, model) or other.full_loops != geometry.full_loops:
        raise ConfigError(
            f"--acceptance-from '{given}' is of model '{other.model}' at {other.full_loops} loops, "
            f"not of '{model}' at {geometry.full_loops}"
        )
    origin = other.provenance["acceptance"]
    source = f"taken over from {path.name}"
    if origin.source:
        source = f"{source}: {origin.source}"
    return other.acceptance, dataclasses.replace(origin, source=source), other.revision
