"""What the walk makes of good and broken plugins."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

import pytest
from fake_plugins import FakeSite, plugin_source

from looped_spec.adapter import API_VERSION
from looped_spec.plugin_walk import StrictPluginFailure
from looped_spec.settings import Settings
from looped_spec.version import __version__

STRICT = Settings(strict_plugins=True)

HOOK = "from looped_spec.hooks import hookimpl\n@hookimpl\n"

BROKEN = {
    "import error": ("import fake_nowhere", r"ModuleNotFoundError: .*'fake_nowhere'"),
    "syntax error": ("def", r"SyntaxError: "),
    "system exit": ("raise SystemExit(3)", r"SystemExit: 3"),
    "odd exception": (
        "class Odd(BaseException):\n    pass\nraise Odd('first line\\nsecond line')",
        r"Odd: first line second line",
    ),
    "exception that cannot be shown": (
        "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\nraise Mute",
        r"Mute: \(its message cannot be shown\)",
    ),
    "misspelt hook": (f"{HOOK}def looped_spec_adapter():\n    return []", "looped_spec_adapter'"),
    "wrong argument": (
        f"{HOOK}def looped_spec_adapters(configuration):\n    return []",
        r"fake_broken.*Argument.*configuration.*can not be found in the hookspec",
    ),
    "no hook": ("", "implements no hook"),
    "unmarked hook": ("def looped_spec_adapters():\n    return []", "implements no hook"),
    "raising hook": (f"{HOOK}def looped_spec_adapters():\n    1 / 0", "ZeroDivisionError"),
    "lazily raising hook": (
        f"{HOOK}def looped_spec_adapters():\n    yield 1 / 0",
        "ZeroDivisionError",
    ),
    "text": (f"{HOOK}def looped_spec_adapters():\n    return 'toy'", "list of .*got str"),
    "number": (f"{HOOK}def looped_spec_adapters():\n    return 7", "list of .*got int"),
    "dicts": (f"{HOOK}def looped_spec_adapters():\n    return [{{}}]", "list of .*got dict in it"),
    "none": (f"{HOOK}def looped_spec_adapters():\n    return None", "returned no AdapterSpec"),
    "empty": (f"{HOOK}def looped_spec_adapters():\n    return []", "returned no AdapterSpec"),
    "one bare record": (
        plugin_source("fake_bare").replace("[", "(").replace("]", ")"),
        "list of .*got AdapterSpec",
    ),
    "field of a later API": (plugin_source("fake_new", colour="red"), "TypeError.*colour"),
    "requires is text": (plugin_source("fake_text", requires="math"), "^requires of .*'math'"),
    "requires has a dot": (plugin_source("fake_dot", requires=("os.path",)), "^requires of .*path"),
    "model types are numbers": (plugin_source("fake_int", 7), "^model_types of "),
    "capabilities are text": (plugin_source("fake_c", capabilities="all"), "^capabilities of "),
    "bad adapter name": (plugin_source("Fake-Name"), "adapter name must match"),
}


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, fake_site: FakeSite) -> str:
    """A broken plugin with a good one on each side; the value is a pattern of its cause."""
    source, cause = BROKEN[request.param]
    fake_site.add("fake-a-good", plugin_source("fake_a"))
    fake_site.add("fake-broken", source)
    fake_site.add("fake-z-good", plugin_source("fake_z"))
    return cause


def test_a_good_plugin_is_active_and_described_in_full(fake_site: FakeSite) -> None:
    fake_site.add("fake-good", plugin_source("fake_toy", "x", "y"), version="1.2", entry_point="e")
    record = fake_site.record("fake-good")
    assert (record.status, record.cause) == ("active", None)
    assert (record.name, record.model_types) == ("fake_toy", ("x", "y"))
    assert (record.distribution, record.version, record.entry_point) == ("fake-good", "1.2", "e")


def test_one_plugin_may_declare_several_adapters(fake_site: FakeSite) -> None:
    source = plugin_source("fake_one").replace(
        "]", ", AdapterSpec('fake_two', ('t',), 'm:C', requires=('fake_nowhere',))]"
    )
    fake_site.add("fake-pair", source)
    found = {record.name: record.status for record in fake_site.records()}
    assert found == {"fake_one": "active", "fake_two": "unavailable"}


def test_an_instance_with_a_hook_method_is_a_plugin(fake_site: FakeSite) -> None:
    source = plugin_source("fake_toy").replace("()", "(self)", 1)
    lines = source.replace("@hookimpl", "class Plugin:\n  @hookimpl").replace("\ndef", "\n  def")
    fake_site.add("fake-instance", lines + "\nplugin = Plugin()\n", target=":plugin")
    assert fake_site.record("fake-instance").status == "active"


def test_a_class_as_entry_point_is_refused_with_the_reason(fake_site: FakeSite) -> None:
    fake_site.add("fake-class", "class Plugin: pass", target=":Plugin")
    record = fake_site.record("fake-class")
    assert record.status == "error"
    assert record.cause == "the entry point is the class Plugin, not an instance of it"


def test_a_broken_plugin_is_an_error_with_a_one_line_cause(
    broken: str, fake_site: FakeSite
) -> None:
    record = fake_site.record("fake-broken")
    assert record.status == "error"
    assert record.spec is None
    assert record.cause is not None
    assert "\n" not in record.cause
    assert re.search(broken, record.cause), record.cause


def test_a_broken_plugin_does_not_hide_its_neighbours(broken: str, fake_site: FakeSite) -> None:
    found = {record.distribution: record.status for record in fake_site.records()}
    assert found == {"fake-a-good": "active", "fake-broken": "error", "fake-z-good": "active"}


def test_strict_mode_stops_at_a_broken_plugin(broken: str, fake_site: FakeSite) -> None:
    with pytest.raises(StrictPluginFailure, match=r"fake-broken 1\.0") as caught:
        fake_site.records(STRICT)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("listed", ["fake_a", "fake_z"])
def test_strict_mode_passes_over_a_broken_plugin_that_is_not_listed(
    listed: str, broken: str, fake_site: FakeSite
) -> None:
    settings = Settings(plugins=(listed,), strict_plugins=True)
    found = {record.distribution: record.status for record in fake_site.records(settings)}
    other = "fake-z-good" if listed == "fake_a" else "fake-a-good"
    active = "fake-a-good" if listed == "fake_a" else "fake-z-good"
    assert found == {active: "active", "fake-broken": "error", other: "disabled"}


@pytest.mark.parametrize(
    "listed", [("plugin",), ("fake_a", "plugin"), ("fake_toy",), ("fake_a", "fake_toy")]
)
def test_strict_mode_stops_at_a_broken_plugin_that_is_or_may_be_listed(
    listed: tuple[str, ...], broken: str, fake_site: FakeSite
) -> None:
    with pytest.raises(StrictPluginFailure, match=r"fake-broken 1\.0"):
        fake_site.records(Settings(plugins=listed, strict_plugins=True))


def test_strict_mode_shows_the_trace_of_the_plugin_it_names(fake_site: FakeSite) -> None:
    for name in ("one", "two"):
        fake_site.add(f"fake-{name}", "raise OSError('no disk')", entry_point=f"fake_{name}")
    with pytest.raises(StrictPluginFailure, match=r"fake-two 1\.0") as caught:
        fake_site.records(Settings(plugins=("fake_two",), strict_plugins=True))
    assert caught.value.__cause__ is not None
    trace = "".join(traceback.format_exception(caught.value.__cause__))
    assert "fake_two.py" in trace and "fake_one.py" not in trace


def test_ctrl_c_during_the_walk_is_not_swallowed(fake_site: FakeSite) -> None:
    fake_site.add("fake-slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        fake_site.records()


def test_same_entry_point_name_in_two_distributions_shows_both(fake_site: FakeSite) -> None:
    fake_site.add("fake-one", plugin_source("fake_a"), entry_point="toy")
    fake_site.add("fake-two", plugin_source("fake_b"), entry_point="toy")
    found = [(r.distribution, r.entry_point, r.status) for r in fake_site.records()]
    assert found == [("fake-one", "toy", "active"), ("fake-two", "toy", "active")]


def test_a_distribution_hides_one_of_the_same_name_later_on_the_path(
    fake_site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_site.add("fake-twice", plugin_source("fake_old"), version="1.0")
    first = tmp_path / "first"
    first.mkdir()
    monkeypatch.syspath_prepend(first)
    FakeSite(first).add("fake-twice", plugin_source("fake_new"), version="2.0")
    record = fake_site.record("fake-twice")
    assert (record.name, record.version, record.status) == ("fake_new", "2.0", "active")


def test_a_distribution_without_plugins_hides_an_older_one_that_had_some(
    fake_site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_site.add("fake-twice", plugin_source("fake_old"), version="1.0")
    first = tmp_path / "first"
    first.mkdir()
    monkeypatch.syspath_prepend(first)
    FakeSite(first).add("fake-twice", "", version="2.0")
    (first / "fake_twice-2.0.dist-info" / "entry_points.txt").unlink()
    assert fake_site.records() == []


def test_too_new_api_version_is_incompatible(fake_site: FakeSite) -> None:
    fake_site.add("fake-new", plugin_source("fake_new", api_version=API_VERSION + 1))
    record = fake_site.record("fake-new", STRICT)
    assert record.status == "incompatible"
    assert record.cause == (
        f"needs adapter API {API_VERSION + 1}, looped-spec {__version__} has {API_VERSION}: "
        "upgrade looped-spec"
    )


def test_present_api_version_is_compatible(fake_site: FakeSite) -> None:
    fake_site.add("fake-now", plugin_source("fake_now", api_version=API_VERSION))
    assert fake_site.record("fake-now").status == "active"


@pytest.mark.parametrize("name", ["looped-spec", "Looped_Spec"])
def test_unmet_version_range_is_read_before_the_plugin_is_imported(
    name: str, fake_site: FakeSite
) -> None:
    source = "raise RuntimeError('imported')"
    module = fake_site.add("fake-range", source, requires=["numpy", f"{name} <90.4,>=90.3"])
    record = fake_site.record("fake-range", STRICT)
    assert record.status == "incompatible"
    assert record.cause == f"needs looped-spec >=90.3,<90.4, have {__version__}"
    assert module not in sys.modules


@pytest.mark.parametrize(
    "requirement",
    [
        f"looped-spec <={__version__}",
        "looped-spec",
        "looped-spec >=90 ; extra == 'later'",
        "looped-spec >=90 ; python_version < '3'",
        "looped-spec-other >=90",
    ],
)
def test_met_or_foreign_version_range_is_compatible(requirement: str, fake_site: FakeSite) -> None:
    fake_site.add("fake-range", plugin_source("fake_toy"), requires=[requirement])
    assert fake_site.record("fake-range").status == "active"


def test_missing_module_makes_an_adapter_unavailable_and_shows_the_hint(
    fake_site: FakeSite,
) -> None:
    hint = "pip install 'looped-spec[toy]'"
    source = plugin_source("fake_toy", requires=("json", "fake_nowhere"), install_hint=hint)
    fake_site.add("fake-poor", source)
    record = fake_site.record("fake-poor", STRICT)
    assert (record.status, record.cause) == ("unavailable", f"missing module fake_nowhere: {hint}")


def test_required_modules_and_the_factory_are_not_imported(fake_site: FakeSite) -> None:
    for module in ("fake_needed", "fake_toy_factory"):
        fake_site.write(module, "raise RuntimeError('imported')")
    fake_site.add("fake-lazy", plugin_source("fake_toy", requires=("fake_needed",)))
    assert fake_site.record("fake-lazy").status == "active"
    assert not {"fake_needed", "fake_toy_factory"} & set(sys.modules)


def test_the_walk_leaves_torch_out(fake_site: FakeSite) -> None:
    fake_site.add("fake-good", plugin_source("fake_toy", requires=("torch",)))
    done = fake_site.run(
        "-c",
        "import sys; from looped_spec.plugins import PluginManager\n"
        "print([r.status for r in PluginManager().records() if r.name == 'fake_toy'])\n"
        "print('torch' in sys.modules)",
    )
    assert done.stdout.split("\n")[:2] == ["['active']", "False"], done.stderr


def test_metadata_without_a_name_is_an_error_that_names_the_folder(fake_site: FakeSite) -> None:
    fake_site.add("fake-good", plugin_source("fake_toy"))
    fake_site.add("fake-nameless", plugin_source("fake_other"), metadata="Version: 1.0\n")
    found = {record.distribution: record.status for record in fake_site.records()}
    assert found == {"fake-good": "active", f"a distribution in {fake_site.folder}": "error"}


def test_unreadable_entry_points_are_an_error(fake_site: FakeSite) -> None:
    fake_site.add("fake-good", plugin_source("fake_toy"))
    fake_site.add("fake-scrawl", "", entry_point="]\n[looped_spec]\nno value here\nx")
    found = {record.distribution: record.status for record in fake_site.records()}
    assert found == {"fake-good": "active", "fake-scrawl": "error"}
