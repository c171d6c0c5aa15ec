"""Every switch is counted, however many the list of the last ones has room for."""

from __future__ import annotations

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import Candidate
from looped_spec.control.stats import MAX_SWITCHES


def test_more_switches_than_are_listed_are_counted_by_bucket_and_direction() -> None:
    candidate = Candidate(2, 1)
    controller = AdaptiveController(AdaptiveSpecConfig.pinned(candidate, 3, 4))
    others = (Candidate(1, 1), candidate)
    for number in range(MAX_SWITCHES + 45):
        controller._start_run(number, 0, others[number % 2], False, "told to")
    stats = controller.stats()
    assert stats.num_switches == MAX_SWITCHES + 44
    counts = {(one.bucket, one.direction): one.switches for one in stats.switch_counts}
    assert counts == {(0, "up"): 150, (0, "down"): 150}
    assert len(stats.switches) == MAX_SWITCHES
    first = stats.as_dict()["switch_counts"][0]
    assert first == {"bucket": 0, "direction": "down", "switches": 150}
