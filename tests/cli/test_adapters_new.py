"""`looped-spec adapters new`: a whole project or none, and never over something else."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fake_plugins import FakeSite, plugin_source
from processes import PATIENCE_SECONDS

from looped_spec.cli import adapters_new
from looped_spec.cli import main as cli
from looped_spec.cli.adapters_new import FILES, core_range
from looped_spec.version import __version__

LONG = "looped_llama_7b"


def contents(folder: Path) -> dict[str, str]:
    """Return the text of every file by its path in a folder."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_text() for file in files}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with no setting of plugins."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("LOOPED_SPEC_PLUGINS", "LOOPED_SPEC_STRICT_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.mark.parametrize("name", ["myloop", LONG, "3d"])
def test_a_project_has_every_file_and_nothing_left_open(name: str, here: Path) -> None:
    assert cli.main(["adapters", "new", name]) == 0
    assert [path.name for path in here.iterdir()] == [f"looped-spec-{name}"]
    files = contents(here / f"looped-spec-{name}")
    package = f"looped_spec_{name}"
    assert set(files) == {path.replace("${package}", package) for path in FILES}
    for path, text in files.items():
        assert "${" not in text, path
        if path.endswith(".py"):
            compile(text, path, "exec")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == f"looped-spec-{name}"
    assert project["entry-points"]["looped_spec"] == {name: f"{package}.plugin"}
    assert project["dependencies"] == [f"looped-spec{core_range(__version__)}"]
    assert set(project["optional-dependencies"]) == {"testing"}


def test_every_template_is_used() -> None:
    folder = Path(adapters_new.__file__).parent / "new_adapter"
    assert {file.name for file in folder.iterdir()} == set(FILES.values())


def test_the_message_names_the_folder_and_three_commands(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "a folder").mkdir()
    assert cli.main(["adapters", "new", "--path", "a folder", "myloop"]) == 0
    first, *commands, last = capsys.readouterr().out.splitlines()
    assert first == f"a folder/looped-spec-myloop holds {len(FILES)} files. Next:"
    assert commands == [
        "  cd 'a folder/looped-spec-myloop'",
        "  pip install -e '.[testing]'",
        "  pytest",
    ]
    assert "README.md" in last
    assert (here / "a folder/looped-spec-myloop/pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("My-Loop", ": try 'my_loop'"),
        ("looped-spec-myloop", ": try 'myloop'"),
        ("_x", ": try 'x'"),
        ("x_", ": try 'x'"),
        ("../up", ": try 'up'"),
        ("a b", ": try 'a_b'"),
        ("x\n", ": try 'x'"),
        ("é", ""),
        ("", ""),
    ],
)
def test_a_name_that_nothing_can_have_is_refused(
    name: str, hint: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["adapters", "new", name]) == 2
    error = capsys.readouterr().err
    assert "adapter name must match [a-z0-9_]+" in error
    assert error.endswith(f"'{' '.join(name.split())}'{hint}\n") or name == "x\n"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("name", ["fake_toy", "fake_x", "fake_bird"])
@pytest.mark.parametrize("listed", [None, "", "other"])
def test_the_name_of_an_installed_adapter_is_refused_whatever_is_enabled(
    name: str,
    listed: str | None,
    here: Path,
    fake_site: FakeSite,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_site.add("fake-good", plugin_source("fake_toy", "fake_x"))
    fake_site.add("fake-broken", "raise SystemExit('no way')", entry_point="fake_bird")
    monkeypatch.setenv("LOOPED_SPEC_STRICT_PLUGINS", "1")
    if listed is not None:
        monkeypatch.setenv("LOOPED_SPEC_PLUGINS", listed)
    assert cli.main(["adapters", "new", name]) == 2
    assert f"adapter name '{name}' is taken by fake-" in capsys.readouterr().err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_there_is_left_as_it_is(
    kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = here / "looped-spec-myloop"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to("nowhere")
    assert cli.main(["adapters", "new", "myloop"]) == 2
    assert "'looped-spec-myloop' is there already" in capsys.readouterr().err
    assert list(here.iterdir()) == [target]
    assert target.is_symlink() or not target.is_dir() or list(target.iterdir()) == []
    assert kind != "file" or target.read_text() == "mine"


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_path_that_is_no_folder_is_refused(
    path: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").touch()
    assert cli.main(["adapters", "new", "myloop", "--path", path]) == 2
    assert f"--path must be an existing folder, got '{path}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "cannot write .*No space left"),
    ],
)
@pytest.mark.parametrize("written", range(len(FILES)))
def test_a_failure_at_any_file_leaves_nothing(
    written: int,
    failure: BaseException,
    code: int,
    said: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, left = Path.write_text, [written]

    def fail(self: Path, *args: str, **options: str) -> int:
        if left[0] == 0:
            raise failure
        left[0] -= 1
        return write(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", fail)
    assert cli.main(["adapters", "new", "myloop"]) == code
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert error.count("\n") == 1
    assert list(here.iterdir()) == []


def test_a_folder_that_appears_meanwhile_is_not_replaced(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, rename = here / "looped-spec-myloop", Path.rename

    def late(self: Path, to: Path) -> Path:
        target.mkdir()
        (target / "theirs").touch()
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", late)
    assert cli.main(["adapters", "new", "myloop"]) == 2
    assert "nothing of it is left" in capsys.readouterr().err
    assert contents(here) == {"looped-spec-myloop/theirs": ""}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["new"], "arguments are required: NAME"),
        (["new", "zz", "--pth", "."], "unknown flag '--pth' (did you mean '--path'?)"),
        (["new", "zz", "extra"], "unexpected argument 'extra'"),
        (["nwe", "zz"], "invalid choice: 'nwe'"),
        (["--json", "new", "zz"], "--json shows the installed plugins"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["adapters", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert list(here.iterdir()) == []


def test_help_shows_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["adapters", "new", "--help"]) == 0
    assert "--path DIR" in capsys.readouterr().out
    assert cli.main(["adapters", "--help"]) == 0
    assert "write the project of a new adapter" in capsys.readouterr().out


def test_it_needs_no_torch(here: Path, fake_site: FakeSite) -> None:
    code = (
        "import sys; from looped_spec.cli.main import main\n"
        f"main(['adapters', 'new', 'myloop', '--path', {str(here)!r}])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert fake_site.run("-c", code).returncode == 0


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.1.0", ">=0.1.0,<0.2"),
        ("0.12.3", ">=0.12.3,<0.13"),
        ("1.4.2", ">=1.4.2,<2"),
        ("0.2.0.dev1", ">=0.2.0.dev1,<0.3"),
    ],
)
def test_the_range_ends_where_a_plugin_may_break(version: str, expected: str) -> None:
    assert core_range(version) == expected


@pytest.mark.parametrize("name", ["a", LONG])
def test_the_code_is_laid_out_as_ruff_wants_it(name: str, here: Path) -> None:
    assert cli.main(["adapters", "new", name]) == 0
    for command in (["check", "--select", "E,F,I,UP,B,RET,SIM,RUF"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=here / f"looped-spec-{name}",
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
