"""Texts to measure on, in two groups that share no text: one to select by, one to evaluate with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError, check_int, closest
from looped_spec.offline.documents import Documents, read_documents
from looped_spec.tokenization import Tokenizer

SELECTION, EVALUATION = "selection", "evaluation"
GROUPS = (SELECTION, EVALUATION)
_SALT = "looped-spec workload group: "


@dataclass(frozen=True)
class Workload:
    """Rows of token ids, all of one length and each from the beginning of a document.

    `provenance` has hashes, counts and names, but no text and no folder.
    """

    name: str
    rows: list[list[int]]
    provenance: dict[str, Any]
    group: str | None = SELECTION


def group_of(text: str) -> str:
    """Return the group of a text, which depends on the text alone.

    So the groups are disjoint whatever files the texts come from, and however often they stand
    there; each gets about half.
    """
    digest = hashlib.sha256(f"{_SALT}{text}".encode(errors="surrogatepass")).digest()
    return GROUPS[digest[0] & 1]


def check_group(group: str) -> None:
    """Raise `ConfigError` unless `group` is one of the two."""
    if group not in GROUPS:
        raise ConfigError(
            f"group must be one of {', '.join(GROUPS)}, got {group!r}{closest(group, GROUPS)}"
        )


def named_path(text: str) -> tuple[str, Path]:
    """Split `NAME=PATH`, as `--workload` takes it."""
    name, equals, path = text.partition("=")
    if not equals or not name.strip() or not path:
        raise ConfigError(f"--workload must be NAME=PATH, got '{text}'")
    if not name.strip().isprintable():
        raise ConfigError(f"NAME of --workload must be a text of one line, got {name.strip()!r}")
    return name.strip(), Path(path)


def named_paths(texts: Sequence[str]) -> dict[str, Path]:
    """Split several `NAME=PATH`; a name twice is an error, and so is none at all."""
    paths: dict[str, Path] = {}
    for text in texts:
        name, path = named_path(text)
        if name in paths:
            raise ConfigError(f"--workload {name} is given twice")
        paths[name] = path
    if not paths:
        raise ConfigError("there is no text to measure on: give --workload NAME=PATH")
    return paths


def read_workload(
    name: str,
    path: Path,
    tokenizer: Tokenizer,
    *,
    group: str | None,
    num_rows: int,
    num_tokens: int,
    min_rows: int | None = None,
    joins: bool = False,
) -> Workload:
    """Read the first `num_rows` documents of one group with at least `num_tokens` tokens, cut to
    that many; of both groups if `group` is None.

    With `joins` a document that is too short goes on with the next ones of its group, a blank line
    between them, until it is long enough; else it is left out.

    Raises:
        ConfigError: the file is unreadable or of another form, or the group has fewer than
            `min_rows` such documents (default: `num_rows`).
    """
    if group is not None:
        check_group(group)
    check_int("num_rows", num_rows, 1)
    check_int("num_tokens", num_tokens, 1)
    documents = read_documents(path)
    rows: list[list[int]] = []
    begun: list[str] = []
    for document in documents.items:
        if group is None or group_of(document.text) == group:
            begun = [*begun, document.text] if joins else [document.text]
            ids = tokenizer.encode("\n\n".join(begun))
            if len(ids) >= num_tokens:
                rows.append(ids[:num_tokens])
                begun = []
            if len(rows) == num_rows:
                break
    least = num_rows if min_rows is None else min_rows
    if len(rows) < max(least, 1):
        raise ConfigError(_too_few(name, path, documents, group, len(rows), least, num_tokens))
    return Workload(name, rows, _provenance(documents, group, rows), group)


def read_workloads(
    paths: Mapping[str, Path],
    tokenizer: Tokenizer,
    *,
    group: str | None,
    num_rows: int,
    num_tokens: int,
    min_rows: int | None = None,
) -> list[Workload]:
    """Read several files by name; see `read_workload`."""
    return [
        read_workload(
            name,
            path,
            tokenizer,
            group=group,
            num_rows=num_rows,
            num_tokens=num_tokens,
            min_rows=min_rows,
        )
        for name, path in paths.items()
    ]


def _too_few(
    name: str,
    path: Path,
    documents: Documents,
    group: str | None,
    found: int,
    least: int,
    tokens: int,
) -> str:
    counts = {each: sum(group_of(d.text) == each for d in documents.items) for each in GROUPS}
    part = f"{path}" if group is None else f"the {group} group of {path}"
    split = (
        ""
        if group is None
        else (
            f" (its {len(documents.items)} different texts are split into {counts[SELECTION]} to "
            f"select by and {counts[EVALUATION]} to evaluate with)"
        )
    )
    return (
        f"workload {name} has too few texts: {part} has {found} of at least {tokens} tokens, "
        f"{max(least, 1)} are needed{split}; give a longer file, or ask for fewer or shorter texts"
    )


def _provenance(
    documents: Documents, group: str | None, rows: Sequence[Sequence[int]]
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{' '.join(map(str, row))}\n".encode())
    return {
        "file": documents.file,
        "sha256": documents.sha256,
        "bytes": documents.num_bytes,
        "documents": len(documents.items),
        "group": group,
        "items": len(rows),
        "tokens_each": len(rows[0]),
        "sha256_of_token_ids": digest.hexdigest(),
    }
