"""`looped-spec generate`: prompts in, texts out, in the right order and on the right stream."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import FakeTerminal, Generate
from processes import PATIENCE_SECONDS

from looped_spec.cli import console, engine_flags, sampling_flags
from looped_spec.cli import main as cli
from looped_spec.options import EngineOptions


def outputs(generate: Generate, *arguments: object) -> list[dict[str, Any]]:
    done = generate(*arguments, "--max-tokens", 12, "--json")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["outputs"]
    return found


def texts(generate: Generate, *arguments: object) -> list[str]:
    return [output["text"] for output in outputs(generate, *arguments)]


def test_text_goes_to_stdout_and_one_line_of_summary_to_stderr(generate: Generate) -> None:
    done = generate("--prompt", "the cat", "--max-tokens", 12)
    assert done.code == 0
    assert done.out == texts(generate, "--prompt", "the cat")[0] + "\n"
    assert done.err.count("\n") == 1
    assert "tokens/s" in done.err


@pytest.mark.parametrize("count", [0, 2])
def test_the_summary_says_what_speculation_did(count: int, generate: Generate) -> None:
    done = generate("--prompt", "a", "--max-tokens", 9, "--num-speculative-tokens", count)
    assert done.err.startswith("looped-spec: 9 tokens in ")
    assert ("speculation off" in done.err) == (count == 0)
    assert ("K=2 d=" in done.err and "draft acceptance" in done.err) == (count == 2)


def test_several_prompts_come_in_order_with_headers(generate: Generate) -> None:
    alone = [texts(generate, "--prompt", prompt)[0] for prompt in ("one", "two")]
    done = generate("--prompt", "one", "two", "--max-tokens", 12)
    assert done.out == f"=== 1 of 2 ===\n{alone[0]}\n\n=== 2 of 2 ===\n{alone[1]}\n"


def test_prompts_of_flags_precede_those_of_the_file(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "more.txt"
    file.write_bytes("\ufeffthrée\r\n\n  \nfour\n".encode())
    done = generate("--prompt", "a", "b", "--prompt", "c", "--prompt-file", file, "--json")
    assert json.loads(done.out)["prompts"] == ["a", "b", "c", "thrée", "four"]


def test_a_jsonl_file_has_an_object_a_line(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "two\\nlines"}\n\n{"prompt": " b "}')
    done = generate("--prompt-file", file, "--max-tokens", 2, "--json")
    assert json.loads(done.out)["prompts"] == ["two\nlines", " b "]


def test_prompts_are_read_from_stdin(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\ny\n")))
    done = generate("--prompt-file", "-", "--max-tokens", 2, "--json")
    assert json.loads(done.out)["prompts"] == ["x", "y"]


@pytest.mark.parametrize("extra", [(), ("--temperature", 1), ("--stop", "e", "--seed", 3)])
def test_streaming_shows_the_text_that_waiting_gives(
    extra: tuple[object, ...],
    generate: Generate,
    terminal: Callable[[], FakeTerminal],
    tmp_path: Path,
) -> None:
    arguments = ("--prompt", "the cat", "--max-tokens", 30, *extra)
    waited = json.loads(generate(*arguments, "--json").out)["outputs"]
    stream = terminal()
    assert generate(*arguments, "--json", tmp_path / "o.json").code == 0
    assert json.loads((tmp_path / "o.json").read_text())["outputs"] == waited
    shown = waited[0]["text"].translate(console._CONTROLS)
    assert stream.getvalue() == shown + "\n"
    assert len(stream.writes) > 2 or len(shown) < 3


def test_a_terminal_is_not_sent_control_characters(terminal: Callable[[], FakeTerminal]) -> None:
    stream = terminal()
    console.write("a\x1b[2J\tb\r\n\x9b")
    assert stream.getvalue() == "a\\x1b[2J\tb\\x0d\n\\x9b"


def test_an_encoding_that_lacks_a_character_gets_an_escape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    console.write("é\n")
    assert buffer.getvalue() == b"\\xe9\n"


def test_speculation_changes_no_text(generate: Generate) -> None:
    arguments = ("--prompt", "a", "the mat", "--temperature", 0.9)
    plain = outputs(generate, *arguments, "--num-speculative-tokens", 0)
    speculation = ("--num-speculative-tokens", 3, "--draft-loops", 1)
    assert outputs(generate, *arguments, *speculation) == plain


def test_each_prompt_has_a_seed_of_its_own(generate: Generate) -> None:
    both = texts(generate, "--prompt", "a", "a", "--temperature", 1, "--seed", 5)
    assert both[0] != both[1]
    assert texts(generate, "--prompt", "a", "--temperature", 1, "--seed", 6) == both[1:]


@pytest.mark.parametrize(("temperature", "seeds"), [(0.0, [5, 5, 5]), (0.3, [5, 6, 7])])
def test_greedy_requests_share_a_seed_and_others_do_not(
    temperature: float, seeds: list[int]
) -> None:
    parser = argparse.ArgumentParser()
    sampling_flags.add_sampling_flags(parser)
    args = parser.parse_args(["--temperature", str(temperature)])
    args.seed = 5
    assert [params.seed for params in sampling_flags.sampling_params(args, 3)] == seeds


def test_token_ids_are_prompts_as_their_text_is(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_token_ids": [72, 73]}\n{"prompt": "b"}\n')
    arguments = ("--prompt-file", file, "--max-tokens", 3)
    assert json.loads(generate(*arguments, "--json").out)["prompts"] == [[72, 73], "b"]
    compared = generate(
        *arguments, "--compare", "--repeats", 1, "--num-speculative-tokens", 1, "--draft-loops", 1
    )
    assert "--- prompt ---\n[72, 73]\n--- text ---\n" in compared.out


def test_a_model_without_a_tokenizer_takes_and_shows_token_ids(
    generate: Generate, tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_token_ids": [72, 73]}\n')
    arguments = ("--prompt-file", file, "--max-tokens", 3)
    done = generate(*arguments, "--json", tmp_path / "o.json", model=model)
    (output,) = json.loads((tmp_path / "o.json").read_text())["outputs"]
    assert done.out == f"{output['token_ids']}\n"
    done = generate("--prompt", "a", *arguments, model=model)
    assert done.code == 2
    assert "--prompt number 1 is a text" in done.err and "prompt_token_ids" in done.err


def test_early_exit_is_reported_as_such(generate: Generate) -> None:
    arguments = ("--prompt", "a", "--max-tokens", 9, "--exit-threshold", 0.5, "--min-loops", 2)
    err = generate(*arguments).err
    assert "early exit by " in err and " at 0.5: " in err and "loops per token" in err
    assert "speculation" not in err
    document = json.loads(generate(*arguments, "--json").out)
    assert not document.keys() & {"plain", "speculative"}
    early_exit = document["early_exit"]
    assert 2 <= early_exit["loops_per_token"] <= 3
    assert early_exit["criterion"] in err
    found = [early_exit[key] for key in ("threshold", "min_loops", "max_loops")]
    assert found == [0.5, 2, 3]
    assert early_exit["tokens_per_second"] > 0


def test_verbose_logs_the_model_its_loops_and_its_cache(generate: Generate) -> None:
    arguments = ("--prompt", "a", "--max-tokens", 2)
    assert "cache of" not in generate(*arguments).err
    logged = generate(*arguments, "--verbose").err
    assert "tiny: 3 loops, cache of" in logged
    assert "cache of" not in generate(*arguments).err


def test_a_bar_shows_progress_on_a_terminal_only(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = FakeTerminal()
    assert "it/s" not in generate("--prompt", "a", "b", "--max-tokens", 2).err
    monkeypatch.setattr(sys, "stderr", shown)
    done = generate("--prompt", "a", "b", "--max-tokens", 2)
    assert "2/2" in shown.getvalue()
    assert "2/2" not in done.out


def test_every_option_of_the_engine_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(EngineOptions):
        name = field.name.replace("_", "-")
        name = name.removesuffix("s") if name == "adapter-options" else name
        assert re.search(rf"--{name}[ ,]", shown)
    assert "(default: 128)" in shown
    assert shown.count("\n  looped-spec generate ") >= 4


@pytest.mark.parametrize("kind", ["bool", "list[int]", "int | str", "Path"])
def test_an_option_that_no_flag_can_be_made_of_is_noticed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = dataclasses.make_dataclass(
        "Options", [("novel", kind, dataclasses.field(default=None, metadata={"help": ""}))],
        bases=(EngineOptions,), frozen=True,
    )  # fmt: skip
    monkeypatch.setattr(engine_flags, "EngineOptions", new)
    with pytest.raises(TypeError, match="option novel has type"):
        engine_flags.add_engine_flags(argparse.ArgumentParser())


def test_adapter_options_are_json_or_text() -> None:
    from looped_spec.cli.engine_flags import read_adapter_options

    assert read_adapter_options(["a=1", "b=true", "c=x=y", 'd="1"']) == {
        "a": 1,
        "b": True,
        "c": "x=y",
        "d": "1",
    }


def test_help_leaves_torch_out() -> None:
    code = (
        "import sys; from looped_spec.cli.main import main\n"
        "code = main(['generate', '--help']); print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.stderr == "0 False\n"
