"""What `looped-spec adapters` shows, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from fake_plugins import FakeSite, plugin_source

from looped_spec.adapter import Capabilities, ExitCriterion


@pytest.fixture
def site(fake_site: FakeSite) -> FakeSite:
    """One plugin per status, and one that prints while it is imported."""
    capabilities = Capabilities(
        early_exit=(ExitCriterion("gate", 0.5),), shadow_depths=True, seed_free=True
    )
    source = plugin_source(
        "fake_toy", "fake_x", "fake_y", capabilities=capabilities, demo_package="fake_demo"
    )
    imports = "from looped_spec.adapter import Capabilities, ExitCriterion\nprint('hello')\n"
    fake_site.add("fake-good", imports + source, version="1.2")
    fake_site.add("fake-broken", "raise SystemExit('no\\nway')", entry_point="fake_bird")
    fake_site.add("fake-poor", plugin_source("fake_poor", requires=("fake_nowhere",)))
    fake_site.add("fake-new", plugin_source("fake_new", api_version=99))
    return fake_site


def run_json(site: FakeSite, **environment: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the whole document, its plugins by name, and what was said on stderr."""
    done = site.run("-m", "looped_spec", "adapters", "--json", environment=environment)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    return document, {plugin["name"]: plugin for plugin in document["plugins"]}, done.stderr


def test_json_has_every_field_of_a_good_plugin(site: FakeSite) -> None:
    _, plugins, _ = run_json(site)
    assert plugins["fake_toy"] == {
        "name": "fake_toy",
        "entry_point": "plugin",
        "status": "active",
        "model_types": ["fake_x", "fake_y"],
        "accepts": None,
        "capabilities": {
            "early_exit": [dataclasses.asdict(ExitCriterion("gate", 0.5))],
            "resumable": True,
            "shadow_depths": True,
            "seed_free": True,
            "non_kv_state": None,
        },
        "demo": "demo:fake_toy",
        "distribution": "fake-good",
        "version": "1.2",
        "cause": None,
    }


def test_json_shows_status_and_cause_of_the_others(site: FakeSite) -> None:
    _, plugins, _ = run_json(site)
    assert plugins["fake_bird"]["status"] == "error"
    assert plugins["fake_bird"]["cause"] == "SystemExit: no way"
    assert plugins["fake_bird"]["capabilities"] is None
    assert plugins["fake_poor"]["status"] == "unavailable"
    assert plugins["fake_new"]["status"] == "incompatible"


def test_json_shows_the_switches(site: FakeSite) -> None:
    document, _, _ = run_json(site)
    assert document["settings"] == {
        "LOOPED_SPEC_PLUGINS": None,
        "LOOPED_SPEC_STRICT_PLUGINS": False,
    }
    document, plugins, _ = run_json(site, LOOPED_SPEC_PLUGINS="fake_toy")
    assert document["settings"]["LOOPED_SPEC_PLUGINS"] == ["fake_toy"]
    assert plugins["fake_poor"]["status"] == "disabled"


def test_an_unknown_name_in_the_allow_list_is_a_warning(site: FakeSite) -> None:
    document, _, stderr = run_json(site, LOOPED_SPEC_PLUGINS="fake_toi")
    (warning,) = document["warnings"]
    assert "'fake_toi'" in warning
    assert "(did you mean 'fake_toy'?)" in warning
    assert f"looped-spec: warning: {warning}\n" in stderr


def test_what_a_plugin_prints_stays_out_of_the_output(site: FakeSite) -> None:
    _, _, stderr = run_json(site)
    assert "hello\n" in stderr


def test_the_table_has_one_row_per_plugin_with_the_same_content(site: FakeSite) -> None:
    done = site.run("-m", "looped_spec", "adapters")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert rows["NAME"].split() == (
        ["NAME", "STATUS", "MODEL", "TYPES", "CAPABILITIES", "DEMO", "DISTRIBUTION", "CAUSE"]
    )
    assert rows["fake_toy"].split() == [
        *(
            "fake_toy",
            "active",
            "fake_x,fake_y",
            "early_exit=gate,resumable,shadow_depths,seed_free",
        ),
        *("demo:fake_toy", "fake-good", "1.2", "-"),
    ]
    assert rows["fake_bird"].endswith("SystemExit: no way")
    assert "unavailable" in rows["fake_poor"]
    assert "missing module fake_nowhere" in rows["fake_poor"]
    assert rows["fake_toy"].index("fake-good") == rows["fake_poor"].index("fake-poor")


def test_types_of_which_an_adapter_takes_only_its_own_models_are_marked(
    fake_site: FakeSite,
) -> None:
    fake_site.add("fake-good", plugin_source("fake_toy", "fake_x", accepts="fake_toy:is_mine"))
    _, plugins, _ = run_json(fake_site)
    assert plugins["fake_toy"]["accepts"] == "fake_toy:is_mine"
    assert "fake_x (some)" in fake_site.run("-m", "looped_spec", "adapters").stdout


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({}, ("LOOPED_SPEC_PLUGINS: unset", "LOOPED_SPEC_STRICT_PLUGINS: 0")),
        ({"LOOPED_SPEC_PLUGINS": ""}, ("LOOPED_SPEC_PLUGINS: empty",)),
        (
            {"LOOPED_SPEC_PLUGINS": "fake_other", "LOOPED_SPEC_STRICT_PLUGINS": "1"},
            ("LOOPED_SPEC_PLUGINS: fake_other\n", "LOOPED_SPEC_STRICT_PLUGINS: 1\n"),
        ),
    ],
)
def test_the_table_shows_the_switches(
    environment: dict[str, str], lines: tuple[str, ...], fake_site: FakeSite
) -> None:
    fake_site.add("fake-good", plugin_source("fake_toy"))
    done = fake_site.run("-m", "looped_spec", "adapters", environment=environment)
    for line in lines:
        assert line in done.stdout


def test_strict_mode_shows_the_trace_of_the_broken_plugin(site: FakeSite) -> None:
    environment = {"LOOPED_SPEC_STRICT_PLUGINS": "1"}
    done = site.run("-m", "looped_spec", "adapters", environment=environment)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "fake_broken.py" in done.stderr
    assert "StrictPluginFailure: fake-broken 1.0" in done.stderr


def test_a_wrong_switch_is_one_line(fake_site: FakeSite) -> None:
    environment = {"LOOPED_SPEC_STRICT_PLUGINS": "maybe"}
    done = fake_site.run("-m", "looped_spec", "adapters", environment=environment)
    assert done.returncode == 2
    assert done.stderr == (
        "looped-spec: error: LOOPED_SPEC_STRICT_PLUGINS must be 0 or 1, got 'maybe'\n"
    )


def test_a_broken_plugin_does_not_stop_help(site: FakeSite) -> None:
    done = site.run("-m", "looped_spec", "--help")
    assert (done.returncode, done.stderr) == (0, "")
