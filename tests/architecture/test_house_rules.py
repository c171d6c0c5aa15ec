"""Rules about the text of the repository: what may stand where."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tree import ROOT, tracked_texts

from looped_spec.settings import VARIABLES, Settings

FAMILIES = re.compile("ouro|huginn|nanbeige", re.IGNORECASE)
MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:work|root|home|tmp|Users|opt)/[\w.-]*")
ENVIRONMENT_READERS = frozenset({"environ", "environb", "getenv", "getenvb"})
VARIABLE = re.compile(r"LOOPED_SPEC_[A-Z_]*[A-Z]")

MAX_LINES = 400
REASONS_FOR_MORE_LINES: dict[str, str] = {}
"""Path of a Python file -> why it is longer than `MAX_LINES`."""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every tracked text file by its path."""
    return tracked_texts()


def python_sources(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the Python files of the packages that are shipped."""
    for path, text in texts.items():
        if path.endswith(".py") and path.startswith(("looped_spec/", "adapters/")):
            yield path, text


def test_the_core_names_no_model_family() -> None:
    found = []
    for path in sorted((ROOT / "looped_spec").rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:  # which other processes write to
            continue
        text = f"{path.name}\n{path.read_text()}"
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in FAMILIES.finditer(text)]
    assert found == []


def test_no_file_has_a_path_of_some_machine(texts: dict[str, str]) -> None:
    found = [f"{p}: {m[0]}" for p, text in texts.items() for m in MACHINE_PATH.finditer(text)]
    assert found == []


def test_the_environment_is_read_in_settings_only(texts: dict[str, str]) -> None:
    found = [
        f"{path}:{line}"
        for path, text in python_sources(texts)
        if path != "looped_spec/settings.py"
        for line in environment_reads(ast.parse(text))
    ]
    assert found == []


def environment_reads(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that read the environment; setting a default for a library is no reading."""
    nodes = list(ast.walk(tree))
    calls = [node.value for node in nodes if isinstance(node, ast.Expr)]
    functions = [call.func for call in calls if isinstance(call, ast.Call)]
    defaults = [
        function.value
        for function in functions
        if isinstance(function, ast.Attribute) and function.attr == "setdefault"
    ]
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_READERS:
            if node not in defaults:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ENVIRONMENT_READERS)


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import os\nos.environ['A']", True),
        ("import os\nos.getenv('A')", True),
        ("from os import environ", True),
        ("import os\nprint(os.environ.setdefault('A', 'b'))", True),
        ("import os\nos.environ.setdefault('A', 'b')", False),
        ("import os\nos.fspath('A')", False),
    ],
)
def test_reads_of_the_environment_are_told_from_the_rest(source: str, reads: bool) -> None:
    assert bool(list(environment_reads(ast.parse(source)))) is reads


def test_the_documentation_has_every_variable_with_its_meaning(texts: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(LOOPED_SPEC_\w+)` \| (.*?) \|", texts["docs/environment.md"], re.M)
    assert dict(rows) == dict(VARIABLES)


def test_every_variable_changes_what_the_program_does(texts: dict[str, str]) -> None:
    fields = {field.name for field in dataclasses.fields(Settings)}
    assert {f"LOOPED_SPEC_{name.upper()}" for name in fields} == set(VARIABLES)
    only_reads_or_shows = ("looped_spec/settings.py", "looped_spec/cli/adapters.py")
    used = {
        field
        for path, text in python_sources(texts)
        if path not in only_reads_or_shows
        for field in settings_used(ast.parse(text))
    }
    assert fields - used == set()


def settings_used(tree: ast.Module) -> Iterator[str]:
    """Yield what is taken of anything that is called `settings`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = getattr(owner, "attr", getattr(owner, "id", None))
            if name == "settings":
                yield node.attr


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("f(settings.folder)", ["folder"]),
        ("self.settings.folder", ["folder"]),
        ("settings.folder = 1", []),
        ("options.folder", []),
    ],
)
def test_a_use_of_a_setting_is_told_from_the_rest(source: str, used: list[str]) -> None:
    assert list(settings_used(ast.parse(source))) == used


def test_no_file_speaks_of_a_variable_that_is_not_read(texts: dict[str, str]) -> None:
    found = {
        f"{path}: {name}"
        for path, text in texts.items()
        for name in VARIABLE.findall(text)
        if name not in VARIABLES
    }
    assert found == set()


def test_a_long_file_has_a_reason(texts: dict[str, str]) -> None:
    long = {p for p, t in texts.items() if p.endswith(".py") and t.count("\n") > MAX_LINES}
    assert long == set(REASONS_FOR_MORE_LINES)


@pytest.mark.parametrize(
    "module",
    [
        "looped_spec",
        "looped_spec.control",
        "looped_spec.cli.main",
        "looped_spec_ouro.plugin",
        "looped_spec_huginn.plugin",
        "looped_spec_nanbeige.plugin",
    ],
)
def test_a_light_import_loads_no_heavy_library(module: str) -> None:
    heavy = ("torch", "numpy", "transformers", "tokenizers", "safetensors")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_every_module_of_control_loads_no_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, looped_spec.control as room\n"
        "for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert 'looped_spec.control.plan' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_two_test_files_share_a_name(texts: dict[str, str]) -> None:
    """Test folders are no packages: pytest cannot collect two files of one name together."""
    names = [
        path.rsplit("/", 1)[-1]
        for path in texts
        if path.startswith("tests/") and path.endswith(".py")
    ]
    shared = sorted({n for n in names if names.count(n) > 1} - {"__init__.py", "conftest.py"})
    assert shared == []
