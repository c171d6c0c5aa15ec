"""What other processes of this machine are."""

from __future__ import annotations

from pathlib import Path


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
