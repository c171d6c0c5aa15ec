"""Presets: what was measured of a model on a device, and what to run there."""

from looped_spec.presets.parts import AcceptanceEntry, Provenance, WorkloadRecord
from looped_spec.presets.preset import Preset

__all__ = ["AcceptanceEntry", "Preset", "Provenance", "WorkloadRecord"]
