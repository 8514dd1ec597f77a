"""A thread that makes all calls to this host's backend, so that one which hangs hangs nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Worker:
    """Runs functions one after another.

    Its thread is a daemon: where another host is lost in the middle of a collective, a call may never return.

    Args:
        on_done: called in the thread with (number of the job, result, exception or None).
    """

    def __init__(self, on_done: Callable[[int, Any, BaseException | None], None]) -> None:
        self._jobs: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()
        self._on_done = on_done
        threading.Thread(target=self._run, name="octavo-backend", daemon=True).start()

    def start(self, number: int, job: Callable[[], Any]) -> None:
        """Queues a job."""
        self._jobs.put((number, job))

    def end(self) -> None:
        """Ends the thread once it is idle. Does not wait for it."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, function = job
            result, failure = None, None
            try:
                result = function()
            except BaseException as error:  # told to the thread that waits for it
                failure = error
            self._on_done(number, result, failure)
