"""Huge pages: the same weights in pages of 4 KiB and in huge ones, multiplied by turns.

All linear layers of a loop of the CPU benchmarks' model, one after the other as a loop pass runs
them, so that no weight is still in the processor's cache: PyTorch's own product, and the kernels of
our own where they can be compiled. Nothing differs but where the numbers lie. Small pages are asked
for too (MADV_NOHUGEPAGE), so that the comparison holds on systems that give huge ones to everybody.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu_model import CONFIG
from results import markdown, run_command
from torch import Tensor
from torch.nn import functional as F

from looped_spec.errors import UnsupportedError
from looped_spec.huge_pages import HugePageArena, huge_page_bytes
from looped_spec.layers.native import BuildError, LinearKernels, Tiles
from looped_spec.offline.machine import machine_facts

SMALL, HUGE = "small pages", "huge pages"
_MADV_NOHUGEPAGE = 15

Product = Callable[[Tensor], Tensor]


def shapes_of(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Return rows and columns of the weights that a loop pass reads, in its order."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    layer = [(3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    num_layers: int = config["num_hidden_layers"]
    return layer * num_layers


def in_small_pages(tensor: Tensor) -> Tensor:
    """Return a copy that no huge page holds."""
    copied = torch.empty_like(tensor)
    page = ctypes.CDLL(None).getpagesize()
    first, last = -(-copied.data_ptr() // page), (copied.data_ptr() + copied.nbytes) // page
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(first * page), ctypes.c_size_t((last - first) * page), _MADV_NOHUGEPAGE
    )
    return copied.copy_(tensor)


def products(config: dict[str, Any]) -> dict[str, dict[str, list[Product]]]:
    """Return the products of a loop pass, for each way and each kind of page."""
    generator = torch.Generator().manual_seed(0)
    arena = HugePageArena()
    placed = {SMALL: in_small_pages, HUGE: arena.copy}
    try:
        kernels = LinearKernels()
    except BuildError as error:
        print(f"no native kernels: {error}", file=sys.stderr)
        kernels = None
    found: dict[str, dict[str, list[Product]]] = {}

    def add(way: str, pages: str, product: Product) -> None:
        found.setdefault(way, {}).setdefault(pages, []).append(product)

    for shape in shapes_of(config):
        weight = (0.02 * torch.randn(shape, generator=generator)).bfloat16().float()
        for pages, place in placed.items():
            own = place(weight)
            add("torch", pages, partial(F.linear, weight=own))
        if kernels is None:
            continue
        for way, as_bf16 in (("native_fp32", False), ("native_bf16", True)):
            packed = kernels.pack_tiles(weight, as_bf16=as_bf16)
            assert packed is not None
            for pages, place in placed.items():
                tiles = Tiles(place(packed.words), packed.outputs)
                add(way, pages, partial(kernels.linear, tiles=tiles))
    return found


@torch.inference_mode()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time each way with either kind of page, by turns."""
    if not huge_page_bytes():
        raise UnsupportedError("there are no transparent huge pages here, or they are turned off")
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        ways = products(CONFIG)
        results = [one for rows in args.rows for one in _results(args, ways, rows)]
    finally:
        torch.set_num_threads(threads)
    heads = ("ms per loop pass", SMALL, HUGE, "small by huge")
    print(
        markdown(
            heads,
            [
                (
                    f"{one['way']}, {one['rows']} rows",
                    *(f"{one['ms'][p]['median']} ({one['ms'][p]['least']})" for p in (SMALL, HUGE)),
                    one["ratio"],
                )
                for one in results
            ],
        )
    )
    return {
        "machine": machine_facts(torch.device("cpu")),
        "threads": args.threads,
        "huge_page_bytes": huge_page_bytes(),
        "megabytes_of_fp32": sum(4 * a * b for a, b in shapes_of(CONFIG)) / 1e6,
        "results": results,
    }


def _results(
    args: argparse.Namespace, ways: dict[str, dict[str, list[Product]]], rows: int
) -> list[dict[str, Any]]:
    inputs = {width: torch.randn(rows, width) for _, width in shapes_of(CONFIG)}
    order = [inputs[width] for _, width in shapes_of(CONFIG)]
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.repeats + 1):
        for way, by_pages in ways.items():
            for pages, calls in by_pages.items():
                start = time.perf_counter()
                for call, x in zip(calls, order, strict=True):
                    call(x)
                taken.setdefault((way, pages), []).append(1e3 * (time.perf_counter() - start))
    found = []
    for way in ways:
        ms = {
            pages: {
                "median": round(statistics.median(taken[way, pages][1:]), 2),
                "least": round(min(taken[way, pages][1:]), 2),
                "greatest": round(max(taken[way, pages][1:]), 2),
            }
            for pages in (SMALL, HUGE)
        }
        ratio = round(ms[SMALL]["median"] / ms[HUGE]["median"], 2)
        found.append({"way": way, "rows": rows, "ms": ms, "ratio": ratio})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table (the least time in brackets), keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="of the input")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    args = parser.parse_args(argv)
    return run_command("benchmarks/huge_pages.py", argv, args.json, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
