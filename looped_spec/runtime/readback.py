"""Numbers on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """One copy to the host, begun when this is made; `wait` waits for it alone.

    On a CUDA device the copy goes to pinned memory and waits for nothing on the host; what is
    submitted behind it may run meanwhile.
    """

    def __init__(self, numbers: Tensor) -> None:
        """Begin to copy `numbers` (any shape and dtype); on a CUDA device the tensor may be
        overwritten by what is submitted from now on."""
        self._event: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))
        else:
            self._host = numbers.cpu()

    def wait(self) -> Tensor:
        """Return the numbers on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host
