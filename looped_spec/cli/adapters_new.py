"""Write a project for a new adapter: a plugin that is found, whose tests name what is missing."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType

from packaging.version import Version

from looped_spec.cli import console
from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.plugins import PluginManager
from looped_spec.settings import Settings
from looped_spec.version import __version__

FILES: Mapping[str, str] = MappingProxyType(
    {
        ".gitignore": "gitignore.tmpl",
        ".github/workflows/test.yml": "workflow.yml.tmpl",
        "README.md": "README.md.tmpl",
        "pyproject.toml": "pyproject.toml.tmpl",
        "${package}/__init__.py": "init.py.tmpl",
        "${package}/adapter.py": "adapter.py.tmpl",
        "${package}/model.py": "model.py.tmpl",
        "${package}/plugin.py": "plugin.py.tmpl",
        "${package}/py.typed": "py.typed.tmpl",
        "tests/test_conformance.py": "test_conformance.py.tmpl",
    }
)
"""Path in the project -> its template in the folder `new_adapter`."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `looped-spec adapters new`."""
    parser.add_argument(
        "name", metavar="NAME", help="name of the adapter: lower case letters, digits, underscores"
    )
    parser.add_argument(
        "--path",
        metavar="DIR",
        default=".",
        help="existing folder in which the project's own is made (default: the current one)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the project `looped-spec-NAME` and say what to type next."""
    _check_name(args.name)
    parent = Path(args.path)
    if not parent.is_dir():
        raise ConfigError(f"--path must be an existing folder, got '{args.path}'")
    _check_not_taken(args.name)
    target = parent / f"looped-spec-{args.name}"
    write_project(args.name, target)
    console.write(
        f"{target} holds {len(FILES)} files. Next:\n"
        f"  cd {_quoted(target)}\n"
        "  pip install -e '.[testing]'\n"
        "  pytest\n"
        "The tests name the methods to write; README.md has the six steps.\n"
    )
    return 0


def write_project(name: str, target: Path) -> None:
    """Write the project of adapter `name` to the folder `target`, which must not exist.

    The files are written to a folder beside it that takes its name at the end, so that there is a
    whole project or, whatever happens meanwhile, none.
    """
    if os.path.lexists(target):
        raise ConfigError(
            f"'{target}' is there already: give another name or --path, nothing is overwritten"
        )
    values = template_values(name)
    folder = importlib.resources.files("looped_spec.cli") / "new_adapter"
    texts = {
        _filled(path, values): _filled((folder / file).read_text("utf-8"), values)
        for path, file in FILES.items()
    }
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        for path, text in texts.items():
            file = temporary / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        temporary.rename(target)
    except BaseException as error:  # Ctrl-C as well
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise LoopedSpecError(
                f"cannot write '{target}': {error.strerror}; nothing of it is left"
            ) from error
        raise


def template_values(name: str) -> dict[str, str]:
    """Return what the templates leave open for adapter `name`."""
    words = "".join(word.capitalize() for word in name.split("_"))
    if not words.isidentifier():  # It begins with a digit.
        words = f"Model{words}"
    return {
        "name": name,
        "distribution": f"looped-spec-{name}",
        "package": f"looped_spec_{name}",
        "adapter_class": f"{words}Adapter",
        "config_class": f"{words}Config",
        "model_class": f"{words}Model",
        "core_range": core_range(__version__),
    }


def core_range(version: str) -> str:
    """Return the versions of looped-spec that a plugin written for `version` runs with.

    What may break a plugin comes with a new major version, before 1.0 with a new minor one.
    """
    major, minor, *_ = (*Version(version).release, 0)
    upper = f"{major + 1}" if major else f"0.{minor + 1}"
    return f">={version},<{upper}"


def _filled(template: str, values: Mapping[str, str]) -> str:
    return Template(template).substitute(values)


def _check_name(name: str) -> None:
    """Raise for a name that no adapter, module or distribution can have."""
    if re.fullmatch(r"[a-z0-9_]*[a-z0-9]", name) and not name.startswith("_"):
        return
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").removeprefix("looped_spec_")
    hint = f": try '{plain}'" if plain else ""
    raise ConfigError(
        f"adapter name must match [a-z0-9_]+, without _ at its ends, got '{name}'{hint}"
    )


def _check_not_taken(name: str) -> None:
    """Raise if an installed adapter has the name, or takes models of that type."""
    # The switches of the environment would hide some, or stop at another plugin that is broken.
    manager = PluginManager(Settings())
    with console.stdout_for_ours_alone():
        records = manager.records()
    for record in records:
        if name in (record.name, *record.model_types):
            raise ConfigError(
                f"adapter name '{name}' is taken by {record.source}: give another name"
            )


def _quoted(path: Path) -> str:
    """Return a path for a shell; `cd` would take one that begins with a dash for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
