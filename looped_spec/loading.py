"""From the name of a model to an adapter with its weights on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.errors import (
    ConfigError,
    LoopedSpecError,
    PluginError,
    UnsupportedError,
    closest,
    reject_unknown,
)
from looped_spec.model_config import read_generation_config, read_json_config
from looped_spec.model_source import resolve_model_source
from looped_spec.plugins import PluginManager, load_adapter_class
from looped_spec.weights import init_dummy_weights, load_weights

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "dummy")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelOrigin:
    """Where a model comes from.

    Attributes:
        name: what to call it: hub id, `demo:<name>`, or the folder's own name.
        spec: of the adapter that takes it.
        revision: commit of a hub model; None where there is none, as of a local folder.
    """

    name: str
    spec: AdapterSpec
    revision: str | None


@dataclass(frozen=True)
class LoadedModel:
    """An adapter whose weights are in place, and what its folder said about the model.

    Attributes:
        adapter: its `module` is set to inference; all its parameters are on `device` in `dtype`.
        config: config.json as it was read.
        generation_config: generation_config.json as it was read; empty if there is none.
        folder: the model folder, where the tokenizer files are.
        origin: where the model comes from.
        device: with an index if it is a CUDA device.
        dtype: of the parameters and the activations.
    """

    adapter: ModelAdapter
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    folder: Path
    origin: ModelOrigin
    device: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """What to call the model: hub id, `demo:<name>`, or the folder's own name."""
        return self.origin.name


def load_adapter(
    model: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    adapter_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    revision: str | None = None,
    plugins: PluginManager | None = None,
    check: Callable[[ModelAdapter, ModelOrigin, torch.device, torch.dtype], object] | None = None,
) -> LoadedModel:
    """Load `model` (see `resolve_model_source`), for "dummy" with random weights.

    Everything that can be wrong is checked before weights are downloaded or allocated, cheap things
    first; so does `check`, which gets the adapter without weights, where the model comes from, the
    device and the dtype, and raises to refuse them. `seed` is that of the dummy weights. `plugins`
    are by default those of the environment.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, "
            f"got {load_format!r}{closest(str(load_format), LOAD_FORMATS)}"
        )
    chosen_device = choose_device(device)
    _explicit_dtype(dtype)  # a misspelt dtype is refused before a download
    manager = PluginManager() if plugins is None else plugins
    source = resolve_model_source(model, revision, manager)
    config = read_json_config(source.folder)
    generation_config = read_generation_config(source.folder)
    chosen_dtype = choose_dtype(dtype, config, chosen_device)
    adapter = build_adapter(config, source.name, manager, adapter_options or {})
    # A snapshot's folder of the hub is called after its commit.
    commit = source.folder.name if source.from_hub else None
    spec = manager.resolve_model_type(config["model_type"], config)
    origin = ModelOrigin(source.name, spec, commit)
    if check is not None:
        check(adapter, origin, chosen_device, chosen_dtype)
    if load_format == "dummy":
        init_dummy_weights(adapter, chosen_device, chosen_dtype, seed)
    else:
        source.fetch_weights()
        load_weights(adapter, source.folder, chosen_device, chosen_dtype)
    return LoadedModel(
        adapter=adapter,
        config=config,
        generation_config=generation_config,
        folder=source.folder,
        origin=origin,
        device=chosen_device,
        dtype=chosen_dtype,
    )


def build_adapter(
    config: Mapping[str, Any], name: str, plugins: PluginManager, options: Mapping[str, Any]
) -> ModelAdapter:
    """Build the adapter of a config.json on the meta device, without any weights.

    The adapter gets its own defaults with `options` over them. `name` is the model's, for errors.
    """
    spec = plugins.resolve_model_type(config["model_type"], config)
    adapter_class = load_adapter_class(spec)
    try:
        reason = adapter_class.unsupported_reason(config)
        if reason is not None:
            raise UnsupportedError(f"model '{name}' is not supported: {reason}")
        reject_unknown(options, adapter_class.options, f"option of adapter '{spec.name}'")
        with torch.device("meta"), _NothingDrawn():
            adapter = adapter_class(config, {**adapter_class.options, **options})
    except LoopedSpecError:
        raise
    except Exception as error:
        raise PluginError(
            f"adapter '{spec.name}' cannot be built for model '{name}': "
            f"{type(error).__name__}: {error}"
        ) from error
    state = adapter.capabilities.non_kv_state
    if state is not None:
        raise UnsupportedError(
            f"model '{name}' is not supported: it keeps {state} beside its KV planes, which cannot "
            "be rolled back after a rejected draft"
        )
    return adapter


class _NothingDrawn(TorchFunctionMode):
    """Leaves new parameters as they are, since meta tensors hold no numbers.

    Drawing a normal distribution for them would import PyTorch's compiler, which takes seconds.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and "tensor" in kwargs:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def choose_device(device: str | torch.device) -> torch.device:
    """Return the device to run on; "auto" is CUDA if there is any, and "cuda" gets its index."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got '{device}'")
    if chosen.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device '{device}' was asked for, but PyTorch {torch.__version__} finds no CUDA "
            "device: check the driver and the PyTorch build, or use device 'cpu'"
        )
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device '{device}': there are {torch.cuda.device_count()} CUDA device(s)"
        )
    return torch.device("cuda", index)


def choose_dtype(
    dtype: str | torch.dtype, config: Mapping[str, Any], device: torch.device
) -> torch.dtype:
    """Return the dtype to run in; "auto" is that of the checkpoint on CUDA and float32 on the CPU.

    A config.json that names no dtype, or one that models do not run in, counts as bfloat16.
    """
    explicit = _explicit_dtype(dtype)
    if explicit is not None:
        return explicit
    if device.type == "cpu":
        logger.info("dtype auto: float32, as half precision is slow on the CPU")
        return torch.float32
    stored = config.get("dtype") or config.get("torch_dtype")
    chosen = str(stored).removeprefix("torch.")
    if chosen not in DTYPES:
        logger.info("dtype auto: bfloat16, as config.json says %s", stored or "nothing of a dtype")
        return torch.bfloat16
    logger.info("dtype auto: %s, as config.json says", chosen)
    return DTYPES[chosen]


def _explicit_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Return the dtype that was asked for, None for "auto"; raise `ConfigError` for any other."""
    if isinstance(dtype, torch.dtype):
        if dtype in DTYPES.values():
            return dtype
    elif dtype == "auto" or dtype in DTYPES:
        return DTYPES.get(dtype)
    hint = closest(str(dtype), DTYPES)
    raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, got '{dtype}'{hint}")
