"""Progress of an engine's start, on a terminal's stderr."""

from __future__ import annotations

import sys


class Progress:
    """Shows (phase, done, total) on one line; says nothing where stderr is not a terminal."""

    def __init__(self) -> None:
        self._shown = ""
        self._terminal = sys.stderr.isatty()

    def __call__(self, phase: str, done: int, total: int) -> None:
        text = f"{phase}: {100 * done // max(total, 1)} %"
        if self._terminal and text != self._shown:
            self._shown = text
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clears the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
