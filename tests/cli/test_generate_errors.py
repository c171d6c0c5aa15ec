"""Whatever is wrong with a `generate` command is one line on stderr and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_runs import FakeTerminal, Generate, Outcome
from tiny_model import MAX_MODEL_LEN

from looped_spec.cli.model_loading import memory_errors
from looped_spec.errors import CapacityError

PROMPT = ("--prompt", "a")


def check(done: Outcome, *parts: str) -> None:
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("looped-spec: error: ")
    assert done.err.count("\n") == 1 and done.err.endswith("\n")
    for part in parts:
        assert part in done.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["there is no prompt", "--prompt TEXT", "--prompt-file"]),
        (["--prompt", ""], ["--prompt number 1 is empty"]),
        (["--prompt", "a", "b", ""], ["--prompt number 3 is empty"]),
        (["--prompt", "\udcff"], ["not valid Unicode"]),
        ([*PROMPT, "--top-p", 2], ["top_p must be in (0, 1], got 2"]),
        ([*PROMPT, "--temperature", -1], ["temperature must be at least 0, got -1"]),
        ([*PROMPT, "--temperature", "nan"], ["temperature must be at least 0"]),
        ([*PROMPT, "--max-tokens", 0], ["max_tokens must be at least 1, got 0"]),
        ([*PROMPT, "--max-tokens", "many"], ["--max-tokens", "'many'"]),
        ([*PROMPT, "--min-p", 2], ["min_p must be in [0, 1]"]),
        ([*PROMPT, "--stop", ""], ["stop must be non-empty"]),
        ([*PROMPT, "--seed", 2**63], ["seed must be between"]),
        ([*PROMPT, "--temprature", 0], ["'--temprature'", "did you mean '--temperature'?"]),
        ([*PROMPT, "--draft-loop=1"], ["unknown flag '--draft-loop'", "'--draft-loops'"]),
        (["extra", *PROMPT], ["unexpected argument 'extra'"]),
        ([*PROMPT, "--num-speculative-tokens", -1], ["must be between 0 and 64, got -1"]),
        ([*PROMPT, "--num-speculative-tokens", 1, "--draft-loops", 3], ["between 1 and", "= 2"]),
        ([*PROMPT, "--num-speculative-tokens", 1, "--draft-loops", 0], ["between 1 and", "got 0"]),
        ([*PROMPT, "--draft-loops", 1], ["needs num_speculative_tokens"]),
        ([*PROMPT, "--full-loops", 9], ["full_loops must be between 1 and 3", "got 9"]),
        ([*PROMPT, "--max-model-len", 9999], ["max_model_len must be at most"]),
        ([*PROMPT, "--device", "abacus"], ["device must be"]),
        ([*PROMPT, "--adapter-option", "x"], ["KEY=VALUE"]),
        ([*PROMPT, "--adapter-option", "x=1", "--adapter-option", "x=2"], ["x is given twice"]),
        ([*PROMPT, "--adapter-option", "nonsense=1"], ["nonsense"]),
        ([*PROMPT, "--compare", "--repeats", 0], ["repeats must be at least 1"]),
        ([*PROMPT, "--repeats", 2], ["--repeats", "--compare"]),
        (
            [*PROMPT, "--compare", "--num-speculative-tokens", 0],
            ["--compare", "set --num-speculative-tokens to 1 or more"],
        ),
        ([*PROMPT, "--compare", "--full-loops", 1], ["set --num-speculative-tokens"]),
        (["--prompt", "the cat " * MAX_MODEL_LEN], ["leaves no room", str(MAX_MODEL_LEN)]),
        ([*PROMPT, "--json", "/dev/full"], ["cannot write '/dev/full': No space left"]),
        ([*PROMPT, "--json", "/nowhere/at/all.json"], ["folder '/nowhere/at' does not exist"]),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[object], parts: list[str], generate: Generate
) -> None:
    done = generate(*arguments)
    if "/dev/full" in arguments:  # The text was shown before the disk was found to be full.
        done = Outcome(done.code, "", done.err)
    check(done, *parts)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("empty.txt", b"", ["holds no prompt"]),
        ("blank.jsonl", b"\n  \n", ["holds no prompt"]),
        ("latin.txt", b"ok\nok\n\xff\n", ["not UTF-8", "line 3"]),
        ("half.jsonl", b'{"prompt": "a"}\n{"prompt":\n', ["line 2", "not valid JSON"]),
        ("list.jsonl", b'{"prompt": "a"}\n\n["b"]\n', ["line 3", '{"prompt": TEXT}']),
        ("number.jsonl", b'{"prompt": 1}\n', ["line 1", '{"prompt": TEXT}']),
        ("none.jsonl", b'{"prompt": ""}\n', ["line 1", "is empty"]),
        ("key.jsonl", b'{"prompt": "a", "id": 1}\n', ["line 1", "unknown key", "'id'"]),
        ("both.jsonl", b'{"prompt": "a", "prompt_token_ids": [1]}\n', ["line 1", "must be an obj"]),
        ("bool.jsonl", b'{"prompt_token_ids": [1, true]}\n', ["line 1", "prompt_token_ids"]),
        ("ids.jsonl", b'{"prompt_token_ids": 1}\n', ["line 1", "prompt_token_ids"]),
        ("no_ids.jsonl", b'{"prompt_token_ids": []}\n', ["line 1", "at least one token"]),
        ("low.jsonl", b'{"prompt_token_ids": [-1]}\n', ["line 1", "at least 0, got -1"]),
        ("high.jsonl", b'\n{"prompt_token_ids": [9, 300]}', ["line 2", "0 and 299, got 300"]),
        ("long.jsonl", b'{"prompt_token_ids": [' + b"1" * 5000 + b"]}", ["line 1", "valid JSON"]),
        ("half.JSONL", b'{"prompt": "\\ud83d"}\n', ["line 1", "not valid Unicode"]),
        ("deep.jsonl", b"[" * 100_000, ["line 1", "not valid JSON"]),
    ],
)
def test_a_wrong_prompt_file_is_one_line(
    name: str, content: bytes, parts: list[str], generate: Generate, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    check(generate("--prompt-file", tmp_path / name), name, *parts)


@pytest.mark.parametrize("flag", [("--exit-threshold", 0.5), ("--exit-criterion", "gate")])
@pytest.mark.parametrize("count", [(), ("--num-speculative-tokens", 2)])
def test_early_exit_cannot_be_compared(
    flag: tuple[object, ...], count: tuple[object, ...], generate: Generate
) -> None:
    done = generate(*PROMPT, "--compare", *flag, *count, model="nosuch")
    check(done, "early exit is neither", "leave out --compare")
    assert "--num-speculative-tokens" not in done.err


def test_a_prompt_file_that_cannot_be_read_is_one_line(generate: Generate, tmp_path: Path) -> None:
    check(generate("--prompt-file", tmp_path / "gone"), "gone", "cannot be read: No such file")
    check(generate("--prompt-file", tmp_path), "cannot be read: Is a directory")


@pytest.mark.parametrize("stdin", [FakeTerminal(), None])
def test_a_terminal_as_stdin_is_not_waited_for(
    stdin: object, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    check(generate("--prompt-file", "-"), "stdin holds no prompts", "--prompt TEXT")
    check(generate(), "there is no prompt")


def test_a_prompt_before_the_model_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    from looped_spec.cli import main as cli

    code = cli.main(["generate", "--prompt", "a", str(tiny_model)])
    check(Outcome(code, *capsys.readouterr()), "MODEL", "come first")


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def corrupt(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (truncate, "model.safetensors"),
        (corrupt, "model.safetensors"),
        (unknown_type, "no_such_type"),
        (no_config, "config.json"),
        (bad_config, "config.json"),
        (no_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_model_is_one_line(
    damage: Callable[[Path], None],
    part: str,
    generate: Generate,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    check(generate(*PROMPT, model=folder), part)


@pytest.mark.parametrize("model", ["", "nosuch", "./nosuch", "a" * 5000, "demo:", "demo:nosuch"])
def test_a_model_that_is_not_there_is_one_line(model: str, generate: Generate) -> None:
    check(generate(*PROMPT, model=model))


def test_an_output_that_is_a_folder_is_refused_before_the_model_is_loaded(
    generate: Generate, tmp_path: Path
) -> None:
    check(generate(*PROMPT, "--json", tmp_path, model="nosuch"), "it is a folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_folder_without_permission_is_refused(generate: Generate, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    check(generate(*PROMPT, "--json", tmp_path / "x", model="nosuch"), "permission denied")


def test_too_little_memory_names_what_to_lower() -> None:
    with pytest.raises(CapacityError, match="--max-num-seqs"), memory_errors():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(CapacityError, match="MemoryError"), memory_errors():
        raise MemoryError
    with pytest.raises(RuntimeError, match="ours"), memory_errors():
        raise RuntimeError("ours")


def test_prompts_without_end_are_not_read_to_the_end(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(generate("--prompt-file", "/dev/zero"), "'/dev/zero' is longer than 64 MiB")
    with open("/dev/zero") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        check(generate("--prompt-file", "-"), "stdin is longer than 64 MiB")


def test_half_a_character_in_an_error_is_escaped(
    generate: Generate, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "config.json").write_text('{"model_type": "\\ud800"}')
    check(generate(*PROMPT, model=folder), "\\ud800")
