"""What a user sees once the plugin is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from looped_spec import LLM, SamplingParams
from looped_spec.errors import PluginError
from looped_spec.plugins import PluginManager

from looped_spec_retrofit.plugin import is_retrofitted
from looped_spec_retrofit.tiny import tiny_config, write_tiny

DISTRIBUTION = "looped-spec-retrofit"
HUGINN = {
    "model_type": "huginn_raven",
    "init_values": {"std": 0.0087, "embed_scale": 72.6636},
}


def looped_spec(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command of looped-spec in a process of its own."""
    command = [sys.executable, "-m", "looped_spec", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_plugin_is_shown_with_its_distribution_and_version() -> None:
    done = looped_spec("adapters", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = [p for p in json.loads(done.stdout)["plugins"] if p["name"] == "retrofit"]
    assert found["status"] == "active", found["cause"]
    assert found["distribution"] == DISTRIBUTION
    assert found["version"] == metadata.version(DISTRIBUTION)
    table = looped_spec("adapters").stdout
    assert f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}" in table


def test_a_model_goes_to_the_adapter_of_its_family() -> None:
    manager = PluginManager()
    assert manager.resolve_model_type("huginn_raven", tiny_config()).name == "retrofit"
    try:
        other = manager.resolve_model_type("huginn_raven", HUGINN)
    except PluginError as error:
        assert "retrofit" not in str(error).split(";")[0] or "takes others" in str(error)
    else:
        assert other.name != "retrofit"


@pytest.mark.parametrize("scales", [None, {}, "x", {"embed_scale": None}, {"embed_scale": 45.3}])
def test_what_is_not_converted_is_not_ours(scales: object) -> None:
    assert not is_retrofitted({"init_values": scales})
    assert not is_retrofitted({})


def test_the_command_line_runs_a_folder_and_compares(tiny: Path) -> None:
    done = looped_spec(
        *("generate", str(tiny), "--prompt", "The river", "--max-tokens", "12"),
        *("--num-speculative-tokens", "3", "--draft-loops", "2", "--compare", "--repeats", "1"),
        *("--adapter-option", "init_scale=0.5", "--json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["identical"] is True
    assert len(document["outputs"][0]["token_ids"]) == 12


def test_text_goes_in_and_comes_out(tiny: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (output,) = LLM(str(tiny)).generate(["The river"], params, use_tqdm=False)
    assert output.prompt_token_ids[0] == 96
    assert len(output.prompt_token_ids) == 1 + len("The river")
    assert len(output.outputs[0].text) == 8
    assert output.outputs[0].text.replace("\n", " ").isprintable()


def test_end_marks_of_the_borrowed_code_end_no_text(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", tiny_config(eos_token_id=65505))
    ends = {"eos_token_id": [65505, 65508]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    assert LLM(str(folder)).stop_token_ids == (97,)


def test_speculation_is_off_unless_asked_for_and_the_user_is_told_why(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        llm = LLM(str(tiny))
    assert llm.speculation.num_speculative_tokens == 0
    assert "no acceptance rate of this family is published" in caplog.text
