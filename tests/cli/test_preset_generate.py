"""`looped-spec preset generate`: from a model and texts to a preset, and every way to fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS
from tiny_model import write_tiny_model

from looped_spec.cli.main import main
from looped_spec.offline.build import rebuild
from looped_spec.offline.checkout import commit
from looped_spec.offline.store import read_samples
from looped_spec.presets import Preset

WORDS = ["the", "cat", "sat", "on", "mat", "then", "ran"]
SMALL = [
    *("--batch-sizes", "1", "2", "--context-lengths", "16", "--ks", "1", "2", "--ds", "1"),
    *("--repeats", "2", "--prompts", "6", "--prompt-tokens", "8", "--screen-tokens", "24"),
    *("--confirm-tokens", "12", "--confirm-repeats", "1", "--finalists", "1"),
    *("--temperatures", "0.9"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), weight_scale=0.3))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Forty different short texts."""
    lines = [
        json.dumps({"prompt": f"{n} {' '.join(WORDS[n % 5 :] + WORDS[: n % 5])} {n * n}"})
        for n in range(40)
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def generate(model: str, *arguments: object) -> int:
    return main(["preset", "generate", model, *SMALL, *map(str, arguments)])


def test_a_preset_is_measured_and_its_samples_give_it_again(
    model: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    assert generate(model, "--workload", f"words={texts}", "--out", out, "--note", "a note") == 0
    shown = capsys.readouterr()
    assert "'p.json' is found by its path alone: runs look for 'model=" in shown.err
    assert "is written, from 7 cells" in shown.out and "noise: plain decoding" in shown.out
    preset = Preset.read(out)
    assert preset.config.max_num_seqs == 2
    assert {entry.workload for entry in preset.acceptance} == {"words, temperature 0.9"}
    provenance = preset.provenance["cost"]
    assert provenance.kind == "measured" and (provenance.notes or "").startswith("a note")
    assert provenance.versions.get("commit") == commit()
    told = dict(preset.cost.fingerprint)
    assert (told["num_threads"], told["graph_backend"]) == ("1", "eager")
    assert (told["cpu_linear"], told["cpu_kernels"]) == ("auto", "torch")
    assert str(tmp_path) not in out.read_text()
    samples = tmp_path / "samples" / "p.jsonl"
    assert str(tmp_path) not in samples.read_text()
    rebuild(samples).write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == out.read_bytes()

    # Files are checked first: the model is not even looked for.
    assert generate("no/model", "--workload", f"words={texts}", "--out", out) == 2
    assert "give --resume" in capsys.readouterr().err
    assert generate("no/model", "--workload", "w=missing.jsonl", "--out", out, "--resume") == 2
    assert "missing.jsonl" in capsys.readouterr().err
    before = samples.read_bytes()
    assert generate(model, "--workload", f"words={texts}", "--out", out, "--resume") == 0
    assert samples.read_bytes() == before


def test_a_dry_run_shows_the_plan_and_measures_nothing(
    model: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    assert generate(model, "--workload", f"w={texts}", "--out", out, "--dry-run") == 0
    shown = capsys.readouterr().out
    for line in ("times of rounds", "acceptance", "finalists on long texts", "all"):
        assert line in shown
    assert "batch sizes 1, 2" in shown and "w (6)" in shown
    assert list(tmp_path.glob("*.json")) == [] and not (tmp_path / "samples").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no text to measure on"),
        (["--workload", "w=none.jsonl"], "cannot read none.jsonl"),
        (["--workload", "w"], "must be NAME=PATH"),
        (["--workload", "a\nb=TEXTS"], "NAME of --workload must be a text of one line"),
        (
            ["--workload", "w=TEXTS", "--kv-cache-memory-bytes", "40000", "--batch-sizes", "4"],
            "12 blocks of the key/value cache, which has 6 of 16 tokens: lower --batch-sizes",
        ),
        (["--workload", "w=TEXTS", "--ks", "0"], "ks must be between 1 and 64"),
        (["--workload", "w=TEXTS", "--ds", "3"], "draft_loops must be between 1 and"),
        (["--workload", "w=TEXTS", "--batch-sizes", "0"], "batch_sizes must be"),
        (["--workload", "w=TEXTS", "--margin", "1"], "margin must be below 1"),
        (["--workload", "w=TEXTS", "--temperatures", "-1"], "temperatures must be"),
        (["--workload", "w=TEXTS", "--budget", "-1"], "--budget must be"),
        (["--workload", "w=TEXTS", "--budget", "nan"], "--budget must be"),
        (["--workload", "w=TEXTS", "--prompts", "30", "--prompt-tokens", "80"], "has too few"),
        (["--workload", "w=TEXTS", "--context-lengths", "200"], "max_model_len is 96"),
        (["--workload", "w=TEXTS", "--screen-tokens", "95"], "max_model_len is 96"),
        (["--workload", "w=TEXTS", "--out", "/nowhere/p.json"], "does not exist"),
        (["--workload", "w=TEXTS", "--samples", "/proc/nowhere/s.jsonl"], "cannot write"),
        (["--workload", "w=TEXTS", "--note", "a\nb"], "--note must be a text of one line"),
        (["--workload", "w=TEXTS", "--bugdet", "1"], "did you mean '--budget'"),
    ],
)
def test_bad_input_is_one_line_and_writes_no_preset(
    model: str,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert generate(model, *(word.replace("TEXTS", str(texts)) for word in arguments)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1 and message in lines[0]
    assert list(tmp_path.glob("*.json")) == []


def test_prompts_that_repeat_themselves_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "echo.txt"
    path.write_text("\n\n".join(f"{n} " + "the cat sat on the mat, " * 20 for n in range(30)))
    assert generate(model, "--workload", f"w={path}", "--prompt-tokens", "40") == 2
    assert "repeats itself in" in capsys.readouterr().err


def test_a_model_that_ends_every_text_at_once_is_one_line(
    model: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ends"
    folder.mkdir()
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = list(range(300))
    (folder / "config.json").write_text(json.dumps(config))
    out = tmp_path / "p.json"
    arguments = ["--workload", f"w={texts}", "--out", str(out)]
    assert generate(str(folder), *arguments) == 2
    assert "--ignore-eos if the model ends its texts at once" in capsys.readouterr().err
    assert not out.exists()


def test_a_budget_too_short_for_any_cell_is_said_to_be_and_leaves_nothing_in_the_way(
    model: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    arguments = ["--workload", f"w={texts}", "--out", str(out)]
    assert generate(model, *arguments, "--budget", "0") == 2
    error = capsys.readouterr().err
    assert "the budget was too short for a preset, 5 cells did not fit" in error
    assert "no cell was measured, so nothing is kept" in error and not out.exists()
    assert list((tmp_path / "samples").iterdir()) == []
    assert generate(model, *arguments) == 0
    assert Preset.read(out).config.max_num_seqs == 2


def test_ctrl_c_keeps_what_was_measured_and_says_how_to_go_on(
    model: str, texts: Path, tmp_path: Path
) -> None:
    out, samples = tmp_path / "p.json", tmp_path / "s.jsonl"
    words = ["preset", "generate", model, *SMALL, "--repeats", "400", "--out", str(out)]
    words += ["--samples", str(samples), "--workload", f"w={texts}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "looped_spec", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if samples.exists() and samples.read_bytes().count(b"\n") > 3:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, errors
    kept = len(read_samples(samples).cells)
    assert kept >= 3 and f"{kept} cells are kept in {samples}" in errors
    assert "--resume goes on from there" in errors and not out.exists()
