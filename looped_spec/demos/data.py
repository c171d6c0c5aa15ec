"""Training and measuring text: reading, the held-out split, and what the model card records of it.

No text is part of the package; every path comes from the user.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError
from looped_spec.offline.documents import articles

HELD_OUT_EVERY = 25
"""One document in this many, chosen by its own hash, is never trained on."""

PYTHON_BYTES = 3_500_000
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    | {"pydoc_data", "encodings"}  # tables, not programs
)


@dataclass(frozen=True)
class Source:
    """Documents of one kind, and where they come from (no paths: hashes and counts)."""

    name: str
    documents: tuple[str, ...]
    provenance: dict[str, Any]

    def train(self) -> list[str]:
        """Return the documents to train on."""
        return [text for text in self.documents if not is_held_out(text)]

    def held_out(self) -> list[str]:
        """Return the documents to measure on."""
        return [text for text in self.documents if is_held_out(text)]


def is_held_out(text: str) -> bool:
    """Tell whether a document is kept out of training; a stable property of its text."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_EVERY == 0


def read_gsm8k(path: Path) -> Source:
    """Read a GSM8K file; a document is `Question: ...`, a line break, `Answer: ...`."""
    return _read_lines("gsm8k", path, lambda r: f"Question: {r['question']}\nAnswer: {r['answer']}")


def read_humaneval(path: Path) -> Source:
    """Read HumanEval; a document is a prompt with its canonical solution. Only for measuring."""
    return _read_lines("humaneval", path, lambda r: f"{r['prompt']}{r['canonical_solution']}")


def read_wikitext(path: Path) -> Source:
    """Read a WikiText file; a document is one article, beginning with its title line.

    Sentences with the placeholder of a rare word are left out: it is no text.
    """
    return _source("wikitext", path, [each.text for each in articles(_read_text(path))])


def read_python(folder: Path, max_bytes: int = PYTHON_BYTES) -> Source:
    """Read Python files below `folder`, without tests, in the order of the hash of their path.

    The order spreads the choice over all packages; it stops before the file that would exceed
    `max_bytes`.
    """
    if not folder.is_dir():
        raise ConfigError(f"no such folder: {folder} (expected a folder with Python source)")
    ranked = sorted(
        (hashlib.sha256(name.encode()).hexdigest(), name)
        for name in (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
        if not _SKIPPED_FOLDERS & set(name.split("/"))
        and not name.rsplit("/", 1)[-1].startswith("_sysconfigdata")  # describes the build machine
    )
    documents: list[str] = []
    digest, total = hashlib.sha256(), 0
    for _, name in ranked:
        raw = (folder / name).read_bytes()
        if total + len(raw) > max_bytes:
            break
        try:
            text = raw.decode().strip()
        except UnicodeDecodeError:
            continue
        if not text:
            continue
        documents.append(text)
        total += len(raw)
        digest.update(name.encode() + b"\0" + raw + b"\0")
    if not documents:
        raise ConfigError(f"no Python files to train on in {folder}")
    provenance = {
        "python_version": platform.python_version(),
        "files": len(documents),
        "bytes": total,
        "sha256_of_names_and_contents": digest.hexdigest(),
    }
    return Source("python", tuple(documents), provenance)


def _read_lines(name: str, path: Path, render: Callable[[dict[str, Any]], str]) -> Source:
    documents = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        try:
            documents.append(render(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a {name} item ({error!r})") from error
    return _source(name, path, documents)


def _source(name: str, path: Path, documents: Iterable[str]) -> Source:
    kept = tuple(documents)
    if not kept:
        raise ConfigError(f"{path} holds no {name} document")
    raw = path.read_bytes()
    provenance = {
        "file": path.name,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "documents": len(kept),
        "bytes": len(raw),
    }
    return Source(name, kept, provenance)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
