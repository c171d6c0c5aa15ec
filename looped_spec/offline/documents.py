"""Documents out of the files of a user: JSON lines of known shapes, WikiText, or plain text.

No text is part of the package; every path comes from the user.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from looped_spec.errors import ConfigError

MAX_BYTES = 2**30
_PLACEHOLDER_SENTENCE = re.compile(r"[^.\n]*<unk>[^.\n]*(?:\.|(?=\n|$))")
_ARTICLE = re.compile(r"^ = [^=\n]+ = \n", re.MULTILINE)
_PARAGRAPH = re.compile(r"\S[^\n]*(?:\n[^\n]*\S[^\n]*)*")
_SHAPES = "question and answer, prompt and canonical_solution, prompt, or text"
_JSON_LINES = (".jsonl", ".ndjson")
_BINARY = (".parquet", ".arrow", ".gz", ".zst", ".zip")


class Document(NamedTuple):
    """A text, and the line of its file where it begins, counted from 1."""

    text: str
    line: int


@dataclass(frozen=True)
class Documents:
    """What a file holds, each text once, in the order of the file.

    Attributes:
        file: its name without folders.
        sha256: of its bytes, in hexadecimal.
        num_bytes: its size.
        items: the documents; none is blank.
    """

    file: str
    sha256: str
    num_bytes: int
    items: tuple[Document, ...]


def read_documents(path: Path) -> Documents:
    """Read a file of documents.

    One whose name ends in `.jsonl` has an object on each line: a question with its answer (as
    GSM8K), a prompt with its `canonical_solution` (as HumanEval), or a `prompt` or `text` alone.
    Any other is text: articles of WikiText where there are their title lines, else paragraphs apart
    by blank lines.

    Raises:
        ConfigError: the file cannot be read, has another form (with the line), or holds no text.
    """
    if path.suffix.lower() in _BINARY:
        raise ConfigError(
            f"{path} is a {path.suffix} file, which is not read: convert it to JSON lines (.jsonl) "
            f"of {_SHAPES}, or unpack it"
        )
    raw = read_bytes(path)
    text = decode(raw, path)
    if path.suffix.lower() in _JSON_LINES:
        found = list(_json_documents(text, path))
    else:
        found = articles(text) or paragraphs(text)
    seen: set[str] = set()
    kept = []
    for document in found:
        if document.text not in seen:
            seen.add(document.text)
            kept.append(document)
    if not kept:
        raise ConfigError(f"{path} holds no text")
    return Documents(path.name, hashlib.sha256(raw).hexdigest(), len(raw), tuple(kept))


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file of at most `MAX_BYTES`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {path}: {reason}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES // 2**20} MiB: take a part of it")
    return raw


def decode(raw: bytes, path: Path) -> str:
    """Return UTF-8 bytes as text, line ends made alike; `path` is for the error."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} is not UTF-8 text (line {line})") from error
    return text.replace("\r\n", "\n")


def articles(text: str) -> list[Document]:
    """Return the articles of a WikiText file, each beginning with its title line.

    Sentences with the placeholder of a rare word are left out: it is no text.
    """
    starts = [match.start() for match in _ARTICLE.finditer(text)]
    ends = [*starts[1:], len(text)][: len(starts)]
    texts = [
        _PLACEHOLDER_SENTENCE.sub("", text[start:end].strip()).strip()
        for start, end in zip(starts, ends, strict=True)
    ]
    lines = _lines_at(text, starts)
    return [Document(*each) for each in zip(texts, lines, strict=True) if each[0]]


def paragraphs(text: str) -> list[Document]:
    """Return what stands between blank lines."""
    matches = list(_PARAGRAPH.finditer(text))
    lines = _lines_at(text, [match.start() for match in matches])
    return [
        Document(match.group().strip(), line) for match, line in zip(matches, lines, strict=True)
    ]


def _lines_at(text: str, places: Sequence[int]) -> list[int]:
    """Return the line, from 1, of each of ascending places in a text."""
    lines, line, last = [], 1, 0
    for place in places:
        line += text.count("\n", last, place)
        last = place
        lines.append(line)
    return lines


def _json_documents(text: str, path: Path) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deeply, or a number too long")
            raise ConfigError(f"{where} is no JSON: {reason}") from error
        found = _text_of(record)
        if found is None:
            keys = ", ".join(record) if isinstance(record, dict) else f"{record!r:.40}"
            raise ConfigError(f"{where} must be an object with {_SHAPES}, got {keys or 'no key'}")
        if not found.strip():
            raise ConfigError(f"{where} has an empty text")
        yield Document(found, number)


def _text_of(record: Any) -> str | None:
    """Return the text of an object of a known shape, else None."""
    if not isinstance(record, dict):
        return None
    texts = {key: value for key, value in record.items() if isinstance(value, str)}
    if {"question", "answer"} <= texts.keys():
        if not texts["question"].strip():
            return ""
        return f"Question: {texts['question']}\nAnswer: {texts['answer']}"
    if {"prompt", "canonical_solution"} <= texts.keys():
        return texts["prompt"] + texts["canonical_solution"]
    return texts.get("prompt", texts.get("text"))
