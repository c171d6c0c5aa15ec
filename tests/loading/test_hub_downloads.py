"""Of a hub model no weight is downloaded before all else about it is known to be right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub
from tiny_checkpoints import CONFIG, Q, random_tensors, write_single

from looped_spec import LLM
from looped_spec.adapter import ModelAdapter
from looped_spec.errors import (
    ConfigError,
    LoopedSpecError,
    ModelLoadError,
    PluginError,
    UnsupportedError,
)
from looped_spec.loading import load_adapter


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub whose repository is the tiny model, complete."""
    folder = tmp_path / "repository"
    folder.mkdir()
    write_single(folder, random_tensors())
    hub = FakeHub(tmp_path / "cache").install(monkeypatch)
    hub.add({path.name: path.read_bytes() for path in folder.iterdir()})
    return hub


def refuse(adapter: ModelAdapter, *device_and_dtype: object) -> None:
    assert next(adapter.module.parameters()).is_meta
    raise UnsupportedError("refused by the caller")


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], type[LoopedSpecError], str]] = {
    "model type": ({"model_type": "outro"}, {}, PluginError, "no adapter takes model type"),
    "no model type": ({"model_type": None}, {}, ModelLoadError, "must name its model_type"),
    "feature": ({"use_sliding_window": True}, {}, UnsupportedError, "sliding-window"),
    "size": ({"vocab_size": 0}, {}, ModelLoadError, "vocab_size must be a positive integer"),
    "option": ({}, {"adapter_options": {"x": 1}}, ConfigError, "unknown option of adapter"),
    "check": ({}, {"check": refuse}, UnsupportedError, "refused by the caller"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_refused_is_refused_before_its_weights_are_downloaded(
    hub: FakeHub, refusal: str
) -> None:
    changes, arguments, error, message = REFUSALS[refusal]
    hub.add({"config.json": json.dumps({**CONFIG, **changes}).encode()})
    with pytest.raises(error, match=message):
        load_adapter("org/name", device="cpu", **arguments)
    assert hub.fetched() == {"config.json"}


@pytest.mark.parametrize(
    "load",
    [
        lambda: load_adapter("org/name", device="cpu", load_format="dummy"),
        lambda: LLM("org/name", device="cpu", load_format="dummy"),
    ],
    ids=["load_adapter", "LLM"],
)
def test_dummy_weights_download_none(hub: FakeHub, load: Callable[[], Any]) -> None:
    load()
    assert hub.fetched() == {"config.json"}


def test_dummy_weights_need_none_in_the_repository(hub: FakeHub) -> None:
    hub.files["pytorch_model.bin"] = hub.files.pop("model.safetensors")
    load_adapter("org/name", device="cpu", load_format="dummy")
    with pytest.raises(ModelLoadError, match="hub model org/name holds pickle weights only"):
        load_adapter("org/name", device="cpu")
    assert hub.fetched() == {"config.json"}


def test_options_of_the_engine_that_do_not_fit_the_model_download_no_weights(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match="full_loops"):
        LLM("org/name", device="cpu", full_loops=99)
    assert hub.fetched() == {"config.json"}


def test_a_model_that_fits_is_loaded_with_its_weights(hub: FakeHub) -> None:
    loaded = load_adapter("org/name", device="cpu")
    assert hub.fetched() == {"config.json", "model.safetensors"}
    assert (loaded.name, loaded.folder) == ("org/name", hub.snapshot)
    q = loaded.adapter.module.state_dict()["model.layers.1.self_attn.qkv_proj.weight"][:16]
    assert torch.equal(q, random_tensors()[Q])
