"""What all pictures share: matplotlib without a window, colours, and the files they go to."""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError, LoopedSpecError, UnsupportedError

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, which people who see red and green alike can tell apart."""

GREY = "#808080"
"""Readable on white and on black."""

INK = "#010203"
"""Colour of text; in a page it becomes the page's own, so that it can be read in dark mode too."""

_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_NO_METADATA = {key: None for key in ("Creator", "Date", "Format", "Type")}


@dataclass(frozen=True)
class Picture:
    """A figure, the file name that it suggests, and what it shows, in words."""

    name: str
    figure: Any
    alt: str


def check_matplotlib() -> None:
    """Raise `UnsupportedError` with the command that helps if pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "a picture needs matplotlib: pip install 'looped-spec[plots]'"
        ) from error


def check_format(path: Path) -> None:
    """Raise `ConfigError` unless the name of a picture says what kind it is."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"the name of a picture must end in {', '.join(FORMATS)}, got '{path.name}'"
        )


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@contextlib.contextmanager
def inked() -> Iterator[None]:
    """Let what is drawn meanwhile have text and axes of `INK`."""
    from matplotlib import rc_context

    settings: dict[Any, Any] = dict.fromkeys(_INKED, INK)
    with rc_context(settings):
        yield


def inline_svg(figure: Any, name: str, alt: str) -> str:
    """Return a figure as an SVG element for a page: transparent, its text of the page's colour.

    Its identifiers begin with `name`, so that two of them can stand in one page; the same figure
    gives the same text.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Two images that look alike have the same identifier, which nothing refers to.
    text = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\g<1>", text)
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace(INK, "currentColor")
    label = html.escape(alt, quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format of the name of its file."""
    try:
        figure.savefig(path, dpi=96)
    except OSError as error:
        raise LoopedSpecError(f"cannot write '{path}': {error.strerror}") from error
