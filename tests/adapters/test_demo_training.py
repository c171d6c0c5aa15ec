"""The training code of the demos: every family's recipe, at a size that trains in a second."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_recipes import CASES, NANBEIGE, OURO, Case
from demo_texts import read_text, write_text

from looped_spec.demos import evaluate, train, vocabulary
from looped_spec.demos.depths import states_after_each_loop
from looped_spec.demos.export import load_demo
from looped_spec.demos.trainer import Trainer
from looped_spec.errors import ConfigError

# bf16 keeps 8 bits of each weight; at this size that moves logits of order 1 by less than this.
BF16_TOLERANCE = 0.1


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture
def trained(case: Case, tmp_path: Path) -> Trainer:
    return case.train(read_text(tmp_path), tmp_path / "out", tmp_path / "state.pt")


def logits(adapter: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        loops = adapter.geometry.default_full_loops
        states, ctx = states_after_each_loop(adapter, tokens, loops)
        return torch.stack([adapter.readout(state, ctx) for state in states])


def test_an_exported_folder_gives_the_logits_of_the_trained_model(
    case: Case, trained: Trainer, tmp_path: Path
) -> None:
    demo = load_demo(tmp_path / "out", case.recipe.adapter_class)
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        logits(demo.adapter, tokens), logits(trained.adapter, tokens), atol=BF16_TOLERANCE, rtol=0
    )
    assert demo.tokenizer.to_str() == trained.tokenizer.to_str()
    assert demo.config == case.settings.model


def test_the_same_seed_gives_the_same_weights(case: Case, trained: Trainer, tmp_path: Path) -> None:
    again = case.train(read_text(tmp_path / "again"), tmp_path / "out2", tmp_path / "state2.pt")
    for name, value in trained.adapter.module.state_dict().items():
        assert torch.equal(value, again.adapter.module.state_dict()[name]), name


def test_training_moves_every_weight_and_another_seed_gives_others(
    case: Case, trained: Trainer
) -> None:
    initial = case.recipe.build(case.settings).module.state_dict()
    other = case.recipe.build(dataclasses.replace(case.settings, seed=1)).module.state_dict()
    for name, value in trained.adapter.module.state_dict().items():
        assert not torch.equal(value, initial[name]), name
    drawn = [n for n, p in initial.items() if p.ndim == 2 and "early_exit_gate" not in n]
    assert len(drawn) > 3
    assert not any(torch.equal(initial[name], other[name]) for name in drawn)


@pytest.mark.parametrize("stop_after", [2, 3, 4])
def test_a_stopped_run_continues_to_the_same_weights(
    case: Case,
    trained: Trainer,
    tmp_path: Path,
    stop_after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_step = Trainer.train_step

    def stop(self: Trainer) -> list[float]:
        if self.step == stop_after:
            raise KeyboardInterrupt
        return real_step(self)

    monkeypatch.setattr(Trainer, "train_step", stop)
    sources, out, state = read_text(tmp_path / "again"), tmp_path / "out2", tmp_path / "s2.pt"
    with pytest.raises(KeyboardInterrupt):
        case.train(sources, out, state)
    assert load_demo(out, case.recipe.adapter_class).config == case.settings.model
    monkeypatch.undo()
    resumed = case.train(sources, out, state, resume=True)
    for name, value in trained.adapter.module.state_dict().items():
        assert torch.equal(value, resumed.adapter.module.state_dict()[name]), name


def test_a_state_of_other_settings_is_refused(case: Case, trained: Trainer, tmp_path: Path) -> None:
    other = dataclasses.replace(case.settings, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="other settings or other text"):
        case.train(
            read_text(tmp_path / "b"),
            tmp_path / "o",
            tmp_path / "state.pt",
            settings=other,
            resume=True,
        )


def test_a_paused_run_may_be_made_shorter(case: Case, tmp_path: Path) -> None:
    sources, out, state = read_text(tmp_path / "text"), tmp_path / "out", tmp_path / "s.pt"
    assert case.train(sources, out, state, pause_at=1).step == 1
    shorter = dataclasses.replace(case.settings, steps=2)
    resumed = case.train(sources, out, state, settings=shorter, resume=True)
    assert (resumed.step, resumed.tokens_seen) == (
        resumed.total_steps,
        2 * case.settings.tokens_per_step,
    )


def test_the_tokenizer_loads_in_transformers_and_keeps_any_text(
    trained: Trainer, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert loaded.convert_tokens_to_ids(list(vocabulary.SPECIAL_TOKENS)) == [0, 1, 2]
    assert (loaded.eos_token_id, loaded.bos_token_id, len(loaded)) == (0, None, 300)
    for text in ("", " a  b\n\n\tc ", "été 日本 🙂 \x00 12345", "def f(x):\n        return x , y"):
        assert loaded.decode(loaded.encode(text)) == text
    chat = loaded.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_held_out_documents_and_tests_are_not_trained_on(tmp_path: Path) -> None:
    for source in read_text(tmp_path):
        kept, trained_on = set(source.held_out()), set(source.train())
        assert not kept & trained_on
        assert kept | trained_on == set(source.documents)
        assert not any("assert False" in text for text in source.documents)
        assert str(tmp_path) not in json.dumps(source.provenance)


def test_long_rows_follow_the_settings() -> None:
    settings = dataclasses.replace(OURO.recipe.defaults, steps=100)
    assert [settings.row_length(step) for step in range(4)] == [256, 256, 256, 1024]


@pytest.mark.parametrize("missing", ["gsm8k", "wikitext", "python"])
def test_a_wrong_path_is_one_line_and_exit_code_2(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_text(tmp_path) | {missing: tmp_path / "nowhere"}
    argv = ["--gsm8k", str(paths["gsm8k"]), "--wikitext", str(paths["wikitext"])]
    argv += ["--python-source", str(paths["python"]), "--out", str(tmp_path / "out")]
    assert train.main(NANBEIGE.recipe, argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "nowhere" in error
    assert error.count("\n") == 1


def test_an_interrupted_run_ends_with_130_and_says_how_to_continue(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupt)
    paths = write_text(tmp_path)
    argv = ["--gsm8k", str(paths["gsm8k"]), "--wikitext", str(paths["wikitext"])]
    argv += ["--python-source", str(paths["python"]), "--out", str(tmp_path / "out")]
    assert train.main(case.recipe, argv) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_evaluation_prints_a_table_and_writes_the_same_numbers(
    case: Case, trained: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(tmp_path / "out"), "--gsm8k-test", str(tmp_path / "g.jsonl")]
    assert evaluate.main(case.recipe, [*argv, "--json", str(tmp_path / "numbers.json")]) == 0
    rows = capsys.readouterr().out.splitlines()
    numbers = json.loads((tmp_path / "numbers.json").read_text())["texts"]["gsm8k test"]
    loops = trained.adapter.geometry.default_full_loops
    assert len(numbers["loss_per_loop"]) == loops
    assert numbers["agreement_with_full_depth"][-1] == 1.0
    assert rows[-1].startswith(f"| gsm8k test | {numbers['tokens']} | ")
    assert evaluate.main(case.recipe, [str(tmp_path / "out")]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def test_evaluation_looks_deeper_only_where_the_model_can(
    case: Case, trained: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    geometry = trained.adapter.geometry
    argv = [str(tmp_path / "out"), "--gsm8k-test", str(tmp_path / "g.jsonl"), "--loops"]
    deepest = geometry.max_full_loops
    assert evaluate.main(case.recipe, [*argv, str(deepest), "--max-tokens", "20"]) == 0
    assert f"loss {deepest} |" in capsys.readouterr().out
    assert evaluate.main(case.recipe, [*argv, str(deepest + 1)]) == 2
    assert "full_loops must be between 1 and" in capsys.readouterr().err
