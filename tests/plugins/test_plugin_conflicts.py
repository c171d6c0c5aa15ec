"""Two plugins that claim the same name or model type."""

from __future__ import annotations

import pytest
from fake_plugins import FakeSite, plugin_source

from looped_spec.errors import PluginError
from looped_spec.plugin_walk import StrictPluginFailure
from looped_spec.plugins import PluginManager
from looped_spec.settings import Settings


@pytest.fixture
def same_name(fake_site: FakeSite) -> FakeSite:
    fake_site.add("fake-one", plugin_source("fake_toy", "fake_x"), version="1.1")
    fake_site.add("fake-two", plugin_source("fake_toy", "fake_y"), version="2.2")
    fake_site.add("fake-good", plugin_source("fake_good"))
    return fake_site


@pytest.fixture
def same_model_type(fake_site: FakeSite) -> FakeSite:
    fake_site.add("fake-one", plugin_source("fake_a", "fake_x", "fake_own"), version="1.1")
    fake_site.add("fake-two", plugin_source("fake_b", "fake_x"), version="2.2")
    fake_site.add("fake-good", plugin_source("fake_good"))
    return fake_site


BOTH_SIDES = (
    r"is claimed by fake-one 1\.1 \(entry point 'plugin'\) "
    r"and fake-two 2\.2 \(entry point 'plugin'\): uninstall all but one"
)


def test_neither_of_two_adapters_with_one_name_wins(same_name: FakeSite) -> None:
    found = {record.distribution: record.status for record in same_name.records()}
    assert found == {"fake-good": "active", "fake-one": "error", "fake-two": "error"}
    with pytest.raises(PluginError, match=f"adapter name 'fake_toy' {BOTH_SIDES}"):
        PluginManager(Settings()).adapter_spec("fake_toy")


def test_neither_of_two_adapters_for_one_model_type_wins(same_model_type: FakeSite) -> None:
    found = {record.distribution: record.status for record in same_model_type.records()}
    assert found == {"fake-good": "active", "fake-one": "error", "fake-two": "error"}
    with pytest.raises(PluginError, match=f"model type 'fake_x' {BOTH_SIDES}"):
        PluginManager(Settings()).resolve_model_type("fake_x")


@pytest.mark.parametrize("side", ["fake-one", "fake-two"])
def test_each_side_of_a_conflict_names_both(side: str, same_model_type: FakeSite) -> None:
    cause = same_model_type.record(side).cause
    assert cause is not None
    assert "fake-one 1.1" in cause
    assert "fake-two 2.2" in cause


def test_the_allow_list_ends_a_conflict_over_a_model_type(same_model_type: FakeSite) -> None:
    manager = PluginManager(Settings(plugins=("fake_b",)))
    assert manager.resolve_model_type("fake_x").name == "fake_b"


def test_an_unavailable_adapter_still_claims_its_model_type(fake_site: FakeSite) -> None:
    source = plugin_source("fake_poor", "fake_x", requires=("fake_nowhere",))
    fake_site.add("fake-poor", source)
    fake_site.add("fake-rich", plugin_source("fake_rich", "fake_x"))
    assert [record.status for record in fake_site.records()] == ["error", "error"]


def test_two_distributions_with_the_same_module_are_in_conflict(fake_site: FakeSite) -> None:
    source = plugin_source("fake_toy")
    fake_site.add("fake-one", source, module="fake_shared")
    fake_site.add("fake-two", source, module="fake_shared")
    assert [record.status for record in fake_site.records()] == ["error", "error"]


def test_a_plugin_in_conflict_with_itself_blames_its_author(fake_site: FakeSite) -> None:
    source = plugin_source("fake_toy").replace("]", ", AdapterSpec('fake_toy', ('z',), 'm:C')]")
    fake_site.add("fake-self", source)
    causes = {record.cause for record in fake_site.records()}
    assert causes == {
        "adapter name 'fake_toy' is claimed twice by fake-self 1.0 (entry point 'plugin'): "
        "only its author can mend that"
    }


def test_a_model_type_named_twice_by_one_adapter_is_no_conflict(fake_site: FakeSite) -> None:
    fake_site.add("fake-stutter", plugin_source("fake_toy", "fake_x", "fake_x"))
    assert fake_site.record("fake-stutter").status == "active"


def test_strict_mode_stops_at_a_conflict(same_name: FakeSite) -> None:
    with pytest.raises(StrictPluginFailure, match=r"fake-one 1\.1.*fake-two 2\.2"):
        same_name.records(Settings(strict_plugins=True))
