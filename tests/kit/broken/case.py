"""What a broken adapter is for the tests of the kit."""

from __future__ import annotations

from typing import Any, ClassVar

from looped_spec.adapter import AdapterSpec, Capabilities
from looped_spec.testing.toy import TOY_CONFIG, ToyAdapter, make_toy

SIZES: dict[str, Any] = {"num_layers": 1, "full_loops": 2}
"""As small as a toy gets that still has a draft depth."""


class BrokenToy(ToyAdapter):
    """A toy with a fault, which the checks `caught_by` notice.

    `can` is what it declares, if not what the toy does. Its author gives the record of the
    installed adapter `plugin`, or else `record`.
    """

    caught_by: ClassVar[tuple[str, ...]] = ()
    can: ClassVar[Capabilities | None] = None
    plugin: ClassVar[str | None] = None
    record: ClassVar[AdapterSpec | None] = None

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.capabilities = self.can or self.capabilities


def make_broken(kind: type[BrokenToy]) -> BrokenToy:
    """Build one with the weights of a healthy toy."""
    adapter = kind({**TOY_CONFIG, **SIZES}, {})
    adapter.module.load_state_dict(make_toy(**SIZES).module.state_dict())
    return adapter
