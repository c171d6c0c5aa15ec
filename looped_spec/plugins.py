"""Finds an adapter by name or model type among the installed plugins, or says why there is none."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.errors import PluginError, closest
from looped_spec.hooks import PROJECT
from looped_spec.plugin_record import PluginRecord, conflict_text, one_line
from looped_spec.plugin_walk import walk
from looped_spec.settings import PLUGINS, Settings

__all__ = ["PluginManager", "PluginRecord", "load_adapter_class", "package_folder"]

SEE_ALL = "`looped-spec adapters` shows all"


class PluginManager:
    """The plugins of this environment; walks over them at the first question and keeps the answer.

    Plugin modules are imported by the walk, adapter classes and torch are not.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = Settings.from_environment() if settings is None else settings
        self._records: list[PluginRecord] | None = None

    def records(self) -> list[PluginRecord]:
        """Return one record per adapter, and one per plugin that declares none, ordered by name."""
        if self._records is None:
            self._records = walk(self.settings)
        return list(self._records)

    def warnings(self) -> list[str]:
        """Name, a line each, the entries of the allow-list that no installed plugin answers to."""
        known = [record.name for record in self.records()]
        return [
            f"{PLUGINS} names '{name}', which no installed plugin declares{closest(name, known)}"
            for name in self.settings.plugins or ()
            if name not in known
        ]

    def adapter_spec(self, name: str) -> AdapterSpec:
        """Return the active adapter called `name`; raise `PluginError` with the cause if none."""
        records = self.records()
        for record in records:
            if record.status == "active" and record.spec and record.name == name:
                return record.spec
        for record in records:
            if name in (record.name, record.entry_point):
                raise PluginError(_refusal(record))
        known = [record.name for record in records]
        raise PluginError(f"unknown adapter '{name}'{closest(name, known)}; {self._overview()}")

    def resolve_model_type(
        self, model_type: str, config: Mapping[str, Any] | None = None
    ) -> AdapterSpec:
        """Return the active adapter that takes the `model_type` of a config.json.

        An adapter that accepts this very `config` (see `AdapterSpec.accepts`) goes before one that
        takes all models of the type; of two that do, neither wins.
        """
        claimants = [record for record in self.records() if model_type in record.model_types]
        takers = _takers(claimants, model_type, config or {"model_type": model_type})
        for record in takers:
            if record.status == "active" and record.spec:
                return record.spec
        if takers:
            raise PluginError(f"model type '{model_type}': {_refusal(takers[0])}")
        if claimants:
            others = ", ".join(record.name for record in claimants)
            raise PluginError(
                f"no adapter takes this model of type '{model_type}' ({others} takes others of "
                f"it); {self._overview()}"
            )
        known = [known for record in self.records() for known in record.model_types]
        raise PluginError(
            f"no adapter takes model type '{model_type}'{closest(model_type, known)}; "
            f"{self._overview()}; to support it, install a plugin that declares it "
            f"(entry-point group '{PROJECT}')"
        )

    def demo_names(self) -> list[str]:
        """Return the names of the active adapters that bundle a demo checkpoint (`demo:<name>`)."""
        return [
            record.name
            for record in self.records()
            if record.status == "active" and record.spec and record.spec.demo_package
        ]

    def demo_path(self, name: str) -> Path:
        """Return the folder of the demo checkpoint that adapter `name` bundles."""
        names = self.demo_names()
        if name not in names:
            blocked = [
                record
                for record in self.records()
                if record.status != "active" and name in (record.name, record.entry_point)
            ]
            if blocked:
                raise PluginError(f"demo '{name}': {_refusal(blocked[0])}")
            raise PluginError(
                f"unknown demo '{name}'{closest(name, names)}; "
                f"demos: {', '.join(names) or f'none; {SEE_ALL}'}"
            )
        package = self.adapter_spec(name).demo_package or ""
        folders = _package_folders(package)
        for folder in folders:
            if (folder / "config.json").is_file():
                return folder
        looked = ", ".join(map(str, folders)) or f"package {package}, which is not there"
        raise PluginError(
            f"demo '{name}' has no config.json in {looked}: reinstall the plugin that brings it"
        )

    def _overview(self) -> str:
        """List the adapters that can be used, and the plugins that would have to be mended."""
        active: list[str] = []
        blocked: list[str] = []
        for record in self.records():
            if record.status == "active":
                active.append(f"{record.name} ({', '.join(record.model_types)})")
            else:
                blocked.append(f"{record.name} ({record.status}: {record.cause})")
        text = f"adapters: {', '.join(active) or 'none'}"
        return f"{text}; not usable: {', '.join(blocked)}" if blocked else text


def load_adapter_class(spec: AdapterSpec) -> type[ModelAdapter]:
    """Import the class that `spec.factory` names (and torch with it), and check it."""
    module_name, _, class_name = spec.factory.partition(":")
    blame = f"adapter '{spec.name}' (factory '{spec.factory}')"
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"{blame} cannot be imported: {one_line(error)}") from error
    loaded = getattr(module, class_name, None)
    if loaded is None:
        hint = closest(class_name, vars(module))
        raise PluginError(f"{blame}: module {module_name} has no '{class_name}'{hint}")
    if not inspect.isclass(loaded) or not issubclass(loaded, ModelAdapter):
        raise PluginError(f"{blame}: {class_name} is not a subclass of looped_spec.ModelAdapter")
    if missing := sorted(loaded.__abstractmethods__):
        raise PluginError(f"{blame}: {class_name} does not implement {', '.join(missing)}")
    return loaded


def package_folder(package: str, name: str) -> Path | None:
    """Return the folder `name` within a package, which is not imported; None if there is none."""
    for folder in _package_folders(package):
        if (folder / name).is_dir():
            return folder / name
    return None


def _takers(
    claimants: list[PluginRecord], model_type: str, config: Mapping[str, Any]
) -> list[PluginRecord]:
    """Return which of the adapters of a model type take one model, the particular before all."""
    general = [record for record in claimants if record.spec and record.spec.accepts is None]
    particular = [record for record in claimants if record not in general]
    accepting = [r for r in particular if r.status != "disabled" and _accepts(r, config)]
    if len(accepting) > 1:
        raise PluginError(conflict_text(f"this model of type '{model_type}'", accepting))
    return accepting or general or [r for r in particular if r.status == "disabled"]


def _accepts(record: PluginRecord, config: Mapping[str, Any]) -> bool:
    """Ask an adapter whether a model is of its family; raise `PluginError` if it fails to say."""
    assert record.spec is not None and record.spec.accepts is not None
    module_name, _, function = record.spec.accepts.partition(":")
    try:
        return bool(getattr(importlib.import_module(module_name), function)(config))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(
            f"adapter '{record.name}' of {record.source} cannot say whether it takes this model "
            f"('{record.spec.accepts}': {one_line(error)}): mend it, or set {PLUGINS} without it"
        ) from error


def _refusal(record: PluginRecord) -> str:
    """Say why the adapter of an inactive record cannot be had."""
    return f"adapter '{record.name}' of {record.source} is {record.status}: {record.cause}"


def _package_folders(package: str) -> list[Path]:
    """Find the folders of a package, of which only the parents are imported."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (found and found.submodule_search_locations) or ()]
