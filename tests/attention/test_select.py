"""Which backend is taken, and what is said where one cannot be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_flash import FlashRecord

from looped_spec.errors import UnsupportedError
from looped_spec.options import ATTENTION_BACKENDS
from looped_spec.runtime.attention import AttentionNeeds, choose_attention, varlen
from looped_spec.runtime.attention.flash_attn import FlashAttnBackend
from looped_spec.runtime.attention.select import BACKENDS
from looped_spec.runtime.attention.triton import TritonBackend

CUDA = torch.device("cuda", 0)
SOURCES = {
    2: ("flash_attn/__init__.py", "def flash_attn_with_kvcache(*args, **kwargs): ..."),
    3: ("flash_attn_interface.py", "def flash_attn_with_kvcache(*args, **kwargs): ..."),
    4: ("flash_attn/cute/__init__.py", "def flash_attn_varlen_func(*args, **kwargs): ..."),
}
Install = Callable[..., None]


def asked(
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    block_size: int | None = None,
    num_splits: int = 0,
    device: torch.device = CUDA,
) -> AttentionNeeds:
    return AttentionNeeds(device, dtype, frozenset({head_dim}), block_size, num_splits)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes a machine with a CUDA device; call it with versions of flash-attention and more."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def install(
        *versions: int, capability: int = 9, triton: bool = False, block_tables: bool = False
    ) -> None:
        for number in versions:
            path = tmp_path / SOURCES[number][0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(SOURCES[number][1])
        if 4 in versions:
            (tmp_path / "flash_attn" / "__init__.py").touch()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        reason = None if triton else "Triton is not installed"
        monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda _: reason)
        monkeypatch.setattr(TritonBackend, "create", lambda _: TritonBackend.__new__(TritonBackend))
        function = FlashRecord().varlen_attn if block_tables else None
        monkeypatch.setattr(varlen, "_varlen_attn", lambda: function)

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("flash_attn"):
            del sys.modules[name]


def test_every_name_has_a_backend_and_every_backend_a_name() -> None:
    assert set(ATTENTION_BACKENDS) == {"auto", *BACKENDS}
    assert all(name == backend.name for name, backend in BACKENDS.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_sdpa_on_the_cpu(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="looped_spec"):
        choice = choose_attention("auto", asked(dtype, device=torch.device("cpu")))
    assert (choice.backend.name, choice.block_size) == ("sdpa", 16)
    assert caplog.messages == ["attention_backend auto: sdpa, the one for the CPU"]


@pytest.mark.parametrize(
    ("installed", "capability", "needs", "taken", "block_size"),
    [
        ([2], 8, asked(), "flash_attn 2", 256),
        ([2], 9, asked(block_size=512), "flash_attn 2", 512),
        ([2, 3, 4], 9, asked(), "flash_attn 3", 16),
        ([2, 4], 9, asked(), "flash_attn 2", 256),
        ([2, 4], 9, asked(block_size=16), "flash_attn 4", 16),
        ([2, 4], 10, asked(), "flash_attn 4", 16),
        ([2, 4], 10, asked(head_dim=256), "flash_attn 2", 256),
        ([2, 4], 12, asked(), "flash_attn 2", 256),
        ([2], 9, asked(block_size=16), "triton", 16),
        ([2], 9, asked(torch.float32), "triton", 16),
        ([2], 9, asked(head_dim=100), "triton", 16),
        ([], 9, asked(block_size=48), "triton", 48),
    ],
)
def test_auto_takes_the_best_that_can(
    machine: Install,
    caplog: pytest.LogCaptureFixture,
    installed: list[int],
    capability: int,
    needs: AttentionNeeds,
    taken: str,
    block_size: int,
) -> None:
    machine(*installed, capability=capability, triton=True)
    with caplog.at_level(logging.INFO, logger="looped_spec"):
        choice = choose_attention("auto", needs)
    assert (choice.backend.description, choice.block_size) == (taken, block_size)
    (message,) = caplog.messages
    assert message.startswith(f"attention_backend auto: {taken}")


def test_auto_says_why_others_were_passed_over(
    machine: Install, caplog: pytest.LogCaptureFixture
) -> None:
    machine(block_tables=True)
    with caplog.at_level(logging.INFO, logger="looped_spec"):
        assert choose_attention("auto", asked()).backend.name == "varlen"
        assert choose_attention("auto", asked(torch.float32)).backend.name == "sdpa"
    first, second = caplog.messages
    assert "not flash_attn: version 3 is not installed: there is no module flash_attn_i" in first
    assert "not triton: Triton is not installed" in first and "sdpa" not in first
    assert "not flash_attn: it computes in bfloat16 and float16, not in float32" in second


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("flash_attn", {"device": torch.device("cpu")}, "it needs a CUDA device"),
        ("flash_attn", {"dtype": torch.float32}, "bfloat16 and float16, not in float32"),
        ("flash_attn", {"head_dim": 512}, "heads of a multiple of 8 up to 256, not of 512"),
        ("varlen", {}, "takes no block tables, 2.13 does"),
        ("varlen", {"head_dim": 12}, "heads of a multiple of 8 up to 256, not of 12"),
        ("varlen", {"num_splits": 4}, "reads a context in one part, not in 4"),
        ("triton", {}, "Triton is not installed"),
    ],
)
def test_an_explicit_choice_that_cannot_work_is_an_error_with_the_reason(
    machine: Install, name: str, options: dict[str, Any], reason: str
) -> None:
    machine(2)
    with pytest.raises(UnsupportedError, match=f"'{name}' cannot be used here: .*{reason}"):
        choose_attention(name, asked(**options))


@pytest.mark.parametrize("name", ["flash_attn", "varlen"])
def test_a_block_size_that_the_backend_cannot_read_is_refused_with_the_way_out(
    machine: Install, name: str
) -> None:
    machine(2, block_tables=True)
    with pytest.raises(UnsupportedError, match="multiple of 256, not 16") as refused:
        choose_attention(name, asked(block_size=16))
    assert str(refused.value).endswith("leave block_size out, or take another attention_backend")
    assert choose_attention(name, asked()).block_size == 256


def test_a_package_that_does_not_import_is_no_more_than_a_reason(
    machine: Install, tmp_path: Path
) -> None:
    machine(2)
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise OSError('undefined symbol')")
    with pytest.raises(UnsupportedError, match="does not import: OSError: undefined symbol"):
        choose_attention("flash_attn", asked())


@pytest.mark.parametrize(
    ("version", "capability", "wanted", "got"),
    [(2, 9, 0, 0), (2, 9, 1, 1), (4, 10, 0, 0), (4, 9, 0, 1), (4, 9, 8, 1)],
)
def test_version_4_reads_a_context_in_one_part_on_hopper(
    machine: Install, version: int, capability: int, wanted: int, got: int
) -> None:
    machine(version, capability=capability)
    backend = choose_attention("flash_attn", asked(num_splits=wanted)).backend
    assert isinstance(backend, FlashAttnBackend) and backend._num_splits == got


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 320}, "heads of up to 256, not of 320"),
        ({"num_splits": 3}, "a power of 2 up to 32 parts, not in 3"),
        ({"num_splits": 64}, "a power of 2 up to 32 parts, not in 64"),
    ],
)
def test_the_triton_backend_says_what_it_cannot_do(options: dict[str, Any], reason: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert reason in str(TritonBackend.unsupported_reason(asked(**options)))
