"""Plain tables for people: columns apart by two blanks, nothing that a terminal must interpret."""

from __future__ import annotations

from collections.abc import Sequence


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows below a header: the first column to the left, the others to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def number(value: float | None, decimals: int = 2, unit: str = "") -> str:
    """Format a number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{decimals}f}{unit}"


def percent(rate: float | None) -> str:
    """Format a rate of 0..1 as a percentage."""
    return number(None if rate is None else 100 * rate, 1, "%")
