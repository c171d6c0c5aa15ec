"""A configuration's JSON: what cannot be one is said in one line, whatever stands there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable
from looped_spec.errors import ConfigError

JUNK: list[Any] = [None, True, -1, 1.5, float("nan"), "", "x", [], {}, [1], [[1]], [[]], {"a": 1}]


def document() -> dict[str, Any]:
    """Return a document in which nothing is left out."""
    config = AdaptiveSpecConfig.default(
        4,
        2,
        cost=CostTable.of({(1, 0, 0, 0): 5.0, (1, 0, 1, 1): 6.0}, {"device": "cpu"}),
        depth_offsets=((1, 0.5), (2, 0.7)),
        padded_batch_sizes=(1, 2),
    )
    written: dict[str, Any] = json.loads(json.dumps(config.to_json()))
    return written


def test_what_was_written_is_read_back() -> None:
    read = AdaptiveSpecConfig.from_json(document())
    assert json.loads(json.dumps(read.to_json())) == document()


@pytest.mark.parametrize("key", sorted(document()))
def test_a_key_with_junk_is_read_or_refused_in_one_line(key: str) -> None:
    refused = 0
    for junk in JUNK:
        try:
            AdaptiveSpecConfig.from_json(document() | {key: junk})
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 200
    assert refused, f"{key} takes anything"


@pytest.mark.parametrize("junk", [None, 5, "ab", ["device"], {"device": 1}])
def test_a_fingerprint_that_is_no_object_of_texts_is_refused(junk: Any) -> None:
    bad = document()
    bad["cost"]["fingerprint"] = junk
    with pytest.raises(ConfigError, match="fingerprint of a cost table"):
        AdaptiveSpecConfig.from_json(bad)


@pytest.mark.parametrize(
    ("key", "junk", "named"),
    [
        ("goodput", "", "goodput must be a JSON object"),
        ("cost", 5, "a cost table must be a JSON object"),
        ("depth_offsets", [1], r"depth_offsets must be \[d, gain\]"),
        ("depth_offsets", [[1, 2, 3]], r"depth_offsets must be \[d, gain\]"),
        ("padded_batch_sizes", ["a", 1], "padded_batch_sizes must be an integer"),
    ],
)
def test_the_key_that_is_wrong_is_named(key: str, junk: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        AdaptiveSpecConfig.from_json(document() | {key: junk})
