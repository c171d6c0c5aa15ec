"""How the Triton kernel cuts its work: from shapes alone, so that nothing is read from tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SPLITS = 32
_FEW_PAIRS = 32
"""Up to as many pairs of row and query head a request is taken to decode or verify."""
_KEYS_PER_SPLIT = 128
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True)
class Tiles:
    """What one program holds: pairs of row and query head, keys, numbers of a head. Powers of 2.

    Tensor cores want 16 pairs and 16 keys at least. A tile of keys has at most 16 KiB, so that two
    of keys and two of values fit the shared memory of any device with compute capability 8 or more.
    Without tensor cores, in fp32, tiles are smaller: the products are held in registers.
    """

    pairs: int
    keys: int
    dim: int

    @classmethod
    def of(cls, num_pairs: int, head_dim: int, dtype: torch.dtype) -> Tiles:
        """Choose tiles for requests with `num_pairs` pairs each per key/value head."""
        exact = dtype.itemsize > 2
        dim = max(16, _power_of_2(head_dim))
        most_pairs = max(16, min(64, (2048 if exact else 8192) // dim))
        most_keys = max(16, min(64, (8192 if exact else 16384) // (dim * dtype.itemsize)))
        return cls(max(16, min(_power_of_2(num_pairs), most_pairs)), most_keys, dim)


def choose_splits(num_pairs: int, num_programs: int, num_keys: int, num_processors: int) -> int:
    """Return in how many parts to read contexts: a power of 2.

    Few requests that decode leave most of a large device idle, so their contexts are split until
    there are about two programs for every multiprocessor, as long as a part of the longest context
    is worth a program.

    Args:
        num_pairs: pairs of row and query head of each request, per key/value head; a prefill, which
            has many, is not split.
        num_programs: how many programs there are without splitting.
        num_keys: tokens that the block tables have room for.
        num_processors: multiprocessors of the device.
    """
    splits = 1
    while (
        num_pairs <= _FEW_PAIRS
        and splits < MAX_SPLITS
        and num_programs * splits < num_processors * _PROGRAMS_PER_PROCESSOR
        and num_keys >= 2 * splits * _KEYS_PER_SPLIT
    ):
        splits *= 2
    return splits


def _power_of_2(number: int) -> int:
    """Return the least power of 2 that is not below `number`."""
    return 1 << (number - 1).bit_length()
