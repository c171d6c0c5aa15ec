"""The benchmark of huge pages: either kind of page gives the same numbers, and each is timed."""

from __future__ import annotations

import json
from pathlib import Path

import huge_pages
import pytest
import torch
from cpu_model import CONFIG

TINY = CONFIG | {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}


def test_pages_change_no_number() -> None:
    ways = huge_pages.products(TINY)
    assert {tuple(by_pages) for by_pages in ways.values()} == {("small pages", "huge pages")}
    with torch.inference_mode():
        for by_pages in ways.values():
            calls = zip(*by_pages.values(), huge_pages.shapes_of(TINY), strict=True)
            for small, huge, (rows, columns) in calls:
                x = torch.randn(3, columns)
                assert small(x).shape == (3, rows)
                assert torch.equal(small(x), huge(x))


def test_each_way_is_timed_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huge_pages, "CONFIG", TINY)
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 1 << 21)
    out, threads = tmp_path / "pages.json", torch.get_num_threads()
    assert huge_pages.main(["--repeats", "2", "--rows", "1", "3", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    rows = {(one["way"], one["rows"]) for one in document["results"]}
    assert {("torch", 1), ("torch", 3)} <= rows
    assert all(
        0 < ms["least"] <= ms["median"] <= ms["greatest"]
        for one in document["results"]
        for ms in one["ms"].values()
    )
    assert "| torch, 3 rows |" in capsys.readouterr().out
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 0)
    assert huge_pages.main([]) == 2
    assert "turned off" in capsys.readouterr().err
