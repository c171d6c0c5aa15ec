"""A long measurement in parts, each of which is in the file as soon as it was measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from looped_spec.atomic_json import check_target, without_repeats, write_json
from looped_spec.errors import ConfigError

Part = Mapping[str, Any]
"""What was measured in one part, as JSON; times in milliseconds, as files keep six digits."""


class KeptParts:
    """Measures parts by name, or takes them from the file of a run that was stopped.

    The file is whole after every part. Beside "command", "started" and "seconds" of all sessions it
    has `{"is_complete", "settings", "sessions", "parts"}` and what `summarize` makes of the parts
    so far.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        session: Mapping[str, Any],
        summarize: Callable[[Mapping[str, Part]], dict[str, Any]],
        *,
        resume: bool = False,
    ) -> None:
        """Begin, or go on with what `path` holds.

        Args:
            path: the file, None to keep nothing.
            settings: what all parts share; a file of others is not gone on with.
            session: the "command" of this process, and on what it measures.
            summarize: makes the rest of the document of the parts that there are.
            resume: go on with the file if there is one.

        Raises:
            ConfigError: the file cannot be written, holds a run that was stopped (and `resume` is
                not given), or is none that this call can go on with.
        """
        self._path, self._summarize = path, summarize
        self._settings = json.loads(json.dumps(settings))
        self._parts: dict[str, Part] = {}
        self._sessions: list[Mapping[str, Any]] = []
        if resume and path is None:
            raise ConfigError("--resume goes on with a file: give --json FILE")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_target(path)
            self._read(path, resume)
        self._start = time.perf_counter()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._session = {**session, "started": started, "seconds": 0.0, "parts": 0}
        self._sessions.append(self._session)

    def _read(self, path: Path, resume: bool) -> None:
        before = _document(path)
        if not resume:
            if before is not None and before.get("is_complete") is False:
                raise ConfigError(
                    f"'{path}' holds a run that was stopped: --resume goes on with it, or give "
                    "another file"
                )
            return
        if before is None and not path.exists():
            return
        parts = before and before.get("parts")
        if before is None or not isinstance(parts, dict) or not before.get("sessions"):
            raise ConfigError(f"'{path}' cannot be resumed: it holds no parts of a run")
        held = before.get("settings")
        held = held if isinstance(held, dict) else {}
        for name in sorted({*held, *self._settings}):
            theirs, ours = held.get(name), self._settings.get(name)
            if theirs != ours:
                raise ConfigError(
                    f"'{path}' cannot be resumed: its {name} is {theirs!r:.80}, this call's is "
                    f"{ours!r:.80}; give another file"
                )
        self._parts = dict(parts)
        self._sessions = list(before["sessions"])

    def measure(self, work: Mapping[str, tuple[float, Callable[[], Part]]]) -> dict[str, Any]:
        """Measure all parts that are missing, in this order, and return the document.

        `work` names for each part about how long it takes, in units of its own, and what measures
        it. Progress goes to stderr: one line a part, with the time that is left.
        """
        missing = {name: each for name, each in work.items() if name not in self._parts}
        if kept := len(work) - len(missing):
            print(f"{kept} of {len(work)} parts are kept", file=sys.stderr)
        left = sum(units for units, _ in missing.values())
        done = 0.0
        for name, (units, call) in missing.items():
            start = time.perf_counter()
            self._parts[name] = call()
            now = time.perf_counter()
            left, done = left - units, done + units
            self._session["seconds"] = round(now - self._start, 1)
            self._session["parts"] += 1
            self._write(is_complete=False)
            rest = f", about {(now - self._start) / done * left:.0f} s left" if left else ""
            place = sum(each in self._parts for each in work)
            print(
                f"[{place}/{len(work)}] {name}: {now - start:.1f} s{rest}",
                file=sys.stderr,
                flush=True,
            )
        return self._write(is_complete=True)

    def _write(self, *, is_complete: bool) -> dict[str, Any]:
        seconds = sum(float(session["seconds"]) for session in self._sessions)
        document = {
            **self._summarize(self._parts),
            "schema_version": 1,
            "command": self._sessions[0]["command"],
            "started": self._sessions[0]["started"],
            "seconds": round(seconds, 1),
            "is_complete": is_complete,
            "settings": self._settings,
            "sessions": self._sessions,
            "parts": self._parts,
        }
        if self._path is not None:
            write_json(self._path, document)
        return document


def _document(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None where there is none."""
    try:
        document = json.loads(path.read_text(), object_pairs_hook=without_repeats)
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
