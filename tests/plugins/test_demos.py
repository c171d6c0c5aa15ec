"""Finding the demo checkpoints that plugins bundle."""

from __future__ import annotations

import sys

import pytest
from fake_plugins import FakeSite, plugin_source

from looped_spec.errors import PluginError
from looped_spec.plugins import PluginManager
from looped_spec.settings import Settings


@pytest.fixture
def demos(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """One adapter with a demo, one without, two whose demo is amiss, one unavailable."""
    monkeypatch.delenv("LOOPED_SPEC_PLUGINS", raising=False)
    monkeypatch.delenv("LOOPED_SPEC_STRICT_PLUGINS", raising=False)
    for folder, init in (
        ("fake_family", ""),
        ("fake_family/demo", "raise RuntimeError('imported')"),
        ("fake_empty", "raise RuntimeError('imported')"),
    ):
        (fake_site.folder / folder).mkdir()
        (fake_site.folder / folder / "__init__.py").write_text(init)
    (fake_site.folder / "fake_family/demo/config.json").write_text("{}")
    fields = {"demo_package": "fake_family.demo"}
    fake_site.add("fake-full", plugin_source("fake_full", **fields))
    fake_site.add("fake-bare", plugin_source("fake_bare"))
    fake_site.add("fake-hollow", plugin_source("fake_hollow", demo_package="fake_empty"))
    fake_site.add("fake-lost", plugin_source("fake_lost", demo_package="fake_no.demo"))
    fake_site.add("fake-poor", plugin_source("fake_poor", requires=("fake_nowhere",), **fields))
    return fake_site


def test_the_folder_is_found_without_importing_the_demo_package(demos: FakeSite) -> None:
    folder = PluginManager(Settings()).demo_path("fake_full")
    assert folder == demos.folder / "fake_family" / "demo"
    assert "fake_family.demo" not in sys.modules


def test_only_active_adapters_with_a_demo_are_listed(demos: FakeSite) -> None:
    names = [n for n in PluginManager(Settings()).demo_names() if n.startswith("fake_")]
    assert names == ["fake_full", "fake_hollow", "fake_lost"]


def test_an_unknown_demo_names_the_closest_and_the_known(demos: FakeSite) -> None:
    cause = r"unknown demo 'fake_ful' \(did you mean 'fake_full'\?\); demos: .*fake_full, fake_hol"
    with pytest.raises(PluginError, match=cause):
        PluginManager(Settings()).demo_path("fake_ful")


def test_an_adapter_without_a_demo_has_none(demos: FakeSite) -> None:
    with pytest.raises(PluginError, match="unknown demo 'fake_bare'"):
        PluginManager(Settings()).demo_path("fake_bare")


@pytest.mark.parametrize(
    ("name", "place"), [("fake_hollow", "fake_empty"), ("fake_lost", "fake_no")]
)
def test_a_demo_without_config_json_says_where_it_was_looked_for(
    name: str, place: str, demos: FakeSite
) -> None:
    with pytest.raises(PluginError, match=f"demo '{name}' has no config.json in .*{place}"):
        PluginManager(Settings()).demo_path(name)


def test_the_demo_of_an_unavailable_adapter_shows_the_cause(demos: FakeSite) -> None:
    with pytest.raises(PluginError, match="is unavailable: missing module fake_nowhere"):
        PluginManager(Settings()).demo_path("fake_poor")
