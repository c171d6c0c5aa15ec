"""docs/control.md: its code runs, its commands exist, its tables have the keys of the code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS
from tree import ROOT

from looped_spec.cli import main as cli
from looped_spec.cli import simulate
from looped_spec.control import trace_document
from looped_spec.control.config import POLICIES

PAGE = (ROOT / "docs" / "control.md").read_text()
COMMANDS = [
    shlex.split(line) for line in re.findall(r"^    (looped-spec simulate .*)$", PAGE, re.M)
]


def rows(heading: str, text: str = PAGE) -> list[str]:
    """Return the first cells of the first table with this head, without its quotes."""
    table = text.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [line.split("|")[1].strip().strip("`") for line in table.splitlines()[2:]]


def section(title: str) -> str:
    return PAGE.split(f"\n{title}\n", 1)[1]


def test_the_example_runs_and_says_what_is_chosen(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"policy goodput, batch \d+-\d+ \(active\): K=\d+ d=\d+, .*\n", done.stdout)


def test_every_policy_has_its_row() -> None:
    assert set(rows("policy")) == set(POLICIES)


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("### Traces", trace_document._TRACE_KEYS),
        ("A phase:", trace_document._PHASE_KEYS),
    ],
)
def test_every_key_of_a_trace_has_its_row(title: str, keys: tuple[str, ...]) -> None:
    assert sorted(rows("key", section(title))) == sorted(keys)


def test_every_key_of_a_result_has_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = json.loads((ROOT / "examples" / "traces" / "hopeless.json").read_text())
    trace["phases"][0]["rounds"] = 20
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    assert cli.main(["simulate", str(path), "--policy", "never", "--seeds", "1", "--json"]) == 0
    assert sorted(rows("key", section("### Results"))) == sorted(
        json.loads(capsys.readouterr().out)
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_commands_have_only_options_that_exist(command: list[str]) -> None:
    parser = ArgumentParser(allow_abbrev=False)
    simulate.configure(parser)
    args = parser.parse_args(command[2:])
    assert (ROOT / args.trace).is_file()


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) == 3


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
