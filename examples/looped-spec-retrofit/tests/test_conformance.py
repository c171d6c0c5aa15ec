"""The contract of an adapter, checked by the kit of looped-spec."""

from __future__ import annotations

from pathlib import Path

import pytest
from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.loading import load_adapter
from looped_spec.testing import AdapterConformance

from looped_spec_retrofit.plugin import looped_spec_adapters


class TestRetrofit(AdapterConformance):
    @pytest.fixture
    def checkpoint_folder(self, tiny: Path) -> Path:
        return tiny

    @pytest.fixture
    def adapter(self, tiny: Path) -> ModelAdapter:
        return load_adapter(tiny, device="cpu").adapter

    @pytest.fixture
    def spec(self) -> AdapterSpec:
        (spec,) = looped_spec_adapters()
        return spec
