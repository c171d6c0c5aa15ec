"""Compiles the kernels with the C compiler of this machine, once for each text and processor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from looped_spec.settings import c_compiler, cache_folder

logger = logging.getLogger(__name__)

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "linear.c", "branches.c"))
_FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_SECONDS = 120


class BuildError(Exception):
    """There is no compiler, or it cannot make these kernels."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Return the compiled kernels, from the cache of the user if they were made before.

    Only on POSIX systems. PyTorch must be imported already: its threads serve the kernels too. `CC`
    names the compiler, `XDG_CACHE_HOME` where the cache lies.

    Raises:
        BuildError: another system, no compiler, or none of the ways to compile succeeds.
    """
    if os.name != "posix":
        raise BuildError(f"they are made on POSIX systems only, and this one is '{os.name}'")
    try:
        compiler = shlex.split(c_compiler()) or _known_compiler()
    except ValueError as error:
        raise BuildError(f"CC is no command: {error}") from error
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    reasons = []
    # The threads of PyTorch's OpenMP are used, or none: a second pool would fight with them.
    for openmp in ("-fopenmp", "-fopenmp-simd"):
        flags = [*_FLAGS, native, openmp]
        try:
            with _library_folder() as folder:
                library = _compiled(compiler, flags, folder)
                return ctypes.CDLL(str(library), mode=os.RTLD_NOW)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            reasons.append(output.strip().splitlines()[-1] if output.strip() else repr(error))
            logger.debug("kernels do not build with %s: %s", " ".join(flags), output)
    raise BuildError(f"{compiler[0]} cannot build them: {reasons[-1]}")


def _known_compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C compiler (cc, gcc, clang, or the one that CC names)")


def _compiled(compiler: list[str], flags: list[str], folder: Path) -> Path:
    """Return the library that the compiler makes of the source with these flags, in
    `folder`, where it may lie already."""
    command = [*compiler, *flags]
    processor = platform.processor() or platform.machine()
    texts = [source.read_text() for source in _SOURCES]
    key = "\0".join((*command, processor, _processor_flags(), sys.platform, *texts))
    name = hashlib.sha256(key.encode()).hexdigest()[:20]
    for library in folder.glob(f"kernels-{name}-*.so"):
        if library.stem.endswith(_digest(library)):
            return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        linked = Path(scratch) / "kernels.so"
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in _SOURCES]
        steps = [
            [*command, "-c", str(source), "-o", compiled]
            for source, compiled in zip(_SOURCES, objects, strict=True)
        ]
        for step in (*steps, [*compiler, "-shared", *objects, "-lm", "-o", str(linked)]):
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=_SECONDS)
        library = folder / f"kernels-{name}-{_digest(linked)}.so"
        linked.replace(library)  # whole or not at all, should two processes build
    return library


def _digest(library: Path) -> str:
    """Return what the end of a library's name must be: half of one, as a full disk or a crash
    leaves it, would end the process that loads it."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:20]


@contextlib.contextmanager
def _library_folder() -> Iterator[Path]:
    """Yield the cache, or where there is none a folder that is removed again: what is loaded needs
    no file any more."""
    cache = _cache()
    if cache is not None:
        yield cache
        return
    with tempfile.TemporaryDirectory(prefix="looped-spec-") as folder:
        yield Path(folder)


def _cache() -> Path | None:
    """Return the user's cache, None where it cannot be written to or others may."""
    try:
        folder = cache_folder() / "looped-spec"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        is_ours_alone = found.st_uid == os.getuid() and not found.st_mode & 0o022
        if is_ours_alone and os.access(folder, os.W_OK):  # what lies there is run
            return folder
    except (OSError, RuntimeError) as error:  # there may be no home
        logger.debug("no cache for compiled kernels: %s", error)
    return None


def _processor_flags() -> str:
    """Return what tells processors apart, so that a home shared by machines serves each."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
