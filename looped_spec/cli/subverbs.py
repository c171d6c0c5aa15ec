"""Verbs below a verb, as in `looped-spec bench load`."""

from __future__ import annotations

import argparse
from typing import Any


class StrictParser(argparse.ArgumentParser):
    """A parser that refuses unknown arguments itself: the one above it knows other flags."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and end with an error where anything is left."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown
