"""Which runs the compiled kernels serve, and that a run with them says the same."""

from __future__ import annotations

import logging

import pytest
import torch

from looped_spec import LLM, SamplingParams
from looped_spec.errors import ConfigError, UnsupportedError
from looped_spec.layers.native import BuildError, Kernels
from looped_spec.runtime.attention import PagedRows, SdpaBackend
from looped_spec.runtime.attention.native import NativeBackend
from looped_spec.runtime.kv_cache import KVPool

PROMPTS = [[5, 6, 7, 8], [9] * 20, [30, 31]]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Kernels:
    try:
        return Kernels()
    except BuildError as error:
        pytest.skip(f"the kernels do not build here: {error}")


def texts(model: str, **options: object) -> list[list[int]]:
    llm = LLM(model, dtype="float32", max_model_len=64, num_threads=1, **options)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("model", ["demo:ouro", "demo:huginn", "demo:nanbeige"])
def test_texts_are_those_of_torch_plain_and_speculative(model: str) -> None:
    plain = texts(model, cpu_linear="plain", num_speculative_tokens=0)
    for speculation in ({"num_speculative_tokens": 0}, {"num_speculative_tokens": 3}):
        for linear in ("plain", "native_bf16", "native_fp32"):
            found = texts(model, cpu_linear=linear, cpu_kernels="native", **speculation)
            assert found == plain, (linear, speculation)


def test_a_run_has_them_or_torch_as_it_says(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        native = LLM("demo:ouro", cpu_kernels="auto", dtype="float32", max_model_len=32)
    assert isinstance(native.engine.runner.backend, NativeBackend)
    assert native.loaded.adapter.module.model.norm.kernels is not None  # type: ignore[union-attr]
    assert any(record.message == "cpu_kernels: native" for record in caplog.records)
    default = LLM("demo:ouro", dtype="float32", max_model_len=32)
    assert type(default.engine.runner.backend) is SdpaBackend
    assert default.loaded.adapter.module.model.norm.kernels is None  # type: ignore[union-attr]


@pytest.mark.parametrize("k", [3, 16])
def test_no_round_reads_tables_wider_than_its_texts(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows beyond `_MOST_ROWS` gather all that tables are wide."""
    widths = []
    prepare = NativeBackend.prepare

    def watched(
        self: NativeBackend, positions: torch.Tensor, rows: PagedRows, pool: KVPool
    ) -> object:
        widths.append(rows.block_tables.shape[1] * pool.block_size)
        return prepare(self, positions, rows, pool)

    monkeypatch.setattr(NativeBackend, "prepare", watched)
    llm = LLM("demo:ouro", cpu_kernels="native", num_speculative_tokens=k, max_model_len=512)
    llm.generate([[5] * 8], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert len(widths) > 1
    assert max(widths) <= 64


def test_attention_that_is_named_stays(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM("demo:ouro", cpu_kernels="native", attention_backend="sdpa", max_model_len=32)
    assert type(llm.engine.runner.backend) is SdpaBackend


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "they compute in float32, not in bfloat16"),
        ({"dtype": "float32", "graph_backend": "traced"}, "records operations of PyTorch alone"),
    ],
)
def test_where_they_cannot_serve_native_is_refused_and_auto_is_torch(
    options: dict[str, str], reason: str
) -> None:
    small = {"max_model_len": 32, "max_num_seqs": 1, "num_speculative_tokens": 0, **options}
    with pytest.raises(UnsupportedError, match=f"cpu_kernels='native' cannot.*{reason}"):
        LLM("demo:ouro", cpu_kernels="native", **small)
    llm = LLM("demo:ouro", cpu_kernels="auto", **small)
    assert not isinstance(llm.engine.runner.backend, NativeBackend)


def test_an_unknown_kind_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'native'"):
        LLM("demo:ouro", cpu_kernels="natif")
