"""A hub of one repository, in the place of the real client's requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest


class FakeHub:
    """Keeps the files of a repository, what was asked of it, and the snapshot it was copied to."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.snapshot = folder / "snapshots" / self.commit

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
        """Answer what would go to the network."""
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", self.list_files)
        return self

    def add(self, files: Mapping[str, bytes]) -> None:
        """Put files into the repository."""
        self.files |= files

    def fetched(self) -> set[str]:
        """Return the names of all files that were downloaded."""
        paths = self.snapshot.rglob("*")
        return {str(path.relative_to(self.snapshot)) for path in paths if path.is_file()}

    def list_files(self, repo_id: str, *, revision: str | None = None) -> list[str]:
        """Name all files, as the client's `list_repo_files` does."""
        self.asked.append((repo_id, revision))
        return list(self.files)

    def download(
        self, repo_id: str, *, revision: str | None, allow_patterns: Any, ignore_patterns: Any
    ) -> str:
        """Copy the files that match to the snapshot, as the client's `snapshot_download` does."""
        self.asked.append((repo_id, revision))
        matching = huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for name in matching:
            path = self.snapshot / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.files[name])
        return str(self.snapshot)
