"""The report as a page that needs nothing else, or as Markdown with its pictures beside it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.offline.figures import inked, inline_svg, save
from looped_spec.offline.report_document import Section, Table, sections
from looped_spec.presets import Preset

SUFFIXES = (".html", ".md")

_STYLE = """\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1b1b; background: #ffffff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { width: 100%; height: auto; max-width: 68rem; min-width: 34rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.8rem; text-align: left; border-bottom: 1px solid #8884;
  vertical-align: top; }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #16181c; } }
@media print { body { max-width: none; } figure, .table { break-inside: avoid; } }
"""


def check_report_name(path: Path) -> None:
    """Raise `ConfigError` unless the name of a report says which kind it is."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"the name of a report must end in {' or '.join(SUFFIXES)}, got '{path.name}'"
        )


def write_report(preset: Preset, loads: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """Write the report and return the files that were written; `path` says which kind.

    Raises:
        LoopedSpecError: a file cannot be written.
    """
    check_report_name(path)
    if path.suffix.lower() == ".html":
        with inked():
            text = html_page(sections(preset, loads))
        _write(path, text)
        return [path]
    parts = sections(preset, loads)
    pictures = [picture for part in parts for picture in part.pictures]
    files = {id(picture): f"{path.stem}-{picture.name}.png" for picture in pictures}
    for picture in pictures:
        save(picture.figure, path.with_name(files[id(picture)]))
    _write(path, markdown(parts, files))
    return [path, *(path.with_name(name) for name in files.values())]


def html_page(parts: Sequence[Section]) -> str:
    """Return a page without any link to elsewhere; its pictures are drawn in it."""
    body = []
    for number, part in enumerate(parts):
        level = 1 if number == 0 else 2
        body.append(f"<h{level}>{html.escape(part.title)}</h{level}>")
        body += [f"<p>{html.escape(text)}</p>" for text in part.text]
        body += [_html_table(table) for table in part.tables]
        for place, picture in enumerate(part.pictures):
            svg = inline_svg(picture.figure, f"p{number}-{place}", picture.alt)
            body.append(f"<figure>{svg}</figure>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(parts[0].title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def markdown(parts: Sequence[Section], files: Mapping[int, str]) -> str:
    """Return Markdown; `files` are the names of the pictures by their identity."""
    blocks = []
    for number, part in enumerate(parts):
        blocks.append(f"{'#' if number == 0 else '##'} {part.title}")
        blocks += part.text
        blocks += [_markdown_table(table) for table in part.tables]
        blocks += [f"![{_cell(p.alt)}]({files[id(p)]})" for p in part.pictures]
    return "\n\n".join(blocks) + "\n"


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table.head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n"
        for row in table.rows
    )
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _markdown_table(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Return a text that cannot end its cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoopedSpecError(f"cannot write '{path}': {error.strerror}") from error
