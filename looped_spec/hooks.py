"""The hook that a plugin implements, and its marker.

Hooks are cold-path only: nothing that runs per round or per token goes through pluggy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from looped_spec.adapter import AdapterSpec

PROJECT = "looped_spec"
"""The pluggy project name, and the entry-point group that plugins register under."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def looped_spec_adapters() -> Iterable[AdapterSpec]:  # type: ignore[empty-body]
    """Return the model families that this plugin brings, one `AdapterSpec` each.

    Must be cheap: name the adapter class as `"module:Class"` instead of importing it.

    Example:
        @hookimpl
        def looped_spec_adapters():
            return [AdapterSpec(name="toy", model_types=("toy_looped",),
            factory="toy_plugin.adapter:ToyAdapter")]

    .. versionadded:: 0.1
    """
