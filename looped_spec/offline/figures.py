"""What all pictures share: matplotlib without a window, colours, and the files they go to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError, LoopedSpecError, UnsupportedError

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, which people who see red and green alike can tell apart."""

GREY = "#808080"
"""Readable on white and on black."""


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


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format of the name of its file."""
    try:
        figure.savefig(path, dpi=96)
    except OSError as error:
        raise LoopedSpecError(f"cannot write '{path}': {error.strerror}") from error
