"""Imports that the garbage collector does not look at."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from looped_spec.serve.imports import lasting_imports


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_made_inside_is_never_looked_at_again() -> None:
    with lasting_imports():
        assert not gc.isenabled()
        made: list[object] = [{}]
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(thing is made for thing in gc.get_objects())
    later: list[object] = [{}]
    assert any(thing is later for thing in gc.get_objects())


def test_the_collector_is_left_as_it_was_also_by_an_import_that_fails() -> None:
    with pytest.raises(ImportError), lasting_imports():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with lasting_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
