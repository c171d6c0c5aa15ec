"""Which commit of the sources runs, where they are a checkout."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

_SECONDS = 10.0


@cache
def commit() -> str | None:
    """Return the commit that this package runs at; see `commit_of`."""
    return commit_of(Path(__file__).resolve().parent.parent)


def commit_of(folder: Path) -> str | None:
    """Return the commit that a package is checked out at, with `-dirty` behind it where tracked
    files of the package are not as they were committed.

    None for a package that was installed otherwise, or where nobody can tell: git is missing, or
    refuses a folder of another user.
    """
    # An environment may lie within a checkout of something else.
    if _git(folder, "ls-files", "--error-unmatch", "version.py") is None:
        return None
    head = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    if head is None or changed is None:
        return None
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git says of a folder, None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
