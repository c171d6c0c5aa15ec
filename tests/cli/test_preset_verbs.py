"""looped-spec preset: what its verbs say of files that are there, broken, or not there."""

import json
import sys
from pathlib import Path

import pytest
from tree import ROOT

from looped_spec.cli.main import main
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.presets import Preset

OURO = ROOT / "presets" / "ouro"
H200 = OURO / "model=Ouro-1.4B,device_name=NVIDIA_H200,dtype=bfloat16.json"
H100 = OURO / "model=Ouro-1.4B,device_name=NVIDIA_H100_80GB_HBM3,dtype=bfloat16.json"


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["preset", *arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_list_shows_every_bundled_preset_with_the_kinds_of_its_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preset", "list"]) == 0
    out = capsys.readouterr().out
    assert "ByteDance/Ouro-1.4B" in out and "published" in out and "modelled" in out
    listed = _json(capsys, "list")["presets"]
    assert isinstance(listed, list)
    assert len(listed) == len(list((ROOT / "presets").glob("*/model=*.json")))


def test_list_names_a_broken_file_and_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model=x.json").write_text("{")
    monkeypatch.setenv("LOOPED_SPEC_PRESET_DIR", str(tmp_path))
    assert main(["preset", "list"]) == 0
    assert "broken: preset" in capsys.readouterr().out


def test_show_draws_times_speedups_acceptance_candidates_and_origin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preset", "show", "1.4B H200"]) == 0
    out = capsys.readouterr().out
    for part in ("time of a round in ms", "expected speed-up", "acceptance by position", "B   "):
        assert part in out
    assert "moved from d=2" in out and "cost: modelled" in out and "**" in out
    assert _json(capsys, "show", str(H200))["preset"] == Preset.read(H200).to_json()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "nothing-like-it"], "no preset 'nothing-like-it'"),
        (["show", "1.4B"], "is part of 4 presets"),
        (["show", "."], "is a folder"),
        (["show", "x/y.json"], "cannot read preset"),
        (["show", "H200", "--context-tokens", "-1"], "--context-tokens must be at least 0"),
        (["lst"], "did you mean 'list'"),
        (["report", "1.4B", "-o", "r.md"], "is part of 4 presets"),
        (["estimate", "Ouro-1.4B", "--device", "h200", "-o", "nofolder"], "is no folder"),
        (["estimate", "Ouro-1.4B", "--device", "h10"], "unknown device 'h10' (did you mean"),
        (["estimate", "Unknown-1B", "--device", "h200"], "its sizes are not known"),
        (["estimate", "Ouro-1.4B", "--device", "h200", "-o", "no/where.json"], "does not exist"),
        (["estimate", "Ouro-1.4B", "--device", "h200", "--full-loops", "1"], "full_loops must be"),
        (["estimate", "Ouro-1.4B", "--device", "h200", "--ds", "4"], "draft_loops must be between"),
        (["estimate", "Ouro-1.4B", "--device", "h200", "--ks", "0"], "ks must be between 1"),
        (["estimate", "Ouro-1.4B", "--device", "h200", "--note", "a\nb"], "a text of one line"),
        (
            ["estimate", "Ouro-1.4B", "--device", "h200", "--adapter-option", "a=1"],
            "--adapter-option needs the folder of a model",
        ),
        (
            [
                *("estimate", "Ouro-1.4B", "--device", "h200", "--full-loops", "8"),
                *("--acceptance-from", str(H200)),
            ],
            "at 4 loops, not of 'ByteDance/Ouro-1.4B' at 8",
        ),
        (
            ["estimate", "huginn-0125", "--device", "h200", "--acceptance-from", str(H200)],
            "is of model 'ByteDance/Ouro-1.4B'",
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preset", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    ["ByteDance/Ouro-1.4B H200", "Ouro-1.4B device_name=NVIDIA_H200", "1.4b h200", str(H200)],
)
def test_a_preset_is_shown_by_what_its_model_is_called(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preset", "show", name]) == 0
    assert "ByteDance/Ouro-1.4B" in capsys.readouterr().out


def test_the_preset_of_a_demo_is_shown_by_the_name_of_the_demo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preset", "show", "demo:huginn"]) == 0
    assert "demo:huginn" in capsys.readouterr().out


def test_show_keeps_to_contexts_that_were_measured_and_marks_what_lies_beyond(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preset", "show", "demo:ouro"]) == 0
    out = capsys.readouterr().out
    assert "ms at 256 tokens of context\n" in out and "~" not in out
    assert main(["preset", "show", "demo:ouro", "--context-tokens", "512"]) == 0
    out = capsys.readouterr().out
    assert "ms at 512 tokens of context; ~ is extrapolated" in out
    plain = next(line for line in out.splitlines() if line.startswith("plain"))
    assert plain.count("~") == 3
    assert _json(capsys, "show", str(H200))["context_tokens"] == 512


def test_validate_finds_what_is_wrong_and_what_is_misnamed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["preset", "validate", str(OURO)]) == 0
    (tmp_path / "model=wrong.json").write_bytes(H200.read_bytes())
    assert main(["preset", "validate", str(tmp_path)]) == 2
    assert f"should be called '{H200.name}'" in capsys.readouterr().out
    (tmp_path / "model=wrong.json").rename(tmp_path / "mine.json")
    (tmp_path / "geometry.json").write_text("{}")
    assert main(["preset", "validate", str(tmp_path)]) == 2
    assert "mine.json' is not looked at: presets are called" in capsys.readouterr().out
    (tmp_path / "mine.json").rename(tmp_path / H200.name)
    assert main(["preset", "validate", str(tmp_path)]) == 0
    (tmp_path / "empty").mkdir()
    assert main(["preset", "validate", str(tmp_path / "empty")]) == 2
    assert "holds no preset" in capsys.readouterr().err


def test_diff_shows_fields_and_times_and_nothing_for_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = _json(capsys, "diff", str(H100), str(H200))
    assert found["fields"] == {"device_name": ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]}
    assert found["time_ratio"] and not found["first_draft"]
    assert main(["preset", "diff", str(H100), str(H200)]) == 0
    assert "time, other / one" in capsys.readouterr().out
    assert main(["preset", "diff", str(H200), str(H200)]) == 0
    assert "no difference" in capsys.readouterr().out


def test_estimate_writes_a_preset_that_reads_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["Ouro-1.4B", "--device", "a100", "--acceptance-from", str(H200)]
    assert main(["preset", "estimate", *arguments, "-o", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    preset = Preset.read(file)
    assert file.name == preset.file_name and preset.device_name == "NVIDIA A100-SXM4-80GB"
    assert preset.acceptance == Preset.read(H200).acceptance
    assert preset.provenance["cost"].kind == "modelled"
    assert len(preset.config.candidates) > 1


def test_estimate_takes_depth_and_candidates_as_a_measurement_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["Ouro-1.4B", "--device", "h100-sxm", "--note", "a note"]
    grid = ["--ks", "6", "3", "--ds", "2"]
    preset = Preset.from_json(
        _json(capsys, "estimate", *arguments, *grid, "--acceptance-from", str(H200))
    )
    arms = {Candidate(3, 2), Candidate(6, 2)}
    assert set(preset.cost.candidates) == {PLAIN, *arms} >= set(preset.config.candidates)
    assert all(len(bucket.candidates) > 1 for bucket in preset.config.buckets)
    assert preset.revision == Preset.read(H200).revision is not None
    assert dict(preset.cost.fingerprint)["graph_backend"] == "cuda"
    command = preset.provenance["cost"].command or ""
    assert command.endswith(f"--acceptance-from {H200.name} --ks 6 3 --ds 2")
    assert (preset.provenance["cost"].notes or "").startswith("a note; ")

    deep = Preset.from_json(_json(capsys, "estimate", *arguments, "--full-loops", "8"))
    shallow = Preset.from_json(_json(capsys, "estimate", *arguments))
    assert (deep.full_loops, shallow.full_loops) == (8, 4)
    times = [preset.cost.ms(1, 128, PLAIN) or 0.0 for preset in (deep, shallow)]
    assert 1.8 < times[0] / times[1] < 2.0


def test_estimate_takes_the_sizes_of_a_folder_without_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = (ROOT / "tests" / "golden" / "ouro-b" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    document = _json(capsys, "estimate", str(tmp_path), "--device", "h20")
    assert document["model"] == tmp_path.name and document["acceptance"] == []
    assert (
        main(["preset", "estimate", str(tmp_path), "--device", "h20", "--full-loops", "999"]) == 2
    )
    assert "full_loops must be between 1 and" in capsys.readouterr().err


def test_looking_at_presets_does_not_import_torch() -> None:
    import subprocess

    code = (
        "import sys; from looped_spec.cli.main import main; "
        f"main(['preset', 'show', {str(H200)!r}]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
