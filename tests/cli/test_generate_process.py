"""`looped-spec generate` as a process of its own: exit codes, signals, streams that go away."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fake_plugins import FakeSite, plugin_source
from processes import PATIENCE_SECONDS
from tiny_model import write_tiny_model

from looped_spec.cli.model_loading import _exit_on_interrupt

LOUD_MODEL = """
import sys
from importlib.abc import MetaPathFinder
class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "looped_spec.runtime.llm":
            sys.meta_path.remove(self)
            from looped_spec_ouro.adapter import OuroAdapter
            loop = OuroAdapter.loop
            def loud(self, state, index, *rest, **named):
                print("loop", index)
                return loop(self, state, index, *rest, **named)
            OuroAdapter.loop = loud
sys.meta_path.insert(0, Finder())
"""


def test_a_mistake_is_one_line_and_exit_code_2(
    command: Sequence[str], environment: Mapping[str, str]
) -> None:
    done = subprocess.run(
        [*command, "--prompt", "a", "--max-tokens", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("redirection", ["| true", "> /dev/full", ">&-"])
def test_an_output_that_takes_nothing_leaves_no_trace(
    redirection: str, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    line = f"{' '.join(command)} --prompt a --max-tokens 4 {redirection}"
    done = subprocess.run(
        line,
        shell=True,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout == ""
    expected = {"| true": 0, "> /dev/full": 2, ">&-": 0}
    assert done.returncode == expected[redirection]
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.stderr.count("\n") <= 1


@pytest.mark.parametrize("extra", [(), ("--compare", "--repeats", "1")])
def test_what_plugins_and_models_print_stays_out_of_the_json(
    extra: tuple[str, ...], tiny_model: Path, fake_site: FakeSite
) -> None:
    source = "print('hello', flush=True)\n" + plugin_source("fake_toy")
    fake_site.add("fake-loud", source)
    fake_site.write("sitecustomize", LOUD_MODEL)
    arguments = [str(tiny_model), "--prompt", "a", "--max-tokens", "4", "--json", *extra]
    arguments += ["--num-speculative-tokens", "1", "--draft-loops", "1"]
    done = fake_site.run("-m", "looped_spec", "generate", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "tiny"
    assert "hello\n" in done.stderr and "loop 0\n" in done.stderr


def wait_for_torch(process: subprocess.Popen[str]) -> None:
    """Return when the process has mapped the first of torch, so that its import is under way."""
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "libtorch" not in maps.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.6])
def test_ctrl_c_while_loading_is_one_line_and_exit_code_130(
    seconds: float, command: Sequence[str], environment: Mapping[str, str], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*command, "--prompt", "a", "--max-tokens", "90", "--json", str(tmp_path / "o.json")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_torch(process)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out, err) == (130, "", "looped-spec: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_ctrl_c_while_streaming_is_one_line_and_leaves_no_file(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "long", max_position_embeddings=8192)
    arguments = ["--prompt", "the cat", "--ignore-eos", "--max-tokens", "8000"]
    arguments += ["--max-num-seqs", "1", "--json", str(tmp_path / "o.json")]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "looped_spec", "generate", str(model), *arguments],
        env=environment,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    assert os.read(ours, 1)  # The first of the text is there, and most of it to come.
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    os.close(ours)
    assert (process.returncode, err) == (130, "looped-spec: interrupted\n")
    assert os.listdir(tmp_path) == ["long"]


def test_a_signal_that_is_ignored_stays_ignored_while_loading() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _exit_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with _exit_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
