"""How flash-attention and torch's varlen_attn are called, shown on stand-ins that do what they
document."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape
from fake_flash import FlashRecord

from looped_spec.runtime.attention import AttentionBackend
from looped_spec.runtime.attention.flash_attn import FLASH_2, FLASH_3, FLASH_4, FlashAttnBackend
from looped_spec.runtime.attention.varlen import VarlenBackend, takes_block_tables
from looped_spec.runtime.kv_cache import TRASH_BLOCK

VERSIONS = {"2": FLASH_2, "3": FLASH_3, "4": FLASH_4}
NAMES = [*VERSIONS, "varlen"]
each_backend = pytest.mark.parametrize("name", NAMES)
DTYPE = torch.bfloat16


def make(name: str, record: FlashRecord, num_splits: int = 0) -> AttentionBackend:
    if name == "varlen":
        return VarlenBackend(record.varlen_attn)
    version = VERSIONS[name]
    return FlashAttnBackend(version, record.function(version.number), num_splits)


def block_size(name: str) -> int:
    return 256 if name in ("2", "varlen") else 5


@each_backend
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("group", [1, 3])
def test_decoding_verifying_and_prefill_rows_agree(name: str, rows: int, group: int) -> None:
    shape = Shape(3, rows, 2 * group, 2, 16, block_size(name), 300)
    case, record = Case(shape, DTYPE), FlashRecord()
    case.check(case.attend(make(name, record)))
    (call,) = record.calls
    assert call["lengths"].tolist() == (case.positions[:, -1] + 1).tolist()


@each_backend
def test_the_scale_is_handed_on(name: str) -> None:
    case = Case(Shape(1, 2, 2, 1, 16, block_size(name), 256), DTYPE)
    case.check(case.attend(make(name, FlashRecord()), 0.5), 0.5)


@each_backend
def test_tables_reach_as_far_as_the_last_row(name: str) -> None:
    case = Case(Shape(2, 4, 2, 1, 16, block_size(name), 256), DTYPE, start=255)
    record = FlashRecord()  # it refuses to read past a table
    case.check(case.attend(make(name, record)))
    (call,) = record.calls
    width = case.rows.block_tables.shape[1]
    assert call["tables"][:, :width].tolist() == case.rows.block_tables.tolist()
    assert set(call["tables"][:, width:].flatten().tolist()) == {TRASH_BLOCK}


@each_backend
def test_a_column_and_a_selection_are_parts_of_the_whole(name: str) -> None:
    case, record = Case(Shape(3, 3, 2, 1, 16, block_size(name), 300), DTYPE), FlashRecord()
    backend, pages = make(name, record), (case.k_pages, case.v_pages)
    prepared, answer = backend.prepare(case.positions, case.rows, case.pool), case.answer()
    for column in range(3):
        here = slice(column, column + 1)
        out = backend.attend(case.q[:, here], *pages, backend.column(prepared, column), None)
        assert (out - answer[:, here]).abs().max() < 2**-6
        assert record.calls[-1]["lengths"].tolist() == (case.positions[:, column] + 1).tolist()
    some = torch.tensor([2, 0])
    out = backend.attend(case.q[some], *pages, backend.select(prepared, some), None)
    assert (out - answer[some]).abs().max() < 2**-6


@each_backend
def test_a_context_writes_before_it_attends(name: str) -> None:
    case, record = Case(Shape(2, 2, 2, 2, 16, block_size(name), 256), DTYPE), FlashRecord()
    fresh = torch.randn(2, 2, 2, 2, 16, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    ctx = case.context(make(name, record))
    before = case.answer()
    out = ctx.attend(0, case.q, fresh[0], fresh[1])
    case.check(out)
    assert not torch.allclose(case.answer(), before)


@pytest.mark.parametrize(("asked", "got"), [(0, 0), (1, 1), (4, 4)])
@pytest.mark.parametrize("name", list(VERSIONS))
def test_the_number_of_splits_is_handed_on(name: str, asked: int, got: int) -> None:
    case, record = Case(Shape(1, 1, 1, 1, 16, block_size(name), 256), DTYPE), FlashRecord()
    case.attend(make(name, record, asked))
    assert record.calls[0]["num_splits"] == got


def test_the_stand_in_of_varlen_attn_has_the_arguments_of_the_real_one() -> None:
    real = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    if not takes_block_tables(real):
        pytest.skip(f"varlen_attn of PyTorch {torch.__version__} takes no block tables")

    def arguments(function: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(parameter.name, parameter.kind) for parameter in parameters]

    assert arguments(FlashRecord().varlen_attn) == arguments(real)
    assert takes_block_tables(FlashRecord().varlen_attn)


def test_an_older_varlen_attn_is_known_by_its_arguments() -> None:
    def older(query: Any, cu_seq_k: torch.Tensor, *, scale: Any = None) -> None: ...

    def between(  # block tables, but lengths of keys as well
        query: Any,
        cu_seq_k: torch.Tensor,
        *,
        scale: Any = None,
        window_size: Any = None,
        enable_gqa: Any = None,
        seqused_k: Any = None,
        block_table: Any = None,
        num_splits: Any = None,
    ) -> None: ...

    assert not takes_block_tables(older) and not takes_block_tables(between)
