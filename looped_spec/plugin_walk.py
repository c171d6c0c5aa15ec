"""The walk over the installed plugins, which records each and never stops at a broken one.

A plugin is an entry point in the group `looped_spec`. pluggy's own loader is not used, as it stops
at the first entry point that fails and skips the second of two with the same name. Each plugin gets
a pluggy manager of its own, so that a failed registration is dropped whole and no hook call sees
another plugin's implementation.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata

import pluggy
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from looped_spec import hooks
from looped_spec.adapter import API_VERSION, AdapterSpec, Capabilities, ExitCriterion
from looped_spec.errors import PluginError
from looped_spec.plugin_record import PluginRecord, mark_conflicts, one_line
from looped_spec.settings import PLUGINS, STRICT_PLUGINS, Settings
from looped_spec.version import __version__

CORE_DISTRIBUTION = "looped-spec"


class StrictPluginFailure(Exception):
    """A plugin failed in strict mode; not a `LoopedSpecError`, so that the trace is shown."""


def walk(settings: Settings) -> list[PluginRecord]:
    """Return the records of all installed plugins, ordered by name and distribution."""
    records: list[PluginRecord] = []
    failures: list[tuple[PluginRecord, BaseException]] = []
    for distribution in _plugin_distributions():
        blank = PluginRecord("?", f"a distribution in {distribution.locate_file('')}", "?", "error")
        try:
            name, version = _identity(distribution)
            blank = replace(blank, distribution=name, version=version)
            entries = [e for e in distribution.entry_points if e.group == hooks.PROJECT]
        except BaseException as error:
            failures.append((_failed(blank, error), error))
            continue
        for entry in entries:
            blank = replace(blank, entry_point=entry.name)
            try:
                records += _visit(entry, blank, distribution.requires or (), settings)
            except BaseException as error:
                failures.append((_failed(blank, error), error))
    records += [record for record, _ in failures]
    records = mark_conflicts(
        sorted(records, key=lambda record: (record.name, record.distribution, record.entry_point))
    )
    if settings.strict_plugins:
        _stop_at_broken(records, failures, settings.plugins)
    return records


def _failed(blank: PluginRecord, error: BaseException) -> PluginRecord:
    """Record whatever a plugin raised, SystemExit included; only the user's own Ctrl-C passes."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    return replace(blank, status="error", cause=one_line(error))


def _stop_at_broken(
    records: Sequence[PluginRecord],
    failures: Sequence[tuple[PluginRecord, BaseException]],
    listed: Sequence[str] | None,
) -> None:
    """Raise for the first broken plugin of the allow-list, or of all where there is none.

    What a plugin would have declared that failed before it did is not known. So a listed name that
    is found nowhere may be that of any broken plugin.
    """
    found = {record.name for record in records}
    is_any = listed is None or not found.issuperset(listed)
    for record in records:
        if record.status == "error" and (is_any or record.name in (listed or ())):
            cause = next((error for failed, error in failures if failed is record), None)
            raise StrictPluginFailure(
                f"{record.source}: {record.cause} (stopped because of {STRICT_PLUGINS}=1)"
            ) from cause


def _plugin_distributions() -> Iterator[metadata.Distribution]:
    """Yield distributions that have plugins, each name once: the first on sys.path hides others."""
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            if not _has_plugins(distribution):
                continue
            name = canonicalize_name(distribution.name)
            first = next(iter(metadata.distributions(name=name)), distribution)
            if name in seen or not _has_plugins(first):
                continue
            seen.add(name)
        except Exception:
            first = distribution  # The walk will meet the same failure, and record it.
        yield first


def _has_plugins(distribution: metadata.Distribution) -> bool:
    return f"[{hooks.PROJECT}]" in (distribution.read_text("entry_points.txt") or "")


def _identity(distribution: metadata.Distribution) -> tuple[str, str]:
    """Read name and version, each of which is None where damaged metadata lacks it."""
    name, version = distribution.name, distribution.version
    if not name or not version:
        raise PluginError("its metadata lacks a name or a version: reinstall it")
    return name, version


def _visit(
    entry: metadata.EntryPoint, blank: PluginRecord, requires: Iterable[str], settings: Settings
) -> list[PluginRecord]:
    """Import one plugin, unless it is known beforehand to be unusable, and ask for its adapters."""
    if settings.plugins == ():
        return [replace(blank, status="disabled", cause=f"{PLUGINS} is empty")]
    if problem := _version_problem(requires):
        return [replace(blank, status="incompatible", cause=problem)]
    plugin = entry.load()
    specs = _declared(plugin)
    for spec in specs:
        _check_spec(spec)
    return [_judged(replace(blank, spec=spec), spec, settings) for spec in specs]


def _version_problem(requires: Iterable[str]) -> str | None:
    """Say which versions of looped-spec a distribution needs if this is none of them."""
    wanted = SpecifierSet()
    for requirement in map(Requirement, requires):
        if canonicalize_name(requirement.name) != CORE_DISTRIBUTION:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            wanted &= requirement.specifier
    if wanted.contains(__version__, prereleases=True):
        return None
    bounds = sorted(map(str, wanted), key=lambda bound: (bound.startswith("<"), bound))
    return f"needs {CORE_DISTRIBUTION} {','.join(bounds)}, have {__version__}"


def _declared(plugin: object) -> list[AdapterSpec]:
    """Return what the plugin's hooks declare; raise for anything but adapter records."""
    if inspect.isclass(plugin):
        raise PluginError(f"the entry point is the class {plugin.__name__}, not an instance of it")
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(plugin)
    manager.check_pending()  # A misspelt hook name registers without a word; this reports it.
    if not manager.get_hookcallers(plugin):
        raise PluginError(
            "it implements no hook: mark looped_spec_adapters with @looped_spec.hookimpl"
        )
    specs: list[AdapterSpec] = []
    for returned in manager.hook.looped_spec_adapters():
        if not isinstance(returned, Iterable):
            raise PluginError(
                "looped_spec_adapters must return a list of AdapterSpec, "
                f"got {type(returned).__name__}"
            )
        specs += returned
    for spec in specs:
        if not isinstance(spec, AdapterSpec):
            raise PluginError(
                "looped_spec_adapters must return a list of AdapterSpec, "
                f"got {type(spec).__name__} in it"
            )
    if not specs:
        raise PluginError("looped_spec_adapters returned no AdapterSpec")
    return specs


def _check_spec(spec: AdapterSpec) -> None:
    """Raise for a field of the wrong type, before something far away stumbles over it."""
    good = {
        "model_types": _is_names(spec.model_types),
        "requires": _is_names(spec.requires) and not any("." in name for name in spec.requires),
        "api_version": isinstance(spec.api_version, int) and spec.api_version >= 1,
        "capabilities": isinstance(spec.capabilities, Capabilities)
        and all(isinstance(item, ExitCriterion) for item in spec.capabilities.early_exit),
        "install_hint": isinstance(spec.install_hint, str | None),
        "preset_package": isinstance(spec.preset_package, str | None),
        "demo_package": isinstance(spec.demo_package, str | None),
        "accepts": isinstance(spec.accepts, str | None),
    }
    for field, is_good in good.items():
        if not is_good:
            raise PluginError(
                f"{field} of adapter '{spec.name}' is not what AdapterSpec documents: "
                f"{getattr(spec, field)!r}"
            )


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)


def _judged(record: PluginRecord, spec: AdapterSpec, settings: Settings) -> PluginRecord:
    """Decide whether a well-formed adapter can be used here."""
    if settings.plugins is not None and spec.name not in settings.plugins:
        cause = f"not in {PLUGINS}={','.join(settings.plugins)}"
        return replace(record, status="disabled", cause=cause)
    if spec.api_version > API_VERSION:
        cause = (
            f"needs adapter API {spec.api_version}, {CORE_DISTRIBUTION} {__version__} has "
            f"{API_VERSION}: upgrade {CORE_DISTRIBUTION}"
        )
        return replace(record, status="incompatible", cause=cause)
    missing = [name for name in spec.requires if not _is_importable(name)]
    if missing:
        cause = f"missing module {', '.join(missing)}: {spec.install_hint or 'install it'}"
        return replace(record, status="unavailable", cause=cause)
    return replace(record, status="active")


def _is_importable(module: str) -> bool:
    """Tell whether a top-level module can be found, without importing it."""
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
