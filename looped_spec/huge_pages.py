"""Puts what decoding reads in every round into huge pages, on the CPU under Linux.

The processor looks up where each page of 4 KiB lies. Weights and caches are read from one end to
the other, over so many of them that it has forgotten all by the next round, and under a hypervisor
each lookup is a walk through two tables: it can take longer than reading the page. A huge page
holds 512 times as much. Where they stand in memory matters too: 4 KiB pages come from anywhere, so
that the same model can be faster or slower by chance.

Where the administrator has turned transparent huge pages off (`never` in
/sys/kernel/mm/transparent_hugepage/enabled), and on other systems, nothing is done.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_SELF = Path("/proc/self")

# Of <linux/mman.h>; the second came with Linux 5.14, the third with 6.1.
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
# With base pages of 16 or 64 KiB a huge one has 32 or 512 MiB, most of which would stay empty.
_LARGEST = 1 << 22
# So many at once: a kernel that has no free ones left, or knows none of this, is not asked again.
_AT_ONCE = 64
_TAKEN_AT_ONCE = 1 << 26
_HOPELESS = (errno.ENOMEM, errno.EINVAL)
# Of an entry of /proc/self/pagemap: there, and mapped by this process alone. A page that a child
# shares with its parent is not, nor is the one page of zeros that stands for what was only read.
_THERE_AND_OWN = (1 << 63) | (1 << 56)
_ENTRY_BYTES = 8
# Private, writable memory without a file behind it; a heap is such, a stack is left alone.
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\]|\[anon:.*\])?\n?")


def huge_page_bytes() -> int:
    """Return the size of a huge page, 0 where there are none to be had, or too large ones."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _LARGEST else 0


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Let a tensor on the CPU that was not written to yet get huge pages as it is."""
    size = huge_page_bytes()
    if not size or type(tensor) is not Tensor or not tensor.is_cpu:
        return
    first = -(-tensor.data_ptr() // size)
    last = (tensor.data_ptr() + tensor.nbytes) // size
    if first < last:
        _advise(first * size, (last - first) * size, _MADV_HUGEPAGE)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, in huge pages where there are any; see `take_soon` for their memory."""
    size, num_bytes = huge_page_bytes(), math.prod(shape) * dtype.itemsize
    is_real = type(torch.empty(0)) is Tensor  # not within a mode that only pretends to compute
    if device.type != "cpu" or not size or num_bytes < size or not is_real:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        chunk, offset = _new_chunk(num_bytes, size)
    except OSError:
        return torch.zeros(shape, dtype=dtype)
    memory = torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=offset)
    ask_for_huge_pages(memory)  # its end, which fills none, lies in small ones
    return memory.view(dtype).view(*shape)


def take_soon(tensors: Sequence[Tensor]) -> None:
    """Take the memory of `zeros` in the background, beside whatever comes next.

    What was not taken yet is taken as it is written to. So a cache that does not fit shows early,
    and nobody waits for the system to clear what is not used yet.
    """
    left = [
        (weakref.ref(tensor), tensor.data_ptr(), tensor.nbytes)
        for tensor in tensors
        if type(tensor) is Tensor and tensor.is_cpu
    ]
    if huge_page_bytes() and left:
        threading.Thread(target=_take, args=(left,), name="take memory", daemon=True).start()


def _take(places: Sequence[tuple[weakref.ref[Tensor], int, int]]) -> None:
    """Take memory piece by piece. No operation of a tensor is called: whoever watches those of a
    round meanwhile would see them too."""
    for owner, begin, num_bytes in places:
        for done in range(0, num_bytes, _TAKEN_AT_ONCE):
            held = owner()  # or the memory may go, and another's come, before the call
            if held is None:
                break
            start = (begin + done) // mmap.PAGESIZE * mmap.PAGESIZE
            length = min(_TAKEN_AT_ONCE, num_bytes - done)
            if _advise(start, length, _MADV_POPULATE_WRITE):
                return
            del held


def _new_chunk(num_bytes: int, size: int) -> tuple[mmap.mmap, int]:
    """Return memory of zeros, and where in it a huge page begins of which so many bytes are free;
    raise `OSError` if there is none."""
    pages = -(-num_bytes // size) + 1
    chunk = mmap.mmap(-1, pages * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return chunk, -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % size


class HugePageArena:
    """Memory for tensors that stay, one behind the other, so that no page is theirs in part.

    It lives as long as any of its tensors; none of them can be given back alone.
    """

    _CHUNK_BYTES = 1 << 26  # of which nothing is taken before it is written to
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._size = huge_page_bytes()
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a dense tensor on the CPU, with its strides.

        It is the tensor itself where there is no huge page or no memory to be had, and if it lies
        in an arena already, or in other memory that PyTorch did not make.
        """
        if not self._size or not tensor.nbytes or not tensor.untyped_storage().resizable():
            return tensor
        try:
            chunk, offset = self._take(tensor.nbytes)
        except OSError:
            return tensor
        memory = torch.frombuffer(chunk, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
        copied = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        with torch.no_grad():
            return copied.copy_(tensor)

    def _take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Return a chunk and where in it so many bytes are free."""
        chunk, offset = self._chunk, -(-self._used // self._ALIGNMENT) * self._ALIGNMENT
        if chunk is None or offset + num_bytes > len(chunk):
            chunk, offset = _new_chunk(max(num_bytes, self._CHUNK_BYTES), self._size)
            ask_for_huge_pages(torch.frombuffer(chunk, dtype=torch.uint8))
            self._chunk = chunk
        self._used = offset + num_bytes
        return chunk, offset


def collapse_memory() -> int:
    """Move what this process holds in memory into huge pages; return how much lies in some then,
    in bytes.

    Only what is there as a whole and its own is moved, so that the process holds no more than
    before, and a child of another shares with it what it did. Nothing changes its address. It takes
    about as long as copying.
    """
    size = huge_page_bytes()
    if not size:
        return 0
    try:
        for first, count in _full_runs(size):
            for start in range(first, first + count, _AT_ONCE):
                length = min(_AT_ONCE, first + count - start)
                if _advise(start * size, length * size, _MADV_COLLAPSE) in _HOPELESS:
                    return _bytes_in_huge_pages()
        return _bytes_in_huge_pages()
    except OSError:  # there is no /proc, or it does not tell
        return 0


def _full_runs(size: int) -> Iterator[tuple[int, int]]:
    """Yield runs of huge pages that could be: the number of the first, and how many."""
    pages = size // mmap.PAGESIZE  # of each
    with (_SELF / "pagemap").open("rb", buffering=0) as pagemap:
        for begin, end in _regions():
            for first in range(-(-begin // size), end // size, _AT_ONCE):
                count = min(_AT_ONCE, end // size - first)
                pagemap.seek(first * pages * _ENTRY_BYTES)
                read = pagemap.read(count * pages * _ENTRY_BYTES)
                if len(read) < count * pages * _ENTRY_BYTES:
                    break  # it went meanwhile
                entries = numpy.frombuffer(read, dtype=numpy.uint64).reshape(count, pages)
                is_full = (entries & _THERE_AND_OWN == _THERE_AND_OWN).all(axis=1)
                edges = numpy.flatnonzero(numpy.diff(is_full, prepend=False, append=False))
                for start, stop in edges.reshape(-1, 2).tolist():
                    yield first + start, stop - start


def _regions() -> list[tuple[int, int]]:
    """Return where private memory of this process begins and ends."""
    lines = (_SELF / "maps").read_text(errors="replace").splitlines()
    found = (_REGION.fullmatch(line) for line in lines)
    return [(int(match[1], 16), int(match[2], 16)) for match in found if match]


def _bytes_in_huge_pages() -> int:
    for line in (_SELF / "smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def _advise(address: int, length: int, advice: int) -> int:
    """Call madvise; return 0, or the number of its error."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
    return ctypes.get_errno() if failed else 0
