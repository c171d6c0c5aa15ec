"""Weights land where the layout says, one tensor at a time."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import (
    CONFIG,
    NORM,
    K,
    Q,
    V,
    meta_adapter,
    random_tensors,
    write_sharded,
    write_single,
)
from torch import nn

from looped_spec import weights
from looped_spec.adapter import WeightTarget
from looped_spec.checkpoint import open_safetensors
from looped_spec.errors import ModelLoadError, PluginError
from looped_spec.weights import init_dummy_weights, load_weights

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, adapter: Any = None) -> Any:
    adapter = adapter or meta_adapter()
    load_weights(adapter, folder, CPU, dtype)
    return adapter


def check_slices(adapter: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    state = adapter.module.state_dict()
    for name, target in adapter.checkpoint_layout().items():
        found = state[target.parameter][target.start : target.stop]
        assert found.dtype == dtype
        assert torch.equal(found, tensors[name].to(dtype)), name


def test_single_file_fills_every_slice(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_single(tmp_path, tensors)
    adapter = load(tmp_path)
    check_slices(adapter, tensors, torch.float32)
    qkv = adapter.module.model.layers[1].self_attn.qkv_proj.weight
    assert torch.equal(qkv, torch.cat([tensors[Q], tensors[K], tensors[V]]))


def test_shards_may_split_a_merged_parameter(tmp_path: Path) -> None:
    tensors = random_tensors()
    weight_map = write_sharded(tmp_path, tensors)
    assert len({weight_map[name] for name in (Q, K, V)}) > 1
    check_slices(load(tmp_path), tensors, torch.float32)


def test_a_lone_file_of_any_name_is_taken(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_single(tmp_path, tensors, "weights.safetensors")
    check_slices(load(tmp_path), tensors, torch.float32)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_cast_to_the_wanted_dtype(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = random_tensors(stored)
    write_single(tmp_path, tensors)
    check_slices(load(tmp_path, wanted), tensors, wanted)


def test_the_module_is_ready_for_inference(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors())
    module = load(tmp_path).module
    assert not module.training
    assert all(not p.requires_grad and not p.is_meta for p in module.parameters())


def test_the_file_may_go_away_after_loading(tmp_path: Path) -> None:
    tensors = random_tensors()
    path = write_single(tmp_path, tensors)
    adapter = load(tmp_path)
    path.write_bytes(bytes(path.stat().st_size))
    check_slices(adapter, tensors, torch.float32)


def test_no_two_checkpoint_tensors_are_alive_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most, served = 0, 0, 0

    class CountingReader:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def get_tensor(self, name: str) -> torch.Tensor:
            nonlocal alive, most, served
            tensor = self.handle.get_tensor(name)
            alive, served = alive + 1, served + 1
            most = max(most, alive)
            weakref.finalize(tensor, gone)
            return tensor

    def gone() -> None:
        nonlocal alive
        alive -= 1

    @contextmanager
    def counting(path: Path) -> Any:
        with open_safetensors(path) as handle:
            yield CountingReader(handle)

    monkeypatch.setattr(weights, "open_safetensors", counting)
    tensors = random_tensors()
    write_sharded(tmp_path, tensors)
    load(tmp_path)
    assert (most, served) == (1, len(tensors))


def test_nothing_is_allocated_for_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[NORM]
    write_single(tmp_path, tensors)
    adapter = meta_adapter()
    with pytest.raises(ModelLoadError):
        load(tmp_path, adapter=adapter)
    assert all(p.is_meta for p in adapter.module.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    tensors = random_tensors(torch.bfloat16)
    tensors[K][1, 2] = value
    write_single(tmp_path, tensors)
    with pytest.raises(ModelLoadError, match=rf"'{K}' holds values that are not finite"):
        load(tmp_path)


def test_weights_beyond_the_range_of_half_precision_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors[Q][0, 0] = 1e6
    write_single(tmp_path, tensors)
    load(tmp_path, torch.bfloat16)
    with pytest.raises(ModelLoadError, match=f"'{Q}' .* not finite in torch.float16"):
        load(tmp_path, torch.float16)


class TinyAdapter:
    """Two matrices, perhaps tied, whose layout a test may spoil."""

    layout: dict[str, WeightTarget] | None = None
    optional: frozenset[str] = frozenset()

    def __init__(self, tied: bool = False) -> None:
        with torch.device("meta"):
            self.module = nn.Module()
            self.module.embed = nn.Embedding(6, 4)
            self.module.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.module.head.weight = self.module.embed.weight

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        return self.layout or {name: WeightTarget(name) for name in self.module.state_dict()}

    def optional_checkpoint_tensors(self) -> frozenset[str]:
        return self.optional


def test_a_tied_head_may_be_absent_and_stays_tied(tmp_path: Path) -> None:
    embed = torch.randn(6, 4)
    write_single(tmp_path, {"embed.weight": embed})
    adapter = TinyAdapter(tied=True)
    adapter.optional = frozenset({"head.weight"})
    load(tmp_path, adapter=adapter)
    assert adapter.module.head.weight is adapter.module.embed.weight
    assert torch.equal(adapter.module.head.weight, embed)


def test_an_optional_tensor_of_an_untied_parameter_is_still_needed(tmp_path: Path) -> None:
    write_single(tmp_path, {"embed.weight": torch.randn(6, 4)})
    adapter = TinyAdapter()
    adapter.optional = frozenset({"head.weight"})
    with pytest.raises(ModelLoadError, match=r"parameter 'head\.weight' .* has no tensor"):
        load(tmp_path, adapter=adapter)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    embed = torch.randn(6, 4)
    write_single(tmp_path, {"embed.weight": embed, "head.weight": embed.clone()})
    load(tmp_path, adapter=TinyAdapter(tied=True))
    write_single(tmp_path, {"embed.weight": embed, "head.weight": embed + 1})
    with pytest.raises(ModelLoadError, match=r"'head\.weight' differs from 'embed\.weight'"):
        load(tmp_path, adapter=TinyAdapter(tied=True))


def test_optional_tensors_outside_the_layout_are_ignored(tmp_path: Path) -> None:
    tensors = {
        "embed.weight": torch.randn(6, 4),
        "head.weight": torch.randn(6, 4),
        "table": torch.zeros(3, dtype=torch.int64),
    }
    write_single(tmp_path, tensors)
    adapter = TinyAdapter()
    adapter.optional = frozenset({"table"})
    load(tmp_path, adapter=adapter)
    assert torch.equal(adapter.module.head.weight, tensors["head.weight"])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"a": WeightTarget("embed.wait")}, r"'a' to 'embed\.wait'"),
        ({"a": WeightTarget("embed.weight", 2, 9)}, "rows 2 to 9"),
        ({"a": WeightTarget("embed.weight", 0, 3)}, "6 rows .* exactly once"),
        (
            {"a": WeightTarget("embed.weight", 0, 3), "b": WeightTarget("embed.weight", 2, 5)},
            "exactly once",
        ),
    ],
)
def test_a_wrong_layout_is_the_adapters_fault(
    tmp_path: Path, targets: dict[str, WeightTarget], message: str
) -> None:
    names = [*targets, "head.weight"]
    write_single(tmp_path, {n: torch.randn(3 if n != "head.weight" else 6, 4) for n in names})
    adapter = TinyAdapter()
    adapter.layout = {**targets, "head.weight": WeightTarget("head.weight")}
    with pytest.raises(PluginError, match=message):
        load(tmp_path, adapter=adapter)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_is_refused_because_it_would_stay_empty(tmp_path: Path, persistent: bool) -> None:
    adapter = TinyAdapter()
    adapter.module.register_buffer("inv_freq", torch.ones(2), persistent=persistent)
    write_single(tmp_path, random_tensors())
    with pytest.raises(PluginError, match=r"buffers \(inv_freq\)"):
        load(tmp_path, adapter=adapter)
    with pytest.raises(PluginError, match=r"buffers \(inv_freq\)"):
        init_dummy_weights(adapter, CPU, torch.float32, 0)


def test_dummy_weights_are_seeded_and_sane() -> None:
    def dummy(seed: int) -> dict[str, torch.Tensor]:
        adapter = meta_adapter()
        init_dummy_weights(adapter, CPU, torch.bfloat16, seed)
        assert not adapter.module.training
        return adapter.module.state_dict()

    first, same, other = dummy(1), dummy(1), dummy(2)
    assert all(torch.equal(first[name], same[name]) for name in first)
    embed = "model.embed_tokens.weight"
    assert not torch.equal(first[embed], other[embed])
    assert first[embed].dtype == torch.bfloat16
    assert abs(first[embed].float().std() - 0.02) < 0.002
    assert bool((first[NORM] == 1).all())
    assert bool((first["model.early_exit_gate.bias"] == 0).all())
    assert set(first) == set(meta_adapter().module.state_dict())
    assert first[embed].shape == (CONFIG["vocab_size"], CONFIG["hidden_size"])
