"""Reads the plugin guide: its samples, its files, and the stubs that it shows of the contract.

As a command, `guide.py PAGE FOLDER` writes the files that a page shows into a folder.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted(DOCS.glob("plugin-guide*.md"))

_BLOCK = re.compile(r"(?:^`([\w./-]+)`(?:, continued)?:\n\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)


def page(name: str) -> str:
    """Return the text of a page, `plugin-guide-NAME.md`, or of the first for an empty name."""
    return (DOCS / f"plugin-guide{'-' if name else ''}{name}.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of a language that are no files."""
    return [body for file, kind, body in _BLOCK.findall(text) if kind == language and not file]


def files(text: str) -> dict[str, str]:
    """Return the content of every file that is shown; blocks of the same name are joined."""
    found: dict[str, list[str]] = {}
    for file, _, body in _BLOCK.findall(text):
        if file:
            found.setdefault(file, []).append(body)
    return {file: "\n".join(parts) for file, parts in found.items()}


def write_files(text: str, folder: Path) -> list[str]:
    """Write every file that a page shows, and return their paths in the folder."""
    shown = files(text)
    for file, content in shown.items():
        (folder / file).write_text(content)
    return list(shown)


def section(text: str, heading: str) -> str:
    """Return what stands below a heading, up to the next one of any level."""
    _, _, rest = text.partition(f"\n{heading}\n")
    assert rest, f"no heading '{heading}'"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of every table row below a header, without backticks around a cell."""
    lines = re.findall(r"^\|(.*)\|$", text, re.M)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    is_rule = [all(set(cell) <= set("-:") for cell in line) for line in cells]
    heads = {index - 1 for index, rule in enumerate(is_rule) if rule}
    return [
        [cell.replace("\\|", "|") for cell in line]
        for index, line in enumerate(cells)
        if not is_rule[index] and index not in heads
    ]


def stub(source: str) -> dict[str, str]:
    """Return the signatures of a module by name: classes with their fields and methods, functions,
    constants. Docstrings, bodies and private names are left out."""
    found = {}
    for node in ast.parse(source).body:
        for name in _names(node):
            if not name.startswith("_") or name == "__init__":
                found[name] = ast.unparse(_bare(node))
    return found


def members(stubbed: str) -> list[str]:
    """Return the names of the fields and methods of a class in a stub."""
    (node,) = ast.parse(stubbed).body
    return [name for member in getattr(node, "body", []) for name in _names(member)]


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _bare(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.FunctionDef):
        node.body = [ast.Expr(ast.Constant(...))]
    elif isinstance(node, ast.ClassDef):
        node.body = [
            _bare(member)
            for member in node.body
            if any(not name.startswith("_") or name == "__init__" for name in _names(member))
        ] or [ast.Expr(ast.Constant(...))]
    return node


if __name__ == "__main__":
    print(*write_files(Path(sys.argv[1]).read_text(), Path(sys.argv[2])), sep="\n")
