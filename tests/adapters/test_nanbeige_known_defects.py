"""Defects that users met in other implementations of Nanbeige, and that this one must not have.

The numbers are those of the project's list of such reports; each test names the symptom.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden import TOLERANCE, golden_prompts
from looped_spec_nanbeige.adapter import NanbeigeAdapter
from nanbeige_models import RELEASE, TINY, plain_logits, tiny_config, write_tiny

from looped_spec import LLM, SamplingParams
from looped_spec.adapter import ModelAdapter
from looped_spec.loading import load_adapter
from looped_spec.runtime.attention import PagedContext, PagedRows, SdpaBackend
from looped_spec.runtime.kv_cache import KVPool, bytes_per_block
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits

TOKENS = golden_prompts(TINY)[0].sequence("greedy_full_depth")[:24]


def _tiny(dtype: str = "float32") -> NanbeigeAdapter:
    adapter = load_adapter(TINY, dtype=dtype).adapter
    assert isinstance(adapter, NanbeigeAdapter)
    return adapter


def _release() -> NanbeigeAdapter:
    with torch.device("meta"):
        return NanbeigeAdapter(RELEASE, {})


class PlaneRecorder(DenseContext):
    """Notes the planes, and the shapes of queries and keys."""

    def __init__(self, num_tokens: int, loops: int) -> None:
        super().__init__(1, num_tokens, loops)
        self.planes: list[int] = []
        self.shapes: set[tuple[torch.Size, torch.Size]] = set()

    def attend(
        self,
        plane: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> torch.Tensor:
        self.planes.append(plane)
        self.shapes.add((q.shape[2:], k.shape[2:]))
        return super().attend(plane, q, k, v, scale=scale)


@torch.no_grad()
def _recorded(adapter: ModelAdapter, loops: int) -> PlaneRecorder:
    ctx = PlaneRecorder(3, loops)
    state = adapter.prelude(torch.tensor([[1, 2, 3]]), ctx)
    for index in range(loops):
        state = adapter.loop(state, index, ctx)
    return ctx


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_16_frequencies_are_neither_zero_nor_rounded_after_loading_from_meta(dtype: str) -> None:
    inv_freq = _tiny(dtype).module.angles.inv_freq(torch.device("cpu"))
    assert inv_freq.dtype == torch.float32
    assert not inv_freq.is_meta
    expected = [RELEASE["rope_theta"] ** (-2 * i / 16) for i in range(8)]
    torch.testing.assert_close(inv_freq, torch.tensor(expected), rtol=1e-6, atol=0)
    assert bool((inv_freq > 0).all())


def test_16_frequencies_of_zero_would_not_pass_for_the_recorded_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = _tiny()
    expected = plain_logits(TOKENS, 2, tiny_config())
    torch.testing.assert_close(dense_logits(adapter, TOKENS, 2), expected, atol=TOLERANCE, rtol=0)
    monkeypatch.setattr(adapter.module.angles, "inv_freq", lambda device: torch.zeros(8))
    assert bool((dense_logits(adapter, TOKENS, 2) - expected).abs().max() > 0.1)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_17_a_rope_scaling_without_a_type_is_no_key_error(
    tmp_path: Path, scaling: dict[str, str] | None
) -> None:
    folder = write_tiny(tmp_path / "model")
    config = tiny_config(rope_scaling=scaling)
    (folder / "config.json").write_text(json.dumps(config))
    assert load_adapter(folder).adapter.geometry.default_full_loops == 2


def test_17_positions_are_those_of_each_request_not_of_the_call_before() -> None:
    engine = make_engine(_tiny(), num_speculative_tokens=2, draft_loops=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [TOKENS[:9], TOKENS[3:5]]
    first = [r.output_token_ids for r in run_all(engine, prompts, params)]
    again = [r.output_token_ids for r in run_all(engine, prompts[::-1], params)]
    assert first == again[::-1]
    for prompt, output in zip(prompts, first, strict=True):
        logits = plain_logits([*prompt, *output[:-1]], 2, tiny_config())
        assert output == logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


def test_17_the_head_is_a_tensor_of_its_own() -> None:
    module = _tiny().module
    assert module.lm_head.weight is not module.model.embed_tokens.weight
    assert not torch.equal(module.lm_head.weight, module.model.embed_tokens.weight)


def test_17_and_23_no_code_of_the_folder_and_no_transformers_model_is_needed(
    tmp_path: Path,
) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_nanbeige.NanbeigeForCausalLM"}
    folder = write_tiny(tmp_path / "model", auto_map=auto_map)
    (folder / "modeling_nanbeige.py").write_text("raise SystemExit('remote code was run')\n")
    script = (
        "import sys\n"
        "from looped_spec import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1])\n"
        "llm.generate([[5, 6]], SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)\n"
        "assert 'transformers.modeling_utils' not in sys.modules\n"
        "print('ran')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "ran"), run.stderr


def test_18_the_cache_has_a_plane_for_every_loop_and_layer() -> None:
    assert len(_release().kv_planes(2)) == 44
    llm = LLM(str(TINY), num_speculative_tokens=1)
    assert len(llm.engine.runner.pool.planes) == 2 * 3


@pytest.mark.parametrize("loops", [1, 2])
def test_19_loop_and_layer_make_one_unrolled_index(loops: int) -> None:
    assert _recorded(_tiny(), loops).planes == list(range(loops * 3))


def test_19_a_config_rewritten_to_the_unrolled_count_gives_the_same_outputs(
    tmp_path: Path,
) -> None:
    folder = write_tiny(tmp_path / "model", num_physical_layers=3, num_hidden_layers=6)
    case = golden_prompts(TINY)[0]
    expected = case.sequence("greedy_full_depth")[len(case.prompt) :]
    params = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)
    llm = LLM(str(folder), num_speculative_tokens=2)
    assert llm.full_loops == 2
    assert llm.generate([case.prompt], params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_20_the_head_size_is_that_of_the_config_not_hidden_size_by_heads() -> None:
    adapter = _tiny()  # 6 heads of 16, hidden size 48: division gives 8
    ((q, k),) = _recorded(adapter, 1).shapes
    assert (tuple(q), tuple(k)) == ((6, 16), (2, 16))
    assert {plane.head_dim for plane in adapter.kv_planes(2)} == {16}


def test_20_the_release_has_the_published_shapes_and_sizes() -> None:
    adapter = _release()
    state = adapter.module.state_dict()
    shapes = {}
    for name, target in adapter.checkpoint_layout().items():
        rows, *rest = state[target.parameter].shape
        shapes[name] = [rows if target.stop is None else target.stop - (target.start or 0), *rest]
    assert len(shapes) == 201
    assert sum(math.prod(shape) for shape in shapes.values()) == 4_169_800_704
    first = "model.layers.0.self_attn"
    assert shapes[f"{first}.q_proj.weight"] == [6144, 3072]
    assert shapes[f"{first}.k_proj.weight"] == shapes[f"{first}.v_proj.weight"] == [1024, 3072]
    assert shapes[f"{first}.o_proj.weight"] == [3072, 6144]
    assert bytes_per_block(adapter.kv_planes(2), 1, torch.bfloat16) == 176 * 1024


@pytest.mark.parametrize("chunks", [[1] * 24, [7, 1, 5, 11], [3, 21], [24]])
@torch.no_grad()
def test_21_prefill_in_chunks_equals_prefill_at_once(chunks: list[int]) -> None:
    adapter = _tiny()
    pool = KVPool(adapter.kv_planes(2), 8, 4, torch.float32, torch.device("cpu"))
    rows = PagedRows(
        torch.arange(1, 9)[None], torch.tensor([32]), torch.zeros(1, dtype=torch.int64)
    )
    parts, start = [], 0
    for size in chunks:
        where = torch.arange(start, start + size)[None]
        ctx = PagedContext(pool, SdpaBackend(), rows, where, 2)
        state = adapter.prelude(torch.tensor([TOKENS[start : start + size]]), ctx)
        for index in range(2):
            state = adapter.loop(state, index, ctx)
        parts.append(adapter.readout(state, ctx)[0])
        start += size
    expected = plain_logits(TOKENS, 2, tiny_config())
    torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=0)
