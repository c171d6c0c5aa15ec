"""A small preset to change in tests."""

import pytest
from preset_example import make_preset

from looped_spec.presets import Preset


@pytest.fixture
def preset() -> Preset:
    """A valid preset."""
    return make_preset()
