"""config.json of an Ouro model: which sizes must be there, and which follow from the others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from golden import GOLDEN
from looped_spec_ouro.adapter import read_config

from looped_spec.errors import ModelLoadError
from looped_spec.loading import load_adapter

CONFIG: dict[str, Any] = json.loads((GOLDEN / "ouro-a" / "config.json").read_text())
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "total_ut_steps", "rms_norm_eps", "rope_theta"),
    "max_position_embeddings",
)


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in CONFIG.items() if name != field}


@pytest.mark.parametrize("field", REQUIRED)
def test_a_size_that_is_absent_or_null_is_named(field: str) -> None:
    for config in (without(field), {**CONFIG, field: None}):
        with pytest.raises(ModelLoadError, match=f"{field} must be a positive .*, got None"):
            read_config(config)


@pytest.mark.parametrize(
    ("field", "ours", "derived"),
    [("num_key_value_heads", "num_kv_heads", 4), ("head_dim", "head_dim", 8)],
)
def test_sizes_that_follow_from_others_may_be_absent_or_null(
    field: str, ours: str, derived: int
) -> None:
    given = {**CONFIG, "num_key_value_heads": 2, "hidden_size": 32}
    assert getattr(read_config(given), ours) == given[field] != derived
    absent = {name: value for name, value in given.items() if name != field}
    for config in (absent, {**given, field: None}):
        assert getattr(read_config(config), ours) == derived


@pytest.mark.parametrize("field", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, "4", 2.0, True])
def test_a_size_that_is_given_is_never_derived_instead(field: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=f"{field} must be a positive integer, got {value!r}"):
        read_config({**CONFIG, field: value})


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_key_value_heads_that_divide_the_heads_are_taken(kv_heads: int) -> None:
    assert read_config({**CONFIG, "num_key_value_heads": kv_heads}).num_kv_heads == kv_heads


@pytest.mark.parametrize("kv_heads", [3, 5, 8])
def test_key_value_heads_that_do_not_divide_the_heads_are_refused_by_name(
    tmp_path: Path, kv_heads: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": kv_heads}))
    message = f"num_attention_heads 4 must be a multiple of num_key_value_heads {kv_heads}"
    with pytest.raises(ModelLoadError, match=message):
        load_adapter(tmp_path, device="cpu", load_format="dummy")


@pytest.mark.parametrize("field", ["num_hidden_layers", "total_ut_steps"])
@pytest.mark.parametrize("value", [1025, 10**9, 2**40])
def test_a_count_that_no_model_has_is_refused_before_anything_is_built(
    field: str, value: int
) -> None:
    with pytest.raises(ModelLoadError, match=f"{field} must be at most 1024, got {value}"):
        read_config({**CONFIG, field: value})


@pytest.mark.parametrize("changes", [{"head_dim": 7}, {"head_dim": None, "hidden_size": 28}])
def test_an_odd_head_dim_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="head_dim must be even, got 7"):
        read_config({**CONFIG, **changes})


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [("layer_types", 5, "a list"), ("rope_parameters", [1], "an object")],
)
def test_a_field_of_the_wrong_kind_is_named(
    tmp_path: Path, field: str, value: object, kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, field: value}))
    with pytest.raises(ModelLoadError, match=re.escape(f"{field} must be {kind}, got {value!r}")):
        load_adapter(tmp_path, device="cpu", load_format="dummy")
