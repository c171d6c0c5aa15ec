"""Loading a model for a verb: Ctrl-C ends it at once, and too little memory is one line."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from looped_spec.cli import console
from looped_spec.cli.main import EXIT_INTERRUPTED
from looped_spec.errors import CapacityError

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

_NO_MEMORY = ("out of memory", "allocate memory")


def load_model(model: str, options: Mapping[str, Any]) -> LLM:
    """Import the engine, which takes a while, and load `model` with keyword arguments of `LLM`."""
    with _exit_on_interrupt(), console.stdout_for_ours_alone():
        from looped_spec.runtime.llm import LLM

        return LLM(model, **options)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn a failed allocation into a `CapacityError` that names the options to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, RuntimeError) and not any(s in reason for s in _NO_MEMORY):
            raise
        raise CapacityError(
            "there is not enough memory: lower --kv-cache-memory-bytes, --max-num-seqs or "
            f"--max-model-len ({reason[:200]})"
        ) from error


@contextlib.contextmanager
def _exit_on_interrupt() -> Iterator[None]:
    """End the process on SIGINT without unwinding.

    An exception in the middle of an import of torch ends in its abort handler, or is swallowed.
    Nothing is half done while a model loads, so there is nothing to unwind either.
    """
    try:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            raise ValueError("SIGINT is ignored, or another's business")
        signal.signal(signal.SIGINT, _exit)
    except ValueError:  # Also outside the main thread, which is the only one that signals reach.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: object) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"{console.PROG}: interrupted\n".encode())
    os._exit(EXIT_INTERRUPTED)
