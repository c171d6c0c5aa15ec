"""Families that bear the same model type: the one that accepts a model goes before all others."""

from __future__ import annotations

import pytest
from fake_plugins import FakeSite, plugin_source

from looped_spec.adapter import AdapterSpec
from looped_spec.errors import ConfigError, PluginError
from looped_spec.plugins import PluginManager
from looped_spec.settings import Settings

SMALL = "\n\ndef is_small(config):\n    return config['size'] < 10\n"
CONFIG = {"model_type": "fake_shared", "size": 3}


def add_particular(site: FakeSite, name: str, source: str = SMALL, **fields: object) -> None:
    """Install an adapter that takes small models of the shared type."""
    accepts = f"{name}:is_small"
    declared = plugin_source(name, "fake_shared", accepts=accepts, **fields)
    site.add(name.replace("_", "-"), declared + source)


@pytest.fixture
def site(fake_site: FakeSite) -> FakeSite:
    """One adapter of all models of the type, one of the small ones."""
    fake_site.add("fake-all", plugin_source("fake_all", "fake_shared"))
    add_particular(fake_site, "fake_small")
    return fake_site


def chosen(size: int, *allowed: str) -> str:
    """Return the name of the adapter that takes a model of some size."""
    manager = PluginManager(Settings(plugins=allowed or None))
    return manager.resolve_model_type("fake_shared", {**CONFIG, "size": size}).name


def test_both_are_active_and_each_takes_its_models(site: FakeSite) -> None:
    assert {record.status for record in site.records()} == {"active"}
    assert chosen(3) == "fake_small"
    assert chosen(30) == "fake_all"


def test_an_adapter_that_is_disabled_is_not_asked(site: FakeSite) -> None:
    assert chosen(3, "fake_all") == "fake_all"


def test_an_adapter_that_is_disabled_is_named_where_no_other_takes_the_model(
    fake_site: FakeSite,
) -> None:
    add_particular(fake_site, "fake_small")
    with pytest.raises(PluginError, match=r"adapter 'fake_small' of .* is disabled: not in LOOPED"):
        chosen(3, "fake_other")


def test_an_adapter_that_cannot_be_used_is_named_and_not_passed_over(site: FakeSite) -> None:
    add_particular(site, "fake_poor", SMALL.replace("< 10", "> 50"), requires=("fake_nowhere",))
    with pytest.raises(PluginError, match=r"fake_poor.* is unavailable: missing module fake_now"):
        chosen(60)
    assert chosen(30) == "fake_all"


def test_of_two_that_accept_a_model_neither_wins(site: FakeSite) -> None:
    add_particular(site, "fake_tiny", SMALL.replace("10", "5"))
    assert chosen(7) == "fake_small"
    with pytest.raises(PluginError, match="this model of type 'fake_shared' is claimed by fake-s"):
        chosen(3)
    assert chosen(3, "fake_small") == "fake_small"


def test_a_model_that_none_accepts_is_refused_with_who_takes_others(fake_site: FakeSite) -> None:
    add_particular(fake_site, "fake_small")
    with pytest.raises(PluginError, match=r"no adapter takes this model .*\(fake_small takes oth"):
        chosen(30)


@pytest.mark.parametrize("source", ["\n", SMALL.replace("'size'", "'sise'")])
def test_an_adapter_that_fails_to_say_is_named_with_the_way_out(
    source: str, fake_site: FakeSite
) -> None:
    fake_site.add("fake-all", plugin_source("fake_all", "fake_shared"))
    add_particular(fake_site, "fake_small", source)
    with pytest.raises(PluginError, match=r"fake_small' of fake-small .*set LOOPED_SPEC_PLUGINS"):
        chosen(30)
    assert chosen(30, "fake_all") == "fake_all"


def test_what_is_to_be_asked_must_be_a_function_of_a_module() -> None:
    with pytest.raises(ConfigError, match="accepts of adapter 'toy' must be 'module:function'"):
        AdapterSpec(name="toy", model_types=("x",), factory="a:B", accepts="plugin.is_small")
