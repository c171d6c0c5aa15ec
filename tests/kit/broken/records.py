"""Faults in the record, and in the plugin that declares it."""

from __future__ import annotations

from torch import Tensor

from broken.case import BrokenToy
from looped_spec.adapter import API_VERSION, AdapterSpec, LoopState, StageContext

TOY = "looped_spec.testing.toy:ToyAdapter"
BAD_PRESETS = "fake_bad_presets"
"""A package that the tests install, whose preset is no JSON."""


class HalfWritten(BrokenToy):
    """A method of the skeleton is still to be written."""

    caught_by = ("test_every_required_method_is_written",)

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Return logits."""
        raise NotImplementedError("return logits [B, T', vocab_size]")


class MoreThanTheRecord(BrokenToy):
    """The record says that the model cannot be resumed; the model says that it can."""

    caught_by = ("test_the_model_can_do_no_more_than_the_record_says",)
    plugin = "modest_toy"


class NotTheInstalledRecord(BrokenToy):
    """The plugin that is installed says something else."""

    caught_by = ("test_the_installed_plugin_is_active_and_declares_the_record",)
    record = AdapterSpec("modest_toy", ("other_model",), TOY)


class RecordOfTheFuture(BrokenToy):
    """The record is for a version of the contract that there is not yet."""

    caught_by = ("test_the_record_is_for_this_version_of_the_contract",)
    record = AdapterSpec("future_toy", ("toy",), TOY, api_version=API_VERSION + 1)


class RecordOfAnotherClass(BrokenToy):
    """The record names the class of another model."""

    caught_by = ("test_the_record_names_the_class_of_the_model",)
    record = AdapterSpec("other_toy", ("toy",), "broken.records:MoreThanTheRecord")


class PresetThatCannotBeRead(BrokenToy):
    """A bundled preset is no JSON."""

    caught_by = ("test_bundled_presets_are_valid",)
    record = AdapterSpec("preset_toy", ("toy",), TOY, preset_package=BAD_PRESETS)


class HeavyPlugin(BrokenToy):
    """Asking the plugin for its record imports torch."""

    caught_by = ("test_the_plugin_imports_nothing_heavy",)
    plugin = "heavy_toy"


FAULTS = (
    HalfWritten,
    MoreThanTheRecord,
    NotTheInstalledRecord,
    RecordOfTheFuture,
    RecordOfAnotherClass,
    PresetThatCannotBeRead,
    HeavyPlugin,
)
