"""What a person sees: text on stdout, one line of diagnostics on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from looped_spec.cli.main import PROG
from looped_spec.errors import LoopedSpecError

_LOGGER = "looped_spec"
# A model may write anything; a terminal would obey these instead of showing them.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def is_terminal(stream: object) -> bool:
    """Tell whether a standard stream (None when it is closed) is a terminal."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty())


def write(text: str) -> None:
    """Write text to stdout at once; what its encoding lacks becomes an escape.

    Raises `LoopedSpecError` if it cannot be written, `BrokenPipeError` if the reader went away.
    """
    if sys.stdout is None:
        return
    if is_terminal(sys.stdout):
        text = text.translate(_CONTROLS)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        raise LoopedSpecError(f"cannot write to stdout: {error.strerror}") from error


def note(text: str) -> None:
    """Print one line of diagnostics on stderr, if there still is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"{PROG}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def log_level(verbose: bool) -> Iterator[None]:
    """Show the package's log on stderr for a while: warnings, and with `verbose` also INFO."""
    logger = logging.getLogger(_LOGGER)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{PROG}: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def shorten(text: str, width: int = 70) -> str:
    """Return the start of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _discard_stdout() -> None:
    """Drop what is still buffered, so that the interpreter's last flush does not fail aloud."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
