"""Which preset file a user means: one finder for every verb and for `--preset` of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from looped_spec.presets.preset import word_of_file_name


def is_path(name: str, files: Sequence[Path]) -> bool:
    """Whether `name` is the path of a file rather than something to look for among `files`.

    A hub id holds a slash too: what begins with the model of one of the files is a path only if
    there is such a path.
    """
    if Path(name).expanduser().exists():
        return True
    if os.sep not in name and not name.startswith("~"):
        return False
    words = name.split()[:1]
    models = {f"model={word_of_file_name(word)},".lower() for word in words}
    return not any(file.name.lower().startswith(tuple(models)) for file in files)


def named_files(name: str, files: Sequence[Path]) -> list[Path]:
    """Return the files that `name` can mean: the one that is called so, else those that have each
    of its words as a part.

    Words are apart by blanks, as in "1.4B H200"; a model is found by what it is called elsewhere,
    as in "demo:NAME" or "ORGANISATION/NAME H200". Of two files of one name the first counts.
    """
    first = {file.name: file for file in reversed(files)}
    unique = [file for file in files if first[file.name] is file]
    exact = [file for file in unique if name in (file.name, file.stem)]
    words = [(word.lower(), word_of_file_name(word).lower()) for word in name.split()]
    return exact or [
        file
        for file in unique
        if words and all(any(form in file.name.lower() for form in forms) for forms in words)
    ]


def shown_names(files: Sequence[Path]) -> str:
    """Lay out names of files for an error, no more than a line's worth."""
    more = f" and {len(files) - 6} more" if len(files) > 6 else ""
    return ", ".join(f"'{file.stem}'" for file in files[:6]) + more
