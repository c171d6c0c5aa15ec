"""A preset is a JSON document: written whole, read back equal, refused where anything is amiss."""

import copy
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preset_example import make_preset

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.presets import AcceptanceEntry, Preset, Provenance, WorkloadRecord
from looped_spec.presets.preset import preset_file_name

texts = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=12)
maybe = st.none() | texts
groups = st.sampled_from(["selection", "evaluation", None])
kinds = st.sampled_from(["measured", "published", "modelled"])


@st.composite
def entries(draw: st.DrawFn, full_loops: int) -> AcceptanceEntry:
    trials = draw(st.lists(st.integers(0, 500), min_size=1, max_size=6))
    accepted = [draw(st.integers(0, count)) for count in trials]
    depth = draw(st.integers(1, full_loops - 1))
    kind = draw(st.none() | kinds)
    return AcceptanceEntry(draw(texts), draw(groups), depth, tuple(accepted), tuple(trials), kind)


@st.composite
def origins(draw: st.DrawFn) -> Provenance:
    records = st.builds(
        WorkloadRecord, st.integers(0, 99), groups, st.none() | st.just("ab" * 32), maybe
    )
    return Provenance(
        draw(kinds),
        draw(st.dates()).isoformat(),
        source=draw(texts),
        command=draw(maybe),
        versions=draw(st.dictionaries(texts, texts, max_size=2)),
        device=draw(maybe),
        workloads=draw(st.dictionaries(texts, records, max_size=2)),
        notes=draw(maybe),
    )


@st.composite
def presets(draw: st.DrawFn) -> Preset:
    full_loops = draw(st.integers(2, 8))
    arms = st.builds(Candidate, st.integers(1, 8), st.integers(1, full_loops - 1))
    times = {
        (b, length, c.num_speculative_tokens, c.draft_loops): draw(st.integers(1, 10**9)) / 1000
        for b in (1, 4)
        for length in (0, 128)
        for c in {PLAIN, *draw(st.lists(arms, max_size=3))}
    }
    acceptance = draw(
        st.lists(
            entries(full_loops),
            max_size=3,
            unique_by=lambda e: (e.workload, e.group, e.draft_loops),
        )
    )
    json_values = st.none() | st.booleans() | st.integers(-9, 9) | texts
    return Preset(
        model=draw(texts),
        adapter=draw(st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)),
        device_name=draw(texts),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        full_loops=full_loops,
        config=AdaptiveSpecConfig.default(full_loops, draw(st.integers(1, 40))),
        cost=CostTable.of(times, draw(st.dictionaries(texts, texts, max_size=2))),
        acceptance=tuple(acceptance),
        provenance={part: draw(origins()) for part in ("config", "cost", "acceptance")},
        revision=draw(maybe),
        adapter_options=draw(st.dictionaries(texts, json_values, max_size=2)),
    )


@given(presets())
def test_a_preset_read_back_from_json_is_the_same(preset: Preset) -> None:
    text = json.dumps(preset.to_json(), allow_nan=False)
    assert Preset.from_json(json.loads(text)) == preset


def test_a_written_file_is_read_back_and_written_the_same(preset: Preset, tmp_path: Path) -> None:
    first, second = tmp_path / preset.file_name, tmp_path / "again.json"
    preset.write(first)
    assert Preset.read(first) == preset
    Preset.read(first).write(second)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", first.name]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "preset.json"
    preset.write(path)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LoopedSpecError, match="No space left"):
        preset.write(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["preset.json"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_part_of_a_file_is_not_read_as_a_preset(
    preset: Preset, tmp_path: Path, share: float
) -> None:
    path = tmp_path / "preset.json"
    preset.write(path)
    data = path.read_bytes().rstrip()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ConfigError, match=re.escape(f"preset '{path}' is no JSON")):
        Preset.read(path)


def _at(document: Any, *path: Any) -> Any:
    for step in path:
        document = document[step]
    return document


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ((), "modle"),
        (("config",), "bucket"),
        (("config", "buckets", 0), "candidate"),
        (("cost",), "cell"),
        (("acceptance", 0), "draftloops"),
        (("provenance", "cost"), "kin"),
        (("provenance", "cost", "workloads", "maths"), "sha"),
    ],
)
def test_an_unknown_key_anywhere_is_an_error_with_the_closest(
    preset: Preset, path: tuple[Any, ...], key: str
) -> None:
    document = copy.deepcopy(preset.to_json())
    _at(document, *path)[key] = 1
    with pytest.raises(ConfigError, match=f"'{key}' .did you mean"):
        Preset.from_json(document)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("schema_version",), 2, "schema_version of a preset must be 1, got 2"),
        (("schema_version",), True, "schema_version of a preset must be 1, got True"),
        (("model",), "", "model of a preset must be a text"),
        (("model",), "a\nb", "model of a preset must be a text of one line"),
        (("adapter",), "No!", r"adapter of a preset must match \[a-z0-9_\]"),
        (("dtype",), "float8", "dtype of a preset must be one of bfloat16"),
        (("full_loops",), 5, "full_loops of a preset is 5, that of its config is 4"),
        (("full_loops",), "4", "full_loops of a preset must be an integer"),
        (
            ("cost", "fingerprint"),
            {"model": "Org/Other"},
            "model of a preset is 'demo:toy', that of its cost's fingerprint 'Org/Other'",
        ),
        (("cost", "fingerprint"), {"full_loops": "3"}, "full_loops of a preset is '4'.*'3'"),
        (("cost", "fingerprint"), {"dtype": "float16"}, "dtype of a preset is 'float32'.*'float16"),
        (("config", "cost"), {"schema_version": 1, "cells": [[1, 0, 0, 0, 1.0]]}, "must be null"),
        (("cost", "cells", 0, 3), 9, "draft_loops"),
        (("cost", "cells", 0, 4), float("nan"), "ms of a cost cell must be a positive number"),
        (("acceptance",), {}, "acceptance of a preset must be a list"),
        (("acceptance", 0, "accepted", 0), 101, "must not exceed trials, got 101 of 100"),
        (("acceptance", 0, "accepted"), [1], "one number for each position, got 1 and 2"),
        (("acceptance", 0, "trials", 0), float("inf"), "numbers of at least 0, got inf"),
        (("acceptance", 0, "trials", 0), 10**400, "at least 0, got a number of 1329 bits"),
        (("cost", "cells", 0, 4), 10**400, "must be a positive number, got a number of 1329 bits"),
        (("config", "ema_beta"), 10**400, "ema_beta must be a finite number, got a number of"),
        (("acceptance", 0, "draft_loops"), 4, "draft_loops of acceptance must be between 1 and 3"),
        (("acceptance", 0, "group"), "test", "group of acceptance must be one of selection"),
        (("acceptance", 0, "draft_loops"), 2, "'maths', group selection, draft_loops 2 twice"),
        (("provenance", "cost", "kind"), "guessed", "one of measured, published, modelled"),
        (("provenance", "cost", "date"), "30.11.2026", "date of provenance must be YYYY-MM-DD"),
        (("provenance", "cost", "command"), None, "needs a source or a command"),
        (("provenance", "cost", "workloads", "maths", "sha256"), "x", "64 hexadecimal digits"),
        (("provenance",), {}, "provenance of a preset must be of config, cost, acceptance"),
        (("revision",), 3, "revision of a preset must be a text of one line or null"),
        (("adapter_options",), [], "adapter_options of a preset must be a JSON object"),
    ],
)
def test_a_wrong_value_is_named_with_its_range(
    preset: Preset, path: tuple[Any, ...], value: Any, says: str
) -> None:
    document = json.loads(json.dumps(preset.to_json()))
    _at(document, *path[:-1])[path[-1]] = value
    with pytest.raises(ConfigError, match=says):
        Preset.from_json(document)


@pytest.mark.parametrize("key", ["schema_version", "model", "config", "cost", "provenance"])
def test_a_missing_key_is_named(preset: Preset, key: str) -> None:
    document = preset.to_json()
    del document[key]
    with pytest.raises(ConfigError, match=f"a preset needs {key}"):
        Preset.from_json(document)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    st.sampled_from(
        [
            (),
            ("model",),
            ("config",),
            ("config", "buckets"),
            ("cost",),
            ("cost", "cells"),
            ("acceptance",),
            ("acceptance", 0),
            ("acceptance", 0, "trials"),
            ("provenance",),
            ("provenance", "cost"),
            ("provenance", "cost", "versions"),
            ("provenance", "cost", "workloads"),
            ("adapter_options",),
        ]
    ),
)
def test_no_document_ends_in_anything_but_a_preset_or_a_config_error(
    value: Any, path: tuple[Any, ...]
) -> None:
    document: Any = json.loads(json.dumps(make_preset().to_json()))
    if path:
        _at(document, *path[:-1])[path[-1]] = value
    else:
        document = value
    try:
        assert isinstance(Preset.from_json(document), Preset)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_the_file_says_what_it_is_and_has_sorted_keys(preset: Preset, tmp_path: Path) -> None:
    preset.write(tmp_path / "preset.json")
    document = json.loads((tmp_path / "preset.json").read_text())
    assert list(document) == sorted(document)
    assert document["schema_version"] == 1
    assert "cost" not in document["config"]  # the preset has its own


def test_files_are_named_as_vllm_names_tuned_configurations() -> None:
    assert (
        preset_file_name("ByteDance/Ouro-1.4B", "NVIDIA H100 80GB HBM3", "bfloat16")
        == "model=Ouro-1.4B,device_name=NVIDIA_H100_80GB_HBM3,dtype=bfloat16.json"
    )
    assert (
        preset_file_name("demo:toy", "Some(R) CPU @ 2/3 GHz", "float32")
        == "model=demo_toy,device_name=Some_R__CPU___2_3_GHz,dtype=float32.json"
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "cannot read preset '.*': No such file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.write_bytes(b""), "is no JSON"),
        (lambda path: path.write_bytes(b"\xff{}"), "is no UTF-8 text"),
        (lambda path: path.write_text("[" * 100_000), "is nested too deeply"),
        (lambda path: path.write_text("[]"), "a preset must be a JSON object"),
        (lambda path: path.write_text("{}"), "a preset needs schema_version"),
        (lambda path: path.write_text('{"cost": {"a": 1, "a": 2}}'), "occurs twice .*: 'a'"),
    ],
)
def test_a_file_that_is_no_preset_is_refused_by_name(make: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "preset.json"
    make(path)
    with pytest.raises(ConfigError, match=says) as caught:
        Preset.read(path)
    assert str(path) in str(caught.value)


def test_expected_tokens_follow_from_the_conditional_chances() -> None:
    entry = AcceptanceEntry("maths", None, 1, (80, 40), (100, 80))
    assert entry.chances == (0.8, 0.5)
    assert entry.tokens(0) == 1.0
    assert entry.tokens(2) == pytest.approx(1 + 0.8 + 0.8 * 0.5)
    assert entry.tokens(3) == pytest.approx(1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.25)
    assert AcceptanceEntry("maths", None, 1, (0,), (0,)).tokens(3) == 1.0


def test_settings_that_have_their_defaults_are_not_written_and_follow_them() -> None:
    config = dataclasses.replace(
        make_preset().config,
        goodput=GoodputSettings(base_acceptance=0.123),
        shadow_cost_ratio=0.3,
    )
    preset = make_preset(config=config)
    written = preset.to_json()["config"]
    always = ("schema_version", "full_loops", "buckets", "policy")
    assert set(written) == {*always, "goodput", "shadow_cost_ratio"}
    assert written["goodput"] == {"base_acceptance": 0.123}
    assert Preset.from_json(preset.to_json()) == preset
    # A file with all of them is read as well.
    assert Preset.from_json(preset.to_json() | {"config": config.to_json()}) == preset
