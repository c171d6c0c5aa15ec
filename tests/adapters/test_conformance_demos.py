"""The bundled demos pass the kit that adapters are tested with: real weights, not random ones."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
from demo_recipes import CASES, HUGINN, NANBEIGE, OURO, Case

from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.demos.export import load_demo
from looped_spec.plugins import PluginManager
from looped_spec.settings import Settings
from looped_spec.testing import AdapterConformance

pytestmark = pytest.mark.slow


@functools.cache
def loaded(name: str) -> ModelAdapter:
    """Read the weights of a demo once; who may change the model takes a copy."""
    recipe = CASES[name].recipe
    return load_demo(recipe.folder, recipe.adapter_class).adapter


class DemoConformance(AdapterConformance):
    """The checks for the demo of `case`; pytest collects the classes below only."""

    case: Case

    @pytest.fixture
    def checkpoint_folder(self) -> Path:
        return self.case.recipe.folder

    @pytest.fixture
    def adapter(self) -> ModelAdapter:
        return copy.deepcopy(loaded(self.case.recipe.name))

    @pytest.fixture
    def spec(self) -> AdapterSpec:
        records = PluginManager(Settings()).records()
        (spec,) = (r.spec for r in records if r.name == self.case.recipe.name and r.spec)
        return spec


class TestOuroDemo(DemoConformance):
    case = OURO


class TestHuginnDemo(DemoConformance):
    case = HUGINN


class TestNanbeigeDemo(DemoConformance):
    case = NANBEIGE
