"""The guide's page "is my plugin loaded?" quotes what the commands really say."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import guide
import pytest
import torch
from fake_plugins import FakeSite, plugin_source
from safetensors.torch import save_file

from looped_spec import LLM
from looped_spec.cli import main as cli
from looped_spec.cli.adapters_new import core_range, write_project
from looped_spec.errors import LoopedSpecError
from looped_spec.testing.checkpoints import checkpoint_tensors
from looped_spec.version import __version__

PAGE = guide.page("loading")
PLUGIN, ADAPTER = "looped_spec_myloop/plugin.py", "looped_spec_myloop/adapter.py"
RECORD = "capabilities=CAPABILITIES,"

Edit = tuple[str, str, str]
MISTAKES: dict[str, list[Edit]] = {
    "the hook has no `@hookimpl`": [(PLUGIN, "@hookimpl\n", "")],
    "the hook's name is misspelt": [(PLUGIN, "looped_spec_adapters()", "looped_spec_adapter()")],
    "the hook takes an argument": [(PLUGIN, "adapters()", "adapters(config)")],
    "the hook returns a record instead of a list": [
        (PLUGIN, "return [", "return ("),
        (PLUGIN, "    ]\n", "    )\n"),
    ],
    '`model_types=("myloop")`, which is no tuple': [(PLUGIN, '("myloop",)', '("myloop")')],
    "a name with a hyphen": [(PLUGIN, 'name="myloop"', 'name="my-loop"')],
    "the entry point names a module that is not there": [
        ("pyproject.toml", "looped_spec_myloop.plugin", "looped_spec_mylop")
    ],
    "the plugin imports something that is not installed": [
        (PLUGIN, "\nfrom looped_spec.adapter", "\nimport flash_linear\nfrom looped_spec.adapter")
    ],
    "the same module, named in `requires` instead": [
        (
            PLUGIN,
            RECORD,
            f'{RECORD} requires=("flash_linear",), install_hint="pip install flash-linear",',
        )
    ],
    "a range without this version of looped-spec": [
        ("pyproject.toml", core_range(__version__), ">=0.3,<0.4")
    ],
    "`api_version` of a later contract": [(PLUGIN, RECORD, f"{RECORD} api_version=99,")],
    "a model type that another adapter takes": [(PLUGIN, '("myloop",)', '("theirs",)')],
    "not in `LOOPED_SPEC_PLUGINS`": [],
}
"""What the page says was done -> how to do it to the project of the tutorial."""

CLASS = "class MyloopAdapter(ModelAdapter):\n"
MODEL_MISTAKES: dict[str, list[Edit]] = {
    "the class is not where `factory` says": [(PLUGIN, ":MyloopAdapter", ":MyloopAdaptor")],
    "a required method is not there": [(ADAPTER, "def readout", "def read_out")],
    "the adapter fails while it is built": [
        (ADAPTER, "        self.angles", '        config["hidden"]\n        self.angles')
    ],
    "the module has a buffer": [
        (
            ADAPTER,
            "        self.angles",
            '        self.module.register_buffer("table", torch.zeros(1))\n        self.angles',
        )
    ],
    "another model type in config.json": [],
    "a misspelt option": [(ADAPTER, CLASS, f'{CLASS}    options = {{"init_scale": 1.0}}\n')],
    "a tensor has no place": [],
}

OPTIONS = {"a misspelt option": {"init_scael": 0.0}}
"""What `adapter_options` a mistake comes with."""


def matches(shown: str, said: str) -> bool:
    """Tell whether the page's text is what was said; `...` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in shown.split("..."))
    return re.fullmatch(pattern, said) is not None


def table(heading: str) -> dict[str, list[str]]:
    """Return the rows below a heading by their first cell."""
    return {first: rest for first, *rest in guide.rows(guide.section(PAGE, heading))}


CAUSES = table("## It is in the table, with a cause")
REFUSALS = table("## It is active, and the model does not load")

Install = Callable[[list[Edit]], Path]


@pytest.fixture
def install(tmp_path: Path, fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Write the project of the tutorial, spoil it, and install it; no switch is set."""
    for name in ("LOOPED_SPEC_PLUGINS", "LOOPED_SPEC_STRICT_PLUGINS"):
        monkeypatch.delenv(name, raising=False)

    def write(edits: list[Edit]) -> Path:
        project = tmp_path / "looped-spec-myloop"
        write_project("myloop", project)
        guide.write_files(guide.page(""), project)
        for file, old, new in edits:
            path = project / file
            assert old in path.read_text(), f"{file} has no {old!r}"
            path.write_text(path.read_text().replace(old, new))
        fake_site.install(project)
        return project

    return write


def test_every_mistake_of_the_page_is_tried() -> None:
    assert set(CAUSES) == set(MISTAKES)
    assert set(REFUSALS) == set(MODEL_MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_table_says_what_the_page_quotes(
    mistake: str,
    install: Install,
    fake_site: FakeSite,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(MISTAKES[mistake])
    if "another adapter" in mistake:
        source = plugin_source("other", "theirs")
        fake_site.add("looped-spec-other", source, entry_point="other")
    if "PLUGINS" in mistake:
        monkeypatch.setenv("LOOPED_SPEC_PLUGINS", "other")
    assert cli.main(["adapters"]) == 0
    status, cause = row_of_myloop(capsys.readouterr().out)[1::5]
    assert CAUSES[mistake][0] == status
    assert matches(CAUSES[mistake][1], cause), cause


def row_of_myloop(text: str) -> list[str]:
    """Return the cells of the plugin's line in the table."""
    (line,) = [line for line in text.splitlines() if line.startswith("myloop ")]
    return re.split(r" {2,}", line)


def test_the_table_of_a_healthy_plugin_is_as_shown(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install([])
    assert cli.main(["adapters"]) == 0
    said = capsys.readouterr().out
    heads, row, _, *switches = guide.blocks(PAGE, "text")[0].splitlines()
    assert re.split(r" {2,}", heads) == re.split(r" {2,}", said.splitlines()[0])
    assert re.split(r" {2,}", row) == row_of_myloop(said)
    assert switches == said.splitlines()[-2:]


@pytest.mark.parametrize("mistake", MODEL_MISTAKES)
def test_loading_a_model_says_what_the_page_quotes(
    mistake: str, install: Install, tmp_path: Path
) -> None:
    project = install(MODEL_MISTAKES[mistake])
    (shown,) = re.findall(r"^CONFIG = (\{.*?^\})", (project / "train.py").read_text(), re.M | re.S)
    config = ast.literal_eval(shown)
    if "model type" in mistake:
        config["model_type"] = "myloop2"
    folder = tmp_path / "counting"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if "tensor" in mistake:
        module = importlib.import_module("looped_spec_myloop.adapter")
        tensors = checkpoint_tensors(module.MyloopAdapter(config, {}))
        save_file(tensors | {"extra": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(LoopedSpecError) as caught:
        LLM(
            folder,
            device="cpu",
            load_format="auto" if "tensor" in mistake else "dummy",
            adapter_options=OPTIONS.get(mistake),
        )
    assert matches(REFUSALS[mistake][0], str(caught.value)), str(caught.value)


def test_the_watched_hook_prints_what_is_shown(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install([])
    (sample,) = guide.blocks(PAGE, "python")
    exec(compile(sample, "plugin-guide-loading.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    shown = guide.blocks(PAGE, "text")[-1].splitlines()
    assert len(said) == len(shown)
    assert all(matches(*pair) for pair in zip(shown, said, strict=True)), said
