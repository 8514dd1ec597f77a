"""Ctrl-C that waits for a good moment."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Holds a first Ctrl-C back until `check`, so that it never lands in the middle of a step; a second one is at once.

    Does nothing outside of the main thread or where the program handles SIGINT itself: there no KeyboardInterrupt
    would arise.
    """

    def __init__(self) -> None:
        self._pending = False
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hold)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if kind is None:
                self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed since."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
