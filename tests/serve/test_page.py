"""The live page: its files, and in a browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from live_server import LiveServer, running, until
from processes import PATIENCE_SECONDS

from looped_spec.serve.app import PAGE_FILES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
FOLDER = resources.files("looped_spec.serve") / "page"


def text_of(name: str) -> str:
    return (FOLDER / name).read_text()


def test_every_file_is_served_as_it_is(server: LiveServer) -> None:
    for path, (name, media_type) in PAGE_FILES.items():
        reply = server.client.get(path)
        assert reply.body == (FOLDER / name).read_bytes()
        assert reply.headers["content-type"] == f"{media_type}; charset=utf-8"


def test_nothing_is_loaded_from_elsewhere() -> None:
    for name, _ in PAGE_FILES.values():
        urls = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^"'\s]*""", text_of(name)))
        assert urls <= {"http://www.w3.org/2000/svg"}, name  # the name of a format, not a place
    links = re.findall(r'(?:src|href)="(.*?)"', text_of("index.html"))
    assert set(links) == {"page.css", "page.js", "data:,"}


def test_what_the_script_looks_for_is_on_the_page() -> None:
    ids = set(re.findall(r'id="([\w-]+)"', text_of("index.html")))
    wanted = set(re.findall(r'byId\("([\w-]+)"\)', text_of("page.js")))
    assert wanted and wanted <= ids


def test_text_of_the_server_never_becomes_html() -> None:
    script = text_of("page.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_every_colour_exists_for_light_and_dark() -> None:
    style = text_of("page.css")
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    used = set(re.findall(r"var\((--\w+)\)", style + text_of("page.js")))
    assert used <= set(re.findall(r"(--\w+):", light))
    assert set(re.findall(r"(--\w+):", light)) == set(re.findall(r"(--\w+):", dark))


def rendered(server: LiveServer, folder: Path, *flags: str) -> str:
    """Return the page as a browser has it after a few seconds."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--virtual-time-budget=4000", f"--user-data-dir={folder}", *flags),
            f"http://127.0.0.1:{server.port}/",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def generate_over_points(server: LiveServer, count: int) -> None:
    """Generate until the history has `count` more points with tokens, however fast the machine
    is."""
    history = server.front.history
    start = time.time()

    def has_points() -> bool:
        server.client.complete("the cat", max_tokens=60, seed=1, ignore_eos=True)
        points = [point for point in history.as_list() if point["time"] > start]
        return sum(point["tokens_per_second"] > 0 for point in points) >= count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "interval_seconds", 0.1)
        until(has_points)


@pytest.fixture(scope="module")
def adaptive(model: Path) -> Iterator[LiveServer]:
    """A server that chooses and has something to show."""
    options = {"num_speculative_tokens": None, "draft_loops": None, "policy": "goodput"}
    with running(model, options) as server:
        generate_over_points(server, 3)
        yield server


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("size", ["1200,900", "390,900"])
def test_a_browser_shows_what_speculation_does(
    adaptive: LiveServer, tmp_path: Path, size: str
) -> None:
    page = rendered(adaptive, tmp_path, f"--window-size={size}")
    info = adaptive.client.get("/server_info").json["speculation"]
    assert 'id="content" hidden' not in page
    shown = re.sub(r"<[^>]+>", " ", page)
    assert "tokens per second" in shown and "ready - cpu, float32, 3 loops" in shown
    # That of acceptance has one only while drafts are made, which the policy may soon give up.
    assert re.search(r'<svg[^>]*aria-label="Tokens per second"[^>]*>.*?<path', page, re.S)
    for bucket in info["explanation"]["buckets"]:
        assert bucket["reason"] in shown
    rows = sum(len(bucket["scores"]) for bucket in info["explanation"]["buckets"])
    assert page.count("<meter") == rows > 3
    assert f"<dd>{info['controller']['num_switches']}</dd>" in page


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_both_charts_have_a_line_while_drafts_are_made(server: LiveServer, tmp_path: Path) -> None:
    generate_over_points(server, 3)
    page = rendered(server, tmp_path)
    assert len(re.findall(r"<svg[^>]*>.*?<path", page, re.S)) == 2


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_is_asked_for_the_key(model: Path, tmp_path: Path) -> None:
    with running(model, api_key="k") as server:
        page = rendered(server, tmp_path)
    assert "a key is needed" in page
    assert 'id="key" hidden' not in page and 'id="content" hidden' in page
