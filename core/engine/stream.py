"""Deltas between the engine's reader and the consumer of one request."""

from __future__ import annotations

import asyncio

from ..errors import OctavoError
from .output import RequestOutput


class DeltaStream:
    """Deltas on their way to one generator. What is not fetched in time is merged, so at most one waits.

    Attributes:
        aborted: whether it is to be aborted as soon as the engine has it.
    """

    def __init__(self) -> None:
        self.aborted = False
        self._delta: RequestOutput | None = None
        self._error: OctavoError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: RequestOutput) -> None:
        """Hands over a delta."""
        if self._delta is None:
            self._delta = delta
        else:
            self._delta.merge(delta)
        self._wake()

    def fail(self, error: OctavoError) -> None:
        """Makes `get` raise, after what was handed over before."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """Everything that is new; waits for it."""
        while self._delta is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta, self._delta = self._delta, None
        return delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
