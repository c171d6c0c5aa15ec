"""Asking for an adapter by name or model type, and the switches that limit the choice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_plugins import FakeSite, plugin_source

from looped_spec.errors import ConfigError, PluginError
from looped_spec.plugins import PluginManager
from looped_spec.settings import VARIABLES, Settings


@pytest.fixture
def three(fake_site: FakeSite) -> FakeSite:
    """Two good plugins and a broken one."""
    fake_site.add("fake-cat", plugin_source("fake_cat", "fake_cat_model"))
    fake_site.add("fake-dog", plugin_source("fake_dog"))
    fake_site.add("fake-broken", "raise OSError('no disk')", entry_point="fake_bird")
    return fake_site


def statuses(site: FakeSite, settings: Settings) -> dict[str, str]:
    return {record.name: record.status for record in site.records(settings)}


def test_an_active_adapter_is_found_by_name_and_by_model_type(three: FakeSite) -> None:
    manager = PluginManager(Settings())
    assert manager.adapter_spec("fake_cat").model_types == ("fake_cat_model",)
    assert manager.resolve_model_type("fake_cat_model").name == "fake_cat"


def test_asking_for_a_broken_plugin_shows_the_recorded_cause(three: FakeSite) -> None:
    with pytest.raises(PluginError, match=r"fake-broken 1\.0.* is error: OSError: no disk"):
        PluginManager(Settings()).adapter_spec("fake_bird")


def test_asking_for_an_unknown_adapter_names_the_closest_and_all(three: FakeSite) -> None:
    with pytest.raises(PluginError) as caught:
        PluginManager(Settings()).adapter_spec("fake_cart")
    text = str(caught.value)
    assert text.startswith("unknown adapter 'fake_cart' (did you mean 'fake_cat'?)")
    assert "fake_dog (fake_dog_model)" in text


def test_an_unsupported_model_type_lists_adapters_and_broken_plugins(three: FakeSite) -> None:
    with pytest.raises(PluginError) as caught:
        PluginManager(Settings()).resolve_model_type("fake_cat_modle")
    text = str(caught.value)
    assert "no adapter takes model type 'fake_cat_modle' (did you mean 'fake_cat_model'?)" in text
    assert "fake_dog (fake_dog_model)" in text
    assert "fake_bird (error: OSError: no disk)" in text
    assert "install a plugin that declares it" in text


def test_a_model_type_of_an_unavailable_adapter_names_the_extra(fake_site: FakeSite) -> None:
    hint = "pip install 'looped-spec[toy]'"
    source = plugin_source("fake_toy", requires=("fake_nowhere",), install_hint=hint)
    fake_site.add("fake-poor", source)
    with pytest.raises(PluginError, match=r"missing module fake_nowhere: pip install 'looped-spec"):
        PluginManager(Settings()).resolve_model_type("fake_toy_model")


def test_the_walk_happens_once_per_manager(three: FakeSite) -> None:
    manager = PluginManager(Settings())
    before = manager.records()
    three.add("fake-late", plugin_source("fake_late"))
    assert manager.records() == before
    assert "fake_late" in {record.name for record in PluginManager(Settings()).records()}


def test_a_caller_cannot_change_the_records_of_a_manager(three: FakeSite) -> None:
    manager = PluginManager(Settings())
    manager.records().clear()
    assert manager.records()


def test_without_an_allow_list_all_adapters_are_active(three: FakeSite) -> None:
    found = statuses(three, Settings.from_environment({}))
    assert found == {"fake_bird": "error", "fake_cat": "active", "fake_dog": "active"}


def test_an_allow_list_disables_all_other_adapters(three: FakeSite) -> None:
    settings = Settings.from_environment({"LOOPED_SPEC_PLUGINS": " fake_dog , "})
    assert statuses(three, settings)["fake_cat"] == "disabled"
    assert statuses(three, settings)["fake_dog"] == "active"
    with pytest.raises(PluginError, match="is disabled: not in LOOPED_SPEC_PLUGINS=fake_dog"):
        PluginManager(settings).resolve_model_type("fake_cat_model")


def test_a_plugin_outside_the_allow_list_is_imported_to_learn_its_name(three: FakeSite) -> None:
    statuses(three, Settings(plugins=("fake_dog",)))
    assert "fake_cat" in sys.modules


@pytest.mark.parametrize("text", ["", " ", ","])
def test_an_empty_allow_list_disables_all_without_importing_any(text: str, three: FakeSite) -> None:
    settings = Settings.from_environment({"LOOPED_SPEC_PLUGINS": text})
    assert set(statuses(three, settings).values()) == {"disabled"}
    assert not {"fake_cat", "fake_dog", "fake_broken"} & set(sys.modules)


def test_an_unknown_name_in_the_allow_list_is_reported_with_the_closest(three: FakeSite) -> None:
    manager = PluginManager(Settings(plugins=("fake_cat", "fake_dig", "fake_bird")))
    assert manager.warnings() == [
        "LOOPED_SPEC_PLUGINS names 'fake_dig', which no installed plugin declares "
        "(did you mean 'fake_dog'?)"
    ]


def test_without_an_allow_list_there_is_nothing_to_report(three: FakeSite) -> None:
    assert PluginManager(Settings()).warnings() == []


def test_a_manager_without_settings_reads_the_environment(
    three: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPED_SPEC_PLUGINS", "fake_cat")
    assert PluginManager().settings.plugins == ("fake_cat",)


@pytest.mark.parametrize(("text", "strict"), [("1", True), ("0", False), ("", False)])
def test_strict_mode_is_one_or_zero(text: str, strict: bool) -> None:
    environment = {"LOOPED_SPEC_STRICT_PLUGINS": text}
    assert Settings.from_environment(environment).strict_plugins is strict


def test_another_value_for_strict_mode_is_an_error() -> None:
    with pytest.raises(ConfigError, match="LOOPED_SPEC_STRICT_PLUGINS must be 0 or 1, got 'yes'"):
        Settings.from_environment({"LOOPED_SPEC_STRICT_PLUGINS": "yes"})


def test_every_variable_that_is_read_is_in_the_table() -> None:
    class Recorder(dict[str, str]):
        read: set[str] = set()  # noqa: RUF012

        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            self.read.add(key)
            return default

    recorder = Recorder()
    Settings.from_environment(recorder)
    assert recorder.read == set(VARIABLES)


def test_no_other_module_reads_the_environment() -> None:
    import looped_spec

    package = Path(looped_spec.__file__).parent
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("os.environ", "getenv"))
    }
    assert readers == {"settings.py"}
