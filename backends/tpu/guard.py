"""Notices what JAX compiles by itself, outside the prepared programs, once the engine is ready."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax

from ...core.late import LateCompiles

_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileGuard:
    """Counts compilations that happen inside a backend's calls.

    Only inside them, because others may rightly compile at any time in the same process, an engine that starts for
    example. JAX compiles in the thread that asks for it, so thread and call tell whose compilation it is.
    """

    def __init__(self, late: LateCompiles) -> None:
        self._late = late
        self._thread: int | None = None
        self._seen = 0

    def start(self) -> None:
        """Begins to listen, after warm-up."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def stop(self) -> None:
        """Ends it, if it was begun."""
        with suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration: float, **_: object) -> None:
        if event == _COMPILED and threading.get_ident() == self._thread:
            self._seen += 1

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a call of the backend.

        Raises:
            CompileAfterReadyError: something was compiled, and that is an error. The call was finished before.
        """
        self._thread, self._seen = threading.get_ident(), 0
        try:
            yield
        finally:
            self._thread = None
        if self._seen:
            self._late.add(f"JAX compiled {self._seen} programs", self._seen)
