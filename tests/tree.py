"""What is in the repository, for the tests that read it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracked_texts() -> dict[str, str]:
    """Return the text of every tracked file by its path in the repository, without binary files.

    A file that is deleted in the working tree, or is a link to a folder, has no text.
    """
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    texts = {}
    for name in names:
        if not (ROOT / name).is_file():
            continue
        raw = (ROOT / name).read_bytes()
        if b"\0" not in raw:
            texts[name] = raw.decode()
    return texts
