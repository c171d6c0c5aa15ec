"""Weights and caches come to lie in huge pages, and the process holds no more memory for it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from looped_spec import huge_pages
from looped_spec.adapter import KVPlane
from looped_spec.huge_pages import (
    HugePageArena,
    ask_for_huge_pages,
    collapse_memory,
    huge_page_bytes,
)
from looped_spec.runtime.kv_cache import KVPool
from looped_spec.runtime.linears import arrange_linears

MIB = 1 << 20
HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} ")


def in_huge_pages(*tensors: Tensor) -> int:
    """Bytes in huge pages of the mappings that tensors lie in, by the kernel's own account."""
    return in_huge_pages_at([(each.data_ptr(), each.nbytes) for each in tensors])


def in_huge_pages_at(places: list[tuple[int, int]]) -> int:
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := HEADER.match(line):
            first, last = int(found[1], 16), int(found[2], 16)
            is_ours = any(first < at + size and at < last for at, size in places)
        elif is_ours and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@pytest.fixture
def needs_huge_pages() -> None:
    """Skip where the kernel gives none."""
    if not huge_page_bytes():
        pytest.skip("there are no transparent huge pages here, or they are turned off")
    probe = torch.ones(32 * MIB // 4)
    collapse_memory()
    if not in_huge_pages(probe):
        pytest.skip("this kernel does not collapse memory, or has no huge page left")


@pytest.mark.usefixtures("needs_huge_pages")
class TestWhereTheKernelHasThem:
    def test_what_was_written_is_moved_and_stays_as_it_is(self) -> None:
        numbers = torch.arange(32 * MIB // 4, dtype=torch.int32)
        address = numbers.data_ptr()
        assert collapse_memory() >= 28 * MIB
        assert in_huge_pages(numbers) >= 28 * MIB
        assert numbers.data_ptr() == address
        assert torch.equal(numbers, torch.arange(32 * MIB // 4, dtype=torch.int32))

    def test_an_arena_holds_tensors_of_any_kind_in_full_pages(self) -> None:
        arena = HugePageArena()
        tensors = [
            torch.randn(700, 300),
            torch.randn(1, 7).bfloat16(),
            torch.randn(900, 800).t(),
            torch.arange(40 * MIB, dtype=torch.int32),  # more than a chunk
            *(torch.full((512, 512), i) for i in range(100)),
        ]
        copies = [arena.copy(each) for each in tensors]
        del arena
        for copied, tensor in zip(copies, tensors, strict=True):
            assert copied.dtype == tensor.dtype and copied.stride() == tensor.stride()
            assert torch.equal(copied, tensor)
            assert copied.data_ptr() % 64 == 0
            assert copied.untyped_storage().nbytes() == tensor.nbytes
        assert in_huge_pages(*copies) >= sum(copied.nbytes for copied in copies) - 8 * MIB

    def test_a_new_tensor_gets_them_as_it_is_written(self) -> None:
        asked = torch.empty(32 * MIB // 4)
        ask_for_huge_pages(asked)
        asked.fill_(1.0)
        assert in_huge_pages(asked) >= 28 * MIB

    def test_memory_that_nobody_has_written_to_is_not_taken(self) -> None:
        sparse = torch.empty(256 * MIB, dtype=torch.uint8)
        sparse[:: 512 * 1024] = 1  # a page of each half MiB
        before = resident()
        collapse_memory()
        assert resident() < before + 16 * MIB

    def test_the_cache_of_keys_and_values_lies_in_them(self) -> None:
        pool = KVPool([KVPlane("k", 2, 64)], 4096, 16, torch.float32, torch.device("cpu"))
        for pages in pool.planes[0]:
            assert in_huge_pages(pages) >= pages.nbytes - 4 * MIB
            assert not pages.any()

    @pytest.mark.parametrize("way", ["plain", "transposed"])
    def test_weights_lie_in_them_whatever_keeps_them(self, way: str) -> None:
        module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(32)))
        x = torch.randn(3, 512)
        with torch.inference_mode():
            want = module(x)
            arrange_linears(module.requires_grad_(False), way)
            torch.testing.assert_close(module(x), want)
        assert in_huge_pages(*(layer.weight for layer in module)) >= 24 * MIB

    def test_prepacked_weights_lie_in_them(self) -> None:
        module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(32)))
        pointer = getattr(torch.ops.mkldnn, "data_ptr", None)
        if pointer is None:
            pytest.skip("this torch does not tell where oneDNN keeps a weight")
        arrange_linears(module.requires_grad_(False), "onednn")
        places = [(pointer(layer.packed._weight), MIB) for layer in module]
        assert in_huge_pages_at(places) >= 24 * MIB


def test_there_are_none_where_the_administrator_turned_them_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert huge_page_bytes() == 0
    assert collapse_memory() == 0
    tensor = torch.ones(3)
    assert HugePageArena().copy(tensor) is tensor
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert huge_page_bytes() == 2097152
    (tmp_path / "hpage_pmd_size").write_text("536870912\n")  # with base pages of 64 KiB
    assert huge_page_bytes() == 0
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path / "of another system")
    assert huge_page_bytes() == 0


def test_a_system_that_does_not_tell_of_its_memory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 * MIB)
    monkeypatch.setattr(huge_pages, "_SELF", tmp_path)
    assert collapse_memory() == 0
    (tmp_path / "maps").write_text("")
    assert collapse_memory() == 0
    (tmp_path / "smaps_rollup").write_text("Rss: 1 kB\n")
    assert collapse_memory() == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="calls madvise")
def test_a_kernel_that_refuses_is_asked_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.ones(1024 * MIB // 4)
    asked: list[int] = []

    def refuse(address: int, length: int, advice: int) -> bool:
        asked.append(length)
        return False

    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 * MIB)
    monkeypatch.setattr(huge_pages, "_advise", refuse)
    collapse_memory()
    assert numbers.all()
    assert sum(asked) < 1024 * MIB  # once in each run of full memory
    ask_for_huge_pages(torch.empty(MIB // 4))  # too small for one
    ask_for_huge_pages(torch.empty(64 * MIB, device="meta"))


def test_regions_are_those_that_no_file_stands_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = (
        "00400000-00800000 rw-p 00000000 00:00 0                          [heap]\n"
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \n"
        "7f1000000000-7f1000400000 rw-p 00000000 00:00 0                  [anon:arena]\n"
        "7f2000000000-7f2000400000 rw-p 00000000 08:01 77                 /lib/library.so\n"
        "7f3000000000-7f3000400000 r--p 00000000 00:00 0 \n"
        "7f4000000000-7f4000400000 rw-s 00000000 00:01 9                  /dev/zero\n"
        "7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0                  [stack]\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self, errors: maps)
    starts = [start for start, _ in huge_pages._regions()]
    assert starts == [0x400000, 0x7F0000000000, 0x7F1000000000]
