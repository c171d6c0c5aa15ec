"""A name becomes an adapter with weights, or an error before anything is allocated."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from looped_spec_ouro.adapter import OuroAdapter
from tiny_checkpoints import CONFIG, Q, random_tensors, write_config, write_single

from looped_spec import loading
from looped_spec.adapter import Capabilities
from looped_spec.errors import ConfigError, ModelLoadError, PluginError, UnsupportedError
from looped_spec.loading import build_adapter, choose_device, choose_dtype, load_adapter
from looped_spec.options import EngineOptions
from looped_spec.plugins import PluginManager
from looped_spec.testing.dense import DenseContext


def test_a_folder_becomes_a_model_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny"
    folder.mkdir()
    tensors = random_tensors(torch.bfloat16)
    write_single(folder, tensors)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    loaded = load_adapter(folder, device="cpu")
    assert isinstance(loaded.adapter, OuroAdapter)
    assert (loaded.name, loaded.folder) == ("Tiny", folder)
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    assert loaded.config == CONFIG
    assert loaded.generation_config == {"eos_token_id": 2}
    q = loaded.adapter.module.state_dict()["model.layers.1.self_attn.qkv_proj.weight"][:16]
    assert torch.equal(q, tensors[Q].float())
    ctx = DenseContext(1, 5, 3)
    with torch.inference_mode():
        state = loaded.adapter.prelude(torch.arange(5)[None], ctx)
        for index in range(3):
            state = loaded.adapter.loop(state, index, ctx)
        logits = loaded.adapter.readout(state, ctx)
    assert logits.shape == (1, 5, CONFIG["vocab_size"])
    assert bool(torch.isfinite(logits).all())


def test_dummy_weights_need_no_weights(tmp_path: Path) -> None:
    write_config(tmp_path)
    first, second, other = (
        load_adapter(tmp_path, device="cpu", dtype="bfloat16", load_format="dummy", seed=seed)
        for seed in (3, 3, 4)
    )
    weight = "lm_head.weight"
    states = [m.adapter.module.state_dict()[weight] for m in (first, second, other)]
    assert states[0].dtype == first.dtype == torch.bfloat16
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_nothing_is_drawn_for_a_model_that_is_still_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(*_: object) -> None:
        raise AssertionError("imports PyTorch's compiler on the meta device, which takes seconds")

    for distribution in ("normal", "uniform"):
        monkeypatch.setattr(torch.nn.init, f"_no_grad_{distribution}_", draw)
    adapter = build_adapter(CONFIG, "tiny", PluginManager(), {})
    assert {parameter.device.type for parameter in adapter.module.parameters()} == {"meta"}


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors())
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\n"
    for module in ("modeling_ouro", "configuration_ouro", "tokenization_ouro"):
        (tmp_path / f"{module}.py").write_text(code)
    auto_map = {"AutoConfig": "configuration_ouro.C", "AutoModelForCausalLM": "modeling_ouro.M"}
    write_config(tmp_path, auto_map=auto_map, trust_remote_code=True)
    load_adapter(tmp_path, device="cpu")
    assert not marker.exists()
    assert "modeling_ouro" not in sys.modules


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="outro")
    with pytest.raises(PluginError, match="no adapter takes model type 'outro'"):
        load_adapter(tmp_path, device="cpu")


def test_an_unsupported_configuration_is_told_verbatim(tmp_path: Path) -> None:
    write_config(tmp_path, use_sliding_window=True)
    reason = OuroAdapter.unsupported_reason({"use_sliding_window": True})
    with pytest.raises(UnsupportedError) as caught:
        load_adapter(tmp_path, device="cpu")
    assert str(caught.value) == f"model '{tmp_path.name}' is not supported: {reason}"


def test_a_config_that_the_adapter_refuses(tmp_path: Path) -> None:
    write_config(tmp_path, vocab_size="big")
    with pytest.raises(ModelLoadError, match="vocab_size must be a positive integer"):
        load_adapter(tmp_path, device="cpu")


def use_adapter(monkeypatch: pytest.MonkeyPatch, adapter_class: type[OuroAdapter]) -> None:
    monkeypatch.setattr(loading, "load_adapter_class", lambda spec: adapter_class)


def test_adapter_options_have_defaults_and_no_unknown_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    class Optioned(OuroAdapter):
        options = {"init_scale": 1.0, "mode": "a"}  # noqa: RUF012

        def __init__(self, config: Any, options: Any) -> None:
            given.append(dict(options))
            super().__init__(config, options)

    use_adapter(monkeypatch, Optioned)
    write_config(tmp_path)
    options = {"init_scale": 0.0}
    load_adapter(tmp_path, device="cpu", load_format="dummy", adapter_options=options)
    assert given == [{"init_scale": 0.0, "mode": "a"}]
    with pytest.raises(ConfigError, match=r"'init_scal' \(did you mean 'init_scale'\?\)"):
        load_adapter(tmp_path, device="cpu", adapter_options={"init_scal": 0.0})


def test_an_adapter_that_breaks_is_blamed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(OuroAdapter):
        def __init__(self, config: Any, options: Any) -> None:
            raise KeyError("sizes")

    use_adapter(monkeypatch, Broken)
    write_config(tmp_path)
    with pytest.raises(PluginError, match=r"adapter 'ouro' cannot be built .* KeyError: 'sizes'"):
        load_adapter(tmp_path, device="cpu")


def test_a_config_that_breaks_the_adapters_check_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(OuroAdapter):
        @classmethod
        def unsupported_reason(cls, config: Mapping[str, Any]) -> str | None:
            return str(config["no such key"])

    use_adapter(monkeypatch, Careless)
    write_config(tmp_path)
    with pytest.raises(PluginError, match=r"adapter 'ouro' cannot be built .* KeyError"):
        load_adapter(tmp_path, device="cpu")


def test_state_beside_the_planes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stateful(OuroAdapter):
        def __init__(self, config: Any, options: Any) -> None:
            super().__init__(config, options)
            self.capabilities = Capabilities(non_kv_state="convolution state")

    use_adapter(monkeypatch, Stateful)
    write_config(tmp_path)
    with pytest.raises(UnsupportedError, match="keeps convolution state beside its KV planes"):
        load_adapter(tmp_path, device="cpu", load_format="dummy")


@pytest.mark.parametrize("load_format", ["dumy", "", None, 1])
def test_a_load_format_of_no_known_name_is_told_alike_everywhere(
    tmp_path: Path, load_format: Any
) -> None:
    with pytest.raises(ConfigError, match="load_format must be one of auto, dummy, got ") as direct:
        load_adapter(tmp_path, load_format=load_format)
    with pytest.raises(ConfigError) as option:
        EngineOptions(load_format=load_format)
    assert str(direct.value) == str(option.value)


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x", "", 0.5])
def test_a_device_of_no_known_kind(device: Any) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:N, got"):
        choose_device(device)


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(ConfigError, match=f"device '{device}' was asked for, but PyTorch"):
            choose_device(device)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")


def test_cuda_gets_an_index_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"'cuda:2': there are 2 CUDA device\(s\)"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "torch.float32"}, torch.float32),
        ({"dtype": "float8"}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
)
def test_auto_dtype_is_the_checkpoints_on_cuda(
    config: dict[str, Any], chosen: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_dtype("auto", config, torch.device("cuda", 0)) == chosen
    assert len(caplog.records) == 1


def test_auto_dtype_on_the_cpu_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(tmp_path)
    with caplog.at_level(logging.INFO):
        load_adapter(tmp_path, device="cpu", load_format="dummy")
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("looped_spec")]
    assert messages == ["dtype auto: float32, as half precision is slow on the CPU"]


def test_an_explicit_dtype_is_taken_or_refused() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("float16", CONFIG, cpu) == torch.float16
    assert choose_dtype(torch.bfloat16, CONFIG, cpu) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"got 'bfloat15' \(did you mean 'bfloat16'\?\)"):
        choose_dtype("bfloat15", CONFIG, cpu)
    with pytest.raises(ConfigError, match=r"got 'torch\.int8'"):
        choose_dtype(torch.int8, CONFIG, cpu)


def test_a_bad_dtype_is_refused_before_the_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="dtype must be"):
        load_adapter("no/such-model", device="cpu", dtype="int4")


def test_the_config_file_is_kept_as_it_was_read(tmp_path: Path) -> None:
    write_config(tmp_path, note="kept")
    loaded = load_adapter(tmp_path, device="cpu", load_format="dummy")
    assert loaded.config == json.loads((tmp_path / "config.json").read_text())
    assert loaded.generation_config == {}
