"""The class that an author derives from."""

from __future__ import annotations

from looped_spec.testing.conformance.checkpoints import CheckpointChecks
from looped_spec.testing.conformance.depth import DepthChecks
from looped_spec.testing.conformance.exits import ExitChecks
from looped_spec.testing.conformance.generation import GenerationChecks
from looped_spec.testing.conformance.planes import PlaneChecks
from looped_spec.testing.conformance.record import RecordChecks
from looped_spec.testing.conformance.rows import RowChecks
from looped_spec.testing.conformance.written import WrittenChecks


class AdapterConformance(
    WrittenChecks,
    RecordChecks,
    PlaneChecks,
    RowChecks,
    DepthChecks,
    ExitChecks,
    GenerationChecks,
    CheckpointChecks,
):
    """Derive a test class from this one and give it a fixture `adapter`.

    Fixtures:
        adapter: a tiny model with random weights, fp32 on the CPU. Small weights, please: a model
            that amplifies rounding errors differs from itself (see `tolerance`).
        spec: optional, the `AdapterSpec` that the plugin declares.
        checkpoint_folder: optional, a folder that holds the model of `adapter` as its authors
            publish it. It is loaded with the default options.

    Checks of what the model's `capabilities` do not declare are skipped, with the capability's
    name. A check may be overridden only by one that is marked xfail with a reason.
    """

    def test_no_standard_test_is_overridden_without_a_reason(self) -> None:
        unexplained = []
        for name in dir(AdapterConformance):
            standard = getattr(AdapterConformance, name)
            own = getattr(type(self), name, None)
            if not name.startswith("test_") or own is standard:
                continue
            marks = getattr(own, "pytestmark", [])
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                unexplained.append(name)
        assert not unexplained, (
            "mark these @pytest.mark.xfail(reason=...), or leave them as they are"
        )
