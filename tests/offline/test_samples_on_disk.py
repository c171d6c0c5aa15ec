"""Samples survive a kill at any byte, a full disk and damage: nothing half written is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.offline import store as store_module
from looped_spec.offline.store import SampleStore, read_samples

HEADER = {"plan": {"model": "m", "settings": {"repeats": 3}}, "started": "2026-01-01"}
CELLS = {"cost B=1": {"ms": [1.5, 2.25]}, "cost B=8": {"ms": [3.0]}, "acceptance": {"texts": 8}}


def write(path: Path, resume: bool = False, header: dict[str, Any] = HEADER) -> SampleStore:
    store = SampleStore(path, header, resume=resume)
    for key, data in CELLS.items():
        if key not in store.cells:
            store.add(key, data)
    return store


def test_what_was_added_is_read_again_by_key(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "s.jsonl"
    with write(path):
        found = read_samples(path)
    assert found.cells == CELLS
    assert found.header["plan"] == HEADER["plan"]


def test_a_file_cut_at_any_byte_resumes_without_a_lost_or_a_doubled_cell(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    write(whole).__exit__(None, None, None)
    raw = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(raw) if byte == ord("\n")]
    path = tmp_path / "cut.jsonl"
    near_ends = {end + step for end in ends for step in (-1, 0, 1)}
    for size in sorted({*range(0, len(raw), 7), *near_ends, len(raw)} - {len(raw) + 1}):
        path.write_bytes(raw[:size])
        kept = max(sum(end <= size for end in ends) - 1, 0)
        if size >= ends[0]:
            assert len(read_samples(path).cells) == kept
        with SampleStore(path, HEADER, resume=True) as store:
            assert len(store.cells) == kept
        with write(path, resume=True):
            pass
        assert path.read_bytes() == raw


@pytest.mark.parametrize("place", [5, 40, -30])
def test_a_changed_byte_is_named_with_its_line(tmp_path: Path, place: int) -> None:
    path = tmp_path / "s.jsonl"
    write(path).__exit__(None, None, None)
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    line = 1 if place > 0 else 4
    with pytest.raises(ConfigError, match=f"line {line} is damaged"):
        read_samples(path)
    with pytest.raises(ConfigError, match=f"line {line} is damaged"):
        SampleStore(path, HEADER, resume=True)


def test_a_cell_twice_is_refused_when_written_and_when_read(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with write(path) as store, pytest.raises(ConfigError, match="measured already"):
        store.add("acceptance", {})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[1]]))
    with pytest.raises(ConfigError, match="line 5 has cell 'cost B=1' a second time"):
        read_samples(path)


def test_a_full_disk_keeps_what_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.jsonl"
    store = write(path)
    before = path.read_bytes()
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) // 2])

    monkeypatch.setattr(store_module.os, "write", full)
    with pytest.raises(LoopedSpecError, match=r"No space left on device.*is kept.*--resume"):
        store.add("more", {"x": 1})
    assert path.read_bytes() == before
    monkeypatch.undo()
    store.add("more", {"x": 1})
    assert read_samples(path).cells == CELLS | {"more": {"x": 1}}
    store.__exit__(None, None, None)


def test_an_interruption_in_the_middle_of_a_line_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.jsonl"
    store = write(path)
    before = path.read_bytes()
    real = os.write

    def interrupted(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise KeyboardInterrupt
        return real(fd, data[: len(data) // 2])

    monkeypatch.setattr(store_module.os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.add("more", {"x": 1})
    assert path.read_bytes() == before
    store.__exit__(None, None, None)


def test_a_file_is_continued_only_if_asked_and_only_for_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with write(path), pytest.raises(ConfigError, match="being written by another process"):
        SampleStore(path, HEADER, resume=True)
    with pytest.raises(ConfigError, match="there already: give --resume"):
        SampleStore(path, HEADER, resume=False)
    other = HEADER | {"plan": {"model": "m", "settings": {"repeats": 4}}}
    with pytest.raises(ConfigError, match=r"plan\.settings\.repeats is 3, this one's 4"):
        SampleStore(path, other, resume=True)
    later = HEADER | {"started": "2026-02-02"}
    with SampleStore(path, later, resume=True) as store:
        assert store.header["started"] == "2026-01-01"


def test_what_cannot_be_written_or_is_no_file_of_samples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(LoopedSpecError, match="cannot write"):
        SampleStore(tmp_path / "file" / "s.jsonl", HEADER, resume=False)
    with pytest.raises(ConfigError, match="cannot read"):
        read_samples(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="holds no samples"):
        read_samples(tmp_path / "empty")
    path = tmp_path / "other version"
    with SampleStore(path, HEADER, resume=False):
        text = path.read_text()
    assert '"schema_version":1' in text
    with write(tmp_path / "nan") as store, pytest.raises(ConfigError, match="finite number"):
        store.add("bad", {"ms": float("nan")})
