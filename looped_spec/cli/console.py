"""What a person sees: text on stdout, one line of diagnostics on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from looped_spec.errors import LoopedSpecError

PROG = "looped-spec"

_LOGGER = "looped_spec"
# A model may write anything; a terminal would obey these instead of showing them.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def is_terminal(stream: object) -> bool:
    """Tell whether a standard stream (None when it is closed) is a terminal."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty())


def write(text: str, is_trusted: bool = False) -> None:
    """Write text to stdout at once; what its encoding lacks becomes an escape.

    So do control characters on a terminal, unless the text `is_trusted`, which is our own alone.
    Raises `LoopedSpecError` if it cannot be written, `BrokenPipeError` if the reader went away.
    """
    if sys.stdout is None:
        return
    if is_terminal(sys.stdout) and not is_trusted:
        text = text.translate(_CONTROLS)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise LoopedSpecError(f"cannot write to stdout: {error.strerror}") from error


def flush() -> None:
    """Write what is still buffered for stdout; raises what `write` raises."""
    write("")


def note(text: str) -> None:
    """Print one line of diagnostics on stderr, if there still is one.

    What its encoding lacks becomes an escape: half a character of a config.json is in no encoding.
    """
    if sys.stderr is not None:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(f"{PROG}: {shown}", file=sys.stderr, flush=True)
        except OSError:
            _discard(sys.stderr)


def stdout_for_ours_alone() -> contextlib.AbstractContextManager[object]:
    """Send to stderr what others print for a while: a plugin must not spoil the output."""
    return contextlib.redirect_stdout(sys.stderr)


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


def discard_stdout() -> None:
    """Drop what is still buffered, so that the interpreter's last flush does not fail aloud."""
    if sys.stdout is not None:
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
