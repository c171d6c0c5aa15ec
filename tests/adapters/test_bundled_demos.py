"""The demos as they are bundled: small, whole, in the official layout, and learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from demo_recipes import CASES, HUGINN, NANBEIGE, OURO, Case
from safetensors.torch import load_file, save_file

from looped_spec import LLM, SamplingParams
from looped_spec.demos.evaluate import measure
from looped_spec.demos.export import export_demo, load_demo
from looped_spec.errors import ModelLoadError
from looped_spec.testing.checkpoints import checkpoint_tensors

BUNDLED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)
TEXT = (
    "Question: Tom has 12 apples and buys 3 more bags with 4 apples in each bag. "
    "How many apples does Tom have now?\nAnswer: Tom buys 3*4=<<3*4=12>>12 apples.\n"
    "Now Tom has 12+12=<<12+12=24>>24 apples.\n#### 24"
)
PROMPTS = ["Question: Tom has 3 apples and buys 4 more.", "def main(", "The river rises in"]


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


def copy_bundled(case: Case, folder: Path) -> None:
    for file in BUNDLED_FILES:
        (folder / file).write_bytes((case.recipe.folder / file).read_bytes())


def test_the_folder_is_small_and_holds_every_official_tensor(case: Case) -> None:
    folder = case.recipe.folder
    assert sum((folder / name).stat().st_size for name in BUNDLED_FILES) <= 4 * 2**20
    config = json.loads((folder / "config.json").read_text())
    assert config == case.recipe.defaults.model
    adapter = case.recipe.adapter_class(config, {})
    expected = {name: list(t.shape) for name, t in checkpoint_tensors(adapter).items()}
    for name in adapter.optional_checkpoint_tensors():
        expected.pop(name, None)
    stored = load_file(folder / "model.safetensors")
    assert {name: list(t.shape) for name, t in stored.items()} == expected
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}


def test_some_tensors_have_the_official_names_and_shapes() -> None:
    shapes = {
        case.recipe.name: {
            name: list(t.shape)
            for name, t in load_file(case.recipe.folder / "model.safetensors").items()
        }
        for case in CASES.values()
    }
    assert shapes["ouro"]["model.layers.0.self_attn.k_proj.weight"] == [320, 320]
    assert shapes["huginn"]["transformer.adapter.weight"] == [224, 448]
    assert shapes["huginn"]["transformer.core_block.0.attn.Wqkv.weight"] == [672, 224]
    assert shapes["huginn"]["transformer.core_block.0.attn.qk_bias"] == [2, 1, 7, 32]
    assert "lm_head.weight" not in shapes["huginn"]
    assert shapes["nanbeige"]["model.layers.1.self_attn.q_proj.weight"] == [384, 224]
    assert shapes["nanbeige"]["model.layers.1.self_attn.k_proj.weight"] == [128, 224]


def test_an_export_of_the_bundled_model_has_the_same_bytes(case: Case, tmp_path: Path) -> None:
    export_demo(tmp_path, load_demo(case.recipe.folder, case.recipe.adapter_class))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(BUNDLED_FILES[:-1])
    for file in BUNDLED_FILES[:-1]:
        assert (tmp_path / file).read_bytes() == (case.recipe.folder / file).read_bytes(), file


def test_each_loop_of_ouro_predicts_better_than_the_one_before() -> None:
    result = measure(load_demo(OURO.recipe.folder, OURO.recipe.adapter_class), [TEXT])
    assert result.loss[0] > result.loss[3]
    assert 0.25 < result.agreement_with_full[0] < result.agreement_with_full[2] < 1.0


def test_the_loops_of_huginn_refine_a_coarse_guess_and_settle() -> None:
    demo = load_demo(HUGINN.recipe.folder, HUGINN.recipe.adapter_class)
    result = measure(demo, [TEXT], loops=16)
    assert result.loss[0] > result.loss[1] > result.loss[7]
    first, second, fourth = (result.agreement_with_full[loops - 1] for loops in (1, 2, 4))
    assert 1 / 8 < first < second < fourth
    # Depths beyond the mean of training are in its distribution too: nothing falls apart there.
    assert result.loss[15] < result.loss[7] + 0.05
    assert result.agreement_with_full[15] > 0.9


def test_the_first_loop_of_nanbeige_was_not_taught_to_predict() -> None:
    result = measure(load_demo(NANBEIGE.recipe.folder, NANBEIGE.recipe.adapter_class), [TEXT])
    assert result.loss[0] > result.loss[1] + 0.2
    assert result.agreement_with_full[0] < 0.75


def test_speculation_is_off_for_nanbeige_until_it_or_a_preset_asks_for_it() -> None:
    llm = LLM("demo:nanbeige", max_num_seqs=1, preset="none")
    assert llm.speculation.num_speculative_tokens == 0


@pytest.mark.parametrize(("k", "d"), [(1, 1), (3, 1), (4, -1)])
def test_a_demo_writes_the_same_text_with_and_without_speculation(
    case: Case, k: int, d: int
) -> None:
    """Greedy and sampled; in fp32 on these texts no two tokens are close enough to be swapped."""
    llm = LLM(f"demo:{case.recipe.name}", dtype="float32", max_num_seqs=4, max_model_len=64)
    depth = d if d > 0 else llm.full_loops - 1
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=5, ignore_eos=True)
        llm.set_speculation(0)
        plain = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.set_speculation(k, depth)
        drafted = llm.generate(PROMPTS, params, use_tqdm=False)
        for a, b in zip(plain, drafted, strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert sum(each.metrics.num_draft_tokens for each in drafted) > 0


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
    copy_bundled(OURO, tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load_demo(tmp_path, OURO.recipe.adapter_class)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    copy_bundled(OURO, tmp_path)
    weights = load_file(OURO.recipe.folder / "model.safetensors")
    # A row that broadcasts to the shape of the parameter.
    save_file({**weights, "model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"1 of another shape: model\.norm\.weight"):
        load_demo(tmp_path, OURO.recipe.adapter_class)


def test_a_demo_of_another_family_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="holds no model of OuroAdapter"):
        load_demo(HUGINN.recipe.folder, OURO.recipe.adapter_class)
