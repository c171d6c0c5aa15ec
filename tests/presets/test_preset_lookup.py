"""Which preset a run takes: its own, else the nearest as a prior, never one of another model."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from preset_example import make_preset

from looped_spec.adapter import ModelAdapter
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError
from looped_spec.presets import Preset
from looped_spec.presets.lookup import PresetChoice, PresetFolder, choose_preset, preset_folders
from looped_spec.presets.match import Match, RunIdentity, compare, same_model
from looped_spec.runtime.preset_use import preset_config

RUN = RunIdentity("demo:toy", "toy", "Toy CPU", "float32", 4, num_threads=1)


def _folder(path: Path, presets: Sequence[Preset], name: str = "bundled") -> PresetFolder:
    path.mkdir(exist_ok=True)
    for preset in presets:
        preset.write(path / preset.file_name)
    return PresetFolder(path, name)


def test_the_preset_of_this_model_device_and_dtype_is_taken(tmp_path: Path) -> None:
    other = make_preset(device_name="Other CPU")
    folder = _folder(tmp_path, [make_preset(), other, make_preset(dtype="bfloat16")])
    choice = choose_preset("auto", RUN, [folder])
    assert choice.preset == make_preset()
    assert choice.match is not None and choice.match.is_exact
    assert choice.line == (
        "preset model=demo_toy,device_name=Toy_CPU,dtype=float32.json (bundled): "
        "measured for this device, it does not say with which num_threads"
    )


def test_a_preset_of_another_device_is_a_prior_and_says_so(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path, [make_preset(device_name="Toy CPU v2"), make_preset(device_name="Something else")]
    )
    choice = choose_preset("auto", RUN, [folder])
    assert choice.preset is not None and choice.preset.device_name == "Toy CPU v2"
    assert choice.match is not None and not choice.match.is_exact
    assert choice.match.cost_doubt == "device_name is 'Toy CPU', the preset's 'Toy CPU v2'"
    assert choice.match.acceptance_doubt is None
    assert "as no more than a prior: device_name is 'Toy CPU', the preset's" in choice.line
    assert "looped-spec preset generate demo:toy" in choice.line


@pytest.mark.parametrize(
    ("preset", "cost", "acceptance"),
    [
        ({"device_name": "x"}, True, False),
        ({"dtype": "bfloat16"}, True, True),
        ({"revision": "abc"}, False, True),
    ],
)
def test_what_differs_puts_in_doubt_only_what_depends_on_it(
    preset: dict[str, str], cost: bool, acceptance: bool
) -> None:
    match = compare(make_preset(**preset), dataclasses.replace(RUN, revision="def"))
    assert match.obstacle is None and not match.is_exact
    assert (match.cost_doubt is not None) == cost
    assert (match.acceptance_doubt is not None) == acceptance


def test_another_number_of_threads_makes_the_costs_a_prior() -> None:
    preset = make_preset()
    measured = dataclasses.replace(preset.provenance["cost"], versions={"num_threads": "4"})
    preset = dataclasses.replace(preset, provenance={**preset.provenance, "cost": measured})
    assert compare(preset, RUN).cost_doubt == "num_threads is '1', the preset's '4'"
    assert compare(preset, dataclasses.replace(RUN, num_threads=4)).is_exact
    assert compare(preset, dataclasses.replace(RUN, num_threads=None)).is_exact


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [({}, True), ({"device_name": "Other CPU"}, False), ({"num_threads": 2}, False)],
)
def test_where_the_times_are_of_something_else_a_run_starts_plainly_and_says_so(
    changes: dict[str, object], is_known: bool
) -> None:
    """Scenario 43: never used in silence; a start with drafts needs times of this machine."""
    bucket = BatchBucket(1, 8, (PLAIN, Candidate(1, 1)), 1)
    cells = {(1, 0, 0, 0): 4.0, (1, 0, 1, 1): 4.4}
    preset = make_preset(
        config=AdaptiveSpecConfig(4, (bucket,)),
        cost=CostTable.of(cells, {"num_threads": "1"}),
        acceptance=(),
    )
    run = dataclasses.replace(RUN, **changes)  # type: ignore[arg-type]
    choice = PresetChoice(preset, "file", compare(preset, run))
    config = preset_config(choice, cast(ModelAdapter, None), 8, None)
    assert config is not None and config.cost is not None
    explanation = AdaptiveController(config).explain()
    assert explanation.buckets[0].current == (Candidate(1, 1) if is_known else PLAIN)
    assert any("guess" in note for note in explanation.notes) is not is_known
    for name in changes:
        assert config.cost.mismatch is not None and name in config.cost.mismatch
        assert name in choice.line


HERE = {
    "num_threads": 1,
    "cpu_linear": "auto",
    "cpu_kernels": "torch",
    "graph_backend": "eager",
}


@pytest.mark.parametrize("name", HERE)
def test_times_of_another_way_to_run_rounds_are_a_prior_and_unknown_ones_are_said_to_be(
    name: str,
) -> None:
    preset = make_preset()
    told = {key: str(value) for key, value in HERE.items()}
    run = dataclasses.replace(RUN, **HERE)  # type: ignore[arg-type]

    def choice(fingerprint: dict[str, str]) -> PresetChoice:
        cost = dataclasses.replace(preset.cost, fingerprint=tuple(fingerprint.items()))
        changed = dataclasses.replace(preset, cost=cost)
        return PresetChoice(changed, "file", compare(changed, run))

    same, other = choice(told), choice(told | {name: "7"})
    unknown = choice({key: value for key, value in told.items() if key != name})
    assert same.match is not None and same.match.cost_doubt is None
    assert same.line == "preset file: measured for this device"
    assert other.match is not None and other.match.acceptance_doubt is None
    assert other.match.cost_doubt == f"{name} is '{HERE[name]}', the preset's '7'"
    assert other.match.cost_doubt in other.line
    assert unknown.match is not None and unknown.match.is_exact
    assert unknown.line.endswith(f"measured for this device, it does not say with which {name}")


@pytest.mark.parametrize("name", ["fused", "attention_backend"])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_kernels_of_a_gpu_are_compared_where_told_and_missed_on_cuda_alone(
    name: str, is_cuda: bool
) -> None:
    run = dataclasses.replace(
        RUN, num_threads=None, fused="off", attention_backend="flash_attn", is_cuda=is_cuda
    )
    preset = make_preset()
    told = {"fused": "off", "attention_backend": "flash_attn"}

    def match(fingerprint: dict[str, str]) -> Match:
        cost = dataclasses.replace(preset.cost, fingerprint=tuple(fingerprint.items()))
        return compare(dataclasses.replace(preset, cost=cost), run)

    assert match(told).cost_doubt is None and match(told).unknown == ()
    assert name in (match(told | {name: "other"}).cost_doubt or "")
    silent = match({key: value for key, value in told.items() if key != name})
    assert silent.is_exact and silent.unknown == ((name,) if is_cuda else ())


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ({}, {"scale": 1.0, "sizes": (1, 2)}, True),
        ({"scale": 1}, {"scale": 1.0, "sizes": [1, 2]}, True),
        ({"sizes": [1, 2], "scale": 1.0}, {"scale": 1, "sizes": (1, 2)}, True),
        ({"scale": 2.0}, {"scale": 1.0, "sizes": [1, 2]}, False),
        ({}, {"scale": True, "sizes": [1, 2]}, False),
        ({}, {"scale": 1.0, "sizes": [2, 1]}, False),
    ],
)
def test_options_of_the_adapter_are_compared_by_what_is_in_force(
    mine: dict[str, object], theirs: dict[str, object], same: bool
) -> None:
    defaults = {"scale": 1.0, "sizes": [1, 2]}
    run = dataclasses.replace(RUN, adapter_options=theirs, adapter_defaults=defaults)
    match = compare(make_preset(adapter_options=mine), run)
    assert (match.obstacle is None) == same
    assert same or "adapter_options is" in (match.obstacle or "")


def test_a_revision_that_is_not_known_is_not_taken_for_the_same() -> None:
    match = compare(make_preset(revision="abc"), RUN)
    assert match.acceptance_doubt == "revision of the run is not known, the preset's is 'abc'"
    assert compare(make_preset(revision=None), dataclasses.replace(RUN, revision="abc")).is_exact


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "demo:other"}, "model is 'demo:other', the preset's 'demo:toy'"),
        ({"full_loops": 3}, "full_loops is '3', the preset's '4'"),
        ({"adapter": "other"}, "adapter is 'other', the preset's 'toy'"),
        ({"adapter_options": {"a": 1}}, "adapter_options is '{'a': 1}', the preset's '{}'"),
    ],
)
def test_a_preset_of_another_model_or_depth_is_not_used(
    changes: dict[str, object], says: str, tmp_path: Path
) -> None:
    run = dataclasses.replace(RUN, **changes)  # type: ignore[arg-type]
    folder = _folder(tmp_path, [make_preset()])
    assert choose_preset("auto", run, [folder]).preset is None
    with pytest.raises(ConfigError, match="is not for this run") as caught:
        choose_preset(str(tmp_path / make_preset().file_name), run, [])
    assert says in str(caught.value)


def test_without_a_preset_the_line_names_the_file_that_was_wanted(tmp_path: Path) -> None:
    choice = choose_preset("auto", RUN, [_folder(tmp_path, [])])
    assert choice.preset is None
    assert "model=demo_toy,device_name=Toy_CPU,dtype=float32.json" in choice.line
    assert "'looped-spec preset generate demo:toy --workload NAME=FILE' would do" in choice.line


def test_the_folder_of_the_variable_goes_before_the_adapters(tmp_path: Path) -> None:
    package, own = tmp_path / "package", tmp_path / "own"
    _folder(package, [make_preset()])
    mine = make_preset(adapter_options={})
    _folder(own, [dataclasses.replace(mine, acceptance=())])
    choice = choose_preset("auto", RUN, preset_folders(str(own), package))
    assert choice.preset is not None and choice.preset.acceptance == ()
    assert choice.file is not None and "LOOPED_SPEC_PRESET_DIR" in choice.file


def test_none_takes_none_even_where_one_fits(tmp_path: Path) -> None:
    choice = choose_preset("none", RUN, [_folder(tmp_path, [make_preset()])])
    assert choice.preset is None and choice.advice is None


@pytest.mark.parametrize(
    "name",
    ["model=demo_toy,device_name=A_B,dtype=float32", "a_b", "A_B,", "demo:toy A_B", "toy a_b"],
)
def test_a_name_is_a_file_or_the_only_part_of_one(name: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, [make_preset(), make_preset(device_name="A B")])
    choice = choose_preset(name, RUN, [folder])
    assert choice.preset is not None and choice.preset.device_name == "A B"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("float32", "is not one but 2"),
        ("H900", "no preset 'H900' for model 'demo:toy'; of this model there is 'model=demo_toy,"),
        ("x.json", "no preset"),
        ("big", "no preset 'big' for model 'demo:toy'; of this model there is 'model=demo_toy,"),
    ],
)
def test_a_name_that_is_not_there_or_not_one_is_refused(
    name: str, says: str, tmp_path: Path
) -> None:
    presets = [make_preset(), make_preset(device_name="A B"), make_preset(model="Org/Big-1B")]
    folder = _folder(tmp_path, presets)
    with pytest.raises(ConfigError, match=says):
        choose_preset(name, RUN, [folder])


@pytest.mark.parametrize("name", ["Org/Big-1B", "Org/Big-1B Toy_CPU", "big toy"])
def test_the_model_may_be_named_as_its_hub_id(name: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, [make_preset(), make_preset(model="Org/Big-1B")])
    run = dataclasses.replace(RUN, model="Org/Big-1B")
    choice = choose_preset(name, run, [folder])
    assert choice.preset is not None and choice.preset.model == "Org/Big-1B"
    with pytest.raises(ConfigError, match="cannot read preset 'Org/Other-1B'"):
        choose_preset("Org/Other-1B", run, [folder])


def test_of_two_files_of_one_name_the_first_folder_has_the_say(tmp_path: Path) -> None:
    mine = _folder(tmp_path / "own", [dataclasses.replace(make_preset(), acceptance=())])
    choice = choose_preset("toy_cpu", RUN, [mine, _folder(tmp_path / "all", [make_preset()])])
    assert choice.preset is not None and choice.preset.acceptance == ()


def test_files_that_are_not_called_as_presets_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _folder(tmp_path, [make_preset()])
    with caplog.at_level(logging.WARNING):
        choose_preset("auto", RUN, [folder])
        assert not caplog.records
        (tmp_path / "mine.json").write_text("{}")
        choose_preset("auto", RUN, [folder])
    assert "'mine.json': presets are called model=*.json" in caplog.text


def test_broken_files_are_passed_over_with_a_warning_but_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _folder(tmp_path, [make_preset(device_name="x")])
    broken = tmp_path / make_preset().file_name
    broken.write_text("{")
    with caplog.at_level(logging.WARNING):
        choice = choose_preset("auto", RUN, [folder])
    assert choice.preset is not None and choice.preset.device_name == "x"
    assert f"preset '{broken}' is no JSON" in caplog.text
    with pytest.raises(ConfigError, match="is no JSON"):
        choose_preset(broken.stem, RUN, [folder])


def test_a_folder_that_is_not_there_or_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LOOPED_SPEC_PRESET_DIR"):
        choose_preset("auto", RUN, preset_folders(str(tmp_path / "gone"), None))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="LOOPED_SPEC_PRESET_DIR"):
        choose_preset("auto", RUN, preset_folders(str(tmp_path / "file"), None))
    with pytest.raises(ConfigError, match="is a folder"):
        choose_preset(str(tmp_path), RUN, [])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Org/Model-1B", "Org/Model-1B", True),
        ("Org/Model-1B", "Model-1B", True),
        ("Org/Model-1B", "Other/Model-1B", False),
        ("demo:toy", "toy", False),
        ("Model-1B", "Model-2B", False),
    ],
)
def test_names_of_models_are_compared_as_far_as_they_are_known(
    one: str, other: str, same: bool
) -> None:
    assert same_model(one, other) == same
    assert same_model(other, one) == same
