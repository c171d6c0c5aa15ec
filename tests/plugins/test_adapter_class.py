"""Importing the adapter class that a plugin names."""

from __future__ import annotations

import pytest
from fake_plugins import FakeSite

from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.errors import PluginError
from looped_spec.plugins import load_adapter_class

ADAPTER = """
from looped_spec.adapter import ModelAdapter

class Toy(ModelAdapter):
    def __init__(self, config, options): ...
    def kv_planes(self, full_loops): ...
    def prelude(self, tokens, ctx): ...
    def loop(self, state, index, ctx): ...
    def readout(self, state, ctx): ...

class Half(ModelAdapter):
    def prelude(self, tokens, ctx): ...

class Stranger: ...

number = 7
"""


def spec(factory: str) -> AdapterSpec:
    return AdapterSpec(name="toy", model_types=("toy",), factory=factory)


def test_the_class_is_imported_from_its_factory(fake_site: FakeSite) -> None:
    fake_site.write("fake_factory", ADAPTER)
    loaded = load_adapter_class(spec("fake_factory:Toy"))
    assert issubclass(loaded, ModelAdapter)
    assert loaded.__name__ == "Toy"


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("fake_nowhere:Toy", "cannot be imported: ModuleNotFoundError: .*'fake_nowhere'"),
        ("fake_factory:Toi", r"module fake_factory has no 'Toi' \(did you mean 'Toy'\?\)"),
        ("fake_factory:Stranger", "Stranger is not a subclass of looped_spec.ModelAdapter"),
        ("fake_factory:number", "number is not a subclass of looped_spec.ModelAdapter"),
        ("fake_factory:Half", "Half does not implement __init__, kv_planes, loop, readout$"),
        ("fake_crash:Toy", "cannot be imported: SystemExit: 9"),
    ],
)
def test_a_bad_factory_is_an_error_that_names_adapter_and_cause(
    factory: str, cause: str, fake_site: FakeSite
) -> None:
    fake_site.write("fake_factory", ADAPTER)
    fake_site.write("fake_crash", "raise SystemExit(9)")
    with pytest.raises(PluginError, match=rf"^adapter 'toy' \(factory '{factory}'\).*{cause}"):
        load_adapter_class(spec(factory))


def test_ctrl_c_during_the_import_is_not_swallowed(fake_site: FakeSite) -> None:
    fake_site.write("fake_slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_adapter_class(spec("fake_slow:Toy"))
