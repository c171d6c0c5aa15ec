"""Weights and caches come to lie in huge pages, and the process holds no more memory for it."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from processes import PATIENCE_SECONDS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from looped_spec import huge_pages
from looped_spec.adapter import KVPlane
from looped_spec.huge_pages import (
    HugePageArena,
    ask_for_huge_pages,
    collapse_memory,
    huge_page_bytes,
)
from looped_spec.layers.native import BuildError, LinearKernels
from looped_spec.layers.packed import PackedLinear
from looped_spec.runtime import linears
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
    first = -(-probe.data_ptr() // huge_page_bytes()) * huge_page_bytes()
    if huge_pages._advise(first, 28 * MIB, huge_pages._MADV_COLLAPSE):
        pytest.skip("this kernel does not collapse memory, or has no huge page left")


@pytest.fixture
def no_collapsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave in small pages what nobody moves one by one."""
    monkeypatch.setattr(linears, "collapse_memory", lambda: 0)


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
        sparse[: 128 * MIB].sum()  # what is only read is one and the same page of zeros
        before = resident()
        collapse_memory()
        assert resident() < before + 16 * MIB

    def test_what_a_parent_shares_with_its_child_stays_shared(self) -> None:
        script = """
import mmap, os, sys
from looped_spec.huge_pages import collapse_memory
held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.write(b"1" * (64 << 20))
if os.fork() == 0:
    collapse_memory()
    with open("/proc/self/smaps_rollup") as file:
        print(next(line for line in file if line.startswith("Private_Dirty:")).split()[1])
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        )
        assert int(done.stdout) * 1024 < 32 * MIB

    def test_the_cache_of_keys_and_values_lies_in_them(self) -> None:
        pool = KVPool([KVPlane("k", 2, 64)], 4096, 16, torch.float32, torch.device("cpu"))
        end = time.monotonic() + PATIENCE_SECONDS
        while in_huge_pages(*pool.planes[0]) < 2 * pool.planes[0][0].nbytes - 8 * MIB:
            assert time.monotonic() < end  # nobody has written to it
            time.sleep(0.01)
        assert not any(pages.any() for pages in pool.planes[0])

    def test_the_end_of_a_plane_fills_no_huge_page(self) -> None:
        """A cache has dozens of planes: a page for the end of each would be a tenth of it."""
        cpu = torch.device("cpu")
        before = resident()
        planes = [huge_pages.zeros([4 * MIB + 8192], torch.uint8, cpu) for _ in range(32)]
        for plane in planes:
            plane.fill_(1)
        assert resident() - before < 32 * 4 * MIB + 16 * MIB
        assert in_huge_pages(*planes) >= 32 * 4 * MIB - 8 * MIB

    def test_memory_is_taken_without_an_operation_of_a_tensor(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever watches the operations of a round would take them for its own."""
        pages = huge_pages.zeros([8 * MIB], torch.float32, torch.device("cpu"))
        places = [(weakref.ref(pages), pages.data_ptr(), pages.nbytes)]

        def refuse(self: Tensor) -> int:
            raise AssertionError

        with monkeypatch.context() as patch:
            for name in ("data_ptr", "nbytes", "numel", "untyped_storage", "is_cpu"):
                patch.setattr(torch.Tensor, name, property(refuse), raising=False)
            huge_pages._take(places)
        assert in_huge_pages(pages) >= 28 * MIB

    def test_a_cache_that_is_only_pretended_takes_no_memory(self) -> None:
        with FakeTensorMode():
            pool = KVPool([KVPlane("k", 2, 64)], 1 << 20, 16, torch.float32, torch.device("cpu"))
            ask_for_huge_pages(pool.planes[0][0])
            assert pool.planes[0][0].shape == ((1 << 20) + 1, 16, 2, 64)

    def test_a_cache_that_is_given_up_is_not_waited_for(self) -> None:
        before = threading.active_count()
        for _ in range(20):
            pool = KVPool([KVPlane("k", 2, 64)], 8192, 16, torch.float32, torch.device("cpu"))
            del pool
        end = time.monotonic() + PATIENCE_SECONDS
        while threading.active_count() > before:
            assert time.monotonic() < end
            time.sleep(0.01)

    @pytest.mark.usefixtures("no_collapsing")
    @pytest.mark.parametrize("way", ["plain", "transposed", "native_fp32", "native_bf16"])
    def test_weights_lie_in_them_whatever_keeps_them(self, way: str) -> None:
        if way.startswith("native"):
            try:
                LinearKernels()
            except BuildError as error:
                pytest.skip(f"no native kernels: {error}")
        module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(32)))
        x = torch.randn(3, 512)
        with torch.inference_mode():
            for layer in module:
                layer.weight.copy_(layer.weight.bfloat16())
            want = module(x)
            arrange_linears(module.requires_grad_(False), way)
            torch.testing.assert_close(module(x), want)
            weights = [
                layer.packed.tiles.words if isinstance(layer, PackedLinear) else layer.weight
                for layer in module
            ]
            total = sum(weight.nbytes for weight in weights)
            assert not any(weight.untyped_storage().resizable() for weight in weights)
            assert in_huge_pages(*weights) >= total - 4 * MIB
            places = [weight.data_ptr() for weight in weights]
            arrange_linears(module, "plain")  # somebody may know where they lie
            assert [weight.data_ptr() for weight in weights] == places
            torch.testing.assert_close(module(x), want)

    @pytest.mark.usefixtures("no_collapsing")
    def test_tensors_that_share_memory_go_on_sharing_it(self) -> None:
        module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        module.requires_grad_(False)
        module[1].weight = nn.Parameter(module[0].weight.data, requires_grad=False)
        module[2].register_buffer("alias", module[2].weight.data[:5])
        module[0].tied = module[3].weight  # one parameter, two names
        arrange_linears(module, "plain")
        module[0].weight[0, 0] = 7.0
        module[2].weight[0, 0] = 8.0
        assert module[1].weight[0, 0] == 7.0 and module[2].alias[0, 0] == 8.0
        assert module[0].tied is module[3].weight
        assert not module[3].weight.untyped_storage().resizable()

    def test_weights_of_other_kinds_are_left_alone(self) -> None:
        module = nn.Sequential(nn.Linear(1024, 1024, bias=False)).requires_grad_(False)
        sparse = torch.eye(8).to_sparse()
        module.sparse = nn.Parameter(sparse, requires_grad=False)
        module.register_buffer("packed", torch.eye(8).to_mkldnn())
        module.nowhere = nn.Parameter(torch.empty(2048, 2048, device="meta"), requires_grad=False)
        arrange_linears(module, "plain")
        assert not module[0].weight.untyped_storage().resizable()
        assert torch.equal(module.sparse.to_dense(), torch.eye(8))

    def test_a_model_that_finds_no_room_stays_where_it_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none_left(*_: object, **__: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(huge_pages.mmap, "mmap", none_left)
        module = nn.Sequential(nn.Linear(1024, 1024, bias=False)).requires_grad_(False)
        want = module[0].weight.clone()
        arrange_linears(module, "plain")
        assert torch.equal(module[0].weight, want)

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
    (tmp_path / "pagemap").write_bytes(b"")
    assert collapse_memory() == 0
    (tmp_path / "smaps_rollup").write_text("Rss: 1 kB\n")
    assert collapse_memory() == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="calls madvise")
@pytest.mark.parametrize(("error", "is_asked_on"), [("EAGAIN", True), ("ENOMEM", False)])
def test_a_page_that_is_busy_keeps_no_other_from_being_moved(
    error: str, is_asked_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.ones(512 * MIB // 4)
    asked: list[tuple[int, int]] = []

    def refuse(address: int, length: int, advice: int) -> int:
        asked.append((address, length))
        return int(getattr(errno, error))

    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 * MIB)
    monkeypatch.setattr(huge_pages, "_advise", refuse)
    collapse_memory()
    begin, end = numbers.data_ptr(), numbers.data_ptr() + numbers.nbytes
    within = sum(length for address, length in asked if begin <= address < end)
    assert (within > 500 * MIB) if is_asked_on else (len(asked) == 1)
    asked.clear()
    ask_for_huge_pages(torch.empty(MIB // 4))  # too small for one
    ask_for_huge_pages(torch.empty(64 * MIB, device="meta"))
    assert not asked


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
