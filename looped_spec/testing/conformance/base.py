"""What all checks share: the fixtures that an author gives, the inputs, and the comparisons."""

from __future__ import annotations

import dis
from pathlib import Path

import pytest
import torch
from torch import Tensor

from looped_spec.adapter import AdapterSpec, ExitCriterion, ModelAdapter

REQUIRED_METHODS = ("kv_planes", "prelude", "loop", "readout")
"""What an adapter must have besides its constructor, in the order in which it is used."""

NAMES_METHODS = "test_every_required_method_is_written"
"""The check that runs on a skeleton too."""


class ConformanceBase:
    """Fixtures and helpers; the checks are in the classes derived from it."""

    tolerance: float = 1e-4
    """Largest difference that rounding in fp32 may make, as a share of the largest value. A random
    model that needs more amplifies its rounding errors: give it smaller weights instead."""

    @pytest.fixture
    def adapter(self) -> ModelAdapter:
        """Return the model under test: tiny, with random weights, fp32, on the CPU."""
        raise NotImplementedError(
            f"{type(self).__name__} must define a fixture `adapter` that returns a tiny random "
            "model: fp32, on the CPU, of at least 32 tokens and 8 vocabulary entries"
        )

    @pytest.fixture(autouse=True)
    def _skip_what_needs_missing_methods(self, request: pytest.FixtureRequest) -> None:
        """Leave it to one check to name missing methods; all others could only fail."""
        if "adapter" not in request.fixturenames or request.function.__name__ == NAMES_METHODS:
            return
        adapter = request.getfixturevalue("adapter")
        if missing := unwritten(adapter):
            pytest.skip(f"{type(adapter).__name__} is not written yet: {', '.join(missing)}")

    @pytest.fixture
    def spec(self) -> AdapterSpec | None:
        """Return the record that the plugin declares; None leaves out the checks of the record."""
        return None

    @pytest.fixture
    def checkpoint_folder(self) -> Path | None:
        """Return a folder with config.json and the official tensors of the very model `adapter`."""
        return None

    def sample_tokens(
        self, adapter: ModelAdapter, batch_size: int, num_tokens: int, seed: int = 0
    ) -> Tensor:
        """Return random token ids [B, T], the same for the same arguments."""
        dice = torch.Generator().manual_seed(seed)
        vocab = adapter.geometry.vocab_size
        return torch.randint(0, vocab, (batch_size, num_tokens), generator=dice)

    def assert_close(self, got: Tensor, expected: Tensor, what: str) -> None:
        """Compare two tensors up to rounding."""
        assert got.shape == expected.shape, f"{what}: shapes differ"
        got, expected = got.float(), expected.float()
        allowed = self.tolerance * max(1.0, float(expected.abs().max()))
        error = float((got - expected).abs().max())
        assert error <= allowed, f"{what} differ by {error:.1e}, rounding explains {allowed:.1e}"


def unwritten(adapter: ModelAdapter) -> dict[str, str]:
    """Map the required methods that do nothing but raise NotImplementedError to what they say.

    Where such a method says nothing, the contract says what it is for.
    """
    missing = {}
    for name in REQUIRED_METHODS:
        method = getattr(type(adapter), name)
        code = getattr(method, "__code__", None)
        if code is None or code.co_names != ("NotImplementedError",):
            continue
        if any(step.opname.startswith("RETURN") for step in dis.get_instructions(code)):
            continue
        said = [text for text in code.co_consts if isinstance(text, str) and text != method.__doc__]
        contract = " ".join((getattr(ModelAdapter, name).__doc__ or "").split())
        missing[name] = said[-1] if said else contract
    return missing


def draft_depth(adapter: ModelAdapter) -> int:
    """Return a draft depth in the middle; skip where there is no room to draft."""
    full = adapter.geometry.default_full_loops
    if full < 2:
        pytest.skip("geometry: a model of one loop has no shallower draft")
    return full // 2


def criteria(adapter: ModelAdapter) -> tuple[ExitCriterion, ...]:
    """Return the exit criteria; skip where none is declared."""
    if not adapter.capabilities.early_exit:
        pytest.skip("capability early_exit: none is declared")
    return adapter.capabilities.early_exit


def given(spec: AdapterSpec | None) -> AdapterSpec:
    """Return the record; skip where the author gave none."""
    if spec is None:
        pytest.skip("fixture spec: none is given")
    return spec
