"""Huginn checkpoints: the tied head, the stored rotary table, padded rows of the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huginn_models import FOLDERS, ZEROS, read_config
from looped_spec_huginn.adapter import HuginnAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from looped_spec import LLM, SamplingParams
from looped_spec.errors import ModelLoadError
from looped_spec.loading import load_adapter
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.oracle import dense_logits

TOKENS = [3, 1, 4, 1, 5]
EMBEDDING = "transformer.wte.weight"


def tensors() -> dict[str, Tensor]:
    """Return the tensors of a golden checkpoint; it stores `freqs_cis` and no head."""
    return dict(load_file(FOLDERS[1] / "model.safetensors"))


def write(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    """Write a checkpoint of the golden sizes with some values changed."""
    (folder / "config.json").write_text(json.dumps(read_config(FOLDERS[1], **changes)))
    save_file(weights, folder / "model.safetensors")
    return folder


def logits_of(folder: Path) -> Tensor:
    """Return logits [T, V] of a short sequence after two loops from zeros."""
    return dense_logits(load_adapter(folder, adapter_options=ZEROS).adapter, TOKENS, 2)


def test_a_tied_head_may_be_absent_or_equal_but_not_different(tmp_path: Path) -> None:
    expected = logits_of(FOLDERS[1])
    weights = tensors()
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights[EMBEDDING].clone()
    assert torch.equal(logits_of(write(tmp_path, weights)), expected)
    weights["lm_head.weight"] += 1.0
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*ties the two"):
        logits_of(write(tmp_path, weights))


def test_a_head_that_is_not_tied_is_its_own(tmp_path: Path) -> None:
    weights = tensors()
    with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight"):
        logits_of(write(tmp_path, weights, tie_embeddings=False))
    weights["lm_head.weight"] = 2.0 * weights[EMBEDDING]
    logits = logits_of(write(tmp_path, weights, tie_embeddings=False))
    torch.testing.assert_close(logits, 2.0 * logits_of(FOLDERS[1]))


def test_the_stored_rotary_table_is_ignored_and_may_be_absent(tmp_path: Path) -> None:
    weights = tensors()
    weights["freqs_cis"] = torch.zeros(3)
    assert torch.equal(logits_of(write(tmp_path, weights)), logits_of(FOLDERS[1]))
    del weights["freqs_cis"]
    assert torch.equal(logits_of(write(tmp_path, weights)), logits_of(FOLDERS[1]))


def test_any_other_tensor_is_refused(tmp_path: Path) -> None:
    weights = {**tensors(), "transformer.extra.weight": torch.zeros(2)}
    with pytest.raises(ModelLoadError, match=r"unexpected: transformer\.extra\.weight"):
        logits_of(write(tmp_path, weights))


def test_rows_that_pad_the_vocabulary_are_never_chosen(tmp_path: Path) -> None:
    weights = tensors()
    expected = logits_of(FOLDERS[1])[:, :100]
    weights[EMBEDDING][100:] *= 1000.0  # would win every argmax, on one side or the other
    folder = write(tmp_path, weights, vocab_size=100)
    assert torch.equal(logits_of(folder), expected)
    params = SamplingParams(temperature=2.0, max_tokens=40)
    output = LLM(str(folder)).generate([TOKENS], params, use_tqdm=False)[0].outputs[0]
    assert max(output.token_ids) < 100


def test_a_checkpoint_without_offsets_of_queries_and_keys_runs(tmp_path: Path) -> None:
    without = {name: t for name, t in tensors().items() if not name.endswith("qk_bias")}
    zeroed = {
        name: torch.zeros_like(t) if name.endswith("qk_bias") else t
        for name, t in tensors().items()
    }
    expected = logits_of(write(tmp_path, zeroed))
    assert torch.equal(logits_of(write(tmp_path, without, qk_bias=False)), expected)
    assert not torch.allclose(expected, logits_of(FOLDERS[1]), atol=1e-3)


def test_half_precision_stays_near_single_precision() -> None:
    adapter = load_adapter(FOLDERS[0], adapter_options=ZEROS, dtype="bfloat16").adapter
    assert isinstance(adapter, HuginnAdapter)
    ctx = DenseContext(1, len(TOKENS), 8)
    state = adapter.prelude(torch.tensor([TOKENS]), ctx)
    for index in range(8):
        state = adapter.loop(state, index, ctx)
    assert {part.dtype for part in state} == {torch.bfloat16}
    exact = load_adapter(FOLDERS[0], adapter_options=ZEROS).adapter
    expected = dense_logits(exact, TOKENS, 8)
    error = (adapter.readout(state, ctx)[0].float() - expected).abs().max()
    assert float(error) < 0.1 * float(expected.abs().max())  # 8 bits of mantissa, 36 blocks deep


def test_dummy_weights_run() -> None:
    llm = LLM(str(FOLDERS[1]), load_format="dummy")
    output = llm.generate([TOKENS], SamplingParams(max_tokens=4), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4
