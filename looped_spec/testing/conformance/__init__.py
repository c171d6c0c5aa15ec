"""The tests that every adapter must pass, as a class to derive from. Needs pytest.

Example, the whole of a plugin's `test_conformance.py`:

    import pytest
    from looped_spec.testing import AdapterConformance
    from looped_spec.testing.checkpoints import fill_random
    from looped_spec_mine.adapter import MineAdapter
    from looped_spec_mine.plugin import looped_spec_adapters

    TINY = {"model_type": "mine", "hidden_size": 64, ...}  # a config.json of a tiny model

    class TestMineAdapter(AdapterConformance):
        @pytest.fixture
        def adapter(self):
            adapter = MineAdapter(TINY, MineAdapter.options)
            fill_random(adapter.module)
            return adapter

        @pytest.fixture
        def spec(self):
            return looped_spec_adapters()[0]

`spec` is optional, as are the other fixtures that `AdapterConformance` names; without it the checks
of the plugin's record are skipped.
"""

from __future__ import annotations

import pytest

_PARTS = (
    *("base", "written", "record", "planes", "rows", "depth", "texts", "exits", "generation"),
    *("checkpoints", "suite"),
)

# Before they are imported, so that a failing assert shows its values.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from looped_spec.testing.conformance.suite import AdapterConformance  # noqa: E402

__all__ = ["AdapterConformance"]
