"""The check that comes before all others: is there anything to check yet."""

from __future__ import annotations

import pytest

from looped_spec.adapter import ModelAdapter
from looped_spec.testing.conformance.base import REQUIRED_METHODS, ConformanceBase, unwritten


class WrittenChecks(ConformanceBase):
    """A skeleton is told which of its methods are missing, and nothing else."""

    @pytest.mark.parametrize("method", REQUIRED_METHODS)
    def test_every_required_method_is_written(self, adapter: ModelAdapter, method: str) -> None:
        missing = unwritten(adapter)
        if method in missing:
            name = f"{type(adapter).__name__}.{method}"
            pytest.fail(f"{name} is not written yet: {missing[method]}", pytrace=False)
