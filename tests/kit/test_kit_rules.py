"""The kit itself: what overriding needs, what it says when it fails or skips, what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kit_runs import Outcomes, run_kit

SUITES = """
import pytest
from looped_spec.adapter import Capabilities
from looped_spec.testing import AdapterConformance
from looped_spec.testing.toy import make_toy


class Mine(AdapterConformance):
    @pytest.fixture
    def adapter(self):
        return make_toy(num_layers=1, full_loops=2)


class TestHealthy(Mine):
    pass


class TestWithout(AdapterConformance):
    pass


class TestTaken(Mine):
    test_the_sizes_are_sane = None


class TestStateful(Mine):
    @pytest.fixture
    def adapter(self):
        toy = make_toy(num_layers=1, full_loops=2)
        toy.capabilities = Capabilities(non_kv_state="convolutions")
        return toy
"""

RULE = "test_no_standard_test_is_overridden_without_a_reason"
OVERRIDES = {
    "": True,
    "@pytest.mark.skip(reason='slow')": True,
    "@pytest.mark.xfail": True,
    "@pytest.mark.xfail(reason='')": True,
    "@pytest.mark.xfail(reason='the noise is no function of the seed')": False,
}
"""The mark of an overriding test, and whether the kit objects to it."""

OVERRIDDEN = """
class TestOverridden{number}(Mine):
    {mark}
    def test_two_runs_are_identical(self):
        raise AssertionError
"""
SELECTED = (
    f"TestHealthy::{RULE}",
    "TestHealthy::test_a_shadow_readout_writes_no_plane",
    "TestHealthy::test_the_record_names_the_class_of_the_model",
    "TestHealthy::test_a_cuda_device_gives_the_same_logits",
    "TestWithout::test_the_sizes_are_sane",
    f"TestTaken::{RULE}",
    "TestStateful::test_no_state_is_kept_beside_the_planes",
    *(f"TestOverridden{number}::{RULE}" for number in range(len(OVERRIDES))),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run some checks of some classes."""
    source = SUITES + "".join(
        OVERRIDDEN.format(number=number, mark=mark) for number, mark in enumerate(OVERRIDES)
    )
    return run_kit(tmp_path_factory.mktemp("author"), source, SELECTED, [])


@pytest.mark.parametrize("mark", OVERRIDES)
def test_a_check_is_overridden_as_xfail_with_a_reason_only(mark: str, outcomes: Outcomes) -> None:
    group = f"TestOverridden{list(OVERRIDES).index(mark)}"
    assert (outcomes.failed(group) == {RULE}) is OVERRIDES[mark]


def test_a_check_that_is_taken_away_counts_as_overridden(outcomes: Outcomes) -> None:
    assert outcomes.failed("TestTaken") == {RULE}
    assert "'test_the_sizes_are_sane'" in outcomes.text


def test_a_missing_fixture_is_asked_for_by_name(outcomes: Outcomes) -> None:
    assert outcomes.failed("TestWithout") == {"test_the_sizes_are_sane"}
    assert "TestWithout must define a fixture `adapter`" in outcomes.text


def test_a_failing_check_shows_its_values(outcomes: Outcomes) -> None:
    assert "assert 'convolutions' is None" in outcomes.text


def test_a_skip_names_what_is_not_declared(outcomes: Outcomes) -> None:
    assert outcomes.failed("TestHealthy") == set()
    assert outcomes.of("TestHealthy").pop(RULE) == "passed"
    assert "capability shadow_depths: not declared" in outcomes.report
    assert "fixture spec: none is given" in outcomes.report


def test_everything_but_the_kit_does_without_pytest() -> None:
    modules = ("toy", "oracle", "dense", "engine", "stages", "drafts", "checkpoints")
    imports = ", ".join(f"looped_spec.testing.{module}" for module in modules)
    code = f"import sys, {imports}; sys.exit('pytest' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
