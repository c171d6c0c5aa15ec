"""The training code of `demo:ouro`, at a size that trains in a second, and the bundled model."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import looped_spec_ouro.demo
import pytest
import torch
from looped_spec_ouro.adapter import OuroAdapter
from looped_spec_ouro.demo import data, evaluate, export, objective, train, vocabulary
from looped_spec_ouro.demo.loop import Trainer
from looped_spec_ouro.demo.settings import TrainSettings, demo_config
from looped_spec_ouro.model import OuroConfig
from safetensors.torch import load_file, save_file

from looped_spec.errors import ConfigError, ModelLoadError
from looped_spec.testing.checkpoints import checkpoint_tensors

BUNDLED = Path(looped_spec_ouro.demo.__file__).parent
BUNDLED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)

# bf16 keeps 8 bits of each weight; at this size that moves logits of order 1 by less than this.
BF16_TOLERANCE = 0.05

SETTINGS = TrainSettings(
    steps=3,
    gate_steps=2,
    tokens_per_step=64,
    row_tokens=16,
    warmup_steps=1,
    autocast=False,
    model=OuroConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        total_loops=4,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=32,
    ),
)


def write_text(folder: Path) -> dict[str, Path]:
    """Write a little text of each kind, the same every time."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    words = ["apple", "pear", "buys", "sells", "three", "seven", "and", "then", "gives", "away"]

    def sentence() -> str:
        return " ".join(rng.choice(words) for _ in range(12)) + "."

    items = [{"question": sentence(), "answer": f"{sentence()}\n#### {n}"} for n in range(60)]
    articles = [f" = Article {n} = \n \n {sentence()} \n \n = = Part = = \n" for n in range(20)]
    paths = {"gsm8k": folder / "g.jsonl", "wikitext": folder / "w.txt", "python": folder / "py"}
    paths["gsm8k"].write_text("".join(json.dumps(item) + "\n" for item in items))
    paths["wikitext"].write_text(" \n" + "".join(articles))
    (paths["python"] / "tests").mkdir(parents=True)
    (paths["python"] / "tests" / "test_it.py").write_text("assert False\n")
    for n in range(5):
        (paths["python"] / f"m{n}.py").write_text(
            f"def f{n}(x):\n    return '{sentence()}' * {n}\n"
        )
    return paths


def read_text(folder: Path) -> list[data.Source]:
    paths = write_text(folder)
    return [
        data.read_gsm8k(paths["gsm8k"]),
        data.read_wikitext(paths["wikitext"]),
        data.read_python(paths["python"]),
    ]


def logits(adapter: OuroAdapter, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        states = objective.states_after_each_loop(adapter, tokens)
        return torch.stack([adapter.module.lm_head(state) for state in states])


@pytest.fixture
def trained(tmp_path: Path) -> Trainer:
    return train.train(read_text(tmp_path), SETTINGS, tmp_path / "out", tmp_path / "state.pt")


def test_an_exported_folder_gives_the_logits_of_the_trained_model(
    trained: Trainer, tmp_path: Path
) -> None:
    loaded, tokenizer = export.load_demo(tmp_path / "out")
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        logits(loaded, tokens), logits(trained.adapter, tokens), atol=BF16_TOLERANCE, rtol=0
    )
    assert tokenizer.to_str() == trained.tokenizer.to_str()


def test_training_changes_the_body_first_and_only_the_gate_at_the_end(
    trained: Trainer, tmp_path: Path
) -> None:
    whole = trained.adapter.module.state_dict()
    body_only = Trainer(SETTINGS, trained.sampler, trained.tokenizer)
    initial = {name: value.clone() for name, value in body_only.adapter.module.state_dict().items()}
    for _ in range(SETTINGS.steps):
        body_only.train_step()
    for name, value in body_only.adapter.module.state_dict().items():
        is_gate = "early_exit_gate" in name
        assert torch.equal(value, initial[name]) == is_gate, name
        assert torch.equal(value, whole[name]) == (not is_gate), name


def test_the_same_seed_gives_the_same_weights(trained: Trainer, tmp_path: Path) -> None:
    again = train.train(
        read_text(tmp_path / "again"), SETTINGS, tmp_path / "out2", tmp_path / "state2.pt"
    )
    for name, value in trained.adapter.module.state_dict().items():
        assert torch.equal(value, again.adapter.module.state_dict()[name]), name


@pytest.mark.parametrize("stop_after", [2, 3, 4])
def test_a_stopped_run_continues_to_the_same_weights(
    trained: Trainer, tmp_path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step = Trainer.train_step

    def stop(self: Trainer) -> list[float]:
        if self.step == stop_after:
            raise KeyboardInterrupt
        return real_step(self)

    monkeypatch.setattr(Trainer, "train_step", stop)
    sources, out, state = read_text(tmp_path / "again"), tmp_path / "out2", tmp_path / "s2.pt"
    with pytest.raises(KeyboardInterrupt):
        train.train(sources, SETTINGS, out, state)
    assert export.load_demo(out)[0].config == SETTINGS.model
    monkeypatch.undo()
    resumed = train.train(sources, SETTINGS, out, state, resume=True)
    for name, value in trained.adapter.module.state_dict().items():
        assert torch.equal(value, resumed.adapter.module.state_dict()[name]), name


def test_a_state_of_other_settings_is_refused(trained: Trainer, tmp_path: Path) -> None:
    other = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="other settings or other text"):
        train.train(
            read_text(tmp_path / "b"), other, tmp_path / "o", tmp_path / "state.pt", resume=True
        )


def test_a_paused_run_may_be_made_shorter(trained: Trainer, tmp_path: Path) -> None:
    sources, out, state = read_text(tmp_path / "again"), tmp_path / "out2", tmp_path / "s2.pt"
    paused = train.train(sources, SETTINGS, out, state, pause_at=1)
    assert paused.step == 1
    shorter = dataclasses.replace(SETTINGS, steps=2, gate_steps=1)
    resumed = train.train(sources, shorter, out, state, resume=True)
    assert (resumed.step, resumed.tokens_seen) == (3, 2 * SETTINGS.tokens_per_step)


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


def test_long_rows_and_blended_weights_follow_the_settings() -> None:
    s = TrainSettings(steps=100, blend_from=0.4, blend_to=0.8)
    assert [s.row_length(step) for step in range(4)] == [256, 256, 256, 1024]
    assert s.loop_weights(0) == s.loop_weights(40) == s.first_weights
    assert s.loop_weights(80) == pytest.approx(s.last_weights)
    assert sum(s.loop_weights(60)) == pytest.approx(1.0)


@pytest.mark.parametrize("missing", ["gsm8k", "wikitext", "python"])
def test_a_wrong_path_is_one_line_and_exit_code_2(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_text(tmp_path) | {missing: tmp_path / "nowhere"}
    argv = ["--gsm8k", str(paths["gsm8k"]), "--wikitext", str(paths["wikitext"])]
    argv += ["--python-source", str(paths["python"]), "--out", str(tmp_path / "out")]
    assert train.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "nowhere" in error
    assert error.count("\n") == 1


def test_an_interrupted_run_ends_with_130_and_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupt)
    paths = write_text(tmp_path)
    argv = ["--gsm8k", str(paths["gsm8k"]), "--wikitext", str(paths["wikitext"])]
    argv += ["--python-source", str(paths["python"]), "--out", str(tmp_path / "out")]
    assert train.main(argv) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_evaluation_prints_a_table_and_writes_the_same_numbers(
    trained: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(tmp_path / "out"), "--gsm8k-test", str(tmp_path / "g.jsonl")]
    assert evaluate.main([*argv, "--json", str(tmp_path / "numbers.json")]) == 0
    rows = capsys.readouterr().out.splitlines()
    numbers = json.loads((tmp_path / "numbers.json").read_text())["texts"]["gsm8k test"]
    assert len(numbers["loss_per_loop"]) == 4
    assert numbers["agreement_with_last_loop"][-1] == 1.0
    assert rows[-1].startswith(f"| gsm8k test | {numbers['tokens']} | ")
    assert evaluate.main([str(tmp_path / "out")]) == 2
    assert "nothing to measure" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"holds no config\.json"),
        ("config.json", b"{", "is not valid JSON"),
        ("model.safetensors", None, "holds no weights"),
        ("model.safetensors", b"x", "damaged"),
        ("tokenizer.json", None, "no tokenizer"),
        ("tokenizer.json", b"{", r"damaged tokenizer\.json"),
        ("tokenizer.json", b"\xff", r"damaged tokenizer\.json"),
    ],
)
def test_a_folder_that_lacks_a_file_or_holds_a_damaged_one_is_a_clear_error(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    for file in BUNDLED_FILES:
        (tmp_path / file).write_bytes((BUNDLED / file).read_bytes())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        export.load_demo(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    for file in BUNDLED_FILES:
        (tmp_path / file).write_bytes((BUNDLED / file).read_bytes())
    weights = load_file(BUNDLED / "model.safetensors")
    # A row that broadcasts to the shape of the parameter.
    save_file({**weights, "model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"1 of another shape: model\.norm\.weight"):
        export.load_demo(tmp_path)


def test_an_export_of_the_bundled_model_has_the_same_bytes(tmp_path: Path) -> None:
    adapter, tokenizer = export.load_demo(BUNDLED)
    export.export_demo(tmp_path, adapter, tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(BUNDLED_FILES[:-1])
    for file in BUNDLED_FILES[:-1]:
        assert (tmp_path / file).read_bytes() == (BUNDLED / file).read_bytes(), file


def test_the_bundled_folder_is_small_and_holds_every_official_tensor() -> None:
    assert sum((BUNDLED / name).stat().st_size for name in BUNDLED_FILES) <= 4 * 2**20
    config = json.loads((BUNDLED / "config.json").read_text())
    adapter = OuroAdapter(config, {})
    assert adapter.config == demo_config()
    expected = {name: list(t.shape) for name, t in checkpoint_tensors(adapter).items()}
    assert expected["model.layers.0.self_attn.k_proj.weight"] == [320, 320]
    stored = load_file(BUNDLED / "model.safetensors")
    assert {name: list(t.shape) for name, t in stored.items()} == expected
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}


def test_each_loop_of_the_bundled_model_predicts_better_than_the_one_before() -> None:
    adapter, tokenizer = export.load_demo(BUNDLED)
    text = (
        "Question: Tom has 12 apples and buys 3 more bags with 4 apples in each bag. "
        "How many apples does Tom have now?\nAnswer: Tom buys 3*4=<<3*4=12>>12 apples.\n"
        "Now Tom has 12+12=<<12+12=24>>24 apples.\n#### 24"
    )
    result = evaluate.measure(adapter, tokenizer, [text])
    assert result.loss[0] > result.loss[3]
    assert 0.25 < result.agreement_with_last[0] < result.agreement_with_last[2] < 1.0
