"""The JSON files of a model folder are read with errors that say what is wrong where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from looped_spec.errors import ModelLoadError
from looped_spec.model_config import (
    MAX_COUNT,
    read_boolean,
    read_generation_config,
    read_json_config,
    read_rope_parameters,
    read_sizes,
)


def test_a_config_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x", "extra": [1, null]}')
    assert read_json_config(tmp_path) == {"model_type": "x", "extra": [1, None]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": "x",\n  "a" 1}', r"config\.json is not valid JSON: .* line 2 column 7"),
        (b"", "line 1 column 1"),
        (b"\xff\xfe\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (
            b'{"a": ' + b"1" * 5000 + b"}",
            r"config\.json .*: a number in it is too long",
        ),
        (b"[1]", "must hold a JSON object, found a list"),
        (b"null", "must hold a JSON object, found null"),
        (b'{"a": 1}', "must name its model_type .*; it is missing"),
        (b'{"model_type": 3}', "must name its model_type .*; found 3"),
        (b'{"model_type": ""}', "must name its model_type .*; found ''"),
    ],
)
def test_a_bad_config_is_told_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_json_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="absent does not exist"):
        read_json_config(tmp_path / "absent")
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        read_json_config(tmp_path)
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ModelLoadError, match="file is not a folder"):
        read_json_config(tmp_path / "file")


def test_a_generation_config_may_be_absent_but_not_broken(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [1, 2]}')
    assert read_generation_config(tmp_path) == {"eos_token_id": [1, 2]}
    path.write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not valid JSON"):
        read_generation_config(tmp_path)


def test_sizes_come_under_our_names_and_must_be_positive() -> None:
    config = {"a": 3, "b": 0.5, "c": 2, "rest": None}
    sizes = read_sizes(config, {"a": "x", "b": "y", "c": "z"}, real_numbers=("b", "c"))
    assert sizes == {"x": 3, "y": 0.5, "z": 2}


@pytest.mark.parametrize("value", [None, "3", True, 0, -1, 2.0, [3]])
def test_a_size_that_is_none_names_its_field(value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: a must be a positive integer, got "):
        read_sizes({"a": value}, {"a": "x"})


@pytest.mark.parametrize("value", [None, "3", True, 0.0, float("nan")])
def test_a_real_number_that_is_none_names_its_field(value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: a must be a positive number, got "):
        read_sizes({"a": value}, {"a": "x"}, real_numbers=("a",))


@pytest.mark.parametrize("value", [MAX_COUNT + 1, 10**9, 2**40])
def test_a_count_that_no_model_has_is_refused(value: int) -> None:
    with pytest.raises(ModelLoadError, match=f"a must be at most {MAX_COUNT}, got {value}"):
        read_sizes({"a": value}, {"a": "x"}, counts=("a",))
    assert read_sizes({"a": MAX_COUNT}, {"a": "x"}, counts=("a",)) == {"x": MAX_COUNT}
    assert read_sizes({"a": value}, {"a": "x"}) == {"x": value}


def test_what_cannot_be_looked_at_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"a\.\.\. cannot be read: File name too long"):
        read_json_config(tmp_path / ("a" * 5000))
    for name, read in (
        ("config.json", read_json_config),
        ("generation_config.json", read_generation_config),
    ):
        (tmp_path / name).symlink_to("a" * 300)
        with pytest.raises(ModelLoadError, match=rf"{name} cannot be read: File name too long"):
            read(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir(mode=0)
    with pytest.raises(ModelLoadError, match="cannot be read: Permission denied"):
        read_json_config(tmp_path / "model")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e4}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        ({}, {"rope_type": "default", "rope_theta": None}),
    ],
)
def test_rotary_settings_are_read_in_either_spelling(
    config: dict[str, object], expected: dict[str, object]
) -> None:
    assert read_rope_parameters(config) == expected


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rotary_settings_that_are_no_object_are_named(field: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{field} must be an object, got 'yarn'"):
        read_rope_parameters({field: "yarn"})


def test_a_switch_must_be_given() -> None:
    assert read_boolean({"tie": False}, "tie") is False
    for config in ({}, {"tie": None}, {"tie": 0}, {"tie": "false"}):
        with pytest.raises(ModelLoadError, match="tie must be true or false, got"):
            read_boolean(config, "tie")
