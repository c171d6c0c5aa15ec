"""`looped-spec generate --json`: the agreed keys, and a file that is whole or not there."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest
from command_runs import Generate

from looped_spec import atomic_json
from looped_spec.atomic_json import check_target, json_text, write_json
from looped_spec.errors import ConfigError, LoopedSpecError

ARGUMENTS = ("--prompt", "a", "--max-tokens", 6)


@pytest.mark.parametrize(("count", "way"), [(0, "plain"), (2, "speculative")])
def test_without_comparison_only_what_ran_is_reported(
    count: int, way: str, generate: Generate
) -> None:
    done = generate(*ARGUMENTS, "--num-speculative-tokens", count, "--json")
    document = json.loads(done.out)
    assert done.out == json.dumps(document, indent=2, sort_keys=True) + "\n"
    assert document.keys() & {"plain", "speculative", "speedup", "identical"} == {way}
    (output,) = document["outputs"]
    assert output.keys() == {"text", "token_ids", "finish_reason"}
    assert (len(output["token_ids"]), output["finish_reason"]) == (6, "length")
    assert document[way]["tokens_per_second"] > 0
    rate_keys = {"draft_acceptance_rate", "acceptance_by_position"}
    assert (rate_keys <= document[way].keys()) == (count > 0)
    assert document["model"] == "tiny"
    assert document["machine"]["device"] == "cpu"


def test_how_many_tokens_the_cache_holds_is_told(generate: Generate) -> None:
    sizes = ("--max-model-len", 32, "--max-num-seqs", 2, "--block-size", 16)
    assert json.loads(generate(*ARGUMENTS, *sizes, "--json").out)["cache_tokens"] == 64


def test_rates_without_any_draft_are_null(generate: Generate) -> None:
    done = generate("--prompt", "a", "--max-tokens", 1, "--num-speculative-tokens", 2, "--json")
    assert json.loads(done.out)["speculative"]["draft_acceptance_rate"] is None


def test_a_file_and_the_text_are_both_given(generate: Generate, tmp_path: Path) -> None:
    done = generate(*ARGUMENTS, "--json", tmp_path / "o.json")
    document = json.loads((tmp_path / "o.json").read_text())
    assert done.out == document["outputs"][0]["text"] + "\n"
    assert os.listdir(tmp_path) == ["o.json"]


def test_numbers_that_are_not_finite_become_null() -> None:
    text = json_text({"b": math.nan, "a": [math.inf, {"c": -math.inf}], "d": (1 / 3, True, 2)})
    assert json.loads(text) == {"a": [None, {"c": None}], "b": None, "d": [0.333333, True, 2]}


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def fill_disk(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("existing", [None, "old\n"])
@pytest.mark.parametrize(("failure", "code"), [(interrupt, 130), (fill_disk, 2)])
def test_a_failed_write_leaves_what_was_there(
    step: str,
    existing: str | None,
    failure: object,
    code: int,
    generate: Generate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "o.json"
    if existing is not None:
        file.write_text(existing)
    monkeypatch.setattr(atomic_json.os, step, failure)
    done = generate(*ARGUMENTS, "--json", file)
    assert done.code == code
    assert done.err.count("\n") == 1
    assert os.listdir(tmp_path) == ([] if existing is None else ["o.json"])
    assert existing is None or file.read_text() == existing


def test_the_file_is_flushed_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def note(*arguments: object, name: str = name, real: object = real) -> None:
            steps.append(name)
            real(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(atomic_json.os, name, note)
    write_json(tmp_path / "o.json", {"a": 1})
    assert steps == ["fsync", "replace", "fsync"]
    assert (tmp_path / "o.json").read_text() == '{\n  "a": 1\n}\n'


def test_a_link_is_followed_and_the_mode_is_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_json(link, {})
    assert link.is_symlink()
    assert real.read_text() == "{}\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_json(tmp_path / "o.json", {})
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "o.json")}
    assert len(modes) == 1


def test_a_device_is_written_and_not_replaced() -> None:
    check_target(Path("/dev/null"))
    write_json(Path("/dev/null"), {})
    assert Path("/dev/null").is_char_device()
    with pytest.raises(LoopedSpecError, match="No space left"):
        write_json(Path("/dev/full"), {})
    assert Path("/dev/full").is_char_device()


def test_a_target_of_a_name_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*: File name too long"):
        check_target(tmp_path / ("a" * 300))


def test_a_link_to_a_file_not_yet_there_needs_its_folder(tmp_path: Path) -> None:
    link, folder = tmp_path / "link", tmp_path / "folder"
    link.symlink_to(folder / "o.json")
    with pytest.raises(ConfigError, match=f"folder '{folder}' does not exist"):
        check_target(link)
    folder.mkdir()
    check_target(link)
    write_json(link, {})
    assert (folder / "o.json").read_text() == "{}\n" and link.is_symlink()
