"""The command itself: verbs, exit codes, one-line errors, and what it must not import."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fake_plugins import FakeSite
from processes import PATIENCE_SECONDS

from looped_spec.cli import main as cli
from looped_spec.errors import ConfigError
from looped_spec.settings import VARIABLES
from looped_spec.version import __version__

REPORT_TORCH = """
import sys
from looped_spec.cli.main import main
code = main(sys.argv[1:])
print(code, "torch" in sys.modules, file=sys.stderr)
"""


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A verb `fake` whose `run` a test may replace."""
    module = ModuleType("fake_verb")
    module.configure = lambda parser: parser.add_argument("--count", type=int)  # type: ignore[attr-defined]
    module.run = lambda args: args.count or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setattr(cli, "VERBS", {**cli.VERBS, "fake": ("fake_verb", "does nothing")})
    return module


def failing(error: BaseException) -> object:
    def run(args: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["adapters"], ["adapters", "--json"]]
)
def test_light_commands_leave_torch_out(arguments: list[str], fake_site: FakeSite) -> None:
    done = fake_site.run("-c", REPORT_TORCH, *arguments)
    assert done.stdout
    assert done.stderr == "0 False\n"


def test_help_shows_every_verb_and_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, (_, line) in cli.VERBS.items():
        assert f"{verb} " in shown
        assert line in shown
    for name, meaning in VARIABLES.items():
        assert name in shown
        assert meaning in shown


def test_help_imports_no_verb_and_no_plugin(fake_site: FakeSite) -> None:
    fake_site.add("fake-broken", "raise SystemExit(9)")
    code = (
        "import sys; from looped_spec.cli.main import main, VERBS; code = main(['--help'])\n"
        "heavy = {'looped_spec.plugins', 'fake_broken', *(verb[0] for verb in VERBS.values())}\n"
        "print(code, heavy & set(sys.modules), file=sys.stderr)"
    )
    assert fake_site.run("-c", code).stderr == "0 set()\n"


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"looped-spec {__version__}\n"


def test_the_package_runs_as_a_module_with_its_exit_code(fake_site: FakeSite) -> None:
    assert fake_site.run("-m", "looped_spec", "--version").stdout == f"looped-spec {__version__}\n"
    assert fake_site.run("-m", "looped_spec", "nonsense").returncode == 2


def test_arguments_default_to_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch, verb: ModuleType
) -> None:
    monkeypatch.setattr(sys, "argv", ["looped-spec", "fake", "--count", "5"])
    assert cli.main() == 5


def test_the_exit_code_is_what_the_verb_returns(verb: ModuleType) -> None:
    assert cli.main(["fake", "--count", "3"]) == 3


def test_an_unknown_verb_is_one_line_with_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["adaptrs"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "looped-spec: error: unknown verb 'adaptrs' (did you mean 'adapters'?)"
    )
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["--nonsense"], ["--vers"], ["fake", "--nonsense"], ["fake", "--co", "1"]]
    + [["fake", "--count", "a\nb"], ["fake", "--count"], ["fake", "extra"]]
    + [[verb, "--nonsense"] for verb in cli.VERBS],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("looped-spec: error: ")
    assert captured.err.count("\n") == 1
    assert " --help'" in captured.err


@pytest.mark.parametrize(
    ("arguments", "flag", "prog"),
    [
        (["--versoin"], "--version", "looped-spec"),
        (["adapters", "--jsn"], "--json", "looped-spec adapters"),
        (["generate", "model", "--jsn"], "--json", "looped-spec generate"),
    ],
)
def test_an_unknown_flag_names_the_closest_and_the_help(
    arguments: list[str], flag: str, prog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == (
        f"looped-spec: error: unknown flag '{arguments[-1]}' (did you mean '{flag}'?); "
        f"see '{prog} --help'\n"
    )


def test_the_help_of_a_verb_shows_its_options(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fake", "--help"]) == 0
    assert "--count" in capsys.readouterr().out


def test_a_mistake_of_the_user_is_one_line_and_exit_code_2(
    verb: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "run", failing(ConfigError("count must be\n  at least 1")))
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "looped-spec: error: count must be at least 1\n"


def test_a_defect_of_ours_keeps_its_trace(
    verb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "run", failing(KeyError("ours")))
    with pytest.raises(KeyError, match="ours"):
        cli.main(["fake"])


def test_ctrl_c_is_one_line_and_exit_code_130(
    verb: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "run", failing(KeyboardInterrupt()))
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "looped-spec: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [("--help", ""), ("adapters", ""), ("adapters", "1"), ("adapters --json", "")],
)
def test_a_reader_that_goes_away_is_no_error(arguments: str, unbuffered: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "looped_spec", *arguments.split()],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # Long before the command gets to write.
    complaints = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=PATIENCE_SECONDS) == 141
    assert complaints == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "adapters", "adapters --json"] + [f"{v} --help" for v in cli.VERBS],
)
def test_a_full_disk_is_one_line_and_exit_code_2(arguments: str, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "looped_spec", *arguments.split()],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
    assert done.returncode == 2
    assert done.stderr == ("looped-spec: error: cannot write to stdout: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_that_cannot_be_shown_keeps_its_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "looped_spec", "nonsense"], stderr=full, timeout=PATIENCE_SECONDS
        )
    assert done.returncode == 2


def test_only_the_console_writes_to_the_standard_streams() -> None:
    found = []
    for path in Path(cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name == "print" or name.startswith(("sys.stdout.", "sys.stderr.")):
                found.append(path.name)
    assert set(found) == {"console.py"}


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-"])
def test_a_closed_output_is_no_error(redirection: str) -> None:
    command = f'"{sys.executable}" -m looped_spec adapters {redirection}'
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_error_with_stderr_closed_does_not_end_up_in_the_output() -> None:
    command = f'"{sys.executable}" -m looped_spec nonsense 2>&-'
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout) == (2, "")
