"""docs/evaluation.md shows options that exist, and names every key of a run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex

import pytest
from tree import ROOT

from looped_spec.offline.load import Profile
from looped_spec.offline.load_policy import KNOWN
from looped_spec.offline.load_record import run_record
from looped_spec.offline.load_run import drive
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.toy import make_toy

PAGE = (ROOT / "docs" / "evaluation.md").read_text()
MODULES = {
    "bench load": "looped_spec.cli.bench_load",
    "preset report": "looped_spec.cli.preset_report",
}
COMMANDS = [
    shlex.split(text.replace("\\\n", " "))
    for text in re.findall(r"^    (looped-spec (?:[^\n]*\\\n)*[^\n]*)", PAGE, re.M)
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_the_page_shows_only_options_that_exist(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(MODULES[" ".join(words[1:3])]).configure(parser)
    args = parser.parse_args(words[3:])
    for profile in vars(args).get("profile", []):
        Profile.parse(profile)


def test_there_are_commands_on_the_page() -> None:
    assert {" ".join(words[1:3]) for words in COMMANDS} == set(MODULES)


def test_the_page_names_every_policy_and_every_key_of_a_run() -> None:
    for name in KNOWN:
        assert f"`{name}`" in PAGE
    params = SamplingParams(max_tokens=3, temperature=0.0)
    run = drive(make_engine(make_toy()), Profile.parse("fixed:1"), [[1, 2]], params)
    for key in run_record(run, 0, None):
        split = re.fullmatch(r"(mean|median|std|p99)_(ttft|tpot|itl|e2el)_ms", key)
        names = [f"{split[1]}_", f"{split[2]}_ms"] if split else [key]
        assert all(f"`{name}`" in PAGE for name in names), key
