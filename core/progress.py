"""Progress of an engine's start, on a terminal's stderr."""

from __future__ import annotations

from tqdm import tqdm


class StartProgress:
    """A bar for each phase (loading weights, warming up); nothing where stderr is not a terminal."""

    def __init__(self) -> None:
        self._phase = ""
        self._bar: tqdm | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Shows that `done` of `total` pieces of a phase are done."""
        if phase != self._phase or self._bar is None:
            self.close()
            self._phase = phase
            self._bar = tqdm(total=total, desc=phase, leave=False, disable=None)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Clears the line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
