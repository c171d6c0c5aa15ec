"""Other processes of this machine: which there are, and how long tests wait for them."""

from __future__ import annotations

from pathlib import Path

PATIENCE_SECONDS = 300
"""What does not come for so long never will, however busy the machine is."""


def descendants(root: int) -> dict[int, str]:
    """Return the command lines of the processes that a process has started, and of theirs."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names[pid] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    found: dict[int, str] = {}
    wave = [root]
    while wave:
        wave = [pid for pid, parent in parents.items() if parent in wave]
        found |= {pid: names[pid] for pid in wave}
    return found
