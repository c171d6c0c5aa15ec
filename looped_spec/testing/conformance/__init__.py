"""The tests that every adapter must pass, as a class to derive from. Needs pytest.

Example, the whole of a plugin's `test_conformance.py`:

    import pytest
    from looped_spec.testing import AdapterConformance
    from looped_spec_mine.adapter import MyAdapter
    from looped_spec_mine.testing import tiny_config

    class TestMyAdapter(AdapterConformance):
        @pytest.fixture
        def adapter(self):
            torch.manual_seed(0)
            return MyAdapter(tiny_config(), MyAdapter.options)

See `AdapterConformance` for the optional fixtures.
"""

from __future__ import annotations

import pytest

_PARTS = (
    *("base", "record", "planes", "rows", "depth", "texts", "exits", "generation", "checkpoints"),
    "suite",
)

# Before they are imported, so that a failing assert shows its values.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from looped_spec.testing.conformance.suite import AdapterConformance  # noqa: E402

__all__ = ["AdapterConformance"]
